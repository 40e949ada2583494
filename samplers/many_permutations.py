"""Many small permutations at once: for each number, that of its own set, whatever sizes the sets have.

`permutation` is for many offsets into one set, and is faster there. Here each number has a size and a key of its own.
It is split into two parts below sizes of which the product is the set's size or a little more, and each round adds to
one part a pseudo-random function of the other, modulo its size; where a number lands outside of its set, it walks on.
So it is a bijection of each set, for the reasons given there.
"""

import numpy as np
from numpy.typing import NDArray

from millstream.samplers.rounds import mixed

Wide = NDArray[np.uint64]

_ROUNDS = 12
_STEP = np.uint64(0xD1B54A32D192ED03)
"""An odd number without a pattern, which sets the rounds apart."""


def permute_among(numbers: NDArray[np.int64], sizes: NDArray[np.int64], keys: Wide) -> NDArray[np.int64]:
    """Returns where each number lands in the permutation of its set; all of shape (m,).

    Args:
        numbers: each from 0 on and below its size.
        sizes: how many numbers each set has, 1 … 2**62.
        keys: which permutation: random words. Numbers of one set must come with one size and one key.
    """
    landed = numbers.astype(np.uint64)
    limits = sizes.astype(np.uint64)
    left_sizes = np.ceil(np.sqrt(sizes)).astype(np.uint64)
    right_sizes = (limits + left_sizes - np.uint64(1)) // left_sizes
    walking = np.arange(len(numbers))
    while len(walking):
        landed[walking] = _once(landed[walking], left_sizes[walking], right_sizes[walking], keys[walking])
        walking = walking[landed[walking] >= limits[walking]]
    return landed.astype(np.int64)


def _once(values: Wide, left_sizes: Wide, right_sizes: Wide, keys: Wide) -> Wide:
    left, right = np.divmod(values, right_sizes)
    keys = keys.copy()
    for _ in range(_ROUNDS // 2):
        left = _added(left, right, left_sizes, keys)
        right = _added(right, left, right_sizes, keys)
    return left * right_sizes + right


def _added(part: Wide, other: Wide, sizes: Wide, keys: Wide) -> Wide:
    """Returns a part after a round; the keys move on to the next one."""
    keys += _STEP
    # Sizes are below 2**32: the upper half of a random word, scaled.
    part = part + ((mixed(other + keys) >> np.uint64(32)) * sizes >> np.uint64(32))
    return np.where(part >= sizes, part - sizes, part)
