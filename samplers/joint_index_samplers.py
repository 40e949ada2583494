"""The orders of many `IndexSampler`s asked at once: for each position, that of its own sampler.

A batch of a mixture of a thousand components has a position or none of each. To ask one sampler after the other for so
little would take a hundred times as long as arithmetic on arrays in which each position has the numbers of its sampler:
how many records there are, into which parts they are split, and the keys of the rounds. What is computed is what
`permutation` says: the same rounds, in words of 32 bits or of 64.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard, final

import numpy as np
from numpy.typing import NDArray

from millstream.samplers.index import IndexSampler, SequentialSampler
from millstream.samplers.permutation import NARROW_LIMIT, Cipher, shape_of, walked
from millstream.samplers.rounds import Wide, Words, narrowed, round_keys


def can_join(sampler: object) -> TypeGuard[IndexSampler]:
    """Whether a sampler is one whose keys `ManyOrders` knows."""
    # Not a subclass, which may say something else of its keys.
    if type(sampler) not in {IndexSampler, SequentialSampler}:
        return False
    return isinstance(sampler, IndexSampler) and sampler.keys is None


@final
class ManyOrders:
    """The orders of some samplers, each with a number.

    Args:
        samplers: some of which `can_join` says that they can be asked here, and any others, which are not asked.
    """

    def __init__(self, samplers: Sequence[Any]) -> None:
        self._sizes = np.ones(len(samplers), dtype=np.uint64)
        alike: defaultdict[tuple[int, type[np.unsignedinteger[Any]]], list[int]] = defaultdict(list)
        for number, sampler in enumerate(samplers):
            if can_join(sampler):
                self._sizes[number] = sampler.num_records
                if sampler.shuffle:
                    word = np.uint32 if sampler.num_records <= NARROW_LIMIT else np.uint64
                    alike[shape_of(sampler.num_records)[2], word].append(number)
        self._shuffles = [_Shuffles(samplers, numbers, *kind) for kind, numbers in alike.items()]
        # Which of these each sampler has; a number that none of them has where records come in order.
        self._kinds = np.full(len(samplers), len(alike), dtype=np.int64)
        for kind, numbers in enumerate(alike.values()):
            self._kinds[numbers] = kind

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
        for kind, shuffles in enumerate(self._shuffles):
            if (kinds == kind).all():
                return shuffles.landed(numbers, epochs, keys, sizes).view(np.int64)
            rows = np.flatnonzero(kinds == kind)
            keys[rows] = shuffles.landed(numbers[rows], epochs[rows], keys[rows], sizes[rows])
        return keys.view(np.int64)


class _Epochs(NamedTuple):
    """For each sampler an epoch, and what its rounds are keyed by: shape (round_pairs, 2, samplers)."""

    epochs: Wide
    keys: Words


@final
class _Shuffles:
    """The permutations of samplers which have equally many rounds, in words of one kind.

    Args:
        samplers: all of them.
        members: the numbers of those which have these.
        round_pairs: how many rounds, halved.
        word: the type of the words.
    """

    def __init__(
        self,
        samplers: Sequence[Any],
        members: Sequence[int],
        round_pairs: int,
        word: type[np.unsignedinteger[Any]],
    ) -> None:
        self._round_pairs = round_pairs
        self._word = word
        self._seeds = np.zeros(len(samplers), dtype=np.uint64)
        # The left size, of how many bits it is, and of how many bits the right part is.
        self._parts = np.ones((3, len(samplers)), dtype=word)
        for number in members:
            left_size, right_bits, _ = shape_of(samplers[number].num_records)
            self._parts[:, number] = left_size, left_size.bit_length(), right_bits
            self._seeds[number] = samplers[number].seed
        # Most samplers stay in one epoch for long. Replaced as a whole, so that threads may come at the same time.
        first = np.zeros(len(samplers), dtype=np.uint64)
        self._latest = _Epochs(first, self._keys(self._seeds, first))

    def landed(self, numbers: NDArray[np.intp], epochs: Wide, offsets: Wide, sizes: Wide) -> Wide:
        """Returns where offsets land in the permutations of their samplers, which have some sizes, and epochs."""
        left_sizes, left_bits, right_bits = self._parts[:, numbers]
        cipher = Cipher(left_sizes, left_bits, right_bits, self._keys_of(numbers, epochs))
        return walked(cipher, offsets, sizes)

    def _keys_of(self, numbers: NDArray[np.intp], epochs: Wide) -> Words:
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

    def _keys(self, seeds: Wide, epochs: Wide) -> Words:
        keys = round_keys(seeds, epochs, self._round_pairs)
        return narrowed(keys) if self._word is np.uint32 else keys
