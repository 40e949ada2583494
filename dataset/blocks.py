"""Reading the elements of many positions: located far ahead where they are read in order, and read block by block."""

from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np

from millstream.dataset.node import Node, Positions
from millstream.loader.pipeline.look_ahead import LookAhead

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

    def read(self, positions: Positions) -> Sequence[Any]:
        """Returns the elements of positions, at least one, None where one is absent."""
        located, first = self._located(positions)
        return self._node.elements(located, first, first + len(positions))

    def _located(self, positions: Positions) -> tuple[Any, int]:
        """Returns what the node has located, and the row there of the first position."""
        size, start = len(positions), int(positions[0])
        is_block = (
            size >= _SMALLEST_RUN
            and start % size == 0
            and int(positions[-1]) - start == size - 1
            and start + size <= self._node.length
            and self._node.looks_ahead
            and bool((np.diff(positions) == 1).all())
        )
        if is_block:
            first, chunk = self._look_ahead(size).chunk_of(start // size)
            if chunk is not None:
                return chunk, start - first * size
        return self._node.locate(positions), 0

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
