"""Files of formats whose records are pieces of a file: written here, and found again without any loader.

Beside each file, `<name>.pieces.npy` says where the records are, as the bare loop needs it: int64, shape (records, 2).
"""

import csv
import dataclasses
import io
import json
import struct
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

CSV_COLUMNS = ("id", *(f"x{number}" for number in range(8)))
"""The names in the first row of a CSV file."""

_TAR_BLOCK = 512


@dataclasses.dataclass(frozen=True)
class Format:
    """A kind of file.

    Attributes:
        suffix: of the files' names.
        frame: returns what comes before a record, the record's piece, and what comes after it.
        decode: makes the record of its piece, with the standard library.
        head: what a file begins with.
        foot: returns what a file ends with, from where its pieces begin and how long they are.
    """

    suffix: str
    frame: Callable[[Any], tuple[bytes, bytes, bytes]]
    decode: Callable[[bytes], Any]
    head: bytes = b""
    foot: Callable[[NDArray[np.int64]], bytes] = lambda _: b""


def write(form: Format, records: Callable[[int], Iterable[Any]], part: int, pieces_path: Path, path: Path) -> None:
    pieces = []
    with path.open("wb") as file:
        file.write(form.head)
        for record in records(part):
            before, piece, after = form.frame(record)
            pieces.append((file.tell() + len(before), len(piece)))
            file.write(before + piece + after)
        places = np.array(pieces, np.int64)
        file.write(form.foot(places))
    np.save(pieces_path, places)


def pieces_of(path: str) -> NDArray[np.int64]:
    """Returns where each record of a file begins and how long it is, shape (records, 2)."""
    places: NDArray[np.int64] = np.load(pieces_path_of(Path(path)))
    return places


def pieces_path_of(path: Path) -> Path:
    """Returns the path of the file that says where the records of a file are."""
    return path.with_name(f"{path.name}.pieces.npy")


def _tfrecord_frame(record: bytes) -> tuple[bytes, bytes, bytes]:
    length = struct.pack("<Q", len(record))
    return length + _masked_crc(length), record, _masked_crc(record)


def _masked_crc(data: bytes) -> bytes:
    import google_crc32c  # noqa: PLC0415  (only to write files)

    crc = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def _bagz_limits(places: NDArray[np.int64]) -> bytes:
    return bytes(places.sum(axis=1).astype("<u8"))


def _csv_frame(row: dict[str, Any]) -> tuple[bytes, bytes, bytes]:
    return b"", ",".join(str(row[name]) for name in CSV_COLUMNS).encode(), b"\n"


def _csv_row(line: bytes) -> dict[str, str]:
    return dict(zip(CSV_COLUMNS, next(csv.reader([line.decode()])), strict=True))


def _tar_frame(sample: dict[str, Any]) -> tuple[bytes, bytes, bytes]:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for extension, content in sample.items():
            if extension != "__key__":
                member = tarfile.TarInfo(f"{sample['__key__']}.{extension}")
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
        length = archive.offset
    return b"", file.getvalue()[:length], b""


def _tar_sample(piece: bytes) -> dict[str, Any]:
    sample: dict[str, Any] = {}
    place = 0
    while place < len(piece):
        name = piece[place : place + 100].rstrip(b"\0").decode()
        size = int(piece[place + 124 : place + 135], 8)
        sample["__key__"], _, extension = name.partition(".")
        place += _TAR_BLOCK
        sample[extension] = piece[place : place + size]
        place += -(-size // _TAR_BLOCK) * _TAR_BLOCK
    return sample


FORMATS = {
    "tfrecord": Format("tfrecord", _tfrecord_frame, bytes),
    "bagz": Format("bag", lambda record: (b"", record, b""), bytes, foot=_bagz_limits),
    "text": Format("txt", lambda line: (b"", line.encode(), b"\n"), bytes.decode),
    "json_lines": Format("jsonl", lambda value: (b"", json.dumps(value).encode(), b"\n"), json.loads),
    "csv": Format("csv", _csv_frame, _csv_row, head=f"{','.join(CSV_COLUMNS)}\n".encode()),
    "webdataset": Format("tar", _tar_frame, _tar_sample, foot=lambda _: bytes(2 * _TAR_BLOCK)),
}
"""By name."""
