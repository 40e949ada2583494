"""A true global shuffle in O(1) memory: a keyed bijection of [0, n), computed for the offsets that are asked for.

The bijection is a small cipher. An offset is split in two parts, left and right, and each round adds to one part a
pseudo-random function of the other: whatever that function is, a round can be undone, so that the whole is a
bijection of left_size x right_size numbers, which are n or a few more. Where an offset lands outside [0, n), it is
enciphered again until it lands inside ("cycle walking"), which makes it a bijection of [0, n). Both ideas are in
Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002. The pseudo-random function is the finaliser
of splitmix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014). It is made to be
statistically as good as a shuffled list, not to keep secrets.

Up to n = 2**32 all of it is done in words of 32 bits, of which processors handle more at once. The pseudo-random
function is then a mix of the same form with two constants that were found by search, for each bit of the input to flip
each bit of the output as often as not (Wellons, "Prospecting for Hash Functions", 2018, and what followed from it).

Why the numbers are what they are:

*   right_size is a power of two, so that splitting takes no division; left_size is n / right_size rounded up, so that
    fewer than one number in left_size walks.
*   Each part is added to modulo its size, not by exclusive or: rotating an even number of values by one is an odd
    permutation, so that half of all permutations are odd, also where n is a power of two. Exclusive or on parts of
    two bits or more makes even permutations only.
*   left_size is at most 2**20, or 2**16 in words of 32 bits, so that a random word scaled down to it favours no number
    by more than 2**-16 of its share.
*   The smaller the parts, the less a round does, so that small n gets more rounds: 8 above n = 2**11, up to 52 for
    n = 2. With ideal functions, the distance from the uniform distribution over all permutations (total variation,
    computed by applying the rounds to that distribution) is below 1e-4 for every n up to 8.
"""

import dataclasses
import functools
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from millstream.samplers.rounds import (
    Wide,
    Words,
    draw_below,
    mix,
    narrowed,
    round_keys,
    turn_left,
)

NARROW_LIMIT = 1 << 32
"""Up to this many records, all arithmetic is done in words of 32 bits."""

_MOST_LEFT_BITS = 20

_MOST_TABLE_ENTRIES = 1 << 16
"""Larger tables do not stay in a processor's cache, and are no quicker than computing what stands in them."""

_AT_ONCE = 1 << 13

_OFFSETS_WORTH_AN_EPOCH = 512
"""From this many offsets an epoch on, one permutation after the other is quicker than one with keys for each offset."""


def permute(offsets: Wide, num_records: int, seed: int, epoch: int | Wide) -> NDArray[np.int64]:
    """Returns where each offset lands in the permutation of [0, num_records) that seed and epoch select.

    Args:
        offsets: shape (m,), each below num_records; left as they are.
        num_records: 1 … 2**63.
        seed: 0 … 2**64 - 1.
        epoch: 0 … 2**64 - 1; one for all offsets, or an array of shape (m,) with one for each.

    Returns:
        A new array of shape (m,). Offsets that differ under one epoch land on record keys that differ.
    """
    if not isinstance(epoch, int) and len(offsets):
        first, last = int(epoch.min()), int(epoch.max())
        if len(offsets) >= _OFFSETS_WORTH_AN_EPOCH * (last - first + 1):
            return _permute_by_epochs(offsets, num_records, seed, epoch, range(first, last + 1))
    cipher = _cipher(num_records, seed, epoch) if isinstance(epoch, int) else Cipher.of(num_records, seed, epoch)
    return walked(cipher, offsets, num_records).view(np.int64)


def offsets_of(keys: NDArray[np.int64], num_records: int, seed: int, epoch: int | Wide) -> NDArray[np.int64]:
    """Returns the offset that lands on each key: the inverse of `permute`, with the same arguments; a new array."""
    cipher = _cipher(num_records, seed, epoch) if isinstance(epoch, int) else Cipher.of(num_records, seed, epoch)
    images, found = keys.view(np.uint64), np.empty(len(keys), dtype=np.int64)
    # What is known of some thousands stays in a processor's cache.
    for start in range(0, len(keys), _AT_ONCE):
        some = slice(start, start + _AT_ONCE)
        own = cipher if isinstance(epoch, int) else cipher.only(np.arange(len(keys))[some])
        found[some] = walked(own, images[some], num_records, inverse=True).view(np.int64)
    return found


