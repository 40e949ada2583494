"""The records of one call, read one by one, in slices that several threads share.

Guarantees:
    * A thread that runs a call waits only for slices that other threads are reading. It reads all others itself, so
      threads never wait for each other in a circle.
    * Slices are concatenated in order, up to and including the first error.
"""

import functools
import itertools
import math
import os
import queue
from collections import deque
from collections.abc import Iterator
from typing import final

from millstream.loader.operations.elements import Elements, Origins
from millstream.loader.pipeline.plan import Plan
from millstream.loader.threads.reader_threads import ReaderThreads

SLICE_SECONDS = 0.002
"""The minimum duration of a slice. Sharing a shorter one would cost more than it gains."""


@final
class SlicedReading:
    """Prepares the blocks of one call with the help of other threads.

    Attributes:
        seconds_of_others: the time that the other threads have spent on this call.
    """

    def __init__(self, plan: Plan, readers: ReaderThreads) -> None:
        self.seconds_of_others = 0.0
        self._plan = plan
        self._readers = readers
        self._process = os.getpid()
        self._slices: deque[tuple[int, Origins]] = deque()
        self._read: queue.SimpleQueue[tuple[int, Elements, float]] = queue.SimpleQueue()

    def prepare_blocks(self, start: int, stop: int, shard: int) -> Elements:
        """Does the same as `Plan.prepare_blocks`. The duration of the first record predicts that of the others."""
        try:
            origins = self._plan.locate(start, stop, shard)
        except BaseException:  # noqa: BLE001  (the plan reports the error at the right block)
            return self._plan.prepare_blocks(start, stop, shard)
        if self._plan.record_seconds * len(origins) < SLICE_SECONDS:
            whole, seconds = self._readers.timed(lambda: self._plan.prepare(origins))
            self._plan.record_seconds = seconds / len(origins)
            return whole
        first, seconds = self._readers.timed(lambda: self._plan.prepare(origins.take(slice(1))))
        rest = 0 if first.error is not None else len(origins) - 1
        count = min(self._readers.size, rest, max(1, math.ceil(seconds * rest / SLICE_SECONDS)))
        if not count:
            return first
        bounds = [1 + rest * number // count for number in range(count + 1)]
        slices = [origins.take(slice(*pair)) for pair in itertools.pairwise(bounds)]
        self._slices.extend(enumerate(slices))
        if count > 1:
            self._readers.submit(self._help)
        outcomes: list[Elements | None] = [None] * count
        seconds = 0.0
        for number, prepared, spent in self._work_off():
            outcomes[number] = prepared
            seconds += spent
        while None in outcomes:
            number, outcomes[number], spent = self._read.get()
            self.seconds_of_others += spent
        if self._plan.has_batched_reads:
            # A call takes much longer than a record, so that the first record says little about the others.
            self._plan.record_seconds = (seconds + self.seconds_of_others) / rest
        return Elements.concatenate([first, *(prepared for prepared in outcomes if prepared is not None)])

    def _help(self) -> None:
        # Each helper calls the next one while slices are left. If only the first record was slow, because it was the
        # first, a single thread is started.
        if len(self._slices) > 1:
            self._readers.submit(self._help)
        for outcome in self._work_off():
            self._read.put(outcome)

    def _work_off(self) -> Iterator[tuple[int, Elements, float]]:
        """Reads the slices that are left, and yields the number, elements and duration of each."""
        while True:
            try:
                number, origins = self._slices.popleft()
            except IndexError:
                return
            prepared, seconds = self._readers.timed(functools.partial(self._plan.prepare, origins))
            if os.getpid() != self._process:
                # Forked by user code, and returned from it: no thread here waits for the outcome.
                os._exit(0)
            yield number, prepared, seconds
