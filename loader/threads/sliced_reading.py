"""The records of one call, read one by one, in slices that several threads share."""

import functools
import itertools
import math
from typing import final

from millstream.loader.operations.elements import Elements
from millstream.loader.pipeline.plan import Plan
from millstream.loader.threads.reader_threads import ReaderThreads
from millstream.loader.threads.shared_work import SLICE_SECONDS, SharedWork


@final
class SlicedReading:
    """Prepares the blocks of one call with the help of other threads.

    Args:
        plan: the plan of the pipeline.
        readers: the threads.
        work: shares the slices.
    """

    def __init__(self, plan: Plan, readers: ReaderThreads, work: SharedWork) -> None:
        self._plan = plan
        self._readers = readers
        self._work = work

    def prepare_blocks(self, start: int, stop: int, shard: int) -> Elements:
        """Does the same as `Plan.prepare_blocks`. The duration of the first record predicts that of the others."""
        try:
            origins = self._plan.locate(start, stop, shard)
        except BaseException:  # noqa: BLE001  (the plan reports the error at the right block)
            return self._plan.prepare_blocks(start, stop, shard)
        if self._plan.record_seconds * len(origins) < SLICE_SECONDS:
            whole, seconds = self._readers.timed(lambda: self._plan.prepare(origins), Elements.failed)
            self._plan.record_seconds = seconds / len(origins)
            return whole
        first, seconds = self._readers.timed(lambda: self._plan.prepare(origins.take(slice(1))), Elements.failed)
        rest = 0 if first.error is not None else len(origins) - 1
        count = min(self._readers.size, rest, max(1, math.ceil(seconds * rest / SLICE_SECONDS)))
        if not count:
            return first
        bounds = [1 + rest * number // count for number in range(count + 1)]
        slices = [origins.take(slice(*pair)) for pair in itertools.pairwise(bounds)]
        jobs = [functools.partial(self._plan.prepare, slice_) for slice_ in slices]
        prepared, seconds = self._work.run(jobs, Elements.failed)
        if self._plan.has_batched_reads:
            # A call takes much longer than a record, so that the first record says little about the others.
            self._plan.record_seconds = seconds / rest
        return Elements.concatenate([first, *prepared])
