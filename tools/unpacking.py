"""Decompression of whole files, because a compressed file has no random access.

This module calls the decompressors of the standard library directly. `bz2.open` and `lzma.open` ignore a member that is
damaged at its start and everything after it, and `zstandard.open` ignores that a file was truncated.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, final

from millstream.errors import DataSourceError
from millstream.sources.files.compression import HEAD_BYTES, compression_of, is_zlib, zstandard_library
from millstream.sources.files.private_files import new_file
from millstream.sources.files.progress import Progress

MAX_RATIO = 200
_ALWAYS_BYTES = 1 << 30
_BLOCK_BYTES = 1 << 17

_ZSTD_BLOCK_BYTES = 1 << 8
"""Bytes per read of zstd, whose output is not limited: four bytes decompress to up to 128 KB, and these to 8 MB."""

_ALLOWED_WINDOW, _MAX_WINDOW = 1 << 27, 1 << 31
"""Memory that a zstd frame may always use, the default of `zstd`, and the upper limit, `zstd --long=31`."""


def unpack(path: str, destination: str, max_ratio: int = MAX_RATIO) -> int:
    """Decompresses a file, and returns the size of the content in bytes.

    The first bytes tell the format: gzip, bzip2, xz, zstd or zlib, with any number of members or frames. Checksums are
    verified. The new file replaces the destination when it is complete. Memory use is a few megabytes, plus the window
    that a zstd file requires. Content of more than 1 GiB may have `max_ratio` times the size of the compressed file.
    """
    size, written = os.path.getsize(path), 0  # noqa: PTH202  (paths are strings throughout)
    limit = max(_ALWAYS_BYTES, max_ratio * size)
    progress = Progress(f"Decompressing {path!r}", size)
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            members = _members(path, file.read(HEAD_BYTES), max_ratio * size)
            file.seek(0)
            with new_file(destination) as target:
                for content in members.contents(file, progress):
                    written += target.write(content)
                    if written > limit:
                        raise DataSourceError(
                            f"Cannot decompress {path!r}: its content exceeds {limit:,} bytes, {max_ratio} times its "
                            "own size, and may be a decompression bomb. If you trust it, pass a higher limit, "
                            f"--max-ratio={10 * max_ratio}."
                        )
    finally:
        progress.close()
    return written


@final
@dataclasses.dataclass(frozen=True)
class _Members:
    """The members, or frames, of a compressed file.

    Attributes:
        make: creates the decompressor of a member.
        errors: the class of its errors.
        block_bytes: the number of bytes passed to it per call.
        limits: the second argument of its `decompress`, the limit of its output per call.
    """

    path: str
    make: Callable[[], Any]
    errors: type[Exception]
    block_bytes: int = _BLOCK_BYTES
    limits: tuple[int, ...] = (_BLOCK_BYTES,)

    def contents(self, file: BinaryIO, progress: Progress) -> Iterator[bytes]:
        decompressor, is_within, is_first = self.make(), False, True
        while block := file.read(self.block_bytes):
            progress.advance(len(block))
            # Zeros after a member are padding, of tapes and xz files, before the next member or the end.
            while block := block if is_within or is_first else block.lstrip(b"\x00"):
                yield from self._content(decompressor, block)
                is_within, is_first, block = not decompressor.eof, False, b""
                if decompressor.eof:
                    block, decompressor = decompressor.unused_data, self.make()
        if is_within:
            raise DataSourceError(f"Cannot decompress {self.path!r}: it was truncated. Restore the file.")

    def _content(self, decompressor: Any, block: bytes) -> Iterator[bytes]:
        is_full = True
        while is_full and not decompressor.eof:
            try:
                content = decompressor.decompress(block, *self.limits)
            except self.errors as error:
                if "too much memory" in str(error):
                    raise DataSourceError(
                        f"Cannot decompress {self.path!r}: it needs more memory than a file of its size should. If you "
                        "trust it, pass a higher limit, --max-ratio."
                    ) from error
                raise DataSourceError(
                    f"Cannot decompress {self.path!r}: it is damaged: {error}. Restore the file."
                ) from error
            yield content
            is_full = len(content) in self.limits
            block = getattr(decompressor, "unconsumed_tail", b"")  # zlib does not buffer its input.


def _members(path: str, start: bytes, plausible_bytes: int) -> _Members:
    compression = compression_of(start)
    if compression == "zstd":
        zstandard = zstandard_library("read files that are compressed by Zstandard")
        window = min(max(_ALLOWED_WINDOW, plausible_bytes), _MAX_WINDOW)
        decompressor = zstandard.ZstdDecompressor(max_window_size=window)
        return _Members(path, decompressor.decompressobj, zstandard.ZstdError, _ZSTD_BLOCK_BYTES, ())
    if compression == "xz":
        import lzma  # noqa: PLC0415  (lazy: each only for its format)

        return _Members(path, lzma.LZMADecompressor, lzma.LZMAError)
    if compression == "bzip2":
        import bz2  # noqa: PLC0415

        return _Members(path, bz2.BZ2Decompressor, OSError)
    if compression == "gzip" or is_zlib(start):
        import zlib  # noqa: PLC0415

        # 32 plus the window size accepts the headers of both gzip and zlib.
        return _Members(path, lambda: zlib.decompressobj(32 + zlib.MAX_WBITS), zlib.error)
    raise DataSourceError(f"Cannot decompress {path!r}: it is not compressed by gzip, bzip2, xz, zstd or zlib.")
