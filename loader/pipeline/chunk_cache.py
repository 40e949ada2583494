"""A cache of values computed for many blocks in one call, so that a batch of 256 costs a share of one NumPy call.

A loader caches the origins of its blocks, and a MapDataset the reads of its nodes.

Guarantees:
    * No caller waits. While one computes a chunk, others compute the values of their own blocks.
    * An error for a block is raised only when that block is requested.
"""

from collections.abc import Callable
from typing import Generic, TypeVar, final

from millstream.core.signals import is_from_signal_handler

MAX_CHUNKS = 4
"""The number of chunks kept, because calls in flight may be this far apart."""

Found = TypeVar("Found")


@final
class ChunkCache(Generic[Found]):
    """Computes and caches values for chunks of blocks.

    Args:
        locate: returns the values for blocks `start … stop - 1`, such as their origins.
        size: the number of blocks per chunk.
        limit: the total number of blocks.
    """

    def __init__(self, locate: Callable[[int, int], Found], size: int, limit: int) -> None:
        self._locate = locate
        self.size = size
        self._limit = limit
        self._chunks: dict[int, Found] = {}
        # Two concurrent callers may both compute a chunk, which only costs time.
        self._is_searching = False

    def chunk_of(self, block: int) -> tuple[int, Found | None]:
        """Returns the first block of a block's chunk, and the values of the chunk.

        The values are None while another caller computes a chunk, and if computing them fails.
        """
        number = block // self.size
        chunk = self._chunks.get(number)
        if chunk is None and not self._is_searching:
            try:
                self._is_searching = True
                chunk = self._find(number)
            finally:
                self._is_searching = False
        return number * self.size, chunk

    def _find(self, number: int) -> Found | None:
        try:
            chunk = self._locate(number * self.size, min((number + 1) * self.size, self._limit))
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            return None
        for old in list(self._chunks)[: max(0, len(self._chunks) + 1 - MAX_CHUNKS)]:
            self._chunks.pop(old, None)
        self._chunks[number] = chunk
        return chunk
