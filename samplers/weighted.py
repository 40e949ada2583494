"""An order that draws records in proportion to weights.

The weights of all records, one after another, divide a line of `num_records` *slots*: record k owns as much of it as
the draws that it should have in an epoch. Each slot is one draw, of the record that owns the point at an offset into
the slot. The offset is the same for all slots of an epoch, and random, so a record that owns 2.3 slots is drawn two or
three times, and three times in 0.3 of all epochs (systematic sampling; Madow, "On the theory of systematic sampling",
1944). The slots are then permuted like the records of an `IndexSampler`.
"""

import copy
import functools
import itertools
import zlib
from typing import Any, NamedTuple, Self, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import LARGEST_COUNT, as_integer, named_arguments
from millstream.core.randomness import Purpose, derive_seed, derive_seeds
from millstream.samplers.order import EpochSampler, KeyCycles, amounts, by_number, spread
from millstream.samplers.permutation import permute
from millstream.sharding import ShardOptions

_CELL_BITS = 32
"""A point of the line is the number of a cell, and this many bits within it."""

_TOTAL_BITS = 58
"""Weights become integers whose sum has this many bits, which can be divided exactly."""

_CHUNK = 1 << 16
"""The number of weights converted together, so that a billion need no second array of their size."""

_SLOTS_LIMIT = 1 << 48


