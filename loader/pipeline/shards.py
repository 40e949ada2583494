"""The positions of each shard, and the ends of the streams of all shards: pure arithmetic.

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

If positions decide how many elements each operation has, each shard also knows the ends of all others before it reads a
record. Shards that end at different steps hang at the next collective, and last batches of different sizes have no
common global array.
"""

import dataclasses
import enum
import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.descriptions import described
from millstream.core.warn import log_warning, warn
from millstream.samplers.base import POSITION_LIMIT
from millstream.sharding import ShardBySharding, ShardOptions
from millstream.transforms import Batch, Transformation
from millstream.transforms.grouping import Grouping

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
        tail_limit: the number of positions of this shard's part of the tail that are read; None for all of them.
    """

    block: int
    shard: ShardOptions
    length: int | None
    tail_rule: Tail
    tail_limit: int | None = None

    @functools.cached_property
    def global_block(self) -> int:
        return self.block * self.shard.shard_count

    @functools.cached_property
    def complete_blocks(self) -> int | None:
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
        return remainder[first : first + share + (index < extra)][: self.tail_limit]

    @property
    def tail_share(self) -> int:
        """The number of positions of the tail that this shard owns. A template is not its own."""
        is_in_shard = self.tail.start // self.block % self.shard.shard_count == self.shard.shard_index
        return len(self.tail) if is_in_shard or self.tail_rule is not Tail.PADDED else 0

    @functools.cached_property
    def num_blocks(self) -> int | None:
        return None if self.complete_blocks is None else self.complete_blocks + bool(self.tail)

    @property
    def block_limit(self) -> int:
        """The number of blocks that can be requested: num_blocks, but no positions from 2**63 on."""
        limit = POSITION_LIMIT // self.global_block
        return limit if self.num_blocks is None else min(limit, self.num_blocks)

    def positions_from(self, block: int, position: int) -> int:
        """Returns the number of positions of this shard from one in a block on; -1 stands for the first in the block.

        The order must not be endless.
        """
        complete = self.complete_blocks or 0
        if block >= complete:
            return len(self.tail) - max(0, position - self.tail.start) if block == complete else 0
        first = block * self.global_block + self.shard.shard_index * self.block
        return (complete - block) * self.block + len(self.tail) - max(0, position - first)

    def positions(self, start: int, stop: int) -> NDArray[np.int64]:
        last_complete = stop if self.complete_blocks is None else min(stop, self.complete_blocks)
        tail = np.arange(self.tail.start, self.tail.stop, dtype=np.int64) if start <= last_complete < stop else _NOTHING
        if start >= last_complete:
            # Without complete blocks, `block` may exceed the memory: a batch of everything.
            return tail
        first = (
            np.arange(start, last_complete, dtype=np.int64) * self.global_block + self.shard.shard_index * self.block
        )
        positions = (first[:, np.newaxis] + np.arange(self.block, dtype=np.int64)).reshape(-1)
        return np.concatenate([positions, tail]) if len(tail) else positions

    def is_template(self, block: int) -> bool:
        """Returns True if a block has no position of its own, and reads another's for its structure only."""
        return self.tail_rule is Tail.PADDED and block == self.complete_blocks and not self.tail_share

    def blocks_of(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions // self.global_block


def first_dynamic(operations: Sequence[Transformation]) -> int | None:
    """Returns the number of the first operation that drops, splits or regroups elements, or None."""
    return next(itertools.compress(itertools.count(), map(_is_dynamic, operations)), None)


def joining_batch(operations: Sequence[Transformation]) -> tuple[int, Batch] | None:
    """Returns the Batch that can concatenate elements of several logical shards, and its number, or None.

    It is the last Batch, and follows all operations that are not 1:1.
    """
    for number, operation in reversed(list(enumerate(operations))):
        if _is_dynamic(operation):
            return None
        if isinstance(operation, Batch):
            return (number, operation) if any(map(_is_dynamic, operations[:number])) else None
    return None


def _is_dynamic(operation: Transformation) -> bool:
    return not operation.keeps_count or operation.regroups


class ShardEnd(NamedTuple):
    """The end of the streams of neighbouring shards.

    Attributes:
        hosts: the indices of the shards.
        outputs: the number of outputs of each.
        rows: the number of elements in the last group of each Batch.
        moves: True if a short batch is shuffled, and so comes at another step on each shard.
    """

    hosts: range
    outputs: int
    rows: tuple[int, ...]
    moves: bool


def tail_rule(operations: Sequence[Transformation], shard: ShardOptions) -> Tail:
    """Returns the rule for the positions after the last complete global block.

    A grouping drops its remainder on each shard alone. Shards of a pipeline that keeps the count therefore begin with
    the same number of positions.
    """
    first_batches = [operation for operation in operations[: first_dynamic(operations)] if isinstance(operation, Batch)]
    if any(batch.pad_remainder for batch in first_batches):
        return Tail.PADDED
    dropping = operations if all(operation.keeps_count for operation in operations) else first_batches
    drops = any(isinstance(operation, Grouping) and not operation.keeps_remainder for operation in dropping)
    return Tail.TRIMMED if shard.drop_remainder or drops else Tail.SPREAD


def ends_of(operations: Sequence[Transformation], length: int, shard: ShardOptions) -> list[ShardEnd]:
    """Returns the ends of all shards of a pipeline whose operations keep the count, given the length of its order.

    Neighbouring shards that end alike are one item, so there are at most three.
    """
    rule, joining = tail_rule(operations, shard), None
    logical = shard.shard_count
    if first_dynamic(operations) is not None and shard.logical_shards is not None:
        logical, joining = shard.logical_shards, joining_batch(operations)
    share = logical // shard.shard_count
    if rule is Tail.PADDED:
        # Each shard has a part of the tail, or a template.
        length = -(-length // logical) * logical
    each, extra = divmod(length, logical)
    extra = 0 if rule is Tail.TRIMMED else extra
    # The first logical shards have one position more.
    full, remainder = divmod(extra, share)
    starts = (0, full, full + bool(remainder), shard.shard_count)
    ends: list[ShardEnd] = []
    for start, stop, num_longer in zip(starts, starts[1:], (share, remainder, 0), strict=False):
        if start == stop:
            continue
        hosts, lanes = range(start, stop), [each + 1] * num_longer + [each] * (share - num_longer)
        end = _end(hosts, operations, *lanes) if share == 1 else _joined(hosts, operations, lanes, joining)
        if ends and ends[-1][1:] == end[1:]:
            ends[-1] = end._replace(hosts=range(ends[-1].hosts.start, hosts.stop))
        else:
            ends.append(end)
    return ends


def _end(hosts: range, operations: Sequence[Transformation], count: int) -> ShardEnd:
    """Returns the end of shards that begin with a number of elements."""
    rows: list[int] = []
    has_short = moves = False
    for operation in operations:
        # The short batch is the last one, so it keeps its place if it is alone in its window.
        moves |= has_short and operation.regroups and (count - 1) % getattr(operation, "window_size", count) > 0
        if isinstance(operation, Batch):
            complete, remainder = divmod(count, operation.batch_size)
            count = complete + bool(remainder and not operation.drop_remainder)
            is_short = count > complete and not operation.pad_remainder
            rows.append(remainder if is_short else operation.batch_size)
            has_short |= is_short
    return ShardEnd(hosts, count, tuple(rows), moves)


def _joined(
    hosts: range, operations: Sequence[Transformation], lanes: Sequence[int], joining: tuple[int, Batch] | None
) -> ShardEnd:
    """Returns the end of shards whose last Batch concatenates a share of each of several logical shards."""
    if joining is None:
        raise AssertionError("checked: a Batch joins the elements of logical shards")
    number, batch = joining
    before = [_end(hosts, operations[:number], count) for count in lanes]
    share, counts = batch.batch_size // len(lanes), [end.outputs for end in before]
    outputs = min(counts) // share if batch.drop_remainder else -(-max(counts) // share)
    rows = sum(max(0, min(share, count - (outputs - 1) * share)) for count in counts)
    rows = batch.batch_size if batch.pad_remainder or batch.drop_remainder else rows
    moves = any(end.moves for end in before)
    return ShardEnd(hosts, outputs, (*(rows for end in before for rows in end.rows), rows), moves)


def are_even(ends: Sequence[ShardEnd]) -> bool:
    """Returns True if all shards have as many rows at each step."""
    return len(ends) == 1 and not ends[0].moves


def are_known(operations: Sequence[Transformation], *, skips_errors: bool) -> bool:
    """Returns True if positions alone decide how many elements each operation has."""
    return _changing_count(operations, skips_errors=skips_errors) is None


def _changing_count(operations: Sequence[Transformation], *, skips_errors: bool) -> tuple[int, str] | None:
    """Returns the number of the first operation that changes the count, and what it does; None if there is none."""
    for number, operation in enumerate(operations):
        if not operation.keeps_count:
            return number, "drops or adds elements"
        if operation.regroups and skips_errors and not any(one.gathers for one in operations[:number]):
            return number, "does not let on_error='skip' replace records that fail, which are dropped"
    return None


def check_ends(
    operations: Sequence[Transformation], length: int | None, shard: ShardOptions, *, skips_errors: bool = False
) -> None:
    """Warns if shards may yield different numbers of batches, last batches of different sizes, or no batch.

    Raises:
        ValueError: it is certain, and the shard is one of global arrays.
    """
    if length is None:
        return
    if (changing := _changing_count(operations, skips_errors=skips_errors)) is not None:
        if shard.shard_count == 1:
            return
        number, effect = changing
        warn(
            f"operations[{number}], {described(operations[number])}, {effect} on each of the "
            f"{shard.shard_count} shards independently, so shards may end at different steps, and a JAX collective "
            "would then hang. Filter ahead with millstream.surviving_keys and pass the keys to "
            "IndexSampler(len(keys), keys=keys), or read endlessly (num_epochs=None) and count the steps."
        )
        return
    ends, records = ends_of(operations, length, shard), f"{length:,} record{'s' * (length != 1)}"
    if not are_even(ends):
        has_batches = any(isinstance(operation, Batch) for operation in operations)
        remedy = "Use drop_remainder=True in the shard_options."
        if has_batches:
            remedy = "Use Batch(..., drop_remainder=True) to train, or Batch(..., pad_remainder=True) to evaluate."
        cause = f"{_differences(ends, has_batches=has_batches)}, because they cannot share {records} evenly"
        if isinstance(shard, ShardBySharding):
            raise ValueError(f"Cannot build a global array of the last step: {cause}. {remedy}")
        log_warning(f"hosts end differently: {cause}. {remedy}")
    elif length and not ends[0].outputs:
        remedy = "Use a smaller batch, or Batch(..., pad_remainder=True)."
        log_warning(f"this loader yields nothing, because {records} cannot fill one global batch. {remedy}")


def _differences(ends: Sequence[ShardEnd], *, has_batches: bool) -> str:
    if len({end.outputs for end in ends}) > 1:
        unit, plural = ("batch", "batches") if has_batches else ("element", "elements")
        first, *others = [
            f"{_hosts(end.hosts)} {'has' if len(end.hosts) == 1 else 'have'} {end.outputs}" for end in ends
        ]
        return ", ".join([f"{first} {unit if ends[0].outputs == 1 else plural}", *others])
    unlike = [rows for rows in zip(*(end.rows for end in ends), strict=True) if len({*rows}) > 1]
    if not unlike:
        return f"a shuffle moves the batch of {min(ends[0].rows)} rows to another step on each host"
    rows = unlike[0]
    first, *others = [f"{number} on {_hosts(end.hosts)}" for number, end in zip(rows, ends, strict=True)]
    return f"the last batch has {first.replace(' ', ' rows ', 1)}, {', '.join(others)}"


def _hosts(hosts: range) -> str:
    match len(hosts):
        case 1:
            return f"host {hosts[0]}"
        case 2:
            return f"hosts {hosts[0]} and {hosts[1]}"
    return f"hosts {hosts[0]} to {hosts[-1]}"
