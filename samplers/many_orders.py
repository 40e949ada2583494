"""The orders of many `IndexSampler`s asked at once: for each position, that of its own sampler.

A batch of a mixture of a thousand components has a position or none of each. To ask one sampler after the other for so
little would take a hundred times as long as arithmetic on arrays in which each position has the numbers of its sampler:
how many records there are, into which parts they are split, and the keys of the rounds. What is computed is what
`permutation` says: the same rounds, for the sets whose words have 32 bits.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard, final

import numpy as np
from numpy.typing import NDArray

from millstream.samplers.index import IndexSampler, SequentialSampler
from millstream.samplers.permutation import NARROW_LIMIT, narrowed, round_keys, shape_of
from millstream.samplers.rounds import Wide, draw_below_narrow, mix_narrow, turn_left

Narrow = NDArray[np.uint32]


def can_join(sampler: object) -> TypeGuard[IndexSampler]:
    """Whether a sampler is one whose keys `ManyOrders` knows."""
    # Not a subclass, which may say something else of its keys.
    if type(sampler) not in {IndexSampler, SequentialSampler}:
        return False
    return isinstance(sampler, IndexSampler) and sampler.keys is None and sampler.num_records <= NARROW_LIMIT


@final
class ManyOrders:
    """The orders of some samplers, each with a number.

    Args:
        samplers: some of which `can_join` says that they can be asked here, and any others, which are not asked.
    """

    def __init__(self, samplers: Sequence[Any]) -> None:
        self._sizes = np.ones(len(samplers), dtype=np.uint64)
        # As many pairs of rounds as the shuffle has, 0 where there is none.
        self._kinds = np.zeros(len(samplers), dtype=np.int64)
        for number, sampler in enumerate(samplers):
            if can_join(sampler):
                self._sizes[number] = sampler.num_records
                self._kinds[number] = shape_of(sampler.num_records)[2] if sampler.shuffle else 0
        self._shuffles = {
            kind: _Shuffles(samplers, np.flatnonzero(self._kinds == kind), kind)
            for kind in np.unique(self._kinds).tolist()
            if kind
        }

    def record_keys(self, numbers: NDArray[np.intp], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the record keys of positions, shape (m,).

        Args:
            numbers: of which sampler each is.
            positions: in the sampler's own order, before its end.
        """
        sizes = self._sizes[numbers]
        # Without a sign, a division takes half of the time.
        epochs = positions.view(np.uint64) // sizes
        keys: Wide = positions.view(np.uint64) - epochs * sizes
        kinds = self._kinds[numbers]
        for kind, shuffles in self._shuffles.items():
            if (kinds == kind).all():
                return shuffles.landed(numbers, epochs, keys, sizes).view(np.int64)
            rows = np.flatnonzero(kinds == kind)
            keys[rows] = shuffles.landed(numbers[rows], epochs[rows], keys[rows], sizes[rows])
        return keys.view(np.int64)


class _Epochs(NamedTuple):
    """For each sampler an epoch, and what its rounds are keyed by: shape (round_pairs, 2, samplers)."""

    epochs: Wide
    keys: Narrow


@final
class _Shuffles:
    """The permutations of samplers which have equally many rounds."""

    def __init__(self, samplers: Sequence[Any], members: NDArray[np.intp], round_pairs: int) -> None:
        self._round_pairs = round_pairs
        self._seeds = np.zeros(len(samplers), dtype=np.uint64)
        self._left_sizes, self._right_bits = np.ones((2, len(samplers)), dtype=np.uint32)
        for number in members.tolist():
            left_size, right_bits, _ = shape_of(samplers[number].num_records)
            self._left_sizes[number], self._right_bits[number] = left_size, right_bits
            self._seeds[number] = samplers[number].seed
        # Most samplers stay in one epoch for long. Replaced as a whole, so that threads may come at the same time.
        first = np.zeros(len(samplers), dtype=np.uint64)
        self._latest = _Epochs(first, self._keys(self._seeds, first))

    def landed(self, numbers: NDArray[np.intp], epochs: Wide, offsets: Wide, sizes: Wide) -> Wide:
        """Returns where offsets land in the permutations of their samplers, which have some sizes, and epochs."""
        keys = self._keys_of(numbers, epochs)
        left_sizes, right_bits = self._left_sizes[numbers], self._right_bits[numbers]
        landed = _enciphered(offsets, left_sizes, right_bits, keys)
        outside = np.flatnonzero(landed >= sizes)
        while outside.size:
            some = left_sizes[outside], right_bits[outside], keys[:, :, outside]
            landed[outside] = walked = _enciphered(landed[outside], *some)
            outside = outside[walked >= sizes[outside]]
        return landed

    def _keys_of(self, numbers: NDArray[np.intp], epochs: Wide) -> Narrow:
        """Returns what the rounds are keyed by for each position, shape (round_pairs, 2, m)."""
        latest = self._latest
        keys = np.take(latest.keys, numbers, axis=2)
        rows = np.flatnonzero(latest.epochs[numbers] != epochs)
        if rows.size:
            # Samplers have come to a new epoch: within these positions, as a rule, so that some are in the one before.
            self._latest = latest = self._renewed(latest, numbers[rows], epochs[rows])
            keys[:, :, rows] = np.take(latest.keys, numbers[rows], axis=2)
            rows = rows[latest.epochs[numbers[rows]] != epochs[rows]]
        if rows.size:
            keys[:, :, rows] = self._keys(self._seeds[numbers[rows]], epochs[rows])
        return keys

    def _renewed(self, latest: _Epochs, numbers: NDArray[np.intp], epochs: Wide) -> _Epochs:
        """Returns what is known once some samplers, which may repeat, have come to other epochs."""
        now = latest.epochs.copy()
        now[numbers] = epochs
        changed = np.flatnonzero(now != latest.epochs)
        keys = latest.keys.copy()
        keys[:, :, changed] = self._keys(self._seeds[changed], now[changed])
        return _Epochs(now, keys)

    def _keys(self, seeds: Wide, epochs: Wide) -> Narrow:
        return narrowed(round_keys(seeds, epochs, self._round_pairs))


def _enciphered(values: Wide, left_sizes: Narrow, right_bits: Narrow, keys: Narrow) -> Wide:
    """Returns the images of values, each under a bijection of its own: the rounds of `permutation`."""
    left, right = (values >> right_bits).astype(np.uint32), values.astype(np.uint32)
    mask, shift = (np.uint32(1) << right_bits) - np.uint32(1), np.uint32(32) - right_bits
    right &= mask
    drawn, scratch = np.empty_like(left), np.empty_like(left)
    for left_keys, right_keys in keys:
        np.add(right, left_keys, out=drawn)
        draw_below_narrow(left_sizes, drawn, scratch)
        turn_left(left, drawn, left_sizes)
        np.add(left, right_keys, out=drawn)
        mix_narrow(drawn, scratch)
        drawn >>= shift
        right += drawn
        right &= mask
    return left.astype(np.uint64) << right_bits | right
