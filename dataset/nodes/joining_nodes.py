"""Nodes that make one dataset of several: each position belongs to one of them, or, where they are zipped, to all."""

import abc
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.dataset.nodes.node import ENDLESS, Node, Positions, divided
from millstream.dataset.nodes.source_node import Source
from millstream.samplers.mixing_schedule import FIRST_EXHAUSTED, MixingSchedule
from millstream.sources import ConcatenatedDataSource


@dataclasses.dataclass(frozen=True, eq=False)
class JoiningNode(Node):
    """A node of several parents, each of whose elements is an element of one of them.

    Attributes:
        above: the parents.
    """

    above: tuple[Node, ...]

    @property
    def parents(self) -> tuple[Node, ...]:
        """The parents."""
        return self.above

    @abc.abstractmethod
    def parents_at(self, positions: Positions) -> tuple[NDArray[np.integer[Any]], Positions]:
        """Returns the number of the parent of each position, and the position in it."""

    @functools.cached_property
    def sources(self) -> tuple[Any, ...] | None:
        """All those of the parents."""
        if any(parent.sources is None for parent in self.above):
            return None
        return tuple({id(source): source for parent in self.above for source in parent.sources or ()}.values())

    @functools.cached_property
    def _end_to_end(self) -> tuple[Source, dict[int, int]] | None:
        """The sources of the parents as one, and where each begins in it; None where parents make elements.

        So records, and columns, of all parents are read at once, and those of a source that several have, too.
        """
        if not self.sources:
            return None
        lengths = [len(source) for source in self.sources]
        starts = dict(zip(map(id, self.sources), itertools.accumulate(lengths, initial=0), strict=False))
        return Source(ConcatenatedDataSource(self.sources)), starts

    def record_keys(self, positions: Positions, starts: Mapping[int, int]) -> Positions:
        """Returns those of the parents, each at its positions."""
        keys = np.empty(len(positions), np.int64)
        for parent, rows, theirs in self._dealt(positions):
            keys[rows] = parent.record_keys(theirs, starts)
        return keys

    def _dealt(self, positions: Positions) -> Iterator[tuple[Node, NDArray[np.intp], Positions]]:
        """Yields each parent that is touched, the rows that are its, and their positions in it."""
        numbers, theirs = self.parents_at(positions)
        for number, parent in enumerate(self.above):
            rows = np.flatnonzero(numbers == number)
            if len(rows):
                yield parent, rows, theirs[rows]

    def locate(self, positions: Positions) -> Any:
        """Returns record keys; where parents make elements, what each of them needs, and for which rows."""
        if self._end_to_end is not None:
            return positions, self.record_keys(positions, self._end_to_end[1])
        return [(parent, rows, parent.locate(theirs)) for parent, rows, theirs in self._dealt(positions)]

    def elements(self, located: Any, start: int, stop: int) -> Sequence[Any]:
        """Returns elements, read in one call from each source, or each parent, that is touched."""
        if self._end_to_end is not None:
            return self._end_to_end[0].elements(located, start, stop)
        values: list[Any] = [None] * (stop - start)
        for parent, rows, of_parent in located:
            first, last = np.searchsorted(rows, (start, stop)).tolist()
            if last - first == stop - start:
                # Columns stay columns.
                elements: Sequence[Any] = parent.elements(of_parent, first, last)
                return elements
            if first < last:
                theirs = (rows[first:last] - start).tolist()
                for row, value in zip(theirs, parent.elements(of_parent, first, last), strict=True):
                    values[row] = value
        return values

    def at(self, position: int) -> Any:
        """Returns an element of one parent."""
        number, theirs = self.parent_at(position)
        return self.above[number].at(theirs)

    def parent_at(self, position: int) -> tuple[int, int]:
        """Returns what `parents_at` says of one position."""
        (number,), (theirs,) = self.parents_at(np.array([position]))
        return int(number), int(theirs)


@dataclasses.dataclass(frozen=True, eq=False)
class Concatenated(JoiningNode):
    """The parents end to end; each epoch has that epoch of each of them."""

    @functools.cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.array(list(itertools.accumulate(parent.length for parent in self.above)), np.int64)

    @functools.cached_property
    def length(self) -> int:
        """All together."""
        return sum(parent.length for parent in self.above)

    def parents_at(self, positions: Positions) -> tuple[NDArray[np.integer[Any]], Positions]:
        """Returns which part offsets lie in."""
        epochs, offsets = divided(positions, self.length)
        numbers = np.searchsorted(self._ends, offsets, side="right")
        lengths = np.array([parent.length for parent in self.above], np.int64)
        theirs = offsets - (self._ends - lengths)[numbers]
        return numbers, theirs + (epochs if isinstance(epochs, int) else epochs.view(np.int64)) * lengths[numbers]

    @property
    def text(self) -> str:
        """The method."""
        return "concatenate"


