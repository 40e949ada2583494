"""Copies of remote files: bounded, shared by processes, made again when they are gone."""

import contextlib
import itertools
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zstandard

import millstream
from millstream.errors import DataSourceError
from millstream.samplers import HierarchicalSampler
from millstream.sources import FileCache, TFRecordDataSource
from millstream.sources.files import file_cache
from millstream.sources.files.paths import FileIdentity
from support.faults.memory_limits import limited
from support.files.record_files import every_record, records_of, tfrecord_bytes
from support.processes.process_tree import open_descriptors
from support.stores.object_server import ObjectServer, Request

pytestmark = pytest.mark.third_party

FILES = 8
ROWS = 25
RECORDS = [f"file {key // ROWS} row {key % ROWS} ".encode() * 40 for key in range(FILES * ROWS)]
CONTENTS = [tfrecord_bytes(RECORDS[number * ROWS : number * ROWS + ROWS]) for number in range(FILES)]
LARGEST = max(map(len, CONTENTS))


@pytest.fixture
def urls(store: ObjectServer) -> list[str]:
    """Eight files."""
    store.objects.update({f"bucket/{number}": content for number, content in enumerate(CONTENTS)})
    return [f"{store.url}/bucket/{number}" for number in range(FILES)]


def copies(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "lock")


def total(folder: Path) -> int:
    """Returns how large all files in a folder are."""
    found = 0
    for name in os.listdir(folder) if folder.exists() else ():  # noqa: PTH208
        try:
            found += (folder / name).stat().st_size
        except FileNotFoundError:
            continue  # It has just been taken away.
    return found


def copied(store: ObjectServer) -> list[str]:
    """Returns which files were copied, in order, one for each time: each of these fits into one request."""
    return [request.key for request in store.requests if request.start == 0 and (request.stop or 0) > LARGEST * 0.9]


def test_each_file_is_copied_once(store: ObjectServer, urls: list[str], tmp_path: Path) -> None:
    """At its first read, by default to `files` in the folder of indices; later sources only request its version."""
    cache = FileCache(FILES * LARGEST)
    with TFRecordDataSource(urls, cache=cache) as source:
        assert every_record(source) == RECORDS
        store.forget()
        assert source.__getitems__(range(0, 200, 3)) == RECORDS[::3]
        assert store.requests == []
    assert records_of(TFRecordDataSource(urls, cache=FileCache(FILES * LARGEST))) == RECORDS
    assert len(store.requests) == FILES
    assert len(copies(tmp_path / "cache" / "files")) == FILES


READER = """
import sys, numpy as np, millstream
from millstream.sources.remote import object_clients
object_clients.FIRST_DELAY_SECONDS = 0.01
seed, bound, folder, *urls = sys.argv[1:]
with millstream.TFRecordDataSource(urls, cache=millstream.FileCache(int(bound), folder)) as source:
    keys = np.random.default_rng(int(seed)).integers(0, len(source), (20, 5))
    for row in keys:
        for key, record in zip(row, source.__getitems__(row)):
            assert record.startswith(b"file %d row %d " % (key // 25, key % 25)), (key, record)
print("done")
"""


def test_the_bound_holds_whoever_fills_it(store: ObjectServer, urls: list[str], tmp_path: Path) -> None:
    """Two processes and four threads want all of the files, in room for three of them: each gets every record."""
    folder = tmp_path / "copies"
    bound = 3 * LARGEST
    store.latency = 0.002
    words = [sys.executable, "-c", READER]
    running = [
        subprocess.Popen([*words, str(seed), str(bound), str(folder), *urls], cwd=tmp_path, stdout=subprocess.PIPE)
        for seed in range(2)
    ]
    is_over = threading.Event()
    largest = 0

    def watch() -> None:
        nonlocal largest
        while not is_over.is_set():
            largest = max(largest, total(folder))

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        with TFRecordDataSource(urls, cache=FileCache(bound, folder)) as source, ThreadPoolExecutor(4) as threads:
            rows = np.random.default_rng(9).integers(0, len(RECORDS), (20, 5))
            assert list(threads.map(source.__getitems__, rows)) == [[RECORDS[key] for key in row] for row in rows]
        assert [process.communicate()[0] for process in running] == [b"done\n"] * 2
    finally:
        is_over.set()
        watcher.join()
    assert LARGEST < max(largest, total(folder)) <= bound
    assert [name for name in copies(folder) if name.endswith(".part")] == []


