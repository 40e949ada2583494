"""A file read from front to back, once, to find where its records begin."""

from collections.abc import Iterator
from typing import final

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.storage.byte_files import StoredFile
from millstream.sources.storage.compression import HEAD_BYTES, compressed_error, compression_of
from millstream.sources.storage.paths import FileIdentity
from millstream.sources.storage.progress import Progress
from millstream.sources.storage.urls import is_url

BLOCK_BYTES = 1 << 20
"""How much is read at once: larger blocks leave the processor's cache."""


@final
class Scan:
    """The bytes of one file, for the format that looks for records in it.

    Args:
        path: the name of the file.
        file: the file, open. The scan closes it.
        identity: which file it must be.
        progress: is told of the bytes that are done.

    Attributes:
        path: the file.
        size: in bytes.
    """

    def __init__(self, path: str, file: StoredFile, identity: FileIdentity, progress: Progress) -> None:
        self.path = path
        self.size = identity.size
        self._identity = identity
        self._progress = progress
        self._done = 0
        self._file = file

    def close(self) -> None:
        """Closes the file."""
        self._file.close()

    def read(self, start: int, length: int) -> bytes:
        """Returns the bytes from `start` on, fewer than `length` at the end of the file only.

        Raises:
            DataSourceError: they cannot be read, or the file has become shorter.
        """
        try:
            block = self._file.read(start, length)
            while len(block) < min(length, self.size - start):
                more = self._file.read(start + len(block), length - len(block))
                if not more:
                    raise self.changed()
                block += more
        except DataSourceError:
            raise
        except OSError as error:
            raise DataSourceError(
                f"{self.path!r} cannot be read at byte {start:,}: {error.strerror or error}."
            ) from error
        return block[: max(0, self.size - start)]

    def blocks(self) -> Iterator[tuple[int, NDArray[np.uint8]]]:
        """Yields each block of the file with the place that it begins at."""
        for start in range(0, self.size, BLOCK_BYTES):
            yield start, np.frombuffer(self.read(start, BLOCK_BYTES), np.uint8)
            self.report(start + BLOCK_BYTES)

    def report(self, done: int) -> None:
        """Reports that the bytes before this place are done."""
        done = min(max(done, self._done), self.size)  # A scan may begin again.
        self._progress.advance(done - self._done)
        self._done = done

    def check_unchanged(self) -> None:
        """Raises DataSourceError if the file is no longer what it was before the scan."""
        if is_url(self.path):
            return  # Every answer of a store says which version it is of.
        now = FileIdentity.of(self.path)
        if now.content_state != self._identity.content_state:
            raise self.changed()

    def changed(self) -> DataSourceError:
        """Returns the error of a file that was written to meanwhile."""
        return DataSourceError(
            f"{self.path!r} was changed while its records were being looked for. Construct the source again when "
            "nobody writes to its files."
        )


def refuse_compressed(scan: Scan) -> None:
    """Raises DataSourceError for a file that is compressed as a whole, which no text is mistaken for."""
    if (compression := compression_of(scan.read(0, HEAD_BYTES))) is not None:
        raise compressed_error(scan.path, compression)
