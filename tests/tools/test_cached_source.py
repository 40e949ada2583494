"""Records in a cache are those of the source, whoever fills it, and whatever happens to the processes and the disk."""

import math
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

import millstream
from millstream.tools import cached_source
from millstream.tools.record_layouts import codec_of, layout_of
from millstream.tools.underlying_sources import underlying_sources
from support.draw.elements_of_all_kinds import arrays_in, elements
from support.faults.user_faults import WAIT_SECONDS
from support.files.record_files import every_record
from support.streams import comparable

pytest.importorskip("lmdb")

COUNT = 60


class Expensive(millstream.Map):
    """Returns arrays of 1 KB or so, and writes a byte to a file for each call, in whichever process."""

    def __init__(self, calls: Path, factor: int = 1) -> None:
        self.calls = str(calls)
        self.factor = factor

    def map(self, element: int, /) -> dict[str, Any]:
        with open(self.calls, "ab", buffering=0) as file:  # noqa: PTH123
            file.write(b".")
        return {"x": np.full((element % 7, 50), element * self.factor), "name": f"record {element}"}


def expensive(folder: Path, factor: int = 1) -> millstream.MapDataset[Any]:
    """Returns a dataset that counts its work in a file."""
    return millstream.MapDataset.source(range(COUNT)).map(Expensive(folder / "calls", factor))


def num_calls(folder: Path) -> int:
    """Returns the number of calls since the last one of this function."""
    path = folder / "calls"
    count = path.stat().st_size if path.exists() else 0
    path.write_bytes(b"")
    return count


def is_right(records: Any, factor: int = 1) -> bool:
    """Returns True for the records of the dataset, in any order of the keys."""
    return all(
        (record["x"] == int(record["name"][7:]) * factor).all()
        and record["x"].shape == (int(record["name"][7:]) % 7, 50)
        for record in records
    )


def tokens(number: int) -> Any:
    """Returns a document."""
    return np.arange(50 + number % 250, dtype=np.int32)


def labelled(number: int) -> Any:
    """Returns a few numbers and a label."""
    return {"x": np.full(16, number, np.int32), "label": number}


def list_of_numbers(number: int) -> Any:
    """Returns a structure of several small arrays."""
    return [np.full(5, number), (np.float32(number), np.full((2, 3), number, np.int16)), np.full(9, number)]


def stored_bytes(folder: Path) -> int:
    """Returns the size of all files of a cache."""
    return sum(path.stat().st_size for path in folder.rglob("*.mdb"))


@pytest.mark.parametrize("worker_count", [0, 2])
def test_records_are_computed_once_by_all_processes(tmp_path: Path, worker_count: int) -> None:
    """Later epochs compute nothing, the stream is that without the cache, and records are the reader's own."""
    # Several threads, of epochs one after the other, may need a record at the same time.
    reading = millstream.ReadOptions(num_threads=0)
    options: Any = {"shuffle": True, "seed": 0, "num_epochs": 3, "worker_count": worker_count, "read_options": reading}
    expected = [record["name"] for record in millstream.load(expensive(tmp_path), **options)]
    num_calls(tmp_path)
    with millstream.CachedDataSource(expensive(tmp_path), tmp_path / "cache") as source:
        with millstream.load(source, **options, transformations=[negated]) as loader:
            records = list(loader)
        assert [record["name"] for record in records] == expected
        assert COUNT <= num_calls(tmp_path) <= COUNT * max(1, worker_count)
        every_record(source)
    num_calls(tmp_path)
    with millstream.CachedDataSource(expensive(tmp_path), tmp_path / "cache") as source:
        compared = num_calls(tmp_path)
        assert 0 < compared <= 4
        assert is_right(record for record in source.__getitems__([5, 5, *range(COUNT)]))
        assert num_calls(tmp_path) == 0


def negated(element: dict[str, Any]) -> dict[str, Any]:
    """Changes its element in place."""
    element["x"] *= -1
    return element