def test_the_room_of_an_open_copy_is_free_at_once(urls: list[str], tmp_path: Path) -> None:
    """A source that has it open copies it again when it needs it; nothing is read of a copy that is gone."""
    cache = FileCache(LARGEST, tmp_path / "copies")
    with TFRecordDataSource(urls[0], cache=cache) as one, TFRecordDataSource(urls[1], cache=cache) as other:
        for _ in range(3):
            assert one[4] == RECORDS[4]
            assert other[4] == RECORDS[ROWS + 4]
            descriptors = [path for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
            held = [path.stat() for path in descriptors if str(path.readlink()).startswith(str(tmp_path / "copies"))]
            assert sum(status.st_size for status in held if not status.st_nlink) == 0
            assert total(tmp_path / "copies") <= LARGEST


def test_idle_files_are_closed_for_a_copy_if_no_descriptor_is_free(urls: list[str], tmp_path: Path) -> None:
    """The copy is opened as any other file is: the source closes files that nobody reads, one after another."""
    cache = FileCache(FILES * LARGEST, tmp_path / "copies")
    assert records_of(TFRecordDataSource(urls, cache=cache)) == RECORDS
    taken: list[int] = []
    with TFRecordDataSource(urls, cache=cache) as source:
        assert source.__getitems__(range(0, 7 * ROWS, ROWS)) == RECORDS[: 7 * ROWS : ROWS]
        with limited(resource.RLIMIT_NOFILE, len(open_descriptors()) + 50):
            with contextlib.suppress(OSError):
                while True:
                    taken.append(os.open(os.devnull, os.O_RDONLY))
            record = source[7 * ROWS]
        for descriptor in taken:
            os.close(descriptor)
        assert record == RECORDS[7 * ROWS]


def test_what_a_killed_process_leaves_is_taken_away(store: ObjectServer, urls: list[str], tmp_path: Path) -> None:
    """Half a copy neither keeps its room nor is mistaken for a whole one."""
    folder = tmp_path / "copies"
    TFRecordDataSource(urls).close()
    reached = threading.Event()

    def hang(request: Any) -> str | None:
        if (request.stop or 0) - (request.start or 0) < 1000:
            return None
        reached.set()
        return "hang"

    store.failure = hang
    process = subprocess.Popen([sys.executable, "-c", READER, "0", str(LARGEST), str(folder), urls[0]], cwd=tmp_path)
    assert reached.wait(60)
    assert [name[-5:] for name in copies(folder)] == [".part"]
    process.send_signal(signal.SIGKILL)
    process.wait()
    store.failure = lambda _: None
    assert records_of(TFRecordDataSource(urls[1], cache=FileCache(LARGEST, folder))) == RECORDS[ROWS : 2 * ROWS]
    assert len(copies(folder)) == 1


def replace_by_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(
    "damage",
    [lambda path: os.truncate(path, 10), lambda path: path.write_bytes(CONTENTS[0][::-1]), replace_by_pipe],
    ids=["cut short", "written to", "a pipe"],
)
def test_a_damaged_copy_is_made_again(
    urls: list[str], tmp_path: Path, damage: Callable[[Path], Any], is_open: bool
) -> None:
    """A copy that is cut, has other content of its size, or is a pipe, is noticed by this source and by others."""
    cache = FileCache(LARGEST, tmp_path / "copies")
    with TFRecordDataSource(urls[0], cache=cache) as source:
        assert every_record(source) == RECORDS[:ROWS]
        (name,) = copies(tmp_path / "copies")
        copy = tmp_path / "copies" / name
        damage(copy)
        if is_open:
            assert every_record(source) == RECORDS[:ROWS]
    assert records_of(TFRecordDataSource(urls[0], cache=cache)) == RECORDS[:ROWS]
    assert copy.read_bytes() == CONTENTS[0]


@pytest.mark.parametrize("suffix", ["", ".part"])
def test_nothing_outside_the_folder_is_touched(urls: list[str], tmp_path: Path, suffix: str) -> None:
    """Links in the folder are neither followed nor used, and files of others are neither counted nor removed."""
    cache = FileCache(LARGEST, tmp_path / "copies")
    with TFRecordDataSource(urls[0], cache=cache) as source:
        assert source[3] == RECORDS[3]
    (name,) = copies(tmp_path / "copies")
    thesis, weights = tmp_path / "thesis", tmp_path / "weights"
    thesis.write_bytes(CONTENTS[0])
    weights.write_bytes(CONTENTS[0])
    (tmp_path / "copies" / name).unlink()
    (tmp_path / "copies" / "mine.txt").write_bytes(bytes(10 * LARGEST))
    (tmp_path / "copies" / f"{name}{suffix}").symlink_to(thesis)
    (tmp_path / "copies" / "model.0123456789abcdef").hardlink_to(weights)
    (tmp_path / "copies" / "other.0123456789abcdef").symlink_to(thesis)
    with TFRecordDataSource(urls[:3], cache=cache) as source:
        assert every_record(source) == RECORDS[: 3 * ROWS]
        assert every_record(source) == RECORDS[: 3 * ROWS]
    assert thesis.read_bytes() == weights.read_bytes() == CONTENTS[0]
    assert (tmp_path / "copies" / "mine.txt").stat().st_size == 10 * LARGEST


def test_the_folder_is_private(urls: list[str], tmp_path: Path) -> None:
    """New folders have mode 0700; a folder of another user, or one that others may write to, is an error."""
    with TFRecordDataSource(urls[0], cache=FileCache(LARGEST, tmp_path / "new" / "copies")) as source:
        assert source[3] == RECORDS[3]
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("new", "new/copies")] == [0o700, 0o700]
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o1777)
    theirs = Path("/")
    if os.geteuid() == 0:
        theirs = tmp_path / "theirs"
        theirs.mkdir()
        os.chown(theirs, 65534, 65534)
    for folder, message in ((tmp_path / "open", "chmod 700"), (theirs, "another user")):
        with (
            TFRecordDataSource(urls[0], cache=FileCache(LARGEST, folder)) as source,
            pytest.raises(DataSourceError, match=message),
        ):
            source[3]
        assert not (folder / "lock").exists()


