"""The main example does what it promises, and would notice if it did not."""

import math
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from example_scripts import EXAMPLES, loaded
from PIL import Image

from millstream.sources import ArrayRecordDataSource

pytestmark = pytest.mark.third_party

EXAMPLE = EXAMPLES / "train_digits.py"


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    """Returns the script as a module."""
    with loaded("train_digits") as module:
        yield module


def test_the_demonstration_succeeds_and_leaves_only_its_records_and_a_plot(tmp_path: Path) -> None:
    """B, killed in mid-epoch, and C, resumed from B's checkpoint, are A; checkpoints are cleared away."""
    command = [sys.executable, str(EXAMPLE), f"--output={tmp_path}"]
    flags = ["--steps=400", "--checkpoint_every=10", "--kill_at=75"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 400 steps of B and C are those of A" in done.stdout
    assert "<- C resumes from the checkpoint" in done.stdout
    assert "<- B is killed" in done.stdout
    assert "DIFFER" not in done.stdout
    accuracy = re.search(r"held-out digits: ([0-9.]+)%", done.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) > 80
    assert done.stderr == ""
    assert {path.name for path in tmp_path.iterdir()} == {"digits", "train_digits.png"}
    with Image.open(tmp_path / "train_digits.png") as plot:
        plot.load()
        assert plot.format == "PNG"


def test_records_are_written_once_and_hold_every_digit(example: ModuleType, tmp_path: Path) -> None:
    """The files hold 1,797 decodable digits, no half file lies about, and a second call changes nothing."""
    example.write_digits(tmp_path)
    written = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    example.write_digits(tmp_path)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written
    assert {path.suffix for path in tmp_path.iterdir()} == {".array_record"}
    with ArrayRecordDataSource(str(tmp_path / "*.array_record")) as source:
        digits = [example.decode(record) for record in source.__getitems__(range(len(source)))]
    assert len(digits) == 1797
    assert {digit["image"].shape for digit in digits} == {(8, 8)}
    assert {int(digit["label"]) for digit in digits} == set(range(10))
    assert max(float(digit["image"].max()) for digit in digits) == 1.0


def test_a_killed_run_leaves_no_half_file(example: ModuleType, tmp_path: Path) -> None:
    """What stops the writing half way leaves nothing under the file's name, and the next run writes it."""

    def interrupted() -> Iterator[bytes]:
        yield b"one"
        raise KeyboardInterrupt

    path = tmp_path / "train-0-of-4.array_record"
    with pytest.raises(KeyboardInterrupt):
        example.write_records(path, interrupted())
    assert not path.exists()
    example.write_records(path, [b"one", b"two"])
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("field", ["loss", "records", "pixels"])
def test_a_resume_that_differs_in_one_bit_fails(example: ModuleType, field: str) -> None:
    """A loss that differs in its last bit, another record or another pixel ends in an error that names the step."""
    whole = {number: example.Step(number, 1 / (number + 1), number, number) for number in range(20)}
    killed = {number: whole[number] for number in range(12)}
    resumed = {number: whole[number] for number in range(10, 20)}
    example.conclude(whole, killed, resumed)
    nudged = float(np.nextafter(np.float32(whole[15].loss), np.float32(1))) if field == "loss" else 99
    resumed[15] = whole[15]._replace(**{field: nudged})
    with pytest.raises(SystemExit) as exit_:
        example.conclude(whole, killed, resumed)
    assert "FAILED" in str(exit_.value)
    assert f"got {resumed[15]}" in str(exit_.value)


def test_steps_that_are_missing_too_many_or_not_numbers_fail(example: ModuleType) -> None:
    """Every step of the undisturbed run must come, no other may, and NaN is equal to nothing."""
    whole = {number: example.Step(number, 0.5, number, number) for number in range(4)}
    assert example.differences(whole, whole) == []
    assert example.differences(whole, {0: whole[0]}, {2: whole[2]}) == [
        f"expected {whole[1]}, got nothing",
        f"expected {whole[3]}, got nothing",
    ]
    extra = example.Step(4, 0.5, 4, 4)
    assert example.differences(whole, whole | {4: extra}) == [f"expected None, got {extra}"]
    lost = whole | {1: whole[1]._replace(loss=math.nan)}
    assert len(example.differences(lost, whole)) == 1
