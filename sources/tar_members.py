"""The members of a tar archive, one after the other, as their headers say.

A member is a header of 512 bytes and its data, filled up to 512 bytes. The formats are ustar and pax (POSIX.1-1988 and
-2001) and GNU's, which differ in where a long name or a large size is: in a prefix in the header, in a pax member
before it, in a member of type L before it, or as a number in base 256. Blocks of zeros end the archive.
"""

import dataclasses
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
_PAX_RECORD = re.compile(rb"(\d{1,18}) ")


@dataclasses.dataclass(slots=True)
class TarMember:
    """One member of an archive.

    Attributes:
        start: where its headers begin, those of a long name too.
        name: its whole name.
        data: where its data begin.
        size: how many bytes these are.
        stop: where the next member begins.
        is_file: whether it is a regular file.
    """

    start: int
    name: str
    data: int
    size: int
    stop: int
    is_file: bool


class TarError(ValueError):
    """What is at a place is not a member."""


def tar_members(read: Callable[[int, int], bytes], stop: int, *, checks_headers: bool) -> Iterator[TarMember]:
    """Yields the members of an archive, or of a part of one.

    Args:
        read: returns the bytes at a place, this many: fewer at the end.
        stop: where the archive, or the part, ends.
        checks_headers: whether the checksums of headers are compared; data have none. The whole archive must then end
            in zeros, as one that was not cut short does.

    Raises:
        TarError: it is damaged, was cut short, or is not an archive.
    """
    place, start = 0, 0
    name, size = None, None  # What extensions say of the next member.
    is_ended = False
    while place < stop:
        header = read(place, BLOCK_BYTES)
        if header == _ZEROS:
            is_ended, place = True, place + BLOCK_BYTES
            start = place
            continue
        is_ended = False
        if len(header) < BLOCK_BYTES or (checks_headers and not is_header(header)):
            raise TarError(f"no header of a member is at byte {place:,}")
        member = _member(header, place, start, name, size)
        if member.stop > stop and member.data + member.size > stop:
            raise TarError(f"{member.name!r}, at byte {member.start:,}, ends beyond it")
        kind = header[156]
        if kind in _EXTENSION_TYPES:
            content = read(member.data, member.size)
            if kind == _LONG_NAME_TYPE:
                name = _text(content)
            elif kind == _PAX_TYPE:
                name, size = _pax(content, name, size)
            place = member.stop
            continue
        yield member
        place = start = member.stop
        name, size = None, None
    if checks_headers and not is_ended:
        raise TarError("the zeros at its end are missing")


def is_header(header: bytes) -> bool:
    """Returns whether the checksum of a header is that of its bytes, of which its own eight count as blanks."""
    try:
        stored = _number(header[148:156])
    except TarError:
        return False
    return sum(header) - sum(header[148:156]) + 8 * ord(" ") == stored


def _member(header: bytes, place: int, start: int, name: str | None, size: int | None) -> TarMember:
    kind = header[156]
    if kind == _SPARSE_TYPE:
        raise TarError(f"the member at byte {place:,} is a sparse file, which cannot be read. Write it whole")
    is_extension = kind in _EXTENSION_TYPES
    if name is None or is_extension:
        name = _text(header[:100])
        # Others than POSIX's have other things there.
        if header[345] and header[257:263] == b"ustar\x00":
            name = f"{_text(header[345:500])}/{name}"
    if size is None or is_extension:
        size = _number(header[124:136])
    is_file = kind in _REGULAR_TYPES and name[-1:] != "/"
    # Links, folders and devices have no data, whatever their size says.
    if not is_file and ord("1") <= kind <= ord("6"):
        size = 0
    data = place + BLOCK_BYTES
    return TarMember(start, name, data, size, data + -(-size // BLOCK_BYTES) * BLOCK_BYTES, is_file)


def _number(field: bytes) -> int:
    """Returns a number of a header: octal digits, or base 256 after a byte that is 128."""
    if field[0] == 0x80:
        return int.from_bytes(field[1:], "big")
    digits = field.partition(b"\x00")[0].strip()
    if digits.strip(b"01234567"):
        raise TarError(f"{digits!r} is not a number in a header")
    return int(digits or b"0", 8)


def _pax(content: bytes, name: str | None, size: int | None) -> tuple[str | None, int | None]:
    """Returns the name and the size that a pax member says the next member has; those given where it does not say."""
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
            if not value.isdigit():
                raise TarError("a pax header is damaged")
            size = int(value)
        elif key.startswith(b"GNU.sparse."):
            raise TarError("a member is a sparse file, which cannot be read. Write it whole")
        place += length
    return name, size


def _text(field: bytes) -> str:
    return field.partition(b"\x00")[0].decode("utf-8", "surrogateescape")