@pytest.mark.parametrize(("worker_count", "room", "most"), [(0, 4, 2 * FILES), (2, FILES, FILES)])
def test_a_hierarchical_order_copies_each_file_once_an_epoch(
    store: ObjectServer, urls: list[str], worker_count: int, room: int, most: int
) -> None:
    """With room for two windows, or in workers with room for all; the records are those of the files."""
    cache = FileCache(room * LARGEST)

    def batches(source: Any, worker_count: int) -> list[Any]:
        sampler = HierarchicalSampler(source.unit_sizes, window_units=2, seed=1, num_epochs=2)
        operations, options = [millstream.Batch(10)], millstream.ReadOptions(num_threads=0)
        with millstream.DataLoader(
            data_source=source, sampler=sampler, operations=operations, worker_count=worker_count, read_options=options
        ) as loader:
            return [batch.tolist() for batch in loader]

    with TFRecordDataSource(urls) as plain, TFRecordDataSource(urls, cache=cache) as source:
        assert source.unit_sizes.tolist() == [ROWS] * FILES
        expected = batches(plain, 0)
        store.forget()
        assert batches(source, worker_count) == expected
    assert len(copied(store)) <= most
    assert total(Path(cache.folder)) <= room * LARGEST


@pytest.mark.parametrize("failure", [403, 500, "removed", "replaced"])
def test_a_copy_that_fails_leaves_nothing(
    store: ObjectServer, urls: list[str], tmp_path: Path, failure: int | str
) -> None:
    """The error has record and object; when the store is well again, so is the source."""
    with TFRecordDataSource(urls[0]) as source:
        assert len(source) == ROWS
    with TFRecordDataSource(urls[0], cache=FileCache(LARGEST, tmp_path / "copies")) as source:
        if isinstance(failure, int):
            store.failure = lambda _: failure
        elif failure == "removed":
            del store.objects["bucket/0"]
        else:
            store.objects["bucket/0"] = CONTENTS[0][::-1]
        with pytest.raises(DataSourceError, match=r"record 2 of .*record key 2\).*bucket/0"):
            source[2]
        assert copies(tmp_path / "copies") == []
        store.failure = lambda _: None
        store.objects["bucket/0"] = CONTENTS[0]
        assert source[2] == RECORDS[2]


