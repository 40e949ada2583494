"""The definition of randomness: the generator of a random operation at a record.

The stream of random operation `operation` at position `index` of epoch `epoch` under `seed` is numpy's Philox4x64-10
(Salmon, Moraes, Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC11) with

    key     = (seed, index)
    counter = (0, 0, epoch, operation)

Philox is a keyed bijection of its 256-bit counter. Drawing advances only the two low words of the counter, so streams
that differ in any of the four numbers never share a block: they differ in the key, or in the high words of the
counter. This includes neighbouring seeds: (seed 0, index 1) and (seed 1, index 0) have different keys.

A derived seed is a hash of a seed, a purpose and a number, never their sum, so that neighbouring seeds share no derived
seed, and neither do two purposes.

`np.random.Generator` is in quotation marks throughout millstream, because evaluating it imports numpy.random, which
takes as long as importing all of millstream.
"""

import enum
import functools
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer
from millstream.core.philox_state import at_streams

Words = NDArray[np.uint64]

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio, odd: the stride of splitmix64."""

SEED_LIMIT = 1 << 64
"""Upper bound, exclusive, of seeds, epochs and indices: each is one word of Philox's key or counter."""


def as_seed(value: object, name: str = "seed") -> int:
    """Returns a seed, or another component of a stream's key, as a plain int; refuses anything else."""
    seed = as_integer(value, name, maximum=None)
    if not 0 <= seed < SEED_LIMIT:
        raise ValueError(f"{name} must be between 0 and 2**64 - 1, got {seed}.")
    return seed


OF_GROUPS = SEED_LIMIT - 1
"""The operation number of the streams of groups of elements. No random operation has it."""


class Purpose(enum.IntEnum):
    """The purposes for which a seed is derived from another one. The numbers are part of all streams.

    Each is a domain of its own, so no two purposes derive the same seeds: neither from one seed nor, by the hash, from
    different ones. A seed itself selects the order of an `IndexSampler` and the draws of random operations.
    """

    EPOCH = 1
    """An epoch of `loader.epochs`, by number."""
    COMPONENT = 2
    """A component of the mixture that `load` builds, by number."""
    MIXTURE = 3
    """The draws of a mixture that belong to no single component."""
    ROWS = 4
    """The permutations of the rows of a mixture within global batches."""
    GROUPING = 5
    """An operation that groups elements at random, by its number among those."""
    CHILD_INDEX = 6
    """The index of a child of an element, by number, if indices exceed 63 bits. It is derived from an index."""
    JOINED_SEEDS = 7
    """The seed after datasets with different seeds, from the seed so far and the next one."""
    SHUFFLE = 8
    """A later shuffle of a chain that takes its seed from the same `.seed(...)`, by number."""
    WINDOW_SHUFFLE = 9
    """A later window shuffle of a chain, by number."""
    WINDOWS = 10
    """The permutations within the windows of a window shuffle, by their size."""
    SHARD = 11
    """The choice of `MapDataset.shard` within each group of neighbours, by number."""
    SPLIT_RECORDS = 12
    """The choice of a part for each record in `random_split`."""
    SPLIT_NAMES = 13
    """The choice of a part for each name in `random_split`, by the digest of the name."""
    UNITS = 14
    """The order of units in a hierarchical shuffle."""
    UNIT_RECORDS = 15
    """The order of records within the windows of a hierarchical shuffle."""
    WEIGHTED_SLOTS = 16
    """The order of draws in proportion to weights."""
    WEIGHTED_POINTS = 17
    """The offsets of the points that weighted draws land on, by epoch."""
    BUCKET_BATCHES = 18
    """The order of batches of different lengths."""
    BUCKET_RECORDS = 19
    """The order of records within a class of lengths, by class."""
    PACKED_ROWS = 20
    """The order of rows that are packed in advance."""
    PACKED_EPOCH = 21
    """The random word of an epoch of rows that are packed in advance, by epoch."""
    PACKED_WINDOW = 22
    """The random word of a window of documents, by number, derived from that of the epoch."""
    PACKED_LENGTHS = 23
    """The order of segments of one length, by length, derived from the word of an epoch or window."""
    PACKED_SEGMENTS = 24
    """The order of segments within a row, by row, derived from the word of an epoch or window."""


class _NoSeed:
    """Replaces the seed that NumPy's generators keep. Spawning from it, once in use, is an error with a remedy."""

    def __init__(self) -> None:
        _let_numpy_take_it()
        self.is_used = False

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> NDArray[Any]:
        """Returns words for the generator under construction; refuses later calls."""
        if self.is_used:
            self.spawn(1)
        return np.zeros(n_words, dtype)

    def spawn(self, _: int) -> NoReturn:
        """Refuses, because children would be additional streams, and a record has one stream per operation."""
        raise TypeError(
            "Cannot spawn from the rng of a record: it is one stream of random numbers, without a seed. "
            "Draw a seed from it: np.random.default_rng(rng.integers(2**63))."
        )


