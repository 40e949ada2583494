"""Nodes that reorder or select elements: they map positions to positions, and pass elements on unchanged."""

import abc
import dataclasses
import functools
import itertools
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from millstream.core.randomness import Purpose, derive_seed
from millstream.dataset.nodes.node import (
    ENDLESS,
    Node,
    Positions,
    UnaryNode,
    Units,
    divided,
    divided_one,
    joined,
    joined_one,
)
from millstream.loader.checkpoints.description import Description
from millstream.samplers.order import Occurrences, equal_to
from millstream.samplers.permutation import permute, permute_one

_IDENTIFIED_TOGETHER = 1 << 16
"""The number of positions whose checksum is computed together."""


@dataclasses.dataclass(frozen=True, eq=False)
class IndexNode(UnaryNode):
    """A node whose elements are elements of its parent."""

    is_of_one = passes_on = True

    @abc.abstractmethod
    def parent_positions(self, positions: Positions) -> Positions:
        """Returns the parent's positions for positions of this node."""

    def parent_position(self, position: int) -> int:
        (parent_position,) = self.parent_positions(np.array([position])).tolist()
        return int(parent_position)

    def locate(self, positions: Positions) -> Any:
        return self.parent.locate(self.parent_positions(positions))

    def elements(self, located: Any, start: int, stop: int) -> Sequence[Any]:
        return self.parent.elements(located, start, stop)

    def at(self, position: int) -> Any:
        return self.parent.at(self.parent_position(position))

    @property
    def order(self) -> tuple[Any, ...] | None:
        return (self,)

    def taken_from(self, positions: Positions) -> Iterable[tuple[Node, Any, Positions]]:
        return [(self.parent, slice(None), self.parent_positions(positions))]

    def occurrences(self, keys: Positions, starts: Mapping[int, int], stop: int) -> Occurrences:
        found = self.parent.occurrences(keys, starts, min(ENDLESS, self.parent_stop(stop)))
        owners, positions = self.own_positions(found.positions, stop)
        is_before = positions < stop
        return Occurrences(found.rows[owners][is_before], positions[is_before])

    def parent_stop(self, stop: int) -> int:
        """Returns an end of the parent's positions of the first `stop` positions."""
        if self.parent.length == ENDLESS:
            return int(self.parent_positions(np.arange(min(stop, self.length))).max(initial=-1)) + 1
        return -(-stop // max(1, self.length)) * self.parent.length

    def own_positions(self, positions: Positions, stop: int) -> tuple[Any, Positions]:
        """Returns the positions before `stop` at which elements of the parent are, and the row of each among them.

        It inverts `parent_positions`.
        """
        del stop
        epochs, offsets = np.divmod(positions, self.parent.length)
        owners, own = equal_to(self.parent_positions(np.arange(self.length)), offsets)
        return owners, own + epochs[owners] * self.length


@dataclasses.dataclass(frozen=True, eq=False)
class Shuffle(IndexNode):
    """Shuffles each epoch in its own order: the permutation of an `IndexSampler` with this seed."""

    seed: int
    inherited: int | None = None
    """The seed of the `.seed(...)` that `seed` derives from; None if it has its own."""
    reorders = True

    @functools.cached_property
    def epoch_length(self) -> int:
        return self.length

    def parent_positions(self, positions: Positions) -> Positions:
        return self._permuted(positions)

    def parent_position(self, position: int) -> int:
        epoch, offset = divided_one(position, self.length)
        return joined_one(epoch, self.length, permute_one(offset, self.length, self.seed, epoch))

    def parent_stop(self, stop: int) -> int:
        if self.length == ENDLESS:
            raise TypeError(
                f"Cannot find records after {self.text} of an endless dataset, which has each at too many positions. "
                "Write .shuffle(...) before .repeat()."
            )
        return super().parent_stop(stop)

    def own_positions(self, positions: Positions, stop: int) -> tuple[Any, Positions]:
        del stop
        return slice(None), self._permuted(positions, inverse=True)

    def _permuted(self, positions: Positions, *, inverse: bool = False) -> Positions:
        epochs, offsets = divided(positions, self.length)
        landed = permute(offsets, self.length, self.seed, epochs, inverse=inverse) if offsets.size else offsets
        return joined(epochs, self.length, landed)

    @property
    def text(self) -> str:
        return f".shuffle(seed={self.seed})"

    def identities(self) -> Iterator[str]:
        yield f"Shuffle(seed: {self.seed}, of: {self.length})"


@dataclasses.dataclass(frozen=True, eq=False)
class WindowShuffle(IndexNode):
    """Shuffles each window of an epoch in its own order. The last window may be shorter."""

    window_size: int
    seed: int
    reorders = True

    @functools.cached_property
    def _own_seed(self) -> int:
        """Differs from the seed of a shuffle, so that the orders within windows and epochs are independent."""
        return derive_seed(self.seed, Purpose.WINDOWS, self.window_size)

    def parent_positions(self, positions: Positions) -> Positions:
        return self._permuted(positions)

    def own_positions(self, positions: Positions, stop: int) -> tuple[Any, Positions]:
        del stop
        return slice(None), self._permuted(positions, inverse=True)

    def _permuted(self, positions: Positions, *, inverse: bool = False) -> Positions:
        epochs, offsets = divided(positions, self.length)
        landed = permuted_within(offsets, epochs, self.window_size, self.length, self._own_seed, inverse=inverse)
        return joined(epochs, self.length, landed)

    @property
    def text(self) -> str:
        return f".window_shuffle(window_size={self.window_size}, seed={self.seed})"

    def identities(self) -> Iterator[str]:
        yield f"WindowShuffle(size: {self.window_size}, seed: {self.seed}, of: {self.length})"


def permuted_within(
    offsets: Positions,
    epochs: "int | NDArray[np.uint64]",
    size: int,
    length: int,
    seed: int,
    *,
    inverse: bool = False,
) -> Positions:
    """Returns offsets in epochs of `length` positions, permuted within each window of `size`, or the inverse.

    Windows are numbered over all epochs. The last one of an epoch may be shorter.
    """
    windows, within = np.divmod(offsets, size)
    last = -(-length // size) - 1
    numbers = joined(epochs, last + 1, windows).view(np.uint64)
    landed = np.empty_like(within)
    is_last = windows == last
    for rows, own_size in ((~is_last, size), (is_last, length - last * size)):
        landed[rows] = permute(within[rows], own_size, seed, numbers[rows], inverse=inverse)
    return windows * size + landed


@dataclasses.dataclass(frozen=True, eq=False)
class Shard(IndexNode):
    """One of each `count` neighbours of an epoch. Each group of them has its own order, so that any mixture is even."""

    index: int
    count: int
    seed: int
    reorders = True
    keeps_units = True

    @functools.cached_property
    def length(self) -> int:
        return ENDLESS if self.parent.length == ENDLESS else len(self._rows)

    @property
    def _rows(self) -> range:
        return range(self.index, self.parent.length, self.count)

    def units(self) -> Units:
        """Returns those of every `count`-th element, which is in the same group."""
        return Slice(self.parent, self._rows).units()

    def parent_positions(self, positions: Positions) -> Positions:
        epochs, groups = divided(positions, self.length)
        if groups.size and int(groups.max()) >= ENDLESS // self.count:
            raise IndexError(f"Position {groups.max()} of {self.text} exceeds 2**63 in the dataset before it.")
        offsets = groups * self.count + self.index
        landed = permuted_within(offsets, epochs, self.count, self.parent.length, self.seed)
        return joined(epochs, self.parent.length, landed)

    def parent_stop(self, stop: int) -> int:
        return stop * self.count if self.length == ENDLESS else super().parent_stop(stop)

    def own_positions(self, positions: Positions, stop: int) -> tuple[Any, Positions]:
        del stop
        epochs, offsets = divided(positions, self.parent.length)
        own = permuted_within(offsets, epochs, self.count, self.parent.length, self.seed, inverse=True)
        owners = np.flatnonzero(own % self.count == self.index)
        own_epochs = epochs if isinstance(epochs, int) else epochs[owners]
        return owners, joined(own_epochs, self.length, own[owners] // self.count)

    @property
    def text(self) -> str:
        return f".shard({self.index}, {self.count})"

    def identities(self) -> Iterator[str]:
        yield f"Shard({self.index}, {self.count}, seed: {self.seed}, of: {self.parent.length})"


@dataclasses.dataclass(frozen=True, eq=False)
class Repeat(IndexNode):
    """Joins several epochs into one: the parent's successive ones, or its first one without `reseed_each_epoch`."""

    num_epochs: int | None
    reseed_each_epoch: bool

    @functools.cached_property
    def length(self) -> int:
        if not self.parent.length:
            return 0
        return ENDLESS if self.num_epochs is None else min(ENDLESS, self.parent.length * self.num_epochs)

    @functools.cached_property
    def epoch_length(self) -> int:
        """The parent's, so that random operations draw the same numbers before and after it."""
        return self.parent.epoch_length

    @functools.cached_property
    def is_repeated(self) -> bool:
        return self.num_epochs != 1 or self.parent.is_repeated

    @functools.cached_property
    def differs_by_epoch(self) -> bool:
        return self.reseed_each_epoch and self.parent.differs_by_epoch

    def parent_positions(self, positions: Positions) -> Positions:
        return positions if self.reseed_each_epoch else divided(positions, self.parent.length)[1]

    def parent_position(self, position: int) -> int:
        return position if self.reseed_each_epoch else divided_one(position, self.parent.length)[1]

    def parent_stop(self, stop: int) -> int:
        return stop if self.reseed_each_epoch else min(stop, self.parent.length)

    def own_positions(self, positions: Positions, stop: int) -> tuple[Any, Positions]:
        if self.reseed_each_epoch:
            return slice(None), positions
        size = self.parent.length
        epochs = np.arange(-(-stop // max(1, size)))
        return np.repeat(np.arange(len(positions)), len(epochs)), np.add.outer(positions, epochs * size).ravel()

    @property
    def text(self) -> str:
        number = "" if self.num_epochs is None else str(self.num_epochs)
        options = "" if self.reseed_each_epoch else "reseed_each_epoch=False"
        return f".repeat({', '.join(filter(None, (number, options)))})"

    def identities(self) -> Iterator[str]:
        """Yields nothing if the order is the parent's, because more epochs continue the same stream."""
        if not self.reseed_each_epoch:
            yield f"Repeat(of: {self.parent.length})"


@dataclasses.dataclass(frozen=True, eq=False)
class Slice(IndexNode):
    """Selects positions of each of the parent's epochs."""

    rows: range
    keeps_units = True

    @functools.cached_property
    def length(self) -> int:
        """The number of selected positions; ENDLESS if both the parent and the slice are endless."""
        if self.parent.length == ENDLESS and self.rows and self.rows[-1] + self.rows.step >= ENDLESS:
            return ENDLESS
        return len(self.rows)

    def units(self) -> Units:
        units, rows = self.parent.units(), self.rows if self.rows.step > 0 else self.rows[::-1]
        # The number of rows before the end of each unit.
        ends = np.clip(-((rows.start - np.cumsum(units.sizes)) // rows.step), 0, len(rows))
        sizes = np.diff(ends, prepend=0)
        runs = np.flatnonzero(sizes)[:: 1 if self.rows.step > 0 else -1]
        return Units(sizes[runs], units.numbers[runs])

    def parent_positions(self, positions: Positions) -> Positions:
        epochs, offsets = divided(positions, self.length)
        if offsets.size and int(offsets.max()) >= len(self.rows):
            raise IndexError(f"Position {offsets.max()} of {self.text} exceeds 2**63 in the dataset before it.")
        # A step beyond 64 bits has one row.
        step = self.rows.step if len(self.rows) > 1 else 1
        return joined(epochs, self.parent.length, self.rows.start + offsets * step)

    def parent_position(self, position: int) -> int:
        epoch, offset = divided_one(position, self.length)
        return joined_one(epoch, self.parent.length, self.rows[offset])

    def parent_stop(self, stop: int) -> int:
        if self.parent.length < ENDLESS:
            return super().parent_stop(stop)
        taken = self.rows[: min(stop, len(self.rows))]
        return max(taken[0], taken[-1]) + 1 if taken else 0

    def own_positions(self, positions: Positions, stop: int) -> tuple[Any, Positions]:
        del stop
        epochs, offsets = divided(positions, self.parent.length)
        step = self.rows.step if len(self.rows) > 1 else 1
        numbers, rest = np.divmod(offsets - self.rows.start, step)
        owners = np.flatnonzero((rest == 0) & (numbers >= 0) & (numbers < len(self.rows)))
        own_epochs = epochs if isinstance(epochs, int) else epochs[owners]
        return owners, joined(own_epochs, self.length, numbers[owners])

    @property
    def text(self) -> str:
        stop = "" if self.length == ENDLESS else self.rows.stop
        step = "" if self.rows.step == 1 else f":{self.rows.step}"
        return f"[{self.rows.start}:{stop}{step}]"

    def identities(self) -> Iterator[str]:
        """Yields the rows. More epochs of an endless parent do not change them."""
        stop = "end" if self.length == ENDLESS else len(self.rows)
        yield f"Slice({self.rows.start} {self.rows.step} {stop} of {self.parent.length})"


@dataclasses.dataclass(frozen=True, eq=False)
class Taken(IndexNode):
    """Selects positions of each of the parent's epochs, in any order; they may repeat."""

    rows: Positions
    keeps_units = True
    # They stay with the dataset, as saved states name them.
    order = None

    @functools.cached_property
    def length(self) -> int:
        return len(self.rows)

    @functools.cached_property
    def epoch_length(self) -> int:
        return self.length

    def units(self) -> Units:
        return Units.of(self.parent.units().at(self.rows))

    def parent_positions(self, positions: Positions) -> Positions:
        epochs, offsets = divided(positions, self.length)
        return joined(epochs, self.parent.length, self.rows[offsets])

    def parent_position(self, position: int) -> int:
        epoch, offset = divided_one(position, self.length)
        return joined_one(epoch, self.parent.length, int(self.rows[offset]))

    @property
    def text(self) -> str:
        return f".slice({self.length} positions)"

    def identities(self) -> Iterator[str]:
        """Yields a CRC of all positions, however many: they are the order."""
        return selected_identity(np.int64(0), self.rows)

    def content(self) -> Description:
        return Description()


def selected_identity(numbers: Positions | np.int64, rows: Positions) -> Iterator[str]:
    """Yields the identity of pairs of the number of a parent, or one number for all, and a position in it."""
    crc = 0
    for column in (np.broadcast_to(numbers, rows.shape), rows):
        for start in range(0, len(rows), _IDENTIFIED_TOGETHER):
            crc = zlib.crc32(column[start : start + _IDENTIFIED_TOGETHER].astype("<i8").data, crc)
    yield f"Selected({len(rows)}#{crc:08x})"


@dataclasses.dataclass(frozen=True, eq=False)
class Seed(IndexNode):
    """Sets the seed of the random operations after it that have none of their own."""

    seed: int
    keeps_units = True

    order = ()

    @property
    def given_seed(self) -> int:  # type: ignore[override]  # a constant of each step
        return self.seed

    def parent_positions(self, positions: Positions) -> Positions:
        return positions

    def parent_position(self, position: int) -> int:
        return position

    def parent_stop(self, stop: int) -> int:
        return stop

    def own_positions(self, positions: Positions, stop: int) -> tuple[Any, Positions]:
        del stop
        return slice(None), positions

    @property
    def text(self) -> str:
        return f".seed({self.seed})"

    def identities(self) -> Iterator[str]:
        """Yields nothing, because the operations that draw yield their seeds."""
        yield from ()


@dataclasses.dataclass(frozen=True, eq=False)
class InterleavedRows(IndexNode):
    """Interleaves the rows of concatenated files, one row of each of `cycle_length` files at a time.

    Once a file has ended, the next one replaces it from its next turn on: the order of `InterleaveIterDataset`.
    """

    sizes: tuple[int, ...]
    """The number of rows of each file."""
    cycle_length: int

    @functools.cached_property
    def _table(self) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The runs of positions in which the same files are interleaved.

        Consists of their first positions, shape (runs,); the number of files in each; and the first row of each file
        in the parent, shape (runs, cycle_length).
        """
        files = itertools.pairwise(itertools.accumulate(self.sizes, initial=0))
        # The rows left of the files that are interleaved, in the order of their turns.
        turns = list(itertools.islice(files, self.cycle_length))
        starts, counts, rows, position = [], [], [], 0
        while turns:
            count = len(turns)
            # The run ends at the turn of the first file without more rows.
            length, ended = min(((end - begin) * count + turn, turn) for turn, (begin, end) in enumerate(turns))
            if length:
                starts.append(position)
                counts.append(count)
                rows.append([begin for begin, _ in turns] + [0] * (self.cycle_length - count))
            position += length
            # Each file has had its turn in each whole round, and those before the ended one in the last round.
            rounds = length // count
            turns = [(begin + rounds + (turn < ended), end) for turn, (begin, end) in enumerate(turns)]
            turns = [*turns[ended + 1 :], *turns[:ended], *itertools.islice(files, 1)]
        return np.array(starts), np.array(counts), np.array(rows).reshape(len(rows), self.cycle_length)

    def parent_positions(self, positions: Positions) -> Positions:
        epochs, offsets = divided(positions, self.length)
        if not offsets.size:
            return positions
        starts, counts, rows = self._table
        runs = np.searchsorted(starts, offsets, side="right") - 1
        rounds, turns = np.divmod(offsets - starts[runs], counts[runs])
        return joined(epochs, self.length, rows[runs, turns] + rounds)

    @property
    def text(self) -> str:
        return f".interleave({len(self.sizes)} files, cycle_length={self.cycle_length})"

    def identities(self) -> Iterator[str]:
        yield f"InTurn(sizes: {list(self.sizes)}, cycle_length: {self.cycle_length})"