def permute_each(
    offsets: NDArray[np.int64], sizes: NDArray[np.int64], seeds: Wide, *, inverse: bool = False
) -> NDArray[np.int64]:
    """Returns where each offset lands in the permutation of its own set: `permute(offset, size, seed, 0)` of each.

    Args:
        offsets: shape (m,), as are the others; each from 0 on and below its size.
        sizes: the number of elements of each set, 1 … 2**63 - 1.
        seeds: the seed of each set.
        inverse: true for the offsets that land on these numbers.
    """
    landed = np.empty(len(offsets), dtype=np.uint64)
    different, which = np.unique(sizes, return_inverse=True)
    shapes = [shape_of(size) for size in different.tolist()]
    parts = np.array([(left, left.bit_length(), right_bits) for left, right_bits, _ in shapes], dtype=np.uint64)
    kinds = [(round_pairs, size <= NARROW_LIMIT) for size, (*_, round_pairs) in zip(different, shapes, strict=True)]
    # Sets of most sizes have as many rounds in words of one kind.
    for kind in set(kinds):
        is_kind = np.array([each == kind for each in kinds])
        rows = np.flatnonzero(is_kind[which])
        round_pairs, is_narrow = kind
        keys: Words = round_keys(seeds[rows], 0, round_pairs)
        own = parts[which[rows]].T
        if is_narrow:
            keys, own = narrowed(keys), own.astype(np.uint32)
        cipher = Cipher(own[0], own[1], own[2], keys)
        values, limits = offsets[rows].view(np.uint64), sizes[rows].view(np.uint64)
        landed[rows] = walked(cipher, values, limits, inverse=inverse)
    return landed.view(np.int64)


def permute_one(offset: int, num_records: int, seed: int, epoch: int) -> int:
    """Returns what `permute` returns for a single offset, in Python's integers: about fifty times as fast as arrays."""
    cipher = _cipher(num_records, seed, epoch)
    landed = cipher.encipher_one(offset)
    while landed >= num_records:
        landed = cipher.encipher_one(landed)
    return landed


def walked(cipher: "Cipher", values: Wide, sizes: int | Wide, *, inverse: bool = False) -> Wide:
    """Returns where values land within their sizes, or from where they do, in a new array."""
    landed = (cipher.decipher if inverse else cipher.encipher)(values)
    outside = np.flatnonzero(landed >= sizes)
    while outside.size:
        some = cipher.only(outside)
        landed[outside] = again = (some.decipher if inverse else some.encipher)(landed[outside])
        outside = outside[again >= (sizes if isinstance(sizes, int) else sizes[outside])]
    return landed


def _permute_by_epochs(
    offsets: Wide, num_records: int, seed: int, epoch_of_each: Wide, epochs: range
) -> NDArray[np.int64]:
    landed = np.empty(len(offsets), dtype=np.int64)
    for epoch in epochs:
        rows = np.flatnonzero(epoch_of_each == epoch)
        landed[rows] = permute(offsets[rows], num_records, seed, epoch)
    return landed


@dataclasses.dataclass(frozen=True, eq=False)
class Cipher:
    """One bijection of [0, left_size << right_bits), or one for each of the values.

    Attributes:
        left_size: how many numbers the left part can be; a number, or an array with one for each value.
        left_bits: of how many bits that is.
        right_bits: of how many bits the right part is.
        keys: what the rounds are keyed by, shape (round_pairs, 2, 1), or (round_pairs, 2, m) for m values.
    """

    left_size: Any
    left_bits: Any
    right_bits: Any
    keys: Words

    @classmethod
    def of(cls, num_records: int, seed: int, epoch: int | Wide) -> Self:
        """Returns the cipher whose walk within [0, num_records) is the permutation that seed and epoch select."""
        left_size, right_bits, round_pairs = shape_of(num_records)
        keys: Words = round_keys(seed, epoch, round_pairs)
        if num_records <= NARROW_LIMIT:
            keys = narrowed(keys)
        return cls(left_size, left_size.bit_length(), right_bits, keys)

    def only(self, which: NDArray[np.intp]) -> Self:
        """Returns the cipher for some of the values."""
        if self.keys.shape[2] == 1:
            return self
        own = (
            self
            if isinstance(self.left_size, int)
            else dataclasses.replace(
                self,
                left_size=self.left_size[which],
                left_bits=self.left_bits[which],
                right_bits=self.right_bits[which],
            )
        )
        return dataclasses.replace(own, keys=self.keys[:, :, which])

    def encipher(self, values: Wide) -> Wide:
        """Returns the images of values.

        Where the parts are so small that all numbers which they can be are fewer than the values, what the rounds add
        is computed for all those numbers first, once for the whole epoch, and then looked up.
        """
        if self.keys.shape[2] == 1 and self.left_size + (1 << self.right_bits) <= min(len(values), _MOST_TABLE_ENTRIES):
            return self._encipher_by_tables(values)
        left, right, drawn, scratch = self._split(values)
        mask, shift = (1 << self.right_bits) - 1, 8 * self.keys.dtype.itemsize - self.right_bits
        for left_key, right_key in self.keys:
            np.add(right, left_key, out=drawn)
            draw_below(self.left_size, self.left_bits, drawn, scratch)
            turn_left(left, drawn, self.left_size)
            np.add(left, right_key, out=drawn)
            mix(drawn, scratch)
            drawn >>= shift
            right += drawn
            right &= mask
        return _joined(left.astype(np.uint64, copy=False), right, self.right_bits)

    def decipher(self, values: Wide) -> Wide:
        """Returns the values that have these images: the rounds backwards."""
        left, right, drawn, scratch = self._split(values)
        mask, shift = (1 << self.right_bits) - 1, 8 * self.keys.dtype.itemsize - self.right_bits
        for left_key, right_key in self.keys[::-1]:
            np.add(left, right_key, out=drawn)
            mix(drawn, scratch)
            drawn >>= shift
            right -= drawn
            right &= mask
            np.add(right, left_key, out=drawn)
            draw_below(self.left_size, self.left_bits, drawn, scratch)
            # Where left < drawn, the difference wraps around and is huge, until left_size is added.
            left -= drawn
            np.add(left, self.left_size, out=drawn)
            np.minimum(left, drawn, out=left)
        return _joined(left.astype(np.uint64, copy=False), right, self.right_bits)

    def _split(self, values: Wide) -> tuple[Words, Words, Words, Words]:
        """Returns the two parts of values, and memory for two more."""
        left = (values >> self.right_bits).astype(self.keys.dtype, copy=False)
        right = values.astype(self.keys.dtype)
        right &= (1 << self.right_bits) - 1
        return left, right, np.empty_like(left), np.empty_like(left)

    def encipher_one(self, value: int) -> int:
        """Returns the image of a single value: the same rounds as in `encipher`."""
        is_narrow = self.keys.dtype.itemsize == 4
        right_size = 1 << self.right_bits
        left, right = divmod(value, right_size)
        for left_key, right_key in _round_key_pairs(self):
            if is_narrow:
                left += _mixed_narrow(right + left_key) * self.left_size >> 32
                left %= self.left_size
                right += _mixed_narrow(left + right_key) >> 32 - self.right_bits
            else:
                left += (_mixed_wide(right + left_key) >> self.left_bits) * self.left_size >> 64 - self.left_bits
                left %= self.left_size
                right += _mixed_wide(left + right_key) >> 64 - self.right_bits
            right %= right_size
        landed: int = left * right_size + right
        return landed

    def _encipher_by_tables(self, values: Wide) -> Wide:
        """Returns the same as `encipher`."""
        left, right = values >> np.uint64(self.right_bits), values & np.uint64((1 << self.right_bits) - 1)
        drawn = np.empty_like(left)
        for left_row, right_row in _tables(self):
            # Nothing wraps: it is the mode in which NumPy neither checks the indices first nor copies the outcome.
            np.take(left_row, right.view(np.int64), out=drawn, mode="wrap")
            turn_left(left, drawn, self.left_size)
            np.take(right_row, left.view(np.int64), out=drawn, mode="wrap")
            right += drawn
            right &= (1 << self.right_bits) - 1
        return _joined(left, right, self.right_bits)


