"""The half of a MapDataset that a loader reads: blocks of elements, and the description of a source.

Blocks are read of positions that are located in advance.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, Final, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer
from millstream.dataset.chain_rendering import content_marks_of, fingerprint_of
from millstream.dataset.iterators.running import FixedChain
from millstream.dataset.nodes.element_nodes import Filtered, OperationNode, Split
from millstream.dataset.nodes.joining_nodes import starts_of
from millstream.dataset.nodes.node import ENDLESS, Node, Positions
from millstream.dataset.nodes.source_node import Own
from millstream.loader.pipeline.order import ChunkCache
from millstream.samplers.order import Occurrences
from millstream.sources import ConcatenatedDataSource
from millstream.sources.base import LoaderView, RecordKeys, checked_record_key

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

    Attributes:
        stream: the stream of the elements that `iter(dataset)` reads; None before the first one.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self.stream: Any = None

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
        several = isinstance(position, list | tuple | range | np.ndarray)
        remedy = " Write .slice(positions) for several." if several else ""
        kind = type(position).__name__
        raise TypeError(f"A position must be an integer, got {position!r} of type {kind}.{remedy}") from None
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


class NodeSource:
    """A source whose records are the elements of a node."""

    takes_key_arrays = True
    _parents: "tuple[Any, ...]" = ()
    _node: Node | None = None
    _blocks: Blocks | None = None

    @staticmethod
    def of(node: Node) -> "NodeSource":
        """Returns a source of a node that no dataset holds."""
        source = NodeSource()
        source._node = node
        return source

    def __len__(self) -> int:
        """Returns the length of one epoch; `sys.maxsize` if the dataset is endless."""
        if self._node is None:
            raise NotImplementedError(f"{type(self).__name__} must override __len__.")
        return self._node.length

    def __getitem__(self, position: Any) -> Any:
        """Returns the element at a position of any epoch, None if it is missing."""
        return self._read.at(position)

    _own_reads: ClassVar[Any] = __getitem__
    """The `__getitem__` of the library. A user's class has another one."""

    def __getitems__(self, positions: RecordKeys) -> Sequence[Any]:
        """Returns the elements at positions, in order, None for missing elements.

        Each source is read in one call.

        Raises:
            IndexError: a position is negative, 2**63 or more, or the dataset is empty.
        """
        return self._read.block(positions)

    @property
    def reads_one_by_one(self) -> bool:
        """True if no source below has batched reads. Several threads then share the elements of a batch."""
        return node_of(self).reads_one_by_one

    @property
    def is_in_memory(self) -> bool:
        """True if all sources below are plain data in memory."""
        return node_of(self).is_in_memory

    @property
    def window_units(self) -> int | None:
        """The number of units of its source that a shuffle should keep together; None if any order is as fast.

        Slices, selections and maps have that of their source, such as a `ParquetDataSource` larger than its cache.
        """
        return node_of(self).window_units

    @property
    def unit_sizes(self) -> NDArray[np.int64] | None:
        """The number of elements of each run of consecutive elements that its source reads as one unit.

        int64, shape (runs,); None without `window_units`.
        """
        node = node_of(self)
        return None if node.window_units is None else node.units().sizes

    @property
    def unit_numbers(self) -> NDArray[np.int64] | None:
        """The number of the unit of each of `unit_sizes`; a unit has several runs if positions are in any order.

        int64, shape (runs,); None without `window_units`.
        """
        node = node_of(self)
        return None if node.window_units is None else node.units().numbers

    @property
    def calls_in_reads(self) -> str:
        """The calls that compute elements while they are read: `.map(decode).filter(is_long)`; "" without any."""
        nodes = [node for node in node_of(self).line() if isinstance(node, OperationNode)]
        return "".join(node.text for node in reversed(nodes))

    def _origin_at(self, position: int) -> tuple[Any, int] | None:
        """Returns the source and the record key of an element; None if epochs differ, or it has several records."""
        origins = NodeOrigins.fixed(node_of(self))
        return None if origins is None else (origins.source, origins.record_key(position))

    def _of_source(self, name: str) -> Any:
        """Returns the `classes` or `locate` of the source, so that a held-out part has them; None if it has none."""
        origins = None if self._node is None else NodeOrigins.fixed(node_of(self))
        if origins is None or origins.is_joined or not hasattr(origins.source, name):
            return None
        own = getattr(origins.source, name)
        return own if name == "classes" else lambda key: own(origins.record_key(checked_record_key(key, len(self))))

    def _loader_view(self) -> LoaderView:
        node = node_of(self)
        if node.is_sparse:
            step = next((step.text for step in node.line() if isinstance(step, Filtered | Split)), "a filter")
            raise ValueError(
                f"Cannot read every position of this MapDataset: after {step}, elements may be missing. Read it as a "
                "stream, dataset.to_iter_dataset(), and batch that; or give the loader the dataset before it, and the "
                "filter as an operation."
            )
        # An endless dataset is one epoch.
        differs = node.differs_by_epoch and node.length != ENDLESS
        origins = NodeOrigins(node) if node.reordering and node.traced else None
        return LoaderView(self, differs, skips_none=True, reordering=node.reordering, origins=origins)

    def _fixed_source(self) -> tuple[Any, Callable[[], None]]:
        chain = FixedChain(self, node_of(self), (), "the loader of this chain was built: build another loader")
        return chain.map_dataset, chain.check_unchanged

    def fingerprint(self) -> str:
        """Returns one line that identifies the elements: sources, operations and seeds, but not num_epochs."""
        return fingerprint_of(node_of(self))

    def content_marks(self) -> dict[str, str]:
        """Returns digests of the chain's code and objects. A checkpoint warns if they differ."""
        return content_marks_of(node_of(self))

    @property
    def _read(self) -> Blocks:
        if self._blocks is None:
            self._blocks = Blocks(node_of(self))
        return self._blocks


@final
class NodeOrigins:
    """The records from which the elements of a node are made, forwards and backwards."""

    def __init__(self, node: Node) -> None:
        self._node = node
        sources = node.traced or ()
        self.is_joined = len(sources) != 1
        self.source = ConcatenatedDataSource(sources) if self.is_joined else sources[0]
        self._starts = starts_of(sources)

    @classmethod
    def fixed(cls, node: Node) -> "NodeOrigins | None":
        """Returns the records that are the same in each epoch; None if they differ, or an element has several."""
        return cls(node) if node.traced and not node.reordering else None

    def record_keys(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return self._node.record_keys(positions, self._starts)

    def record_key(self, position: int) -> int:
        return int(self.record_keys(np.array([position]))[0])

    def occurrences(self, keys: NDArray[np.int64], stop: int) -> Occurrences:
        return self._node.occurrences(keys, self._starts, stop)


def node_of(dataset: Any) -> Node:
    known: dict[int, Node] = {}

    def found(one: Any) -> Node:
        is_own = type(one).__getitem__ is not type(one)._own_reads  # noqa: SLF001
        if one._node is not None and not is_own:  # noqa: SLF001
            own: Node = one._node  # noqa: SLF001
            return own
        if not is_own:
            raise NotImplementedError(f"{type(one).__name__} must override __getitem__.")
        if id(one) not in known:
            known[id(one)] = Own(one, tuple(map(found, one.parents)))
        return known[id(one)]

    return found(dataset)
