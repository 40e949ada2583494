"""A shuffle for sources that are read in units: the units are shuffled, and the records within a few of them.

An epoch's units are permuted, and the permuted units are cut into windows of a few units each. Within a window, the
records of all its units are permuted. So a reader holds only the units of one window, and reads each unit once per
epoch and process, while a record can be followed by any other of the window. Both permutations are
those of `permutation`: any position is computed alone.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer, named_arguments
from millstream.core.randomness import Purpose, derive_seed
from millstream.samplers.order import EpochSampler, by_number, counted_crc, integers, whole_numbers
from millstream.samplers.permutation import permute
from millstream.sharding import ShardOptions

_EPOCHS_KEPT = 2


@final
class HierarchicalSampler(EpochSampler):
    """Every record once per epoch, in a shuffle that reads units of records, such as the row groups of Parquet files.

    The units come in a new order in each epoch, and the records of `window_units` units in a row are shuffled among
    each other. A source that keeps as many units in memory reads each of them about once an epoch and process. The
    larger the window, the nearer it is to the global shuffle of `IndexSampler`, which it is if the window holds all
    units.

    With `keys`, the epoch consists of these records and no others, such as those of a training set. Units without any
    have no place in a window.

    It takes memory for the units, some 40 bytes each, none for the records, but 8 bytes for each of `keys`; positions
    cost the same wherever they are.

    Args:
        unit_sizes: the number of records of each unit, in the source's order: integers from 0 on. The records of the
            first unit have the keys 0 … unit_sizes[0] - 1, and so on.
        window_units: the number of units that are shuffled together, at least 1.
        seed: 0 … 2**64 - 1, selects the shuffles and all randomness of the pipeline. It is required, because this order
            is always shuffled.
        num_epochs: the number of epochs, at least 1; None for an endless order.
        shard_options: the shard of every global batch that this process reads; None for all of it.
        keys: the keys of the records that take part, integers below the sum of unit_sizes, in any order; None for all.
            A key that occurs twice is read twice in each epoch.
        unit_numbers: the number of the unit that each of unit_sizes belongs to, if the records of a unit do not have
            consecutive keys, such as `chain.unit_numbers`; None if each is a unit of its own.

    Attributes:
        unit_sizes: the number of records of each unit that take part, an int64 array of shape (units,).
        window_units: as given.
        num_records: the number of records per epoch: the sum of unit_sizes.
        keys: the keys of the records, unit by unit, int64, shape (num_records,); None for 0 … num_records - 1.
        seed, num_epochs, shard_options: as given.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range, or there is no record; seed is None.

    Examples:
        >>> sampler = millstream.HierarchicalSampler([3, 3, 3, 3], window_units=2, seed=0)
        >>> [sampler[position].record_key for position in range(12)]
        [10, 5, 3, 11, 9, 4, 2, 0, 8, 6, 7, 1]
        >>> training = millstream.HierarchicalSampler([3, 3, 3, 3], window_units=2, seed=0, keys=[7, 1, 11, 5, 4, 2])
        >>> [training[position].record_key for position in range(6)]
        [11, 4, 5, 1, 2, 7]
    """

    seed: int

    @named_arguments()
    def __init__(
        self,
        unit_sizes: Any,
        *,
        window_units: int,
        seed: int,
        num_epochs: int | None = None,
        shard_options: ShardOptions | None = None,
        keys: Any = None,
        unit_numbers: Any = None,
    ) -> None:
        super().__init__(num_epochs, seed, shard_options, shuffle=True)
        self.unit_sizes = whole_numbers(unit_sizes, "unit_sizes")
        self.window_units = as_integer(window_units, "window_units", minimum=1)
        self.keys: NDArray[np.int64] | None = None
        if keys is not None or unit_numbers is not None:
            self.unit_sizes, self.keys = _grouped(self.unit_sizes, keys, unit_numbers)
        self.num_records = int(self.unit_sizes.sum())
        if not self.num_records:
            raise ValueError("unit_sizes must have at least one record, got nothing but zeros.")

    @property
    def largest_key(self) -> int:
        """The largest of all record keys."""
        return self.num_records - 1 if self.keys is None else int(self.keys.max())

    def __repr__(self) -> str:
        return (
            f"HierarchicalSampler({len(self.unit_sizes):,} units of {self.num_records:,} records, "
            f"window_units={self.window_units}, seed={self.seed}, num_epochs={self.num_epochs})"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_windows_of"}

    def fingerprint(self) -> str:
        """Returns the class and everything that determines the order, in words; of the sizes and keys, a CRC."""
        keys = "" if self.keys is None else f" keys={counted_crc(self.keys)}"
        return (
            f"HierarchicalSampler units={counted_crc(self.unit_sizes)} num_records={self.num_records} "
            f"window_units={self.window_units} seed={self.seed}{keys}"
        )

    def _keys_of_epoch(self, offsets: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        rows = self._windows_of(epoch).keys(offsets)
        return rows if self.keys is None else self.keys[rows]

    def _offsets_of(self, elements: NDArray[np.int64], epoch: int) -> tuple[slice, NDArray[np.int64]]:
        return slice(None), self._windows_of(epoch).offsets(elements)

    @functools.cached_property
    def _windows_of(self) -> Callable[[int], "Windows"]:
        return windows_by_epoch(self.unit_sizes, self.window_units, self.seed)


def _grouped(
    sizes: NDArray[np.int64], keys: Any, unit_numbers: Any
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Returns the sizes of the units that have keys, and the keys, unit by unit; None for all records."""
    ends = np.cumsum(sizes)
    numbers = np.arange(len(sizes)) if unit_numbers is None else integers(unit_numbers, "unit_numbers")
    if len(numbers) != len(sizes):
        raise ValueError(f"unit_numbers must have one number for each of {len(sizes)} unit_sizes, got {len(numbers)}.")
    if keys is None:
        if len(set(numbers.tolist())) == len(sizes):
            return sizes, None
        chosen = np.arange(ends[-1])
    else:
        chosen = integers(keys, "keys")
        if chosen.size and int(chosen.max()) >= ends[-1]:
            raise ValueError(f"keys must be below {ends[-1]}, the sum of unit_sizes, got {chosen.max()}.")
    groups = by_number(numbers[np.searchsorted(ends, chosen, side="right")])
    if not groups:
        raise ValueError("keys must have at least one key, got none.")
    grouped = np.concatenate([chosen[rows] for _, rows in groups])
    return np.array([len(chosen[rows]) for _, rows in groups], dtype=np.int64), grouped