@pytest.mark.parametrize(
    ("folder", "limit", "message"),
    [("copies", 1000, "No such file"), ("copies", 100, "File too large"), ("mds.zstd/x", 1000, "'.*/x': Not a dir")],
)
def test_a_copy_that_cannot_begin_is_not_waited_for(tmp_path: Path, folder: str, limit: int, message: str) -> None:
    """If the file is gone, the disk full or the folder a file, the next reader gets that error, too."""
    cache, path = FileCache(1 << 20, tmp_path / folder), tmp_path / "mds.zstd"
    path.write_bytes(zstandard.compress(bytes(1000)))
    identity = FileIdentity.of(str(path))
    if "No such" in message:
        path.unlink()
    for _ in range(2):
        error = pytest.raises(DataSourceError, match=rf"Cannot copy '.*mds\.zstd' .*{message}")
        with limited(resource.RLIMIT_FSIZE, limit), error:
            cache.acquire(str(path), identity, 1000)
    assert not (tmp_path / "copies").exists() or copies(tmp_path / "copies") == []


def test_a_file_larger_than_the_bound_is_refused(urls: list[str]) -> None:
    """A file that does not fit into the cache is an error at construction, with both sizes; so is a bound of 0."""
    with pytest.raises(ValueError, match="max_bytes must be at least 1, got 0"):
        FileCache(0)
    with pytest.raises(ValueError, match=rf"max_bytes of the cache must be .*, but '.*bucket/0' has .* got {100:,}"):
        TFRecordDataSource(urls, cache=FileCache(100))


def test_room_that_never_comes_is_an_error(urls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Waiting for room that other readers hold ends with an error after the time limit."""
    monkeypatch.setattr(file_cache, "STALL_SECONDS", 0.2)
    cache = FileCache(LARGEST, tmp_path / "copies")
    with TFRecordDataSource(urls[0], cache=cache) as one, TFRecordDataSource(urls[1]) as plain:
        copy = cache.acquire(urls[0], one._identities[urls[0]])
        with pytest.raises(DataSourceError, match=r"Timed out copying .*: other readers hold all .* bytes of it"):
            cache.acquire(urls[1], plain._identities[urls[1]])
        copy.release()
        other = cache.acquire(urls[1], plain._identities[urls[1]])
        assert not copy.reacquire()
        copy.close()
        other.close()


def test_who_waits_for_a_copy_takes_no_room_for_another(
    store: ObjectServer, urls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waiting for a file that another thread copies evicts nothing."""
    monkeypatch.setattr(file_cache, "STALL_SECONDS", 0.2)
    cache = FileCache(2 * LARGEST)
    TFRecordDataSource(urls).close()
    with TFRecordDataSource(urls, cache=cache) as source, ThreadPoolExecutor(1) as thread:
        assert source[0] == RECORDS[0]
        is_copying, may_end = threading.Event(), threading.Event()

        def waits(request: Request) -> None:
            if request.key == "bucket/1":
                is_copying.set()
                may_end.wait()

        store.failure = waits
        reading = thread.submit(source.__getitem__, ROWS)
        assert is_copying.wait(60)
        with pytest.raises(DataSourceError, match="Timed out"):
            cache.acquire(urls[1], source._identities[urls[1]])
        may_end.set()
        assert reading.result() == RECORDS[ROWS]
        store.forget()
        assert source[1] == RECORDS[1]
    assert store.requests == []


def test_content_is_not_unpacked_beyond_its_size(tmp_path: Path) -> None:
    """Content that never ends is an error as soon as it exceeds the size, and nothing beyond that is written."""
    path = tmp_path / "copy"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        with pytest.raises(DataSourceError, match=r"The content of 'a\.zst' has more than 250 bytes"):
            file_cache._write_all(descriptor, "a.zst", itertools.repeat(b"x" * 100), 250)
    finally:
        os.close(descriptor)
    assert path.stat().st_size == 200
