"""What a MapDataset is made of, where a loader can do it by itself: a source, an order, and operations.

So the records are read, and shared with workers, as those of a DataLoader are, and its look-ahead finds their keys.
"""

import dataclasses
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from millstream.dataset.nodes.element_nodes import Mapped, MappedAtRandom, MappedWithIndex
from millstream.dataset.nodes.in_order import InOrder
from millstream.dataset.nodes.index_nodes import IndexNode, Seed
from millstream.dataset.nodes.node import ENDLESS, Node, divided
from millstream.dataset.nodes.source_node import Source
from millstream.record import RecordMetadata
from millstream.samplers.base import check_range
from millstream.transforms import Transformation
from millstream.transforms.seeded_random_map import SeededRandomMap


@final
@dataclasses.dataclass(frozen=True, eq=False)
class NodeOrder:
    """The order in which nodes read the records of a source, as a sampler.

    Attributes:
        nodes: from the last one to the first; what they stand on is a range in the place of the source.
        num_source_records: how many records the source has.
        length: how many positions there are; None where there is no end.
        num_records: how many positions have the same epoch.
    """

    seed = None
    nodes: tuple[IndexNode, ...]
    num_source_records: int
    length: int | None
    num_records: int

    @property
    def largest_key(self) -> int:
        """The last record of the source."""
        return self.num_source_records - 1

    def fingerprint(self) -> str:
        """Returns what decides the order."""
        words = [text for node in reversed(self.nodes) for text in node.words()]
        return " ".join(["order", *(f"node{number}={text}" for number, text in enumerate(words))])

    def __getitem__(self, position: int) -> RecordMetadata:
        return RecordMetadata(position, int(self.record_keys(position, position + 1)[0]), None)

    def record_keys(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the record keys of the positions [start, stop)."""
        check_range(start, stop, self.length)
        return self.record_keys_at(np.arange(start, stop, dtype=np.int64))

    def record_keys_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the record keys of any positions."""
        for node in self.nodes:
            positions = node.parent_positions(positions)
        return divided(positions, self.num_source_records)[1]


class Peeled(NamedTuple):
    """What a loader does.

    Attributes:
        source: what it reads.
        order: in which order.
        operations: what it does with each record.
    """

    source: Any
    order: InOrder | NodeOrder
    operations: tuple[Transformation, ...]


def order_of(node: Node) -> InOrder:
    """Returns the order in which the elements of a node come."""
    return InOrder(None if node.length == ENDLESS else node.length, node.epoch_length)


def peeled(dataset: Any, node: Node) -> Peeled:
    """Returns what a loader does to make the elements of a dataset whose node this is.

    A map may be done after the order is decided: it sees the elements alone. One with indices or draws must come after
    everything that changes positions.
    """
    operations: list[Transformation] = []
    nodes: list[IndexNode] = []
    below = node
    while not isinstance(below, Source):
        if isinstance(below, Mapped) or (isinstance(below, MappedWithIndex) and not nodes):
            operations.append(below.operation)
        elif isinstance(below, MappedAtRandom) and not nodes:
            operations.append(SeededRandomMap(below.operation, below.seed, below.number))
        elif isinstance(below, IndexNode):
            if not isinstance(below, Seed):
                nodes.append(below)
        else:
            return Peeled(dataset, order_of(node), ())
        below = below.parents[0]
    if not below.length:
        return Peeled(dataset, order_of(node), ())
    length = None if node.length == ENDLESS else node.length
    order = NodeOrder(_without_source(nodes, below.length), below.length, length, node.epoch_length)
    return Peeled(below.source, order, tuple(reversed(operations)))


def _without_source(nodes: list[IndexNode], num_records: int) -> tuple[IndexNode, ...]:
    """Returns the same nodes over a range: the source itself travels to workers by another way."""
    parent: Node = Source(range(num_records))
    rebuilt: list[IndexNode] = []
    for node in reversed(nodes):
        parent = dataclasses.replace(node, parent=parent)
        rebuilt.append(parent)
    return tuple(reversed(rebuilt))
