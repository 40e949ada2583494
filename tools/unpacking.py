"""Files that are compressed as a whole, unpacked once, so that their records can be found at random.

The decompressors of the standard library are called directly, not `bz2.open` and `lzma.open`, nor `zstandard.open`: the
first two ignore a member that is damaged at its start, and with it the rest of the file, the third a file that was cut
short.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, final

from millstream.errors import DataSourceError
from millstream.sources.storage.compression import HEAD_BYTES, compression_of, is_zlib
from millstream.sources.storage.new_files import new_file
from millstream.sources.storage.progress import Progress

MAX_RATIO = 200
"""How many times the size of a compressed file its content may have, unless the caller allows more."""

_ALWAYS_BYTES = 1 << 30
"""A content of up to this size is never refused."""

_BLOCK_BYTES = 1 << 17
"""How much is read from the file, and how much comes out of it, at a time."""

_ZSTD_BLOCK_BYTES = 1 << 8
"""How much is read of zstd, whose content comes out whole: four bytes may be 128 KB of it, so this may be 8 MB."""

_USUAL_WINDOW, _LARGEST_WINDOW = 1 << 27, 1 << 31
"""Of zstd: how much memory a frame may always ask for, as of `zstd` itself, and how much at most (`zstd --long=31`)."""


def unpack(path: str, destination: str, max_ratio: int = MAX_RATIO) -> int:
    """Writes the content of a compressed file, and returns its size in bytes.

    The format is found by the first bytes: gzip, bzip2, xz, zstd or zlib, with any number of members or frames. Their
    checksums are compared. The file appears under its name whole, in place of what is there. Some megabytes of memory
    are enough, and for zstd the window that the file asks for.

    Args:
        path: the compressed file.
        destination: the file to write.
        max_ratio: the largest size of the content, as a multiple of that of the compressed file. A content of up to
            1 GiB is never refused.

    Raises:
        OSError: a file cannot be read or written.
        DataSourceError: it is not compressed, is damaged, was cut short, or has a larger content.
        ImportError: zstd, and `zstandard` is not installed.
    """
    size, written = os.path.getsize(path), 0  # noqa: PTH202  (paths are strings throughout)
    limit = max(_ALWAYS_BYTES, max_ratio * size)
    progress = Progress(f"Unpacking {path!r}", size)
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            members = _members(path, file.read(HEAD_BYTES), max_ratio * size)
            file.seek(0)
            with new_file(destination) as target:
                for content in members.contents(file, progress):
                    written += target.write(content)
                    if written > limit:
                        raise DataSourceError(
                            f"{path!r} unpacks to more than {limit:,} bytes, {max_ratio} times its own size: it may be "
                            f"a decompression bomb. If it can be trusted, raise the limit: --max-ratio={10 * max_ratio}"
                        )
    finally:
        progress.close()
    return written


@final
@dataclasses.dataclass(frozen=True)
class _Members:
    """The members, or frames, of a compressed file.

    Attributes:
        path: the file, for errors.
        make: makes the decompressor of a member.
        errors: the class of the errors that it raises.
        block_bytes: how much it is given at a time.
        limits: the second argument of its `decompress`: how much may come out at a time.
    """

    path: str
    make: Callable[[], Any]
    errors: type[Exception]
    block_bytes: int = _BLOCK_BYTES
    limits: tuple[int, ...] = (_BLOCK_BYTES,)

    def contents(self, file: BinaryIO, progress: Progress) -> Iterator[bytes]:
        """Yields the content of all members, in parts.

        Raises:
            DataSourceError: one is damaged or does not end.
        """
        decompressor, is_within, is_first = self.make(), False, True
        while block := file.read(self.block_bytes):
            progress.advance(len(block))
            # Zeros fill up the last block of a tape, and xz files.
            while block and (is_within or is_first or block.strip(b"\x00")):
                yield from self._content(decompressor, block)
                is_within, is_first, block = not decompressor.eof, False, b""
                if decompressor.eof:
                    block, decompressor = decompressor.unused_data, self.make()
        if is_within:
            raise DataSourceError(
                f"{self.path!r} was cut short: it ends before its compressed data do. Restore the file."
            )

    def _content(self, decompressor: Any, block: bytes) -> Iterator[bytes]:
        """Yields all that comes out of a block, in parts."""
        is_full = True
        while is_full and not decompressor.eof:
            try:
                content = decompressor.decompress(block, *self.limits)
            except self.errors as error:
                if "too much memory" in str(error):
                    raise DataSourceError(
                        f"{self.path!r} needs more memory to unpack than a file of its size should. If it can be "
                        "trusted, raise the limit, --max-ratio."
                    ) from error
                raise DataSourceError(f"{self.path!r} is damaged: {error}. Restore the file.") from error
            yield content
            is_full = len(content) in self.limits
            block = getattr(decompressor, "unconsumed_tail", b"")  # Those of zlib keep none themselves.


def _members(path: str, start: bytes, plausible_bytes: int) -> _Members:
    """Returns the members of a file that begins so, and whose content may have so many bytes."""
    compression = compression_of(start)
    if compression == "zstd":
        zstandard = _zstandard()
        window = min(max(_USUAL_WINDOW, plausible_bytes), _LARGEST_WINDOW)
        made = zstandard.ZstdDecompressor(max_window_size=window)
        return _Members(path, made.decompressobj, zstandard.ZstdError, _ZSTD_BLOCK_BYTES, ())
    if compression == "xz":
        import lzma  # noqa: PLC0415  (each of these for its format only)

        return _Members(path, lzma.LZMADecompressor, lzma.LZMAError)
    if compression == "bzip2":
        import bz2  # noqa: PLC0415

        return _Members(path, bz2.BZ2Decompressor, OSError)
    if compression == "gzip" or is_zlib(start):
        import zlib  # noqa: PLC0415

        # 32 more than the largest window: the header, of gzip or zlib, is looked at.
        return _Members(path, lambda: zlib.decompressobj(32 + zlib.MAX_WBITS), zlib.error)
    raise DataSourceError(f"{path!r} is not compressed by gzip, bzip2, xz, zstd or zlib: there is nothing to unpack.")


def _zstandard() -> Any:
    try:
        import zstandard  # noqa: PLC0415
    except ImportError as error:
        raise ImportError("Unpacking zstd needs `zstandard`: pip install 'millstream[bagz]'.") from error
    return zstandard
