"""Files that are compressed as a whole: how they are recognised, and what to do with them."""

import os
import re
import shlex

from millstream.errors import DataSourceError

HEAD_BYTES = 512
"""How many of a file's first bytes say what it is."""

_STARTS = {
    "gzip": re.compile(rb"\x1f\x8b\x08"),
    "zstd": re.compile(rb"\x28\xb5\x2f\xfd"),
    "xz": re.compile(rb"\xfd7zXZ\x00"),
    "bzip2": re.compile(rb"BZh[1-9](1AY&SY|\x17rE8P\x90)"),
}
"""How files begin; that of bzip2, with its first block, or the end of a file without any."""

_ENDINGS = (".gz", ".gzip", ".bz2", ".xz", ".zst", ".zstd", ".z", ".zlib")
"""What is added to the name of a file that is compressed."""


def compression_of(start: bytes) -> str | None:
    """Returns how a file is compressed as a whole, by its first bytes, or None if it is not."""
    return next((name for name, pattern in _STARTS.items() if pattern.match(start)), None)


def is_zlib(start: bytes) -> bool:
    """Returns whether the first bytes may be those of zlib, which are two only: a text may begin so, too."""
    # RFC 1950: 8 is deflate, the window has at most 32 KB, there is no dictionary, and the two are divisible by 31.
    return len(start) > 2 and start[0] & 0x8F == 8 and not start[1] & 0x20 and (start[0] << 8 | start[1]) % 31 == 0


def without_ending(path: str) -> str:
    """Returns the path of a compressed file without what says that it is."""
    root, ending = os.path.splitext(path)  # noqa: PTH122
    return root if ending.lower() in _ENDINGS else path


def compressed_error(path: str, compression: str) -> DataSourceError:
    """Returns the error of a file that is compressed as a whole, with the command that unpacks it."""
    plain = without_ending(path)
    if plain == path:
        root, ending = os.path.splitext(path)  # noqa: PTH122
        plain = f"{root}.unpacked{ending}"
    return DataSourceError(
        f"{path!r} is compressed as a whole, by {compression}, so that its records cannot be found at random. Unpack "
        f"it once, and read that: python -m millstream convert {shlex.quote(path)} {shlex.quote(plain)}"
    )
