"""From which seed a random operation of a chain draws, and as which number.

An operation without a seed of its own takes that of the nearest `.seed(...)` above it. Where several parents lead to
several of these, their seeds together make one. Its number counts the operations of its kind above it that draw from
the same seed, on the path that has most of them. So an operation in between that draws nothing changes nothing.
"""

from millstream.dataset.nodes.element_nodes import MappedAtRandom
from millstream.dataset.nodes.index_nodes import Seed, Shuffle
from millstream.dataset.nodes.node import Node
from millstream.seed_hashing import derive_seed


def nearest_seed(node: Node) -> int | None:
    """Returns the seed that an operation after this node takes; None where there is none above it."""
    if isinstance(node, Seed):
        return node.seed
    found = [seed for parent in node.parents if (seed := nearest_seed(parent)) is not None]
    if not found:
        return None
    together, *others = found
    if set(others) <= {together}:
        return together
    for seed in others:
        together = derive_seed(together, seed)
    return together


def count_random_maps(node: Node, seed: int) -> int:
    """Returns how many random maps draw from a seed, from this node upwards."""
    above = max((count_random_maps(parent, seed) for parent in node.parents), default=0)
    return above + (isinstance(node, MappedAtRandom) and node.seed == seed)


def count_shuffles(node: Node, seed: int) -> int:
    """Returns how many shuffles have taken a seed from a `.seed(...)`, from this node upwards."""
    above = max((count_shuffles(parent, seed) for parent in node.parents), default=0)
    return above + (isinstance(node, Shuffle) and node.inherited == seed)
