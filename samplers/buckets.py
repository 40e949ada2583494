"""An order whose global batches have records of one class of lengths, so that all hosts have one shape at each step."""

import zlib
from collections.abc import Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_boundaries, as_flag, as_integer, is_listed, named_arguments
from millstream.core.randomness import Purpose, derive_seed, derive_seeds
from millstream.samplers.base import checked_positions
from millstream.samplers.order import EpochSampler, KeyGroups, equal_to, whole_numbers
from millstream.samplers.permutation import permute
from millstream.sharding import ShardOptions


@final
class BucketSampler(EpochSampler):
    """Global batches of records of similar length: each has records of one class, and so one shape on all hosts.

    A record belongs to the first class whose boundary is at least its length. With `PadTo(boundaries)`, a compiled step
    sees one shape per class, with little padding. The classes come in a random order in proportion to their records. In
    each epoch, the records of a class are shuffled, and so are the global batches. The global batch is that of the
    loader, over all shards, so any number of hosts has the same one.

    With a size per class, each step has about as many tokens: small batches of long records. A step then has as many
    *positions* as the largest size. Those that `are_used` have the records of its batch, spread evenly so that each
    host has its share. The others repeat the record before them, and are not read.

    It takes 8 bytes for each record. The pipeline must be 1:1.

    Args:
        lengths: the length of each record, by record key: integers from 0 on, shape (n,), such as those of
            `millstream.lengths_of`.
        boundaries: the largest length of each class: integers from 1 on, ascending.
        global_batch_size: the number of records per step, over all shards; or a sequence with the number of each class,
            all multiples of the number of shards. The Batch of the loader, exactly one, has the share of the largest.
        seed: 0 … 2**64 - 1, selects the shuffles and all randomness of the pipeline; None for a pipeline without any.
        shuffle: True for a new order of records and global batches in each epoch. It needs a seed. Without it, the
            classes come one after another, each in the order of the source.
        num_epochs: the number of epochs, at least 1; None for an endless order.
        drop_remainder: True to leave out the records of a class that do not fill a global batch, other ones in each
            epoch of a shuffle. False to fill the last global batch of each class with records of the class that come
            a second time.
        shard_options: the shard of every global batch that this process reads; None for all of it.

    Attributes:
        boundaries: a tuple of integers.
        num_records: the number of positions per epoch, a multiple of the largest global_batch_size.
        num_source_records: the number of lengths, and so of the records of the source.
        global_batch_size: as given, a sequence as a tuple.
        seed, shuffle, num_epochs, drop_remainder, shard_options: as given.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; a record is longer than the last
            boundary; no class fills a global batch; a shuffle has no seed.

    Examples:
        >>> lengths = np.array([3, 9, 4, 2, 8, 1, 7, 3])
        >>> sampler = millstream.BucketSampler(lengths, [4, 10], global_batch_size=2, seed=0, shuffle=True)
        >>> lengths[sampler.record_keys(0, 6)].reshape(3, 2)
        array([[3, 2],
               [8, 9],
               [1, 3]])
    """

    @named_arguments()
    def __init__(
        self,
        lengths: Any,
        boundaries: Sequence[int],
        *,
        global_batch_size: int | Sequence[int],
        seed: int | None = None,
        shuffle: bool = False,
        num_epochs: int | None = None,
        drop_remainder: bool = True,
        shard_options: ShardOptions | None = None,
    ) -> None:
        self.shuffle = as_flag(shuffle, "shuffle")
        super().__init__(num_epochs, seed, shard_options, shuffle=self.shuffle)
        self.boundaries = as_boundaries(boundaries)
        sizes = _checked_sizes(global_batch_size, len(self.boundaries))
        self.global_batch_size = sizes[0] if len(sizes) == 1 else sizes
        self._batch_sizes = np.broadcast_to(np.array(sizes, np.int64), len(self.boundaries))
        self._max_size = max(sizes)
        self.drop_remainder = as_flag(drop_remainder, "drop_remainder")
        classes = np.searchsorted(self.boundaries, whole_numbers(lengths, "lengths"))
        self.num_source_records = len(classes)
        _refuse_long_records(lengths, classes, self.boundaries)
        self._keys = np.argsort(classes.astype(np.min_scalar_type(len(self.boundaries))), kind="stable")
        self._sizes = np.bincount(classes, minlength=len(self.boundaries))
        size = self._batch_sizes
        self._batches = self._sizes // size if self.drop_remainder else -(-self._sizes // size)
        self.num_records = int(self._batches.sum()) * self._max_size
        if not self.num_records:
            counts = ", ".join(
                f"{count} of at most {boundary}"
                for boundary, count in zip(self.boundaries, self._sizes.tolist(), strict=True)
            )
            raise ValueError(
                f"global_batch_size must be at most the number of records of a class, got {self.global_batch_size} for "
                f"classes of {counts}. Use a smaller one, fewer boundaries, or drop_remainder=False."
            )

    def __repr__(self) -> str:
        return (
            f"BucketSampler({self.num_source_records:,} records, boundaries={list(self.boundaries)}, "
            f"global_batch_size={self.global_batch_size}, shuffle={self.shuffle}, seed={self.seed}, "
            f"num_epochs={self.num_epochs})"
        )

    def _card_bars(self) -> Sequence[tuple[str, Sequence[tuple[str, float]]]]:
        sizes = zip(self.boundaries, self._batches.tolist(), strict=True)
        return [("global batches", [(f"length ≤ {boundary}", batches) for boundary, batches in sizes])]

    @property
    def largest_key(self) -> int:
        """No record key is larger."""
        return self.num_source_records - 1

    def fingerprint(self) -> str:
        """Returns the class and everything that determines the order, in words; of the classes of records, a CRC."""
        crc = zlib.crc32(self._sizes.astype("<i8").data, zlib.crc32(self._keys.astype("<i8", copy=False).data))
        names = ("boundaries", "global_batch_size", "shuffle", "seed", "drop_remainder")
        named = " ".join(f"{name}={getattr(self, name)}".replace(", ", ",") for name in names)
        return f"BucketSampler records={self.num_source_records}#{crc:08x} {named}"

    @property
    def given_batch(self) -> tuple[str, int]:
        return "global_batch_size", self._max_size

    @property
    def batch_sizes(self) -> tuple[int, ...] | None:
        """The size of the global batch for each class; None if all classes have the same one."""
        return None if isinstance(self.global_batch_size, int) else self.global_batch_size

    def are_used(self, positions: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns True for each position that has a record of its batch, shape (m,); all if classes have one size.

        Args:
            positions: any positions, from 0 on, shape (m,).
        """
        if self.batch_sizes is None:
            return np.ones(len(positions), np.bool_)
        is_used = np.empty(len(positions), np.bool_)
        for epoch, rows, offsets in self._by_epoch(checked_positions(positions, self.length)):
            batches, within = np.divmod(offsets, self._max_size)
            sizes = self._batch_sizes[self._classes_of(batches, epoch)[0]]
            is_used[rows] = within * sizes // self._max_size != (within - 1) * sizes // self._max_size
        return is_used

    def key_cycles(self) -> KeyGroups:
        """Returns the keys of each class: a record of another one would have another shape."""
        # Those of a class are ascending.
        return KeyGroups([keys for keys in np.split(self._keys, np.cumsum(self._sizes)[:-1]) if len(keys)])

    def _keys_of_epoch(self, offsets: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        batches, rows = np.divmod(offsets, self._max_size)
        classes, numbers = self._classes_of(batches, epoch)
        sizes = self._batch_sizes[classes]
        within = numbers * sizes + rows * sizes // self._max_size
        records = within % self._sizes[classes]
        keys: NDArray[np.int64] = self._keys[self._within_classes(records, classes, epoch) + self._begins[classes]]
        return keys

    def _classes_of(self, batches: NDArray[np.int64], epoch: int) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
        """Returns the classes of global batches of an epoch, and their numbers within the class."""
        batches = self._permuted(batches, epoch)
        ends = np.cumsum(self._batches)
        classes = np.searchsorted(ends, batches, side="right")
        return classes, batches - (ends - self._batches)[classes]

    def _permuted(self, batches: NDArray[np.int64], epoch: int, *, inverse: bool = False) -> NDArray[np.int64]:
        """Returns the global batches in the order of an epoch, or the inverse."""
        if not self.shuffle or self.seed is None:
            return batches
        seed = derive_seed(self.seed, Purpose.BUCKET_BATCHES)
        return permute(batches, int(self._batches.sum()), seed, epoch, inverse=inverse)

    def _elements_of(self, keys: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        return equal_to(self._keys, keys)

    def _offsets_of(self, elements: NDArray[np.int64], epoch: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        classes = np.searchsorted(np.cumsum(self._sizes), elements, side="right")
        within = self._within_classes(elements - self._begins[classes], classes, epoch, inverse=True)
        owners = np.arange(len(elements))
        found = []
        # A class that is filled up begins again, several times if it is small.
        while len(within):
            is_in = within < (self._batches * self._batch_sizes)[classes]
            within, classes, owners = within[is_in], classes[is_in], owners[is_in]
            sizes = self._batch_sizes[classes]
            batches, rows = np.divmod(within, sizes)
            batches = batches + (np.cumsum(self._batches) - self._batches)[classes]
            batches = self._permuted(batches, epoch, inverse=True)
            # The first of the positions that have the record.
            found.append((owners, batches * self._max_size + -(-rows * self._max_size // sizes)))
            within = within + self._sizes[classes]
        if not found:
            return owners, owners
        owners, offsets = (np.concatenate(columns) for columns in zip(*found, strict=True))
        return owners, offsets

    @property
    def _begins(self) -> NDArray[np.int64]:
        begins: NDArray[np.int64] = np.cumsum(self._sizes) - self._sizes
        return begins

    def _within_classes(
        self, records: NDArray[np.int64], classes: NDArray[np.intp], epoch: int, *, inverse: bool = False
    ) -> NDArray[np.int64]:
        """Returns the records of classes, by number within the class, in the order of an epoch; or the inverse."""
        if not self.shuffle or self.seed is None:
            return records
        numbers = np.arange(len(self._sizes)).view(np.uint64)
        seeds = derive_seeds(np.array([self.seed], np.uint64), Purpose.BUCKET_RECORDS, numbers)
        return permute(
            records, self._sizes[classes], seeds[classes], np.full(len(records), epoch, np.uint64), inverse=inverse
        )


def _checked_sizes(given: Any, num_classes: int) -> tuple[int, ...]:
    is_sequence = isinstance(given, Sequence | np.ndarray) and is_listed(given)
    values = list(given) if is_sequence else [given]
    if is_sequence and len(values) != num_classes:
        raise ValueError(
            f"global_batch_size must have one number for each of the {num_classes} boundaries, got {len(values)}."
        )
    sizes = tuple(as_integer(size, "global_batch_size", minimum=1, maximum=1 << 31) for size in values)
    return sizes[:1] if len(set(sizes)) == 1 else sizes


def _refuse_long_records(lengths: Any, classes: NDArray[np.intp], boundaries: Sequence[int]) -> None:
    is_long = classes == len(boundaries)
    if is_long.any():
        key = int(np.argmax(is_long))
        raise ValueError(
            f"lengths must be at most {boundaries[-1]}, the last boundary, got {np.asarray(lengths)[key]} for record "
            f"{key} (longer records: {int(is_long.sum())}). Add a longer boundary, or leave these records out of the "
            "source: MapDataset.source(source).slice(np.flatnonzero(lengths <= boundary))."
        )