class Windows(NamedTuple):
    """The windows of one epoch, and the units in them, in their new order.

    Attributes:
        source_ends: the record key after the last one of each unit, in the source's order.
        starts: the offset at which each window begins.
        ends: the offset at which it ends.
        unit_ends: the offset at which each unit ends.
        shifts: the difference of record keys and offsets in each unit.
        ranks: the number of each unit of the source in the new order.
        epoch: the number of the epoch.
        seed: selects the permutations within windows.
    """

    source_ends: NDArray[np.int64]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    unit_ends: NDArray[np.int64]
    shifts: NDArray[np.int64]
    ranks: NDArray[np.int64]
    epoch: int
    seed: int

    def keys(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        keys = self._within_windows(offsets)
        keys += self.shifts[np.searchsorted(self.unit_ends, keys, side="right")]
        return keys

    def offsets(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        units = np.searchsorted(self.source_ends, keys, side="right")
        return self._within_windows(keys - self.shifts[self.ranks[units]], inverse=True)

    def _within_windows(self, offsets: NDArray[np.int64], *, inverse: bool = False) -> NDArray[np.int64]:
        numbers = np.searchsorted(self.ends, offsets, side="right")
        starts = self.starts[numbers]
        sizes = self.ends[numbers] - starts
        # Numbers that no other window of any epoch has.
        epochs = np.uint64(self.epoch * len(self.ends) % 2**64) + numbers.astype(np.uint64)
        return starts + permute(offsets - starts, sizes, self.seed, epochs, inverse=inverse)


def windows_by_epoch(unit_sizes: NDArray[np.int64], window_units: int, seed: int) -> Callable[[int], Windows]:
    """Returns a function from the number of an epoch to its windows, which keeps those of the last epochs."""
    return functools.lru_cache(maxsize=_EPOCHS_KEPT)(functools.partial(_windows, unit_sizes, window_units, seed))


def _windows(unit_sizes: NDArray[np.int64], window_units: int, seed: int, epoch: int) -> Windows:
    order = permute(np.arange(len(unit_sizes)), len(unit_sizes), derive_seed(seed, Purpose.UNITS), epoch)
    sizes = unit_sizes[order]
    unit_ends = np.cumsum(sizes)
    ends = unit_ends[window_units - 1 :: window_units]
    if len(unit_sizes) % window_units:
        ends = np.append(ends, unit_ends[-1])
    starts = np.concatenate([[0], ends[:-1]])
    source_ends = np.cumsum(unit_sizes)
    shifts = source_ends[order] - unit_ends
    ranks = np.argsort(order)
    records_seed = derive_seed(seed, Purpose.UNIT_RECORDS)
    return Windows(source_ends, starts, ends, unit_ends, shifts, ranks, epoch, records_seed)
