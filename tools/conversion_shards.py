"""The files of a conversion, each with the records of a range of keys.

Unfinished files are in a hidden folder beside the destination, `.NAME.conversion`, with the plan of the conversion, and
a lock file for the processes that write.
"""

import contextlib
import dataclasses
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from typing import Any, final

import numpy as np

from millstream.dataset.map_dataset import MapDataset
from millstream.loader.checkpoints.fingerprint import fingerprint_of
from millstream.samplers import SequentialSampler
from millstream.sources.digests import digest
from millstream.sources.files.paths import FileIdentity
from millstream.sources.files.private_files import new_file
from millstream.sources.source_checks import batched_read_of
from millstream.tools.record_encoding import Encoding, encode_records
from millstream.tools.record_writers import companion_of, compression_level, new_writer
from millstream.tools.underlying_sources import files_of, inputs_of, origin_of, underlying_sources

_VERSION = 4

_BLOCK_BYTES = 4 << 20
_BLOCK_RECORDS = 1024
_FIRST_RECORDS = 16
"""Limits of one read: bytes and records, and the number of records of the first read."""


@final
@dataclasses.dataclass(frozen=True)
class Conversion:
    """The records of a source, and the files that they are written to.

    Attributes:
        source: the records. Absent elements of a `MapDataset` are skipped.
        destination: the file to write, or the name from which the names of several files are formed.
        compression: as for `new_writer`.

    Raises:
        ValueError: there are more files than records, the format lacks the compression, or a file is both read and
            written.
    """

    source: Any
    destination: str
    encoding: Encoding
    compression: str | None
    num_shards: int

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
    def targets(self) -> list[str]:
        """The paths of the files, in the order of their records."""
        if self.num_shards == 1:
            return [self.destination]
        stem = self.destination.removesuffix(self.extension)
        return [f"{stem}-{n:05}-of-{self.num_shards:05}{self.extension}" for n in range(self.num_shards)]

    @property
    def outputs(self) -> list[str]:
        """The targets, each with its second file, if any."""
        return [path for target in self.targets for path in (target, companion_of(target)) if path is not None]

    @property
    def folder(self) -> str:
        """The folder of unfinished files."""
        folder, name = os.path.split(self.destination)
        return os.path.join(folder, f".{name}.conversion")  # noqa: PTH118

    @property
    def writers(self) -> str:
        """The file that every writing process holds a lock on."""
        return os.path.join(self.folder, "writers")  # noqa: PTH118

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


def write_shard(conversion: Conversion, shard: int, report: Callable[[int], None] | None) -> None:
    """Writes one file from its beginning, and replaces what an earlier attempt left.

    `report` is called with the number of source records of each block.
    """
    with open(conversion.writers, "rb") as lock:  # noqa: PTH123
        fcntl.flock(lock, fcntl.LOCK_SH)
        unfinished = os.path.join(conversion.folder, f"{shard}{conversion.extension}")  # noqa: PTH118
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)  # noqa: PTH108
        writer = new_writer(unfinished, conversion.encoding, conversion.compression)
        try:
            last: tuple[int, str] | None = None
            for num_keys, records, last_key in _blocks(conversion, conversion.range_of(shard)):
                writer.write(records)
                last = last if last_key is None else (last_key, _digest_of(records[-1]))
                if report is not None:
                    report(num_keys)
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


def _blocks(conversion: Conversion, keys: range) -> Iterator[tuple[int, list[bytes], int | None]]:
    """Yields blocks of a few megabytes: the number of keys, the encoded records, and the key of the last of these."""
    source, done, step = conversion.source, 0, _FIRST_RECORDS
    read, skips_none = batched_read_of(source), isinstance(source, MapDataset)
    while done < len(keys):
        block = keys[done : done + step]
        elements = [source[key] for key in block] if read is None else read(block)
        records = encode_records(conversion.encoding, elements, block, skips_none=skips_none)
        done += len(block)
        written = [key for key, element in zip(block, elements, strict=True) if not (skips_none and element is None)]
        yield len(block), records, written[-1] if written else None
        mean = max(1, int(np.mean(list(map(len, records))))) if records else 1
        step = max(1, min(_BLOCK_RECORDS, _BLOCK_BYTES // mean))
