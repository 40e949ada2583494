"""Runs of elements, which flow between operations, with the origin of each element, and its random draws."""

import contextlib
import enum
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, Protocol, Self, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.randomness import Purpose, derive_seed, derive_seeds, generators, generators_from
from millstream.samplers.base import AdaptedSampler, MixedSampler, VectorisedSampler, is_mixed
from millstream.samplers.order import by_number


class Origins:
    """The origins of elements. A batch has the origin of its first element.

    Attributes:
        table: an int64 array of shape `(5, n)`, with one row per property below and one column per element. Elements
            for a grouping have a further row for each size. Those of a stage that divides units have another one
            before the sizes (see `group_step`). Documents before Pack have four more (see `order`).
        names: the names of a mixture's components; empty without a mixture. They are not sent to workers.
    """

    __slots__ = ("names", "table")

    def __init__(self, table: NDArray[np.int64], names: tuple[Any, ...] = ()) -> None:
        self.table = table
        self.names = names

    @classmethod
    def none(cls) -> Self:
        return cls(np.empty((5, 0), dtype=np.int64))

    @property
    def position(self) -> NDArray[np.int64]:
        """The positions in the sampler's order, shape `(n,)`, like all other properties."""
        return self.table[0]  # type: ignore[no-any-return]

    @property
    def record_key(self) -> NDArray[np.int64]:
        return self.table[1]  # type: ignore[no-any-return]

    @property
    def index(self) -> NDArray[np.int64]:
        """The index that `MapWithIndex` sees, and by which random streams are keyed.

        It is the position (in a mixture, the position in the component's own order), until a FlatMap numbers its
        children.
        """
        return self.table[2]  # type: ignore[no-any-return]

    @property
    def block(self) -> NDArray[np.int64]:
        return self.table[3]  # type: ignore[no-any-return]

    @property
    def component(self) -> NDArray[np.int64]:
        """The number of the record's component in a mixture; 0 without a mixture."""
        return self.table[4]  # type: ignore[no-any-return]

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The sizes of the elements for a grouping, shape `(sizes, n)`; without rows if it needs none."""
        return self.table[5:]

    def with_sizes(self, sizes: NDArray[np.int64]) -> Self:
        """Returns the same origins with sizes, shape `(sizes, n)`, appended."""
        return type(self)(np.concatenate([self.table, sizes]), self.names) if len(sizes) else self

    def without_unit_numbers(self) -> tuple[NDArray[np.int64], Self]:
        """Returns the number of each element's unit in its group, the first row of sizes, and the remaining origins."""
        if not len(self):
            return self.table[0], self
        return self.table[5], type(self)(np.delete(self.table, 5, axis=0), self.names)

    def without_sizes(self) -> Self:
        return type(self)(self.table[:5], self.names)

    def __len__(self) -> int:
        return int(self.table.shape[1])

    def take(self, rows: slice | NDArray[Any]) -> Self:
        if isinstance(rows, slice):
            return type(self)(self.table[:, rows], self.names)
        # Twice as fast as an index of NumPy.
        chosen = self.table.compress(rows, axis=1) if rows.dtype == np.bool_ else self.table.take(rows, axis=1)
        return type(self)(chosen, self.names)

    def with_keys(self, record_keys: NDArray[np.int64]) -> Self:
        table = self.table.copy()
        table[1] = record_keys
        return type(self)(table, self.names)

    def named(self, names: tuple[Any, ...]) -> Self:
        return self if names == self.names else type(self)(self.table, names)

    def to_bytes(self) -> bytes:
        """Returns the table as bytes, which pickle ten times as fast."""
        return self.table.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes, count: int) -> Self:
        """Inverts `to_bytes` for `count` elements. The arrays are read-only."""
        return cls(np.frombuffer(data, dtype=np.int64).reshape(-1, count)) if count else cls.none()

    def fan_out(self, counts: Sequence[int], max_fan_out: int, component: int | None = None) -> Self:
        """Returns the origins of children: `counts[i]` for element i. Child j has index `i * max_fan_out + j`.

        If a component is given, only its elements were split. The others keep their index.
        """
        sizes = np.array(counts, dtype=np.int64)
        children = self.take(np.repeat(np.arange(len(self)), sizes))
        starts = np.repeat(np.cumsum(sizes) - sizes, sizes)
        return children.numbered(np.arange(len(children)) - starts, max_fan_out, component)

    def numbered(self, numbers: NDArray[np.int64], limit: int, component: int | None = None) -> Self:
        """Returns origins with the indices `index * limit + number`: those of numbered parts of elements.

        An index that exceeds 63 bits, as after several operations that split, is replaced by 63 bits of a hash. If a
        component is given, only its elements are parts. The others keep their index.
        """
        indices = self.index * limit + numbers
        largest = np.iinfo(np.int64).max // limit - 1
        # The indices of a mixture's components are interleaved, so the last one need not be the largest.
        if len(self) and int(self.index.max()) > largest:
            parents, children = self.index.astype(np.uint64), numbers.astype(np.uint64)
            hashes = derive_seeds(parents, Purpose.CHILD_INDEX, children) >> np.uint64(1)
            indices = np.where(self.index > largest, hashes.astype(np.int64), indices)
        table = self.table.copy()
        is_of_component = True if component is None else self.component == component
        table[2] = np.where(is_of_component, indices, self.index)
        return type(self)(table, self.names)

    @classmethod
    def concatenate(cls, runs: Sequence[Self]) -> Self:
        # A run that is empty because it failed may lack rows that the others have.
        filled = [run for run in runs if len(run)] or runs[:1]
        if len(filled) == 1:
            return filled[0]
        return cls(np.concatenate([run.table for run in filled], axis=1), filled[0].names)


