"""Files of spans: what happens to the file, and to its index, while a source is used."""

import logging
import os
import pickle
import pty
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.errors import DataSourceError
from millstream.sources import TFRecordDataSource
from millstream.sources.files import byte_files, offset_index, progress
from millstream.sources.files import multi_file as files
from millstream.sources.files.progress import CancelledScanError, Progress
from support.files.record_files import every_record, write_tfrecord
from support.processes.process_tree import open_descriptors

RECORDS = [b"record %d" % number for number in range(100)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of a hundred records."""
    return write_tfrecord(tmp_path / "a.tfrecord", RECORDS)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("home", ["xdg", "home"])
def test_the_cache_is_where_others_have_theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    """The cache is `$XDG_CACHE_HOME/millstream`, else `~/.cache/millstream`."""
    monkeypatch.delenv("MILLSTREAM_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg") if home == "xdg" else "relative")
    path = write_tfrecord(tmp_path / ("a" * 250), RECORDS)
    TFRecordDataSource(path).close()
    folder = tmp_path / "xdg" if home == "xdg" else tmp_path / "home" / ".cache"

    assert len(list((folder / "millstream").iterdir())) == 1


def test_processes_that_make_the_index_at_once_do_not_disturb_each_other(path: Path, tmp_path: Path) -> None:
    """Each reads every record, and one index is left, and nothing else."""
    code = f"import millstream; print(len(list(millstream.TFRecordDataSource({str(path)!r}))))"
    options: Any = {"stdout": subprocess.PIPE, "env": os.environ | {"MILLSTREAM_CACHE": str(tmp_path / "cache")}}
    running = [subprocess.Popen([sys.executable, "-c", code], text=True, **options) for _ in range(2)]

    assert [process.communicate()[0] for process in running] == ["100\n"] * 2
    assert names_in(tmp_path) == [path.name, "cache"]
    assert len(names_in(tmp_path / "cache")) == 1


@pytest.mark.parametrize("carried_files", [0, 2, 4])
def test_a_pickled_source_carries_small_indices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, carried_files: int
) -> None:
    """A copy reads the first files, up to a limit in bytes, without an index on disk, and indexes the others again."""
    cache = tmp_path / "cache"
    monkeypatch.setenv("MILLSTREAM_CACHE", str(cache))
    for part in range(4):
        write_tfrecord(tmp_path / f"{part}.tfrecord", RECORDS[25 * part : 25 * part + 25])
    monkeypatch.setattr(offset_index, "CARRIED_BYTES", carried_files * 8 * 26)
    with TFRecordDataSource(tmp_path / "*.tfrecord") as source:
        pickled = pickle.dumps(source)
    for index in [file for file in cache.rglob("*") if file.is_file()]:
        index.unlink()

    with pickle.loads(pickled) as copy:
        assert every_record(copy) == RECORDS
        again = pickle.dumps(copy)
    assert sum(file.is_file() for file in cache.rglob("*")) == 4 - carried_files
    with pickle.loads(again) as copy:
        assert every_record(copy) == RECORDS


def steps_of(source: Any, keys: list[int]) -> int:
    """Returns how many functions are called to read some records, generators' steps included."""
    steps = 0

    def count(_frame: Any, event: str, _argument: Any) -> None:
        nonlocal steps
        steps += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        for key in keys:
            source[key]
    finally:
        sys.setprofile(None)
    return steps


def test_opening_a_file_takes_no_more_steps_where_there_are_more_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record of a closed file takes as many calls, of 20 files and of 500, and few descriptors are taken."""
    monkeypatch.setattr(files, "MAX_OPEN_FILES", 3)
    paths = [write_tfrecord(tmp_path / f"{n:03}", [b"%d" % n]) for n in range(500)]
    steps = []
    before = len(open_descriptors())
    for some in (paths[:20], paths):
        with TFRecordDataSource(some) as source:
            keys = list(range(0, len(some), len(some) // 10))
            steps_of(source, keys)
            steps.append(steps_of(source, keys))
            assert len(open_descriptors()) <= before + 6
            assert source.__getitems__(range(len(some))) == [b"%d" % key for key in range(len(some))]
            assert len(open_descriptors()) <= before + 6
    assert steps[1] <= steps[0] * 1.2


@given(
    st.lists(st.tuples(st.integers(0, 900), st.integers(0, 200)), max_size=100),
    st.booleans(),
    st.sampled_from([7, 100, 2**31]),
)
def test_spans_are_the_bytes_of_the_file(pieces: list[tuple[int, int]], slow: bool, most: int) -> None:
    """Spans are the bytes of the file, whether or not the system was asked for them ahead, or reads less at once."""
    content = np.random.default_rng(0).bytes(1000)
    with pytest.MonkeyPatch.context() as patch, os.fdopen(os.memfd_create("content"), "r+b") as file:
        file.write(content)
        file.flush()
        # Linux reads less than 2 GiB at once: here, a few bytes stand for that.
        patch.setattr(byte_files, "MAX_PREAD_BYTES", most)
        patch.setattr(byte_files, "_PREAD", lambda file, length, start: os.pread(file, min(length, most), start))
        patch.setattr(byte_files, "_SLOW_READ_SECONDS", 0.0 if slow else 10.0)
        read = byte_files.read_spans(file.fileno(), [p for p, _ in pieces], [n for _, n in pieces])

    assert read == [content[place : place + length] for place, length in pieces]


def test_a_long_search_is_in_the_log(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a terminal, a log line names the task and its progress."""
    monkeypatch.setattr(progress, "SHOW_AFTER_SECONDS", 0.0)
    with caplog.at_level(logging.INFO, logger="millstream"):
        TFRecordDataSource(path).close()

    assert caplog.messages[0] == "Indexing 1 file: 100 % of 0.0 GB"


def test_a_long_search_has_a_bar_on_a_terminal(path: Path, tmp_path: Path) -> None:
    """On a terminal, a long search shows tqdm's bar, which is taken away at the end."""
    code = (
        "import millstream, sys; from millstream.sources.files import progress; progress.SHOW_AFTER_SECONDS = 0.0; "
        f"millstream.TFRecordDataSource({str(path)!r}); import threading; print(threading.active_count())"
    )
    terminal, end = pty.openpty()
    termios.tcsetwinsize(end, (24, 100))
    os.set_blocking(terminal, False)
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, stderr=end, check=True)
    shown = os.read(terminal, 10_000)
    os.close(end)
    os.close(terminal)

    assert b"Indexing 1 file:" in shown
    assert done.stdout == b"1\n"


def test_a_file_that_is_refused_cancels_the_search_in_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled scan ends at its next report of progress."""
    watched = Progress("Indexing", 10)
    watched.advance(5)
    watched.cancel()
    with pytest.raises(CancelledScanError):
        watched.advance(5)
    (tmp_path / "1").write_bytes(b"not a TFRecord file, and no header of one")
    write_tfrecord(tmp_path / "2", RECORDS)
    monkeypatch.setattr(files, "INSPECTION_THREADS", 1)
    cancelled: list[bool] = []
    monkeypatch.setattr(Progress, "cancel", lambda _: cancelled.append(True))

    with pytest.raises(DataSourceError, match="1' is not a TFRecord file"):
        TFRecordDataSource([tmp_path / "1", tmp_path / "2"])
    assert len(cancelled) == 1
