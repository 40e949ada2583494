"""One file of a conversion, the unit of its work: written, noted, compared.

Guarantees:
    - A unit can be written by several processes at once, as engines do that take a slow one for dead: each has a file
      of its own until it is whole, all of them have the same records, and the last one stays.
    - What a unit holds is noted before its file appears under its name: a file that is there has its note.
"""

import contextlib
import fcntl
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from millstream.errors import DataSourceError
from millstream.sources.array_record import ArrayRecordDataSource
from millstream.sources.bagz import BagzDataSource
from millstream.sources.storage.new_files import new_file
from millstream.sources.storage.paths import FileIdentity
from millstream.tools.conversion_progress import RecordCounts
from millstream.tools.lengths_cache import store_lengths
from millstream.tools.record_encoding import encoded
from millstream.tools.record_sizes import sizes_mark
from millstream.tools.record_writers import new_writer

if TYPE_CHECKING:
    from millstream.tools.conversion import Conversion

_BLOCK_BYTES = 4 << 20
_BLOCK_RECORDS = 1024
_FIRST_RECORDS = 16
"""How much is read at once: bytes and records at most, and records at first."""


class UnitContent(NamedTuple):
    """What is in a file.

    Attributes:
        records: how many.
        num_bytes: how many bytes they have, before any compression.
        checksum: a CRC-32 of their lengths and bytes, in order.
    """

    records: int = 0
    num_bytes: int = 0
    checksum: int = 0

    def plus(self, records: Iterable[bytes]) -> "UnitContent":
        """Returns what is there with more records after these."""
        count, num_bytes, checksum = self
        for record in records:
            count, num_bytes = count + 1, num_bytes + len(record)
            checksum = zlib.crc32(record, zlib.crc32(len(record).to_bytes(8, "little"), checksum))
        return UnitContent(count, num_bytes, checksum)


def write_unit(conversion: "Conversion", counts: RecordCounts, shard: int) -> None:
    """Writes one file from its beginning, whatever is left of an earlier attempt.

    Raises:
        OSError: it cannot be written; DataSourceError, what goes into it cannot be read.
    """
    with open(conversion.writers, "rb") as lock:  # noqa: PTH123
        fcntl.flock(lock, fcntl.LOCK_SH)
        attempt = f"{shard}-{os.urandom(6).hex()}{conversion.extension}"
        unfinished = os.path.join(conversion.folder, attempt)  # noqa: PTH118
        writer = new_writer(unfinished, conversion.extension, conversion.compression)
        content = UnitContent()
        try:
            for some in _blocks(conversion, conversion.range_of(shard)):
                writer.write(some)
                content = content.plus(some)
                counts.set(shard, content.records)
            sizes = writer.finish()
            with new_file(_note_of(conversion, shard)) as note:
                note.write(json.dumps(content).encode())
        except BaseException:
            writer.abandon()
            with contextlib.suppress(FileNotFoundError):  # Where it could not even be begun.
                os.unlink(unfinished)  # noqa: PTH108
            raise
        target = conversion.targets[shard]
        os.replace(unfinished, target)  # noqa: PTH105
        if conversion.extension == ".array_record":  # The others say it themselves.
            store_lengths(target, sizes_mark(FileIdentity.of(target)), sizes)


def noted_content(conversion: "Conversion", shard: int) -> UnitContent:
    """Returns what was written into a file."""
    with open(_note_of(conversion, shard), encoding="utf-8") as file:  # noqa: PTH123
        return UnitContent(*json.load(file))


def compare_unit(conversion: "Conversion", shard: int) -> None:
    """Reads a whole file, and compares it with what was written.

    Raises:
        DataSourceError: it has something else in it. It is removed, so that it will be written again.
    """
    path, written = conversion.targets[shard], noted_content(conversion, shard)
    kind = ArrayRecordDataSource if conversion.extension == ".array_record" else BagzDataSource
    found = UnitContent()
    try:
        with kind(path) as source:
            for start in range(0, len(source), _BLOCK_RECORDS):
                found = found.plus(source.__getitems__(range(len(source))[start : start + _BLOCK_RECORDS]))
    except OSError as error:
        os.unlink(path)  # noqa: PTH108
        raise DataSourceError(f"{path!r} cannot be read after it was written, and was removed: {error}") from error
    if found != written:
        os.unlink(path)  # noqa: PTH108
        raise DataSourceError(
            f"{path!r} was removed, since it has {found} instead of {written}, which was written to it. Run the same "
            "command again."
        )


def _note_of(conversion: "Conversion", shard: int) -> str:
    return os.path.join(conversion.folder, f"{shard}.json")  # noqa: PTH118


def _blocks(conversion: "Conversion", keys: Sequence[int]) -> Iterator[list[bytes]]:
    """Yields the records of some keys, in order, as bytes."""
    done, step = 0, _FIRST_RECORDS
    while done < len(keys):
        some = keys[done : done + step]
        records = encoded(conversion.source.__getitems__(some), some, conversion.encoding)
        done += len(some)
        yield records
        mean = max(1, int(np.mean(list(map(len, records)))))
        step = max(1, min(_BLOCK_RECORDS, _BLOCK_BYTES // mean))
