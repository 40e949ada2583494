"""The checks that the demonstrations rest on notice a resumed run that differs from the undisturbed one."""

import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from millstream.sources import ArrayRecordDataSource
from support.documents.example_scripts import EXAMPLES, loaded

pytestmark = pytest.mark.third_party


@pytest.fixture(scope="module")
def around() -> Iterator[ModuleType]:
    """Returns the script as a module."""
    with loaded("around_training") as module:
        yield module


def test_records_are_written_once_and_hold_every_digit(around: ModuleType, tmp_path: Path) -> None:
    """The files hold 1,797 digits, no half-written file is left, and a second call changes nothing."""
    around.write_digits(tmp_path)
    written = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    around.write_digits(tmp_path)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == written
    assert {path.suffix for path in tmp_path.iterdir()} == {".array_record"}
    with (
        loaded("train_digits") as example,
        ArrayRecordDataSource(str(tmp_path / "*.array_record")) as source,
    ):
        digits = [example.decode(record) for record in source.__getitems__(range(len(source)))]
    assert len(digits) == 1797
    assert {digit["image"].shape for digit in digits} == {(8, 8)}
    assert {int(digit["label"]) for digit in digits} == set(range(10))
    assert max(float(digit["image"].max()) for digit in digits) == 1.0


def test_a_killed_run_leaves_no_half_file(around: ModuleType, tmp_path: Path) -> None:
    """A run killed half-way through writing leaves nothing under the file's name, and the next run writes it."""

    def interrupted() -> Iterator[bytes]:
        yield b"one"
        raise KeyboardInterrupt

    path = tmp_path / "train-0-of-4.array_record"
    with pytest.raises(KeyboardInterrupt):
        around.write_records(path, interrupted())
    assert not path.exists()
    around.write_records(path, [b"one", b"two"])
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("tolerance", [0, 1e-3])
@pytest.mark.parametrize("field", ["loss", "records", "pixels"])
def test_a_resume_that_differs_fails(around: ModuleType, field: str, tolerance: float) -> None:
    """A loss that differs by more than the tolerance, another record or pixel ends in an error that names the step."""
    whole = {number: around.Step(number, 1 / (number + 1), number, number) for number in range(20)}
    killed = {number: whole[number] for number in range(12)}
    resumed = {number: whole[number] for number in range(10, 20)}
    if tolerance:
        resumed[16] = whole[16]._replace(loss=whole[16].loss * (1 + tolerance / 1000))
    around.conclude(whole, killed, resumed, tolerance)
    nudged = float(np.nextafter(np.float32(whole[15].loss), np.float32(1))) + 2 * tolerance
    resumed[15] = whole[15]._replace(**{field: nudged if field == "loss" else 99})
    with pytest.raises(SystemExit) as exit_:
        around.conclude(whole, killed, resumed, tolerance)
    assert "FAILED" in str(exit_.value)
    assert f"got {resumed[15]}" in str(exit_.value)


def test_steps_that_are_missing_too_many_or_not_numbers_fail(around: ModuleType) -> None:
    """Every step of the undisturbed run must be there and no other may be, and NaN is equal to nothing."""
    whole = {number: around.Step(number, 0.5, number, number) for number in range(4)}
    assert around.differences(whole, whole) == []
    assert around.differences(whole, {0: whole[0]}, {2: whole[2]}) == [
        f"expected {whole[1]}, got nothing",
        f"expected {whole[3]}, got nothing",
    ]
    extra = around.Step(4, 0.5, 4, 4)
    assert around.differences(whole, whole | {4: extra}) == [f"expected None, got {extra}"]
    lost = whole | {1: whole[1]._replace(loss=math.nan)}
    assert len(around.differences(lost, whole)) == 1


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_processes_of_a_run_end_with_the_one_that_started_them(end: signal.Signals, tmp_path: Path) -> None:
    """However the demonstration is ended, no process of it goes on training."""
    script, alive = tmp_path / "script.py", tmp_path / "alive"
    script.write_text(
        "import pathlib, threading\n"
        "from around_training import arguments, watch\n"
        "if arguments('', checkpoints='').checkpoints:\n"
        f"    with pathlib.Path({str(alive)!r}).open('w') as file:\n"
        "        file.write('here')\n"
        "        file.flush()\n"
        "        threading.Event().wait()\n"
        "else:\n"
        "    watch('run', [['--checkpoints=one'], ['--checkpoints=two']], 1)\n"
    )
    os.mkfifo(alive)
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES)}
    with subprocess.Popen([sys.executable, str(script)], env=environment) as process, alive.open() as file:
        # Opened and written by two processes, which both hold it open as long as they live.
        assert file.read(8) == "herehere"
        process.send_signal(end)
        assert file.read() == ""
    assert process.returncode == -end
