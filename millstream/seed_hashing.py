"""Hashes of 64-bit words, and seeds derived from seeds.

A derived seed is a hash of a seed and a number, never their sum, so that neighbouring seeds share no derived seed.
"""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio, odd: the stride of splitmix64."""


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


def derive_seed(seed: int, number: int) -> int:
    """Returns a hash of a seed and a number, both below 2**64."""
    return int(derive_seeds(np.array([seed], dtype=np.uint64), np.array([number], dtype=np.uint64))[0])


def derive_seeds(seeds: Words, numbers: Words) -> Words:
    """Returns `derive_seed` of each pair, in a new array."""
    return mix_words(mix_words(seeds.copy()) + mix_words(numbers ^ GOLDEN_GAMMA))
