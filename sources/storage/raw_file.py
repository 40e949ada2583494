"""A view of stored bytes as a file, for libraries that read from open files."""

import io
from collections.abc import Callable
from typing import Any, final


@final
class RawFile(io.RawIOBase):
    """A file of a known size, whose bytes a function reads.

    The function returns bytes, given the offset of the first one and their number. It is at least 1, and ends within
    the file.
    """

    def __init__(self, read: Callable[[int, int], bytes], size: int) -> None:
        super().__init__()
        self._read = read
        self._size = size
        self._position = 0

    def read(self, size: int = -1, /) -> bytes:
        left = max(0, self._size - self._position)
        count = left if size < 0 else min(size, left)
        content = self._read(self._position, count) if count else b""
        self._position += len(content)
        return content

    def readinto(self, buffer: Any, /) -> int:
        target = memoryview(buffer).cast("B")
        content = self.read(len(target))
        target[: len(content)] = content
        return len(content)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        self._position = offset + (0, self._position, self._size)[whence]
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True
