"""The examples of several processes resume on fewer of them as if nothing had happened."""

import math
import re
import sys
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from support.documents.example_scripts import EXAMPLES, lines_of, loaded

pytestmark = pytest.mark.third_party

LINE = re.compile(r"step (\d+): loss ([\d.]+), batch (\w+)\n")


class Step(NamedTuple):
    loss: float
    batch: str


def steps_in(lines: list[str]) -> tuple[dict[int, Step], int]:
    """Returns the steps that a training reported, and the step that it resumed at, 0 if at none."""
    steps = {int(step[1]): Step(float(step[2]), step[3]) for line in lines if (step := LINE.fullmatch(line))}
    resumed = re.search(r"^Resumes from the checkpoint of step (\d+)\.$", "".join(lines), re.MULTILINE)
    return steps, int(resumed[1]) if resumed else 0


def assert_resumes(whole: dict[int, Step], command: list[str], kill_at: int) -> None:
    """Kills two processes, resumes with one: each global batch and each loss is that of an undisturbed run."""
    killed, _ = steps_in(lines_of([*command, "--processes=2"], lambda line: line.startswith(f"step {kill_at}:")))
    resumed, resumed_at = steps_in(lines_of([*command, "--processes=1"]))

    assert 0 < resumed_at <= kill_at
    assert killed.keys() | resumed.keys() == whole.keys()
    for number, step in [*killed.items(), *resumed.items()]:
        assert step.batch == whole[number].batch
        assert math.isclose(step.loss, whole[number].loss, rel_tol=1e-3)


def test_images_resume_on_fewer_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One process resumes with the batches of two that were killed; the undisturbed run has a single device."""
    with loaded("multihost") as example:
        example.train(tmp_path / "whole", steps=20, checkpoint_every=21)
    whole, _ = steps_in(capsys.readouterr().out.splitlines(keepends=True))

    assert max(whole) == 20
    script, folder = EXAMPLES / "multihost.py", tmp_path / "killed"
    assert_resumes(whole, [sys.executable, f"{script}", "--steps=20", "--checkpoint_every=3", f"--output={folder}"], 10)


def test_rows_of_text_resume_on_fewer_processes(tmp_path: Path) -> None:
    """One process resumes with the batches of two that were killed, of a mixture whose weights change meanwhile."""
    command = [sys.executable, str(EXAMPLES / "pretrain_text.py"), "--steps=6"]
    # The tokens are written once.
    whole, _ = steps_in(lines_of([*command, "--processes=1", "--checkpoint_every=7", f"--output={tmp_path}"]))

    assert max(whole) == 6
    assert_resumes(whole, [*command, "--checkpoint_every=2", f"--output={tmp_path}"], 5)


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
