"""Substitutes for records that fail."""

from collections.abc import Callable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.loader.operations.elements import Elements, Origins, add_note
from millstream.samplers import HierarchicalSampler, IndexSampler
from millstream.samplers.balanced import BalancedSampler
from millstream.samplers.base import largest_key
from millstream.samplers.protocols import is_mixed

MAX_SUBSTITUTES = 1000
"""After this many consecutive failing keys, the error of the first one is raised."""

Attempt = Callable[[Origins], Elements]
"""A function that reads records and runs the operations on them. Failed records are omitted, and are in `failures`."""


def with_substitutes(run: Elements, names: tuple[Any, ...], attempt: Attempt, keys: "KeyCycle") -> Elements:
    """Replaces each record that failed in a run by the next key that works.

    A substitute has the position and index of the record that it replaces, and so the same random draws. `names` are
    those of the components of a mixture.
    """
    runs, failures, error, end = [run], list(run.failures), run.error, _end_of(run)
    first_errors = {failure.position: failure.error for failure in run.failures}
    table = np.array([failure.origin for failure in run.failures], np.int64).T
    left = Origins(table[:, np.argsort(table[0])], names)
    for _ in range(min(MAX_SUBSTITUTES, keys.count - 1)):
        left = left.take(left.position < end)
        if not len(left):
            break
        left = left.with_keys(keys.following(left.record_key))
        tried = attempt(left)
        runs.append(tried)
        failures += tried.failures
        if tried.error is not None:
            error, end = tried.error, min(end, _end_of(tried))
        left = left.take(np.isin(left.position, [failure.position for failure in tried.failures]))
    left = left.take(left.position < end)
    if len(left):
        end = int(left.position.min())
        error = first_errors[end]
        count = min(MAX_SUBSTITUTES, keys.count - 1)
        add_note(error, f"millstream: cannot replace the record: the next {count} keys also fail.")
    values = [value for run in runs for value in run.values]
    found = Origins.concatenate([run.origins for run in runs])
    order = np.argsort(found.position, kind="stable")
    order = order[found.position[order] < end]
    result = Elements([values[row] for row in order.tolist()], found.take(order), error)
    before_end = (failure for failure in failures if failure.position < end)
    result.failures = tuple(sorted(before_end, key=lambda failure: failure.position))
    return result


def _end_of(run: Elements) -> float:
    if run.error is None:
        return np.inf
    if run.at is not None:
        return run.at.position
    known = [*run.origins.position[-1:].tolist(), *(failure.position for failure in run.failures)]
    return max(known, default=-1) + 1


@final
class KeyCycle:
    """The order in which keys are tried as substitutes: ascending, and from the last one to the first.

    The keys are those of the sampler: only the given ones of an IndexSampler with `keys`, those of the same component
    in a mixture, otherwise all keys up to the largest one.

    Attributes:
        count: the number of keys; in a mixture, of its largest component.
    """

    def __init__(self, sampler: Any, num_records: int) -> None:
        self.count: int
        self._components: list[KeyCycle] = []
        self._chosen: NDArray[np.int64] | None = None
        self._starts = np.zeros(0, np.int64)
        if is_mixed(sampler):
            pairs = zip(sampler.samplers, sampler.source_lengths, strict=True)
            self._components = [KeyCycle(component, length) for component, length in pairs]
            self._starts = np.cumsum([0, *sampler.source_lengths[:-1]])
            self.count = max(component.count for component in self._components)
            return
        if isinstance(sampler, BalancedSampler):
            sampler = sampler.order
        if isinstance(sampler, IndexSampler | HierarchicalSampler) and sampler.keys is not None:
            self._chosen = np.unique(np.asarray(sampler.keys, np.int64))
        largest = largest_key(sampler)
        self.count = num_records if largest is None else min(num_records, largest + 1)
        if self._chosen is not None:
            self.count = len(self._chosen)

    def following(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._components:
            numbers = np.searchsorted(self._starts, keys, side="right") - 1
            following = keys.copy()
            for number in np.unique(numbers).tolist():
                own, start = numbers == number, self._starts[number]
                following[own] = start + self._components[number].following(keys[own] - start)
            return following
        if self._chosen is not None:
            chosen: NDArray[np.int64] = self._chosen[np.searchsorted(self._chosen, keys, side="right") % self.count]
            return chosen
        return np.mod(keys + 1, self.count)
