"""What the loader asks of a sampler, and how a sampler of the user's own comes to offer it.

A sampler is a pure function of the position: asked twice, in another process or after a restart, it gives the same
answer. `sampler[position]` is all that a custom sampler needs. `vectorised` makes any sampler answer for a whole block
of positions at once.
"""

import dataclasses
import operator
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from millstream.record import RecordMetadata

POSITION_LIMIT = 1 << 63
"""Positions and record keys are below this: each is an int64."""


@runtime_checkable
class Sampler(Protocol):
    """An order of records: which record stands at which position.

    Optional: `__len__`, the number of positions. Without it, or where it raises TypeError, the order is endless: the
    loader never looks for its end, and an IndexError from such a sampler is an error, not the end.
    """

    def __getitem__(self, position: int, /) -> RecordMetadata:
        """Returns the record key at a position, and the position's own generator or None."""
        ...


class VectorisedSampler(Sampler, Protocol):
    """A sampler that answers for many positions at once, which is many times faster."""

    @property
    def seed(self) -> int | None:
        """What the randomness of every position derives from; None where there is none, or `rng` brings it."""
        ...

    @property
    def num_records(self) -> int | None:
        """How many positions make an epoch; None where the order knows no epochs."""
        ...

    @property
    def length(self) -> int | None:
        """The number of positions; None where the order is endless."""
        ...

    def record_keys(self, start: int, stop: int, /) -> NDArray[np.int64]:
        """Returns the record keys of the positions [start, stop), shape (stop - start,)."""
        ...

    def record_keys_at(self, positions: NDArray[np.int64], /) -> NDArray[np.int64]:
        """Returns the record keys of any positions, shape (m,), in the shape and order of positions."""
        ...


_VECTORISED_MEMBERS = ("seed", "num_records", "length", "record_keys", "record_keys_at")


def vectorised(sampler: object) -> "VectorisedSampler | AdaptedSampler":
    """Returns the sampler itself if it has `record_keys_at`, else an adapter that asks it run by run or one by one.

    Raises:
        TypeError: the object is no sampler, or has `record_keys_at` but not all that goes with it.
    """
    if hasattr(sampler, "record_keys_at"):
        missing = [member for member in _VECTORISED_MEMBERS if not hasattr(sampler, member)]
        if missing:
            raise TypeError(
                f"A sampler with record_keys_at must also have {', '.join(_VECTORISED_MEMBERS[:-1])}; "
                f"{type(sampler).__name__} lacks {', '.join(missing)}."
            )
        return sampler  # type: ignore[return-value]  # all its members were just found
    if not hasattr(sampler, "record_keys") and not hasattr(sampler, "__getitem__"):
        raise TypeError(
            f"A sampler must have __getitem__(position) -> RecordMetadata, or record_keys(start, stop); "
            f"got {type(sampler).__name__}, which has neither."
        )
    return AdaptedSampler(sampler)


@dataclasses.dataclass(frozen=True)
class AdaptedSampler:
    """A custom sampler behind the interface of `VectorisedSampler`.

    A sampler with `record_keys(start, stop)` is asked once for each run of consecutive positions; it may have `seed`
    and `num_records`. A sampler with `__getitem__` only is asked for every position; the metadata's `rng` is its
    randomness, so that no `seed` is read from it.

    Attributes:
        sampler: the custom sampler. Its answers are checked; its `metadata.index` is not read.
    """

    sampler: Any

    @property
    def seed(self) -> int | None:
        """The seed of a sampler with `record_keys`, or None."""
        return getattr(self.sampler, "seed", None) if self._answers_runs else None

    @property
    def num_records(self) -> int | None:
        """The sampler's `num_records`, or None where it has none."""
        return getattr(self.sampler, "num_records", None)

    @property
    def length(self) -> int | None:
        """The sampler's `length` if it has one, else its `len()`; None, endless, where it has neither."""
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
        """Returns the record keys of the positions [start, stop)."""
        check_range(start, stop, self.length)
        return self._keys_of_run(start, stop)

    def record_keys_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the record keys of any positions, shape (m,), in the order of positions."""
        positions = np.asarray(positions, dtype=np.int64)
        if not positions.size:
            return np.empty(0, dtype=np.int64)
        check_range(int(positions.min()), int(positions.max()) + 1, self.length)
        runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
        return np.concatenate([self._keys_of_run(int(run[0]), int(run[-1]) + 1) for run in runs])

    def rngs_at(self, positions: Iterable[int]) -> "list[np.random.Generator | None]":
        """Returns the generator that the sampler gives each position, or None where it gives none."""
        if not hasattr(self.sampler, "__getitem__"):
            return [None for _ in positions]
        return [self._metadata(int(position)).rng for position in positions]

    @property
    def _answers_runs(self) -> bool:
        return hasattr(self.sampler, "record_keys")

    def _keys_of_run(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the record keys of the positions [start, stop), checked."""
        if self._answers_runs:
            return _checked_keys(self.sampler.record_keys(start, stop), start, stop)
        keys = (_checked_key(self._metadata(position), position) for position in range(start, stop))
        return np.fromiter(keys, dtype=np.int64, count=stop - start)

    def _metadata(self, position: int) -> RecordMetadata:
        """Returns what the sampler has at a position; an error of its own gets a note that says where."""
        try:
            metadata: RecordMetadata = self.sampler[position]
        except Exception as error:
            error.add_note(f"The sampler {type(self.sampler).__name__} raised this at position {position}.")
            raise
        return metadata


def check_range(start: int, stop: int, length: int | None) -> None:
    """Raises IndexError unless the positions [start, stop) are in an order of this length."""
    limit = POSITION_LIMIT if length is None else min(length, POSITION_LIMIT)
    if not 0 <= start <= stop <= limit:
        asked = f"position {start}" if stop == start + 1 else f"positions {start} to {stop} (exclusive)"
        whole = f"0 to {limit} (exclusive)" + (", an endless order" if length is None else "")
        raise IndexError(f"Asked for {asked}; the sampler has the positions {whole}.")


def _checked_key(metadata: Any, position: int) -> int:
    """Returns the record key of what a custom sampler gave for a position."""
    try:
        key = operator.index(metadata.record_key)
    except (AttributeError, TypeError):
        raise TypeError(
            f"A sampler must return RecordMetadata with an integer record_key; at position {position} it returned "
            f"{metadata!r}."
        ) from None
    if not 0 <= key < POSITION_LIMIT:
        raise ValueError(f"A record_key must be between 0 and 2**63 - 1; at position {position} it is {key}.")
    return key


def _checked_keys(keys: object, start: int, stop: int) -> NDArray[np.int64]:
    """Returns what a custom sampler gave for the positions [start, stop) as int64."""
    array = np.asarray(keys)
    if array.shape != (stop - start,) or (array.size and array.dtype.kind not in "iu"):
        raise TypeError(
            f"record_keys({start}, {stop}) must return integers of shape ({stop - start},), "
            f"got dtype {array.dtype}, shape {array.shape}."
        )
    if array.size and not 0 <= int(array.min()) <= int(array.max()) < POSITION_LIMIT:
        raise ValueError(
            f"record_keys({start}, {stop}) must return keys between 0 and 2**63 - 1, "
            f"got {array.min()} to {array.max()}."
        )
    return array.astype(np.int64, copy=False)
