"""The one definition of randomness: which generator a random operation gets at a record.

The stream of random operation `operation` at position `index` of epoch `epoch` under `seed` is numpy's Philox4x64-10
(Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC11) with

    key     = (seed, index)
    counter = (0, 0, epoch, operation)

Philox is a keyed bijection of its 256-bit counter. Drawing advances the two low words of the counter only, so streams
that differ in any of the four numbers never share a block: they differ in the key, or in the high words of the
counter. This holds for neighbouring seeds too: (seed 0, index 1) and (seed 1, index 0) have different keys.

`np.random.Generator` is in quotation marks throughout millstream: looking it up imports numpy.random, which takes as
long as importing all of millstream.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from millstream.checks import as_integer
from millstream.philox_state import at_streams

SEED_LIMIT = 1 << 64
"""Seeds, epochs and indices are below this: each is one word of Philox's key or counter."""


def as_seed(value: object, name: str = "seed") -> int:
    """Returns a seed, or another part of what a stream is keyed by, as a plain int; refuses anything else."""
    seed = as_integer(value, name)
    if not 0 <= seed < SEED_LIMIT:
        raise ValueError(f"{name} must be between 0 and 2**64 - 1, got {seed}.")
    return seed


OF_GROUPS = SEED_LIMIT - 1
"""The number of an operation that no random operation has: streams of groups of elements are none of theirs."""


OF_BATCHES = SEED_LIMIT >> 1
"""The number from which a mixture derives the seed that permutes the rows of global batches."""


class _NoSeed:
    """Replaces the seed that NumPy's generators keep: here there is none, and asking for it is an error that says so.

    Attributes:
        is_asked: whether the generator has been made: until then it is the one that asks.
    """

    def __init__(self) -> None:
        _let_numpy_take_it()
        self.is_asked = False

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        """Returns some words for the generator that is being made; refuses all later calls."""
        if self.is_asked:
            self.spawn(1)
        return np.zeros(n_words, dtype)

    def spawn(self, _: int) -> NoReturn:
        """Refuses: children would have to be further streams, and a record has one for each operation."""
        raise TypeError(
            "The rng of a record is one stream of random numbers and has no seed to make others from. "
            "Draw a seed from it: np.random.default_rng(rng.integers(2**63))."
        )


@functools.cache
def _let_numpy_take_it() -> None:
    """Makes `_NoSeed` one of the classes that NumPy takes for seeds; once, since it slows NumPy's next look."""
    np.random.bit_generator.ISpawnableSeedSequence.register(_NoSeed)


def generator(seed: int, epoch: int, index: int, operation: int = 0) -> "np.random.Generator":
    """Returns a fresh generator at the start of one stream.

    Args:
        seed: the sampler's seed, 0 … 2**64 - 1.
        epoch: the epoch that the position lies in, 0 … 2**64 - 1.
        index: the position, 0 … 2**64 - 1.
        operation: the number of the random operation in the pipeline, counted from 0 over random operations only.
    """
    (restarted,) = at_streams(_new_generator(), np.array([[seed, index, 0, 0, epoch, operation]], dtype=np.uint64))
    return restarted


def _new_generator() -> "np.random.Generator":
    """Returns a generator that is at no stream yet."""
    no_seed = _NoSeed()
    # With a key instead, NumPy leaves the seed None, which means system randomness wherever a seed is taken.
    made = np.random.Generator(np.random.Philox(cast("np.random.SeedSequence", no_seed)))
    no_seed.is_asked = True
    return made


def generators(
    seed: int | NDArray[np.uint64],
    epochs: NDArray[np.integer[Any]],
    indices: NDArray[np.integer[Any]],
    operation: int = 0,
) -> "Iterator[np.random.Generator]":
    """Yields `generator(seed, epoch, index, operation)` for each pair, as one object whose state is set each time.

    The seed is one for all, or an array with one for each.

    Setting a state costs a hundredth of building a generator. The object yielded is therefore valid until the next one
    is asked for; draw from it, do not keep it.
    """
    words = np.zeros((len(indices), 6), dtype=np.uint64)
    words[:, 0], words[:, 1], words[:, 4], words[:, 5] = seed, indices, epochs, operation
    return at_streams(_new_generator(), words)


def generators_from(
    parents: "Iterable[np.random.Generator]", indices: Iterable[int], operation: int = 0
) -> "Iterator[np.random.Generator]":
    """Yields a generator for each parent, the randomness that a custom sampler gave to a position.

    The key is the next two 64-bit words of the parent, the counter (0, 0, index, operation): so random operations at
    one position do not share draws here either. As with `generators`, the object yielded is reused.
    """
    reused = _new_generator()
    for parent, index in zip(parents, indices, strict=True):
        key = parent.integers(0, SEED_LIMIT, size=2, dtype=np.uint64).tolist()
        yield from at_streams(reused, np.array([[*key, 0, 0, index, operation]], dtype=np.uint64))
