"""An order whose global batches are dealt to parts of equal cost."""

import copy
import heapq
import operator
from collections.abc import Sequence
from typing import Any, Self, cast, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer, named_arguments
from millstream.core.descriptions import Rendered
from millstream.core.randomness import generator
from millstream.core.segments import Segments
from millstream.record import RecordMetadata
from millstream.samplers.base import (
    POSITION_LIMIT,
    AdaptedSampler,
    Located,
    MixedPackedSampler,
    VectorisedSampler,
    checked_keys_at,
    checked_positions,
    has_varying_batches,
    is_mixed,
    is_packed,
    largest_key,
    position_limit,
    vectorised,
)
from millstream.samplers.order import Occurrences, Order, amounts, counted_crc, positions_between
from millstream.sharding import ShardOptions

_LARGEST_COST = 1 << 31
"""Costs become integers up to this bound, whose sums are the same on every machine."""

_POSITIONS_PER_CALL = 1 << 15
"""The order is called for the positions of several global batches together, up to this number."""


@final
class BalancedSampler(Order):
    """The records of another order, each global batch of which is dealt so that all parts of it cost alike.

    A step takes as long as its slowest device. If records differ in cost, this sampler rearranges the rows within each
    global batch: it has the same records, so the training is the same except for the order of a sum. Part p consists of
    the rows `p * size … (p + 1) * size - 1`, where `size = global_batch_size // parts`. Parts are nested: as long as
    their number can be halved, neighbouring pairs are balanced as well. So any number of hosts that divides `parts` has
    the same global batch.

    It pays if the time of a step depends on the costs: attention over variable lengths, vision encoders, batches that
    are padded to their longest row, decoding on hosts. It gains nothing with kernels that compute whole rows whatever
    their segments. One record that costs more than an average part is the limit of what any arrangement can do.

    It is the outermost order: of a `MixtureSampler`, pass the mixture. The pipeline must be 1:1. The last, incomplete
    global batch keeps its order. Rearranging takes about a microsecond per record.

    Args:
        order: the order of the records, usually shuffled; any sampler. Of a `PackingSampler`, rows are dealt.
        costs: the cost of each record, by record key: numbers from 0 on, shape (n,), for instance `lengths**2`. A row
            costs the sum of its documents; a document that is cut counts in proportion to its tokens.
        global_batch_size: the number of rows per step, over all shards: a multiple of parts.
        parts: the number of parts, usually that of the devices, or of devices times accumulated microbatches.

    Attributes:
        order, global_batch_size, parts: as given.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range, or there are fewer costs than records.

    Examples:
        >>> costs = np.array([9, 1, 1, 5, 1, 7, 1, 1])
        >>> order = millstream.IndexSampler(8, shuffle=True, seed=0, num_epochs=1)
        >>> costs[order.record_keys(0, 8)].reshape(2, 4).sum(axis=1)
        array([10, 16])
        >>> balanced = millstream.BalancedSampler(order, costs=costs, global_batch_size=8, parts=2)
        >>> costs[balanced.record_keys(0, 8)].reshape(2, 4).sum(axis=1)
        array([14, 12])
    """

    @named_arguments()
    def __init__(self, order: Any, *, costs: Any, global_batch_size: int, parts: int) -> None:
        vectorised(order)  # which refuses anything but a sampler
        self.order = order
        self.global_batch_size = as_integer(global_batch_size, "global_batch_size", minimum=1, maximum=1 << 62)
        if has_varying_batches(order):
            raise ValueError(f"order must have global batches of one size, got {order!r}. Pass one global_batch_size.")
        self.parts = as_integer(parts, "parts", minimum=1)
        if self.global_batch_size % self.parts:
            raise ValueError(
                f"global_batch_size must be a multiple of parts={self.parts}, got {self.global_batch_size}."
            )
        self._costs = _as_integer_costs(costs)
        largest = largest_key(order)
        if largest is not None and largest >= len(self._costs):
            raise ValueError(
                f"costs must have a number for each record key, up to {largest}, got {len(self._costs)} numbers."
            )

    def __repr__(self) -> str:
        return f"BalancedSampler({self.order!r}, global_batch_size={self.global_batch_size}, parts={self.parts})"

    def _card_bars(self) -> Sequence[tuple[str, Sequence[tuple[str, float]]]]:
        return self.order._card_bars() if isinstance(self.order, Rendered) else ()  # noqa: SLF001  (of its own kind)

    def fingerprint(self) -> str:
        """Returns the class, the arguments, and the fingerprint of the order, or its class; of the costs, a CRC."""
        own = getattr(self.order, "fingerprint", None)
        of = own() if callable(own) else type(self.order).__name__
        fields = f"costs={counted_crc(self._costs)} global_batch_size={self.global_batch_size} parts={self.parts}"
        return f"BalancedSampler {fields} of {of}"

    @property
    def fingerprint_starts(self) -> dict[str, int]:
        """The positions from which on some texts of the fingerprint count, by the name of the text."""
        starts: dict[str, int] = getattr(self.order, "fingerprint_starts", {})
        return starts

    @property
    def given_batch(self) -> tuple[str, int]:
        return "global_batch_size", self.global_batch_size

    @property
    def seed(self) -> int | None:
        """The seed of the order."""
        return self._vectorised.seed

    @property
    def num_records(self) -> int | None:
        """The number of positions per epoch of the order; None if it has no epochs."""
        return self._vectorised.num_records

    @property
    def length(self) -> int | None:
        """The number of positions; None if the order is endless."""
        return self._vectorised.length

    @property
    def largest_key(self) -> int | None:
        """A key that no record key exceeds, or None."""
        return largest_key(self.order)

    @property
    def shard_options(self) -> ShardOptions | None:
        """The shard that the order is given, or None."""
        return getattr(self.order, "shard_options", None)

    @property
    def names(self) -> tuple[Any, ...]:
        """The names of the components of a mixture; empty if the order is not one."""
        return self.order.names if is_mixed(self.order) else ()

    @property
    def samplers(self) -> tuple[VectorisedSampler | AdaptedSampler, ...]:
        """The samplers of the components of a mixture."""
        return self._of_order.samplers

    @property
    def source_lengths(self) -> tuple[int, ...]:
        """The number of records of each source of a mixture."""
        return self._of_order.source_lengths

    @property
    def rows_seed(self) -> int | None:
        """The seed of a mixture for draws that belong to no single component."""
        return self._of_order.rows_seed

    @property
    def num_source_records(self) -> int:
        """The number of documents of rows, or of records of all sources of a mixture."""
        return self._of_order.num_source_records

    @property
    def row_length(self) -> int | None:
        """The number of tokens per row; None if the order has no rows."""
        return self.order.row_length if is_packed(self.order) else None

    def of_epoch(self, number: int) -> Self:
        """Returns one epoch of the order alone. Raises TypeError if the order has no `of_epoch`.

        Args:
            number: the number of the epoch, from 0 on.
        """
        if not callable(getattr(self.order, "of_epoch", None)):
            kind = type(self.order).__name__
            raise TypeError(f"epochs(n) needs an order with of_epoch(number) in the BalancedSampler, got {kind}.")
        epoch = copy.copy(self)
        epoch.order = self.order.of_epoch(number)
        return epoch

    def __getitem__(self, position: int) -> RecordMetadata:
        position = operator.index(position)
        (position_in_order,) = self._positions_in_order(positions_between(position, position + 1, self.length)).tolist()
        metadata = self._vectorised[position_in_order]
        rng = metadata.rng
        if self.seed is not None:
            rng = generator(self.seed, position // (self.num_records or POSITION_LIMIT), position, operation=0)
        return RecordMetadata(position, metadata.record_key, rng)

    def _record_keys(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return checked_keys_at(self._vectorised, self._positions_in_order(positions))

    def occurrences(self, keys: NDArray[np.int64], stop: int) -> Occurrences:
        if not hasattr(self.order, "occurrences"):
            raise TypeError(
                f"The positions of records are not known: the order, {type(self.order).__name__}, has no positions_of."
            )
        size = self.global_batch_size
        end = min(-(-stop // size) * size, position_limit(self.length))
        found = self.order.occurrences(keys, end)
        positions = self._positions_in_order(found.positions, inverse=True)
        is_before = positions < stop
        return Occurrences(found.rows[is_before], positions[is_before])

    def drawn_before(self, position: int) -> tuple[int, ...]:
        """Returns the number of elements of each component of a mixture before a position, as the mixture does.

        Args:
            position: 0, the length, or the beginning of a global batch.
        """
        return self._of_order.drawn_before(position)

    def lengths_at(self, record_keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the numbers of tokens of documents, shape (m,); the order must have rows.

        Args:
            record_keys: the documents, shape (m,).
        """
        return self._of_order.lengths_at(record_keys)

    def segments_at(self, positions: NDArray[np.int64]) -> Segments:
        """Returns the documents of the rows at any positions, in their order; the order must have rows.

        Args:
            positions: any positions, from 0 on, shape (m,), in any order; they may repeat.
        """
        return self._of_order.segments_at(self._positions_in_order(positions))

    def shuffled_within(self, global_batch_size: int, seed: int) -> Self:  # noqa: ARG002
        """Returns the order itself, because the rows of each global batch are arranged already.

        Args:
            global_batch_size: the number of rows in a global batch; it makes no difference.
            seed: the seed of the pipeline; it makes no difference.
        """
        return self

    def locate(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the component at each position, and the position in its own order; both of shape (m,).

        Args:
            positions: any positions, from 0 on, shape (m,), in any order; they may repeat.
        """
        return self._of_order.locate(self._positions_in_order(positions))

    def located(self, positions: NDArray[np.int64]) -> Located:
        """Returns the component, the index and the record key of any positions."""
        return self._of_order.located(self._positions_in_order(positions))

    def located_segments(self, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], Segments]:
        """Returns the component, the index and the documents of the rows at any positions."""
        return self._of_order.located_segments(self._positions_in_order(positions))

    @property
    def _vectorised(self) -> VectorisedSampler | AdaptedSampler:
        return vectorised(self.order)

    @property
    def _of_order(self) -> MixedPackedSampler:
        return cast("MixedPackedSampler", self.order)

    def _positions_in_order(self, positions: NDArray[np.int64], *, inverse: bool = False) -> NDArray[np.int64]:
        """Returns the positions in the order at which the records of positions are, or the inverse; shape (m,)."""
        positions = checked_positions(positions, self.length)
        size = self.global_batch_size
        complete = position_limit(self.length) // size
        batches = positions // size
        numbers, rows = np.unique(batches, return_inverse=True)
        offsets, found = positions - batches * size, positions.copy()
        count = int(np.searchsorted(numbers, complete))
        step = max(1, _POSITIONS_PER_CALL // size)
        for start in range(0, count, step):
            stop = min(start + step, count)
            arranged = self._arranged(numbers[start:stop])
            arranged = np.argsort(arranged, axis=1) if inverse else arranged
            own = np.flatnonzero((rows >= start) & (rows < stop))
            found[own] = arranged[rows[own] - start, offsets[own]] + batches[own] * size
        found.flags.writeable = False
        return found

    def _arranged(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns an offset in the order for each row of complete global batches, shape (batches, rows)."""
        size = self.global_batch_size
        positions = (numbers[:, np.newaxis] * size + np.arange(size)).reshape(-1)
        if is_packed(self.order):
            rows = self.order.segments_at(positions)
            own = self._costs[rows.elements] * rows.lengths // self.order.lengths_at(rows.elements)
            costs = np.add.reduceat(own, rows.offsets[:-1])
        else:
            costs = self._costs[checked_keys_at(self._vectorised, positions)]
        return np.stack([_dealt(of_batch, self.parts) for of_batch in costs.reshape(-1, size)])


def _as_integer_costs(costs: Any) -> NDArray[np.int64]:
    """Returns costs in proportion to the given ones, as integers from 0 to `_LARGEST_COST`."""
    array = amounts(costs, "costs").astype(np.float64)
    # By a power of two first, which is exact: the quotient of a very small cost would be infinite.
    array = np.ldexp(array, -np.frexp(array.max())[1])
    scaled: NDArray[np.int64] = np.rint(array * (_LARGEST_COST / (array.max() or 1.0))).astype(np.int64)
    return scaled


def _dealt(costs: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Returns rows in an order in which `count` contiguous parts of the same size cost alike, nested."""
    size = len(costs) // count
    rows = np.argsort(-costs, kind="stable")
    # The dearest row that is left goes to the cheapest part that has room.
    open_groups: list[tuple[int, int]] = [(0, number) for number in range(count)]
    totals, members = [0] * count, [list[int]() for _ in range(count)]
    for row, cost in zip(rows.tolist(), costs[rows].tolist(), strict=True):
        total, number = open_groups[0]
        totals[number] = total + cost
        members[number].append(row)
        if len(members[number]) == size:
            heapq.heappop(open_groups)
        else:
            heapq.heapreplace(open_groups, (totals[number], number))
    groups = list(zip(totals, members, strict=True))
    while len(groups) > 1 and len(groups) % 2 == 0:
        ordered = sorted(groups, key=operator.itemgetter(0), reverse=True)
        half = len(groups) // 2
        pairs = zip(ordered[:half], reversed(ordered[half:]), strict=True)
        groups = [(dear + cheap, first + second) for (dear, first), (cheap, second) in pairs]
    return np.array([row for _, rows_of_group in groups for row in rows_of_group], dtype=np.int64)
