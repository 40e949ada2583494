"""The members of a tar archive, one after another.

A member is a header of 512 bytes and its data, padded to a multiple of 512 bytes. The formats ustar and pax
(POSIX.1-1988 and -2001) and GNU's differ in the position of long names and large sizes: in a prefix in the header, in a
pax member before it, in a member of type L before it, or as a number in base 256. Blocks of zeros end the archive.
"""

import re
from collections.abc import Callable, Iterator

BLOCK_BYTES = 512

_ZEROS = bytes(BLOCK_BYTES)
# Sets of numbers: `in` takes a tenth of the time that it takes in bytes.
_REGULAR_TYPES = frozenset(b"0\x007")
_SPARSE_TYPE = ord("S")
_PAX_TYPE = ord("x")
_LONG_NAME_TYPE = ord("L")
_EXTENSION_TYPES = frozenset(b"xgLK")
_MAX_EXTENSION_BYTES = 1 << 20
"""Limit of the size of an extension, which is read into memory: a sparse file may have one of any size."""

_PAX_SIZE = re.compile(rb"\d{1,18}")
_PAX_RECORD = re.compile(rb"(\d{1,18}) ")


TarFile = tuple[str, int, int, int, int]
"""A regular file in an archive. A plain tuple, because each record that is read has several.

The full name; the offset of its headers, including that of a long name; the offset and the size of its data; the offset
of the next member.
"""


class TarError(ValueError):
    """There is no valid member at an offset."""


def tar_files(read: Callable[[int, int], bytes], stop: int, *, checks_headers: bool) -> Iterator[TarFile]:
    """Yields the regular files of an archive, or of a slice of one that ends at `stop`; other members are skipped.

    `read` returns the bytes from an offset on, fewer than requested only at the end. If the checksums of headers are
    compared (data have none), the archive must also end with zeros, as one that was not cut short does.
    """
    offset, start = 0, 0
    long_name, long_size = None, None  # From the extensions of the next member.
    is_ended = False
    while offset < stop:
        header = read(offset, BLOCK_BYTES)
        if header == _ZEROS:
            is_ended, offset = True, offset + BLOCK_BYTES
            start = offset
            continue
        is_ended = False
        if len(header) < BLOCK_BYTES or (checks_headers and not _is_header(header)):
            raise TarError(f"there is no header of a member at byte {offset:,}")
        kind = header[156]
        is_extension = kind in _EXTENSION_TYPES
        name = _name(header) if long_name is None or is_extension else long_name
        size = _number(header[124:136]) if long_size is None or is_extension else long_size
        is_file = kind in _REGULAR_TYPES and name[-1:] != "/"
        if kind == _SPARSE_TYPE:
            raise TarError(
                f"the member at byte {offset:,} is a sparse file, which is not supported. Write it without --sparse"
            )
        # Links, folders and devices have no data, whatever their size field is.
        if not is_file and ord("1") <= kind <= ord("6"):
            size = 0
        data = offset + BLOCK_BYTES
        if data + size > stop:
            raise TarError(f"{name!r}, at byte {start:,}, ends beyond it")
        offset = data + size + -size % BLOCK_BYTES
        if is_extension:
            content = read(data, min(size, _MAX_EXTENSION_BYTES + 1))
            long_name, long_size = _extended(kind, content, long_name, long_size)
            continue
        if is_file:
            yield name, start, data, size, offset
        start = offset
        long_name, long_size = None, None
    if checks_headers and not is_ended:
        raise TarError("the zeros at its end are missing")


def _is_header(header: bytes) -> bool:
    """Returns True if the checksum of a header is right. Its own eight bytes count as blanks."""
    try:
        stored = _number(header[148:156])
    except TarError:
        return False
    return sum(header) - sum(header[148:156]) + 8 * ord(" ") == stored


def _name(header: bytes) -> str:
    """Returns the name in a header, with its prefix."""
    name = _text(header[:100])
    # Other formats than POSIX's have other fields there.
    return f"{_text(header[345:500])}/{name}" if header[345] and header[257:263] == b"ustar\x00" else name


def _number(field: bytes) -> int:
    """Returns a number of a header: octal digits, or base 256 after a byte that is 128."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\x00")[0].strip()
    if digits.strip(b"01234567"):
        raise TarError(f"{digits!r} is not a number in a header")
    return int(digits or b"0", 8)


def _extended(kind: int, content: bytes, name: str | None, size: int | None) -> tuple[str | None, int | None]:
    """Returns the name and the size of the next member: those of an extension, else the given ones."""
    if len(content) > _MAX_EXTENSION_BYTES:
        raise TarError(f"an extended header has more than {_MAX_EXTENSION_BYTES:,} bytes")
    if kind == _LONG_NAME_TYPE:
        return _text(content), size
    return _pax(content, name, size) if kind == _PAX_TYPE else (name, size)


def _pax(content: bytes, name: str | None, size: int | None) -> tuple[str | None, int | None]:
    """Returns the same for a pax member."""
    offset = 0
    while offset < len(content) and content[offset]:
        match = _PAX_RECORD.match(content, offset)
        length = int(match[1]) if match else 0
        record = content[match.end() if match else offset : offset + length]
        key, equals, value = record.rstrip(b"\n").partition(b"=")
        if not (length and equals and offset + length <= len(content)):
            raise TarError("a pax header is damaged")
        if key == b"path":
            name = _text(value)
        elif key == b"size":
            if not _PAX_SIZE.fullmatch(value):
                raise TarError("a pax header is damaged")
            size = int(value)
        elif key.startswith(b"GNU.sparse."):
            raise TarError("a member is a sparse file, which is not supported. Write it without --sparse")
        offset += length
    return name, size


def _text(field: bytes) -> str:
    return field.partition(b"\x00")[0].decode("utf-8", "surrogateescape")
