"""Work of one call that its thread shares with other threads: slices of a batch, or reads from several sources.

Guarantees:
    * A thread waits only for jobs that other threads have begun. It runs all others itself, so threads never wait for
      each other in a circle.
    * The threads of one call, with its own, are at most as many as there are readers.
    * Results come in the order of the jobs, whichever thread runs them.
"""

import contextlib
import functools
import os
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, final

from millstream.concurrent_reads import sharing
from millstream.loader.operations.steps import isolated
from millstream.loader.threads.reader_threads import ReaderThreads

Result = TypeVar("Result")

SLICE_SECONDS = 0.002
"""The minimum duration of work that is shared. Sharing a shorter one would cost more than it gains."""


@final
class SharedWork:
    """Shares the jobs of one call.

    Args:
        readers: the threads that help.

    Attributes:
        seconds_of_others: the time that other threads have spent on the jobs.
    """

    def __init__(self, readers: ReaderThreads) -> None:
        self.seconds_of_others = 0.0
        self._readers = readers
        self._process = os.getpid()

    @contextlib.contextmanager
    def for_sources(self) -> Iterator[None]:
        """Shares the reads that a source of several sources makes in this thread."""
        with sharing(self._read_all):
            yield

    def run(
        self, jobs: Sequence[Callable[[], Result]], failed: Callable[[BaseException], Result]
    ) -> tuple[list[Result], float]:
        """Runs all jobs. Returns their results, in order, and the seconds of all of them.

        Args:
            jobs: the jobs, which any thread may run.
            failed: returns the result of a job that raises.
        """
        left = deque(enumerate(jobs))
        finished: queue.SimpleQueue[tuple[int, Result, float]] = queue.SimpleQueue()

        def assist(more: int) -> None:
            call_helpers(more)
            for outcome in self._work_off(left, failed):
                finished.put(outcome)

        def call_helpers(limit: int) -> None:
            # Each helper calls the next one while jobs are left. If only the first job was slow, because it was the
            # first, a single thread is started.
            if limit > 0 and len(left) > 1:
                self._readers.submit(functools.partial(assist, limit - 1))

        # This thread is one of those that read, even if it is not one of the readers.
        call_helpers(self._readers.size - 1)
        results: dict[int, Result] = {}
        total = 0.0
        for number, result, seconds in self._work_off(left, failed):
            results[number] = result
            total += seconds
        while len(results) < len(jobs):
            number, result, seconds = finished.get()
            results[number] = result
            total += seconds
            self.seconds_of_others += seconds
        return [results[number] for number in range(len(jobs))], total

    def _work_off(
        self, left: deque[tuple[int, Callable[[], Result]]], failed: Callable[[BaseException], Result]
    ) -> Iterator[tuple[int, Result, float]]:
        """Runs the jobs that are left, and yields the number, result and seconds of each."""
        while True:
            try:
                number, job = left.popleft()
            except IndexError:
                return
            result, seconds = self._readers.timed(functools.partial(isolated, job), failed)
            if os.getpid() != self._process:
                # Forked by user code, and returned from it: no thread here waits for the result.
                os._exit(0)
            yield number, result, seconds

    def _read_all(self, reads: Sequence[Callable[[], Any]]) -> list[Any]:
        """Runs reads here, and shares the rest once they have taken as long as work that is worth sharing."""
        records: list[Any] = []
        begin = time.perf_counter()
        while len(records) < len(reads) and time.perf_counter() - begin < SLICE_SECONDS:
            records.append(reads[len(records)]())
        rest, _ = self.run(reads[len(records) :], _Failure)
        failure = next((result for result in rest if isinstance(result, _Failure)), None)
        if failure is None:
            return records + rest
        try:
            raise failure.error
        finally:
            # The error refers to this frame.
            del failure, rest, records


@final
class _Failure:
    """The error of a read."""

    def __init__(self, error: BaseException) -> None:
        self.error = error
