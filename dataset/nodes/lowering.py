"""Lowering of a MapDataset to a source, an order and operations, if a loader can run it by itself.

Its records are then read, and shared with workers, like those of a DataLoader, whose look-ahead finds their keys.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from millstream.dataset.nodes.index_nodes import IndexNode
from millstream.dataset.nodes.node import ENDLESS, Node, divided
from millstream.dataset.nodes.source_node import Source
from millstream.record import RecordMetadata
from millstream.samplers.order import positions_between
from millstream.transforms import Transformation


@dataclasses.dataclass(frozen=True)
class InOrder:
    """A sampler whose record key at each position is the position."""

    seed: ClassVar[None] = None
    length: int | None
    """The number of positions; None if there is no end."""
    num_records: int | None
    """The number of positions per epoch; None if there are no epochs."""

    def fingerprint(self) -> str:
        return "in order"

    def __repr__(self) -> str:
        return "in order, endless" if self.length is None else f"in order, {self.length:,} positions"

    def __getitem__(self, position: int) -> RecordMetadata:
        return RecordMetadata(position, int(self.record_keys(position, position + 1)[0]), None)

    def record_keys(self, start: int, stop: int) -> NDArray[np.int64]:
        return self.record_keys_at(positions_between(start, stop, self.length))

    def record_keys_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions


@final
@dataclasses.dataclass(frozen=True, eq=False)
class NodeOrder(InOrder):
    """The order in which nodes read the records of a source, as a sampler.

    Attributes:
        nodes: the nodes, last one first, over a range in place of the source.
        num_source_records: the number of records in the source.
    """

    nodes: tuple[IndexNode, ...]
    num_source_records: int

    def __repr__(self) -> str:
        return "".join(node.text for node in reversed(self.nodes)) or "in order"

    @property
    def largest_key(self) -> int:
        return self.num_source_records - 1

    def fingerprint(self) -> str:
        """Returns the identities of the nodes, which determine the order."""
        identities = [text for node in reversed(self.nodes) for text in node.identities()]
        return " ".join(["order", *(f"node{number}={text}" for number, text in enumerate(identities))])

    def record_keys_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        for node in self.nodes:
            positions = node.parent_positions(positions)
        return divided(positions, self.num_source_records)[1]


class Lowered(NamedTuple):
    """A dataset as a loader runs it."""

    source: Any
    order: InOrder
    operations: tuple[Transformation, ...]


def order_of(node: Node) -> InOrder:
    return InOrder(None if node.length == ENDLESS else node.length, node.epoch_length)


def lower(dataset: Any, node: Node) -> Lowered:
    """Returns the form in which a loader runs a dataset with this node.

    A Map may run after the order is determined, because it sees only the elements. Operations with indices or draws
    must come after all nodes that change positions. Chosen positions stay with the dataset, as saved states name them.
    """
    operations: list[Transformation] = []
    nodes: list[IndexNode] = []
    below = node
    while not isinstance(below, Source):
        operation = below.loader_operation
        if operation is not None and not (nodes and below.sees_positions):
            operations.append(operation)
        elif below.order is not None:
            nodes += below.order
        else:
            return Lowered(dataset, order_of(node), ())
        below = below.parents[0]
    if not below.length:
        return Lowered(dataset, order_of(node), ())
    length = None if node.length == ENDLESS else node.length
    order = NodeOrder(length, node.epoch_length, _without_source(nodes, below.length), below.length)
    return Lowered(below.source, order, tuple(reversed(operations)))


def _without_source(nodes: list[IndexNode], num_records: int) -> tuple[IndexNode, ...]:
    """Returns the same nodes over a range, because the source is sent to workers separately."""
    parent: Node = Source(range(num_records))
    rebuilt: list[IndexNode] = []
    for node in reversed(nodes):
        parent = dataclasses.replace(node, parent=parent)
        rebuilt.append(parent)
    return tuple(reversed(rebuilt))
