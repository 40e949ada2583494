"""The samplers of millstream: all records of a source, in order or globally shuffled, for any number of epochs."""

import dataclasses
import functools
import operator
import zlib
from collections.abc import Sequence
from typing import Any, TypeAlias, TypeGuard, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_flag, as_integer, as_integer_or_none, as_options, named_fields
from millstream.core.randomness import generator
from millstream.record import RecordMetadata
from millstream.samplers.base import POSITION_LIMIT, check_range
from millstream.samplers.order import EpochSampler, Occurrences, checked_seed, counted_crc, integers
from millstream.samplers.permutation import permute, permute_one
from millstream.sharding import NoSharding, ShardOptions

_INVERTED_TOGETHER = 1 << 14
"""The number of occurrences whose positions are computed together."""

RecordKeys: TypeAlias = NDArray[np.integer[Any]] | Sequence[int]


@named_fields
@dataclasses.dataclass(frozen=True)
class IndexSampler(EpochSampler):
    """Every record once per epoch, in the source's order or in a new, truly global shuffle each epoch.

    Positions run over all epochs: epoch, offset = divmod(position, num_records). The record key at a position is its
    offset, or the image of the offset under the epoch's permutation. Nothing is stored, and any position costs the same
    to find, so that samplers over 10 and over 10**12 records are alike.

    With `keys`, the epoch consists of these records and no others: the shuffle then permutes the rows of `keys`.

    The positions are those of the global order: the loader deals them out by shard_options.

    Attributes:
        num_records: the number of records per epoch, 0 … 2**63; without any, the order is empty.
        shard_options: the shard of every global batch that this process reads.
        shuffle: True to shuffle each epoch. It needs a seed.
        num_epochs: the number of epochs, at least 1; None for an endless order.
        seed: 0 … 2**64 - 1, selects the shuffles and all randomness of the pipeline; None for a pipeline without any.
        keys: the keys of the records that take part, integers from 0 on, num_records of them, for instance the result
            of `millstream.surviving_keys`; None for 0 … num_records - 1. A key that occurs twice is read twice
            in each epoch. Kept as an int64 array of shape (num_records,), and not copied if it is one already, also in
            a file (`np.load(path, mmap_mode="r")`): do not change it.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range, a shuffle has no seed, or there are
            more or fewer keys than num_records.

    Examples:
        >>> sampler = millstream.IndexSampler(5, shuffle=True, seed=0)
        >>> [sampler[position].record_key for position in range(10)]  # two epochs
        [2, 4, 1, 3, 0, 0, 4, 2, 3, 1]
        >>> loader = millstream.DataLoader(data_source=range(5), sampler=sampler, operations=[millstream.Batch(5)])
        >>> next(iter(loader))
        array([2, 4, 1, 3, 0])
    """

    num_records: int
    shard_options: ShardOptions = dataclasses.field(default_factory=NoSharding)
    shuffle: bool = False
    num_epochs: int | None = None
    seed: int | None = None
    keys: RecordKeys | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_records", as_integer(self.num_records, "num_records"))
        if not 0 <= self.num_records <= POSITION_LIMIT:
            raise ValueError(f"num_records must be between 0 and 2**63, got {self.num_records}.")
        object.__setattr__(self, "shard_options", as_options(self.shard_options, "shard_options", ShardOptions))
        object.__setattr__(self, "shuffle", as_flag(self.shuffle, "shuffle"))
        object.__setattr__(self, "num_epochs", as_integer_or_none(self.num_epochs, "num_epochs"))
        object.__setattr__(self, "seed", checked_seed(self.seed, shuffle=self.shuffle))
        if self.keys is not None:
            object.__setattr__(self, "keys", _valid_keys(self.keys, self.num_records))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, IndexSampler) or type(other) is not type(self):
            return NotImplemented
        if self._numbers != other._numbers or self.keys is None or other.keys is None:
            return self._numbers == other._numbers and self.keys is other.keys
        return np.array_equal(self.keys, other.keys)

    def __hash__(self) -> int:
        # Arrays have no hash. Samplers that are equal have equal hashes without it.
        return hash(self._numbers)

    @property
    def _numbers(self) -> tuple[Any, ...]:
        return self.num_records, self.shard_options, self.shuffle, self.num_epochs, self.seed

    @functools.cached_property
    def largest_key(self) -> int:
        """The largest of all record keys."""
        return self.num_records - 1 if self.keys is None else int(np.max(self.keys, initial=-1))

    @property
    def _shuffle_seed(self) -> int | None:
        return self.seed if self.shuffle else None

    def fingerprint(self) -> str:
        """Returns the class and everything that determines the order, in words; not num_epochs, and not the shard.

        Of `keys`, there is a CRC over all of them, which takes some seconds for a billion. A subclass has its own name,
        and its other attributes come after, arrays as CRCs. One whose order depends on something else without a plain
        `repr` overrides this.
        """
        kind = IndexSampler if type(self) is SequentialSampler else type(self)
        fields = [kind.__qualname__, *(f"{name}={getattr(self, name)}" for name in ("num_records", "shuffle", "seed"))]
        if self.keys is not None:
            fields.append(f"keys={counted_crc(np.asarray(self.keys))}")
        known = {field.name for field in dataclasses.fields(IndexSampler)} | {"largest_key"}
        fields += [f"{name}={_text_of(value)}" for name, value in sorted(vars(self).items()) if name not in known]
        return " ".join(fields)

    def __getitem__(self, position: int) -> RecordMetadata:
        position = operator.index(position)
        check_range(position, position + 1, self.length)
        epoch, row = divmod(position, self.num_records)
        if (seed := self._shuffle_seed) is not None:
            row = permute_one(row, self.num_records, seed, epoch)
        record_key = row if self.keys is None else int(self.keys[row])
        rng = None if self.seed is None else generator(self.seed, epoch, position, operation=0)
        return RecordMetadata(position, record_key, rng)

    def occurrences(self, keys: NDArray[np.int64], stop: int) -> Occurrences:
        """Returns the occurrences of keys before a position: many epochs in one call, if there are few keys."""
        if 4 * len(keys) > _INVERTED_TOGETHER:
            return super().occurrences(keys, stop)
        rows, elements = self._elements_of(keys)
        num_epochs = -(-stop // self.num_records) if len(rows) else 0
        together = max(1, _INVERTED_TOGETHER // max(1, len(rows)))
        found = []
        for first in range(0, num_epochs, together):
            count = min(together, num_epochs - first)
            epochs = np.repeat(np.arange(count) + first, len(rows))
            owners, offsets = self._offsets_of(np.tile(elements, count), epochs.view(np.uint64))
            # Without signs, because a single epoch may have 2**63 records.
            begins = (epochs.view(np.uint64) * np.uint64(self.num_records)).view(np.int64)
            # The last position is less than 2**63, the one after it may not be.
            is_before = offsets <= stop - 1 - begins
            positions = offsets[is_before] + begins[is_before]
            found.append(Occurrences(np.tile(rows, count)[owners][is_before], positions))
        return Occurrences.concatenate(found)

    def _offsets_of(
        self, elements: NDArray[np.int64], epoch: int | NDArray[np.uint64]
    ) -> tuple[slice, NDArray[np.int64]]:
        if (seed := self._shuffle_seed) is not None:
            return slice(None), permute(elements, self.num_records, seed, epoch, inverse=True)
        return slice(None), elements

    def _record_keys(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        if not positions.size:
            return np.empty(0, dtype=np.int64)
        epoch = int(positions.min()) // self.num_records
        if int(positions.max()) // self.num_records == epoch:
            return self._keys_of_epoch(positions - epoch * self.num_records, epoch)
        epochs = positions // self.num_records
        return self._keys_of_epoch(positions - epochs * self.num_records, epochs.view(np.uint64))

    def _keys_of_epoch(self, offsets: NDArray[np.int64], epoch: int | NDArray[np.uint64]) -> NDArray[np.int64]:
        seed = self._shuffle_seed
        rows = offsets if seed is None else permute(offsets, self.num_records, seed, epoch)
        return rows if self.keys is None else np.asarray(self.keys, np.int64)[rows]


@final
@named_fields
@dataclasses.dataclass(frozen=True, eq=False)
class SequentialSampler(IndexSampler):
    """Every record exactly once, in the source's order: an `IndexSampler` of one epoch that is not shuffled.

    It is built without `shuffle`, which is False, and `num_epochs`, which is 1.

    Attributes:
        num_records: the number of records, 1 … 2**63.
        shard_options: the shard of every global batch that this process reads.
        seed: 0 … 2**64 - 1, selects all randomness of the pipeline; None for a pipeline without any.
        keys: the keys of the records that take part, in their order, an int64 array of shape (num_records,), as in
            `IndexSampler`; None for 0 … num_records - 1.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range, or there are more or fewer keys than
            num_records.

    Examples:
        >>> sampler = millstream.SequentialSampler(3)
        >>> loader = millstream.DataLoader(data_source=["a", "b", "c"], sampler=sampler)
        >>> list(loader)
        ['a', 'b', 'c']
    """

    shuffle: bool = dataclasses.field(default=False, init=False)
    num_epochs: int | None = dataclasses.field(default=1, init=False)


def _text_of(value: object) -> str:
    """Returns the `repr` of an attribute; of an array, which it would abbreviate, the dtype, the shape and a CRC."""
    if not isinstance(value, np.ndarray) or value.dtype.hasobject:
        return repr(value)
    return f"{value.dtype}{value.shape}#{zlib.crc32(np.ascontiguousarray(value).data.cast('B')):08x}"


def _valid_keys(keys: RecordKeys, num_records: int) -> NDArray[np.int64]:
    array = integers(keys, "keys")
    if len(array) != num_records:
        raise ValueError(
            f"keys must hold one record key for each of the num_records={num_records} records, got {len(array)}: write "
            "IndexSampler(len(keys), keys=keys)."
        )
    return array


def can_join(sampler: object) -> TypeGuard[IndexSampler]:
    """True if the keys of a component are those of an `IndexSampler` without keys of its own."""
    # A subclass may define other keys.
    if type(sampler) not in {IndexSampler, SequentialSampler}:
        return False
    return isinstance(sampler, IndexSampler) and sampler.keys is None
