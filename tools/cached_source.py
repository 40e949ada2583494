"""Results of expensive operations, stored on a local disk as they are read.

The store is LMDB, a B-tree in a file that any number of processes map into memory. A folder of the user contains

    DIGEST-2/data.mdb, lock.mdb  the store of one source, by the digest of its fingerprint and the version of the layout
    DIGEST-2/users               a lock file: shared by the processes that use the store
    lock                         the lock of those that open or evict a store

Many small records are one value, because LMDB would fill up a page for each. An entry of the index has
the positions of ROWS records with consecutive keys, and the structures of records are stored once (`record_layouts`).

Guarantees:
    - A stored record is the one that the source returns: a changed operation, file or parameter is another store, and
      a few records are compared when the source is constructed.
    - A process that is killed, and a disk that is full, lose records that were not stored yet, and nothing else.
    - A store is opened once per process, and evicted only while no process uses it. LMDB cannot open it again in a
      child that was forked, which computes its records.
    - Reading never waits for a process that writes.
    - Without the store, as after an error of the disk, records are computed, which is logged once.
"""

import contextlib
import copy
import fcntl
import os
import pickle
import shutil
import struct
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, final

from millstream.core.checks import as_integer, named_arguments
from millstream.core.descriptions import described
from millstream.core.warn import log_warning
from millstream.sources.base import (
    ReadsSource,
    RecordKeys,
    checked_record_keys,
    fingerprint_of,
    fixed_source,
    loader_view,
)
from millstream.sources.files.private_files import make_private_folder, open_private
from millstream.sources.source_checks import batched_read_of, check_source, opened, reads_one_by_one
from millstream.tools.record_layouts import Layout, codec_of, layout_of
from millstream.tools.underlying_sources import check_end, digest_of_source

ROWS = 64
"""The number of records in an entry of the index."""

_POSITION = struct.Struct("<II")
"""A row of an entry: the number of the value, from 1, and the offset of the record in it; zeros without. Records know
where they end."""

_NO_ROWS = bytes(ROWS * _POSITION.size)

_LAYOUT = struct.Struct("<H")
"""The number of the layout of a record, before its content; 0 for a pickle."""

_VALUE_BYTES = 1 << 17
"""The largest value with several records. LMDB fills up the last page of each, and reads a byte of each page of it."""

_MAX_LAYOUTS = 1000
"""The limit of the layouts of one store. Records with others are pickled."""

_VERSION = "-2"

_KEY = struct.Struct("<Q")

_WRITTEN_BYTES, _WRITTEN_SECONDS = 8 << 20, 1.0
"""Records are written together: this many bytes, or what was computed in this time."""

_UNLIMITED_BYTES = 1 << 42
"""The address space for a store without a limit. Only what it contains takes memory and disk."""

_MAX_READERS = 4096
"""The limit of threads that read at a time, in all processes. Each takes 64 bytes."""

_READER_TABLE_BYTES = _MAX_READERS * 64 + 4096

_COMPARED_RECORDS = 4

_PASSED_ON = ("unit_sizes", "window_units", "unit_numbers", "locate", "classes", "labels")
"""The attributes of the source that orders and reports use."""


