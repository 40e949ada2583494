"""Which records the blocks of a plan are about: the sampler's keys, found for many blocks at once."""

import functools
from collections.abc import Callable
from typing import Any, final

import numpy as np

from millstream.columnar import Allocate
from millstream.loader.pipeline.elements import Origins
from millstream.loader.pipeline.isolation import isolated
from millstream.loader.pipeline.look_ahead import LookAhead
from millstream.loader.pipeline.packing import locate_pieces
from millstream.loader.pipeline.partition import Partition
from millstream.loader.pipeline.recycled_memory import RecycledMemory
from millstream.samplers.balanced import BalancedSampler
from millstream.samplers.base import AdaptedSampler, VectorisedSampler, checked_keys_at
from millstream.samplers.protocols import is_mixed, is_packed

LOOK_AHEAD_KEYS = 15_360
"""Record keys are made for this many positions at once: a batch of 256 then costs a share of one large NumPy call.

The arrays of one number for each position, of which a shuffle needs many, then stay below the 128 KiB from which on C
libraries ask the system for fresh pages. The table of origins is larger: it comes from memory that is used again.
"""

MOST_LOOK_AHEADS = 4
"""For the components of a mixture, each of which is asked for its own keys, it is up to this many times as many."""

LOOK_AHEAD_EPOCHS = 16
"""The same limit in epochs: orders of units and of rows are computed one epoch at a time, in about a millisecond."""

DOCUMENTS_PER_ROW = 4
"""Rows of a packed order have some documents each: of these there should be about as many."""

Locate = Callable[[int, int], Origins]
"""Returns the origins of the records of blocks start … stop - 1."""

Watch = Callable[[Locate], Locate]
"""Returns a function that does the same, and is measured, say."""


@final
class Locator:
    """Finds the records of the blocks of one logical shard.

    Args:
        order: which record stands at which position.
        partition: which positions make up which block.
        watch: wraps the function that asks the order.
        sharing: how many locators there are at once: together they keep as much as one alone would.
    """

    def __init__(
        self, order: VectorisedSampler | AdaptedSampler, partition: Partition, watch: Watch, sharing: int = 1
    ) -> None:
        # The user's own code is asked for what is needed, when it is needed.
        self._looks_ahead = not isinstance(order, AdaptedSampler)
        self._block = partition.block
        # Of functions, not of methods: what refers to itself would keep its source until the collector runs.
        keys, self._is_ragged = LOOK_AHEAD_KEYS, False
        locate = functools.partial(_locate_records, partition, order, RecycledMemory().allocate)
        if is_packed(order):
            keys, self._is_ragged = LOOK_AHEAD_KEYS // DOCUMENTS_PER_ROW, True
            locate = functools.partial(_locate_documents, partition, order)
        if is_mixed(order):
            keys *= min(len(order.names), MOST_LOOK_AHEADS)
        if isinstance(order, BalancedSampler):
            # Each shard arranges complete global batches.
            keys = keys * partition.block // partition.global_block
        if num_records := order.num_records:
            keys = min(keys, LOOK_AHEAD_EPOCHS * num_records)
        self._locate: Locate = functools.partial(isolated, watch(locate))
        self._look_ahead = LookAhead(self._locate, max(1, keys // sharing // partition.block), partition.block_limit)

    def locate(self, start: int, stop: int) -> Origins:
        """Returns the origins of the records of blocks start … stop - 1."""
        if not self._looks_ahead:
            return self._locate(start, stop)
        size = self._look_ahead.size
        if start // size != (stop - 1) // size:
            middle = (start // size + 1) * size
            return Origins.concatenate([self.locate(start, middle), self.locate(middle, stop)])
        first, chunk = self._look_ahead.chunk_of(start)
        if chunk is None:
            return self._locate(start, stop)
        if self._is_ragged:
            return chunk.take(slice(*np.searchsorted(chunk.block, [start, stop]).tolist()))
        return chunk.take(slice((start - first) * self._block, (stop - first) * self._block))


# What these return is read-only: user code may see it, and other batches share it.
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


def _locate_documents(partition: Partition, order: Any, start: int, stop: int) -> Origins:
    positions = partition.positions(start, stop)
    positions.flags.writeable = False
    return locate_pieces(order, partition, positions)
