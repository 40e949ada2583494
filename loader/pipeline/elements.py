"""What flows between operations: a run of elements, and where each came from."""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from millstream.seed_hashing import derive_seeds


class Origins:
    """Where elements came from.

    A batch has the origin of its first element.

    Attributes:
        table: an int64 array of shape `(5, n)`: a row for each of the properties below, a column for each element.
            Elements that a grouping takes by their sizes have a row more for each size; those of a stage that divides
            units have one before these (see `group_step`). Documents on their way into a planned row have four more
            (see `packing`).
        names: what the components of a mixture are called; empty where nothing is mixed. They do not travel.
    """

    __slots__ = ("names", "table")

    def __init__(self, table: NDArray[np.int64], names: tuple[Any, ...] = ()) -> None:
        self.table = table
        self.names = names

    @classmethod
    def none(cls) -> Self:
        """Returns the origins of no elements."""
        return cls(np.empty((5, 0), dtype=np.int64))

    @property
    def position(self) -> NDArray[np.int64]:
        """The position in the sampler's order, shape `(n,)`, as are all the others."""
        row: NDArray[np.int64] = self.table[0]
        return row

    @property
    def record_key(self) -> NDArray[np.int64]:
        """The record at that position."""
        row: NDArray[np.int64] = self.table[1]
        return row

    @property
    def index(self) -> NDArray[np.int64]:
        """What `MapWithIndex` sees and random streams are keyed by.

        It is the position, in a mixture that in the component's own order, until a FlatMap gives its children numbers
        of their own.
        """
        row: NDArray[np.int64] = self.table[2]
        return row

    @property
    def block(self) -> NDArray[np.int64]:
        """The block of the shard that the position belongs to."""
        row: NDArray[np.int64] = self.table[3]
        return row

    @property
    def component(self) -> NDArray[np.int64]:
        """Which component of a mixture the record is from; 0 where nothing is mixed."""
        row: NDArray[np.int64] = self.table[4]
        return row

    @property
    def sizes(self) -> NDArray[np.int64]:
        """What a grouping has to know of the elements, shape `(sizes, n)`; no rows where it need not know any."""
        rows: NDArray[np.int64] = self.table[5:]
        return rows

    def with_sizes(self, sizes: NDArray[np.int64]) -> Self:
        """Returns the same origins with sizes, shape `(sizes, n)`, after those that there are."""
        return type(self)(np.concatenate([self.table, sizes]), self.names) if len(sizes) else self

    def without_unit_numbers(self) -> tuple[NDArray[np.int64], Self]:
        """Returns the number of each element's unit in its group, the first row of sizes, and the other rows."""
        if not len(self):
            return self.table[0], self
        return self.table[5], type(self)(np.delete(self.table, 5, axis=0), self.names)

    def without_sizes(self) -> Self:
        """Returns the same origins without sizes."""
        return type(self)(self.table[:5], self.names)

    def __len__(self) -> int:
        """Returns the number of elements."""
        return int(self.table.shape[1])

    def take(self, which: slice | NDArray[Any]) -> Self:
        """Returns the origins of some of the elements: a slice, a mask or an array of rows."""
        return type(self)(self.table[:, which], self.names)

    def with_keys(self, record_keys: NDArray[np.int64]) -> Self:
        """Returns the same origins, of the records of other keys."""
        table = self.table.copy()
        table[1] = record_keys
        return type(self)(table, self.names)

    def named(self, names: tuple[Any, ...]) -> Self:
        """Returns the same origins, which know what the components are called."""
        return self if names == self.names else type(self)(self.table, names)

    def to_bytes(self) -> bytes:
        """Returns the table as bytes, which pickle in a tenth of the time."""
        return self.table.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, count: int) -> Self:
        """Returns the origins of `count` elements that `to_bytes` was called on; the arrays are read-only."""
        return cls(np.frombuffer(data, dtype=np.int64).reshape(-1, count)) if count else cls.none()

    def fan_out(self, counts: Sequence[int], max_fan_out: int, component: int | None = None) -> Self:
        """Returns the origins of children, `counts[i]` of them for element i: child j has index `i * max_fan_out + j`.

        Where a component is given, only elements of that one have been split: the others keep their index.
        """
        sizes = np.array(counts, dtype=np.int64)
        children = self.take(np.repeat(np.arange(len(self)), sizes))
        starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
        return children.numbered(np.arange(len(children)) - starts, max_fan_out, component)

    def numbered(self, numbers: NDArray[np.int64], limit: int, component: int | None = None) -> Self:
        """Returns origins whose indices are `index * limit + number`: those of parts of elements, each with a number.

        Where that does not fit 63 bits, as after several operations that split, it is 63 bits of a hash of the two.
        Where a component is given, only elements of that one are parts: the others keep their index.
        """
        indices = self.index * limit + numbers
        largest = np.iinfo(np.int64).max // limit - 1
        # In a mixture, the indices of the components take turns: the last one need not be the largest.
        if len(self) and int(self.index.max()) > largest:
            hashes = derive_seeds(self.index.astype(np.uint64), numbers.astype(np.uint64)) >> np.uint64(1)
            indices = np.where(self.index > largest, hashes.astype(np.int64), indices)
        table = self.table.copy()
        is_part = True if component is None else self.component == component
        table[2] = np.where(is_part, indices, self.index)
        return type(self)(table, self.names)

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Returns the origins of several runs laid end to end."""
        # A run that is empty because it has failed need not have the rows of the others.
        some = [part for part in parts if len(part)] or parts[:1]
        if len(some) == 1:
            return some[0]
        return cls(np.concatenate([part.table for part in some], axis=1), some[0].names)


class FailedRecord(NamedTuple):
    """A record that failed.

    Attributes:
        origin: the column of `Origins.table` that says where it is, with its key, or that of a substitute which failed.
        where: the key and the position as text, with the component of a mixture.
        text: the class and the message of the error.
        error: what was raised; between processes, a packed form of it.
    """

    origin: tuple[int, ...]
    where: str
    text: str
    error: Any

    @classmethod
    def at(cls, origins: Origins, row: int, error: BaseException) -> Self:
        """Returns the record that an element came from."""
        origin = tuple(origins.table[:5, row].tolist())
        return cls(origin, describe_origin(origins, row), _text_of(error), error)

    @property
    def position(self) -> int:
        """Its position in the order."""
        return self.origin[0]

    @property
    def record_key(self) -> int:
        """Its key."""
        return self.origin[1]

    @property
    def block(self) -> int:
        """The block of its position."""
        return self.origin[3]


class Elements:
    """A run of elements in order, and the error that ends it, if any.

    A run that fails at some element holds the elements before that one: so an exception reaches the consumer at its
    turn, after everything that comes before it, however many elements were worked on at once.

    Attributes:
        values: the elements.
        origins: where each came from.
        error: what was raised instead of the next element.
        at: the position of the record that the error is of; None if it is of no single record.
        failures: the records that failed, and were left out or replaced, in the order of their positions.
    """

    __slots__ = ("at", "error", "failures", "origins", "values")

    def __init__(
        self, values: Sequence[Any], origins: Origins, error: BaseException | None = None, at: int | None = None
    ) -> None:
        self.values = values
        self.origins = origins
        self.error = error
        self.at = at
        self.failures: tuple[FailedRecord, ...] = ()

    @classmethod
    def failed(cls, error: BaseException) -> Self:
        """Returns a run of no elements, only an error."""
        return cls([], Origins.none(), error)

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Returns runs laid end to end, up to and including the first error."""
        stop = next((i for i, part in enumerate(parts, 1) if part.error is not None), len(parts))
        kept = parts[:stop]
        if len(kept) == 1:
            return kept[0]
        values = [value for part in kept for value in part.values]
        whole = cls(values, Origins.concatenate([part.origins for part in kept]), kept[-1].error, kept[-1].at)
        whole.failures = tuple(failure for part in kept for failure in part.failures)
        return whole


