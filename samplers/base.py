"""Protocols of samplers, and the adapter that gives custom samplers the vectorised interface.

A sampler is a pure function of the position: it returns the same result for the same position in every process and
after a restart. A custom sampler needs only `sampler[position]`. `vectorised` adapts any sampler to blocks of
positions.
"""

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol, Self, TypeGuard, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import is_listed, is_scalar
from millstream.core.randomness import as_seed, generator
from millstream.core.segments import Segments
from millstream.core.signals import is_from_signal_handler
from millstream.record import RecordMetadata

POSITION_LIMIT = 1 << 63
"""Positions and record keys are below this: each is an int64."""


@runtime_checkable
class Sampler(Protocol):
    """An order of records: a record key for each position.

    Three more members are optional, and used if they are there:

    `__len__() -> int`
        The number of positions. Without it, or if it raises TypeError, the order is endless: the loader never looks
        for its end, and an IndexError from such a sampler is an error, not the end.
    `largest_key: int`
        No record key is larger. A loader whose source has fewer records refuses the sampler when it is built, instead
        of failing when the first such key comes. Without it, `num_records - 1` if it has `num_records`.
    `fingerprint() -> str`
        A line of words that identifies the order: its class and everything that determines the record keys and the
        randomness, the same words in every process. It goes into checkpoints: a state is refused by another order,
        and the error shows what differs; words of the form `name=value` are compared one by one. Leave out how many
        epochs there are and which shard is read, so that a state can be resumed with more epochs, and on other hosts.
        Without it, the loader describes the sampler's class, code and attributes, and so refuses a state for an
        attribute that makes no difference.

    Examples:
        >>> class Backwards:
        ...     def __len__(self):
        ...         return 4
        ...
        ...     def __getitem__(self, position):
        ...         return millstream.RecordMetadata(index=position, record_key=3 - position, rng=None)
        >>> list(millstream.DataLoader(data_source=["a", "b", "c", "d"], sampler=Backwards()))
        ['d', 'c', 'b', 'a']
    """

    def __getitem__(self, position: int, /) -> RecordMetadata:
        """Returns the record key at a position, and the position's own generator or None."""
        ...


class VectorisedSampler(Sampler, Protocol):
    """A sampler that computes many positions in one call, which is many times faster.

    If `seed` is a number, random operations draw from generators that are derived from it and from the position:
    those of `IndexSampler`. The `rng` of its `__getitem__` is then not read. If `seed` is None, they draw from that
    `rng`.

    Examples:
        >>> sampler = millstream.IndexSampler(1_000_000, shuffle=True, seed=0)
        >>> sampler.record_keys(0, 4)
        array([556332, 514484,  47296, 258409])
        >>> sampler.record_keys_at(np.array([3, 0]))
        array([258409, 556332])
    """

    @property
    def seed(self) -> int | None:
        """The seed of the randomness of every position; None if there is none, or if `rng` provides it."""
        ...

    @property
    def num_records(self) -> int | None:
        """The number of positions per epoch; None if the order has no epochs."""
        ...

    @property
    def length(self) -> int | None:
        """The number of positions; None if the order is endless."""
        ...

    def record_keys(self, start: int, stop: int, /) -> NDArray[np.int64]:
        """Returns the record keys of the positions [start, stop), shape (stop - start,).

        Args:
            start: the first position, from 0 on.
            stop: the position after the last one.
        """
        ...

    def record_keys_at(self, positions: NDArray[np.int64], /) -> NDArray[np.int64]:
        """Returns the record keys of any positions, shape (m,), in their order.

        Args:
            positions: any positions, from 0 on, shape (m,), in any order; they may repeat. The array is read-only.
        """
        ...


_KEYS_REMEDY = (
    "Write IndexSampler(len(source), shuffle=True, seed=0) for a shuffle, or IndexSampler(len(keys), keys=keys), with "
    "{}, for keys in this order; they may repeat."
)

