"""The records of blocks: the sampler's keys, computed and cached for many blocks in one call; and packed rows.

A position of a packed order is a row. Locating a row yields one origin per document, all with the position and block of
the row. Reading and the operations before Pack therefore work on documents, and a run may be divided between any two of
them. Pack combines the documents of one position. Until then, the table of origins has four more rows: the start and
end of the document's part in the row, the number of later documents in the row, and the document's length in tokens. In
a mixture, a row contains documents of one component, and its position is that in the component's own order.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar, cast, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.columnar import Allocate
from millstream.core.segments import Segments
from millstream.core.signals import is_from_signal_handler
from millstream.loader.pipeline.elements import Elements, Origins, describe_origin
from millstream.loader.pipeline.recycled_memory import RecycledMemory
from millstream.loader.pipeline.shards import Partition
from millstream.loader.pipeline.steps import Step, annotated, isolated, outputs_of, prepared
from millstream.samplers.balanced import BalancedSampler
from millstream.samplers.base import (
    AdaptedSampler,
    MixedSampler,
    PackedSampler,
    VectorisedSampler,
    checked_keys_at,
    has_varying_batches,
    is_mixed,
    is_mixed_and_packed,
    is_packed,
)
from millstream.samplers.index import can_join
from millstream.transforms import Pack, Transformation
from millstream.transforms.packing.rows import TOKENS_TOGETHER

CHUNK_KEYS = 15_360
"""The number of positions for which keys are computed in one call. A batch of 256 costs a share of one NumPy call.

Arrays with one number per position, of which a shuffle needs many, then stay below 128 KiB, above which C libraries
request fresh pages from the system. The table of origins is larger, and uses recycled memory.
"""

MAX_CHUNK_FACTOR = 4
"""Limit for the factor by which a mixture's chunk is larger, because each component computes its own keys."""

MAX_CHUNK_EPOCHS = 16
"""The limit in epochs, because orders of units and rows take about a millisecond per epoch."""

DOCUMENTS_PER_ROW = 4
"""Assumed number of documents per packed row. The chunk is smaller by this factor."""

Locate = Callable[[int, int], Origins]
"""A function that returns the origins of the records of blocks start … stop - 1."""

LocateWrapper = Callable[[Locate], Locate]
"""A function that wraps another one, for instance to measure it."""


