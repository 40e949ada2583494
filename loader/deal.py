"""How positions are dealt to shards: pure arithmetic.

The order's positions are cut into *global units* of `unit * shard_count` positions, and each global unit into one
*unit* per shard, in the shards' order. A unit is what makes one output of a 1:1 pipeline: one final batch, or one
element where there is no Batch. So shard s's unit k holds the positions

    [(k * shard_count + s) * unit, (k * shard_count + s + 1) * unit)

and the k-th units of all shards laid end to end are the same positions for every number of shards, as long as
`unit * shard_count` is the same. What is left after the last whole global unit is the *tail*: it is dealt out in
contiguous runs too, as evenly as it goes.

Where batches are padded, the tail is dealt like any other global unit, positions [(k * shard_count + s) * unit, …) as
far as there are any: the padding is behind the last position, and its place does not depend on the number of shards. A
shard that has no position there still has a unit: it reads the last position of all as a *template*, to learn the
structure of the batch that it fills with nothing but padding.
"""

import dataclasses
import enum

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
    """The positions that are theirs in a whole global unit, as far as there are any; a template otherwise."""


@dataclasses.dataclass(frozen=True, slots=True)
class Deal:
    """One shard's units.

    Attributes:
        unit: positions in one unit, at least 1.
        shard: which shard of how many.
        length: positions in the sampler's whole order; None when it is endless.
        tail_rule: what this shard gets of the tail.
    """

    unit: int
    shard: ShardOptions
    length: int | None
    tail_rule: Tail

    @property
    def global_unit(self) -> int:
        """Positions that all shards together use at one step."""
        return self.unit * self.shard.shard_count

    @property
    def whole_units(self) -> int | None:
        """How many units of full size this shard has; None when endless."""
        return None if self.length is None else self.length // self.global_unit

    @property
    def tail(self) -> range:
        """The positions of this shard's part of the tail, or that of its template; empty when there is none."""
        if self.length is None:
            return range(0)
        rest = range(self.length // self.global_unit * self.global_unit, self.length)
        index = self.shard.shard_index
        if self.tail_rule is Tail.PADDED:
            return rest[index * self.unit : (index + 1) * self.unit] or rest[-1:]
        share, extra = divmod(len(rest), self.shard.shard_count)
        if self.tail_rule is Tail.TRIMMED:
            extra = 0
        first = index * share + min(index, extra)
        return rest[first : first + share + (index < extra)]

    @property
    def tail_share(self) -> int:
        """How many positions of the tail are this shard's own: a template is not."""
        return 0 if self.tail and self.is_template(self.tail[0]) else len(self.tail)

    @property
    def num_units(self) -> int | None:
        """How many units this shard has, the tail counted; None when endless."""
        return None if self.whole_units is None else self.whole_units + bool(self.tail)

    @property
    def unit_limit(self) -> int:
        """How many units there are to ask for: num_units, and none that would have positions from 2**63 on."""
        limit = POSITION_LIMIT // self.global_unit
        return limit if self.num_units is None else min(limit, self.num_units)

    def positions(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the positions of units start … stop - 1, in order."""
        whole = stop if self.whole_units is None else min(stop, self.whole_units)
        tail = np.arange(self.tail.start, self.tail.stop, dtype=np.int64) if start <= whole < stop else _NOTHING
        if start >= whole:
            # Without whole units, `unit` may be larger than memory: a batch of everything.
            return tail
        first = np.arange(start, whole, dtype=np.int64) * self.global_unit + self.shard.shard_index * self.unit
        positions = (first[:, np.newaxis] + np.arange(self.unit, dtype=np.int64)).reshape(-1)
        return np.concatenate([positions, tail]) if len(tail) else positions

    def is_template(self, position: int) -> bool:
        """Whether a position that this shard reads is another shard's, and read for its structure only."""
        return (
            self.tail_rule is Tail.PADDED and position // self.unit % self.shard.shard_count != self.shard.shard_index
        )

    def units_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the unit that each of this shard's positions lies in."""
        return positions // self.global_unit
