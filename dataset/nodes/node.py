"""The nodes of a MapDataset: the steps of a chain, from positions to elements.

A node works in two passes. `locate` turns thousands of positions in one call into int64 arrays that the nodes above it
need for reading. `elements` then reads and computes the rows of one block. Permutations and proportions therefore cost
a share of one large NumPy call, and a block is read from each source in one call.
"""

import abc
import dataclasses
import functools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from millstream.dataset.step import Step
from millstream.loader.checkpoints.description import Description, identity_of
from millstream.samplers.order import Occurrences
from millstream.transforms import Transformation

Positions: TypeAlias = NDArray[np.int64]
"""Positions of one dataset, continued across epochs, shape (n,)."""

ENDLESS = sys.maxsize
"""The length of an endless dataset, and the upper bound of all positions."""


class Units(NamedTuple):
    """The units of records that the elements of a dataset are read with, such as row groups of files.

    Attributes:
        sizes: the number of elements of each run of consecutive ones of one unit; int64, shape (runs,).
        numbers: the number of the unit of each run; int64, shape (runs,).
    """

    sizes: NDArray[np.int64]
    numbers: NDArray[np.int64]

    @classmethod
    def of(cls, numbers: NDArray[np.int64]) -> "Units":
        """Returns the runs of elements with the same number, given that of each element."""
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        return cls(np.diff(starts, append=len(numbers)), numbers[starts])

    def at(self, positions: Positions) -> NDArray[np.int64]:
        """Returns the number of the unit of elements of the first epoch."""
        found: NDArray[np.int64] = self.numbers[np.searchsorted(np.cumsum(self.sizes), positions, side="right")]
        return found