@final
class WeightedSampler(EpochSampler):
    """Records drawn in proportion to weights: for balanced classes, priorities, hard examples.

    An epoch has `num_records` draws. Record k should be drawn e = num_records * weights[k] / sum(weights) times in it,
    and is drawn e times, rounded up or down, in every epoch: shares do not depend on chance. The draws of an epoch are
    shuffled globally, and each epoch rounds and shuffles in its own way. A record of weight 0 is never drawn.
    Records with less than one draw per epoch are taken evenly spaced by key.

    For classes of equal shares, `weights = 1 / np.bincount(labels)[labels]`.

    It takes 8 bytes for each weight, about 90 s of one core to build for a billion of them, and two to three times as
    long as an `IndexSampler` for a batch. A random operation draws other numbers each time a record is drawn, as each
    position has its own.

    Args:
        weights: the weight of each record, by record key: finite numbers from 0 on, shape (n,), at most 2**31 of them.
            They are copied.
        seed: 0 … 2**64 - 1, selects the draws, the shuffles and all randomness of the pipeline.
        num_records: the number of draws per epoch, 1 … 2**48; None for as many as weights.
        num_epochs: the number of epochs, at least 1; None for an endless order.
        shard_options: the shard of every global batch that this process reads; None for all of it.

    Attributes:
        num_source_records: the number of weights, and so of the records of the source.
        num_records, seed, num_epochs, shard_options: as given.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; a weight is negative or nan, or all are
            0; seed is None.

    Examples:
        >>> labels = np.array([0, 0, 0, 0, 0, 0, 1, 1])
        >>> weights = 1 / np.bincount(labels)[labels]
        >>> sampler = millstream.WeightedSampler(weights, seed=0)
        >>> sampler.record_keys(0, 8)
        array([1, 7, 6, 7, 5, 2, 4, 6])
    """

    seed: int

    @named_arguments()
    def __init__(
        self,
        weights: Any,
        *,
        seed: int,
        num_records: int | None = None,
        num_epochs: int | None = None,
        shard_options: ShardOptions | None = None,
    ) -> None:
        super().__init__(num_epochs, seed, shard_options, shuffle=True)
        checked = _checked_weights(weights)
        self.num_source_records = len(checked)
        if num_records is None:
            num_records = len(checked)
        self.num_records = as_integer(num_records, "num_records", minimum=1, maximum=_SLOTS_LIMIT)
        self._slot_bits = _bits_of_slots(len(checked), self.num_records)
        shares = _Shares.of(checked, self.num_records, self._slot_bits)
        self._changes: tuple[tuple[int, _Shares], ...] = ((0, shares),)

    def __repr__(self) -> str:
        changes = len(self._changes) - 1
        return (
            f"WeightedSampler({self.num_source_records:,} weights, num_records={self.num_records:,}, seed={self.seed}, "
            f"num_epochs={self.num_epochs}{f', {changes} changes of weights' if changes else ''})"
        )

    @property
    def largest_key(self) -> int:
        """No record key is larger."""
        return self.num_source_records - 1

    def fingerprint(self) -> str:
        """Returns the class and everything that determines the order, in words; of all weights, a CRC.

        `weights_from_500=#…` holds from position 500 on: a state from before does not depend on it.
        """
        weights = " ".join(f"weights_from_{start}=#{shares.crc:08x}" for start, shares in self._changes)
        return (
            f"WeightedSampler num_records={self.num_records} num_source_records={self.num_source_records} "
            f"seed={self.seed} {weights}"
        )

    @property
    def fingerprint_starts(self) -> dict[str, int]:
        """The positions from which on some texts of the fingerprint count, by the name of the text."""
        return {f"weights_from_{start}": start for start, _ in self._changes}

    def reweighted(self, position: int, weights: Any) -> Self:
        """Returns the order that has other weights from a position on, and is the same before.

        A state that was saved at the position or before it can be resumed with either, so a run can change its weights
        at its current position, for instance to the losses that it has measured:

            sampler = sampler.reweighted(step * global_batch_size, losses)

        In the epoch of the position, the slots that are left are drawn by the new weights. Weights that an earlier call
        set for this position, or for later ones, are replaced. Each change takes 8 bytes per weight.

        Args:
            position: the first position with these weights, from 0 on: counted over all shards, so that the step is
                multiplied by the size of the global batch, and over all epochs of `loader.epochs`.
            weights: as for the constructor, equally many.

        Raises:
            ValueError: the weights are not valid, or the order ends before the position.
        """
        position = as_integer(position, "position", minimum=0, maximum=LARGEST_COUNT - 1)
        if self.length is not None and position >= self.length:
            raise ValueError(
                f"position must be below {self.length}, because the order ends there, got {position}. For later "
                "epochs, give the sampler a larger num_epochs, or None."
            )
        checked = _checked_weights(weights)
        if len(checked) != self.num_source_records:
            raise ValueError(f"weights must have {self.num_source_records} numbers, as before, got {len(checked)}.")
        kept = tuple(change for change in self._changes if change[0] < position)
        return self._copied((*kept, (position, _Shares.of(checked, self.num_records, self._slot_bits))))

    def of_epoch(self, number: int) -> Self:
        """Returns one epoch alone: number 0 is the first one, and each other one has a seed derived from its number.

        The positions of changes of weights are counted over all epochs, one after another.

        Args:
            number: the number of the epoch, from 0 on.
        """
        first = super().of_epoch(number).first_epoch * self.num_records
        held = max(row for row, (start, _) in enumerate(self._changes) if start <= first)
        changes = [(max(0, start - first), shares) for start, shares in self._changes[held:]]
        is_in_epoch = [start < self.num_records for start, _ in changes]
        epoch = super().of_epoch(number)
        return epoch._copied(tuple(itertools.compress(changes, is_in_epoch)))  # noqa: SLF001  (of this class)

    def _copied(self, changes: "tuple[tuple[int, _Shares], ...]") -> Self:
        copied = copy.copy(self)
        copied._changes = changes  # noqa: SLF001  (of this class)
        return copied

    def key_cycles(self) -> KeyCycles:
        """Returns the keys of the records with a weight above 0."""
        return _DrawnKeys([shares for _, shares in self._changes])

    def _record_keys(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(positions):
            return np.empty(0, dtype=np.int64)
        first, last = int(positions.min()) // self.num_records, int(positions.max()) // self.num_records
        epochs = np.array([first]) if first == last else positions // self.num_records
        of_each: Any = first if first == last else epochs.view(np.uint64)
        slots = permute(positions - epochs * self.num_records, self.num_records, self._slots_seed, of_each)
        points = (slots.view(np.uint64) << np.uint64(self._slot_bits)) + self._offsets_in(epochs)
        if len(self._changes) == 1:
            return self._changes[0][1].records_at(points)
        keys = np.empty(len(positions), dtype=np.int64)
        starts = np.array([start for start, _ in self._changes], dtype=np.int64)
        for number, rows in by_number(np.searchsorted(starts, positions, side="right") - 1):
            keys[rows] = self._changes[number][1].records_at(points[rows])
        return keys

    def _keys_of_epoch(self, offsets: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        return self._record_keys(offsets + epoch * self.num_records)

    def _offsets_of(self, elements: NDArray[np.int64], epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        begin = epoch * self.num_records
        point = int(self._offsets_in(np.array([epoch]))[0])
        stops = [start - begin for start, _ in self._changes[1:]] + [self.num_records]
        found = [(np.empty(0, np.int64), np.empty(0, np.int64))]
        for (start, shares), stop in zip(self._changes, stops, strict=True):
            if stop <= 0 or start - begin >= self.num_records:
                continue
            owners, slots = spread(*shares.slots_of(elements, point, self._slot_bits))
            offsets = permute(slots, self.num_records, self._slots_seed, epoch, inverse=True)
            is_held = (offsets >= start - begin) & (offsets < stop)
            found.append((owners[is_held], offsets[is_held]))
        owners, offsets = (np.concatenate(columns) for columns in zip(*found, strict=True))
        return owners, offsets

    def _offsets_in(self, epochs: NDArray[np.int64]) -> NDArray[np.uint64]:
        """Returns the offset of the points of epochs in their slots, shape (epochs,)."""
        if len(epochs) == 1:
            return _offset_in(self.seed, int(epochs[0]), self._slot_bits)
        return _offsets_in(self.seed, epochs, self._slot_bits)

    @property
    def _slots_seed(self) -> int:
        return derive_seed(self.seed, Purpose.WEIGHTED_SLOTS)


def _offsets_in(seed: int, epochs: NDArray[np.int64], slot_bits: int) -> NDArray[np.uint64]:
    if not slot_bits:
        return np.zeros(len(epochs), np.uint64)
    points = derive_seeds(np.array([seed], np.uint64), Purpose.WEIGHTED_POINTS, epochs.view(np.uint64))
    return points >> np.uint64(64 - slot_bits)


@functools.lru_cache(maxsize=4)
def _offset_in(seed: int, epoch: int, slot_bits: int) -> NDArray[np.uint64]:
    """Returns the offset in one epoch. Computing it takes as long as the search for the records of a small batch."""
    return _offsets_in(seed, np.array([epoch]), slot_bits)


class _Shares(NamedTuple):
    """The parts of the line that records own, in 8 bytes for each.

    The line is divided into about as many cells as there are records. A shift finds the cell of a point, and a search
    among the few ends in the cell finds the record.

    Attributes:
        ends: for each record, its end within a cell, uint32.
        firsts: for each cell, the number of records that end in the cells before it; and at the end, in all, uint32.
        crc: the checksum of both.
    """

    ends: NDArray[np.uint32]
    firsts: NDArray[np.uint32]
    crc: int

    @classmethod
    def of(cls, weights: NDArray[Any], num_slots: int, slot_bits: int) -> "_Shares":
        chunks = [weights[start : start + _CHUNK] for start in range(0, len(weights), _CHUNK)]
        scale = _scale_of(weights, chunks)
        total = sum(int(_scaled(chunk, scale).sum()) for chunk in chunks)
        num_cells = -(-(num_slots << slot_bits) >> _CELL_BITS)
        # The number of records that end in each cell, in the row after it; in the end, their sums.
        ends, counts = np.empty(len(weights), np.uint32), np.zeros(num_cells + 2, np.uint32)
        before = 0
        for number, chunk in enumerate(chunks):
            sums = np.cumsum(_scaled(chunk, scale)) + before
            before = int(sums[-1])
            points = _in_proportion(sums, total, num_slots, slot_bits)
            ends[number * _CHUNK :][: len(chunk)] = points.astype(np.uint32)
            cells = points >> _CELL_BITS
            own = np.bincount(cells - cells[0])
            counts[int(cells[0]) + 1 :][: len(own)] += own.astype(np.uint32)
        # In place: a second array of a billion numbers would be half as large as the result.
        firsts = np.cumsum(counts, out=counts)[:-1]
        crc = zlib.crc32(firsts.astype("<u4", copy=False).data, zlib.crc32(ends.astype("<u4", copy=False).data))
        return cls(ends, firsts, crc)

    def records_at(self, points: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Returns the record that owns each point."""
        cells = (points >> np.uint64(_CELL_BITS)).view(np.int64)
        own = points.astype(np.uint32)
        # Clipping is the quickest mode. What it changes is masked.
        low = self.firsts.take(cells, mode="clip")
        cells += 1
        high = self.firsts.take(cells, mode="clip")
        # A cell has one end on average, so most searches end after one step.
        is_after = (self.ends.take(low, mode="clip") <= own) & (low < high)
        low += is_after
        searched: Any = np.flatnonzero(is_after)
        searched = searched[low[searched] < high[searched]]
        first, last, own = low[searched], high[searched], own[searched]
        while len(searched):
            middle = first + ((last - first) >> 1)
            is_after = (self.ends.take(middle, mode="clip") <= own) & (first < last)
            first, last = np.where(is_after, middle + 1, first), np.where(is_after, last, middle)
            low[searched] = first
            if not (first < last).any():
                break
        return low.astype(np.int64)

    def slots_of(
        self, records: NDArray[np.int64], point: int, slot_bits: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the first slot of each record, and the slot after its last one."""
        begins, ends = self._ends_of(records - 1), self._ends_of(records)
        first, stop = (-((point - each) >> slot_bits) for each in (begins, ends))
        return first, stop

    def _ends_of(self, records: NDArray[np.int64]) -> NDArray[np.int64]:
        cells = np.searchsorted(self.firsts, np.maximum(records, 0).astype(np.uint32), side="right") - 1
        ends = (cells << _CELL_BITS) + self.ends[records]
        return np.where(records < 0, 0, ends)

    def are_above_0(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Returns True for each of the records [start, stop) that owns a part of the line."""
        ends = self._ends_of(np.array([start - 1, stop - 1]))
        are_above_0: NDArray[np.bool_]
        if start and ends[0] >> _CELL_BITS == ends[1] >> _CELL_BITS:
            # All end in one cell: the quick way over a million records of weight 0.
            are_above_0 = self.ends[start - 1 : stop - 1] != self.ends[start:stop]
        else:
            are_above_0 = np.diff(self._ends_of(np.arange(start - 1, stop))) > 0
        return are_above_0


@final
class _DrawnKeys:
    """The cycle of the records with a weight above 0, at some position.

    It is searched for one key at a time: a list of a billion keys in each worker would take more memory than the data.
    """

    def __init__(self, changes: list[_Shares]) -> None:
        self._changes = changes
        self._num_records = len(changes[0].ends)

    @functools.cached_property
    def count(self) -> int:
        """The number of these records, or of the first 65,536 or more of them."""
        count = 0
        for start in range(0, self._num_records, _CHUNK):
            count += int(np.count_nonzero(self._are_drawn(start, min(start + _CHUNK, self._num_records))))
            if count >= _CHUNK:
                break
        return count

    def following(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.array([self._first_from(key + 1) for key in keys.tolist()], np.int64)

    def _first_from(self, start: int) -> int:
        """Returns the first of these records from a key on, or from 0 if there is none."""
        size = 64
        while start < self._num_records:
            stop = min(start + size, self._num_records)
            found = self._are_drawn(start, stop)
            if found.any():
                return start + int(np.argmax(found))
            start, size = stop, min(2 * size, _CHUNK)
        return self._first_from(0)

    def _are_drawn(self, start: int, stop: int) -> NDArray[np.bool_]:
        are_drawn = np.zeros(stop - start, np.bool_)
        for shares in self._changes:
            are_drawn |= shares.are_above_0(start, stop)
        return are_drawn


def _bits_of_slots(num_weights: int, num_slots: int) -> int:
    """Returns the number of bits within a slot such that there are about as many cells as weights, and no more."""
    if num_weights >= num_slots:
        return _CELL_BITS + (num_weights // num_slots).bit_length() - 1
    return max(0, _CELL_BITS - (-(-num_slots // num_weights) - 1).bit_length())


def _checked_weights(weights: Any) -> NDArray[Any]:
    array = amounts(weights, "weights", " Give a record that is not to be drawn the weight 0.")
    if len(array) > 1 << 31:
        raise ValueError(f"weights must be at most 2**31 numbers, got {len(array)}.")
    if not array.max():
        raise ValueError("At least one of the weights must be above 0, got nothing but zeros.")
    return array


def _scale_of(weights: NDArray[Any], chunks: list[NDArray[Any]]) -> int:
    """Returns the power of two by which weights become integers whose sum has nearly `_TOTAL_BITS` bits."""
    exponent = int(np.frexp(np.float64(weights.max()))[1])
    scale = _TOTAL_BITS - exponent - len(weights).bit_length()
    total = sum(int(_scaled(chunk, scale).sum()) for chunk in chunks)
    return scale + _TOTAL_BITS - (total + len(weights)).bit_length()


def _scaled(weights: NDArray[Any], scale: int) -> NDArray[np.int64]:
    scaled: NDArray[np.int64] = np.rint(np.ldexp(weights.astype(np.float64), scale)).astype(np.int64)
    return scaled


def _in_proportion(sums: NDArray[np.int64], total: int, num_slots: int, slot_bits: int) -> NDArray[np.int64]:
    """Returns sums * (num_slots << slot_bits) // total, whose products have up to 122 bits: digit by digit."""
    digits = [(num_slots, 0)]
    while (done := sum(bits for _, bits in digits)) < slot_bits:
        bits = min(31, slot_bits - done)
        digits.append((1 << bits, bits))
    quotients, rests = np.zeros_like(sums), sums
    for factor, bits in digits:
        # The product wraps around, and so does that of the quotient: their difference is small, and exact.
        own = (rests.astype(np.float64) * factor / total).astype(np.int64)
        rests = rests * np.int64(factor) - own * np.int64(total)
        correction = rests // total
        rests -= correction * np.int64(total)
        quotients = (quotients << bits) + own + correction
    return quotients
