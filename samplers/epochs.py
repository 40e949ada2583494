"""The base class of samplers with epochs: positions, ends, generators."""

import abc
import copy
import operator
from typing import Self

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer_or_none, as_options
from millstream.core.randomness import Purpose, as_seed, derive_seed, generator
from millstream.record import RecordMetadata
from millstream.samplers.base import POSITION_LIMIT
from millstream.samplers.order import Occurrences, Order, by_number
from millstream.sharding import NoSharding, ShardOptions


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

    def key_groups(self) -> list[NDArray[np.int64]] | None:
        """Returns groups of keys that can replace each other, each ascending; None if all keys can."""
        keys = getattr(self, "keys", None)
        return None if keys is None else [np.unique(np.asarray(keys, np.int64))]

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
        rows = np.flatnonzero((keys >= 0) & (keys < self.num_records))
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
