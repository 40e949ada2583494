"""Files that are compressed as a whole, unpacked once, so that their records can be found at random."""

import os
from collections.abc import Callable
from typing import Any

from millstream.errors import DataSourceError
from millstream.sources.storage.compression import HEAD_BYTES, compression_of, is_zlib
from millstream.sources.storage.new_files import new_file
from millstream.sources.storage.progress import Progress

_BLOCK_BYTES = 1 << 17
"""How much is read at once. What comes out of it is in memory: a thousand times as much, at the worst."""

_LARGEST_WINDOW = 1 << 31
"""Of zstd: that of `zstd --long=31`."""


def unpack(path: str, destination: str) -> int:
    """Writes the content of a compressed file, and returns how many bytes that is.

    The format is found by the first bytes: gzip, bzip2, xz, zstd or zlib, with any number of members or frames. Their
    checksums are compared. The file appears under its name whole, in place of what is there.

    Raises:
        OSError: a file cannot be read or written.
        DataSourceError: it is not compressed, is damaged, or was cut short.
        ImportError: zstd, and `zstandard` is not installed.
    """
    size, written = os.path.getsize(path), 0  # noqa: PTH202  (paths are strings throughout)
    progress = Progress(f"Unpacking {path!r}", size)
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            make, errors = _decompressor(path, file.read(HEAD_BYTES))
            file.seek(0)
            with new_file(destination) as target:
                decompressor, is_within, is_first = make(), False, True
                while block := file.read(_BLOCK_BYTES):
                    progress.advance(len(block))
                    # Zeros fill up the last block of a tape, and xz files.
                    while block and (is_within or is_first or block.strip(b"\x00")):
                        try:
                            content = decompressor.decompress(block)
                        except errors as error:
                            raise DataSourceError(f"{path!r} is damaged: {error}. Restore the file.") from error
                        written += target.write(content)
                        is_within, is_first, block = not decompressor.eof, False, b""
                        if decompressor.eof:
                            block, decompressor = decompressor.unused_data, make()
                if is_within:
                    raise DataSourceError(
                        f"{path!r} was cut short: it ends before its compressed data do. Restore the file."
                    )
    finally:
        progress.close()
    return written


def _decompressor(path: str, start: bytes) -> tuple[Callable[[], Any], type[Exception]]:
    """Returns what makes the decompressor of a member of a file, and the class of its errors."""
    compression = compression_of(start)
    if compression == "zstd":
        zstandard = _zstandard()
        made = zstandard.ZstdDecompressor(max_window_size=_LARGEST_WINDOW)
        return made.decompressobj, zstandard.ZstdError
    if compression == "xz":
        import lzma  # noqa: PLC0415  (each of these for its format only)

        return lzma.LZMADecompressor, lzma.LZMAError
    if compression == "bzip2":
        import bz2  # noqa: PLC0415

        return bz2.BZ2Decompressor, OSError
    if compression == "gzip" or is_zlib(start):
        import zlib  # noqa: PLC0415

        # 32 more than the largest window: the header, of gzip or zlib, is looked at.
        return lambda: zlib.decompressobj(32 + zlib.MAX_WBITS), zlib.error
    raise DataSourceError(f"{path!r} is not compressed by gzip, bzip2, xz, zstd or zlib: there is nothing to unpack.")


def _zstandard() -> Any:
    try:
        import zstandard  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("Unpacking zstd needs `zstandard`: pip install 'millstream[bagz]'.") from error
    return zstandard
