"""One pass over a file, from its beginning to its end, to find its records."""

from collections.abc import Iterator
from typing import final

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.remote.urls import is_url
from millstream.sources.storage.byte_files import StoredFile
from millstream.sources.storage.compression import HEAD_BYTES, compressed_error, compression_of
from millstream.sources.storage.paths import FileIdentity
from millstream.sources.storage.progress import Progress

BLOCK_BYTES = 1 << 20
"""The size of a read. Larger blocks leave the processor's cache."""


@final
class Scan:
    """The bytes of one open file, which it closes, for the format that finds its records.

    An `unpacked_size` is that of the content of a compressed file. Progress is reported in bytes.
    """

    def __init__(
        self, path: str, file: StoredFile, identity: FileIdentity, progress: Progress, unpacked_size: int | None
    ) -> None:
        self.path = path
        self.size = identity.size if unpacked_size is None else unpacked_size
        self._identity = identity
        self._progress = progress
        self._done = 0
        self._file = file

    def close(self) -> None:
        self._file.close()

    def read(self, start: int, length: int) -> bytes:
        """Returns the bytes from `start` on; fewer than `length` only at the end of the file."""
        try:
            block = self._file.read(start, length)
        except DataSourceError:
            raise
        except OSError as error:
            raise DataSourceError(f"Cannot read {self.path!r} at byte {start:,}: {error.strerror or error}.") from error
        if len(block) < min(length, self.size - start):
            raise self.changed()
        return block[: max(0, self.size - start)]

    def blocks(self) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        for start in range(0, self.size, BLOCK_BYTES):
            yield start, np.frombuffer(self.read(start, BLOCK_BYTES), np.uint8)
            self.report(start + BLOCK_BYTES)

    def report(self, done: int) -> None:
        """Reports that the bytes before this offset are done."""
        done = min(max(done, self._done), self.size)  # A scan may start again.
        self._progress.advance(done - self._done)
        self._done = done

    def check_unchanged(self) -> None:
        if is_url(self.path):
            return  # Each response of a store has the version of its object.
        now = FileIdentity.of(self.path)
        if now.content_state != self._identity.content_state:
            raise self.changed()

    def changed(self) -> DataSourceError:
        return DataSourceError(
            f"Cannot index {self.path!r}: it was changed during the scan. Construct the source again when no process "
            "writes to its files."
        )


def refuse_compressed(scan: Scan) -> None:
    """Raises DataSourceError if all of a file is compressed. No text begins like a compressed file."""
    if (compression := compression_of(scan.read(0, HEAD_BYTES))) is not None:
        raise compressed_error(scan.path, compression)
