"""Writes files of records, by other code than the one that reads them."""

import io
import struct
import tarfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import google_crc32c


def masked_crc(data: bytes) -> bytes:
    """Returns the checksum as a TFRecord file stores it."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def tfrecord_bytes(records: Iterable[bytes]) -> bytes:
    """Returns the content of a TFRecord file."""
    parts = []
    for record in records:
        length = struct.pack("<Q", len(record))
        parts += [length, masked_crc(length), record, masked_crc(record)]
    return b"".join(parts)


def write_tfrecord(path: Path, records: Iterable[bytes]) -> Path:
    """Writes a TFRecord file, and returns its path."""
    path.write_bytes(tfrecord_bytes(records))
    return path


def write_tar(path: Path, files: Iterable[tuple[str, bytes]], tar_format: int = tarfile.PAX_FORMAT) -> Path:
    """Writes an archive of files by name, in their order, and returns its path."""
    with tarfile.open(path, "w", format=tar_format) as archive:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def every_record(source: Any) -> list[Any]:
    """Returns all records of a source, by one batched read."""
    return list(source.__getitems__(range(len(source))))