class FailedRecord(NamedTuple):
    """A record that failed."""

    origin: tuple[int, ...]  # Its column of `Origins.table`, with its own key, or that of a substitute that failed.
    where: str  # Its key and position, with the component of a mixture.
    text: str  # The class and message of the error.
    error: Any  # Between processes, its serialized form.

    @classmethod
    def at(cls, origins: Origins, row: int, error: BaseException) -> Self:
        origin = tuple(origins.table[:5, row].tolist())
        return cls(origin, describe_origin(origins, row), _text_of(error), error)

    @property
    def position(self) -> int:
        return self.origin[0]

    @property
    def record_key(self) -> int:
        return self.origin[1]

    @property
    def block(self) -> int:
        return self.origin[3]


class Location(NamedTuple):
    """The position of the record that an error belongs to, and the block of that position."""

    position: int
    block: int

    @classmethod
    def of(cls, origins: Origins, row: int) -> Self | None:
        """Returns the location of an element, or None if there is no such row."""
        return cls(int(origins.position[row]), int(origins.block[row])) if row < len(origins) else None


class Elements:
    """A run of elements in order, and the error in place of the next one, if any.

    A run that fails at an element contains the elements before it. An exception therefore reaches the consumer in
    order, after everything before it, however many elements were processed together.

    Attributes:
        at: the record that the error belongs to; None if it belongs to no single record.
        failures: the records that failed, and were skipped or replaced, in the order of their positions.
    """

    __slots__ = ("at", "error", "failures", "origins", "values")

    def __init__(
        self,
        values: Sequence[Any],
        origins: Origins,
        error: BaseException | None = None,
        at: Location | None = None,
        failures: tuple[FailedRecord, ...] = (),
    ) -> None:
        self.values = values
        self.origins = origins
        self.error = error
        self.at = at
        self.failures = failures

    @classmethod
    def failed(cls, error: BaseException, at: Location | None = None) -> Self:
        return cls([], Origins.none(), error, at)

    def between(self, start: int | None, stop: int | None) -> "Elements":
        """Returns some of the elements, without an error."""
        rows = slice(start, stop)
        return Elements(self.values[rows], self.origins.take(rows))

    @classmethod
    def concatenate(cls, runs: Sequence[Self]) -> Self:
        """Returns the concatenation of runs, up to and including the first error."""
        stop = next((i for i, run in enumerate(runs, 1) if run.error is not None), len(runs))
        kept = runs[:stop]
        if len(kept) == 1:
            return kept[0]
        values = [value for run in kept for value in run.values]
        failures = tuple(failure for run in kept for failure in run.failures)
        return cls(values, Origins.concatenate([run.origins for run in kept]), kept[-1].error, kept[-1].at, failures)


@final
class End(enum.Enum):
    """The type of END."""

    END = "the end of the stream"


END: Final = End.END
"""The reason for the lack of elements at the end of a stream."""


class Awaited(Protocol):
    """The reason for a temporary lack of elements: a call that threads or workers run."""

    def wait(self) -> None:
        """Waits for it, for a bounded time. A call that takes too long becomes an error."""


Lack: TypeAlias = End | Awaited
"""The reason for the lack of elements."""


class SourceEnded(RuntimeError):  # noqa: N818  (an error only for a caller that reads this record alone)
    """The source has no record at this key or after it, because it raised StopIteration. The stream ends, in order.

    A stream in the guise of a source ends in this way. An example is a streamed dataset of Hugging Face, whose length
    is unknown, and which claims more records than will ever be read. The records before the end are delivered, and the
    last batch may be short. A StopIteration from anywhere else is a mistake, and an error.

    Within a pipeline it is a value, the end of a run, and is not raised.
    """

    def __init__(self, text: str = "The source raised StopIteration when a record was read.") -> None:
        super().__init__(text)


def text_of_end(end: SourceEnded) -> str:
    """Returns the text for the log, because the end may be a mistake."""
    where = " ".join(getattr(end, "__notes__", [])).removeprefix("millstream: in ")
    return f"{end} The stream ends there: {where}"


