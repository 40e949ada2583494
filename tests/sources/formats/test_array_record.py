"""ArrayRecord files as one sequence of records: paths, ranges, batches, warnings, words, and damage to the files."""

import dataclasses
import os
import pickle
import re
import resource
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import DataSourceError
from millstream.sources import ArrayRecordDataSource
from support.faults.memory_limits import limited
from support.files.record_files import records_of, write_array_record
from support.processes.process_tree import open_descriptors
from support.processes.worker_pools import python

LENGTHS = (10, 1, 0, 25)
BIG_RECORDS = [np.random.default_rng(n).bytes(n % 5_000) for n in range(3_000)]


@dataclasses.dataclass
class FileInstruction:
    filename: str
    skip: int
    take: int


def content_of(file: int) -> list[bytes]:
    """The records of one of the files; some are empty."""
    return [b"" if n % 7 == 3 else b"file %d record %d" % (file, n) for n in range(LENGTHS[file])]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of four files, one of them without records."""
    folder = tmp_path_factory.mktemp("records") / "inner" / "folder"
    folder.mkdir(parents=True)
    for file in range(len(LENGTHS)):
        write_array_record(folder / f"train-{file}", content_of(file))
    return folder


@st.composite
def parts(draw: st.DrawFn) -> tuple[int, int, int | None]:
    """A file, and a range of its records or all of them."""
    file = draw(st.sampled_from(range(len(LENGTHS))))
    if draw(st.booleans()):
        return file, 0, None
    start, stop = sorted(draw(st.tuples(*[st.integers(0, LENGTHS[file])] * 2)))
    return file, start, stop


@settings(deadline=None, max_examples=75)
@given(st.lists(parts(), min_size=1, max_size=6), st.data())
def test_parts_of_files_laid_end_to_end(
    folder: Path, chosen: list[tuple[int, int, int | None]], data: st.DataObject
) -> None:
    """Key k is record k of the concatenation of all files and ranges, repeated or not, alone and in batches."""
    expected = [record for file, start, stop in chosen for record in content_of(file)[start:stop]]
    paths: list[object] = []
    for file, start, stop in chosen:
        path = folder / f"train-{file}"
        instruction = FileInstruction(str(path), start, -1 if stop is None else stop - start)
        plain = path if stop is None else f"{path}[{start}:{stop}]"
        paths.append(instruction if data.draw(st.booleans()) else plain)
    if not expected:
        with ArrayRecordDataSource(paths) as source:
            assert len(source) == 0
        return
    keys = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=40))
    with ArrayRecordDataSource(paths) as source:
        assert len(source) == len(expected)
        assert list(source.__getitems__(keys)) == [expected[key] for key in keys]
        assert [source[key] for key in keys] == [expected[key] for key in keys]


def test_paths_of_all_kinds_mean_the_same(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Patterns (each match once), `~`, path-like objects, sequences; relative to the folder at construction."""
    expected = [record for file in range(4) for record in content_of(file)]
    monkeypatch.setenv("HOME", str(folder))
    every: list[object] = [
        str(folder / "train-*"),
        folder / "train-[0-3]",
        "~/train-?",
        f"{folder.parents[1]}/**/**/train-*",
        [folder / f"train-{file}" for file in range(4)],
        (str(folder / "train-0"), "~/train-[12]", folder / "train-3"),
        iter(["~/train-0", "~/train-1", FileInstruction("~/train-3", 0, 25)]),
        "train-*",
        ["./train-0[0:10]", "train-[1]", FileInstruction("train-2", 0, -1), Path("train-3")],
    ]
    for paths in every:
        monkeypatch.chdir(folder)
        source = ArrayRecordDataSource(paths)
        monkeypatch.chdir(tmp_path)
        assert records_of(source) == expected


def test_names_of_any_bytes_are_names(tmp_path: Path) -> None:
    """A name that is not UTF-8 is read, found by a pattern, and described. That of a pipe or device is refused."""
    path = os.fsdecode(os.fsencode(tmp_path) + b"/\xff\xfe")
    write_array_record(tmp_path / "a", [b"x"]).rename(path)
    for paths in (path, tmp_path / "*"):
        source = ArrayRecordDataSource(paths)
        assert source.fingerprint().startswith("ArrayRecord files=1 records=1")
        assert "\\udcff" in repr(source)
        assert records_of(source) == [b"x"]
    Path(path).write_bytes(b"text")
    with pytest.raises(DataSourceError, match=r"\\udcff.*is not an ArrayRecord file"):
        ArrayRecordDataSource(path)
    os.mkfifo(tmp_path / "pipe")
    for name in (tmp_path / "pipe", f"{tmp_path}/pipe[0:3]", "/dev/zero"):
        with pytest.raises(DataSourceError, match=r"(pipe|zero)' at random: it is a pipe, a socket or a device"):
            ArrayRecordDataSource(name)


