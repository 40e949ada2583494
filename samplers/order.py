"""The base classes of orders of positions, their ends and inverses, and the arrays that they are given.

An `Order` has ranges of positions, and the way back from record keys to positions. An `EpochSampler` repeats as many
positions in each epoch.
"""

import abc
import copy
import itertools
import operator
import zlib
from typing import Any, NamedTuple, Protocol, Self, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer, as_integer_or_none, as_options
from millstream.core.descriptions import Rendered
from millstream.core.randomness import Purpose, as_seed, derive_seed, generator
from millstream.record import RecordMetadata
from millstream.samplers.base import POSITION_LIMIT, check_range, checked_positions, position_limit
from millstream.sharding import NoSharding, ShardOptions

Numbers = NDArray[np.int64]


class Occurrences(NamedTuple):
    """Positions, and the index of the key among the given ones that occurs there; in any order, int64, shape (m,)."""

    rows: Numbers
    positions: Numbers

    def table(self, num_keys: int) -> Numbers:
        """Returns a row for each key, its positions ascending, padded with -1; each position once."""
        if 0 < num_keys == len(self.rows) and (np.diff(self.rows) == 1).all():
            return self.positions[:, np.newaxis]
        order = np.lexsort((self.positions, self.rows))
        rows, positions = self.rows[order], self.positions[order]
        is_first = np.ones(len(rows), dtype=np.bool_)
        is_first[1:] = (rows[1:] != rows[:-1]) | (positions[1:] != positions[:-1])
        rows, positions = rows[is_first], positions[is_first]
        counts = np.bincount(rows, minlength=num_keys)
        found = np.full((num_keys, int(counts.max(initial=0))), -1, dtype=np.int64)
        found[rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)] = positions
        return found

    @classmethod
    def concatenate(cls, all_found: "list[Occurrences]") -> "Occurrences":
        nothing = np.empty(0, dtype=np.int64)
        return cls(*map(np.concatenate, zip((nothing, nothing), *all_found, strict=True)))


