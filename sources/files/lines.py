"""Records that end with a newline: their offsets in a file of text, and their encoding."""

import codecs
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.sources.files.spans import Scan, SpanRequest

_NEWLINE = 10

_BLANK_READ_BYTES = 4096
"""The size of a read of a line that may be blank."""


def text_start(scan: Scan) -> int:
    """Returns the offset of the text of a file: after a byte order mark of UTF-8, if there is one."""
    return len(codecs.BOM_UTF8) if scan.read(0, len(codecs.BOM_UTF8)) == codecs.BOM_UTF8 else 0


def decode_texts(texts: list[bytes], encoding: str, request: SpanRequest) -> list[str]:
    decoded: list[str] = []
    try:
        decoded.extend(text.decode(encoding) for text in texts)
    except UnicodeDecodeError as error:
        raise request.error(
            len(decoded),
            f"it is not {encoding}: {error.reason} at its byte {error.start}. Pass the encoding of the file.",
        ) from error
    return decoded


def record_starts(
    scan: Scan, blanks: bytes, newlines: Callable[[NDArray[np.uint8]], NDArray[np.int64]]
) -> Iterator[NDArray[np.int64]]:
    """Yields the offsets of records that end with a newline, without blank lines, and at last the size of the file.

    A blank line, which may have the bytes `blanks` besides its newline, belongs to the record before it. `newlines`
    returns the offsets, in the next block of the file, of the newlines that end a record.
    """
    begin, at_start = text_start(scan), True
    for start, block in scan.blocks():
        ends = newlines(block)
        lines = np.concatenate([[begin], ends + 1]) if at_start else ends + 1
        begin = 0
        at_start = bool(ends.size) and int(ends[-1]) == len(block) - 1
        lines = lines[lines < len(block)]
        first = block[lines]
        are_blank = first == _NEWLINE
        for number in np.flatnonzero(np.isin(first, np.frombuffer(blanks, np.uint8))).tolist():
            are_blank[number] = _is_blank(scan, start + int(lines[number]), blanks)
        yield lines[~are_blank] + start
    yield np.array([scan.size])


def _is_blank(scan: Scan, offset: int, blanks: bytes) -> bool:
    """Returns True if the line that begins at an offset has nothing but blanks."""
    while content := scan.read(offset, _BLANK_READ_BYTES):
        if remainder := content.lstrip(blanks):
            return remainder[0] == _NEWLINE
        offset += len(content)
    return True


def checked_encoding(encoding: Any) -> str:
    """Returns the standard name of the encoding; refuses encodings whose lines cannot be found by their newlines."""
    if not isinstance(encoding, str):
        raise TypeError(f"encoding must be a str, such as 'utf-8', got {type(encoding).__name__}.")
    try:
        name = codecs.lookup(encoding).name
        newline = "\n".encode(encoding)
    except LookupError as error:
        raise ValueError(f"encoding must be the name of a text encoding, got {encoding!r}: {error}.") from error
    if name == "utf-8-sig":
        return "utf-8"
    if newline != b"\n":
        raise ValueError(
            f"encoding must have the newline as the byte 10, got {encoding!r}: its lines cannot be found. Convert the "
            "files to UTF-8."
        )
    return name
