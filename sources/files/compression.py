"""Compressed files, which have no random access: their detection, and their content in order."""

import os
import re
import shlex
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from millstream.errors import DataSourceError
from millstream.sources.files.byte_files import RawFile
from millstream.sources.remote.urls import is_url, without_query

_UNPACKED_BYTES = 4 << 20
"""The maximum number of bytes that are unpacked at a time."""

HEAD_BYTES = 512
"""The number of first bytes that are enough to detect the format of a file."""

_STARTS = {
    # RFC 1952: the known flags, hints for the compression, and operating systems.
    "gzip": rb"\x1f\x8b\x08[\x00-\x1f]....[\x00\x02\x04][\x00-\x0d\xff]",
    # Its first frame may be one that is skipped, as pzstd writes it.
    "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
    "xz": rb"\xfd7zXZ\x00",
    "bzip2": rb"BZh[1-9](1AY&SY|\x17rE8P\x90)",
}
"""Patterns of the first bytes of files, compiled when they are needed, because that takes 3 ms in each worker.

For bzip2, they include those of the first block, or of the end of an empty file.
"""

_OTHER_STARTS = {
    "zip": rb"PK(\x03\x04|\x05\x06|\x07\x08)",
    "lz4": rb"\x04\x22\x4d\x18|\x02\x21\x4c\x18",
    "snappy": rb"\xff\x06\x00\x00sNaPpY",
    "7-Zip": rb"7z\xbc\xaf\x27\x1c",
    "lzip": rb"LZIP\x01",
    "RAR": rb"Rar!\x1a\x07",
    "compress": rb"\x1f\x9d[\x89-\x90]",
}
"""The same for compressions that millstream does not decompress."""

_ENDINGS = (".gz", ".gzip", ".bz2", ".xz", ".zst", ".zstd", ".z", ".zlib")
"""The extensions of compressed files."""

_OTHER_ENDINGS = {
    ".br": "brotli",
    ".brotli": "brotli",
    ".snappy": "snappy",
    ".sz": "snappy",
    ".lzma": "lzma",
    ".lz4": "lz4",
    ".lzo": "lzo",
    ".zip": "zip",
    ".zlib": "zlib",
}
"""The extensions of compressed files that may have no first bytes by which they are known."""


def compression_of(start: bytes) -> str | None:
    """Returns the compression of a file with these first bytes, or None."""
    for name, pattern in (_STARTS | _OTHER_STARTS).items():
        if re.match(pattern, start, re.DOTALL):
            return name
    return "zlib" if is_zlib(start) and _inflates(start) else None


def _inflates(start: bytes) -> bool:
    try:
        return bool(zlib.decompressobj().decompress(start))
    except zlib.error:
        return False


def refuse_compressed_name(path: str) -> None:
    """Raises DataSourceError for the name of a file whose content may not show that it is compressed."""
    ending = os.path.splitext(without_query(path) if is_url(path) else path)[1]  # noqa: PTH122
    if compression := _OTHER_ENDINGS.get(ending.lower()):
        raise compressed_error(path, compression)


def is_zlib(start: bytes) -> bool:
    """Returns True if the first bytes may be a zlib header, whose two bytes a text may also begin with."""
    # RFC 1950: 8 is deflate, the window has at most 32 KB, there is no dictionary, and the two are divisible by 31.
    return len(start) > 2 and start[0] & 0x8F == 8 and not start[1] & 0x20 and (start[0] << 8 | start[1]) % 31 == 0


def without_ending(path: str) -> str:
    root, ending = os.path.splitext(path)  # noqa: PTH122
    return root if ending.lower() in _ENDINGS else path


def compressed_error(path: str, compression: str) -> DataSourceError:
    """Returns the error for a compressed file, with the command that decompresses it once it is on a disk."""
    name = without_query(path).rpartition("/")[2] if is_url(path) else path
    step = "Decompress" if name == path else "Download it, decompress"
    plain = without_ending(name)
    if plain == name:
        root, ending = os.path.splitext(name)  # noqa: PTH122
        plain = f"{root}.unpacked{ending}"
    is_known = compression in _STARTS or compression == "zlib"
    how = f": python -m millstream convert {shlex.quote(name)} {shlex.quote(plain)}" if is_known else "."
    return DataSourceError(
        f"{path!r} is compressed as a whole, by {compression}, which rules out random access. {step} it once, and "
        f"read the result{how}"
    )


def inflated(content: bytes, num_bytes: int | None) -> bytes:
    """Returns the content of a zlib stream. It must have the given number of bytes, if any; ValueError otherwise."""
    stream = zlib.decompressobj()
    # Not beyond its size: a few bytes may inflate to gigabytes.
    found = stream.decompress(content, 0 if num_bytes is None else num_bytes + 1)
    if num_bytes is not None and len(found) != num_bytes:
        raise ValueError(f"its data does not inflate to {num_bytes:,} bytes")
    if not stream.eof:
        raise ValueError("its data is cut short")
    return found


def zstandard_library(purpose: str) -> Any:
    """Returns the library. ImportError names the purpose, such as "read .bagz files"."""
    try:
        import zstandard  # noqa: PLC0415  (lazy: an optional package)
    except ImportError as error:
        raise ImportError(f"Cannot {purpose} without zstandard: pip install 'millstream[bagz]'.") from error
    return zstandard


def unpacked_zstd(path: str, read: Callable[[int, int], bytes], size: int) -> Iterator[bytes]:
    """Yields the content of a file that Zstandard has compressed, at most 4 MiB at a time.

    `read` returns bytes, given the offset of the first one and their number. A file that was cut short has less
    content; other damage is a DataSourceError.
    """
    zstandard = zstandard_library("read files that are compressed by Zstandard")
    reader = zstandard.ZstdDecompressor().stream_reader(RawFile(read, size), read_across_frames=True)
    try:
        while content := reader.read(_UNPACKED_BYTES):
            yield content
    except zstandard.ZstdError as error:
        raise DataSourceError(f"{path!r} cannot be decompressed: {error}. Restore the file.") from error
