"""The records of blocks: the sampler's keys, computed for many blocks in one call."""

import functools
from collections.abc import Callable
from typing import Any, final

import numpy as np

from millstream.core.columnar import Allocate
from millstream.loader.operations.elements import Origins
from millstream.loader.operations.steps import isolated
from millstream.loader.pipeline.chunk_cache import ChunkCache
from millstream.loader.pipeline.packing import locate_segments
from millstream.loader.pipeline.partition import Partition
from millstream.loader.pipeline.recycled_memory import RecycledMemory
from millstream.samplers.balanced import BalancedSampler
from millstream.samplers.base import AdaptedSampler, VectorisedSampler, checked_keys_at
from millstream.samplers.mixtures.mixture_lookup import can_join
from millstream.samplers.protocols import MixedSampler, is_mixed, is_packed

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

Instrument = Callable[[Locate], Locate]
"""A function that wraps another one, for instance to measure it."""


@final
class Locator:
    """Finds the records of the blocks of one logical shard. `sharing` locators share the size of one cache."""

    def __init__(
        self, order: VectorisedSampler | AdaptedSampler, partition: Partition, instrument: Instrument, sharing: int = 1
    ) -> None:
        # Code of the user is called only for the positions needed, when they are needed.
        self._has_cache = not isinstance(order, AdaptedSampler)
        self._block = partition.block
        # Partials of functions, not methods: a reference cycle would keep the source until the collector runs.
        keys, self._is_ragged = CHUNK_KEYS, False
        locate = functools.partial(_locate_records, partition, order, RecycledMemory().allocate)
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
        self._locate: Locate = functools.partial(isolated, instrument(locate))
        self._cache = ChunkCache(self._locate, max(1, keys // sharing // partition.block), partition.block_limit)

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
