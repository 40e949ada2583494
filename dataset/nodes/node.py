"""What a MapDataset does with positions and elements: the nodes that a chain consists of.

A node is read in two passes. `locate` turns positions into what the nodes beneath need in order to read: int64 arrays,
for thousands of positions at once. `elements` then reads and computes, for the rows of one block. So permutations and
proportions cost a share of one large NumPy call, and a block is read from each source in one call.
"""

import abc
import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from millstream.loader.checkpoints.description import Description, identity_of

Positions: TypeAlias = NDArray[np.int64]
"""Positions of one dataset, counted over all its epochs, shape (n,)."""

ENDLESS = sys.maxsize
"""The length of a dataset that has no end; no position is larger than that."""


@dataclasses.dataclass(frozen=True, eq=False)
class Node(abc.ABC):
    """One step of a chain: a pure function from positions to elements, where None says that there is no element.

    Subclasses are frozen dataclasses: their fields are what decides the elements. Nodes are shared by threads, and
    pickled.
    """

    @property
    @abc.abstractmethod
    def parents(self) -> "tuple[Node, ...]":
        """The nodes that this one takes its elements from."""

    @property
    @abc.abstractmethod
    def length(self) -> int:
        """How many positions an epoch has; ENDLESS where there is no end."""

    @functools.cached_property
    def epoch_length(self) -> int:
        """How many positions have the same epoch for random operations: as in a DataLoader, whatever is repeated."""
        return self.length

    @functools.cached_property
    def is_sparse(self) -> bool:
        """Whether some elements may be absent, judged by the operations alone."""
        return any(parent.is_sparse for parent in self.parents)

    @functools.cached_property
    def width(self) -> int:
        """How many records, at most and about, one element is made of."""
        return max((parent.width for parent in self.parents), default=1)

    @functools.cached_property
    def breadth(self) -> int:
        """From how many sources its elements come."""
        return sum(parent.breadth for parent in self.parents) or 1

    @functools.cached_property
    def sources(self) -> tuple[Any, ...] | None:
        """The sources whose records are its elements, just as they are, each once; None where it makes elements."""
        return None

    def record_keys(self, positions: Positions, starts: Mapping[int, int]) -> Positions:
        """Returns the record keys of positions where the sources are laid end to end: of a node that has `sources`.

        Args:
            positions: the positions.
            starts: the first record key of each source, by the identity of the source.
        """
        raise NotImplementedError

    @functools.cached_property
    def looks_ahead(self) -> bool:
        """Whether many positions are located faster at once than block by block."""
        return all(parent.looks_ahead for parent in self.parents)

    @abc.abstractmethod
    def locate(self, positions: Positions) -> Any:
        """Returns what `elements` needs of positions, which are left as they are."""

    @abc.abstractmethod
    def elements(self, located: Any, start: int, stop: int) -> Sequence[Any]:
        """Returns the elements of the rows [start, stop) of what `locate` has returned, None where one is absent.

        Raises:
            Exception: what reading or an operation raises, with notes that say where.
        """

    def __getstate__(self) -> dict[str, Any]:
        # What was computed is computed anew.
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def at(self, position: int) -> Any:
        """Returns the element at one position: what `elements` gives, without arrays where that is quicker."""
        return self.elements(self.locate(np.array([position])), 0, 1)[0]

    @property
    @abc.abstractmethod
    def text(self) -> str:
        """How the chain shows this node, without its parents: `.shuffle(seed=0)`."""

    @property
    def shares(self) -> Sequence[tuple[str, float]]:
        """The names of the parents with their weights or lengths, for a picture; none where each counts alike."""
        return ()

    def words(self) -> Iterator[str]:
        """Yields what of this node, without its parents, decides the elements; equal in every process."""
        fields = [field.name for field in dataclasses.fields(self)]
        shown = {name: getattr(self, name) for name in fields}
        plain = {name: value for name, value in shown.items() if not _holds_nodes(value)}
        yield f"{type(self).__name__}({', '.join(f'{name}: {words_of(value)}' for name, value in plain.items())})"

    def content(self) -> Description:
        """Returns what of this node, without its parents, may decide the elements: the code of its operation."""
        found = Description()
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if not _holds_nodes(value):
                found.add(f".{field.name}", value)
        return found


def _holds_nodes(value: Any) -> bool:
    return isinstance(value, Node) or (isinstance(value, tuple) and any(isinstance(part, Node) for part in value))


def words_of(value: Any) -> str:
    """Returns a value in words that are equal in every process."""
    return identity_of(value)


@dataclasses.dataclass(frozen=True, eq=False)
class UnaryNode(Node):
    """A node with one parent, of as many elements unless its class says otherwise.

    Attributes:
        parent: where its elements come from.
    """

    parent: Node

    @property
    def parents(self) -> tuple[Node, ...]:
        """The parent."""
        return (self.parent,)

    @functools.cached_property
    def length(self) -> int:
        """As many as the parent has."""
        return self.parent.length

    @functools.cached_property
    def epoch_length(self) -> int:
        """The parent's, where there are as many elements."""
        return self.parent.epoch_length if self.length == self.parent.length else self.length


def divided(positions: Positions, length: int) -> "tuple[int | NDArray[np.uint64], Positions]":
    """Returns the epochs of positions, one for all or an array with one for each, and their offsets in them.

    Raises:
        IndexError: there are no elements.
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
    """Returns the epoch of one position, and the offset in it; raises as `divided` does."""
    if not length:
        raise IndexError(_EMPTY)
    return divmod(position, length)


_EMPTY = "This dataset is empty: there is no element at any position."


def joined(epochs: "int | NDArray[np.uint64]", length: int, offsets: Positions) -> Positions:
    """Returns the positions of offsets, each below `length`, in epochs of that length.

    Raises:
        IndexError: a position is 2**63 or more.
    """
    if isinstance(epochs, int):
        if not epochs:
            return offsets
        last = epochs
    else:
        last = int(epochs.max())
    if (last + 1) * length > ENDLESS + 1:
        raise IndexError(f"Epoch {last} of a dataset of {length} elements would have positions from 2**63 on.")
    return offsets + (epochs * length if isinstance(epochs, int) else epochs.view(np.int64) * length)
