"""`millstream convert --runner=…`: the same files as without, written by the workers of an Apache Beam pipeline."""

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from commands import COMMAND, run
from faults import WAIT_SECONDS

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


def test_what_killed_workers_leave_undone_is_done_by_the_same_command(tmp_path: Path) -> None:
    """A worker is killed, and the rest, which the DirectRunner would have wait for it: what is there is whole."""
    data(tmp_path, 40_000)
    slow = ["convert", "a.jsonl", "b.array_record", f"--shards={SHARDS}", "--compression=zstd:19", *RUNNER]
    with subprocess.Popen(
        [*COMMAND, *slow], cwd=tmp_path, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True
    ) as process:
        deadline = time.monotonic() + WAIT_SECONDS
        while not written(tmp_path):
            assert time.monotonic() < deadline
        mine = psutil.Process(process.pid).children(recursive=True)
        workers = [one for one in mine if any("sdk_worker_main" in word for word in one.cmdline())]
        assert len(workers) >= 2
        workers[-1].kill()
        for one in [process, *mine]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(one.pid, signal.SIGKILL)
    before = {name: (tmp_path / name).stat().st_ino for name in written(tmp_path)}
    assert 0 < len(before) < SHARDS
    run(*slow, folder=tmp_path)

    assert {name: (tmp_path / name).stat().st_ino for name in before} == before
    plain = tmp_path / "plain"
    plain.mkdir()
    alone = ["--compression=zstd:19", "--jobs=1", f"--shards={SHARDS}"]
    run("convert", "a.jsonl", plain / "b.array_record", *alone, folder=tmp_path)
    assert written(tmp_path) == written(plain)


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
    for damaged in (TARGETS[4], TARGETS[5]):
        done = subprocess.run(
            [*COMMAND, *arguments, "--runner=DirectRunner", "--jobs=1"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode != 0
        assert f"{damaged}' was removed" in done.stderr
    run(*arguments, "--runner=DirectRunner", "--jobs=1", folder=tmp_path)
    assert written(tmp_path) == good