@final
class CachedDataSource(ReadsSource):
    """The records of another source, kept on a local disk after they were first read.

    Use it for operations that are expensive and not random, such as decoding and resizing images: put them into a
    `MapDataset`, and random operations after the cache. All workers and processes fill and read it, in any order. The
    stream is the same with and without the cache, so a run may resume with, without, or with another one.

    The cache belongs to the source: if an operation, a parameter or a file changes, it begins again, and the old one is
    removed. As for checkpoints, this is decided by fingerprints, and a few records are compared at construction.

    Args:
        source_or_dataset: a source, the path of one, or a `MapDataset` without random operations. Its records can be
            pickled.
        path: the folder of the cache, on a local disk; `~` is expanded. It belongs to this user, and to this cache
            alone.
        max_bytes: the limit of the size of the cache. When it is reached, the records in it stay, and others are
            computed each time: any order of epochs then finds the same share. None for as much as the disk has.

    Attributes:
        source: the source; of a `MapDataset`, a copy that later changes of its operations do not reach.

    Raises:
        ImportError: LMDB is not installed: `pip install 'millstream[cache]'`.
        PermissionError: the folder belongs to another user, or other users may write to it.
        TypeError, ValueError: the source is not one, is random or endless; max_bytes is not at least 1 MiB.

    Reading raises what the source raises, and TypeError for a record that cannot be pickled.

    Examples:
        >>> dataset = millstream.MapDataset.source(range(100)).map(lambda number: np.full((2, 2), number))
        >>> source = millstream.CachedDataSource(dataset, "decoded")
        >>> loader = millstream.load(source, shuffle=True, seed=0, transformations=[np.negative], batch_size=8)
        >>> next(iter(loader)).shape
        (8, 2, 2)
    """

    @named_arguments()
    def __init__(self, source_or_dataset: Any, path: str | os.PathLike[str], *, max_bytes: int | None = None) -> None:
        _lmdb()
        if not isinstance(path, str | bytes | os.PathLike):
            raise TypeError(f"path must be the folder of the cache, such as 'decoded', got {path!r:.80}.")
        source = opened(source_or_dataset)
        check_source(source, "source_or_dataset")
        check_end(source)
        if loader_view(source).differs_by_epoch:
            raise ValueError(
                "source_or_dataset must have the same records in each epoch, got a chain with random or shuffled "
                "elements. Put the cache before them: MapDataset.source(CachedDataSource(...)).random_map(...)."
            )
        # A later change of an operation is not in the digest, so it must not reach the records.
        self.source, _ = fixed_source(source)
        self._folder = os.path.abspath(os.path.expanduser(os.fsdecode(path)))  # noqa: PTH100, PTH111
        self._max_bytes = None if max_bytes is None else as_integer(max_bytes, "max_bytes", minimum=1 << 20)
        self._digest = digest_of_source(source) + _VERSION
        self._store: _Store | None = None
        make_private_folder(self._folder)
        self._compare()

    def __len__(self) -> int:
        return len(self.source)

    def __repr__(self) -> str:
        return f"CachedDataSource({described(self.source)} in {self._folder!r})"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_store": None}

    def __getattr__(self, name: str) -> Any:
        if name in _PASSED_ON and "source" in vars(self):
            return getattr(self.source, name)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __getitems__(self, record_keys: RecordKeys) -> Sequence[Any]:
        """Returns the records of the keys, in their order; keys may repeat."""
        keys = checked_record_keys(record_keys, len(self)).tolist()
        store = self._opened()
        records: list[Any] = store.get(keys)
        missing = [row for row, record in enumerate(records) if record is _MISSING]
        if missing:
            rows = {keys[row]: row for row in missing}
            computed = self._compute(list(rows))
            store.put(list(rows), computed)
            for row, record in zip(rows.values(), computed, strict=True):
                records[row] = record
            for row in missing:
                if records[row] is _MISSING:  # The key repeats, and each position has its own record.
                    records[row] = copy.deepcopy(records[rows[keys[row]]])
        return records

    @property
    def reads_one_by_one(self) -> bool:
        """True if the source has no batched reads. Several threads then share the records of a batch."""
        return reads_one_by_one([self.source])

    def fingerprint(self) -> str:
        """Returns the fingerprint of the source, because the stream is the same, or its class if it has none."""
        return fingerprint_of(self.source)

    def close(self) -> None:
        """Stores what was computed, and closes the cache and the source."""
        if self._store is not None:
            self._finalizer()
            self._store = None
        super().close()

    def _compute(self, keys: Sequence[int]) -> Sequence[Any]:
        read = batched_read_of(self.source)
        return [self.source[key] for key in keys] if read is None else list(read(keys))

    def _opened(self) -> "_Store":
        store = self._store
        if store is None or store.process != os.getpid():
            store = _acquire(self._folder, self._digest, self._max_bytes or _UNLIMITED_BYTES)
            self._store = store
            self._finalizer = weakref.finalize(self, _release, store)
        return store

    def _compare(self) -> None:
        """Begins again if a few stored records are not those of the source: something that no fingerprint has."""
        store = self._opened()
        keys = store.some_keys(_COMPARED_RECORDS)
        if not keys:
            return
        computed = [_encoded(key, record) for key, record in zip(keys, self._compute(keys), strict=True)]
        if not all(map(store.holds, keys, computed)):
            log_warning(
                f"the records in the cache {self._folder!r} are not those of {described(self.source)}: a file or an "
                "object that an operation uses has changed. The cache begins again."
            )
            store.clear()


