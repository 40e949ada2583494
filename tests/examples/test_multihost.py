"""The example of several hosts does what it promises, and would notice if it did not."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from example_scripts import EXAMPLES, loaded
from PIL import Image

pytestmark = pytest.mark.third_party

EXAMPLE = EXAMPLES / "multihost.py"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """Returns the script as a module."""
    with loaded("multihost") as module:
        yield module


def test_four_processes_killed_and_resumed_as_two_are_four_undisturbed(tmp_path: Path) -> None:
    """One command shows it, draws the losses, clears the checkpoints away and leaves nothing else."""
    command = [sys.executable, str(EXAMPLE), f"--output={tmp_path}", "--steps=40", "--checkpoint_every=5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 40 global batches of B and C are those of A" in done.stdout
    assert "<- C resumes, 2 processes" in done.stdout
    assert "<- B is killed" in done.stdout
    assert "DIFFER" not in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits.array_record", "multihost.png"]
    with Image.open(tmp_path / "multihost.png") as plot:
        assert len(np.unique(np.asarray(plot.convert("L")))) > 2


@pytest.mark.parametrize("field", ["loss", "records", "pixels"])
def test_a_resume_that_differs_fails(example: ModuleType, field: str) -> None:
    """Another loss than rounding explains, another record or another pixel ends in an error that names the step."""
    whole = {number: example.Step(number, 1 / (number + 1), number, number) for number in range(20)}
    killed = {number: whole[number] for number in range(12)}
    resumed = {number: whole[number] for number in range(10, 20)}
    resumed[16] = whole[16]._replace(loss=whole[16].loss * (1 + 1e-6))
    example.conclude(whole, killed, resumed)
    resumed[15] = whole[15]._replace(**{field: 99})
    with pytest.raises(SystemExit) as exit_:
        example.conclude(whole, killed, resumed)
    assert "FAILED" in str(exit_.value)
    assert f"got {resumed[15]}" in str(exit_.value)


def test_steps_that_are_missing_fail(example: ModuleType) -> None:
    """Every step of the undisturbed run must come, from B or from C."""
    whole = {number: example.Step(number, 0.5, number, number) for number in range(4)}
    assert example.differences(whole, whole) == []
    assert example.differences(whole, {0: whole[0]}, {2: whole[2], 3: whole[3]}) == [
        f"expected {whole[1]}, got nothing"
    ]
    assert example.differences(whole, whole | {4: whole[3]._replace(number=4)}) != []
