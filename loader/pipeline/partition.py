"""Assignment of positions to shards: pure arithmetic.

The positions of the order are divided into *global blocks* of `block * shard_count` positions, and each global block
into one *block* per shard, in the order of the shards. A block becomes one output of a 1:1 pipeline: one final batch,
or one element if there is no Batch. Block k of shard s contains the positions

    [(k * shard_count + s) * block, (k * shard_count + s + 1) * block)

The concatenated k-th blocks of all shards are the same positions for every number of shards, as long as
`block * shard_count` is the same. The positions after the last complete global block are the *tail*. It is divided into
contiguous runs as well, as evenly as possible.

If batches are padded, the tail is divided like any other global block, as far as it has positions. The padding follows
the last position, and its place in the stream does not depend on the number of shards. A shard without a position in
the tail still has a block: it reads the last position of all as a *template*, to learn the structure of its batch, and
fills the batch with padding only.
"""

import dataclasses
import enum
import functools
from typing import final

import numpy as np
from numpy.typing import NDArray

from millstream.samplers.base import POSITION_LIMIT
from millstream.sharding import ShardOptions

_NOTHING = np.empty(0, dtype=np.int64)


class Tail(enum.Enum):
    """The rule for the shards' parts of the tail."""

    SPREAD = enum.auto()
    """All positions, as evenly as possible: the first shards get one more."""
    TRIMMED = enum.auto()
    """The same number of positions for each shard. Up to shard_count - 1 are omitted."""
    PADDED = enum.auto()
    """The shard's positions of a complete global block, as far as they exist; otherwise a template."""


@final
@dataclasses.dataclass(frozen=True)
class Partition:
    """The blocks of one shard. The numbers of blocks are None if the order is endless.

    Attributes:
        block: the number of positions per block, at least 1.
        length: the number of positions in the sampler's order; None if it is endless.
    """

    block: int
    shard: ShardOptions
    length: int | None
    tail_rule: Tail

    @property
    def global_block(self) -> int:
        return self.block * self.shard.shard_count

    @property
    def whole_blocks(self) -> int | None:
        return None if self.length is None else self.length // self.global_block

    @functools.cached_property
    def tail(self) -> range:
        """The positions of this shard's part of the tail, or of its template; empty if there is none."""
        if self.length is None:
            return range(0)
        remainder = range(self.length // self.global_block * self.global_block, self.length)
        index = self.shard.shard_index
        if self.tail_rule is Tail.PADDED:
            return remainder[index * self.block : (index + 1) * self.block] or remainder[-1:]
        share, extra = divmod(len(remainder), self.shard.shard_count)
        if self.tail_rule is Tail.TRIMMED:
            extra = 0
        first = index * share + min(index, extra)
        return remainder[first : first + share + (index < extra)]

    @property
    def tail_share(self) -> int:
        """The number of positions of the tail that this shard owns. A template is not its own."""
        is_own = self.tail.start // self.block % self.shard.shard_count == self.shard.shard_index
        return len(self.tail) if is_own or self.tail_rule is not Tail.PADDED else 0

    @property
    def num_blocks(self) -> int | None:
        return None if self.whole_blocks is None else self.whole_blocks + bool(self.tail)

    @property
    def block_limit(self) -> int:
        """The number of blocks that can be requested: num_blocks, but no positions from 2**63 on."""
        limit = POSITION_LIMIT // self.global_block
        return limit if self.num_blocks is None else min(limit, self.num_blocks)

    def positions(self, start: int, stop: int) -> NDArray[np.int64]:
        whole = stop if self.whole_blocks is None else min(stop, self.whole_blocks)
        tail = np.arange(self.tail.start, self.tail.stop, dtype=np.int64) if start <= whole < stop else _NOTHING
        if start >= whole:
            # Without complete blocks, `block` may exceed the memory: a batch of everything.
            return tail
        first = np.arange(start, whole, dtype=np.int64) * self.global_block + self.shard.shard_index * self.block
        positions = (first[:, np.newaxis] + np.arange(self.block, dtype=np.int64)).reshape(-1)
        return np.concatenate([positions, tail]) if len(tail) else positions

    def is_template(self, block: int) -> bool:
        """Returns True if a block has no position of its own, and reads another's for its structure only."""
        return self.tail_rule is Tail.PADDED and block == self.whole_blocks and not self.tail_share

    def blocks_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions // self.global_block
