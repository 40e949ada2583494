"""What the rounds of a shuffle do to words of 64 or 32 bits: arrays of them, in place. `permutation` says why."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Wide = NDArray[np.uint64]
Words = NDArray[np.unsignedinteger[Any]]
"""Of 64 bits each, or of 32 each."""

GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
"""2**64 divided by the golden ratio, odd: the stride of splitmix64."""


def mixed(words: Wide) -> Wide:
    """Returns the same array, with each word replaced by its image under a bijection that looks random."""
    _mix_wide(words, np.empty_like(words))
    return words


def derived(seed: int, number: int) -> int:
    """Returns another seed, which looks unrelated: a hash of the seed and a number, both below 2**64."""
    return int(derived_each(np.array([seed], dtype=np.uint64), np.array([number], dtype=np.uint64))[0])


def derived_each(seeds: Wide, numbers: Wide) -> Wide:
    """Returns `derived` of each pair, in a new array."""
    return mixed(mixed(seeds.copy()) + mixed(numbers ^ GOLDEN_GAMMA))


def narrowed(keys: Wide) -> NDArray[np.uint32]:
    """Returns the keys of rounds for words of 32 bits."""
    return (keys >> np.uint64(32)).astype(np.uint32)


def round_keys(seed: int | Wide, epoch: int | Wide, round_pairs: int) -> Wide:
    """Returns random words of shape (round_pairs, 2, 1), or (round_pairs, 2, m) for m seeds, epochs, or both.

    Seed and epoch go through the mix one after the other: a mere sum of the two would make epoch e of seed s the
    epoch e - 1 of seed s + 1.
    """
    seeded = mixed(np.array(seed, dtype=np.uint64, ndmin=1))
    rounds = np.arange(1, 2 * round_pairs + 1, dtype=np.uint64).reshape(round_pairs, 2, 1)
    of_rounds = mixed(rounds * GOLDEN_GAMMA + seeded)
    return mixed(of_rounds + np.atleast_1d(np.asarray(epoch, dtype=np.uint64)))


def mix(words: Words, scratch: Words) -> Words:
    """Replaces each word by its image under a bijection that looks random, and returns the same array."""
    return _mix_narrow(words, scratch) if words.dtype.itemsize == 4 else _mix_wide(words, scratch)


def draw_below(size: int | Words, size_bits: int | Words, words: Words, scratch: Words) -> None:
    """Replaces each word by a pseudo-random number below size that it determines.

    Args:
        size: one for all words, or one for each; up to 2**16 where words have 32 bits, else up to 2**32.
        size_bits: of how many bits the size is.
        words: the words.
        scratch: memory of the same shape and dtype.
    """
    mix(words, scratch)
    if words.dtype.itemsize == 4:
        _scale_narrow(words, size, scratch)
    else:
        _scale_wide(words, size, size_bits)


def turn_left(left: Words, drawn: Words, left_size: int | Words) -> None:
    """Adds what was drawn, modulo left_size; drawn is scratch afterwards."""
    left += drawn
    # Without a division: where left < left_size, the difference wraps around and is huge.
    np.subtract(left, left_size, out=drawn)
    np.minimum(left, drawn, out=left)


def _mix_wide(words: Words, scratch: Words) -> Words:
    """Replaces each word by its image under the finaliser of splitmix64, a bijection, and returns the same array."""
    words ^= np.right_shift(words, 30, out=scratch)
    words *= 0xBF58476D1CE4E5B9
    words ^= np.right_shift(words, 27, out=scratch)
    words *= 0x94D049BB133111EB
    words ^= np.right_shift(words, 31, out=scratch)
    return words


def _mix_narrow(words: Words, scratch: Words) -> Words:
    """Replaces each word by its image under a bijection that flips all bits evenly, and returns the same array."""
    words ^= np.right_shift(words, 16, out=scratch)
    words *= 0x21F0AAAD
    words ^= np.right_shift(words, 15, out=scratch)
    words *= 0xD35A2D97
    words ^= np.right_shift(words, 15, out=scratch)
    return words


def _scale_wide(words: Words, size: int | Words, size_bits: int | Words) -> None:
    """Replaces random words by numbers below size: their high bits times size, over 2**(how many bits those are)."""
    words >>= size_bits
    words *= size
    words >>= 64 - size_bits


def _scale_narrow(words: Words, size: int | Words, scratch: Words) -> None:
    """Replaces random words by words * size / 2**32, for a size up to 2**16: the product's halves one by one."""
    np.bitwise_and(words, 0xFFFF, out=scratch)
    scratch *= size
    scratch >>= 16
    words >>= 16
    words *= size
    words += scratch
    words >>= 16
