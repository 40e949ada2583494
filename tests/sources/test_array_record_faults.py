"""Real damage to real files: every read is the record that was written, or an error that names it."""

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from millstream.errors import DataSourceError
from millstream.sources import ArrayRecordDataSource
from support.files.record_files import write_array_record
from support.processes.worker_pools import python

RECORDS = [np.random.default_rng(n).bytes(1_000) for n in range(300)]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 300 records of 1,000 bytes, in six blocks of 64 KiB."""
    return write_array_record(tmp_path_factory.mktemp("healthy") / "file", RECORDS)


def test_a_damaged_record_is_named(healthy: Path, tmp_path: Path) -> None:
    """File, number in the file, record key, and what the library says; all other records stay readable.

    With 16 threads, each batch is right, or raises the error of its own record.
    """
    content = bytearray(healthy.read_bytes())
    place = content.index(RECORDS[123][:16])
    content[place] ^= 1
    damaged = tmp_path / "damaged"
    damaged.write_bytes(content)
    with ArrayRecordDataSource([healthy, f"{damaged}[100:200]"]) as source:
        message = (
            rf"record 123 of {re.escape(repr(str(damaged)))} \(record key 323\): .*hash mismatch.*Restore the file\."
        )
        with pytest.raises(DataSourceError, match=message) as caught:
            source.__getitems__([5, 300, 323, 399])
        assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(DataSourceError, match=message):
            source[323]
        keys = [key for key in range(400) if key != 323]
        expected = [*RECORDS, *RECORDS[100:200]]
        assert list(source.__getitems__(keys)) == [expected[key] for key in keys]

        def is_right(keys: list[int]) -> bool:
            try:
                return list(source.__getitems__(keys)) == [expected[key] for key in keys] and 323 not in keys
            except DataSourceError as error:
                return 323 in keys and "(record key 323)" in str(error)

        with ThreadPoolExecutor(16) as threads:
            assert all(threads.map(is_right, np.random.default_rng(0).integers(0, 400, (200, 50)).tolist()))


@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize("size", [0, 30_000, 2 * 65_536, 4 * 65_536])
def test_a_file_truncated_while_open_is_an_error(tmp_path: Path, size: int, group: int) -> None:
    """Records before the cut are read, those after it raise, although the library gives empty records for them."""
    path = write_array_record(tmp_path / "file", RECORDS, f"group_size:{group}")
    with ArrayRecordDataSource(f"{path}[0:300]") as source:
        if group == 1:
            assert source[0] == RECORDS[0]
        else:
            with pytest.warns(UserWarning, match="group_size:7"):
                assert source[0] == RECORDS[0]
        os.truncate(path, size)
        lost = {}
        for key in range(300):
            try:
                assert source[key] == RECORDS[key]
            except DataSourceError as error:
                lost[key] = str(error)
        assert [key for key in lost if f"record {key} of '{path}' (record key {key})" not in lost[key]] == []
        assert len(lost) >= 300 - size // 1_000
        with pytest.raises(DataSourceError, match=rf"\(record key {min(lost)}\)"):
            source.__getitems__(range(300))


def test_empty_records_of_healthy_files_are_records(tmp_path: Path) -> None:
    """An empty record is a record, unless the file has changed: then it cannot be told from a lost one."""
    path = write_array_record(tmp_path / "file", [b"", b"x", b""])
    with ArrayRecordDataSource(path) as source:
        assert list(source.__getitems__([0, 1, 2, 2, 0])) == [b"", b"x", b"", b"", b""]
        assert source[2] == b""
        path.rename(tmp_path / "elsewhere")
        assert source[1] == b"x"
        with pytest.raises(DataSourceError, match=r"record 2 of .*reads as empty, and the file was removed"):
            source[2]
        write_array_record(path, [b"y", b"y", b"y"])
        with pytest.raises(DataSourceError, match="reads as empty, and it was replaced by another file"):
            source.__getitems__([1, 0])


PROGRAM = """
import resource, sys
import array_record.python.array_record_module
from millstream.errors import DataSourceError
from millstream.sources import ArrayRecordDataSource

source = ArrayRecordDataSource(sys.argv[1] + "/file-*")
assert len(source) == 100
open_now = len(__import__("os").listdir("/proc/self/fd"))
resource.setrlimit(resource.RLIMIT_NOFILE, (open_now + int(sys.argv[2]), resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
try:
    for _ in range(2):
        print(*source.__getitems__(range(100)))
except DataSourceError as error:
    print(error)
"""


@pytest.mark.parametrize(("spare", "answer"), [(20, "enough"), (-1, "too few")])
def test_few_file_descriptors(tmp_path: Path, spare: int, answer: str) -> None:
    """With fewer descriptors than files, idle files are closed; with none left, the error names the remedy."""
    for number in range(100):
        write_array_record(tmp_path / f"file-{number:02}", [b"%d" % number])
    ran = python("-c", PROGRAM, tmp_path, spare, check=True)
    if answer == "enough":
        assert ran.stdout == f"{' '.join(str([b'%d' % n])[1:-1] for n in range(100))}\n" * 2
    else:
        assert re.search(r"cannot open '.*': Too many open files\. Raise the limit \(`ulimit -n`\)", ran.stdout)


FORKED = """
import os, sys, threading
from concurrent.futures import ThreadPoolExecutor
import millstream
from millstream.sources import ArrayRecordDataSource

source = ArrayRecordDataSource(sys.argv[1])
if sys.argv[2] == "read":
    source[0]
child = os.fork()
if child == 0:
    with ThreadPoolExecutor(1) as threads:
        try:
            print(len(threads.submit(source.__getitems__, range(300)).result()), flush=True)
        except OSError as error:
            print(error, flush=True)
    print(sum(map(len, millstream.load(source, num_epochs=1, batch_size=50, worker_count=1))), flush=True)
    os._exit(0)
print("status", os.waitpid(child, 0)[1])
"""


@pytest.mark.parametrize(
    ("parent", "answer"),
    [
        ("read", "forked after ArrayRecord files had been read.* Use worker_count, or .*'spawn' or 'forkserver'."),
        ("unread", "300"),
    ],
)
def test_threads_of_a_forked_process_get_an_error_not_a_crash(healthy: Path, parent: str, answer: str) -> None:
    """A fork after reading cannot read: the error names the remedy, which works. A fork before reading can."""
    ran = python("-W", "ignore", "-c", FORKED, healthy, parent, check=True)
    assert re.fullmatch(rf"[^\n]*{answer}\n300\nstatus 0\n", ran.stdout), ran.stdout + ran.stderr
