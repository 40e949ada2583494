"""Reads single elements, or blocks of elements, whose positions are located in advance."""

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, Final, SupportsIndex, final

import numpy as np

from millstream.core.checks import as_integer
from millstream.dataset.nodes.node import ENDLESS, Node, Positions
from millstream.loader.pipeline.order import ChunkCache
from millstream.sources.base import RecordKeys

LOCATED_RECORDS: Final = 15_360
"""Approximate number of records located in one call: a larger number is no cheaper per record, and takes longer."""

_MAX_BREADTH: Final = 8
"""Maximum factor by which the number of located records grows with the number of sources."""

_MAX_EPOCHS: Final = 16
"""Maximum number of epochs located in one call: those of a small dataset may never be read."""

_READ_FIRST: Final = 16
"""The number of neighbouring records that are read before others are located in advance: fewer may be all."""


@final
class Blocks:
    """Reads blocks of a node, and caches located positions for the next blocks.

    It is pickled without the cache, so each process locates its own positions.
    """

    def __init__(self, node: Node) -> None:
        self._node = node

    def __reduce__(self) -> tuple[Any, ...]:
        return Blocks, (self._node,)

    @functools.cached_property
    def _ahead(self) -> ChunkCache[Any] | None:
        # Created on first use, because a user's dataset that is being unpickled has no attributes yet.
        node = self._node
        if not node.looks_ahead:
            return None
        # Each source has its own permutation, whose cost does not depend on the number of positions.
        records = LOCATED_RECORDS * min(node.breadth, _MAX_BREADTH)
        size = max(1, min(records // node.width, _MAX_EPOCHS * node.length))
        return ChunkCache(self._locate, size, ENDLESS if node.length else 0, begin=-(-_READ_FIRST // node.width))

    def at(self, position: SupportsIndex) -> Any:
        return self._node.at(as_position(position))

    def block(self, positions: RecordKeys) -> Sequence[Any]:
        """Returns the elements at positions, None for missing elements."""
        ahead = self._located_ahead(positions)
        if ahead is not None:
            located, first = ahead
            return self._node.elements(located, first, first + len(positions))
        checked = as_positions(positions)
        return self._node.elements(self._node.locate(checked), 0, len(checked)) if len(checked) else []

    def _located_ahead(self, positions: RecordKeys) -> tuple[Any, int] | None:
        """Returns a located chunk and the row of the first position in it; None if it does not contain all of them."""
        size = len(positions)
        ahead = self._ahead
        if ahead is None or not size:
            return None
        if not isinstance(positions, np.ndarray) or positions.dtype != np.int64 or positions.ndim != 1:
            return None
        start = int(positions[0])
        stop = start + size
        if not 0 <= start < stop <= ENDLESS or positions.tobytes() != np.arange(start, stop).tobytes():
            return None
        first, chunk = ahead.chunk_of(start, size)
        return None if chunk is None or stop > first + ahead.size else (chunk, start - first)

    def _locate(self, start: int, stop: int) -> Any:
        return self._node.locate(np.arange(start, stop))


def as_position(position: SupportsIndex) -> int:
    try:
        index = operator.index(position)
    except TypeError:
        raise TypeError(f"A position must be an integer, got {position!r} of type {type(position).__name__}.") from None
    if index < 0:
        raise IndexError(
            f"Positions count from 0, and never from the end, got {index}. Use len(dataset) - 1 for the last one."
        )
    if index > ENDLESS:
        raise IndexError(f"Positions must be below 2**63, got {index}.")
    return index


def as_positions(positions: RecordKeys) -> Positions:
    """Returns positions as an int64 array of shape (n,). Refuses anything else."""
    array = np.asarray(positions)
    if array.ndim != 1:
        raise ValueError(f"Positions must be one-dimensional, got the shape {array.shape}.")
    if array.dtype == np.int64 and (not array.size or array.min() >= 0):
        return array
    return np.fromiter(map(as_position, positions), np.int64)


def positions_within(length: int, positions: Iterable[SupportsIndex]) -> Positions:
    """Returns positions below a length as an int64 array of their own, shape (n,). Refuses anything else."""
    given = positions if isinstance(positions, np.ndarray | list | tuple) else list(positions)
    array = np.asarray(given)
    if array.dtype == np.bool_ and array.size:
        raise TypeError("positions must be integers, got booleans. Use np.flatnonzero(mask) for a mask.")
    if array.ndim != 1 or array.dtype.kind not in "iu":
        return np.fromiter((as_integer(position, "A position", 0, length - 1) for position in given), np.int64)
    wrong = (array < 0) | (array >= length)
    if wrong.any():
        as_integer(array[wrong.argmax()], "A position", 0, length - 1)
    return array.astype(np.int64)