def test_an_existing_file_wins_over_its_name_as_a_pattern(tmp_path: Path) -> None:
    """Names with `*`, `?`, brackets, and even with the form of a range, are names first."""
    for name in ("a*", "a?", "[ab]", "a[0:1]"):
        write_array_record(tmp_path / name, [name.encode(), b"second"])
    write_array_record(tmp_path / "a", [b"plain", b"second"])
    for name in ("a*", "a?", "[ab]", "a[0:1]"):
        assert records_of(ArrayRecordDataSource(tmp_path / name)) == [name.encode(), b"second"]
    assert records_of(ArrayRecordDataSource(f"{tmp_path}/a[0:1][1:2]")) == [b"second"]
    assert records_of(ArrayRecordDataSource(f"{tmp_path}/a[1:2]")) == [b"second"]


@pytest.mark.parametrize(
    ("paths", "error", "message"),
    [
        (lambda at: f"{at}/none", FileNotFoundError, "No such ArrayRecord file: '.*/none'"),
        (lambda at: f"{at}/none-*", FileNotFoundError, "No ArrayRecord file matches the pattern: '.*/none-"),
        (lambda at: f"{at}/none[0:3]", FileNotFoundError, "No such ArrayRecord file: '.*/none'"),
        (lambda at: f"{at}/train-*[0:3]", FileNotFoundError, r"No such ArrayRecord file: '.*/train-\*'"),
        (lambda at: [f"{at}/train-0", f"{at}/none"], FileNotFoundError, "none"),
        (lambda _: FileInstruction("/none", 0, 3), FileNotFoundError, "none"),
        (lambda at: at, IsADirectoryError, r"read files. Pass a glob"),
        (lambda at: f"{at}/", IsADirectoryError, "not the directory"),
        (lambda at: f"{at}/train-0[5:3]", ValueError, r"0 <= start <= stop < 2\*\*63, got \[5:3\] of"),
        (lambda at: FileInstruction(f"{at}/train-0", -1, 3), ValueError, "0 <= start <= stop"),
        (lambda at: FileInstruction(f"{at}/train-0", 11, -1), ValueError, r"0 <= start .* got \[11:10\]"),
        (lambda at: f"{at}/train-0[0:1000000000000000000000000000000]", ValueError, r"stop < 2\*\*63"),
        (lambda at: [f"{at}/train-0[0:{2**62}]"] * 2, ValueError, r"fewer than 2\*\*63 records"),
        (lambda at: {at}, TypeError, r"the order of a set differs between processes\. Pass sorted\(paths\)"),
        (lambda _: [], ValueError, "at least one file, got an empty sequence"),
        (lambda _: 3, TypeError, "paths must be a path or a sequence of paths, got int"),
        (lambda _: [3], TypeError, "Each path must be a str.* got int"),
        (lambda _: None, TypeError, "got NoneType"),
    ],
)
def test_wrong_paths_are_refused_at_construction(
    folder: Path, paths: Callable[[Path], Any], error: type[Exception], message: str
) -> None:
    """Each mistake has its own error, with the path in it."""
    with pytest.raises(error, match=message):
        ArrayRecordDataSource(paths(folder))


@pytest.mark.filterwarnings("ignore:.*was written with group_size")  # That is a test of its own, below.
@pytest.mark.parametrize("group", [1, 3, 100])
def test_large_batches_from_large_files(tmp_path: Path, group: int) -> None:
    """Batches large enough for the library's batched read come out in order, with groups of records, too."""
    with ArrayRecordDataSource(write_array_record(tmp_path / "a", BIG_RECORDS, f"group_size:{group}")) as source:
        for count in (1, 10, 300, 2_000):
            keys = np.random.default_rng(count).integers(0, len(BIG_RECORDS), count)
            assert list(source.__getitems__(keys)) == [BIG_RECORDS[key] for key in keys.tolist()]


def test_groups_of_records_are_warned_of_once(tmp_path: Path) -> None:
    """With file, cost and cure, at construction or at the first read of a range; not for groups of one."""
    for name in "ab":
        write_array_record(tmp_path / name, [b"%d" % n for n in range(10)], "group_size:5")
    with pytest.warns(UserWarning, match=r"a' was written with group_size:5\. .*'group_size:1'") as caught:
        source = ArrayRecordDataSource([tmp_path / "a", tmp_path / "b"])
    assert len(caught) == 1
    assert records_of(pickle.loads(pickle.dumps(source))) == [b"%d" % n for n in [*range(10), *range(10)]]
    with ArrayRecordDataSource(f"{tmp_path}/a[0:3]") as part:
        with pytest.warns(UserWarning, match="group_size:5") as caught_reading:
            assert part[0] == b"0"
        assert part[1] == b"1"
    assert {caught[0].filename, caught_reading[0].filename} == {__file__}
    assert records_of(ArrayRecordDataSource(write_array_record(tmp_path / "c", [b"x"], "group_size:100"))) == [b"x"]


