"""The seeds of a chain's random operations, and their numbers among the operations with the same seed.

An operation without its own seed uses that of the nearest `.seed(...)` before it. If several parents lead to different
ones, the seeds are combined. Its number counts the operations of its kind before it that draw from the same seed, on
the path with the most of them. Operations in between that draw nothing therefore change nothing.
"""

from millstream.dataset.nodes.element_nodes import MappedAtRandom
from millstream.dataset.nodes.index_nodes import Seed, Shuffle
from millstream.dataset.nodes.node import Node
from millstream.randomness import derive_seed


def nearest_seed(node: Node) -> int | None:
    """Returns the seed for an operation after this node; None if no seed is set before it."""
    if isinstance(node, Seed):
        return node.seed
    found = [seed for parent in node.parents if (seed := nearest_seed(parent)) is not None]
    if not found:
        return None
    combined, *others = found
    if set(others) <= {combined}:
        return combined
    for seed in others:
        combined = derive_seed(combined, seed)
    return combined


def count_random_maps(node: Node, seed: int) -> int:
    """Returns the number of random maps that draw from a seed, from this node upwards."""
    above = max((count_random_maps(parent, seed) for parent in node.parents), default=0)
    return above + (isinstance(node, MappedAtRandom) and node.seed == seed)


def count_shuffles(node: Node, seed: int) -> int:
    """Returns the number of shuffles that took a seed from a `.seed(...)`, from this node upwards."""
    above = max((count_shuffles(parent, seed) for parent in node.parents), default=0)
    return above + (isinstance(node, Shuffle) and node.inherited == seed)