class Order(Rendered, abc.ABC):
    """An order whose methods follow from its length, from the record keys at positions, and from their inverse."""

    _card_kind = "order"

    @property
    @abc.abstractmethod
    def length(self) -> int | None:
        """The number of positions; None if the order is endless."""

    @property
    def given_batch(self) -> tuple[str, int] | None:
        """The name of the argument with the size of the global batch, and that size; None if it may have any."""
        return None

    @abc.abstractmethod
    def _record_keys(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the record keys of positions that are checked."""

    @abc.abstractmethod
    def occurrences(self, keys: NDArray[np.int64], stop: int) -> Occurrences:
        """Returns the occurrences of keys before a position, in any order."""

    def __len__(self) -> int:
        length = self.length
        if length is None:
            raise TypeError(
                f"This {type(self).__name__} is endless and has no len(): give num_epochs to it or to its samplers."
            )
        return length

    def record_keys(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the record keys of the positions [start, stop), of one or of several epochs; shape (stop - start,).

        Args:
            start: the first position, from 0 on.
            stop: the position after the last one.

        Raises:
            IndexError: start is negative or above stop, or stop is beyond the end.
        """
        return self._record_keys(positions_between(start, stop, self.length))

    def record_keys_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the record keys of any positions, shape (m,), in their order.

        Args:
            positions: any positions, from 0 on, shape (m,), in any order; they may repeat.

        Raises:
            IndexError: a position is negative or beyond the end.
        """
        return self._record_keys(checked_positions(positions, self.length))

    def positions_of(self, keys: Any, stop: int | None = None) -> NDArray[np.int64]:
        """Returns the positions at which records come, a row for each key: int64, shape (keys, occurrences).

        Nothing is enumerated: the shuffle is run backwards, and changes of weights are followed. Rows are ascending,
        and padded with -1 if other keys come more often.

        Args:
            keys: record keys, shape (m,). A key that never comes has a row of -1.
            stop: the position before which to search, from 0 on; None for the end of the order.

        Raises:
            TypeError: keys are not integers, or the order, or that of a component, cannot be inverted.
            ValueError: the order is endless, and stop is None.
        """
        wanted = checked_keys(keys)
        return self.occurrences(wanted, checked_stop(stop, self.length)).table(len(wanted))


def positions_between(start: int, stop: int, length: int | None) -> NDArray[np.int64]:
    """Returns the positions [start, stop) of an order of some length, None for endless; shape (stop - start,)."""
    start, stop = operator.index(start), operator.index(stop)
    check_range(start, stop, length)
    if start == stop:
        return np.empty(0, dtype=np.int64)
    # Not np.arange(start, stop): stop may be 2**63, one more than an int64 holds.
    return np.arange(stop - start, dtype=np.int64) + start


def checked_keys(keys: Any) -> Numbers:
    array = np.asarray(keys)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(f"keys must be a list or array of integers, got {keys!r}.")
    checked: Numbers = array.astype(np.int64)
    return checked


def checked_stop(stop: Any, length: int | None) -> int:
    if stop is None and length is None:
        raise ValueError("stop must be given for an endless order: each record comes again and again.")
    limit = position_limit(length)
    return limit if stop is None else min(as_integer(stop, "stop", minimum=0, maximum=None), limit)


def equal_to(values: Numbers, asked: Numbers) -> tuple[Numbers, Numbers]:
    """Returns the pairs of an index into `asked` and an index into `values` at which both are equal."""
    order = np.argsort(values, kind="stable")
    in_order = values[order]
    starts, stops = np.searchsorted(in_order, asked, "left"), np.searchsorted(in_order, asked, "right")
    rows, numbers = spread(starts, stops)
    return rows, order[numbers]


def by_number(numbers: NDArray[np.integer[Any]]) -> list[tuple[int, NDArray[np.intp] | slice]]:
    """Returns each of the numbers, ascending, with the indices at which it is, ascending; all of them as a slice."""
    if not len(numbers):
        return []
    first, last = int(numbers.min()), int(numbers.max())
    if first == last:
        return [(first, slice(None))]
    # Sorted as small integers, which takes a tenth of the time.
    small = (numbers - first).astype(np.min_scalar_type(last - first))
    order = np.argsort(small, kind="stable")
    starts = [0, *(np.flatnonzero(np.diff(small[order])) + 1).tolist(), len(order)]
    return [(int(numbers[order[start]]), order[start:stop]) for start, stop in itertools.pairwise(starts)]


def spread(starts: Numbers, stops: Numbers) -> tuple[Numbers, Numbers]:
    """Returns the numbers from each start to before each stop, one range after another, with the range of each."""
    counts = stops - starts
    rows = np.repeat(np.arange(len(starts)), counts)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts - starts, counts)


class KeyCycles(Protocol):
    """Cycles of keys, each ascending and from its last key to its first."""

    @property
    def count(self) -> int:
        """The number of keys of the longest cycle, or any number from 65,536 on if there are more."""

    def following(self, keys: Numbers) -> Numbers:
        """Returns the key after each key in its cycle."""


@final
class KeyGroups:
    """Cycles of keys that are given as arrays, each ascending."""

    def __init__(self, groups: list[Numbers]) -> None:
        self._groups = groups
        self.count = max(map(len, groups))

    def following(self, keys: Numbers) -> Numbers:
        following = keys.copy()
        for group in self._groups:
            after = np.searchsorted(group, keys, side="right")
            is_of_group = group[after - 1] == keys
            following[is_of_group] = group[after[is_of_group] % len(group)]
        return following


def _ascending(keys: Numbers) -> Numbers:
    """Returns the keys in ascending order, each once: themselves, and not a copy, if they are."""
    return keys if (keys[:-1] < keys[1:]).all() else np.unique(keys)


class EpochSampler(Order):
    """An order of epochs of equally many positions: epoch, offset = divmod(position, num_records)."""

    num_records: int
    num_epochs: int | None
    seed: int | None
    shard_options: ShardOptions
    first_epoch = 0
    """The number of the first epoch: 0, except in what `of_epoch` returns."""

    def __init__(
        self, num_epochs: int | None, seed: int | None, shard_options: ShardOptions | None, *, shuffle: bool
    ) -> None:
        self.num_epochs, self.seed = as_integer_or_none(num_epochs, "num_epochs"), checked_seed(seed, shuffle=shuffle)
        given = NoSharding() if shard_options is None else shard_options
        self.shard_options = as_options(given, "shard_options", ShardOptions)

    @abc.abstractmethod
    def fingerprint(self) -> str:
        """Returns the class and everything that determines the order, in words; not num_epochs, and not the shard."""

    def key_cycles(self) -> "KeyCycles | None":
        """Returns the cycles of keys that can replace each other; None if all keys are one."""
        keys = getattr(self, "keys", None)
        return None if keys is None else KeyGroups([_ascending(np.asarray(keys, np.int64))])

    @abc.abstractmethod
    def _keys_of_epoch(self, offsets: NDArray[np.int64], epoch: int) -> NDArray[np.int64]: ...

    @property
    def length(self) -> int | None:
        """The number of positions, over all epochs; None if the order is endless."""
        if not self.num_records:
            return 0
        return None if self.num_epochs is None else self.num_records * self.num_epochs

    def endless(self) -> Self:
        """Returns the same order with endlessly many epochs: this one, and what comes after its end."""
        endless = copy.copy(self)
        # Also if the class is a frozen dataclass.
        vars(endless)["num_epochs"] = None
        return endless

    def of_epoch(self, number: int) -> Self:
        """Returns one epoch alone: number 0 is the first one, and each other one has a seed derived from its number."""
        epoch = copy.copy(self)
        number = as_seed(number, "The number of an epoch")
        seed = self.seed if self.seed is None or number == 0 else derive_seed(self.seed, Purpose.EPOCH, number)
        # Also if the class is a frozen dataclass.
        vars(epoch).update(num_epochs=1, seed=seed, first_epoch=number)
        return epoch

    def __getitem__(self, position: int) -> RecordMetadata:
        position = operator.index(position)
        (record_key,) = self.record_keys(position, position + 1).tolist()
        epoch = position // self.num_records
        rng = None if self.seed is None else generator(self.seed, epoch, position, operation=0)
        return RecordMetadata(position, record_key, rng)

    def occurrences(self, keys: NDArray[np.int64], stop: int) -> Occurrences:
        rows, elements = self._elements_of(keys)
        found = []
        for epoch in range(-(-stop // self.num_records) if len(rows) else 0):
            owners, offsets = self._offsets_of(elements, epoch)
            first = epoch * self.num_records
            is_before = offsets < stop - first
            found.append(Occurrences(rows[owners][is_before], offsets[is_before] + first))
        return Occurrences.concatenate(found)

    def _elements_of(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the elements of each epoch with the given keys: the index of the key, and the element's number."""
        chosen = getattr(self, "keys", None)
        if chosen is not None:
            return equal_to(np.asarray(chosen, np.int64), keys)
        # Some have not as many positions per epoch as their source has records.
        rows = np.flatnonzero((keys >= 0) & (keys < getattr(self, "num_source_records", self.num_records)))
        return rows, keys[rows]

    @abc.abstractmethod
    def _offsets_of(
        self, elements: NDArray[np.int64], epoch: int
    ) -> tuple[NDArray[np.int64] | slice, NDArray[np.int64]]:
        """Returns the offsets of elements in an epoch, and the index of the element that each is of."""

    def _by_epoch(self, positions: NDArray[np.int64]) -> list[tuple[int, NDArray[np.intp] | slice, NDArray[np.int64]]]:
        rows_of = by_number(positions // self.num_records)
        return [(epoch, rows, positions[rows] - epoch * self.num_records) for epoch, rows in rows_of]

    def _record_keys(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        keys = np.empty(len(positions), dtype=np.int64)
        for epoch, rows, offsets in self._by_epoch(positions):
            keys[rows] = self._keys_of_epoch(offsets, epoch)
        return keys


def checked_seed(seed: object, *, shuffle: bool) -> int | None:
    """Returns a seed, 0 … 2**64 - 1, or None, which a shuffle does not accept."""
    if seed is None:
        if shuffle:
            raise ValueError("A shuffle needs a seed, got seed=None: pass any integer between 0 and 2**64 - 1.")
        return None
    return as_seed(seed)


def integers(values: object, name: str) -> NDArray[np.int64]:
    """Returns a line of integers as an int64 array of shape (n,); without a copy if it is one already."""
    array = np.asarray(values)
    if array.ndim != 1:
        raise ValueError(f"{name} must be a one-dimensional array of integers, got an array of shape {array.shape}.")
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, got an array of dtype {array.dtype}.")
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < POSITION_LIMIT:
        raise ValueError(f"{name} must be between 0 and 2**63 - 1, got {array.min()} to {array.max()}.")
    # As one block, it crosses to worker processes as pages that all of them share.
    return np.ascontiguousarray(array, dtype=np.int64)


def whole_numbers(values: object, name: str) -> NDArray[np.int64]:
    """Returns at least one integer, as `integers` does, of a sum below 2**63."""
    array = integers(values, name)
    if not array.size:
        raise ValueError(f"{name} must have at least one integer, got none.")
    # As floating-point numbers, which do not overflow as the sum may.
    if int(array.max()) * array.size > POSITION_LIMIT // 2 and array.sum(dtype=np.float64) > POSITION_LIMIT * 0.999:
        raise ValueError(f"{name} must have a sum below 2**63, got about {array.sum(dtype=np.float64):.3g}.")
    return array


def amounts(values: Any, name: str, remedy: str = "") -> NDArray[Any]:
    """Returns a line of at least one number, each finite and from 0 on, one for each record."""
    array = np.asarray(values)
    if array.ndim != 1 or not array.size:
        raise ValueError(f"{name} must be a one-dimensional array of numbers, got an array of shape {array.shape}.")
    if array.dtype.kind not in "iuf":
        raise TypeError(f"{name} must be numbers, got an array of dtype {array.dtype}.")
    if not (np.isfinite(array.max()) and array.min() >= 0):
        key = int(np.argmin(np.isfinite(array) & (array >= 0)))
        raise ValueError(f"{name} must be finite numbers from 0 on, got {array[key]} for record {key}.{remedy}")
    return array


def counted_crc(array: NDArray[np.int64]) -> str:
    """Returns the length of an array and the checksum of its numbers, on any machine, for a fingerprint."""
    return f"{len(array)}#{zlib.crc32(np.ascontiguousarray(array, dtype='<i8').data):08x}"
