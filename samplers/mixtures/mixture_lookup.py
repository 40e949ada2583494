"""Lookups in the components of a mixture, at positions of their own orders.

`IndexSampler`s are computed together. Each other sampler is called once for all its positions.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeGuard, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.segments import Segments
from millstream.samplers.base import checked_keys_at
from millstream.samplers.index import IndexSampler, SequentialSampler
from millstream.samplers.mixtures.mixture_checks import AbsentComponent
from millstream.samplers.order import by_number
from millstream.samplers.permutation import permute
from millstream.samplers.protocols import is_mixed, is_mixed_and_packed

Answers = Iterator[tuple[int, NDArray[np.intp] | slice, tuple[NDArray[np.int64], Any]]]


@final
class ComponentOrders:
    """The samplers of a mixture, whose sources are concatenated: `offsets` are the keys of their first records.

    If `are_joined`, all components are computed together.
    """

    def __init__(self, names: Sequence[Any], samplers: Sequence[Any], offsets: Sequence[int]) -> None:
        self._names, self._samplers = names, samplers
        self._starts = np.array(offsets, dtype=np.int64)
        # No position of a component that was left out is looked up.
        self._is_joined = np.array([can_join(each) or isinstance(each, AbsentComponent) for each in samplers])
        self._sizes = np.ones(len(samplers), dtype=np.uint64)
        self._seeds = np.zeros(len(samplers), dtype=np.uint64)
        self._is_shuffled = np.zeros(len(samplers), dtype=np.bool_)
        for number, sampler in enumerate(samplers):
            if can_join(sampler):
                self._sizes[number], self._seeds[number] = sampler.num_records, sampler.seed or 0
                self._is_shuffled[number] = sampler.shuffle
        self.are_joined = bool(self._is_joined.all())

    def records(
        self, components: NDArray[np.int64], indices: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns the positions in the innermost orders and the record keys, both of shape (m,)."""
        if self.are_joined:
            return indices, self._joined_keys(components, indices) + self._starts[components]
        keys, innermost = np.empty(len(components), dtype=np.int64), indices.copy()
        is_joined = self._is_joined[components]
        joined, others = np.flatnonzero(is_joined), np.flatnonzero(~is_joined)
        if len(joined):
            keys[joined] = self._joined_keys(components[joined], indices[joined])
        for component, rows, (own_indices, own_keys) in self._ask(components[others], indices[others], _records):
            keys[others[rows]] = own_keys
            if is_mixed(self._samplers[component]):
                innermost[others[rows]] = own_indices
        return innermost, keys + self._starts[components]

    def rows(self, components: NDArray[np.int64], indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], Segments]:
        """Returns the positions in the innermost orders, shape (m,), and the documents of the rows there."""
        innermost, found = indices.copy(), []
        for component, rows, (own_indices, segments) in self._ask(components, indices, _rows):
            innermost[rows] = own_indices
            found.append((rows, segments._replace(elements=segments.elements + self._starts[component])))
        return innermost, Segments.scattered(found)

    def lengths_at(self, record_keys: NDArray[np.int64]) -> NDArray[np.int64]:
        lengths = np.empty(len(record_keys), dtype=np.int64)
        components = np.searchsorted(self._starts, record_keys, side="right") - 1
        for component, rows in by_number(components):
            lengths[rows] = self._samplers[component].lengths_at(record_keys[rows] - self._starts[component])
        return lengths

    def _joined_keys(self, components: NDArray[np.int64], indices: NDArray[np.int64]) -> NDArray[np.int64]:
        # By component, because neighbours of one epoch share most of the work.
        # Sorted as small integers, which takes a tenth of the time.
        order = np.argsort(components.astype(np.min_scalar_type(len(self._names))), kind="stable")
        components, indices = components[order], indices[order]
        sizes = self._sizes[components]
        # A division without signs takes half of the time.
        epochs = indices.view(np.uint64) // sizes
        keys = (indices.view(np.uint64) - epochs * sizes).view(np.int64)
        is_shuffled = self._is_shuffled[components]
        rows = slice(None) if is_shuffled.all() else np.flatnonzero(is_shuffled)
        keys[rows] = permute(keys[rows], sizes[rows], self._seeds[components[rows]], epochs[rows])
        in_order = np.empty_like(keys)
        in_order[order] = keys
        return in_order

    def _ask(
        self,
        components: NDArray[np.int64],
        indices: NDArray[np.int64],
        ask: Callable[[Any, NDArray[np.int64]], tuple[NDArray[np.int64], Any]],
    ) -> Answers:
        for component, rows in by_number(components):
            asked = indices[rows]
            asked.flags.writeable = False
            try:
                answer = ask(self._samplers[component], asked)
            except Exception as error:
                error.add_note(f"millstream: in component {self._names[component]!r} of the mixture.")
                raise
            yield component, rows, answer


def can_join(sampler: object) -> TypeGuard[IndexSampler]:
    """True if the keys of a component are those of an `IndexSampler` without keys of its own."""
    # A subclass may define other keys.
    if type(sampler) not in {IndexSampler, SequentialSampler}:
        return False
    return isinstance(sampler, IndexSampler) and sampler.keys is None


def _records(sampler: Any, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if is_mixed(sampler):
        return sampler.located(positions)[1:]
    return positions, checked_keys_at(sampler, positions)


def _rows(sampler: Any, positions: NDArray[np.int64]) -> tuple[NDArray[np.int64], Segments]:
    if is_mixed_and_packed(sampler):
        return sampler.located_segments(positions)[1:]
    return positions, sampler.segments_at(positions)