@functools.cache
def _let_numpy_take_it() -> None:
    """Registers `_NoSeed` as a seed sequence; once, because it slows down NumPy's next check."""
    np.random.bit_generator.ISpawnableSeedSequence.register(_NoSeed)


def generator(seed: int, epoch: int, index: int, operation: int = 0) -> "np.random.Generator":
    """Returns a new generator at the start of one stream.

    Args:
        seed: the sampler's seed, 0 … 2**64 - 1.
        epoch: the epoch of the position, 0 … 2**64 - 1.
        index: the position, 0 … 2**64 - 1.
        operation: the number of the random operation in the pipeline, from 0, counting random operations only.
    """
    (restarted,) = at_streams(_new_generator(), np.array([[seed, index, 0, 0, epoch, operation]], dtype=np.uint64))
    return restarted


def _new_generator() -> "np.random.Generator":
    """Returns a generator whose stream is not set."""
    no_seed = _NoSeed()
    # With a key instead, NumPy would leave the seed None, which selects system randomness wherever a seed is used.
    made = np.random.Generator(np.random.Philox(cast("np.random.SeedSequence", no_seed)))
    no_seed.is_used = True
    return made


_idle: "deque[np.random.Generator]" = deque(maxlen=64)
"""Generators that have been used, some of which may still be."""


def _unset_generator() -> "np.random.Generator":
    """Returns a generator to which nothing else refers. Making one takes as long as thirty draws."""
    try:
        # Only one of several threads gets it. It has more references if it is still in use, or if a user has kept it.
        made = _idle.pop()
    except IndexError:
        made = _new_generator()
    if _references(made) != _references_of_new():
        made = _new_generator()
    _idle.append(made)
    return made


def _references(made: "np.random.Generator") -> tuple[int, int]:
    # From C, because the interpreter need not count references from its stack.
    return max(map(sys.getrefcount, [made])), max(map(sys.getrefcount, [made.bit_generator]))


@functools.cache
def _references_of_new() -> tuple[int, int]:
    made = _new_generator()
    return _references(made)


def generators(
    seed: int | NDArray[np.uint64],
    epochs: NDArray[np.integer[Any]],
    indices: NDArray[np.integer[Any]],
    operation: int = 0,
) -> "Iterator[np.random.Generator]":
    """Yields `generator(seed, epoch, index, operation)` for each pair, as one object whose state is set each time.

    The seed is common to all, or an array with one per pair.

    Setting a state costs a hundredth of constructing a generator. The yielded object is therefore valid until the next
    one is requested: draw from it, do not keep it.
    """
    words = np.zeros((len(indices), 6), dtype=np.uint64)
    words[:, 0], words[:, 1], words[:, 4], words[:, 5] = seed, indices, epochs, operation
    return at_streams(_unset_generator(), words)


def generators_from(
    parents: "Iterable[np.random.Generator]", indices: Iterable[int], operation: int = 0
) -> "Iterator[np.random.Generator]":
    """Yields a generator for each parent, the random generator that a custom sampler returned for a position.

    The key consists of the next two 64-bit words of the parent, and the counter is (0, 0, index, operation), so random
    operations at one position share no draws. As in `generators`, the yielded object is reused.
    """
    reused = _new_generator()
    for parent, index in zip(parents, indices, strict=True):
        key = parent.integers(0, SEED_LIMIT, size=2, dtype=np.uint64).tolist()
        yield from at_streams(reused, np.array([[*key, 0, 0, index, operation]], dtype=np.uint64))


def mix_words(words: Words, scratch: Words | None = None) -> Words:
    """Replaces each word by its image under the finaliser of splitmix64, a bijection, and returns the same array.

    Args:
        words: any shape; changed in place.
        scratch: memory of the same shape and dtype; None to allocate it.
    """
    scratch = np.empty_like(words) if scratch is None else scratch
    words ^= np.right_shift(words, 30, out=scratch)
    words *= 0xBF58476D1CE4E5B9
    words ^= np.right_shift(words, 27, out=scratch)
    words *= 0x94D049BB133111EB
    words ^= np.right_shift(words, 31, out=scratch)
    return words


@functools.lru_cache(maxsize=512)
def derive_seed(seed: int, purpose: Purpose, number: int = 0) -> int:
    """Returns a hash of a seed, a purpose and a number, which is below 2**64 like the seed."""
    seeds, numbers = np.array([seed], np.uint64), np.array([number], np.uint64)
    return int(derive_seeds(seeds, purpose, numbers)[0])


def derive_seeds(seeds: Words, purpose: Purpose, numbers: Words) -> Words:
    """Returns `derive_seed` of each pair, in a new array. One of the arrays may have shape (1,)."""
    tag = mix_words(np.array([purpose], np.uint64) * GOLDEN_GAMMA)
    domains = mix_words(mix_words(seeds.copy()) + tag)
    return mix_words(domains + mix_words(numbers ^ GOLDEN_GAMMA))
