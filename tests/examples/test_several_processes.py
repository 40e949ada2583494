"""The examples of several processes resume on fewer of them as if nothing had happened."""

import math
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from support.documents.example_scripts import EXAMPLES, loaded

pytestmark = pytest.mark.third_party

LINE = re.compile(r"step (\d+): loss ([\d.]+), batch (\w+)\n")


class Step(NamedTuple):
    loss: float
    batch: str


def run(command: list[str], kill_at: int | None = None) -> tuple[dict[int, Step], int]:
    """Runs a program and all that it starts, until it ends or has reported a step.

    Returns:
        The steps that it reported, and the step that it resumed at, 0 if at none.
    """
    steps, resumed_at = {}, 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            for line in process.stdout or ():
                if resumes := re.fullmatch(r"Resumes from the checkpoint of step (\d+)\.\n", line):
                    resumed_at = int(resumes[1])
                elif step := LINE.fullmatch(line):
                    steps[int(step[1])] = Step(float(step[2]), step[3])
                if kill_at in steps:
                    break
        finally:
            if kill_at is not None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == (0 if kill_at is None else -signal.SIGKILL)
    return steps, resumed_at


@pytest.mark.parametrize(
    ("script", "steps", "kill_at", "checkpoint_every"), [("multihost.py", 20, 10, 3), ("pretrain_text.py", 6, 5, 2)]
)
def test_one_process_resumes_with_the_batches_of_two_that_were_killed(
    script: str, steps: int, kill_at: int, checkpoint_every: int, tmp_path: Path
) -> None:
    """Two processes are killed, one resumes: each global batch and each loss is that of one that was not disturbed."""
    arguments = [sys.executable, str(EXAMPLES / script), f"--steps={steps}", f"--checkpoint_every={checkpoint_every}"]

    def command(count: int, folder: str) -> list[str]:
        return [*arguments, f"--processes={count}", f"--output={tmp_path / folder}"]

    if script == "pretrain_text.py":
        (tmp_path / "whole").mkdir()
        (tmp_path / "killed").mkdir()
        (tmp_path / "killed/tokens").symlink_to(tmp_path / "whole/tokens")  # written once
    whole, _ = run(command(1, "whole"))
    killed, _ = run(command(2, "killed"), kill_at)
    resumed, resumed_at = run(command(1, "killed"))

    assert max(whole) == steps
    assert 0 < resumed_at <= kill_at
    assert killed.keys() | resumed.keys() == whole.keys()
    for number, step in [*killed.items(), *resumed.items()]:
        assert step.batch == whole[number].batch
        assert math.isclose(step.loss, whole[number].loss, rel_tol=1e-3)


def test_a_token_is_predicted_from_those_before_it_in_its_own_document() -> None:
    """Other tokens of its document that come later, and other documents in the row, change nothing."""
    with loaded("pretrain_text") as example:
        length = example.ROW_LENGTH
        model = example.Transformer(nnx.Rngs(0))
    ends = [200, 350, length]
    packed = {
        "tokens_segment_ids": np.repeat([1, 2, 0], np.diff([0, *ends])),
        "tokens_positions": np.concatenate([np.arange(count) for count in np.diff([0, *ends])]),
    }
    tokens = np.random.default_rng(0).integers(0, example.VOCABULARY, length)

    compiled = nnx.jit(lambda model, batch: model(batch))

    def logits(tokens: np.ndarray) -> np.ndarray:
        batch = {name: jnp.asarray(leaf[None]) for name, leaf in {**packed, "tokens": tokens}.items()}
        return np.asarray(compiled(model, batch)[0])

    changed = tokens.copy()
    changed[[5, 300]] ^= 1
    is_other = (logits(changed) != logits(tokens)).any(axis=1)
    assert is_other[5:200].any()
    assert is_other[300:350].any()
    assert not is_other[:5].any()
    assert not is_other[200:300].any()
    assert not is_other[350:].any()
