"""What many blocks need, found at once and kept: a batch of 256 then costs a share of one large NumPy call.

Of a loader these are the origins of its blocks, of a MapDataset what its nodes read.

Guarantees:
    * Nobody waits. While one caller finds what many blocks need, others find it for the blocks that are theirs.
    * An error about blocks that were not asked for is raised at their turn.
"""

from collections.abc import Callable
from typing import Generic, TypeVar, final

from millstream.signal_exceptions import is_from_signal_handler

KEPT_CHUNKS = 4
"""This many chunks are kept: calls in work may be that far apart."""

Found = TypeVar("Found")


@final
class LookAhead(Generic[Found]):
    """Finds what blocks need, a chunk of blocks at a time.

    Args:
        locate: returns what blocks `start … stop - 1` need, such as their origins.
        size: how many blocks are a chunk.
        limit: the number of blocks that there are.

    Attributes:
        size: how many blocks are a chunk.
    """

    def __init__(self, locate: Callable[[int, int], Found], size: int, limit: int) -> None:
        self._locate = locate
        self.size = size
        self._limit = limit
        self._chunks: dict[int, Found] = {}
        # Two that come at the same moment may both find a chunk: that costs time, and nothing else.
        self._is_looking = False

    def chunk_of(self, block: int) -> tuple[int, Found | None]:
        """Returns the first block of the chunk that a block is in, and what has been found for the chunk.

        That is None while another caller is finding something, and where it cannot be found.
        """
        number = block // self.size
        chunk = self._chunks.get(number)
        if chunk is None and not self._is_looking:
            try:
                self._is_looking = True
                chunk = self._find(number)
            finally:
                self._is_looking = False
        return number * self.size, chunk

    def _find(self, number: int) -> Found | None:
        try:
            chunk = self._locate(number * self.size, min((number + 1) * self.size, self._limit))
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            return None
        for old in list(self._chunks)[: max(0, len(self._chunks) + 1 - KEPT_CHUNKS)]:
            self._chunks.pop(old, None)
        self._chunks[number] = chunk
        return chunk
