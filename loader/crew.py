"""Threads that read ahead: a crew, and the reading of one call's records in slices by it.

Guarantees:
    * No thread outlives its crew's `stop()` but inside user code, which Python cannot end: such a thread ends with its
      call. `join()` waits for it, at most as long as it is told.
    * No thread meets the end of the interpreter, which waits for the calls at hand, for at most CLOSE_SECONDS: a
      thread that comes back from C++ into an interpreter that has ended aborts the process.
    * Threads get closures through one queue; what they share beyond that is said where it is.
"""

import atexit
import functools
import itertools
import math
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, final

from millstream.loader.elements import Elements, Origins
from millstream.loader.plan import Plan
from millstream.loader.requests import Units

CLOSE_SECONDS = 2.0
"""How long the end of an executor, and of the interpreter, waits for threads that are inside user code."""

SLICE_SECONDS = 0.002
"""Reading record by record, a block is cut into slices of at least this length, for several threads to work on."""


@final
class SlicedPreparation:
    """The records of one call of phase 0, read one by one by the crew, in slices.

    The first record tells what the rest will take: a thread goes on alone, or shares the rest with the others. The
    one that finishes the last slice puts all together.

    Args:
        plan: what prepares the records.
        units: which ones.
        crew: who reads.
        deliver: gets the prepared elements and the seconds that all slices took together; runs in any of the threads.
    """

    def __init__(
        self, plan: Plan, units: Units, crew: "Crew", deliver: Callable[[tuple[Elements, float]], None]
    ) -> None:
        self._plan = plan
        self._units = units
        self._crew = crew
        self._deliver = deliver
        self._outcomes: list[tuple[Elements, float] | None] = []
        self._left = 0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Reads the first record, and gets the rest read."""
        try:
            origins = self._plan.locate(*self._units)
        except BaseException:  # noqa: BLE001  (the plan finds out at which unit, and makes it the outcome)
            self._deliver(self._crew.timed(lambda: self._plan.prepare_units(*self._units)))
            return
        first = self._crew.timed(lambda: self._plan.prepare(origins.take(slice(1))))
        rest = 0 if first[0].error is not None else len(origins.position) - 1
        count = min(self._crew.size, rest, max(1, math.ceil(first[1] * rest / SLICE_SECONDS)))
        bounds = [1 + rest * i // max(1, count) for i in range(count + 1)]
        slices = [origins.take(slice(start, stop)) for start, stop in itertools.pairwise(bounds)]
        self._outcomes = [first] + [None] * count
        self._left = count
        for number, part in list(enumerate(slices, 1))[1:]:
            self._crew.submit(functools.partial(self._read, number, part))
        if slices:
            self._read(1, slices[0])
        else:
            self._put_together()

    def _read(self, number: int, origins: Origins) -> None:
        self._outcomes[number] = self._crew.timed(lambda: self._plan.prepare(origins))
        with self._lock:
            self._left -= 1
            if self._left:
                return
        self._put_together()

    def _put_together(self) -> None:
        outcomes = [outcome for outcome in self._outcomes if outcome is not None]
        prepared = Elements.concatenate([elements for elements, _ in outcomes])
        self._deliver((prepared, sum(spent for _, spent in outcomes)))


@final
class Crew:
    """Threads that run jobs in the order given; started when first needed. Jobs may submit jobs."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._leaving = 0
        self._stopped = False
        self._busy: set[int] = set()
        self._process = 0
        self._lock = threading.Lock()
        _end_crews_at_exit()
        _crews.add(self)

    def submit(self, job: Callable[[], Any]) -> None:
        """Queues a job, which must not raise. Once stopped, it is dropped."""
        if self._stopped:
            return
        self._jobs.put(job)
        with self._lock:
            if len(self._threads) - self._leaving < self.size and not self._stopped:
                self._add_thread()

    def check_process(self) -> None:
        """Raises a RuntimeError in a forked process: threads do not come along, and it would wait for them for ever."""
        if self._threads and self._process != os.getpid():
            raise RuntimeError(
                "This iterator belongs to the process that made it, and its threads too. "
                "Call iter(loader) in the forked process."
            )

    def resize(self, size: int) -> None:
        """Sets how many threads there are to be, at least 1. Those too many end behind the jobs that are queued."""
        with self._lock:
            for _ in range(len(self._threads) - self._leaving - size):
                self._jobs.put(_leave)
                self._leaving += 1
            self.size = size

    def timed(self, work: Callable[[], Elements]) -> tuple[Elements, float]:
        """Returns the outcome of some work, and the seconds that it would take alone; what it raises is its error.

        The more threads work, the longer each of them waits for the interpreter's lock and for a core. That wait is no
        property of the work: only what exceeds the work of all of them, one after the other, is waiting for something
        else, a disk or a network.
        """
        start, start_work = time.perf_counter(), time.thread_time()
        try:
            elements = work()
        except BaseException as error:  # noqa: BLE001  (a thread has no one to raise to: the consumer gets it)
            elements = Elements.failed(error)
        seconds, working = time.perf_counter() - start, time.thread_time() - start_work
        return elements, working + max(0.0, seconds - working * max(1, len(self._busy)))

    def stop(self) -> None:
        """Tells the threads to end after the job at hand; jobs not begun are dropped. Idempotent.

        The garbage collector may call this in any thread, in the midst of `submit` too: so it takes no lock, and a
        single None goes from thread to thread, to those as well that are being started.
        """
        self._stopped = True
        self._jobs.put(None)

    def join(self, seconds: float) -> None:
        """Waits for the threads to end, at most so long for all of them."""
        deadline = time.monotonic() + seconds
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _add_thread(self) -> None:
        # A daemon: a read that hangs must not keep the interpreter from leaving.
        thread = threading.Thread(target=self._work_off, name=f"millstream-read-{len(self._threads)}", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            if not self._threads:
                raise
            # The system has no more threads to give: those that run do the work.
            self.size = len(self._threads)
        else:
            self._process = os.getpid()
            self._threads.append(thread)

    def _work_off(self) -> None:
        """Runs jobs until told to stop. A thread keeps its crew alive, and not the executor, whose end stops it."""
        process = os.getpid()
        while (job := self._jobs.get()) is not None:
            if job is _leave:
                with self._lock:
                    self._threads.remove(threading.current_thread())
                    self._leaving -= 1
                return
            # Jobs dropped are taken out all the same: they refer to the crew, and would keep it.
            if not self._stopped:
                self._busy.add(threading.get_ident())
                job()
                if os.getpid() != process:
                    # Forked by the job, and back from it: nobody here has a use for this thread.
                    os._exit(0)
                self._busy.discard(threading.get_ident())
            del job
        self._jobs.put(None)


def _leave() -> None:
    """The job of a thread that is one too many."""


_crews: "weakref.WeakSet[Crew]" = weakref.WeakSet()


@functools.cache
def _end_crews_at_exit() -> None:
    """Makes the end of the interpreter wait for the crews. Done once, when there is a crew: not at import."""
    atexit.register(_end_crews)


def _end_crews() -> None:
    crews = list(_crews)
    for crew in crews:
        crew.stop()
    deadline = time.monotonic() + CLOSE_SECONDS
    for crew in crews:
        crew.join(deadline - time.monotonic())