@dataclasses.dataclass(frozen=True, eq=False)
class Mixed(JoiningNode):
    """The parents in turn, in the proportions of weights, as in a `MixtureSampler`.

    Attributes:
        weights: whole numbers without a common divisor, one for each parent.
        names: what the parents are called; their numbers where they have no names.
    """

    weights: tuple[int, ...]
    names: tuple[Any, ...]

    @functools.cached_property
    def _schedule(self) -> MixingSchedule:
        lengths = [None if parent.length == ENDLESS else parent.length for parent in self.above]
        return MixingSchedule([(0, self.weights)], lengths, FIRST_EXHAUSTED)

    @functools.cached_property
    def length(self) -> int:
        """Up to the first position whose parent has no more elements in its first epoch."""
        length = self._schedule.length
        return ENDLESS if length is None else min(ENDLESS, length)

    def parents_at(self, positions: Positions) -> tuple[NDArray[np.integer[Any]], Positions]:
        """Returns whose turn it is, and how often it was before."""
        return self._schedule.parts[0].locate(positions)

    @property
    def text(self) -> str:
        """The method, with the weights."""
        return f"mix(weights={list(self.weights)})"

    @property
    def shares(self) -> Sequence[tuple[str, float]]:
        """The weights."""
        return [(str(name), weight) for name, weight in zip(self.names, self.weights, strict=True)]

    def words(self) -> Iterator[str]:
        """Yields the weights, by name."""
        yield f"Mixed({dict(zip(self.names, self.weights, strict=True))})"


@dataclasses.dataclass(frozen=True, eq=False)
class Selected(JoiningNode):
    """What a selection map picks from the parents.

    Attributes:
        selection: has `len` and gives, for a position, the number of a parent and a position in it. A list, a tuple or
            an array of shape (n, 2) is the same in each epoch, and picks from that epoch of the parents.
    """

    selection: Any

    @functools.cached_property
    def length(self) -> int:
        """As many as the map has."""
        return len(self.selection)

    @functools.cached_property
    def looks_ahead(self) -> bool:
        """Whether it is a table."""
        return self._table is not None and all(parent.looks_ahead for parent in self.above)

    @functools.cached_property
    def _table(self) -> NDArray[np.int64] | None:
        """The pairs as two rows; None where they have to be asked for one by one."""
        if not isinstance(self.selection, (list, tuple, np.ndarray)):
            return None
        return np.asarray(self.selection, np.int64).reshape(-1, 2).T

    def check(self) -> None:
        """Refuses a table that picks what is not there."""
        if self._table is not None:
            for row, (number, theirs) in enumerate(self._table.T.tolist()):
                self._check_pair(row, number, theirs)

    def parents_at(self, positions: Positions) -> tuple[NDArray[np.integer[Any]], Positions]:
        """Returns what the map says."""
        if self._table is None:
            pairs = [self._picked(position) for position in positions.tolist()]
            numbers, theirs = np.array(pairs, np.int64).reshape(-1, 2).T
            return numbers, theirs
        epochs, offsets = divided(positions, self.length)
        numbers, theirs = self._table[:, offsets]
        lengths = np.array([parent.length for parent in self.above], np.int64)
        return numbers, theirs + (epochs if isinstance(epochs, int) else epochs.view(np.int64)) * lengths[numbers]

    def _picked(self, position: int) -> tuple[int, int]:
        number, theirs = self.selection[position]
        self._check_pair(position, number, theirs)
        return number, theirs

    def _check_pair(self, position: int, number: int, theirs: int) -> None:
        if not 0 <= number < len(self.above) or theirs < 0:
            raise IndexError(
                f"selection_map[{position}] must be the number of a dataset, 0 to {len(self.above) - 1}, and a "
                f"position in it, 0 or above, got {(number, theirs)}."
            )

    @property
    def text(self) -> str:
        """The method."""
        return f"select_from_datasets({self.length} positions)"


@dataclasses.dataclass(frozen=True, eq=False)
class Zipped(Node):
    """Tuples of the elements that the parents have at the same position.

    Attributes:
        above: the parents, of equal length.
    """

    above: tuple[Node, ...]

    @property
    def parents(self) -> tuple[Node, ...]:
        """The parents."""
        return self.above

    @functools.cached_property
    def length(self) -> int:
        """That of each parent."""
        return self.above[0].length

    @functools.cached_property
    def epoch_length(self) -> int:
        """That of the first parent."""
        return self.above[0].epoch_length

    @functools.cached_property
    def is_sparse(self) -> bool:
        """Never: what a parent lacks is a None in the tuple."""
        return False

    def locate(self, positions: Positions) -> Any:
        """Returns what each parent needs."""
        return [parent.locate(positions) for parent in self.above]

    def elements(self, located: Any, start: int, stop: int) -> Sequence[Any]:
        """Returns the tuples."""
        columns = (
            parent.elements(of_parent, start, stop) for parent, of_parent in zip(self.above, located, strict=True)
        )
        return list(zip(*columns, strict=True))

    def at(self, position: int) -> Any:
        """Returns one tuple."""
        return tuple(parent.at(position) for parent in self.above)

    @property
    def text(self) -> str:
        """The class."""
        return "zip"
