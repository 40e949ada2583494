"""Reads elements: one alone, or a block of them, located far ahead where blocks are read in order."""

import functools
from collections.abc import Sequence
from typing import Any, Final, SupportsIndex, final

import numpy as np

from millstream.dataset.nodes.arguments import as_position, as_positions
from millstream.dataset.nodes.node import Node
from millstream.loader.pipeline.look_ahead import LookAhead
from millstream.sources.base import RecordKeys

LOCATED_RECORDS: Final = 15_360
"""About how many records are located at once: more are no cheaper each, and these take half a millisecond."""

_MOST_BREADTH: Final = 8
"""Where elements come from this many sources, as many times as many records are located at once, and not more."""

_SMALLEST_RUN: Final = 16
"""Fewer records than this, in a row, may be all that anybody wants."""


@final
class Blocks:
    """Reads blocks of a node, and keeps what was located for the next ones.

    It is pickled without what it keeps: each process looks ahead for itself.

    Args:
        node: the node.
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    def __reduce__(self) -> tuple[Any, ...]:
        return Blocks, (self._node,)

    @functools.cached_property
    def _ahead(self) -> LookAhead[Any] | None:
        # Found out when it is wanted: while a user's dataset that holds this is unpickled, it has no attributes yet.
        node = self._node
        if not node.looks_ahead:
            return None
        # Of several sources, each has a permutation of its own, and each of these its price.
        records = LOCATED_RECORDS * min(node.breadth, _MOST_BREADTH)
        return LookAhead(self._locate, max(1, records // node.width), node.length)

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
        """Returns what was located for a chunk, and the row there of the first position; None for no row of them."""
        size = len(positions)
        ahead = self._ahead
        if ahead is None or size * self._node.width < _SMALLEST_RUN:
            return None
        if not isinstance(positions, np.ndarray) or positions.dtype != np.int64 or positions.ndim != 1:
            return None
        start = int(positions[0])
        stop = start + size
        if not 0 <= start < stop <= self._node.length or positions.tobytes() != np.arange(start, stop).tobytes():
            return None
        first, chunk = ahead.chunk_of(start)
        return None if chunk is None or stop > first + ahead.size else (chunk, start - first)

    def _locate(self, start: int, stop: int) -> Any:
        return self._node.locate(np.arange(start, stop))