class _Missing:
    """The type of the mark of a record that is not stored."""


_MISSING: Any = _Missing()


class _Encoded(NamedTuple):
    """A record as it is stored: its layout, None for a pickle, and its content."""

    layout: Layout | None
    content: bytes

    def decode(self) -> Any:
        return _decoded(self.layout, memoryview(self.content))


def _encoded(key: int, record: Any) -> _Encoded:
    if (layout := layout_of(record)) is not None:
        return _Encoded(layout, codec_of(layout).encode(record))
    try:
        return _Encoded(None, pickle.dumps(record, 5))
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(f"Cannot cache record {key}: it cannot be pickled: {error}.") from error


def _decoded(layout: Layout | None, content: memoryview) -> Any:
    if layout is not None:
        return codec_of(layout).decode(content)
    return pickle.loads(content)  # noqa: S301  (of a folder of this user only, or encoded by this process)


@final
class _Store:
    """An open store, of one process."""

    def __init__(self, folder: str, max_bytes: int, *, is_inherited: bool = False) -> None:
        lmdb = _lmdb()
        self.process = os.getpid()
        self.num_users = 0
        self._folder = folder
        self._error: type[Exception] = lmdb.Error
        self._lock = threading.Lock()
        self._write_lock = threading.Lock()
        self._waiting: dict[int, _Encoded] = {}
        self._written: dict[int, _Encoded] = {}
        self._layouts: list[Layout | None] = [None]
        self._waiting_bytes = 0
        self._waiting_since = 0.0
        self._is_full = False
        self._env: Any = None
        if is_inherited:
            return
        try:
            _allocate_readers(os.path.join(folder, "lock.mdb"))  # noqa: PTH118  (paths are strings throughout)
            self._env = lmdb.open(
                folder, map_size=max_bytes, max_dbs=3, max_readers=_MAX_READERS, metasync=False, readahead=False
            )
            self._env.reader_check()  # Frees the entries of processes that were killed.
            self._index = self._env.open_db(b"index", integerkey=True)
            self._values = self._env.open_db(b"values", integerkey=True)
            self._layouts_by_number = self._env.open_db(b"layouts", integerkey=True)
        except (self._error, OSError) as error:
            self._stop(error)

    def get(self, keys: Sequence[int]) -> list[Any]:
        """Returns the records of the keys, each with its own memory, and `_MISSING` for those that are not stored."""
        self._write_if_due()
        if self._env is None:
            return [_MISSING] * len(keys)
        # In this order, before the snapshot of the store: each record is then found here or there.
        memory = self._waiting, self._written
        try:
            with self._env.begin(buffers=True) as transaction:
                index, values = transaction.cursor(self._index), transaction.cursor(self._values)
                return [self._record(transaction, index, values, memory, key) for key in keys]
        except self._error as error:
            self._stop(error)
            return [_MISSING] * len(keys)

    def _record(
        self, transaction: Any, index: Any, values: Any, memory: Sequence[Mapping[int, _Encoded]], key: int
    ) -> Any:
        """Returns a record from the store, given cursors, or from what is in memory, or `_MISSING`."""
        if (stored := self._stored(transaction, index, values, key)) is not None:
            return _decoded(*stored)
        found = next((records[key] for records in memory if key in records), None)
        return _MISSING if found is None else found.decode()

    def _stored(self, transaction: Any, index: Any, values: Any, key: int) -> tuple[Layout | None, memoryview] | None:
        """Returns the layout of a record, and its content with what follows it; None if it is not stored."""
        entry, row = divmod(key, ROWS)
        if not index.set_key(_KEY.pack(entry)):
            return None
        number, offset = _POSITION.unpack_from(index.value(), row * _POSITION.size)
        if not number or not values.set_key(_KEY.pack(number)):
            return None
        content = values.value()[offset:]
        (layout,) = _LAYOUT.unpack_from(content)
        if layout >= len(self._layouts):
            self._layouts = self._stored_layouts(transaction)
        return self._layouts[layout], content[_LAYOUT.size :]

    def holds(self, key: int, record: _Encoded) -> bool:
        """Returns True if the record of a key is stored, and is this one."""
        with self._env.begin(buffers=True) as transaction:
            stored = self._stored(transaction, transaction.cursor(self._index), transaction.cursor(self._values), key)
            # An encoded record has its end in it: it is no other one's beginning.
            return stored is not None and stored[0] == record.layout and stored[1][: len(record.content)] == record[1]

    def _stored_layouts(self, transaction: Any) -> list[Layout | None]:
        """Returns all layouts by their numbers, which never change: other processes have added some."""
        with transaction.cursor(self._layouts_by_number) as cursor:
            return [None, *(pickle.loads(layout) for _, layout in cursor)]  # noqa: S301  (as above)

    def some_keys(self, count: int) -> list[int]:
        """Returns up to `count` keys of stored records, spread over them."""
        if self._env is None:
            return []
        found: list[int] = []
        with self._env.begin() as transaction, transaction.cursor(self._index) as cursor:
            if cursor.last():
                (last,) = _KEY.unpack(cursor.key())
                for number in range(count):
                    if cursor.set_range(_KEY.pack(last * number // max(1, count - 1))):
                        (entry,) = _KEY.unpack(cursor.key())
                        rows = [row for row, position in enumerate(_rows_of(cursor.value())) if position[0]]
                        found.append(entry * ROWS + rows[number % len(rows)])
        return sorted(set(found))

    def put(self, keys: Sequence[int], records: Sequence[Any]) -> None:
        """Stores records, soon."""
        if self._env is None or self._is_full:
            return
        encoded = {key: _encoded(key, record) for key, record in zip(keys, records, strict=True)}
        with self._lock:
            self._waiting_since = self._waiting_since if self._waiting else time.monotonic()
            self._waiting.update(encoded)
            self._waiting_bytes += sum(len(record.content) for record in encoded.values())
        self._write_if_due()

    def _write_if_due(self) -> None:
        if not self._waiting:
            return
        if self._waiting_bytes >= _WRITTEN_BYTES or time.monotonic() - self._waiting_since >= _WRITTEN_SECONDS:
            self.write()

    def write(self) -> None:
        """Stores all records that wait for it."""
        with self._write_lock:
            with self._lock:
                self._written = self._waiting
                self._waiting, self._waiting_bytes = {}, 0
            if self._written and self._env is not None and not self._is_full:
                try:
                    self._write(self._written)
                except self._error as error:
                    self._is_full = True
                    log_warning(
                        f"the cache {self._folder!r} cannot grow: {error}. Its records stay, and others are computed "
                        "each time. Use a larger max_bytes, or another disk, to cache all."
                    )
            self._written = {}

    def _write(self, records: Mapping[int, _Encoded]) -> None:
        entries: dict[int, list[int]] = {}
        for key in records:
            entries.setdefault(key // ROWS, []).append(key)
        with self._env.begin(write=True) as transaction:
            with transaction.cursor(self._values) as cursor:
                value = _Value(_KEY.unpack(cursor.key())[0] + 1 if cursor.last() else 1)
            layouts = self._stored_layouts(transaction)
            numbers = {layout: number for number, layout in enumerate(layouts)}
            for entry, keys in entries.items():
                name = _KEY.pack(entry)
                rows = bytearray(transaction.get(name, default=_NO_ROWS, db=self._index))
                for key in keys:
                    start = key % ROWS * _POSITION.size
                    if _POSITION.unpack_from(rows, start)[0]:
                        continue
                    layout, content = records[key]
                    if layout not in numbers and len(numbers) > _MAX_LAYOUTS:
                        layout, content = None, pickle.dumps(records[key].decode(), 5)
                    if value.num_bytes and value.num_bytes + len(content) > _VALUE_BYTES:
                        value = self._put(value, transaction)
                    _POSITION.pack_into(rows, start, value.number, value.num_bytes)
                    value.add(_LAYOUT.pack(numbers.setdefault(layout, len(numbers))), content)
                transaction.put(name, rows, db=self._index)
            if value.num_bytes:
                self._put(value, transaction)
            for layout, number in [*numbers.items()][len(layouts) :]:
                transaction.put(_KEY.pack(number), pickle.dumps(layout, 5), db=self._layouts_by_number)

    def _put(self, value: "_Value", transaction: Any) -> "_Value":
        """Writes a value, and returns the next one."""
        transaction.put(_KEY.pack(value.number), b"".join(value.chunks), db=self._values, append=True)
        return _Value(value.number + 1)

    def clear(self) -> None:
        """Removes the records. The layouts stay, because other processes know them by their numbers."""
        with self._env.begin(write=True) as transaction:
            for database in (self._index, self._values):
                transaction.drop(database, delete=False)

    def close(self) -> None:
        if self.process != os.getpid():
            return
        self.write()
        if self._env is not None:
            self._env.close()
            self._env = None

    def _stop(self, error: Exception) -> None:
        self._env, reason = None, str(error).rstrip(".")
        log_warning(
            f"the cache {self._folder!r} cannot be used: {reason}. Records are computed instead. Remove the folder if "
            "it is damaged."
        )


def _allocate_readers(path: str) -> None:
    """Creates the table of readers with blocks on the disk, or raises OSError.

    LMDB itself creates a file without blocks, and writes to it through memory. On a disk that is full, the system then
    kills the process by SIGBUS.
    """
    try:
        descriptor = open_private(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    except FileExistsError:
        return
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            zeros = memoryview(bytes(_READER_TABLE_BYTES))
            while zeros:
                zeros = zeros[file.write(zeros) :]
    except BaseException:
        os.unlink(path)  # noqa: PTH108
        raise


@final
class _Value:
    """Records that are written together."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.chunks: list[bytes] = []
        self.num_bytes = 0

    def add(self, *chunks: bytes) -> None:
        self.chunks += chunks
        self.num_bytes += sum(map(len, chunks))


def _rows_of(entry: bytes) -> list[tuple[int, ...]]:
    return list(_POSITION.iter_unpack(entry))


_stores: dict[str, tuple[_Store, int]] = {}
"""The open stores of this process by their folders, each with the descriptor of its lock file of users."""

_inherited: dict[str, object] = {}
"""Stores of the process that this one was forked from, which must not be closed here."""

_forks_are_noticed = False

_lock = threading.RLock()  # Reentrant, because a finalizer may run in a thread that holds it.


def _after_fork() -> None:
    global _lock  # noqa: PLW0603  (a thread that does not exist here may hold it)
    _inherited.update(_stores)
    _stores.clear()
    _lock = threading.RLock()


def _acquire(root: str, digest: str, max_bytes: int) -> _Store:
    """Returns the store of a digest, opened if this process has not. Those of other digests are evicted."""
    global _forks_are_noticed  # noqa: PLW0603  (nothing happens at import)
    folder = os.path.join(root, digest)  # noqa: PTH118  (paths are strings throughout)
    with _lock:
        if folder not in _stores:
            if not _forks_are_noticed:
                _forks_are_noticed = True
                os.register_at_fork(after_in_child=_after_fork)
            make_private_folder(root)
            with os.fdopen(open_private(os.path.join(root, "lock"), os.O_RDWR | os.O_CREAT), "r+b") as lock:  # noqa: PTH118
                fcntl.flock(lock, fcntl.LOCK_EX)
                _evict_others(root, digest)
                make_private_folder(folder)
                users = open_private(os.path.join(folder, "users"), os.O_RDWR | os.O_CREAT)  # noqa: PTH118
                fcntl.flock(users, fcntl.LOCK_SH)
                _stores[folder] = _Store(folder, max_bytes, is_inherited=folder in _inherited), users
        store, _ = _stores[folder]
        store.num_users += 1
        return store


def _release(store: _Store) -> None:
    """Closes a store if no other source of this process uses it."""
    with _lock:
        store.num_users -= 1
        folder = next((folder for folder, (other, _) in _stores.items() if other is store), None)
        if store.num_users or folder is None:
            return
        _, users = _stores.pop(folder)
        store.close()
        os.close(users)


def _evict_others(root: str, digest: str) -> None:
    for name in os.listdir(root):  # noqa: PTH208
        folder = os.path.join(root, name)  # noqa: PTH118
        if name == digest or not os.path.isfile(os.path.join(folder, "users")):  # noqa: PTH113, PTH118
            continue
        with contextlib.suppress(OSError):
            users = open_private(os.path.join(folder, "users"), os.O_RDWR)  # noqa: PTH118
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)
            finally:
                os.close(users)


def _lmdb() -> Any:
    try:
        import lmdb  # noqa: PLC0415  (lazy: an optional package)
    except ImportError as error:
        raise ImportError("Cannot cache records without LMDB: pip install 'millstream[cache]'.") from error
    return lmdb
