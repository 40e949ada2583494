"""The work of one call that several threads share.

Guarantees:
    * A thread that shares its work waits only for jobs that other threads have begun. It runs all others itself, so
      threads never wait for each other in a circle.
    * The threads of one call, with its own, are at most as many as there are readers.
    * Results come in the order of the jobs, whichever thread runs them.
"""

import contextlib
import functools
import itertools
import math
import os
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, final

from millstream.core.direct_copies import DirectCopies
from millstream.loader.pipeline.elements import Elements, Origins
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.steps import isolated
from millstream.loader.threads.reader_threads import ReaderThreads
from millstream.sources.reads import sharing

ResultT = TypeVar("ResultT")

MIN_SHARED_SECONDS = 0.002
"""The minimum duration of work that is shared. Sharing a shorter one would cost more than it gains."""

MIN_SHARED_COPIES_SECONDS = 0.05
"""The same for records whose arrays are copied into the batch, if the functions take much longer than the copies."""


@final
class RecordTime:
    """The time of a record in the last call of a source that is read one by one: infinite until it is known."""

    seconds = math.inf


@final
class SharedWork:
    """Shares the jobs of one call, in whose thread it is used.

    Attributes:
        helper_seconds: the time that other threads have spent on the jobs.
    """

    def __init__(self, readers: ReaderThreads, record_time: RecordTime) -> None:
        self.helper_seconds = 0.0
        self._readers = readers
        self._record_time = record_time
        self._process = os.getpid()

    @contextlib.contextmanager
    def for_sources(self) -> Iterator[None]:
        """Shares the reads that a source of several sources makes in this thread."""
        with sharing(self._read_all):
            yield

    def prepare_blocks(
        self, plan: Plan, start: int, stop: int, shard: int, copies: DirectCopies | None = None
    ) -> Elements:
        """Does the same as `Plan.prepare_blocks`, whose records are read one by one, in slices.

        The duration of the first record predicts that of the others. Slices do not copy into the batch, because
        other threads would hold references to the records for a while.
        """
        try:
            origins = plan.locate(start, stop, shard)
        except BaseException:  # noqa: BLE001  (the plan reports the error at the right block)
            return plan.prepare_blocks(start, stop, shard)
        limit = MIN_SHARED_SECONDS
        if copies is not None:
            limit, copies.count = MIN_SHARED_COPIES_SECONDS, len(origins)
        if self._record_time.seconds * len(origins) < limit:
            return self._prepare_whole(plan, origins, copies)
        first, seconds = self._readers.run_timed(
            functools.partial(plan.prepare, origins.take(slice(1)), copies), Elements.failed
        )
        rest = 0 if first.error is not None else len(origins) - 1
        if rest and copies is not None and seconds * rest < limit:
            return Elements.concatenate([first, self._prepare_whole(plan, origins.take(slice(1, None)), copies)])
        count = min(self._readers.size, rest, max(1, math.ceil(seconds * rest / MIN_SHARED_SECONDS)))
        if not count:
            return first
        bounds = [1 + rest * number // count for number in range(count + 1)]
        slices = [origins.take(slice(*pair)) for pair in itertools.pairwise(bounds)]
        prepared, seconds = self.run([functools.partial(plan.prepare, slice_) for slice_ in slices], Elements.failed)
        if plan.has_batched_reads:
            # A call takes much longer than a record, so that the first record says little about the others.
            self._record_time.seconds = seconds / rest
        return Elements.concatenate([first, *prepared])

    def _prepare_whole(self, plan: Plan, origins: Origins, copies: DirectCopies | None) -> Elements:
        whole, seconds = self._readers.run_timed(functools.partial(plan.prepare, origins, copies), Elements.failed)
        self._record_time.seconds = seconds / len(origins)
        return whole

    def run(
        self, jobs: Sequence[Callable[[], ResultT]], failed: Callable[[BaseException], ResultT]
    ) -> tuple[list[ResultT], float]:
        """Runs all jobs, in any thread. Returns their results, in order, and the seconds of all of them together.

        `failed` returns the result of a job that raises.
        """
        pending = deque(enumerate(jobs))
        finished: queue.SimpleQueue[tuple[int, ResultT, float]] = queue.SimpleQueue()

        def assist(more: int) -> None:
            call_helpers(more)
            for outcome in self._run_remaining(pending, failed):
                finished.put(outcome)

        def call_helpers(limit: int) -> None:
            # Each helper calls the next one while jobs are pending. If only the first job was slow, because it was the
            # first, a single thread is started.
            if limit > 0 and len(pending) > 1:
                self._readers.submit(functools.partial(assist, limit - 1))

        # This thread is one of those that read, even if it is not one of the readers.
        call_helpers(self._readers.size - 1)
        results: dict[int, ResultT] = {}
        total = 0.0
        for number, result, seconds in self._run_remaining(pending, failed):
            results[number] = result
            total += seconds
        while len(results) < len(jobs):
            number, result, seconds = finished.get()
            results[number] = result
            total += seconds
            self.helper_seconds += seconds
        return [results[number] for number in range(len(jobs))], total

    def _run_remaining(
        self, pending: deque[tuple[int, Callable[[], ResultT]]], failed: Callable[[BaseException], ResultT]
    ) -> Iterator[tuple[int, ResultT, float]]:
        while True:
            try:
                number, job = pending.popleft()
            except IndexError:
                return
            result, seconds = self._readers.run_timed(functools.partial(isolated, job), failed)
            if os.getpid() != self._process:
                # Forked by user code, and returned from it: no thread here waits for the result.
                os._exit(0)
            yield number, result, seconds

    def _read_all(self, reads: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs reads here, and shares the rest once they have taken as long as work that is worth sharing.

        The rest must be expected to take as long as well.
        """
        records: list[Any] = []
        begin, begin_work = time.perf_counter(), time.thread_time()
        while (done := len(records)) < len(reads):
            # The second clock is slow, and alone the reads would not take longer than they did.
            if time.perf_counter() - begin >= MIN_SHARED_SECONDS:
                seconds = self._readers.seconds_alone(begin, begin_work)
                if seconds >= MIN_SHARED_SECONDS and seconds * (len(reads) - done) >= MIN_SHARED_SECONDS * done:
                    break
            records.append(reads[done]())
        rest, _ = self.run(reads[len(records) :], _Failure)
        failure = next((result for result in rest if isinstance(result, _Failure)), None)
        if failure is None:
            return records + rest
        try:
            raise failure.error
        finally:
            # The error refers to this frame.
            del failure, rest, records


class _Failure(NamedTuple):
    error: BaseException
