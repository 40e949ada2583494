"""A true global shuffle in O(1) memory: a keyed bijection of [0, n), evaluated at single offsets.

The bijection is a small cipher. An offset is split into a left and a right half, and each round adds to one half a
pseudo-random function of the other. Whatever that function is, a round can be undone, so the whole is a bijection of
left_size x right_size numbers, which are n or a few more. An offset that lands outside [0, n) is enciphered again until
it lands inside ("cycle walking"), so the result is a bijection of [0, n). Both ideas are in Black and Rogaway, "Ciphers
with Arbitrary Finite Domains", CT-RSA 2002. The pseudo-random function is the finaliser of splitmix64 (Steele, Lea,
Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014). The cipher is made to be statistically as good as
a shuffled list, not to keep secrets.

Up to n = 2**32 all arithmetic uses words of 32 bits, because vector units process more of them per instruction. The
pseudo-random function is then a mix of the same form with two constants found by search, such that each input bit flips
each output bit half of the time (Wellons, "Prospecting for Hash Functions", 2018, and the work that followed it).

The reasons for the parameters:

*   right_size is a power of two, so that splitting needs no division. left_size is n / right_size rounded up, so that
    fewer than one number in left_size walks.
*   Halves are added modulo their sizes, not combined by exclusive or. Rotating an even number of values by one is an
    odd permutation, so half of all permutations are odd, also if n is a power of two. Exclusive or on halves of at
    least two bits yields even permutations only.
*   left_size is at most 2**20, or 2**16 with words of 32 bits, so that scaling a random word down to it favours no
    number by more than 2**-16 of its share.
*   The smaller the halves, the less a round mixes, so a small n gets more rounds: 8 above n = 2**11, up to 52 for
    n = 2. With ideal functions, the total variation distance from the uniform distribution over all permutations
    (computed by applying the rounds to that distribution) is below 1e-4 for every n up to 8.
"""

import functools
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from millstream.core.randomness import GOLDEN_GAMMA, mix_words

Wide: TypeAlias = NDArray[np.uint64]
Words: TypeAlias = NDArray[np.unsignedinteger[Any]]
"""Words of 64 bits, or of 32 bits."""

_NARROW_LIMIT = 1 << 32
"""Largest set whose arithmetic uses words of 32 bits."""

_MAX_LEFT_BITS = 20

_CHUNK = 1 << 14
"""Number of offsets enciphered together: intermediate results stay in the processor's cache, and each NumPy call has
enough to do."""

# NumPy's numbers, because converting Python's takes a tenth of the time.
_BY_15, _BY_16 = np.uint32(15), np.uint32(16)
_FACTORS = np.uint32(0x21F0AAAD), np.uint32(0xD35A2D97)

_CACHED_CIPHERS = 4
"""An epoch is enciphered a few thousand offsets at a time, all with the same round keys."""


class _Cipher(NamedTuple):
    """One bijection of [0, left_size << right_bits), or one per value.

    Attributes:
        left_size: the number of values of the left half: an int if all values have one size, or an array of shape (m,).
        left_bits: the bit length of left_size, alike.
        right_bits: the number of bits of the right half, alike.
        keys: the round keys, shape (round_pairs, 2, 1), or (round_pairs, 2, m) for m values.
    """

    left_size: Any
    left_bits: Any
    right_bits: Any
    keys: Words

    def of_values(self, rows: NDArray[np.intp]) -> "_Cipher":
        if self.keys.shape[2] == 1:
            return self
        return _Cipher._make(half if isinstance(half, int) else half[..., rows] for half in self)


