"""A view of stored bytes as a file, for libraries that read from open files."""

import io
from collections.abc import Callable
from typing import Any, final


@final
class RawFile(io.RawIOBase):
    """A file of a known size, whose bytes a function reads.

    Args:
        read: returns bytes, given the offset of the first one and their number, which is at least 1 and ends within the
            file.
        size: the size of the file in bytes.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        super().__init__()
        self._read = read
        self._size = size
        self._position = 0

    def read(self, size: int = -1, /) -> bytes:
        """Returns the next bytes, fewer than `size` only at the end; all that remain if it is negative."""
        left = max(0, self._size - self._position)
        count = left if size < 0 else min(size, left)
        content = self._read(self._position, count) if count else b""
        self._position += len(content)
        return content

    def readinto(self, buffer: Any, /) -> int:
        """Reads the next bytes, fewer than those of the buffer only at the end, and returns their number."""
        target = memoryview(buffer).cast("B")
        content = self.read(len(target))
        target[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Sets the position, relative to the start (0), the current position (1), or the end (2)."""
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True
