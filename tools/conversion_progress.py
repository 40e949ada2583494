"""How far several processes are, each with its part: numbers in a small file that all of them share."""

import contextlib
import dataclasses
import os
import threading
from collections.abc import Iterator
from typing import Self, final

import numpy as np

from millstream.sources.storage.private_folders import open_private
from millstream.sources.storage.progress import Progress

_POLL_SECONDS = 0.25


@final
@dataclasses.dataclass(frozen=True)
class RecordCounts:
    """How many records of each part are done.

    Attributes:
        path: the file: an int64 for each part.
    """

    path: str

    @classmethod
    def new(cls, path: str, parts: int) -> Self:
        """Returns counts of zero, in a new file."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108  (paths are strings throughout)
        with os.fdopen(open_private(path, os.O_RDWR | os.O_CREAT | os.O_EXCL), "wb") as file:
            file.write(bytes(8 * parts))
        return cls(path)

    def set(self, part: int, count: int) -> None:
        """Notes how many records of a part are done. Each part has one process."""
        descriptor = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            os.pwrite(descriptor, np.int64(count).tobytes(), 8 * part)
        finally:
            os.close(descriptor)

    def total(self) -> int:
        """Returns how many records are done."""
        return int(np.fromfile(self.path, np.int64).sum())


@contextlib.contextmanager
def shown_progress(counts: RecordCounts, words: str, total: int) -> Iterator[None]:
    """Shows how far the counts are as long as the block takes."""
    progress = Progress(words, total, "records")
    is_over = threading.Event()

    def follow() -> None:
        shown = 0
        while not is_over.wait(_POLL_SECONDS):
            done = counts.total()
            # A part that is begun anew, after its process died, falls back.
            progress.advance(max(0, done - shown))
            shown = max(shown, done)

    thread = threading.Thread(target=follow, name="millstream-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        progress.close()
