"""The members of a tar archive, one after the other, as their headers say.

A member is a header of 512 bytes and its data, filled up to 512 bytes. The formats are ustar and pax (POSIX.1-1988 and
-2001) and GNU's, which differ in where a long name or a large size is: in a prefix in the header, in a pax member
before it, in a member of type L before it, or as a number in base 256. Blocks of zeros end the archive.
"""

import re
from collections.abc import Callable, Iterator

BLOCK_BYTES = 512

_ZEROS = bytes(BLOCK_BYTES)
# As numbers: `in` a set of them takes a tenth of the time that it takes in bytes.
_REGULAR_TYPES = frozenset(b"0\x007")
_SPARSE_TYPE = ord("S")
_PAX_TYPE = ord("x")
_LONG_NAME_TYPE = ord("L")
_EXTENSION_TYPES = frozenset(b"xgLK")
_PAX_SIZE = re.compile(rb"\d{1,18}")
_PAX_RECORD = re.compile(rb"(\d{1,18}) ")


TarFile = tuple[str, int, int, int, int]
"""A regular file in an archive, as plain as can be, since there are some for each record that is read.

Its whole name; where its headers begin, those of a long name too; where its data begin, and how many bytes these are;
where the next member begins.
"""


class TarError(ValueError):
    """What is at a place is not a member."""


def tar_files(read: Callable[[int, int], bytes], stop: int, *, checks_headers: bool) -> Iterator[TarFile]:
    """Yields the regular files of an archive, or of a part of one; other members are passed over.

    Args:
        read: returns the bytes at a place, this many: fewer at the end.
        stop: where the archive, or the part, ends.
        checks_headers: whether the checksums of headers are compared; data have none. The whole archive must then end
            in zeros, as one that was not cut short does.

    Raises:
        TarError: it is damaged, was cut short, or is not an archive.
    """
    place, start = 0, 0
    long_name, long_size = None, None  # What extensions say of the next member.
    is_ended = False
    while place < stop:
        header = read(place, BLOCK_BYTES)
        if header == _ZEROS:
            is_ended, place = True, place + BLOCK_BYTES
            start = place
            continue
        is_ended = False
        if len(header) < BLOCK_BYTES or (checks_headers and not _is_header(header)):
            raise TarError(f"no header of a member is at byte {place:,}")
        kind = header[156]
        is_extension = kind in _EXTENSION_TYPES
        name = _name(header) if long_name is None or is_extension else long_name
        size = _number(header[124:136]) if long_size is None or is_extension else long_size
        is_file = kind in _REGULAR_TYPES and name[-1:] != "/"
        if kind == _SPARSE_TYPE:
            raise TarError(f"the member at byte {place:,} is a sparse file, which cannot be read. Write it whole")
        # Links, folders and devices have no data, whatever their size says.
        if not is_file and ord("1") <= kind <= ord("6"):
            size = 0
        data = place + BLOCK_BYTES
        if data + size > stop:
            raise TarError(f"{name!r}, at byte {start:,}, ends beyond it")
        place = data + size + -size % BLOCK_BYTES
        if is_extension:
            long_name, long_size = _extended(kind, read(data, size), long_name, long_size)
            continue
        if is_file:
            yield name, start, data, size, place
        start = place
        long_name, long_size = None, None
    if checks_headers and not is_ended:
        raise TarError("the zeros at its end are missing")


def _is_header(header: bytes) -> bool:
    """Returns whether the checksum of a header is that of its bytes, of which its own eight count as blanks."""
    try:
        stored = _number(header[148:156])
    except TarError:
        return False
    return sum(header) - sum(header[148:156]) + 8 * ord(" ") == stored


def _name(header: bytes) -> str:
    """Returns the name in a header, with its prefix."""
    name = _text(header[:100])
    # Others than POSIX's have other things there.
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
    """Returns the name and the size that an extension says the next member has; those given where it does not say."""
    if kind == _LONG_NAME_TYPE:
        return _text(content), size
    return _pax(content, name, size) if kind == _PAX_TYPE else (name, size)


def _pax(content: bytes, name: str | None, size: int | None) -> tuple[str | None, int | None]:
    """Returns the same for a pax member."""
    place = 0
    while place < len(content) and content[place]:
        match = _PAX_RECORD.match(content, place)
        length = int(match[1]) if match else 0
        record = content[match.end() if match else place : place + length]
        key, equals, value = record.rstrip(b"\n").partition(b"=")
        if not (length and equals and place + length <= len(content)):
            raise TarError("a pax header is damaged")
        if key == b"path":
            name = _text(value)
        elif key == b"size":
            if not _PAX_SIZE.fullmatch(value):
                raise TarError("a pax header is damaged")
            size = int(value)
        elif key.startswith(b"GNU.sparse."):
            raise TarError("a member is a sparse file, which cannot be read. Write it whole")
        place += length
    return name, size


def _text(field: bytes) -> str:
    return field.partition(b"\x00")[0].decode("utf-8", "surrogateescape")
