"""The seeds of a chain's random operations, and their numbers among the operations with the same seed.

An operation without its own seed uses that of the nearest `.seed(...)` before it. If several parents lead to different
ones, the seeds are combined. Its number counts the operations of its kind before it that draw from the same seed, on
the path with the most of them. Operations in between that draw nothing therefore change nothing.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

from millstream.dataset.nodes.element_nodes import MappedAtRandom
from millstream.dataset.nodes.index_nodes import Seed, Shuffle
from millstream.dataset.nodes.node import Node
from millstream.randomness import derive_seed


def nearest_seed(node: Node) -> int | None:
    """Returns the seed for an operation after this node; None if no seed is set before it."""
    if isinstance(node, Seed):
        return node.seed
    return combined(seed for parent in node.parents if (seed := nearest_seed(parent)) is not None)


def combined(seeds: Iterable[int]) -> int | None:
    """Returns one seed for those that the parents of a dataset lead to; None if there are none."""
    found = list(seeds)
    return functools.reduce(derive_seed, found) if len(set(found)) > 1 else next(iter(found), None)


def count_random_maps(node: Node, seed: int) -> int:
    """Returns the number of random maps that draw from a seed, from this node upwards."""
    return longest_count(node, lambda one: isinstance(one, MappedAtRandom) and one.seed == seed)


def count_shuffles(node: Node, seed: int) -> int:
    """Returns the number of shuffles that took a seed from a `.seed(...)`, from this node upwards."""
    return longest_count(node, lambda one: isinstance(one, Shuffle) and one.inherited == seed)


def longest_count(node: Any, counts: Callable[[Any], bool]) -> int:
    """Returns the number of nodes, or datasets, that count, on the path upwards with the most of them."""
    return counts(node) + max((longest_count(parent, counts) for parent in node.parents), default=0)
