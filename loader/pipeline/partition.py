"""How positions are dealt to shards: pure arithmetic.

The order's positions are cut into *global blocks* of `block * shard_count` positions, and each global block into one
*block* per shard, in the shards' order. A block is what makes one output of a 1:1 pipeline: one final batch, or one
element where there is no Batch. So shard s's block k holds the positions

    [(k * shard_count + s) * block, (k * shard_count + s + 1) * block)

and the k-th blocks of all shards laid end to end are the same positions for every number of shards, as long as
`block * shard_count` is the same. What is left after the last whole global block is the *tail*: it is dealt out in
contiguous runs too, as evenly as it goes.

Where batches are padded, the tail is dealt like any other global block, positions [(k * shard_count + s) * block, …) as
far as there are any: the padding follows the last position, and where it stands does not depend on the number of
shards. A shard that has no position there still has a block: it reads the last position of all as a *template*, to
learn the structure of the batch that it fills with nothing but padding.
"""

import enum
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from millstream.samplers.base import POSITION_LIMIT
from millstream.sharding import ShardOptions

_NOTHING = np.empty(0, dtype=np.int64)


class Tail(enum.Enum):
    """What the shards get of the tail."""

    SPREAD = enum.auto()
    """All of it, as evenly as it goes: the first shards get one position more."""
    TRIMMED = enum.auto()
    """Equally many positions each: up to shard_count - 1 are left out."""
    PADDED = enum.auto()
    """The positions that are theirs in a whole global block, as far as there are any; a template otherwise."""


class Partition(NamedTuple):
    """One shard's blocks.

    Attributes:
        block: positions in one block, at least 1.
        shard: which shard of how many.
        length: positions in the sampler's whole order; None when it is endless.
        tail_rule: what this shard gets of the tail.
    """

    block: int
    shard: ShardOptions
    length: int | None
    tail_rule: Tail

    @property
    def global_block(self) -> int:
        """Positions that all shards together use at one step."""
        return self.block * self.shard.shard_count

    @property
    def whole_blocks(self) -> int | None:
        """How many blocks of full size this shard has; None when endless."""
        return None if self.length is None else self.length // self.global_block

    @property
    def tail(self) -> range:
        """The positions of this shard's part of the tail, or that of its template; empty when there is none."""
        if self.length is None:
            return range(0)
        rest = range(self.length // self.global_block * self.global_block, self.length)
        index = self.shard.shard_index
        if self.tail_rule is Tail.PADDED:
            return rest[index * self.block : (index + 1) * self.block] or rest[-1:]
        share, extra = divmod(len(rest), self.shard.shard_count)
        if self.tail_rule is Tail.TRIMMED:
            extra = 0
        first = index * share + min(index, extra)
        return rest[first : first + share + (index < extra)]

    @property
    def tail_share(self) -> int:
        """How many positions of the tail are this shard's own: a template is not."""
        is_own = self.tail.start // self.block % self.shard.shard_count == self.shard.shard_index
        return len(self.tail) if is_own or self.tail_rule is not Tail.PADDED else 0

    @property
    def num_blocks(self) -> int | None:
        """How many blocks this shard has, the tail counted; None when endless."""
        return None if self.whole_blocks is None else self.whole_blocks + bool(self.tail)

    @property
    def block_limit(self) -> int:
        """How many blocks there are to ask for: num_blocks, and none that would have positions from 2**63 on."""
        limit = POSITION_LIMIT // self.global_block
        return limit if self.num_blocks is None else min(limit, self.num_blocks)

    def positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the positions of blocks start … stop - 1, in order."""
        whole = stop if self.whole_blocks is None else min(stop, self.whole_blocks)
        tail = np.arange(self.tail.start, self.tail.stop, dtype=np.int64) if start <= whole < stop else _NOTHING
        if start >= whole:
            # Without whole blocks, `block` may be larger than memory: a batch of everything.
            return tail
        first = np.arange(start, whole, dtype=np.int64) * self.global_block + self.shard.shard_index * self.block
        positions = (first[:, np.newaxis] + np.arange(self.block, dtype=np.int64)).reshape(-1)
        return np.concatenate([positions, tail]) if len(tail) else positions

    def is_template(self, block: int) -> bool:
        """Whether a block of this shard has no position of its own, and reads another's for its structure only."""
        return self.tail_rule is Tail.PADDED and block == self.whole_blocks and not self.tail_share

    def blocks_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the block that each of this shard's positions lies in."""
        return positions // self.global_block
