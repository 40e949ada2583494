"""The random generators of random operations, one per element."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from millstream.core.randomness import OF_GROUPS, derive_seed, generators, generators_from
from millstream.loader.operations.elements import Origins
from millstream.samplers.base import AdaptedSampler, VectorisedSampler
from millstream.samplers.order import by_number
from millstream.samplers.protocols import MixedSampler, is_mixed


def streams_of(
    sampler: VectorisedSampler | AdaptedSampler, origins: Origins, operation: int, seed: int | None = None
) -> Iterator["np.random.Generator"]:
    """Yields a generator for each element, given the number of the operation among random operations.

    The generators are those of `seed` if it is given, otherwise the sampler's.
    """
    seed = sampler.seed if seed is None else seed
    if seed is not None:
        epochs = origins.position // (sampler.num_records or np.iinfo(np.int64).max)
        return generators(seed, epochs, origins.index, operation)
    if is_mixed(sampler):
        return _streams_of_mixture(sampler, origins, operation)
    parents = _parents(sampler, origins) if isinstance(sampler, AdaptedSampler) else []
    return generators_from(parents, origins.index.tolist(), operation)


def _streams_of_mixture(mixture: MixedSampler, origins: Origins, operation: int) -> Iterator["np.random.Generator"]:
    """Yields the same generators as the samplers of the components."""
    components, positions = mixture.locate(origins.position)
    # A batch contains only a few of possibly hundreds of components.
    touched, numbers = np.unique(components, return_inverse=True)
    samplers = [mixture.samplers[component] for component in touched.tolist()]
    seeds = [sampler.seed for sampler in samplers]
    if None not in seeds:
        largest = np.iinfo(np.int64).max
        lengths = np.array([min(sampler.num_records or largest, largest) for sampler in samplers], dtype=np.int64)
        all_seeds = np.array(seeds, dtype=np.uint64)
        return generators(all_seeds[numbers], positions // lengths[numbers], origins.index, operation)
    table = origins.table.copy()
    table[0] = positions
    own = {
        component: streams_of(mixture.samplers[component], Origins(table[:, components == component]), operation)
        for component in touched.tolist()
    }
    return (next(own[component]) for component in components.tolist())


def _parents(sampler: AdaptedSampler, origins: Origins) -> Iterator["np.random.Generator"]:
    """Yields the generators of a custom sampler one by one, so that an error is raised at its element."""
    for position in origins.position.tolist():
        (rng,) = sampler.rngs_at([position])
        if rng is None:
            raise ValueError(f"A RandomMap needs randomness, but the sampler gave no rng at position {position}.")
        yield rng


def seed_of(sampler: VectorisedSampler | AdaptedSampler) -> int | None:
    """Returns the seed of draws that do not belong to single records, or None.

    In a mixture, it is derived from the seed of the first component, so components can be added after it.
    """
    if not is_mixed(sampler):
        return sampler.seed
    first = seed_of(sampler.samplers[0])
    return None if first is None else derive_seed(first, OF_GROUPS)


def epochs_at(sampler: VectorisedSampler | AdaptedSampler, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """Returns the epoch of each position; in a mixture, that of the component's own order.

    A sampler without epochs is in its first one everywhere.
    """
    if not is_mixed(sampler):
        largest = np.iinfo(np.int64).max
        return positions // min(sampler.num_records or largest, largest)
    components, own = sampler.locate(positions)
    epochs = np.empty_like(positions)
    for component, rows in by_number(components):
        epochs[rows] = epochs_at(sampler.samplers[component], own[rows])
    return epochs


def has_randomness(sampler: VectorisedSampler | AdaptedSampler) -> bool:
    """Returns True if random operations can draw: the sampler has a seed, or a generator for each position."""
    if is_mixed(sampler):
        return all(map(has_randomness, sampler.samplers))
    return sampler.seed is not None or (isinstance(sampler, AdaptedSampler) and sampler[0].rng is not None)
