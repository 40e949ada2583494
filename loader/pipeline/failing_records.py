"""Records that fail, with `on_error="skip"`.

A record fails with an Exception that is raised for it by the source, or by an operation before the first one that
gathers elements. The error of a Batch or packer belongs to no single record. It is raised, and so are MemoryError and
KeyboardInterrupt.

If no operation before the first Batch drops, splits or regroups, records keep their positions. A record that fails is
then replaced by the next key that works, in key order. Otherwise, all elements of the record are dropped. Both are pure
functions of the record: threads, workers and call sizes do not matter.

A failure is counted once it is delivered to the training loop, not when a thread or worker finds it in advance. Those
in a remainder that a Batch drops are never delivered.

If all records fail, that is an error, because an endless stream would have no next element. All have failed if so many
did in consecutive blocks without an element. Blocks count, not calls, because a stream can be resumed at a block.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.signals import is_from_signal_handler
from millstream.core.warn import log_warning
from millstream.loader.pipeline.calls import Cursor, Outputs, Position
from millstream.loader.pipeline.elements import Elements, FailedRecord, Location, Origins, SourceEnded, add_note
from millstream.loader.pipeline.pipeline import Tolerance
from millstream.samplers.balanced import BalancedSampler
from millstream.samplers.base import AdaptedSampler, VectorisedSampler, is_mixed, largest_key
from millstream.samplers.order import EpochSampler, KeyCycles
from millstream.transforms.of_chains import AbsentElement

MAX_TEXTS = 10_000
"""The number of failures whose texts are kept, the latest ones."""


def is_of_record(error: BaseException) -> bool:
    """Returns True if an exception is the failure of one record, not of the machine, the stream's end or the user."""
    is_other = isinstance(error, MemoryError | SourceEnded | AbsentElement)
    return isinstance(error, Exception) and not is_other and not is_from_signal_handler(error)


def without_failures(make: Callable[[Elements], Elements], run: Elements, failed: list[FailedRecord]) -> Elements:
    """Applies a step, or the reading, to a run without the records that fail in it, which are appended to `failed`.

    `make` stops at the first error.
    """
    runs: list[Elements] = []
    while True:
        result = make(run)
        if result.error is None or result.at is None or not is_of_record(result.error):
            return Elements.concatenate([*runs, result])
        rows = np.flatnonzero(run.origins.position == result.at.position)
        failed.append(FailedRecord.at(run.origins, int(rows[0]), result.error))
        # A FlatMap may have split the record before. Its other children are dropped as well.
        kept = result.origins.position != result.at.position
        runs.append(Elements(list(itertools.compress(result.values, kept.tolist())), result.origins.take(kept)))
        remainder = slice(int(rows[-1]) + 1, None)
        run = Elements(run.values[remainder], run.origins.take(remainder), run.error, run.at)


@final
class ErrorLog:
    """The failed records that all passes of one loader have delivered in this process. Each is logged once.

    It keeps the texts of the last MAX_TEXTS, or of `max_errors` if that is more, so its memory is bounded.

    Args:
        tolerance: the number of records that may fail.
        drops_remainder: True if a Batch may drop the last elements of the stream.
    """

    def __init__(self, tolerance: Tolerance, *, drops_remainder: bool) -> None:
        self.count = 0
        self.drops_remainder = drops_remainder
        self.max_errors = tolerance.max_errors
        self._tolerance = tolerance
        self._max_texts = max(MAX_TEXTS, tolerance.max_errors or 0)
        # By record key: the number of the failure, from 1, and its text.
        self._texts: dict[int, tuple[int, str]] = {}

    def emptied(self) -> "ErrorLog":
        """Returns a log of other passes."""
        return ErrorLog(self._tolerance, drops_remainder=self.drops_remainder)

    def texts(self, undelivered: Iterable[FailedRecord] = ()) -> dict[int, str]:
        """Returns the text of each error by record key, with those of other failures that are about to be recorded."""
        known = {key: text for key, (_, text) in self._texts.copy().items()}
        return known | {failure.record_key: failure.text for failure in undelivered if failure.record_key not in known}

    def knows(self, record_key: int, count: int) -> bool:
        """Returns True if a record was among the first `count` failures."""
        number, _ = self._texts.get(record_key, (count + 1, ""))
        return number <= count

    def record(self, failure: FailedRecord) -> None:
        if failure.record_key in self._texts:
            return
        self.count += 1
        self._texts[failure.record_key] = self.count, failure.text
        if len(self._texts) > self._max_texts:
            del self._texts[next(iter(self._texts))]
        log_warning(f"skipped {failure.where}: {failure.text}")


def all_in_a_row(num_records: int, order: VectorisedSampler | AdaptedSampler) -> int:
    """Returns the number of positions in a row among which are all records of a source.

    Each epoch has its own order, so one that works may be the first of an epoch and the last of the next one.
    """
    if order.length is None:
        return 2 * (order.num_records or num_records) - 1
    return min(2 * num_records - 1, order.length)


