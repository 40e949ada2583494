"""Decoded units that the workers of a machine share."""

import errno
import os
import pickle
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorstore

import millstream
from millstream.sources.keyed_pool import UnitCache
from millstream.sources.shared_units import ArrayFiles, ArrayUnit, SharedFolder, share_units_in, shared_folder

pytestmark = pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning", "ignore:.*use of fork:DeprecationWarning")

UNIT_BYTES = 8 * 512

Cache = UnitCache[Any, ArrayUnit]


@pytest.fixture
def units() -> Iterator[SharedFolder]:
    """A folder in which this process and forked ones share units."""
    folder = SharedFolder()
    share_units_in(folder.path)
    yield folder
    share_units_in("")
    folder.remove()


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "decoded"


def cache_of(max_bytes: int = 1 << 20) -> Cache:
    return UnitCache(max_bytes, ArrayFiles(), "a")


def decoding(log: Path) -> Callable[[int], ArrayUnit]:
    """Returns a function that decodes units, and writes down which."""

    def decode(number: int) -> ArrayUnit:
        with log.open("a") as file:
            file.write(f"{number}\n")
        return ArrayUnit(np.full(512, number))

    return decode


def decoded(log: Path) -> list[int]:
    return sorted(map(int, log.read_text().split())) if log.exists() else []


def read(cache: Cache, numbers: list[int], decode: Callable[[int], ArrayUnit]) -> None:
    for number, unit in zip(numbers, cache.get_all(dict.fromkeys(numbers, 1), decode, 2), strict=True):
        assert (unit.rows == number).all()


def fork(function: Callable[[], object]) -> int:
    """Runs a function in a forked process. Returns the process's ID."""
    child = os.fork()
    if not child:
        status = 1
        try:
            function()
            status = 0
        finally:
            os._exit(status)
    return child


def files_of(units: SharedFolder) -> list[Path]:
    return [path for path in Path(units.path).glob("*/*") if path.name != "totals"]


def allocated_by(files: list[Path]) -> int:
    return sum(512 * path.stat().st_blocks for path in files)


@pytest.mark.parametrize("count", [2, 4])
def test_a_unit_is_decoded_by_one_process(units: SharedFolder, log: Path, count: int) -> None:
    """However many processes read the units, each is decoded once, and none is decoded without a folder's process."""
    children = [fork(lambda: read(cache_of(), list(range(9)), decoding(log))) for _ in range(count)]
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * count
    assert decoded(log) == list(range(9))
    assert len(files_of(units)) == 9


def test_nothing_is_written_without_workers(log: Path) -> None:
    """A process that no trainer has started keeps its units for itself."""
    assert not shared_folder()
    read(cache := cache_of(), [1, 2], decoding(log))
    read(cache, [1, 2], decoding(log))
    assert decoded(log) == [1, 2]
    assert cache.get_all({1: 1}, decoding(log), 1)[0].rows.base is None


def test_a_process_that_is_killed_while_it_decodes_costs_one_decoding(units: SharedFolder, log: Path) -> None:
    """Its lock ends with it: the process that waits for the unit decodes it."""
    decode, (begun, begins) = decoding(log), os.pipe()

    def hang(number: int) -> ArrayUnit:
        decode(number)
        os.write(begins, b"x")
        signal.pause()
        raise AssertionError

    child = fork(lambda: read(cache_of(), [3], hang))
    os.read(begun, 1)
    # Another unit does not wait.
    read(cache_of(), [4], decode)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(read, cache_of(), [3], decode)
        os.kill(child, signal.SIGKILL)
        waiting.result(30)
    os.waitpid(child, 0)
    os.close(begun)
    os.close(begins)
    assert decoded(log) == [3, 3, 4]
    assert [path.suffix for path in files_of(units)] == ["", ""]


