"""Files of framed records: length and CRC-32, four bytes each, and the bytes."""

import struct
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import millstream

FRAME_BYTES = 8


def frame_of(record: bytes) -> bytes:
    """Returns what stands before a record."""
    return struct.pack("<II", len(record), zlib.crc32(record))


class Framed(millstream.SpanFormat[bytes]):
    """A record is bytes. The index needs the lengths, and each read the checksum."""

    index_kind = "framed"

    def offsets(self, scan: Any) -> Iterator[Any]:
        """Yields the offsets of the frames, and the end of the last record."""
        found = [0]
        while found[-1] < scan.size:
            (length,) = struct.unpack(
                "<I4x", scan.read(found[-1], FRAME_BYTES).ljust(FRAME_BYTES)
            )
            found.append(found[-1] + FRAME_BYTES + length)
        if found[-1] > scan.size:
            raise millstream.DataSourceError(
                f"{scan.path!r} ends within a record. Restore the file."
            )
        yield np.array(found)

    def decode(self, spans: list[bytes], request: Any) -> list[bytes]:
        """Returns the records without their frames."""
        records = [span[FRAME_BYTES:] for span in spans]
        for row, (span, record) in enumerate(zip(spans, records, strict=True)):
            if span[:FRAME_BYTES] != frame_of(record):
                raise request.error(row, "it is damaged. Restore the file.")
        return records


def write(path: str, records: Iterable[bytes]) -> None:
    """Writes a file."""
    Path(path).write_bytes(b"".join(frame_of(record) + record for record in records))


FORMAT = millstream.FileFormat("framed", (".framed",), Framed)