def test_reader_options_reach_the_library(folder: Path) -> None:
    """Options change how records are read, not which; one that the library does not know is an error with its name."""
    options = {"readahead_buffer_size": "16K", "max_parallelism": "1"}
    assert records_of(ArrayRecordDataSource(folder / "train-0", options)) == content_of(0)
    with pytest.raises(ValueError, match=r"reader_options must be .*Unknown option speed"):
        ArrayRecordDataSource(folder / "train-0", {"speed": "high"})[0]


def test_names_sizes_counts_ranges_and_orders_are_part_of_the_fingerprint(folder: Path, tmp_path: Path) -> None:
    """Any other is another source. A name is that within the folder that holds all files."""
    moved = tmp_path / "moved"
    shutil.copytree(folder, moved)
    first, *others = names = [folder / f"train-{file}" for file in range(4)]
    fingerprints = [
        ArrayRecordDataSource(paths).fingerprint()
        for paths in (
            folder / "train-*",
            names[::-1],
            others,
            [*names[:3], f"{names[3]}[0:24]"],
            [*names[:3], f"{names[3]}[1:25]"],
            [first, moved / "train-0"],
            [moved / "train-0", first],
        )
    ]
    same = [f"{folder}/../{folder.name}/train-{file}" for file in range(3)]
    assert fingerprints[0] == ArrayRecordDataSource([*same, f"{folder}//train-3"]).fingerprint()
    assert fingerprints[0].startswith("ArrayRecord files=4 records=36 digest=")
    (moved / "train-3").rename(moved / "train-4")
    fingerprints.append(ArrayRecordDataSource(moved / "train-*").fingerprint())
    write_array_record(moved / "train-3", [bytes(60_000)] * 25, "group_size:1,uncompressed")
    fingerprints.append(ArrayRecordDataSource(moved / "train-[0-3]").fingerprint())
    assert len(set(fingerprints)) == len(fingerprints)


def test_a_dropped_source_closes_its_files_at_once(folder: Path) -> None:
    """No cycle keeps descriptors until the next garbage collection."""
    before = len(open_descriptors())
    source = ArrayRecordDataSource(folder / "train-*")
    source.__getitems__(range(36))
    assert len(open_descriptors()) == before + 3
    del source
    assert len(open_descriptors()) == before


WRITTEN = [np.random.default_rng(n).bytes(1_000) for n in range(300)]


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 300 records of 1,000 bytes, in six blocks of 64 KiB."""
    return write_array_record(tmp_path_factory.mktemp("healthy") / "file", WRITTEN)


def test_a_damaged_record_is_named(healthy: Path, tmp_path: Path) -> None:
    """With file, number, key and the library's reason, in 16 threads, too; all other records stay readable."""
    content = bytearray(healthy.read_bytes())
    place = content.index(WRITTEN[123][:16])
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
        expected = [*WRITTEN, *WRITTEN[100:200]]
        assert list(source.__getitems__(keys)) == [expected[key] for key in keys]

        def is_right(keys: list[int]) -> bool:
            try:
                return list(source.__getitems__(keys)) == [expected[key] for key in keys] and 323 not in keys
            except DataSourceError as error:
                return 323 in keys and "(record key 323)" in str(error)

        with ThreadPoolExecutor(16) as threads:
            assert all(threads.map(is_right, np.random.default_rng(0).integers(0, 400, (200, 50)).tolist()))


@pytest.mark.filterwarnings("ignore:.*was written with group_size")
@pytest.mark.parametrize("group", [1, 7])
@pytest.mark.parametrize("size", [0, 30_000, 2 * 65_536, 4 * 65_536])
def test_a_file_truncated_while_open_is_an_error(tmp_path: Path, size: int, group: int) -> None:
    """Records before the cut are read, those after it raise, although the library gives empty records for them."""
    path = write_array_record(tmp_path / "file", WRITTEN, f"group_size:{group}")
    with ArrayRecordDataSource(f"{path}[0:300]") as source:
        assert source[0] == WRITTEN[0]
        os.truncate(path, size)
        lost = {}
        for key in range(300):
            try:
                assert source[key] == WRITTEN[key]
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


def test_few_file_descriptors(tmp_path: Path) -> None:
    """With fewer descriptors than files, idle files are closed; with none left, the error names the remedy."""
    records = [b"%d" % number for number in range(100)]
    for number, record in enumerate(records):
        write_array_record(tmp_path / f"file-{number:02}", [record])
    highest = max(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208
    with ArrayRecordDataSource(tmp_path / "file-*") as source, limited(resource.RLIMIT_NOFILE, highest + 20):
        for _ in range(2):
            assert list(source.__getitems__(range(100))) == records
    too_few = pytest.raises(
        DataSourceError, match=r"of '.*' \(.*cannot open it: Too many open files\. Raise the limit \("
    )
    with ArrayRecordDataSource(tmp_path / "file-*") as source, too_few, limited(resource.RLIMIT_NOFILE, 3):
        source.__getitems__(range(100))


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
