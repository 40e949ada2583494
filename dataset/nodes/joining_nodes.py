"""Nodes with several parents: each position belongs to one of them, or to all if they are zipped."""

import abc
import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.core.warn import log_warning
from millstream.dataset.nodes.index_nodes import selected_identity
from millstream.dataset.nodes.node import ENDLESS, Node, Positions, Units, divided, joined
from millstream.dataset.nodes.source_node import Source
from millstream.loader.checkpoints.description import Description
from millstream.loader.pipeline.elements import add_note
from millstream.samplers.mixtures.mixing import DROP_EXHAUSTED, FIRST_EXHAUSTED, Mixing, MixingSchedule
from millstream.samplers.order import Occurrences, by_number, equal_to
from millstream.sources import ConcatenatedDataSource

_SAMPLED_ROWS = 4096
"""The number of elements of a slice in which the parents of a mixture are counted."""

_PROPORTION_ERROR, _PROPORTION_SHARE = 2, 0.05
"""The elements, and the share of all elements, by which the counts of a mixture's parents may differ from weights."""


def starts_of(sources: Sequence[Any]) -> dict[int, int]:
    """Returns the first record key of each of several concatenated sources, by its `id`."""
    return dict(zip(map(id, sources), itertools.accumulate(map(len, sources), initial=0), strict=False))