@final
class Locator:
    """Finds the records of the blocks of one logical shard. `sharing` locators share the size of one cache."""

    def __init__(self, order: VectorisedSampler | AdaptedSampler, partition: Partition, sharing: int = 1) -> None:
        # Code of the user is called only for the positions needed, when they are needed.
        self._has_cache = not isinstance(order, AdaptedSampler)
        self._block = partition.block
        # Partials of functions, not methods: a reference cycle would keep the source until the collector runs.
        keys, self._is_ragged = CHUNK_KEYS, False
        locate = functools.partial(_locate_records, partition, order, RecycledMemory().allocate)
        self.varying = order if has_varying_batches(order) else None
        if self.varying is not None:
            self._is_ragged = True
        if is_packed(order):
            keys, self._is_ragged = CHUNK_KEYS // DOCUMENTS_PER_ROW, True
            locate = functools.partial(locate_segments, partition, order)
        if is_mixed(order):
            keys *= min(len(order.names), MAX_CHUNK_FACTOR)
            keys = int(keys / max(1, _epochs_before(order, keys) / MAX_CHUNK_EPOCHS))
        if isinstance(order, BalancedSampler):
            # Each shard arranges complete global batches.
            keys = keys * partition.block // partition.global_block
        if num_records := order.num_records:
            keys = min(keys, MAX_CHUNK_EPOCHS * num_records)
        self._compute: Locate = locate
        self._chunk = max(1, keys // sharing // partition.block), partition.block_limit
        self._locate: Locate = functools.partial(isolated, locate)
        self._cache = ChunkCache(self._locate, *self._chunk)

    def measured_by(self, wrap: LocateWrapper) -> "Locator":
        """Returns a locator with its own cache, whose computations are wrapped."""
        measured, locate = object.__new__(type(self)), functools.partial(isolated, wrap(self._compute))
        vars(measured).update(vars(self), _locate=locate, _cache=ChunkCache(locate, *self._chunk))
        return measured

    def locate(self, start: int, stop: int) -> Origins:
        if not self._has_cache:
            return self._locate(start, stop)
        size = self._cache.size
        if start // size != (stop - 1) // size:
            middle = (start // size + 1) * size
            return Origins.concatenate([self.locate(start, middle), self.locate(middle, stop)])
        first, chunk = self._cache.chunk_of(start)
        if chunk is None:
            return self._locate(start, stop)
        if self._is_ragged:
            return chunk.take(slice(*np.searchsorted(chunk.block, [start, stop]).tolist()))
        return chunk.take(slice((start - first) * self._block, (stop - first) * self._block))


def _epochs_before(order: MixedSampler, position: int) -> float:
    """Returns the largest number of epochs that a component has before a position, if it computes them one by one."""
    drawn = order.drawn_before(position if order.length is None else min(position, order.length))
    return max(
        (
            count / sampler.num_records
            for count, sampler in zip(drawn, order.samplers, strict=True)
            if sampler.num_records and not can_join(sampler)
        ),
        default=0,
    )


# The results are read-only, because user code may see them, and batches share them.
def _locate_records(
    partition: Partition, order: VectorisedSampler | AdaptedSampler, allocate: Allocate, start: int, stop: int
) -> Origins:
    positions = partition.positions(start, stop)
    if has_varying_batches(order):
        positions = positions[order.are_used(positions)]
    positions.flags.writeable = False
    table = allocate((5, len(positions)), np.dtype(np.int64))
    table[0] = positions
    table[3] = partition.blocks_of(positions)
    names: tuple[Any, ...] = ()
    if is_mixed(order):
        names = order.names
        table[4], table[2], table[1] = order.located(positions)
    else:
        table[4], table[2], table[1] = 0, positions, checked_keys_at(order, positions)
    table.flags.writeable = False
    return Origins(table, names)


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
        self._failed: dict[int, None] = {}
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
        is_missing = chunk is None and number not in self._failed
        if is_missing and not self._is_searching and self._is_wanted(number, count):
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
            # Some of its positions may be those of a component that was left out: it would fail each time.
            _drop_oldest(self._failed)
            self._failed[number] = None
            return None
        _drop_oldest(self._chunks)
        self._chunks[number] = chunk
        return chunk


def _drop_oldest(kept: dict[int, Any]) -> None:
    """Makes room for one more chunk."""
    for old in list(kept)[: max(0, len(kept) + 1 - MAX_CHUNKS)]:
        kept.pop(old, None)


_BEGIN, _END, _LEFT, _TOKENS = 5, 6, 7, 8
"""The rows of the table that only documents have."""

_LARGEST = np.iinfo(np.int64).max


def locate_segments(partition: Partition, order: PackedSampler, start: int, stop: int) -> Origins:
    """Returns the origins of the documents in the rows of blocks `start … stop - 1`.

    Document j of a row has the index position * row_length + j.
    """
    positions = partition.positions(start, stop)
    # User code may see them, and batches share them.
    positions.flags.writeable = False
    names: tuple[Any, ...] = ()
    if is_mixed_and_packed(order):
        names = order.names
        components, indices, segments = order.located_segments(positions)
        _check_indices(indices, order.row_length)
    else:
        components, indices = np.zeros(len(positions), dtype=np.int64), positions
        _check_indices(indices, order.row_length)
        segments = order.segments_at(positions)
    starts, keys = segments.offsets, segments.elements
    rows = np.repeat(np.arange(len(positions)), np.diff(starts))
    documents = np.arange(len(keys))
    table = np.empty((9, len(keys)), dtype=np.int64)
    table[0] = positions[rows]
    table[1] = keys
    table[2] = indices[rows] * order.row_length + documents - starts[rows]
    table[3] = partition.blocks_of(table[0])
    table[4] = components[rows]
    table[_TOKENS] = order.lengths_at(keys)
    table[_BEGIN] = segments.starts  # type: ignore[assignment]  # Rows that a sampler plans have starts and stops.
    table[_END] = table[_BEGIN] + segments.lengths
    table[_LEFT] = starts[1:][rows] - documents - 1
    table.flags.writeable = False
    return Origins(table, names)


def _check_indices(rows: NDArray[np.int64], row_length: int) -> None:
    if len(rows) and int(rows.max()) > _LARGEST // row_length - 1:
        raise OverflowError(f"The documents of the row at position {rows.max()} would have indices above 2**63.")


def pack_step(operation: Pack, order: VectorisedSampler | AdaptedSampler, where: str) -> Step:
    # `check_packing` has checked that the order is a PackedSampler.
    row_length = cast("PackedSampler", order).row_length

    def step(run: Elements, allocate: Allocate) -> Elements:
        located = run.origins
        if not len(located):
            return Elements([], located.without_sizes(), run.error)
        run = prepared(operation, Elements(run.values, located.without_sizes(), run.error), where)
        run = _as_planned(run, located.table[_TOKENS, : len(run.values)], list(operation.length_struct), where)
        if not run.values:
            return Elements([], run.origins.without_sizes(), run.error)
        table = located.table[:, : len(run.values)]
        # An incomplete row before an error is not built. The error takes its place.
        bounds = np.append(0, np.flatnonzero(table[_LEFT] == 0) + 1)
        used = slice(bounds[-1])
        segments = Segments(bounds, np.arange(bounds[-1]), table[_BEGIN, used], table[_END, used])
        row_origins = Origins(_rows_of(table, bounds[:-1], row_length), located.names)
        rows = outputs_of(
            lambda group: operation.make(run.values, group, allocate), segments, located, row_origins, where
        )
        return Elements(rows.values, rows.origins, run.error if rows.error is None else rows.error)

    return step


def _as_planned(run: Elements, planned: NDArray[np.integer[Any]], names: Sequence[str], where: str) -> Elements:
    """Returns the documents before the first one whose length differs from the plan, followed by an error."""
    is_other = run.origins.sizes != planned
    if not is_other.any():
        return run
    row = int(np.argmax(is_other.any(axis=0)))
    feature = int(np.argmax(is_other[:, row]))
    error = ValueError(
        f"The document of record key {run.origins.record_key[row]} has {run.origins.sizes[feature, row]} "
        f"{names[feature]!r}, but according to the sampler's lengths it has {planned[row]}. Measure the lengths again, "
        "on the results of the operations before Pack: lengths_of(source, operations, refresh=True)."
    )
    where = f"{where}, at {describe_origin(run.origins, row)}"
    return Elements(run.values[:row], run.origins.take(slice(row)), annotated(error, where))


def max_batches(operations: Sequence[Transformation], batch_size: int) -> int | None:
    """Returns the number of batches of packed rows above which a call gains nothing; None if no rows are packed."""
    lengths = [max(operation.length_struct.values()) for operation in operations if isinstance(operation, Pack)]
    return max(1, TOKENS_TOGETHER // (lengths[0] * batch_size)) if lengths else None


def _rows_of(table: NDArray[np.int64], firsts: NDArray[np.intp], row_length: int) -> NDArray[np.int64]:
    """Returns the table of rows: the columns of their first documents, with the position as the index."""
    rows = table[:5, firsts]
    rows[2] //= row_length
    return rows
