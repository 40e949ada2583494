"""The examples of several processes lose one, and resume on fewer of them as if nothing had happened."""

import functools
import itertools
import math
import re
import sys
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from flax import nnx

from support.documents.example_scripts import EXAMPLES, lines_of, loaded
from support.processes.worker_pools import still_there

pytestmark = [pytest.mark.third_party, pytest.mark.slow]

LINE = re.compile(r"step (\d+): loss ([\d.]+), batch (\w+)\n")


class Step(NamedTuple):
    loss: float
    batch: str


def steps_in(lines: list[str]) -> tuple[dict[int, Step], int]:
    """Returns the steps that a training reported, and the step that it resumed at, 0 if at none."""
    steps = {int(step[1]): Step(float(step[2]), step[3]) for line in lines if (step := LINE.fullmatch(line))}
    resumed = re.search(r"^Resumes from the checkpoint of step (\d+)\.$", "".join(lines), re.MULTILINE)
    return steps, int(resumed[1]) if resumed else 0


def assert_resumes(batches: dict[int, str], command: list[str], output: Path, kill_at: int) -> None:
    """Loses one of two processes and stops the other, resumes with one: the batches and losses are those expected.

    The losses are those of the lost run from the checkpoint on, because the batches are.
    """

    def lose_one(line: str) -> bool:
        if is_last := line.startswith(f"step {kill_at}:"):
            (lost,) = processes_with("--process=1", f"--output={output}")
            lost.kill()
            assert still_there([lost.pid]) == []
        return is_last

    command = [*command, f"--output={output}"]
    killed, _ = steps_in(lines_of([*command, "--processes=2"], lose_one))
    resumed, resumed_at = steps_in(lines_of([*command, "--processes=1"]))
    again = killed.keys() & resumed.keys()

    assert 0 < resumed_at < kill_at
    assert {number: step.batch for number, step in [*killed.items(), *resumed.items()]} == batches
    assert kill_at in again
    for number in again:
        assert killed[number].batch == resumed[number].batch
        assert math.isclose(killed[number].loss, resumed[number].loss, rel_tol=1e-3)


def processes_with(*words: str) -> list[psutil.Process]:
    """Returns the processes of this machine whose command has all of some words."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if {*words} <= {*(process.info["cmdline"] or ())}]


def checksums(loader: Iterable[Any], name: str, steps: range) -> dict[int, str]:
    """Returns the checksums of one leaf of the batches before some steps, as the examples report them."""
    batches = enumerate(itertools.islice(loader, steps.stop - 1), 1)
    return {step: f"{zlib.crc32(batch[name].tobytes()):08x}" for step, batch in batches if step in steps}


def test_images_resume_on_fewer_processes(tmp_path: Path) -> None:
    """One process resumes with the batches of two, one of which was lost: they are those of a single device."""
    with loaded("multihost") as example:
        batches = checksums(example.training_loader(), "image", range(10, 21, 10))

    command = [sys.executable, str(EXAMPLES / "multihost.py"), "--steps=20", "--checkpoint_every=3"]
    assert_resumes(batches, command, tmp_path, 10)


def test_rows_of_text_resume_on_fewer_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process resumes with the batches of two, of a mixture whose weights change meanwhile. The text is short."""
    tokens = tmp_path / "tokens"
    with loaded("pretrain_text") as example:
        for corpus in (example.code, example.prose):
            monkeypatch.setattr(example, corpus.__name__, functools.partial(itertools.islice, corpus(), 100))
        example.write_tokens(tokens)
        batches = checksums(example.training_loader(tokens, 6), "tokens", range(1, 7))

    command = [sys.executable, str(EXAMPLES / "pretrain_text.py"), "--steps=6", "--checkpoint_every=2"]
    assert_resumes(batches, command, tmp_path, 5)


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
