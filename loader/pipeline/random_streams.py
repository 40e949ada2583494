"""Which generator a random operation gets at each element."""

from collections.abc import Iterator

import numpy as np

from millstream.loader.pipeline.elements import Origins
from millstream.randomness import generators, generators_from
from millstream.samplers.base import AdaptedSampler, VectorisedSampler


def streams_of(
    sampler: VectorisedSampler | AdaptedSampler, origins: Origins, operation: int
) -> Iterator["np.random.Generator"]:
    """Yields the generators of random operation number `operation`, counted over random operations, at each element."""
    if sampler.seed is None:
        parents = _parents(sampler, origins) if isinstance(sampler, AdaptedSampler) else []
        return generators_from(parents, origins.index.tolist(), operation)
    epochs = origins.position // (sampler.num_records or np.iinfo(np.int64).max)
    return generators(sampler.seed, epochs, origins.index, operation)


def _parents(sampler: AdaptedSampler, origins: Origins) -> Iterator["np.random.Generator"]:
    """Yields the generators that a custom sampler gives, one by one: an error of its own comes at its element."""
    for position in origins.position.tolist():
        (rng,) = sampler.rngs_at([position])
        if rng is None:
            raise ValueError(f"A RandomMap needs randomness, but the sampler gave no rng at position {position}.")
        yield rng


def has_randomness(sampler: VectorisedSampler | AdaptedSampler) -> bool:
    """Whether random operations can draw: the sampler has a seed, or gives its positions generators of their own."""
    return sampler.seed is not None or (isinstance(sampler, AdaptedSampler) and sampler[0].rng is not None)
