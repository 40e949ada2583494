"""Reads elements: one alone, or a block of them, located far ahead where blocks are read in order."""

from collections.abc import Sequence
from typing import Any, Final, SupportsIndex, final

import numpy as np

from millstream.dataset.arguments import as_position, as_positions
from millstream.dataset.node import Node
from millstream.loader.pipeline.look_ahead import LookAhead
from millstream.sources.base import RecordKeys

LOCATED_RECORDS: Final = 15_360
"""About how many records are located at once: more are no cheaper each, and these take half a millisecond."""

_SMALLEST_RUN = 16
"""Fewer positions than this, in a row, may be all that anybody wants."""

_KEPT_SIZES = 2
"""Blocks of this many sizes are looked ahead for: a loader reads blocks of one size, but for the last one."""


@final
class Blocks:
    """Reads blocks of a node, and keeps what was located for the next ones.

    It is pickled without what it keeps: each process looks ahead for itself.

    Args:
        node: the node.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._by_size: dict[int, LookAhead[Any]] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return Blocks, (self._node,)

    def at(self, position: SupportsIndex) -> Any:
        """Returns the element at one position, None where it is absent; raises as `block` does."""
        return self._node.at(as_position(position))

    def block(self, positions: RecordKeys) -> Sequence[Any]:
        """Returns the elements at positions, None where one is absent.

        Raises:
            TypeError, ValueError, IndexError: these are not positions.
        """
        ahead = self._located_ahead(positions)
        if ahead is not None:
            located, first = ahead
            return self._node.elements(located, first, first + len(positions))
        checked = as_positions(positions)
        return self._node.elements(self._node.locate(checked), 0, len(checked)) if len(checked) else []

    def _located_ahead(self, positions: RecordKeys) -> tuple[Any, int] | None:
        """Returns what was located for a chunk, and the row there of the first position; None for no block in a row."""
        size = len(positions)
        if size < _SMALLEST_RUN or not isinstance(positions, np.ndarray) or positions.dtype != np.int64:
            return None
        start = int(positions[0])
        is_block = start % size == 0 and 0 <= start <= self._node.length - size and self._node.looks_ahead
        if not is_block or not (positions == np.arange(start, start + size)).all():
            return None
        first, chunk = self._look_ahead(size).chunk_of(start // size)
        return None if chunk is None else (chunk, start - first * size)

    def _look_ahead(self, size: int) -> LookAhead[Any]:
        """Returns what looks ahead for blocks of a size."""
        known = self._by_size.get(size)
        if known is not None:
            return known
        for old in list(self._by_size)[: max(0, len(self._by_size) + 1 - _KEPT_SIZES)]:
            self._by_size.pop(old, None)

        def locate(start: int, stop: int) -> Any:
            return self._node.locate(np.arange(start * size, stop * size))

        blocks = max(1, LOCATED_RECORDS // (size * self._node.width))
        self._by_size[size] = LookAhead(locate, blocks, self._node.length // size)
        return self._by_size[size]