_VECTORISED_MEMBERS = ("seed", "num_records", "length", "record_keys", "record_keys_at")


def largest_key(sampler: object) -> int | None:
    """Returns a key that no record key of the sampler exceeds, or None if the sampler does not know one."""
    largest = getattr(sampler, "largest_key", None)
    if largest is not None:
        return operator.index(largest)
    num_records = getattr(sampler, "num_records", None)
    return None if num_records is None else operator.index(num_records) - 1


def checked_keys_at(sampler: "VectorisedSampler | AdaptedSampler", positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the record keys of any positions, shape (m,), checked: a new array, whatever the sampler keeps."""
    return _checked(sampler.record_keys_at(positions), positions, f"{_name(sampler)}.record_keys_at(positions)")


def has_unread_generators(sampler: "VectorisedSampler | AdaptedSampler") -> bool:
    """True if the generators of the sampler's `__getitem__` are ignored, because it has a seed, which yields others."""
    own = sampler.sampler if isinstance(sampler, AdaptedSampler) else sampler
    if sampler.seed is None or not hasattr(own, "__getitem__"):
        return False
    try:
        rng = own[0].rng
    except Exception as error:
        if is_from_signal_handler(error):
            raise
        # Reading position 0 will say what is wrong with it.
        return False
    # Compared by their states: to draw from the user's generator would change it.
    return rng is not None and repr(rng.bit_generator.state) != repr(generator(sampler.seed, 0, 0).bit_generator.state)


def vectorised(sampler: object) -> "VectorisedSampler | AdaptedSampler":
    """Returns the sampler itself if it has `record_keys_at`, else an adapter that calls it run by run or one by one."""
    if hasattr(sampler, "record_keys_at"):
        missing = [member for member in _VECTORISED_MEMBERS if not hasattr(sampler, member)]
        if missing:
            raise TypeError(
                f"A sampler with record_keys_at must also have {', '.join(_VECTORISED_MEMBERS[:-1])}; "
                f"{type(sampler).__name__} lacks {', '.join(missing)}."
            )
        ready: Any = sampler
    elif not hasattr(sampler, "record_keys") and (not hasattr(sampler, "__getitem__") or is_scalar(sampler)):
        keys = f" {_KEYS_REMEDY.format('keys = list(sampler)')}" if is_listed(sampler) else ""
        raise TypeError(
            f"A sampler must have __getitem__(position) -> RecordMetadata, or record_keys(start, stop); "
            f"got {type(sampler).__name__}, which has neither.{keys}"
        )
    elif isinstance(sampler, list | tuple | range | np.ndarray) and not hasattr(
        next(iter(sampler), None), "record_key"
    ):
        raise TypeError(
            f"A sampler must return RecordMetadata, got {type(sampler).__name__}. {_KEYS_REMEDY.format('the keys')}"
        )
    else:
        ready = AdaptedSampler(sampler)
    if ready.seed is not None:
        as_seed(ready.seed, f"The seed of {type(sampler).__name__}")
    return cast("VectorisedSampler | AdaptedSampler", ready)


@dataclasses.dataclass(frozen=True)
class AdaptedSampler:
    """A custom sampler with the interface of `VectorisedSampler`. Its results are checked.

    Its `metadata.index` is not read. One with `record_keys(start, stop)` is called once for each run of consecutive
    positions; it may have `seed` and `num_records`. One with `__getitem__` only is called for every position; the
    metadata's `rng` is its randomness, so its `seed` is not read. With both, its randomness is `seed` if it has one.
    """

    sampler: Any

    @property
    def seed(self) -> int | None:
        return getattr(self.sampler, "seed", None) if self._answers_runs else None

    @property
    def num_records(self) -> int | None:
        return getattr(self.sampler, "num_records", None)

    @property
    def length(self) -> int | None:
        """The sampler's `length` if it has one, else its `len()`; None, for endless, if it has neither."""
        if hasattr(self.sampler, "length"):
            length = self.sampler.length
            return None if length is None else operator.index(length)
        try:
            return len(self.sampler)
        except TypeError:
            return None

    def __getitem__(self, position: int) -> RecordMetadata:
        """Returns the position's metadata; of a sampler without `__getitem__`, with no generator."""
        check_range(position, position + 1, self.length)
        record_key = int(self._keys_of_run(position, position + 1)[0])
        return RecordMetadata(position, record_key, *self.rngs_at([position]))

    def record_keys(self, start: int, stop: int) -> NDArray[np.int64]:
        check_range(start, stop, self.length)
        return self._keys_of_run(start, stop)

    def record_keys_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        positions = checked_positions(positions, self.length)
        if not positions.size:
            return positions
        runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
        return np.concatenate([self._keys_of_run(int(run[0]), int(run[-1]) + 1) for run in runs])

    def rngs_at(self, positions: Iterable[int]) -> "list[np.random.Generator | None]":
        """Returns the generator that the sampler gives each position, or None if it gives none."""
        if not hasattr(self.sampler, "__getitem__"):
            return [None for _ in positions]
        return [self._metadata(int(position)).rng for position in positions]

    @property
    def _answers_runs(self) -> bool:
        return hasattr(self.sampler, "record_keys")

    def _keys_of_run(self, start: int, stop: int) -> NDArray[np.int64]:
        if self._answers_runs:
            asked = f"{_name(self)}.record_keys({start}, {stop})"
            return _checked(self.sampler.record_keys(start, stop), np.arange(stop - start) + start, asked)
        keys = (_checked_key(self._metadata(position), position) for position in range(start, stop))
        return np.fromiter(keys, dtype=np.int64, count=stop - start)

    def _metadata(self, position: int) -> RecordMetadata:
        """Returns the sampler's metadata at a position; a note of its errors names the position."""
        try:
            metadata: RecordMetadata = self.sampler[position]
        except Exception as error:
            error.add_note(f"The sampler {type(self.sampler).__name__} raised this at position {position}.")
            raise
        return metadata


def checked_positions(positions: Any, length: int | None) -> NDArray[np.int64]:
    """Returns positions in an order of this length as an int64 array; an error for any others."""
    array = np.asarray(positions)
    if not array.size:
        return np.empty(0, dtype=np.int64)
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise TypeError(f"positions must be integers of shape (m,), got dtype {array.dtype}, shape {array.shape}.")
    check_range(int(array.min()), int(array.max()) + 1, length)
    return array.astype(np.int64, copy=False)


def position_limit(length: int | None) -> int:
    """Returns the number of positions that can be requested in an order of this length; None for endless."""
    return POSITION_LIMIT if length is None else min(length, POSITION_LIMIT)


def check_range(start: int, stop: int, length: int | None) -> None:
    """Raises IndexError unless the positions [start, stop) are in an order of this length."""
    limit = position_limit(length)
    if not 0 <= start <= stop <= limit:
        asked = f"position {start}" if stop == start + 1 else f"positions {start} to {stop} (exclusive)"
        whole = f"0 to {limit} (exclusive)" + (", an endless order" if length is None else "")
        raise IndexError(f"Asked for {asked}; the sampler has the positions {whole}.")


def _checked_key(metadata: Any, position: int) -> int:
    try:
        key = operator.index(metadata.record_key)
    except (AttributeError, TypeError):
        raise TypeError(
            f"A sampler must return RecordMetadata with an integer record_key; at position {position} it returned "
            f"{metadata!r}. {_KEYS_REMEDY.format('the keys')}"
        ) from None
    if not 0 <= key < POSITION_LIMIT:
        raise ValueError(f"A record_key must be between 0 and 2**63 - 1; at position {position} it is {key}.")
    return key


def _checked(keys: object, positions: NDArray[np.int64], asked: str) -> NDArray[np.int64]:
    array = np.asarray(keys)
    if array.shape != positions.shape or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(
            f"{asked} must return integers of shape {positions.shape}, one for each position, "
            f"got dtype {array.dtype}, shape {array.shape}{_extent(positions)}."
        )
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < POSITION_LIMIT:
        wrong = int(np.flatnonzero((array < 0) | (array >= POSITION_LIMIT))[0])
        raise ValueError(
            f"{asked} must return keys between 0 and 2**63 - 1, got {array[wrong]} at position {positions[wrong]}."
        )
    return np.array(array, dtype=np.int64)


def _extent(positions: NDArray[np.int64]) -> str:
    return f" for the positions {positions.min()} to {positions.max()}" if positions.size else ""


def _name(sampler: object) -> str:
    return type(sampler.sampler if isinstance(sampler, AdaptedSampler) else sampler).__name__


# ---------------------------------------------------------------------------------------------------------------------


class Located(NamedTuple):
    """The elements at positions of a mixture; int64 arrays of shape (m,).

    Attributes:
        components: the number of the component.
        indices: the position in that component's own order; in the innermost one if a component is itself a mixture.
        record_keys: the keys in the concatenated sources.
    """

    components: NDArray[np.int64]
    indices: NDArray[np.int64]
    record_keys: NDArray[np.int64]


class MixedSampler(VectorisedSampler, Protocol):
    """A sampler whose positions are dealt to components, each with a sampler of its own.

    Its `seed` and `num_records` are None. Random operations draw from the generators of a component's own sampler, at
    the position in that sampler's order.
    """

    @property
    def names(self) -> tuple[Any, ...]: ...

    @property
    def samplers(self) -> tuple[VectorisedSampler | AdaptedSampler, ...]: ...

    @property
    def source_lengths(self) -> tuple[int, ...]: ...

    @property
    def rows_seed(self) -> int | None: ...

    def shuffled_within(self, global_batch_size: int, seed: int) -> Self: ...

    def drawn_before(self, position: int, /) -> tuple[int, ...]: ...

    def locate(self, positions: NDArray[np.int64], /) -> tuple[NDArray[np.int64], NDArray[np.int64]]: ...

    def located(self, positions: NDArray[np.int64], /) -> Located: ...


class PackedSampler(VectorisedSampler, Protocol):
    """A sampler whose positions are rows made of several documents, for a `Pack`."""

    @property
    def row_length(self) -> int: ...

    @property
    def num_source_records(self) -> int: ...

    def lengths_at(self, record_keys: NDArray[np.int64], /) -> NDArray[np.int64]: ...

    def segments_at(self, positions: NDArray[np.int64], /) -> Segments:
        """Returns the rows at any positions, in their order: segments of documents, which are given by record key."""
        ...


class MixedPackedSampler(MixedSampler, PackedSampler, Protocol):
    """A mixture of rows: each has documents of one component."""

    def located_segments(
        self, positions: NDArray[np.int64], /
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], Segments]: ...


class VaryingBatches(VectorisedSampler, Protocol):
    """A sampler whose global batches differ in size: `are_used` finds the positions of a step that its batch has."""

    @property
    def batch_sizes(self) -> tuple[int, ...]: ...

    def are_used(self, positions: NDArray[np.int64], /) -> NDArray[np.bool_]: ...


def has_varying_batches(sampler: object) -> TypeGuard[VaryingBatches]:
    return getattr(sampler, "batch_sizes", None) is not None and hasattr(sampler, "are_used")


def is_packed(sampler: object) -> TypeGuard[PackedSampler]:
    return getattr(sampler, "row_length", None) is not None and hasattr(sampler, "segments_at")


def is_mixed(sampler: object) -> TypeGuard[MixedSampler]:
    return hasattr(sampler, "located") and bool(getattr(sampler, "names", ()))


def is_mixed_and_packed(sampler: object) -> TypeGuard[MixedPackedSampler]:
    return is_mixed(sampler) and is_packed(sampler)
