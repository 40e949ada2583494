"""The seed of an IterDataset's random operation: its own, or that of the nearest `.seed(...)` before it."""

from typing import Any

from millstream.dataset.map_dataset import MapDataset, node_of
from millstream.dataset.nodes.seeds import count_random_maps, nearest_seed
from millstream.randomness import OF_GROUPS, as_seed
from millstream.seed_hashing import derive_seed
from millstream.transforms import RandomMap
from millstream.transforms.grouping import GroupingOperation
from millstream.transforms.seeded_random_map import SeededRandomMap


def seeded(operation: RandomMap[Any, Any], parent: Any, seed: Any) -> SeededRandomMap:
    """Returns a random operation after a dataset, with its seed and its number under that seed.

    Raises:
        ValueError: there is no seed, or it is out of range.
    """
    chosen = _nearest_seed(parent) if seed is None else as_seed(seed)
    if chosen is None:
        raise ValueError(
            "random_map needs a seed, and there is none above it: write .random_map(..., seed=0), or .seed(0) before "
            "it."
        )
    return SeededRandomMap(operation, chosen, _count_random_maps(parent, chosen))


def seeded_group(operation: GroupingOperation, parent: Any) -> GroupingOperation:
    """Returns a grouping operation after a dataset. If it shuffles, it has its own seed or a derived one."""
    chosen = None if operation.seed is not None else _nearest_seed(parent)
    return operation.seeded(0 if chosen is None else derive_seed(chosen, OF_GROUPS - _count_groups(parent)))


def _count_groups(dataset: Any) -> int:
    """Returns the number of grouping operations from this dataset upwards."""
    if isinstance(dataset, MapDataset):
        return 0
    above = max(map(_count_groups, dataset.parents), default=0)
    return above + isinstance(getattr(dataset, "operation", None), GroupingOperation)


def _nearest_seed(dataset: Any) -> int | None:
    """Returns the seed for an operation after this dataset, None if no seed is set before it."""
    if isinstance(dataset, MapDataset):
        return nearest_seed(node_of(dataset))
    own: int | None = getattr(dataset, "given_seed", None)
    if own is not None:
        return own
    found = [seed for parent in dataset.parents if (seed := _nearest_seed(parent)) is not None]
    if len(set(found)) < 2:
        return found[0] if found else None
    combined, *others = found
    for seed in others:
        combined = derive_seed(combined, seed)
    return combined


def _count_random_maps(dataset: Any, seed: int) -> int:
    """Returns the number of random maps that draw from a seed, from this dataset upwards."""
    if isinstance(dataset, MapDataset):
        return count_random_maps(node_of(dataset), seed)
    above = max((_count_random_maps(parent, seed) for parent in dataset.parents), default=0)
    operation = getattr(dataset, "operation", None)
    return above + (isinstance(operation, SeededRandomMap) and operation.seed == seed)