def test_another_operation_is_another_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A changed parameter evicts the records, unless they are in use; a change that no fingerprint has is noticed."""
    cache = tmp_path / "cache"
    with millstream.CachedDataSource(expensive(tmp_path), cache) as first:
        every_record(first)
        with millstream.CachedDataSource(expensive(tmp_path, 2), cache) as second:
            assert is_right(every_record(second), 2)
            assert len([path for path in cache.iterdir() if path.is_dir()]) == 2
        num_calls(tmp_path)
        assert is_right(every_record(first))
        assert num_calls(tmp_path) == 0
    with millstream.CachedDataSource(expensive(tmp_path, 2), cache):
        assert len([path for path in cache.iterdir() if path.is_dir()]) == 1
    monkeypatch.setattr(Expensive, "map", lambda _, element: {"x": np.zeros((element % 7, 50)), "name": "record 0"})
    monkeypatch.setattr(cached_source, "digest_of_source", lambda _: next(cache.glob("*/users")).parent.name)
    with millstream.CachedDataSource(expensive(tmp_path, 2), cache) as third:
        assert {record["name"] for record in every_record(third)} == {"record 0"}


def test_a_changed_file_is_another_cache(tmp_path: Path) -> None:
    """The times and sizes of files count, and so do their contents if nothing else tells."""
    (tmp_path / "images" / "a").mkdir(parents=True)
    for number in range(3):
        (tmp_path / "images" / "a" / f"{number}.png").write_bytes(b"old")
    (tmp_path / "a.txt").write_text("old\n")
    for make, path in (
        (lambda: millstream.ImageFolderDataSource(tmp_path / "images"), tmp_path / "images" / "a" / "1.png"),
        (lambda: millstream.TextLineDataSource(tmp_path / "a.txt"), tmp_path / "a.txt"),
    ):
        dataset = millstream.MapDataset.source(make())
        with millstream.CachedDataSource(dataset, tmp_path / "cache") as source:
            every_record(source)
        path.write_bytes(b"newer\n")
        with millstream.CachedDataSource(millstream.MapDataset.source(make()), tmp_path / "cache") as source:
            assert "newer" in str(every_record(source))


def test_tools_know_the_files_below_it(tmp_path: Path) -> None:
    """A conversion does not replace its own input, and lengths are stored, through a cache, windows and chains."""
    (tmp_path / "a.txt").write_text("a b\nc\nd e f\n")
    lines = millstream.TextLineDataSource(tmp_path / "a.txt")
    with millstream.CachedDataSource(millstream.MapDataset.source(lines).map(str.split), tmp_path / "cache") as source:
        windows = millstream.WindowDataSource(millstream.MapDataset.source(source).map(len), 2)
        assert [*underlying_sources(windows)] == [lines]
        assert millstream.lengths_of(source).tolist() == [2, 1, 3]
        assert len(list(tmp_path.glob(".a.txt.lengths-*"))) == 1


def test_a_run_resumes_with_and_without_it(tmp_path: Path) -> None:
    """The fingerprint is that of the source."""
    options: Any = {"shuffle": True, "seed": 0, "batch_size": 5, "transformations": [names]}
    with iter(millstream.load(expensive(tmp_path), **options)) as batches:
        next(batches)
        state, expected = batches.get_state(), next(batches)
    source = millstream.CachedDataSource(expensive(tmp_path), tmp_path / "cache")
    with source, iter(millstream.load(source, **options)) as batches:
        batches.set_state(state)
        assert next(batches).tolist() == expected.tolist()


def names(element: dict[str, Any]) -> str:
    """Returns the name of a record."""
    return str(element["name"])


FILLS = """
import sys
import numpy as np
import millstream
sys.path.insert(0, sys.argv[2])
from test_cached_source import expensive, is_right
from pathlib import Path
if __name__ == "__main__":
    folder = Path(sys.argv[1])
    source = millstream.CachedDataSource(expensive(folder), folder / "cache")
    store = source._opened()
    for epoch in range(int(sys.argv[3])):
        for keys in np.random.default_rng(epoch).permutation(60).reshape(-1, 5):
            assert is_right(source.__getitems__(keys))
            store.write()
            print(epoch, flush=True)
    source.close()