def permute(
    offsets: NDArray[np.int64],
    sizes: int | NDArray[np.integer[Any]],
    seeds: int | Wide,
    epochs: int | Wide,
    *,
    inverse: bool = False,
) -> NDArray[np.int64]:
    """Returns the image of each offset under the permutation of [0, size) that its seed and epoch select, shape (m,).

    Args:
        offsets: shape (m,), each at least 0 and below its size.
        sizes: 1 … 2**63; like seeds and epochs, one for all offsets or an array of shape (m,).
        seeds: 0 … 2**64 - 1.
        epochs: 0 … 2**64 - 1.
        inverse: True for the offsets that have these images.
    """
    values = offsets.view(np.uint64)
    landed = np.empty(len(values), dtype=np.uint64)
    for start in range(0, len(values), _CHUNK):
        chunk = slice(start, start + _CHUNK)
        own: Any = (column if isinstance(column, int) else column[chunk] for column in (sizes, seeds, epochs))
        landed[chunk] = _permute_chunk(values[chunk], *own, inverse=inverse)
    return landed.view(np.int64)


def permute_blocks(positions: NDArray[np.int64], size: int, seed: int, *, inverse: bool = False) -> NDArray[np.int64]:
    """Returns positions permuted within each block of `size`, whose number selects the permutation, shape (m,)."""
    blocks = positions // size
    starts = blocks * size
    return starts + permute(positions - starts, size, seed, blocks.view(np.uint64), inverse=inverse)


def permute_one(offset: int, size: int, seed: int, epoch: int) -> int:
    """Returns `permute` of a single offset, computed with Python integers: about fifty times as fast as arrays."""
    left_size, left_bits, right_bits, is_narrow, key_pairs = _scalar_cipher(size, seed, epoch)
    landed = size
    while landed >= size:
        left, right = divmod(offset, 1 << right_bits)
        for left_key, right_key in key_pairs:
            if is_narrow:
                left += _mix_narrow_int(right + left_key) * left_size >> 32
                left %= left_size
                right += _mix_narrow_int(left + right_key) >> 32 - right_bits
            else:
                left += (_mix_wide_int(right + left_key) >> left_bits) * left_size >> 64 - left_bits
                left %= left_size
                right += _mix_wide_int(left + right_key) >> 64 - right_bits
            right &= (1 << right_bits) - 1
        landed = offset = (left << right_bits) + right
    return landed


