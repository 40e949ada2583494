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
    """The bytes of one file, for the format that finds its records.

    Args:
        path: the path of the file.
        file: the open file. The scan closes it.
        identity: the identity that the file must have.
        progress: the progress report, in bytes.
        unpacked_size: the size of the content, if it is that of a compressed file; None if it is the file itself.

    Attributes:
        path: the path of the file.
        size: the size of the content, in bytes.
    """

    def __init__(
        self,
        path: str,
        file: StoredFile,
        identity: FileIdentity,
        progress: Progress,
        unpacked_size: int | None = None,
    ) -> None:
        self.path = path
        self.size = identity.size if unpacked_size is None else unpacked_size
        self._identity = identity
        self._progress = progress
        self._done = 0
        self._file = file

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def read(self, start: int, length: int) -> bytes:
        """Returns the bytes from `start` on; fewer than `length` only at the end of the file.

        Raises:
            DataSourceError: they cannot be read, or the file has become shorter.
        """
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
        """Yields each block of the file with its offset."""
        for start in range(0, self.size, BLOCK_BYTES):
            yield start, np.frombuffer(self.read(start, BLOCK_BYTES), np.uint8)
            self.report(start + BLOCK_BYTES)

    def report(self, done: int) -> None:
        """Reports that the bytes before this offset are done."""
        done = min(max(done, self._done), self.size)  # A scan may start again.
        self._progress.advance(done - self._done)
        self._done = done

    def check_unchanged(self) -> None:
        """Raises DataSourceError if the file is no longer what it was before the scan."""
        if is_url(self.path):
            return  # Each response of a store has the version of its object.
        now = FileIdentity.of(self.path)
        if now.content_state != self._identity.content_state:
            raise self.changed()

    def changed(self) -> DataSourceError:
        """Returns the error of a file that was changed during the scan."""
        return DataSourceError(
            f"Cannot index {self.path!r}: it was changed during the scan. Construct the source again when no process "
            "writes to its files."
        )


def refuse_compressed(scan: Scan) -> None:
    """Raises DataSourceError if all of a file is compressed. No text begins like a compressed file."""
    if (compression := compression_of(scan.read(0, HEAD_BYTES))) is not None:
        raise compressed_error(scan.path, compression)