def test_a_process_that_hangs_is_not_waited_for_forever(
    units: SharedFolder, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the limit, a process decodes the unit by itself, and shares what it needs later."""
    monkeypatch.setattr("millstream.sources.shared_units._WAIT_SECONDS", 0.05)
    decode, begun, goes_on = decoding(log), threading.Event(), threading.Event()

    def hang(number: int) -> ArrayUnit:
        begun.set()
        assert goes_on.wait(30)
        return decode(number)

    with ThreadPoolExecutor(1) as thread:
        hanging = thread.submit(read, cache_of(), [3], hang)
        assert begun.wait(30)
        read(cache := cache_of(), [3, 4], decode)
        assert decoded(log) == [3, 4]
        goes_on.set()
        hanging.result(30)
    read(cache, [5], decode)
    assert len(files_of(units)) == 3


def test_one_that_cannot_be_decoded_is_an_error_in_each_process(units: SharedFolder, log: Path) -> None:
    """The error is raised, and the next process tries again."""

    def fail(number: int) -> ArrayUnit:
        raise OSError(errno.EIO, f"unit {number}")

    for _ in range(2):
        with pytest.raises(OSError, match="unit 3"):
            read(cache_of(), [3], fail)
    assert files_of(units) == []
    read(cache_of(), [3], decoding(log))
    assert decoded(log) == [3]


def test_the_files_are_limited_in_bytes(units: SharedFolder, log: Path) -> None:
    """The least recently mapped ones are removed, one stays whatever its size, and memory follows the files."""
    limit = 6 * UNIT_BYTES
    one, other = cache_of(limit), cache_of(limit)
    for number in range(40):
        read(one, [number], decoding(log))
        read(other, [number], decoding(log))
        assert allocated_by(files_of(units)) <= limit * 17 / 16
    assert decoded(log) == list(range(40))
    read(one, [0], decoding(log))
    read(one, [41], decoding(log))
    assert set(other._entries) > {39}
    other.get_all({50: 1}, decoding(log), 1)
    assert len(other) <= 1 + len(files_of(units))
    tiny = UnitCache[Any, ArrayUnit](1, ArrayFiles(), "b")
    for number in (1, 2):
        read(tiny, [number], decoding(log))
        assert len(list(Path(units.path, "b").glob("[!t]*"))) == 1
    small = UnitCache[Any, ArrayUnit](1 << 14, ArrayFiles(), "c")
    for number in range(20):
        small.get_all({number: 1}, lambda number: ArrayUnit(np.array([number])), 1)
        assert allocated_by(list(Path(units.path, "c").glob("[!t]*"))) <= (1 << 14) * 17 / 16


def test_without_room_each_process_decodes(units: SharedFolder, log: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that cannot be written ends sharing with one warning; so does, silently, a folder that is gone."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (UNIT_BYTES // 2, before[1]))
    try:
        for number in range(3):
            read(cache := cache_of(), [number, number + 10], decoding(log))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert files_of(units) == []
    assert len(caplog.records) == 3
    assert "cannot share decoded units" in caplog.text
    caplog.clear()
    read(cache, [20], decoding(log))
    assert files_of(units) == []
    read(cache := cache_of(), [30], decoding(log))
    units.remove()
    read(cache, [30, 31], decoding(log))
    read(cache_of(), [31], decoding(log))
    assert not caplog.records


def test_a_folder_ends_with_its_process() -> None:
    """It is private; its process removes it, and a forked one does not; that of a killed one, the next process."""
    folder = SharedFolder()
    assert Path(folder.path).stat().st_mode & 0o777 == 0o700
    child = fork(folder.remove)
    assert os.waitpid(child, 0)[1] == 0
    other = SharedFolder()
    assert Path(folder.path).exists()
    path = folder.path
    folder.remove()
    folder.remove()
    assert not Path(path).exists()
    other.remove()

    answer, asked = os.pipe()

    def be_killed() -> None:
        folder = SharedFolder()
        Path(folder.path, "a").mkdir()
        Path(folder.path, "a", "b").touch()
        os.write(asked, folder.path.encode())
        os.kill(os.getpid(), signal.SIGKILL)

    child = fork(be_killed)
    os.waitpid(child, 0)
    left = Path(os.read(answer, 1000).decode())
    os.close(answer)
    os.close(asked)
    assert (left / "a" / "b").exists()
    SharedFolder().remove()
    assert not left.exists()


def parquet(folder: Path, rows: Any) -> tuple[Any, Callable[[Any], Any]]:
    pq.write_table(pa.table({"x": rows.reshape(len(rows), -1).tolist()}), folder / "a.parquet", row_group_size=16)
    return millstream.ParquetDataSource(folder / "a.parquet"), lambda source: source._decoded_groups.units


def hdf5(folder: Path, rows: Any) -> tuple[Any, Callable[[Any], Any]]:
    with h5py.File(folder / "a.h5", "w") as file:
        file.create_dataset("x", data=rows, chunks=(16, *rows.shape[1:]), compression="gzip")
    return millstream.Hdf5DataSource({"x": str(folder / "a.h5" / "x")}), lambda source: source._chunks


def zarr(folder: Path, rows: Any) -> tuple[Any, Callable[[Any], Any]]:
    codecs = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "zstd", "configuration": {"level": 1}}]
    grid = {"name": "regular", "configuration": {"chunk_shape": [16, *rows.shape[1:]]}}
    metadata = {"shape": list(rows.shape), "data_type": rows.dtype.name, "chunk_grid": grid, "codecs": codecs}
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{folder}/x/"}, "metadata": metadata}
    tensorstore.open(spec, create=True).result().write(rows).result()
    return millstream.ZarrDataSource({"x": folder / "x"}), lambda source: source._decoded


@pytest.mark.third_party
@pytest.mark.parametrize("write", [parquet, hdf5, zarr])
def test_copies_of_a_source_share_its_units(
    units: SharedFolder, tmp_path: Path, write: Callable[[Path, Any], tuple[Any, Callable[[Any], Any]]]
) -> None:
    """The source of each worker is a pickled copy: one of them decodes a unit, and all read the same rows."""
    rows = np.arange(64 * 2048, dtype=np.int32).reshape(64, 2048)
    source, cache = write(tmp_path, rows)
    copies = [pickle.loads(pickle.dumps(source)) for _ in range(3)]
    for copy in copies:
        assert [record["x"].tolist() for record in copy.__getitems__(list(range(64)))] == rows.tolist()
    assert sum(entry.is_decoded for one in (source, *copies) for entry in cache(one)._entries.values()) == 4
    assert len(files_of(units)) == 4


class Counted(millstream.ParquetDataSource):
    """Writes down which row groups were decoded."""

    log = ""

    def _decoded(self, number: int, key: int, row: int) -> Any:
        with Path(self.log).open("a") as file:
            file.write(f"{number}\n")
        return super()._decoded(number, key, row)


@pytest.mark.parametrize(("workers", "cache_bytes"), [(2, 1 << 28), (4, 1 << 28), (2, 1 << 15)])
def test_workers_decode_a_row_group_once(tmp_path: Path, log: Path, workers: int, cache_bytes: int) -> None:
    """The batches are those without workers; each row group is decoded once if all fit; the end leaves no folder."""
    rows = {"text": [f"{n} ä" * (n % 9) for n in range(1200)], "odd": [[n] * (n % 3) for n in range(1200)]}
    pq.write_table(pa.table(rows), tmp_path / "a.parquet", row_group_size=50)
    source = Counted(tmp_path / "a.parquet", cache_bytes=cache_bytes)
    source.log = str(log)
    options: dict[str, Any] = {"batch_size": 30, "shuffle": True, "seed": 1, "num_epochs": 1, "batch_fn": repr}
    expected = list(millstream.load(source, **options))
    log.unlink()
    with millstream.load(source, **options, worker_count=workers) as loader:
        assert list(loader) == expected
    if source.window_units is None:
        assert decoded(log) == list(range(24))
    assert not list(Path("/dev/shm").glob(f"millstream-units-{os.getpid()}-*"))


def test_threads_that_remove_a_folder_together_remove_it_once() -> None:
    """Two threads may close an iterator at the same time: none closes a descriptor that the other one has closed."""
    for _ in range(50):
        folder = SharedFolder()
        with ThreadPoolExecutor(4) as threads:
            for removed in [threads.submit(folder.remove) for _ in range(4)]:
                removed.result()
        assert folder.path == ""