class _Failure(NamedTuple):
    """A failure at a place in the stream of a logical shard: after a number of outputs of stage 0 of its block."""

    block: int
    outputs_before: int
    record: FailedRecord

    def is_before(self, cursor: Cursor) -> bool:
        return (self.block, self.outputs_before) < (cursor.block, cursor.skip[0])


@dataclasses.dataclass
class _InARow:
    """The number of failures in consecutive blocks without an element, from block `first` on."""

    first: int = 0
    count: int = 0

    def add(self, block: int, with_elements: NDArray[np.int64]) -> None:
        """Counts a failure in a block, given the blocks of the elements of its call, in order."""
        self._begin_after(with_elements[: np.searchsorted(with_elements, block, side="right")])
        self.count += block >= self.first

    def end_call(self, with_elements: NDArray[np.int64]) -> None:
        self._begin_after(with_elements)

    def _begin_after(self, with_elements: NDArray[np.int64]) -> None:
        if len(with_elements) and with_elements[-1] >= self.first:
            self.first, self.count = int(with_elements[-1]) + 1, 0


FailuresByShard: TypeAlias = list[list[_Failure]]
"""Failures of each logical shard, in order."""


@final
class FailuresOfPass:
    """The failed records of one pass over the stream of a shard. They count in the `ErrorLog` once they are delivered.

    The error of one too many takes its place in the stream when it is made, so it may be made in advance, by any thread
    or worker. It depends on the failures before it in the pass, and on those that were delivered before the pass began.

    Args:
        log: the failures of all passes.
        start: the position at which the pass begins.
        num_in_a_row: the number of records that may not fail in a row, whatever the tolerance, see `all_in_a_row`.

    Attributes:
        error: the error of one too many; None if there is none so far.
    """

    def __init__(self, log: ErrorLog, start: Position, num_in_a_row: int) -> None:
        self.error: BaseException | None = None
        self._log = log
        self._num_in_a_row = num_in_a_row
        self._start = start
        self._base = log.count
        # Of each logical shard: the failures that were not delivered, and those that are in no group of a join.
        self._undelivered: list[deque[_Failure]] = [deque() for _ in start]
        self._ungrouped: list[deque[_Failure]] = [deque() for _ in start]
        # The record keys that count in this pass: of each logical shard, and of the groups of a join. Their size is
        # bounded by the tolerance, and without one they stay empty.
        self._keys: list[set[int]] = [set() for _ in start]
        self._grouped_keys: set[int] = set()
        self._in_a_row = [_InARow() for _ in start]

    def check(self, shard: int, outputs: Outputs, *, are_blocks: bool) -> None:
        """Records the failures in outputs of stage 0, in order. Truncates the outputs at the limit.

        `are_blocks` is True if each output consists of complete blocks, not of one record.
        """
        origins, in_a_row = outputs.origins, self._in_a_row[shard]
        for failure in outputs.failures:
            is_before = origins.block < failure.block if are_blocks else origins.position < failure.position
            before = 0 if are_blocks else int(np.count_nonzero(is_before & (origins.block == failure.block)))
            found = _Failure(failure.block, before, failure)
            if found.is_before(self._start[shard]):
                continue
            in_a_row.add(failure.block, origins.block)
            none_left = self._log.max_errors is None and in_a_row.count >= self._num_in_a_row
            if none_left or self._exceeds_limit(failure, self._keys[shard]):
                row, at = int(np.count_nonzero(is_before)), Location(failure.position, failure.block)
                outputs.end_with(self._refuse(failure), row, at, is_of_stream=none_left)
                return
            self._undelivered[shard].append(found)
            if len(self._start) > 1:
                self._ungrouped[shard].append(found)
        in_a_row.end_call(origins.block)

    def error_in_group(self, ends: Sequence[Cursor | None]) -> BaseException | None:
        """Returns the error in place of a group of several logical shards, if any.

        `ends` are the positions after the group; None for shards that have ended.
        """
        found: list[tuple[int, int, int, FailedRecord]] = []
        for shard, (failures, end) in enumerate(zip(self._ungrouped, ends, strict=True)):
            while failures and (end is None or failures[0].is_before(end)):
                block, before, record = failures.popleft()
                found.append((block, before, shard, record))
        for *_, record in sorted(found, key=lambda failure: failure[:3]):
            if self._exceeds_limit(record, self._grouped_keys):
                return self._refuse(record)
        return None

    def deliver(self, position: Position | None) -> None:
        """Counts the failures before a position; with None, all of them."""
        for number, failures in enumerate(self._undelivered):
            while failures and (position is None or failures[0].is_before(position[number])):
                # In this order: after an interrupt in between, recording it again changes nothing.
                self._log.record(failures[0].record)
                failures.popleft()

    def end(self) -> None:
        """Counts the failures after the last output, because the stream has ended."""
        if not self._log.drops_remainder:
            self.deliver(None)

    def before(self, position: Position) -> list[FailedRecord]:
        """Returns the failures before a position that were not counted yet. Thread-safe."""
        return [
            failure.record
            for failures, cursor in zip(self._undelivered, position, strict=True)
            for failure in failures.copy()
            if failure.is_before(cursor)
        ]

    def take(self) -> FailuresByShard:
        """Removes the failures that were not delivered, and returns them without their exceptions."""
        taken: FailuresByShard = []
        for failures in self._undelivered:
            taken.append([one._replace(record=one.record._replace(error=None)) for one in failures])
            failures.clear()
        return taken

    def add(self, found: FailuresByShard) -> None:
        """Adds failures that another pass over the same stream has found. Those before the start do not count."""
        for undelivered, start, added in zip(self._undelivered, self._start, found, strict=False):
            if added:
                fresh = [one for one in added if not one.is_before(start)]
                merged = {(one.block, one.outputs_before, one.record.position): one for one in (*undelivered, *fresh)}
                undelivered.clear()
                undelivered.extend(merged[key] for key in sorted(merged))

    def _exceeds_limit(self, failure: FailedRecord, keys: set[int]) -> bool:
        limit = self._log.max_errors
        if limit is None:
            return False
        if failure.record_key in keys or self._log.knows(failure.record_key, self._base):
            return False
        if self._base + len(keys) >= limit:
            return True
        keys.add(failure.record_key)
        return False

    def _refuse(self, failure: FailedRecord) -> BaseException:
        limit = self._log.max_errors
        text = (
            "on_error='skip' has skipped all records, and none is left"
            if limit is None
            else f"on_error='skip' has skipped {limit} records, and max_errors is {limit}"
        )
        add_note(failure.error, f"millstream: {text}.")
        self.error = failure.error
        return self.error


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
    pending = Origins(table[:, np.argsort(table[0])], names)
    for _ in range(min(MAX_SUBSTITUTES, keys.count - 1)):
        pending = pending.take(pending.position < end)
        if not len(pending):
            break
        pending = pending.with_keys(keys.following(pending.record_key))
        tried = attempt(pending)
        runs.append(tried)
        failures += tried.failures
        if tried.error is not None:
            error, end = tried.error, min(end, _end_of(tried))
        pending = pending.take(np.isin(pending.position, [failure.position for failure in tried.failures]))
    pending = pending.take(pending.position < end)
    if len(pending):
        end = int(pending.position.min())
        error = first_errors[end]
        count = min(MAX_SUBSTITUTES, keys.count - 1)
        add_note(error, f"millstream: cannot replace the record: the next {count} keys also fail.")
    values = [value for run in runs for value in run.values]
    found = Origins.concatenate([run.origins for run in runs])
    order = np.argsort(found.position, kind="stable")
    order = order[found.position[order] < end]
    before_end = sorted((one for one in failures if one.position < end), key=lambda failure: failure.position)
    return Elements([values[row] for row in order.tolist()], found.take(order), error, failures=tuple(before_end))


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

    The keys are those that the sampler draws: only the given ones of an IndexSampler with `keys`, those of the same
    component in a mixture, those of the same class of a BucketSampler, otherwise all keys up to the largest one.

    Attributes:
        count: the number of keys; in a mixture, of its largest component.
    """

    def __init__(self, sampler: Any, num_records: int) -> None:
        self.count: int
        self._components: list[KeyCycle] = []
        self._cycles: KeyCycles | None = None
        self._starts = np.zeros(0, np.int64)
        if is_mixed(sampler):
            pairs = zip(sampler.samplers, sampler.source_lengths, strict=True)
            self._components = [KeyCycle(component, length) for component, length in pairs]
            self._starts = np.cumsum([0, *sampler.source_lengths[:-1]])
            self.count = max(component.count for component in self._components)
            return
        if isinstance(sampler, BalancedSampler):
            sampler = sampler.order
        if isinstance(sampler, EpochSampler):
            self._cycles = sampler.key_cycles()
        largest = largest_key(sampler)
        self.count = num_records if largest is None else min(num_records, largest + 1)
        if self._cycles is not None:
            self.count = self._cycles.count

    def following(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        if self._components:
            numbers = np.searchsorted(self._starts, keys, side="right") - 1
            following = keys.copy()
            for number in np.unique(numbers).tolist():
                is_component, start = numbers == number, self._starts[number]
                following[is_component] = start + self._components[number].following(keys[is_component] - start)
            return following
        if self._cycles is not None:
            return self._cycles.following(keys)
        return np.mod(keys + 1, self.count)
