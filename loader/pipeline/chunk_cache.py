"""A cache of values computed for many blocks in one call, so that a batch of 256 costs a share of one NumPy call.

A loader caches the origins of its blocks, and a MapDataset the reads of its nodes.

Guarantees:
    * No caller waits. While one computes a chunk, others compute the values of their own blocks.
    * An error for a block is raised only when that block is requested.
"""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, final

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
        begin: the number of blocks of a chunk that are requested before it is computed, because fewer may be all that
            is read. A chunk that follows a computed one is computed with its first block.
    """

    def __init__(self, locate: Callable[[int, int], Found], size: int, limit: int, begin: int = 1) -> None:
        self._locate = locate
        self.size = size
        self._limit = limit
        self._begin = begin
        self._chunks: dict[int, Found] = {}
        # The number of blocks that were requested of each of the latest chunks that are not computed.
        self._requested: dict[int, int] = {}
        # Two concurrent callers may both compute a chunk, which only costs time.
        self._is_searching = False

    def chunk_of(self, block: int, count: int = 1) -> tuple[int, Found | None]:
        """Returns the first block of a block's chunk, and the values of the chunk.

        The values are None while another caller computes a chunk, if computing them fails, and if too few blocks of the
        chunk have been requested.

        Args:
            block: the first requested block.
            count: the number of requested blocks.
        """
        number = block // self.size
        chunk = self._chunks.get(number)
        if chunk is None and not self._is_searching and self._is_wanted(number, count):
            try:
                self._is_searching = True
                chunk = self._find(number)
            finally:
                self._is_searching = False
        return number * self.size, chunk

    def _is_wanted(self, number: int, count: int) -> bool:
        if count >= self._begin or number - 1 in self._chunks:
            return True
        requested = self._requested.pop(number, 0) + count
        if requested >= self._begin:
            return True
        _drop_oldest(self._requested)
        self._requested[number] = requested
        return False

    def _find(self, number: int) -> Found | None:
        try:
            chunk = self._locate(number * self.size, min((number + 1) * self.size, self._limit))
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            return None
        _drop_oldest(self._chunks)
        self._chunks[number] = chunk
        return chunk


def _drop_oldest(kept: dict[int, Any]) -> None:
    """Makes room for one more chunk."""
    for old in list(kept)[: max(0, len(kept) + 1 - MAX_CHUNKS)]:
        kept.pop(old, None)