def _permute_chunk(offsets: Wide, sizes: Any, seeds: Any, epochs: Any, *, inverse: bool) -> Wide:
    if isinstance(sizes, int) and isinstance(seeds, int) and isinstance(epochs, int):
        return _walk(_cipher(sizes, seeds, epochs), offsets, np.uint64(sizes), inverse=inverse)
    # Neighbours are often of one epoch of one set, and then share one computation of their shape and round keys.
    columns = [np.broadcast_to(np.asarray(column, np.uint64), offsets.shape) for column in (sizes, seeds, epochs)]
    is_first = np.zeros(len(offsets), np.bool_)
    is_first[:1] = True
    for column in columns:
        is_first[1:] |= column[1:] != column[:-1]
    firsts = np.flatnonzero(is_first)
    counts = np.diff(firsts, append=len(offsets))
    sizes, seeds, epochs = (column[firsts] for column in columns)
    left_sizes, right_bits, pairs_of_each = _shapes_of(sizes)
    # Sets with the same number of rounds and the same word size are enciphered together.
    kinds = 2 * pairs_of_each + (sizes <= _NARROW_LIMIT)
    landed = np.empty(len(offsets), dtype=np.uint64)
    # Not by np.unique, which imports np.ma, in 9 ms.
    for kind in sorted(set(kinds.tolist())):
        runs: Any = slice(None) if (kinds == kind).all() else kinds == kind
        rows: Any = runs if isinstance(runs, slice) else np.flatnonzero(np.repeat(runs, counts))
        keys = _round_keys(seeds[runs], epochs[runs], kind // 2, is_narrow=bool(kind % 2))
        if (sizes[runs] == sizes[runs][0]).all():
            own_sizes: Any = sizes[runs][0]
            shape: Any = _shape_of(int(own_sizes))[0]
        else:
            own_sizes = np.repeat(sizes[runs], counts[runs])
            shapes = (left_sizes[runs], _bit_lengths(left_sizes[runs]), right_bits[runs])
            shape = [np.repeat(column.astype(keys.dtype), counts[runs]) for column in shapes]
        cipher = _Cipher._make([*shape, np.repeat(keys, counts[runs], axis=2)])
        landed[rows] = _walk(cipher, offsets[rows], own_sizes, inverse=inverse)
    return landed


def _walk(cipher: _Cipher, values: Wide, sizes: Any, *, inverse: bool) -> Wide:
    """Enciphers values, and again those that land outside their sets, until none does."""
    run = _decipher if inverse else _encipher
    landed = run(cipher, values)
    outside = np.flatnonzero(landed >= sizes)
    while outside.size:
        landed[outside] = again = run(cipher.of_values(outside), landed[outside])
        outside = outside[again >= (sizes[outside] if sizes.ndim else sizes)]
    return landed


def _encipher(cipher: _Cipher, values: Wide) -> Wide:
    left_size, left_bits, right_bits, keys = cipher
    left, right, drawn, scratch = _split(cipher, values)
    mask, highest = (1 << right_bits) - 1, int(np.max(right_bits))
    for left_key, right_key in keys:
        np.add(right, left_key, out=drawn)
        _draw_below(left_size, left_bits, drawn, scratch)
        left += drawn
        # Modulo without a division: if left < left_size, the difference wraps around and is huge.
        np.subtract(left, left_size, out=drawn)
        np.minimum(left, drawn, out=left)
        np.add(left, right_key, out=drawn)
        _draw_bits(right_bits, highest, drawn, scratch)
        right += drawn
        right &= mask
    return _join(left, right, right_bits)


def _decipher(cipher: _Cipher, values: Wide) -> Wide:
    left_size, left_bits, right_bits, keys = cipher
    left, right, drawn, scratch = _split(cipher, values)
    mask, highest = (1 << right_bits) - 1, int(np.max(right_bits))
    for left_key, right_key in keys[::-1]:
        np.add(left, right_key, out=drawn)
        _draw_bits(right_bits, highest, drawn, scratch)
        right -= drawn
        right &= mask
        np.add(right, left_key, out=drawn)
        _draw_below(left_size, left_bits, drawn, scratch)
        # If left < drawn, the difference wraps around and is huge, until left_size is added.
        left -= drawn
        np.add(left, left_size, out=drawn)
        np.minimum(left, drawn, out=left)
    return _join(left, right, right_bits)


def _split(cipher: _Cipher, values: Wide) -> tuple[Words, Words, Words, Words]:
    right = values.astype(cipher.keys.dtype)
    left = right >> cipher.right_bits
    right &= (1 << cipher.right_bits) - 1
    return left, right, np.empty_like(left), np.empty_like(left)


def _join(left: Words, right: Words, right_bits: Any) -> Wide:
    left <<= right_bits
    left |= right
    return left.astype(np.uint64, copy=False)


def _mix(words: Words, scratch: Words, num_bits: int) -> None:
    """Replaces each word by its image under a bijection that looks random; only the highest bits are right."""
    if words.dtype.itemsize == 8:
        mix_words(words, scratch)
        return
    words ^= np.right_shift(words, _BY_16, out=scratch)
    words *= _FACTORS[0]
    words ^= np.right_shift(words, _BY_15, out=scratch)
    words *= _FACTORS[1]
    if num_bits > 15:
        words ^= np.right_shift(words, _BY_15, out=scratch)


def _draw_bits(bits: Any, highest: int, words: Words, scratch: Words) -> None:
    """Replaces each word by a pseudo-random number of some bits, at most `highest`."""
    _mix(words, scratch, highest)
    words >>= 8 * words.dtype.itemsize - bits


def _draw_below(size: Any, size_bits: Any, words: Words, scratch: Words) -> None:
    """Replaces each word by a pseudo-random number below size: at most 2**16 for words of 32 bits, else 2**32."""
    if isinstance(size, int) and size == 1 << size_bits - 1:
        # The scaled words are their highest bits.
        _draw_bits(size_bits - 1, size_bits - 1, words, scratch)
        return
    _mix(words, scratch, 32)
    if words.dtype.itemsize == 8:
        words >>= size_bits
        words *= size
        words >>= 64 - size_bits
        return
    # words * size >> 32, by halves of the product, which has 48 bits.
    np.bitwise_and(words, 0xFFFF, out=scratch)
    scratch *= size
    scratch >>= 16
    words >>= 16
    words *= size
    words += scratch
    words >>= 16


def _shapes_of(sizes: Wide) -> tuple[Wide, Wide, NDArray[np.int64]]:
    """Returns the left size, the bits of the right half and the number of pairs of rounds for each size."""
    bits = _bit_lengths(sizes - np.uint64(1)).astype(np.int64)
    right_bits = np.maximum(np.maximum(1, (bits + 1) // 2), bits - _MAX_LEFT_BITS).astype(np.uint64)
    left_sizes = ((sizes - np.uint64(1)) >> right_bits) + np.uint64(1)
    return left_sizes, right_bits, np.maximum(4, 28 - 2 * bits)


def _bit_lengths(words: Wide) -> Wide:
    # By 32 bits at a time, which floating-point numbers hold exactly.
    high, low = (
        np.frexp(half.astype(np.float64))[1] for half in (words >> np.uint64(32), words & np.uint64(2**32 - 1))
    )
    return np.where(high > 0, high + 32, low).astype(np.uint64)


def _round_keys(seeds: Wide, epochs: Wide, round_pairs: int, *, is_narrow: bool) -> Words:
    """Returns random words of shape (round_pairs, 2, m).

    Seed and epoch are hashed one after the other: a mere sum of the two would make epoch e of seed s the same as
    epoch e - 1 of seed s + 1.
    """
    seeded = mix_words(seeds.copy())
    rounds = np.arange(1, 2 * round_pairs + 1, dtype=np.uint64).reshape(round_pairs, 2, 1)
    words: Wide = mix_words(mix_words(rounds * GOLDEN_GAMMA + seeded) + epochs)
    return (words >> np.uint64(32)).astype(np.uint32) if is_narrow else words


@functools.lru_cache(maxsize=_CACHED_CIPHERS)
def _shape_of(size: int) -> tuple[tuple[int, int, int], int]:
    """Returns the left size, its bits and the bits of the right half for one size, and the number of round pairs."""
    left_sizes, right_bits, round_pairs = _shapes_of(np.array([size], np.uint64))
    left_size = int(left_sizes[0])
    return (left_size, left_size.bit_length(), int(right_bits[0])), int(round_pairs[0])


@functools.lru_cache(maxsize=_CACHED_CIPHERS)
def _cipher(size: int, seed: int, epoch: int) -> _Cipher:
    shape, round_pairs = _shape_of(size)
    seeds, epochs = np.array([seed], np.uint64), np.array([epoch], np.uint64)
    return _Cipher(*shape, _round_keys(seeds, epochs, round_pairs, is_narrow=size <= _NARROW_LIMIT))


@functools.lru_cache(maxsize=_CACHED_CIPHERS)
def _scalar_cipher(size: int, seed: int, epoch: int) -> tuple[int, int, int, bool, list[list[int]]]:
    """Returns the same cipher for Python integers, with the pairs of its round keys."""
    left_size, left_bits, right_bits, keys = _cipher(size, seed, epoch)
    return left_size, left_bits, right_bits, keys.dtype.itemsize == 4, keys[:, :, 0].tolist()


def _mix_wide_int(word: int) -> int:
    word &= 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    word = (word ^ word >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return word ^ word >> 31


def _mix_narrow_int(word: int) -> int:
    word &= 0xFFFFFFFF
    word = (word ^ word >> 16) * 0x21F0AAAD & 0xFFFFFFFF
    word = (word ^ word >> 15) * 0xD35A2D97 & 0xFFFFFFFF
    return word ^ word >> 15