"""


@pytest.fixture
def fill(tmp_path: Path) -> Iterator[Any]:
    """A function that starts a process that fills the cache."""
    started: list[subprocess.Popen[str]] = []

    def start(epochs: int) -> subprocess.Popen[str]:
        arguments = [sys.executable, "-c", FILLS, str(tmp_path), str(Path(__file__).parent), str(epochs)]
        environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
        started.append(subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def test_killed_processes_leave_right_records(tmp_path: Path, fill: Any) -> None:
    """Two processes fill one cache; one is killed while it writes. The other goes on, and all records are right."""
    killed, other = fill(1_000_000), fill(3)
    for _ in range(4):
        assert killed.stdout.readline()
    killed.send_signal(signal.SIGKILL)
    assert other.wait(5 * WAIT_SECONDS) == 0
    num_calls(tmp_path)
    with millstream.CachedDataSource(expensive(tmp_path), tmp_path / "cache") as source:
        num_calls(tmp_path)
        assert is_right(every_record(source))
        assert num_calls(tmp_path) == 0


def test_a_limit_and_a_full_disk_only_end_the_filling(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Files stay within the limit, the first records stay, and others are computed; one line is logged."""
    large = millstream.MapDataset.source(range(40)).map(lambda number: np.full(100_000, number, np.uint8))

    def read(path: Path, max_bytes: int | None) -> None:
        with millstream.CachedDataSource(large, path, max_bytes=max_bytes) as source:
            for _ in range(2):
                for key in range(40):
                    assert (source[key] == key).all()
                    source._opened().write()
            assert len(source._opened().some_keys(4)) > 1

    read(tmp_path / "limited", 1 << 20)
    assert 500_000 < stored_bytes(tmp_path / "limited") <= (1 << 20) + (1 << 18)
    assert len([record for record in caplog.records if "cannot grow" in record.message]) == 1
    caplog.clear()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, before[1]))
    try:
        read(tmp_path / "full", None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len([record for record in caplog.records if "cannot grow" in record.message]) == 1


def test_what_is_written_through_memory_has_its_blocks(tmp_path: Path) -> None:
    """The table of readers has no holes: on a full disk, the system kills a process that writes into one."""
    with millstream.CachedDataSource(expensive(tmp_path), tmp_path / "cache"):
        (table,) = (tmp_path / "cache").glob("*/lock.mdb")
        assert table.stat().st_blocks * 512 >= table.stat().st_size > 4096 * 64


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:.*use of fork:DeprecationWarning")
def test_a_child_that_was_forked_computes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """LMDB cannot be opened twice there. Its records are right without a warning, and its end closes nothing."""
    with millstream.CachedDataSource(expensive(tmp_path), tmp_path / "cache") as source:
        every_record(source)[0]
        child = os.fork()
        if not child:
            status = 1
            try:
                status = 0 if is_right(every_record(source)) and not caplog.records else 2
                source.close()
            finally:
                os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert is_right(every_record(source))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: millstream.MapDataset.range(4).shuffle(seed=0), "same records in each epoch"),
        (lambda: millstream.MapDataset.range(4).repeat(), "must have an end"),
        (lambda: iter([1]), "no random access"),
        (list, "at least one record"),
    ],
)
def test_what_has_no_fixed_records_is_refused(tmp_path: Path, make: Any, message: str) -> None:
    """At construction, with the place where the cache belongs."""
    with pytest.raises((TypeError, ValueError), match=message):
        millstream.CachedDataSource(make(), tmp_path / "cache")


def test_what_cannot_be_stored_is_an_error(tmp_path: Path) -> None:
    """A record that cannot be pickled is named, and a folder that others may write to is not used; nor is a size."""
    with pytest.raises(TypeError, match=r"path must be the folder of the cache, such as 'decoded', got 5\."):
        millstream.CachedDataSource([1], 5)  # type: ignore[arg-type]  # a size of max_bytes
    with millstream.CachedDataSource([1, lambda: 2], tmp_path / "cache") as source:
        assert source[0] == 1
        with pytest.raises(TypeError, match="Cannot cache record 1: it cannot be pickled"):
            source[1]
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(PermissionError):
        millstream.CachedDataSource([1], tmp_path / "open")


@given(record=elements)
@settings(max_examples=100)
def test_a_layout_has_all_that_a_record_is(record: Any) -> None:
    """A record of any structure that has a layout comes back the same, to the last byte, and can be changed."""
    if (layout := layout_of(record)) is None:
        return
    content = codec_of(layout).encode(record)
    decoded = codec_of(layout).decode(memoryview(content + b"and what follows"))
    assert comparable(decoded) == comparable(record)
    assert codec_of(layout).encode(decoded) == content
    assert all(array.flags.writeable for array in arrays_in(decoded))


@pytest.mark.parametrize("make", [tokens, labelled, list_of_numbers], ids=lambda make: make.__name__)
def test_the_cache_of_small_records_is_hardly_larger_than_they_are(
    tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files have at most 1.5 times the bytes of the records, stored in any order, if these come quickly."""
    monkeypatch.setattr(cached_source, "_WRITTEN_SECONDS", math.inf)
    source = millstream.MapDataset.source(range(20_000)).map(make)
    with millstream.CachedDataSource(source, tmp_path) as cached:
        for keys in np.random.default_rng(0).permutation(20_000).reshape(-1, 100):
            cached.__getitems__(keys)
        cached._opened().write()
        assert comparable(cached[77]) == comparable(make(77))
    num_bytes = sum(sum(array.nbytes for array in arrays_in(make(number))) + 8 for number in range(20_000))
    assert sum(512 * path.stat().st_blocks for path in tmp_path.rglob("data.mdb")) <= 1.5 * num_bytes


def test_records_of_many_structures_are_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store has a limited number of layouts, and each process finds those that others have added."""
    monkeypatch.setattr(cached_source, "_MAX_LAYOUTS", 2)
    source = millstream.MapDataset.source(range(6)).map(lambda number: {f"field {number}": np.arange(number)})
    with millstream.CachedDataSource(source, tmp_path) as cached:
        expected = [comparable(record) for record in every_record(cached)]
        cached._opened().write()
        assert len(cached._opened()._layouts) == 1
        assert [comparable(record) for record in every_record(cached)] == expected
        assert len(cached._opened()._layouts) == 3
