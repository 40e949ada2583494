"""Conversion of a source's records to files of another format: a loader whose batches are written.

Workers read and encode blocks of records, and this process writes them in order. Each file has the records of a range
of keys. Unfinished files are in a hidden folder beside the destination, `.NAME.conversion`, with the plan of the
conversion.

Guarantees:
    - A file appears under its final name only when it is complete and on disk.
    - A conversion whose process or machine died continues when it is called again: files under their final names are
      finished, the others are written again.
    - A conversion continues only with the same records, options and code, and if it converts a few records to the
      same bytes again. A second process with the same destination is refused.
    - The folder of unfinished files belongs to this user, no other user can write to it, and nothing is written through
      a link.
    - Only the process that holds the lock of that folder writes. Workers write nothing.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_flag, as_integer, named_arguments
from millstream.dataset.iter_dataset import IterDataset
from millstream.dataset.map_dataset import MapDataset
from millstream.loader import DataLoader, ReadOptions
from millstream.loader.checkpoints.fingerprint import fingerprint_of
from millstream.loader.cluster.options import RayWorkers
from millstream.loader.threads.options import available_cores
from millstream.samplers import SequentialSampler
from millstream.sharding import NoSharding
from millstream.sources import DataSource, HuggingFaceDataSource, ImageFolderDataSource
from millstream.sources.digests import digest
from millstream.sources.files.paths import FileIdentity
from millstream.sources.files.private_files import check_private, full_disk_named, new_file
from millstream.sources.files.progress import Progress
from millstream.sources.source_checks import batched_read_of, check_source, opened
from millstream.tools.record_writers import (
    AUTO,
    BIN_EXTENSION,
    ENCODINGS,
    EXTENSIONS,
    Encoding,
    choose_encoding,
    companion_of,
    compressed,
    compression_level,
    encode_records,
    new_writer,
    token_encoding,
)
from millstream.tools.underlying_sources import check_end, files_of, inputs_of, origin_of, underlying_sources
from millstream.transforms import Map

_VERSION = 4

_BLOCK_BYTES = 4 << 20
_BLOCK_RECORDS = 1024
"""The bytes of a block, about, and the maximum number of its records."""

_MEASURED_RECORDS = 16
"""The number of records whose mean size decides how many records a block has."""


@final
@dataclasses.dataclass(frozen=True)
class Conversion:
    """The records of a source, and the files that they are written to.

    Attributes:
        source: the records. Absent elements of a `MapDataset` are skipped.
        destination: the file to write, or the name from which the names of several files are formed.
        compression: as for `new_writer`.
        num_shards: the number of files of the whole conversion.
        shards: the numbers of those to write, sorted.

    Raises:
        ValueError: there are more files than records, the format lacks the compression, or a file is both read and
            written.
    """

    source: Any
    destination: str
    encoding: Encoding
    compression: str | None
    num_shards: int
    shards: Sequence[int]

    def __post_init__(self) -> None:
        compression_level(self.extension, self.compression)
        if not 1 <= self.num_shards <= len(self.source):
            raise ValueError(
                f"Cannot write {len(self.source):,} records to {self.num_shards:,} files: each file needs at least one."
            )
        existing = set(map(os.path.realpath, filter(os.path.lexists, self.outputs)))
        inputs = (path for source in underlying_sources(self.source) for path in inputs_of(source))
        if existing and (both := existing & set(map(os.path.realpath, inputs))):
            raise ValueError(f"{both.pop()!r} is both an input and an output. Choose another destination.")

    @property
    def extension(self) -> str:
        return os.path.splitext(self.destination)[1]  # noqa: PTH122  (paths are strings throughout)

    @property
    def targets(self) -> dict[int, str]:
        """The paths of the files to write, by their numbers, in the order of their records."""
        if self.num_shards == 1:
            return {0: self.destination}
        stem = self.destination.removesuffix(self.extension)
        return {n: f"{stem}-{n:05}-of-{self.num_shards:05}{self.extension}" for n in self.shards}

    @property
    def outputs(self) -> list[str]:
        """The targets, each with its second file, if any."""
        return [path for target in self.targets.values() for path in (target, companion_of(target)) if path is not None]

    @property
    def folder(self) -> str:
        """The folder of unfinished files. Different parts of a conversion have different ones."""
        folder, name = os.path.split(self.destination)
        numbers = repr([self.num_shards, *self.shards]).encode()
        suffix = "" if len(self.shards) == self.num_shards else f"-{digest(4, numbers).hex()}"
        return os.path.join(folder, f".{name}.conversion{suffix}")  # noqa: PTH118

    @property
    def plan_path(self) -> str:
        return os.path.join(self.folder, "plan.json")  # noqa: PTH118

    def range_of(self, shard: int) -> range:
        count = len(self.source)
        return range(count * shard // self.num_shards, count * (shard + 1) // self.num_shards)

    def plan(self) -> dict[str, Any]:
        """Returns the values that must be equal to resume."""
        own = fingerprint_of(self.source, SequentialSampler(len(self.source)), [])
        return {
            "version": _VERSION,
            "source": [dict(own.identity), {} if files_of(self.source) is not None else dict(own.content)],
            "origins": [origin_of(source) for source in underlying_sources(self.source)],
            "files": [[identity.size, identity.modified] for identity in self._files().values()],
            "encode": dataclasses.asdict(self.encoding),
            "compression": self.compression,
            "shards": self.num_shards,
        }

    def last_record(self, shard: int) -> str:
        """Returns the path of the file that keeps the key and the digest of the last record of a finished target."""
        return os.path.join(self.folder, f"{shard}.last")  # noqa: PTH118

    def is_converted_alike(self, shard: int) -> bool:
        """Returns True if the last record of a finished target is converted to the same bytes again."""
        try:
            with open(self.last_record(shard), encoding="utf-8") as file:  # noqa: PTH123
                key, before = json.load(file)
        except FileNotFoundError:  # It has no records.
            return True
        skips_none = isinstance(self.source, MapDataset)
        records = encode_records(self.encoding, [self.source[key]], [key], skips_none=skips_none)
        return list(map(_digest_of, records)) == [before]

    def _files(self) -> dict[str, FileIdentity]:
        sources = underlying_sources(self.source)
        return {path: identity for source in sources for path, identity in (files_of(source) or {}).items()}

    def blocks_of(self, shard: int, num_records: int) -> list[range]:
        """Returns the keys of each block of a file."""
        keys = self.range_of(shard)
        return [keys[start : start + num_records] for start in range(0, len(keys), num_records)]

    def block(self, keys: range) -> "Block":
        """Reads and encodes the records of consecutive keys."""
        source, skips_none = self.source, isinstance(self.source, MapDataset)
        read = batched_read_of(source)
        elements = [source[key] for key in keys] if read is None else read(keys)
        records = encode_records(self.encoding, elements, keys, skips_none=skips_none)
        written = [key for key, element in zip(keys, elements, strict=True) if not (skips_none and element is None)]
        last = (written[-1], _digest_of(records[-1])) if records else None
        records = compressed(records, self.extension, self.compression)
        return Block(np.frombuffer(b"".join(records), np.uint8), np.array(list(map(len, records)), np.int64), last)


class Block(NamedTuple):
    """The encoded records of consecutive keys.

    Attributes:
        data: the concatenated records; uint8.
        sizes: the number of bytes of each; int64, shape (records,).
        last: the key of the last record, and its digest before compression; None if there is no record.
    """

    data: NDArray[np.uint8]
    sizes: NDArray[np.int64]
    last: tuple[int, str] | None


@contextlib.contextmanager
def _written_file(conversion: Conversion, shard: int) -> Iterator[Callable[[Block], None]]:
    """Yields a function that appends a block to a file, which gets its name at the end of the `with`."""
    unfinished = os.path.join(conversion.folder, f"{shard}{conversion.extension}")  # noqa: PTH118
    # A conversion that this one has replaced may have left both.
    for path in (unfinished, conversion.last_record(shard)):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108
    writer = new_writer(unfinished, conversion.encoding, conversion.compression)
    last: tuple[int, str] | None = None

    def write(block: Block) -> None:
        nonlocal last
        writer.write(block.data, block.sizes)
        last = block.last or last

    try:
        with full_disk_named(conversion.targets[shard]):
            yield write
            writer.finish()
    except BaseException:
        writer.abandon()
        raise
    if last is not None:
        with new_file(conversion.last_record(shard)) as file:
            file.write(json.dumps(last).encode())
    target = conversion.targets[shard]
    if (companion := companion_of(unfinished)) is not None:
        os.replace(companion, f"{companion_of(target)}")  # noqa: PTH105
    os.replace(unfinished, target)  # noqa: PTH105


def _digest_of(record: bytes) -> str:
    return digest(8, record).hex()


_COMPARED_TARGETS = 4
"""The number of finished files of which a record is converted again when a conversion is resumed."""


@named_arguments()
def convert(
    data_source: DataSource[Any] | str | os.PathLike[str],
    destination: str | os.PathLike[str],
    *,
    encode: str = AUTO,
    feature: str | None = None,
    dtype: Any = None,
    compression: str | None = None,
    num_shards: int = 1,
    shards: Sequence[int] | None = None,
    worker_count: int | None = None,
    workers: RayWorkers | None = None,
    overwrite: bool = False,
) -> list[str]:
    """Writes the records of a source, or the elements of a `MapDataset`, to files, and returns their paths.

    Use it to do expensive work once, such as tokenizing, instead of in every epoch of every run. A progress bar shows
    the number of records done. A conversion that was killed continues when it is called again with the same arguments.

    Args:
        data_source: the records, or a path, glob or URL of a format that `load` knows. Elements of a `MapDataset` that
            are None, such as those that a filter drops, are skipped. Images stay as they are stored, and a label of a
            folder of images or of a Hugging Face dataset has the name of its class beside it, as `label_name`.
        destination: the file to write. Its extension selects the format: `.array_record`, `.bag` or `.bagz` hold
            records of bytes; `.bin` holds tokens, with their lengths in an `.idx` file beside it, to be read by
            `TokenDataSource` and `MegatronDataSource`.
        encode: the encoding of records of bytes: `raw` (bytes, text and arrays unchanged), `json`, `example`
            (`tf.train.Example`, for dicts), or `auto`, which selects one of these by the first record.
        feature: for tokens, the entry of dicts that holds them; None if there is just one, or if elements are the
            tokens themselves, arrays or lists of integers.
        dtype: for tokens, their dtype in the file, such as `"uint16"`; None for the dtype of the arrays.
        compression: the compression of each record: `none`, `zstd`, or `zstd:LEVEL`; None for the fastest to read.
        num_shards: the number of files. If there are several, they are `NAME-00000-of-0000N.EXTENSION` and so on, and
            each has a contiguous range of the records.
        shards: the numbers of the files to write, such as `[0, 5]`; None for all. The jobs of an array each write some,
            concurrently if they have none in common: the files are those of a whole conversion.
        worker_count: the number of worker processes, which read and encode; 0 for this process only, None for one per
            core. This process writes.
        workers: actors of a Ray cluster, `RayWorkers(...)`, instead of worker processes. The files are written by this
            process, so the nodes need only the inputs.
        overwrite: True to replace files of these names, and an unfinished conversion with other records or options.

    Raises:
        FileExistsError: a file of that name exists.
        BlockingIOError: another process is writing to this destination.
        PermissionError: the folder of unfinished files belongs to another user, or other users may write to it.
        TypeError, ValueError: an argument is invalid, the source is empty or endless, or an unfinished conversion has
            other records or options.
        OSError: a file cannot be read (DataSourceError if it is damaged) or written.

    Examples:
        >>> texts = millstream.MapDataset.source(["a b c", "d"])
        >>> tokens = texts.map(lambda text: np.array([ord(word) for word in text.split()], np.uint16))
        >>> millstream.convert(tokens, "words.bin", worker_count=0)  # doctest: +ELLIPSIS
        ['...words.bin']
        >>> len(millstream.MegatronDataSource("words.bin")), len(millstream.TokenDataSource("words.bin", window=4))
        (2, 1)
    """
    if isinstance(data_source, DataLoader | IterDataset):
        raise TypeError(
            f"data_source must have random access, as a source or a MapDataset has, got {type(data_source).__name__}. "
            "Write the operations as MapDataset.source(source).map(function)."
        )
    data_source = opened(data_source)
    check_source(data_source, "data_source")
    check_end(data_source)
    if isinstance(data_source, ImageFolderDataSource | HuggingFaceDataSource):
        data_source = data_source.for_conversion()
    path = os.path.join(os.getcwd(), os.path.expanduser(os.fspath(destination)))  # noqa: PTH109, PTH111, PTH118
    if not path.endswith(EXTENSIONS):
        raise ValueError(f"destination must end in {', '.join(EXTENSIONS[:-1])} or {EXTENSIONS[-1]}, got {path!r}.")
    if encode != AUTO and encode not in ENCODINGS:
        raise ValueError(f"encode must be one of {AUTO}, {', '.join(ENCODINGS)}, got {encode!r}.")
    count = as_integer(num_shards, "num_shards", minimum=1)
    if workers is not None and worker_count is not None:
        raise ValueError(f"worker_count must be None with workers, got {worker_count}. Remove one of them.")
    processes = available_cores() if worker_count is None else as_integer(worker_count, "worker_count", minimum=0)
    encoding = _encoding_of(data_source, path, encode, feature, dtype)
    conversion = Conversion(data_source, path, encoding, compression, count, _checked_shards(shards, count))
    _run(conversion, 0 if workers is not None else processes, workers, overwrite=as_flag(overwrite, "overwrite"))
    return list(conversion.targets.values())


def _checked_shards(shards: Sequence[int] | None, count: int) -> Sequence[int]:
    if shards is None:
        return range(count)
    numbers = sorted({as_integer(shard, "A number in shards", minimum=0) for shard in shards})
    if not numbers or numbers[-1] >= count:
        raise ValueError(f"shards must be numbers of files from 0 to {count - 1}, at least one, got {list(shards)}.")
    return numbers


def _encoding_of(source: Any, path: str, encode: str, feature: str | None, dtype: Any) -> Encoding:
    keys = range(len(source))
    first = next((key for key in keys if source[key] is not None), None) if isinstance(source, MapDataset) else 0
    if first is None:
        raise ValueError("data_source must have at least one element that is not absent.")
    record = source[first]
    if path.endswith(BIN_EXTENSION):
        encoding = token_encoding(record, feature, dtype)
    elif feature is not None or dtype is not None:
        raise ValueError(f"feature and dtype are for tokens, which are written to {BIN_EXTENSION} files, got {path!r}.")
    else:
        encoding = choose_encoding(record) if encode == AUTO else Encoding(encode)
    encode_records(encoding, [record], [first])
    return encoding


def _run(conversion: Conversion, worker_count: int, workers: RayWorkers | None, *, overwrite: bool) -> None:
    folder = conversion.folder
    os.makedirs(os.path.dirname(folder), exist_ok=True)  # noqa: PTH103, PTH120
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)  # noqa: PTH102
    with _locked(folder, conversion.destination):
        try:
            _begin_or_resume(conversion, overwrite=overwrite)
            _write_missing(conversion, worker_count, workers)
        except BaseException:
            # Without a plan, files under the final names are others.
            has_begun = os.path.exists(conversion.plan_path)  # noqa: PTH110
            if not (has_begun and any(map(os.path.exists, conversion.targets.values()))):  # Nothing to resume.
                shutil.rmtree(folder)
            raise
        shutil.rmtree(folder)


def _begin_or_resume(conversion: Conversion, *, overwrite: bool) -> None:
    """Stores the plan. Afterwards, every target that exists was written by this plan."""
    path = conversion.plan_path
    # As read from the file: tuples are lists there.
    plan = json.loads(json.dumps(conversion.plan()))
    try:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123
            begun = json.load(file)
    except FileNotFoundError:
        begun = None
    existing = list(filter(os.path.lexists, conversion.outputs))
    if begun == plan:
        finished = [shard for shard, target in conversion.targets.items() if os.path.exists(target)]  # noqa: PTH110
        if all(map(conversion.is_converted_alike, finished[:: len(finished) // _COMPARED_TARGETS + 1])):
            return
        if not overwrite:
            raise ValueError(
                f"Cannot resume the conversion to {conversion.destination!r}: a record is converted to other bytes "
                "than in the finished files. A vocabulary, or the `hash()` of a text, may differ. Restore it, or pass "
                "--overwrite (overwrite=True) to start over."
            )
    if begun not in (None, plan) and existing and not overwrite:
        other = next((name for name in plan if begun.get(name) != plan[name]), "version")
        raise ValueError(
            f"An unfinished conversion to {conversion.destination!r} has a different {other}: {begun.get(other)}, here "
            f"{plan[other]}. Resume it with the same {other}, or pass --overwrite (overwrite=True) to start over."
        )
    if existing and not overwrite:
        raise FileExistsError(
            f"{existing[0]!r} exists. Pass --overwrite (overwrite=True) to replace it, or choose another name."
        )
    for output in existing:
        os.unlink(output)  # noqa: PTH108
    with new_file(path) as file:
        file.write(json.dumps(plan).encode())


def _write_missing(conversion: Conversion, worker_count: int, workers: RayWorkers | None) -> None:
    todo = [number for number, target in conversion.targets.items() if not os.path.exists(target)]  # noqa: PTH110
    if not todo:
        return
    num_records = _records_of_block(conversion, todo[0])
    blocks = {shard: conversion.blocks_of(shard, num_records) for shard in todo}
    order = [keys for shard in todo for keys in blocks[shard]]
    counts = {shard: len(conversion.range_of(shard)) for shard in conversion.shards}
    loader = DataLoader(
        data_source=order,
        sampler=SequentialSampler(len(order)),
        operations=[_ReadBlock(conversion)],
        worker_count=min(worker_count, len(order)) if len(order) > 1 else 0,
        worker_buffer_size=2,
        workers=workers,
        shard_options=NoSharding(),
        read_options=ReadOptions(num_threads=0),
        stall_timeout=float("inf"),
    )
    progress = Progress(f"Writing {conversion.destination!r}", sum(counts.values()), "records")
    with contextlib.closing(progress), loader, contextlib.closing(iter(loader)) as batches:
        progress.advance(sum(counts.values()) - sum(map(counts.__getitem__, todo)))
        for shard in todo:
            with _written_file(conversion, shard) as write:
                for keys in blocks[shard]:
                    write(next(batches))
                    progress.advance(len(keys))


def _records_of_block(conversion: Conversion, shard: int) -> int:
    """Returns the number of records of a few megabytes, as the first records of a file are."""
    keys = conversion.range_of(shard)[:_MEASURED_RECORDS]
    data = conversion.block(keys).data
    return int(np.clip(_BLOCK_BYTES * len(keys) // max(1, len(data)), 1, _BLOCK_RECORDS))


@final
class _ReadBlock(Map[range, Block]):
    def __init__(self, conversion: Conversion) -> None:
        self._conversion = conversion

    def map(self, keys: range, /) -> Block:
        return self._conversion.block(keys)


@contextlib.contextmanager
def _locked(folder: str, destination: str) -> Iterator[None]:
    """Holds the lock of a folder, which ends with this process."""
    remedy = "Remove it, or choose another destination"
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except NotADirectoryError as error:
        raise NotADirectoryError(error.errno, f"This must be a folder of this user. {remedy}", folder) from None
    try:
        check_private(descriptor, folder, remedy)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise BlockingIOError(f"Another process is writing {destination!r}.") from error
        yield
    finally:
        os.close(descriptor)
