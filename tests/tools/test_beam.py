"""`millstream convert --runner=…`: the same files as without, written by the workers of an Apache Beam pipeline."""

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.faults.user_faults import WAIT_SECONDS
from support.processes.commands import COMMAND, run

RUNNER = ["--runner=DirectRunner", "--jobs=2"]
SHARDS = 12
TARGETS = [f"b-{number:05}-of-{SHARDS:05}.array_record" for number in range(SHARDS)]


@pytest.fixture(autouse=True)
def beam() -> None:
    """Skips where Beam is not installed: see CONTRIBUTING.md."""
    pytest.importorskip("apache_beam", reason="pip install 'millstream[beam]'")


def data(folder: Path, records: int = 4_000) -> None:
    """Writes lines of JSON."""
    lines = [json.dumps({"number": number, "text": str(number) * 40}) for number in range(records)]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")


def written(folder: Path) -> dict[str, bytes]:
    """Returns the files that were written."""
    return {path.name: path.read_bytes() for path in folder.glob("b-*")}


def expected(folder: Path) -> dict[str, bytes]:
    """Returns the files as they are without Beam."""
    plain = folder / "plain"
    plain.mkdir()
    run("convert", "a.jsonl", plain / "b.array_record", f"--shards={SHARDS}", "--jobs=1", folder=folder)
    return written(plain)


def test_several_processes_of_beam_write_the_same_files(tmp_path: Path) -> None:
    """To the byte; beside them, it says how many records each has, and of how many bytes; nothing else is left."""
    data(tmp_path)
    printed, _ = run("convert", "a.jsonl", "b.array_record", f"--shards={SHARDS}", *RUNNER, folder=tmp_path)

    assert "11 more: 4,000 records" in printed
    assert written(tmp_path) == expected(tmp_path)
    contents = json.loads((tmp_path / ".b.array_record.contents.json").read_text())["files"]
    assert list(contents) == TARGETS
    assert sum(one["records"] for one in contents.values()) == 4_000
    assert sum(one["num_bytes"] for one in contents.values()) == (tmp_path / "a.jsonl").stat().st_size - 4_000
    assert len(list(tmp_path.glob(".b-*.lengths-*.npy"))) == SHARDS
    assert not list(tmp_path.glob(".*.conversion"))


def beam_processes(command: int) -> set[int]:
    """Returns the processes that the DirectRunner has started for a command."""
    found = set()
    with contextlib.suppress(psutil.NoSuchProcess):
        for process in psutil.Process(command).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                words = process.cmdline()
                if words[1:3] == ["-m", "apache_beam.runners.worker.sdk_worker_main"]:
                    found.add(process.pid)
    return found


def test_killed_processes_of_beam_are_an_error_when_it_happens_again(tmp_path: Path) -> None:
    """Once, the command writes what is left by itself; twice, it says that the same command again does that."""
    data(tmp_path, 40_000)
    slow = ["convert", "a.jsonl", "b.array_record", f"--shards={SHARDS}", "--compression=zstd:19", *RUNNER]
    with subprocess.Popen([*COMMAND, *slow], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        killing = threading.Thread(target=kill_twice, args=[process, tmp_path])
        killing.start()
        _, told = process.communicate(timeout=4 * WAIT_SECONDS)
        killing.join()
    assert process.returncode == 1
    assert "millstream: Processes of the DirectRunner were lost, again and again." in told
    before = {name: (tmp_path / name).stat().st_ino for name in written(tmp_path)}
    assert 0 < len(before) < SHARDS

    with subprocess.Popen([*COMMAND, *slow], cwd=tmp_path, stderr=subprocess.DEVNULL, text=True) as process:
        os.kill(max(seen_at_work(process, tmp_path)), signal.SIGKILL)
        assert process.wait(4 * WAIT_SECONDS) == 0
    assert {name: (tmp_path / name).stat().st_ino for name in before} == before
    plain = tmp_path / "plain"
    plain.mkdir()
    alone = ["--compression=zstd:19", "--jobs=1", f"--shards={SHARDS}"]
    run("convert", "a.jsonl", plain / "b.array_record", *alone, folder=tmp_path)
    assert written(tmp_path) == written(plain)
    assert not list(tmp_path.glob(".*.conversion"))


def kill_twice(process: subprocess.Popen[Any], folder: Path) -> None:
    """Kills all processes of Beam, and those that replace them."""
    for _ in range(2):
        for pid in seen_at_work(process, folder):
            os.kill(pid, signal.SIGKILL)


def seen_at_work(process: subprocess.Popen[Any], folder: Path) -> set[int]:
    """Returns the processes of Beam, when they have written another file."""
    files = written(folder)
    while len(written(folder)) == len(files) or not (pids := beam_processes(process.pid)):
        assert process.poll() is None
    return pids


def test_what_a_killed_command_leaves_undone_is_done_by_the_same_command(tmp_path: Path) -> None:
    """All that it has started ends with it; then what is there is whole, and stays."""
    data(tmp_path, 40_000)
    slow = ["convert", "a.jsonl", "b.array_record", f"--shards={SHARDS}", "--compression=zstd:19", *RUNNER]
    with subprocess.Popen([*COMMAND, *slow], cwd=tmp_path, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + WAIT_SECONDS
        while not written(tmp_path):
            assert time.monotonic() < deadline
        started = psutil.Process(process.pid).children(recursive=True)
        assert len(beam_processes(process.pid)) == 2
        process.kill()
    assert psutil.wait_procs(started, timeout=WAIT_SECONDS)[1] == []
    before = {name: (tmp_path / name).stat().st_ino for name in written(tmp_path)}
    assert 0 < len(before) < SHARDS
    run(*slow, folder=tmp_path)

    assert {name: (tmp_path / name).stat().st_ino for name in before} == before


def test_a_file_that_was_damaged_meanwhile_is_found(tmp_path: Path) -> None:
    """Files that an earlier run has finished are compared as well: one with other content is removed, and named."""
    data(tmp_path)
    arguments = ["convert", "a.jsonl", "b.array_record", f"--shards={SHARDS}"]
    run(*arguments, "--jobs=1", folder=tmp_path)
    good = written(tmp_path)
    folder = tmp_path / ".b.array_record.conversion"
    # As it is when it was killed before its end: with the plan and the notes that were there.
    (tmp_path / TARGETS[3]).unlink()
    code = f"""
import os, shutil
from pathlib import Path
from millstream.tools import conversion
kept = shutil.rmtree
conversion.shutil.rmtree = lambda path: None
from millstream.tools.command_line import main
for name in {TARGETS!r}:
    Path(name).unlink(missing_ok=True)
main({[*arguments, "--jobs=1"]!r})
os.unlink({TARGETS[3]!r})
os.replace({TARGETS[4]!r}, {TARGETS[5]!r})
os.link({TARGETS[6]!r}, {TARGETS[4]!r})
"""
    subprocess.run([COMMAND[0], "-c", code], cwd=tmp_path, check=True)
    assert folder.exists()
    for jobs, damaged in enumerate((TARGETS[4], TARGETS[5]), start=1):
        done = subprocess.run(
            [*COMMAND, *arguments, "--runner=DirectRunner", f"--jobs={jobs}"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 1
        told = done.stderr.splitlines()[-1]
        assert told.startswith("millstream: ")
        assert f"{damaged}' was removed" in told
    run(*arguments, "--runner=DirectRunner", "--jobs=1", folder=tmp_path)
    assert written(tmp_path) == good