def position_at(origins: Origins, row: int) -> int | None:
    """Returns the position of an element; None if there is no such row."""
    return int(origins.position[row]) if row < len(origins) else None


def add_note(error: BaseException, text: str) -> None:
    """Adds a note to an exception, which may be of any class, and so refuse it."""
    with contextlib.suppress(Exception):
        error.add_note(text)


def describe_records(origins: Origins) -> str:
    """Returns which records some elements came from, for error texts."""
    keys = origins.record_key
    shown = ", ".join(map(str, keys[:16].tolist())) + (", …" if len(keys) > 16 else "")
    first, last = np.min(origins.position), np.max(origins.position)
    where = f"positions {first} to {last}"
    if origins.names:
        some = list(dict.fromkeys(repr(origins.names[component]) for component in origins.component.tolist()))
        where += f", of the component{'s'[: len(some) > 1]} {', '.join(some[:4])}{', …' if len(some) > 4 else ''}"
    return f"the record{'s' if len(keys) > 1 else ''} {shown} ({where})"


def describe_origin(origins: Origins, row: int) -> str:
    """Returns which record an element came from, for error texts."""
    where = f"position {origins.position[row]}"
    if origins.names:
        where += f", component {origins.names[origins.component[row]]!r}"
    return f"record key {origins.record_key[row]} ({where})"


def _text_of(error: BaseException) -> str:
    """Returns the class and the message of an exception, which may be of a class that refuses to show it."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  (as above)
        return type(error).__name__
