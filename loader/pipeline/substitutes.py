"""Records that take the places of those that fail: which ones, and how they get there."""

from collections.abc import Callable
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.loader.pipeline.elements import Elements, Origins, add_note
from millstream.samplers import IndexSampler
from millstream.samplers.balanced import BalancedSampler
from millstream.samplers.base import largest_key
from millstream.samplers.protocols import is_mixed

MAX_SUBSTITUTES = 1000
"""If this many keys in a row fail, the error of the first one is raised."""

Attempt = Callable[[Origins], Elements]
"""Reads records and runs the operations on them; what failed is left out, and listed in `failures`."""


def with_substitutes(run: Elements, names: tuple[Any, ...], attempt: Attempt, keys: "KeyCycle") -> Elements:
    """Returns a run in which every record that failed is replaced by the next key that works.

    The substitute has the position and the index of the record that it replaces: what is drawn at random is the same.

    Args:
        run: what became of the records; a list of those that failed is in `failures`.
        names: the names of the components of a mixture.
        attempt: reads further records and runs the operations on them.
        keys: finds the next key.
    """
    parts, failures, error, end = [run], list(run.failures), run.error, _end_of(run)
    first_errors = {failure.position: failure.error for failure in run.failures}
    table = np.array([failure.origin for failure in run.failures], np.int64).T
    left = Origins(table[:, np.argsort(table[0])], names)
    for _ in range(min(MAX_SUBSTITUTES, keys.count - 1)):
        left = left.take(left.position < end)
        if not len(left):
            break
        left = left.with_keys(keys.following(left.record_key))
        tried = attempt(left)
        parts.append(tried)
        failures += tried.failures
        if tried.error is not None:
            error, end = tried.error, min(end, _end_of(tried))
        left = left.take(np.isin(left.position, [failure.position for failure in tried.failures]))
    left = left.take(left.position < end)
    if len(left):
        end = int(left.position.min())
        error = first_errors[end]
        count = min(MAX_SUBSTITUTES, keys.count - 1)
        add_note(error, f"millstream: cannot replace the record: the next {count} keys fail, too.")
    values = [value for part in parts for value in part.values]
    found = Origins.concatenate([part.origins for part in parts])
    order = np.argsort(found.position, kind="stable")
    order = order[found.position[order] < end]
    whole = Elements([values[row] for row in order.tolist()], found.take(order), error)
    whole.failures = tuple(sorted((one for one in failures if one.position < end), key=lambda one: one.position))
    return whole


def _end_of(run: Elements) -> float:
    """Returns the position at which the error of a run comes."""
    if run.error is None:
        return np.inf
    if run.at is not None:
        return run.at
    known = [*run.origins.position[-1:].tolist(), *(failure.position for failure in run.failures)]
    return max(known, default=-1) + 1


@final
class KeyCycle:
    """The order of the keys in which substitutes are looked for: ascending, and from the last one to the first.

    They are the keys of the sampler: those of an IndexSampler with `keys`, and no others; those of the same component
    in a mixture; else all up to the largest one.

    Args:
        sampler: the sampler.
        num_records: the number of records of its source.

    Attributes:
        count: the number of keys; of a mixture, of its largest component.
    """

    def __init__(self, sampler: Any, num_records: int) -> None:
        self.count: int
        self._parts: list[KeyCycle] = []
        self._chosen: NDArray[np.int64] | None = None
        self._starts = np.zeros(0, np.int64)
        if is_mixed(sampler):
            pairs = zip(sampler.samplers, sampler.source_lengths, strict=True)
            self._parts = [KeyCycle(part, length) for part, length in pairs]
            self._starts = np.cumsum([0, *sampler.source_lengths[:-1]])
            self.count = max(part.count for part in self._parts)
            return
        if isinstance(sampler, BalancedSampler):
            sampler = sampler.order
        if isinstance(sampler, IndexSampler) and sampler.keys is not None:
            self._chosen = np.unique(np.asarray(sampler.keys, np.int64))
        largest = largest_key(sampler)
        self.count = num_records if largest is None else min(num_records, largest + 1)
        if self._chosen is not None:
            self.count = len(self._chosen)

    def following(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the key after each, shape (n,)."""
        if self._parts:
            numbers = np.searchsorted(self._starts, keys, side="right") - 1
            following = keys.copy()
            for number in np.unique(numbers).tolist():
                own, start = numbers == number, self._starts[number]
                following[own] = start + self._parts[number].following(keys[own] - start)
            return following
        if self._chosen is not None:
            chosen: NDArray[np.int64] = self._chosen[np.searchsorted(self._chosen, keys, side="right") % self.count]
            return chosen
        return np.mod(keys + 1, self.count)