_EPOCHS_KEPT = 4

_cipher = functools.lru_cache(maxsize=_EPOCHS_KEPT)(Cipher.of)
"""An epoch is enciphered a few thousand offsets at a time, all with the same keys and tables."""


@functools.lru_cache(maxsize=_EPOCHS_KEPT)
def _tables(cipher: Cipher) -> list[tuple[Wide, Wide]]:
    """For each pair of rounds, what it adds on the left to each number on the right, and the other way round."""
    left_table = np.arange(1 << cipher.right_bits, dtype=cipher.keys.dtype) + cipher.keys[:, 0]
    right_table = np.arange(cipher.left_size, dtype=cipher.keys.dtype) + cipher.keys[:, 1]
    draw_below(cipher.left_size, cipher.left_bits, left_table, np.empty_like(left_table))
    mix(right_table, np.empty_like(right_table))
    right_table >>= 8 * right_table.dtype.itemsize - cipher.right_bits
    return list(zip(left_table.astype(np.uint64), right_table.astype(np.uint64), strict=True))


@functools.lru_cache(maxsize=_EPOCHS_KEPT)
def _round_key_pairs(cipher: Cipher) -> list[list[int]]:
    """Returns what the rounds of a cipher for one epoch are keyed by, as Python's integers."""
    pairs: list[list[int]] = cipher.keys[:, :, 0].tolist()
    return pairs


def _mixed_wide(word: int) -> int:
    """Returns the image of a word, modulo 2**64, under the bijection of `mix`."""
    word &= 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return word ^ word >> 31


def _mixed_narrow(word: int) -> int:
    """Returns the image of a word, modulo 2**32, under the bijection of `mix`."""
    word &= 0xFFFFFFFF
    word = (word ^ word >> 16) * 0x21F0AAAD & 0xFFFFFFFF
    word = (word ^ word >> 15) * 0xD35A2D97 & 0xFFFFFFFF
    return word ^ word >> 15


def shape_of(num_records: int) -> tuple[int, int, int]:
    """Returns how many numbers the left part can be, of how many bits the right one is, and how many rounds, halved."""
    bits = (num_records - 1).bit_length()
    right_bits = max(1, (bits + 1) // 2, bits - _MOST_LEFT_BITS)
    return ((num_records - 1) >> right_bits) + 1, right_bits, max(4, 28 - 2 * bits)


def _joined(left: Wide, right: Words, right_bits: int) -> Wide:
    """Returns the numbers of which these are the parts, in the memory of the left ones."""
    left <<= right_bits
    left |= right
    return left