@dataclasses.dataclass(frozen=True, eq=False)
class Node(Step):
    """A step of a MapDataset: a pure function from positions to elements. None stands for a missing element.

    Subclasses are frozen dataclasses whose fields determine the elements. Threads share nodes, and nodes are pickled.
    """

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """The number of positions per epoch; ENDLESS if there is no end."""

    @functools.cached_property
    def epoch_length(self) -> int:
        """The number of positions per epoch of random operations: as in a DataLoader, repeating does not change it."""
        return self.length

    @functools.cached_property
    def is_sparse(self) -> bool:
        """True if elements may be missing, judged by the operations alone."""
        return any(parent.is_sparse for parent in self.parents)

    @functools.cached_property
    def differs_by_epoch(self) -> bool:
        """True if a later epoch may have other elements, or the same ones in another order, than the first."""
        return self.reorders or any(parent.differs_by_epoch for parent in self.parents)

    @functools.cached_property
    def is_of_user(self) -> bool:
        """True if it is, or follows, a dataset of a user's own class, any attribute of which may change."""
        return any(parent.is_of_user for parent in self.parents)

    @functools.cached_property
    def is_mixed(self) -> bool:
        """True if a mixture is among the nodes up to the sources."""
        return any(parent.is_mixed for parent in self.parents)

    @functools.cached_property
    def is_repeated(self) -> bool:
        """True if its length depends on a number of epochs, which does not belong to the identity of a chain."""
        return any(parent.is_repeated for parent in self.parents)

    reorders = False
    """True if it brings elements into an order that differs by epoch."""

    @functools.cached_property
    def reordering(self) -> str:
        """The first node, from the source, that reorders elements; "" without one."""
        before = next(filter(None, (parent.reordering for parent in self.parents)), "")
        return before or (self.text if self.reorders else "")

    @functools.cached_property
    def depth(self) -> int:
        """The number of nodes from here up to the source, this one included."""
        return 1 + max((parent.depth for parent in self.parents), default=0)

    @functools.cached_property
    def width(self) -> int:
        """Approximate upper bound on the records per element."""
        return max((parent.width for parent in self.parents), default=1)

    @functools.cached_property
    def breadth(self) -> int:
        """The number of sources that its elements come from."""
        return sum(parent.breadth for parent in self.parents) or 1

    @functools.cached_property
    def reads_one_by_one(self) -> bool:
        """True if each element is read by itself, and not from memory."""
        return all(parent.reads_one_by_one for parent in self.parents)

    @functools.cached_property
    def is_in_memory(self) -> bool:
        """True if all sources below are plain data in memory."""
        return all(parent.is_in_memory for parent in self.parents)

    def line(self) -> "Iterator[Node]":
        """Yields the node, its only parent, and so on, up to a node with no parent or with several."""
        yield self
        if len(self.parents) == 1:
            yield from self.parents[0].line()

    @property
    def order(self) -> tuple[Any, ...] | None:
        """The node itself as a part of a loader's order, nothing if it moves no position; None if it is no part."""
        return None

    @property
    def loader_operation(self) -> Transformation | None:
        """The operation with which a loader computes the same elements; None if there is none."""
        return None

    sees_positions = False
    """True if its elements depend on their positions, so that it must come after all nodes that change positions."""

    is_of_one = False
    """True if each element is made of one element of a parent."""
    passes_on = False
    """True if that element is passed on unchanged."""

    def taken_from(self, positions: Positions) -> "Iterable[tuple[Node, Any, Positions]]":
        """Yields the parents, each with the rows that are made of its elements, and with their positions in it.

        Nothing if an element is made of several of one parent.
        """
        del positions
        return ()

    @functools.cached_property
    def traced(self) -> tuple[Any, ...] | None:
        """The sources, each once, if each element is made of one of their records; None if it is made of several."""
        return _each_once([parent.traced for parent in self.parents]) if self.is_of_one else None

    @functools.cached_property
    def sources(self) -> tuple[Any, ...] | None:
        """The sources, each once, if the elements are their records, unchanged; None if it computes elements."""
        return _each_once([parent.sources for parent in self.parents]) if self.passes_on else None

    def record_keys(self, positions: Positions, starts: Mapping[int, int]) -> Positions:
        """Returns the record keys of positions in the concatenated sources. Only for nodes with `sources`, or `traced`.

        `starts` has the first record key of each source, by its `id`.
        """
        keys = np.empty(len(positions), np.int64)
        for parent, rows, own in self.taken_from(positions):
            keys[rows] = parent.record_keys(own, starts)
        return keys

    def occurrences(self, keys: Positions, starts: Mapping[int, int], stop: int) -> Occurrences:
        """Returns the positions before `stop` whose elements are made of records. Only for nodes that are `traced`.

        The arguments are those of `record_keys`, which it inverts.
        """
        raise NotImplementedError

    @functools.cached_property
    def window_units(self) -> int | None:
        """The number of units that a shuffle of its elements should keep together; None if any order is as fast."""
        return None

    def units(self) -> Units:
        """Returns the units of an epoch's elements. Only for nodes with `window_units`."""
        raise NotImplementedError

    @functools.cached_property
    def looks_ahead(self) -> bool:
        """True if locating many positions in one call is faster than block by block."""
        return all(parent.looks_ahead for parent in self.parents)

    @abc.abstractmethod
    def locate(self, positions: Positions) -> Any:
        """Returns the arrays that `elements` needs for positions, which are not changed."""

    @abc.abstractmethod
    def elements(self, located: Any, start: int, stop: int) -> Sequence[Any]:
        """Returns the elements of the rows [start, stop) of a result of `locate`, None for missing elements.

        An error of the source or of an operation has notes that locate it.
        """

    def at(self, position: int) -> Any:
        """Returns the element at one position, like `elements`, but without arrays if that is faster."""
        return self.elements(self.locate(np.array([position])), 0, 1)[0]

    def identities(self) -> Iterator[str]:
        """Yields descriptions of what determines its elements, without its parents; equal in every process."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        plain = {name: value for name, value in fields.items() if not holds_nodes(value)}
        yield f"{type(self).__name__}({', '.join(f'{name}: {identity_of(value)}' for name, value in plain.items())})"

    def content(self) -> Description:
        """Returns the description of its content, without its parents, including the code of its operation."""
        found = Description()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not holds_nodes(value):
                found.add(f".{field.name}", value)
        return found


def _each_once(sources_of_each: Sequence[tuple[Any, ...] | None]) -> tuple[Any, ...] | None:
    """Returns the sources of all parents, each once; None if a parent has none."""
    if None in sources_of_each:
        return None
    return tuple({id(source): source for sources in sources_of_each for source in sources or ()}.values())


def holds_nodes(value: Any) -> bool:
    """Returns True for a node and for a tuple with nodes."""
    return isinstance(value, Node) or (isinstance(value, tuple) and any(isinstance(item, Node) for item in value))


@dataclasses.dataclass(frozen=True, eq=False)
class UnaryNode(Node):
    """A node with one parent. It has the same number of elements unless its class specifies otherwise."""

    parent: Node
    keeps_units = False
    """True if elements of one unit of the parent stay next to each other."""

    @property
    def parents(self) -> tuple[Node, ...]:
        return (self.parent,)

    @functools.cached_property
    def window_units(self) -> int | None:
        return self.parent.window_units if self.keeps_units else None

    def units(self) -> Units:
        return self.parent.units()

    @functools.cached_property
    def length(self) -> int:
        return self.parent.length

    @functools.cached_property
    def epoch_length(self) -> int:
        return self.parent.epoch_length if self.length == self.parent.length else self.length


def divided(positions: Positions, length: int) -> "tuple[int | NDArray[np.uint64], Positions]":
    """Returns the epochs of positions, one int for all or an array with one per position, and their offsets in them.

    Raises:
        IndexError: the dataset is empty.
    """
    if not positions.size:
        return 0, positions
    if not length:
        raise IndexError(_EMPTY)
    epoch = int(positions.min()) // length
    if int(positions.max()) // length == epoch:
        return epoch, positions - epoch * length if epoch else positions
    epochs = positions // length
    return epochs.view(np.uint64), positions - epochs * length


def divided_one(position: int, length: int) -> tuple[int, int]:
    """Returns the epoch of one position and the offset in it. Raises as `divided` does."""
    if not length:
        raise IndexError(_EMPTY)
    return divmod(position, length)


_EMPTY = "This dataset is empty: it has no element at any position."


def joined(epochs: "int | NDArray[np.uint64]", length: "int | NDArray[np.int64]", offsets: Positions) -> Positions:
    """Returns the positions of offsets, each below `length`, in epochs of that length.

    Raises:
        IndexError: a position is 2**63 or more, or in another epoch than the first one of an endless dataset.
    """
    last = epochs if isinstance(epochs, int) else int(epochs.max(initial=0))
    if not last:
        return offsets
    _check_epoch(last, length if isinstance(length, int) else int(length.max(initial=0)))
    return offsets + (epochs if isinstance(epochs, int) else epochs.view(np.int64)) * length


def joined_one(epoch: int, length: int, offset: int) -> int:
    """Returns the position of one offset in one epoch. Raises as `joined` does."""
    if epoch:
        _check_epoch(epoch, length)
    return epoch * length + offset


def _check_epoch(epoch: int, length: int) -> None:
    if length == ENDLESS:
        raise IndexError(
            f"A part of an endless dataset has one epoch, so epoch {epoch} has no element. Take the part before "
            ".repeat(), or write .repeat(n, reseed_each_epoch=False) after it."
        )
    if (epoch + 1) * length > ENDLESS + 1:
        raise IndexError(f"Epoch {epoch} of a dataset of {length} elements would have positions from 2**63 on.")
