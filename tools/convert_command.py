"""The command `millstream convert`: writes records to other files, or decompresses a file.

A compressed file has no random access, so it is decompressed as a whole. The decompressors of the standard library are
called directly: `bz2.open` and `lzma.open` ignore a member that is damaged at its start and everything after it, and
`zstandard.open` ignores that a file was truncated.
"""

import dataclasses
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO, final

from millstream.dataset.map_dataset import MapDataset
from millstream.errors import DataSourceError
from millstream.loader.cluster.options import RayWorkers
from millstream.loader.reporting.snapshot import bytes_text
from millstream.sources.files.byte_files import refuse_placeholder
from millstream.sources.files.compression import HEAD_BYTES, compression_of, is_zlib, zstandard_library
from millstream.sources.files.private_files import new_file
from millstream.sources.files.progress import Progress
from millstream.tools.cli_paths import find_files, load_callable
from millstream.tools.conversion import convert
from millstream.tools.inspection import opened
from millstream.tools.record_writers import BIN_EXTENSION, EXTENSIONS

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


def run_convert(
    sources: Sequence[str],
    destination: str,
    *,
    format: str | None,  # noqa: A002  (the name of the option)
    shards: int,
    job: tuple[int, int] | None,
    jobs: int | None,
    ray: str | None,
    function: str | None,
    encode: str,
    feature: str | None,
    dtype: str | None,
    compression: str | None,
    overwrite: bool,
    max_ratio: int,
) -> str:
    """Converts or decompresses, and returns a summary in one line."""
    destination = os.path.join(os.getcwd(), os.path.expanduser(destination))  # noqa: PTH109, PTH111, PTH118
    if not destination.endswith(EXTENSIONS):
        return _unpack(sources, destination, max_ratio, overwrite=overwrite)
    if ray is not None and jobs is None:
        raise ValueError("--ray needs the number of actors, such as --jobs=64.")
    chosen = None if job is None else range(job[0] - 1, shards, job[1])
    if job is not None and not chosen:
        raise ValueError(f"--part must be one of 1/{shards} to {shards}/{shards}, got {job[0]}/{job[1]}.")
    found = find_files(sources, format)
    if len(found) > 1:
        raise ValueError(
            f"Cannot convert files of several formats, {', '.join(found)}, together. Convert them one by one, or pass "
            "--format if all have one format."
        )
    ((kind, paths),) = found.values()
    keeps_json = kind.name == "jsonl" and function is None and encode != "example"
    keeps_json = keeps_json and not destination.endswith(BIN_EXTENSION)
    with opened(kind, paths) as found_source:
        # JSON that stays JSON is checked, but neither parsed nor formatted again.
        source = found_source.as_texts() if keeps_json else found_source
        if not len(source):
            raise ValueError(f"SRC must have at least one record, got none in {', '.join(paths)}.")
        targets = convert(
            source
            if function is None
            else MapDataset.source(source).map(load_callable(function, "--map must be MODULE:FUNCTION")),
            destination,
            encode="raw" if keeps_json else encode,
            feature=feature,
            dtype=dtype,
            compression=compression,
            num_shards=shards,
            shards=chosen,
            worker_count=jobs if ray is None else None,
            workers=None if ray is None else RayWorkers(jobs or 1, address=ray),
            overwrite=overwrite,
        )
        size = bytes_text(sum(map(os.path.getsize, targets)))
        # Records for which the function returns None are not written.
        records = f"{len(source):,} records" if function is None else f"from {len(source):,} records"
        records = records if len(targets) == shards else f"{len(targets):,} of {shards:,} files"
        return f"{targets[0]}{f' and {len(targets) - 1:,} more' if len(targets) > 1 else ''}: {records}, {size}"


def _unpack(sources: Sequence[str], destination: str, max_ratio: int, *, overwrite: bool) -> str:
    rule = f"DST must end in {', '.join(EXTENSIONS[:-1])} or {EXTENSIONS[-1]} to write records, got {destination!r}"
    if len(sources) > 1:
        raise ValueError(f"{rule}. To decompress, pass a single SRC, got {len(sources)}.")
    path = os.path.expanduser(sources[0])  # noqa: PTH111
    with open(path, "rb") as file:  # noqa: PTH123
        start = file.read(HEAD_BYTES)
    refuse_placeholder(path, start)
    if compression_of(start) is None and not is_zlib(start):
        raise ValueError(f"{rule}. {path!r} is not compressed, so it cannot be decompressed either.")
    if os.path.lexists(destination) and (not overwrite or os.path.realpath(path) == os.path.realpath(destination)):
        raise FileExistsError(f"{destination!r} exists. Pass --overwrite to replace it, or choose another name.")
    os.makedirs(os.path.dirname(destination), exist_ok=True)  # noqa: PTH103, PTH120
    return f"{destination}: {bytes_text(unpack(path, destination, max_ratio))}, decompressed"