def add_note(error: BaseException, text: str) -> None:
    """Adds a note to an exception that lacks it. Its class may refuse it."""
    with contextlib.suppress(Exception):
        if text not in getattr(error, "__notes__", ()):
            error.add_note(text)


def describe_records(origins: Origins) -> str:
    if not len(origins):
        return "no record"
    keys = origins.record_key
    shown = ", ".join(map(str, keys[:16].tolist())) + (", …" if len(keys) > 16 else "")
    first, last = np.min(origins.position), np.max(origins.position)
    where = f"positions {first} to {last}"
    if origins.names:
        names = list(dict.fromkeys(repr(origins.names[component]) for component in origins.component.tolist()))
        where += f", of the component{'s'[: len(names) > 1]} {', '.join(names[:4])}{', …' if len(names) > 4 else ''}"
    return f"the record{'s' if len(keys) > 1 else ''} {shown} ({where})"


def describe_origin(origins: Origins, row: int) -> str:
    where = f"position {origins.position[row]}"
    if origins.names:
        where += f", component {origins.names[origins.component[row]]!r}"
    return f"record key {origins.record_key[row]} ({where})"


def _text_of(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # noqa: BLE001  (a broken __str__)
        return type(error).__name__


def streams_of(
    sampler: VectorisedSampler | AdaptedSampler, origins: Origins, operation: int, seed: int | None = None
) -> Iterator["np.random.Generator"]:
    """Yields a generator for each element, given the number of the operation among random operations.

    The generators are those of `seed` if it is given, otherwise the sampler's.
    """
    seed = sampler.seed if seed is None else seed
    if seed is not None:
        epochs = origins.position // (sampler.num_records or np.iinfo(np.int64).max)
        return generators(seed, epochs, origins.index, operation)
    if is_mixed(sampler):
        return _streams_of_mixture(sampler, origins, operation)
    parents = _parents(sampler, origins) if isinstance(sampler, AdaptedSampler) else []
    return generators_from(parents, origins.index.tolist(), operation)


def _streams_of_mixture(mixture: MixedSampler, origins: Origins, operation: int) -> Iterator["np.random.Generator"]:
    """Yields the same generators as the samplers of the components."""
    components, positions = mixture.locate(origins.position)
    # A batch contains only a few of possibly hundreds of components.
    touched, numbers = np.unique(components, return_inverse=True)
    samplers = [mixture.samplers[component] for component in touched.tolist()]
    seeds = [sampler.seed for sampler in samplers]
    if None not in seeds:
        largest = np.iinfo(np.int64).max
        lengths = np.array([min(sampler.num_records or largest, largest) for sampler in samplers], dtype=np.int64)
        all_seeds = np.array(seeds, dtype=np.uint64)
        return generators(all_seeds[numbers], positions // lengths[numbers], origins.index, operation)
    table = origins.table.copy()
    table[0] = positions
    by_component = {
        component: streams_of(mixture.samplers[component], Origins(table[:, components == component]), operation)
        for component in touched.tolist()
    }
    return (next(by_component[component]) for component in components.tolist())


def _parents(sampler: AdaptedSampler, origins: Origins) -> Iterator["np.random.Generator"]:
    """Yields the generators of a custom sampler one by one, so that an error is raised at its element."""
    for position in origins.position.tolist():
        (rng,) = sampler.rngs_at([position])
        if rng is None:
            raise ValueError(f"A RandomMap needs randomness, but the sampler gave no rng at position {position}.")
        yield rng


def seed_of(sampler: VectorisedSampler | AdaptedSampler) -> int | None:
    """Returns the seed of draws that do not belong to single records, or None.

    In a mixture, it is derived from the seed of the first component that has a turn, so others can be added anywhere.
    """
    if not is_mixed(sampler):
        return sampler.seed
    return None if sampler.rows_seed is None else derive_seed(sampler.rows_seed, Purpose.MIXTURE)


def epochs_at(sampler: VectorisedSampler | AdaptedSampler, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the epoch of each position; in a mixture, that of the component's own order.

    A sampler without epochs is in its first one everywhere.
    """
    if not is_mixed(sampler):
        largest = np.iinfo(np.int64).max
        return positions // min(sampler.num_records or largest, largest)
    components, component_positions = sampler.locate(positions)
    epochs = np.empty_like(positions)
    for component, rows in by_number(components):
        epochs[rows] = epochs_at(sampler.samplers[component], component_positions[rows])
    return epochs


def has_randomness(sampler: VectorisedSampler | AdaptedSampler) -> bool:
    """Returns True if random operations can draw: the sampler has a seed, or a generator for each position."""
    if is_mixed(sampler):
        return all(map(has_randomness, sampler.samplers))
    return sampler.seed is not None or (isinstance(sampler, AdaptedSampler) and sampler[0].rng is not None)