@dataclasses.dataclass(frozen=True, eq=False)
class JoiningNode(Node):
    """A node each of whose elements is an element of one of its parents."""

    above: tuple[Node, ...]
    is_of_one = passes_on = True

    @functools.cached_property
    def _lengths(self) -> NDArray[np.int64]:
        return np.array([parent.length for parent in self.above], np.int64)

    @abc.abstractmethod
    def parents_at(self, positions: Positions) -> tuple[NDArray[np.integer[Any]], Positions]:
        """Returns the number of the parent of each position, and the position in that parent."""

    @functools.cached_property
    def _concatenated(self) -> tuple[Source, dict[int, int]] | None:
        """The concatenated sources of the parents, and the start of each; None if parents compute elements.

        Records, or columns, of all parents are then read in one call, even if parents share a source.
        """
        if not self.sources:
            return None
        return Source(ConcatenatedDataSource(self.sources)), starts_of(self.sources)

    def taken_from(self, positions: Positions) -> Iterable[tuple[Node, Any, Positions]]:
        return ((self.above[number], rows, own) for number, rows, own in self._split(positions))

    def occurrences(self, keys: Positions, starts: Mapping[int, int], stop: int) -> Occurrences:
        found = []
        for number, parent in enumerate(self.above):
            of_parent = parent.occurrences(keys, starts, min(ENDLESS, self._parent_stop(number, stop)))
            owners, positions = self._own_positions(number, of_parent.positions)
            is_before = positions < stop
            found.append(Occurrences(of_parent.rows[owners][is_before], positions[is_before]))
        return Occurrences.concatenate(found)

    def _parent_stop(self, number: int, stop: int) -> int:
        """Returns an end of the positions of a parent among the first `stop` positions."""
        return -(-stop // max(1, self.length)) * self.above[number].length

    @abc.abstractmethod
    def _own_positions(self, number: int, positions: Positions) -> tuple[Any, Positions]:
        """Returns the positions of elements of a parent, and the row of each among them."""

    def _split(self, positions: Positions) -> Iterator[tuple[int, NDArray[np.intp], Positions]]:
        """Yields the number of each parent with positions, the rows that belong to it, and their positions in it."""
        numbers, own = self.parents_at(positions)
        for number, rows in by_number(numbers):
            yield number, np.arange(len(own))[rows], own[rows]

    def identities(self) -> Iterator[str]:
        yield from super().identities()
        yield from self._lengths_identity()

    def _lengths_identity(self) -> Iterator[str]:
        """Yields the lengths if epochs of a parent are counted: with more of them, other elements follow its end."""
        if self.is_repeated:
            yield f"lengths {self._lengths.tolist()}"

    def locate(self, positions: Positions) -> Any:
        """Returns record keys; if parents compute elements, the rows and the located positions of each."""
        if self._concatenated is not None:
            return positions, self.record_keys(positions, self._concatenated[1])
        return [(number, rows, self.above[number].locate(own)) for number, rows, own in self._split(positions)]

    def elements(self, located: Any, start: int, stop: int) -> Sequence[Any]:
        if self._concatenated is not None:
            return self._concatenated[0].elements(located, start, stop)
        values: list[Any] = [None] * (stop - start)
        for number, rows, of_parent in located:
            first, last = np.searchsorted(rows, (start, stop)).tolist()
            if first == last:
                continue
            try:
                elements: Sequence[Any] = self.above[number].elements(of_parent, first, last)
            except Exception as error:
                _locate(error, self.names[number], self)
                raise
            if last - first == stop - start:
                # Columns stay columns.
                return elements
            for row, value in zip((rows[first:last] - start).tolist(), elements, strict=True):
                values[row] = value
        return values

    def at(self, position: int) -> Any:
        (number,), (own,) = self.parents_at(np.array([position]))
        try:
            return self.above[int(number)].at(int(own))
        except Exception as error:
            _locate(error, self.names[int(number)], self)
            raise

    @property
    def names(self) -> Sequence[Any]:
        """The names of the parents, or their numbers."""
        return range(len(self.above))


def _locate(error: BaseException, name: Any, node: Node) -> None:
    """Adds a note to an error of a parent: which of several has raised it."""
    add_note(error, f"millstream: in dataset {name!r} of {node.text}.")


def _window_of(parents: Sequence[Node]) -> int | None:
    windows = [parent.window_units for parent in parents]
    return min((window for window in windows if window is not None), default=None)


def _units_of(parents: Sequence[Node]) -> list[Units]:
    """Returns the units of parents, numbered one parent after another.

    A parent whose records may come in any order has units of as many elements as those of the others have on average.
    """
    known = [None if parent.window_units is None else parent.units() for parent in parents]
    sizes = np.concatenate([units.sizes for units in known if units is not None])
    size = max(1, int(sizes.mean())) if len(sizes) else 1
    found: list[Units] = []
    first = 0
    for parent, units in zip(parents, known, strict=True):
        if units is None:
            ends = np.minimum(np.arange(size, parent.length + size, size), parent.length)
            units = Units(np.diff(ends, prepend=0), np.arange(len(ends)))  # noqa: PLW2901
        found.append(units._replace(numbers=units.numbers + first))
        first += int(units.numbers.max(initial=-1)) + 1
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Concatenated(JoiningNode):
    """Concatenates the parents. Each epoch consists of that epoch of each parent."""

    @functools.cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.cumsum(self._lengths)

    @functools.cached_property
    def length(self) -> int:
        return sum(parent.length for parent in self.above)

    @functools.cached_property
    def window_units(self) -> int | None:
        return _window_of(self.above)

    def units(self) -> Units:
        return Units(*map(np.concatenate, zip(*_units_of(self.above), strict=True)))

    def parents_at(self, positions: Positions) -> tuple[NDArray[np.integer[Any]], Positions]:
        epochs, offsets = divided(positions, self.length)
        numbers = np.searchsorted(self._ends, offsets, side="right")
        own = offsets - (self._ends - self._lengths)[numbers]
        return numbers, joined(epochs, self._lengths[numbers], own)

    def _own_positions(self, number: int, positions: Positions) -> tuple[Any, Positions]:
        length = self.above[number].length
        epochs, offsets = np.divmod(positions, max(1, length))
        return slice(None), epochs * self.length + int(self._ends[number]) - length + offsets

    @property
    def text(self) -> str:
        return "concatenate"


@dataclasses.dataclass(frozen=True, eq=False)
class Mixed(JoiningNode):
    """Interleaves the parents in the proportions of weights, as a `MixtureSampler` does."""

    mixing: Mixing
    is_mixed = True

    @functools.cached_property
    def reorders(self) -> bool:  # type: ignore[override]  # as a property
        # Beyond the end, each parent continues where it was, unless all of them have ended there.
        return self.mixing.stop != DROP_EXHAUSTED

    @functools.cached_property
    def _schedule(self) -> MixingSchedule:
        return self.mixing.schedule([None if parent.length == ENDLESS else parent.length for parent in self.above])

    @functools.cached_property
    def length(self) -> int:
        """The first position at which the mixture has ended in its first epoch."""
        length = self._schedule.length
        return ENDLESS if length is None else min(ENDLESS, length)

    def parents_at(self, positions: Positions) -> tuple[NDArray[np.integer[Any]], Positions]:
        if self.mixing.stop != DROP_EXHAUSTED:
            return self._schedule.locate(positions)
        epochs, offsets = divided(positions, self.length)
        numbers, own = self._schedule.locate(offsets)
        return numbers, joined(epochs, self._lengths[numbers], own)

    def _parent_stop(self, number: int, stop: int) -> int:
        if self.mixing.stop == DROP_EXHAUSTED and stop > self.length:
            return super()._parent_stop(number, stop)
        return self._schedule.drawn_at(stop)[number]

    def _own_positions(self, number: int, positions: Positions) -> tuple[Any, Positions]:
        if self.mixing.stop != DROP_EXHAUSTED:
            return slice(None), self._schedule.positions_of(number, positions)
        epochs, offsets = np.divmod(positions, self.above[number].length)
        return slice(None), self._schedule.positions_of(number, offsets) + epochs * self.length

    @property
    def text(self) -> str:
        return f"mix(weights={list(self.mixing.weights)}{self.mixing.rest})"

    @property
    def names(self) -> Sequence[Any]:
        return self.mixing.names

    @property
    def shares(self) -> Sequence[tuple[str, float]]:
        return self.mixing.shares

    def identities(self) -> Iterator[str]:
        yield f"Mixed({dict(zip(self.mixing.names, self.mixing.weights, strict=True))}{self.mixing.rest})"
        if self.mixing.stop != FIRST_EXHAUSTED:
            yield from self._lengths_identity()

    def content(self) -> Description:
        return Description()


@dataclasses.dataclass(frozen=True, eq=False)
class Selected(JoiningNode):
    """Elements of the parents, chosen by a selection map.

    Attributes:
        selection: has `len`, and returns the number of a parent and a position in it for a position. A list, a tuple or
            an array of shape (n, 2) is the same in each epoch, and selects from that epoch of the parents.
    """

    selection: Any

    def __post_init__(self) -> None:
        if not isinstance(self.selection, (list, tuple, np.ndarray)):
            return
        table = np.asarray(self.selection)
        if table.size and (table.ndim != 2 or table.shape[1] != 2 or table.dtype.kind not in "iu"):
            raise ValueError(
                f"selection_map must be pairs of integers, shape (n, 2), got dtype {table.dtype}, shape {table.shape}."
            )
        # A copy, because the caller may change the map later.
        pairs = table.reshape(-1, 2).astype(np.int64, order="F")
        object.__setattr__(self, "selection", pairs)
        self._check(np.arange(len(pairs)), pairs[:, 0], pairs[:, 1], self._lengths)

    @functools.cached_property
    def length(self) -> int:
        return len(self.selection)

    @property
    def _is_table(self) -> bool:
        return isinstance(self.selection, np.ndarray)

    @functools.cached_property
    def reorders(self) -> bool:  # type: ignore[override]  # as a property
        return not self._is_table

    @functools.cached_property
    def looks_ahead(self) -> bool:
        return self._is_table and all(parent.looks_ahead for parent in self.above)

    def parents_at(self, positions: Positions) -> tuple[NDArray[np.integer[Any]], Positions]:
        if not self._is_table:
            pairs = [map(operator.index, self.selection[position]) for position in positions.tolist()]
            numbers, own = np.array([tuple(pair) for pair in pairs], np.int64).reshape(-1, 2).T
            # Any epoch of a dataset, but an empty one has none.
            self._check(positions, numbers, own, np.where(self._lengths, ENDLESS, 0))
            return numbers, own
        epochs, offsets = divided(positions, self.length)
        numbers, own = self.selection[offsets].T
        return numbers, joined(epochs, self._lengths[numbers], own)

    @functools.cached_property
    def traced(self) -> tuple[Any, ...] | None:
        return super().traced if self._is_table else None

    def _parent_stop(self, number: int, stop: int) -> int:
        if self.above[number].length < ENDLESS:
            return super()._parent_stop(number, stop)
        return int(self.selection[:, 1].max(initial=-1)) + 1

    def _own_positions(self, number: int, positions: Positions) -> tuple[Any, Positions]:
        rows = np.flatnonzero(self.selection[:, 0] == number)
        epochs, offsets = np.divmod(positions, max(1, self.above[number].length))
        owners, numbers = equal_to(self.selection[rows, 1], offsets)
        return owners, rows[numbers] + epochs[owners] * self.length

    @functools.cached_property
    def window_units(self) -> int | None:
        is_finite = self._is_table and ENDLESS not in self._lengths
        return _window_of(self.above) if is_finite else None

    def units(self) -> Units:
        numbers = np.empty(self.length, np.int64)
        units = _units_of(self.above)
        for parent, rows in by_number(self.selection[:, 0]):
            numbers[rows] = units[parent].at(self.selection[rows, 1])
        return Units.of(numbers)

    def _check(self, positions: Positions, numbers: Positions, own: Positions, lengths: NDArray[np.int64]) -> None:
        """Raises IndexError for the first pair that is not a dataset and a position below its length."""
        exists = (numbers >= 0) & (numbers < len(lengths)) & (own >= 0)
        exists[exists] = own[exists] < lengths[numbers[exists]]
        if exists.all():
            return
        row = int(np.argmin(exists))
        number, position = int(numbers[row]), int(own[row])
        is_known = 0 <= number < len(lengths) and position >= 0
        has = f", and datasets[{number}] has {self._lengths[number]} elements" if is_known else ""
        raise IndexError(
            f"selection_map[{positions[row]}] must be the number of a dataset, 0 to {len(lengths) - 1}, and a position "
            f"in it, from 0 on, got {(number, position)}{has}."
        )

    @property
    def text(self) -> str:
        return f"select_from_datasets({self.length} positions)"

    def identities(self) -> Iterator[str]:
        """Yields a CRC of all pairs of a table, however many: they are the order. Others are described."""
        if self._is_table:
            yield from selected_identity(*self.selection.T)
            yield from self._lengths_identity()
        else:
            yield from super().identities()
            yield f"length {self.length}"

    def content(self) -> Description:
        return Description() if self._is_table else super().content()


@dataclasses.dataclass(frozen=True, eq=False)
class Zipped(Node):
    """Tuples of the elements at the same position of parents of equal length. A missing element is None in it."""

    above: tuple[Node, ...]
    is_sparse = False

    @functools.cached_property
    def length(self) -> int:
        return self.above[0].length

    @functools.cached_property
    def epoch_length(self) -> int:
        return self.above[0].epoch_length

    @functools.cached_property
    def window_units(self) -> int | None:
        return _window_of(self.above)

    def units(self) -> Units:
        """Returns those of the first parent that has units, because all are read at the same positions."""
        return next(parent.units() for parent in self.above if parent.window_units is not None)

    def taken_from(self, positions: Positions) -> Iterable[tuple[Node, Any, Positions]]:
        return [(parent, slice(None), positions) for parent in self.above]

    def locate(self, positions: Positions) -> Any:
        return [parent.locate(positions) for parent in self.above]

    def elements(self, located: Any, start: int, stop: int) -> Sequence[Any]:
        columns = self._each(lambda number: self.above[number].elements(located[number], start, stop))
        return list(zip(*columns, strict=True))

    def at(self, position: int) -> Any:
        return tuple(self._each(lambda number: self.above[number].at(position)))

    def _each(self, read: Callable[[int], Any]) -> Iterator[Any]:
        """Yields the results of a function of the number of each parent."""
        for number in range(len(self.above)):
            try:
                yield read(number)
            except Exception as error:
                _locate(error, number, self)
                raise

    @property
    def text(self) -> str:
        return "zip"


def warn_of_proportions(node: Node, rows: range) -> None:
    """Warns if every n-th element of a mixture, for instance a host's share, is of other proportions."""
    found = _out_of_proportion(node, np.array(rows[:_SAMPLED_ROWS], np.int64))
    if found is not None:
        mixed, counts = found
        log_warning(
            f"a slice with the step {rows.step} of {mixed.text} is of other proportions: of its first {sum(counts)} "
            f"elements, the datasets have {counts}. For a share per host, slice the datasets before they are mixed, "
            "mix([a[host::hosts], b[host::hosts]]), or use millstream.load(sources, weights=...)."
        )


def _out_of_proportion(node: Node, positions: Positions) -> tuple[Mixed, list[int]] | None:
    """Returns a mixture of which positions have other proportions than its weights, and the counts of its parents.

    Nodes whose elements are made of several, as batches are, have all parents in each, and are not followed.
    """
    if isinstance(node, Mixed):
        numbers, _ = node.parents_at(positions)
        counts = np.bincount(numbers, minlength=len(node.above))
        weights = node.mixing.weights
        expected = len(positions) * np.array(weights) / sum(weights)
        if (np.abs(counts - expected) > _PROPORTION_ERROR + _PROPORTION_SHARE * len(positions)).any():
            return node, counts.tolist()
    if not node.is_mixed:
        return None
    below = node.taken_from(positions)
    return next((found for parent, _, own in below if (found := _out_of_proportion(parent, own)) is not None), None)
