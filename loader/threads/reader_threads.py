"""Threads that run jobs: those that read ahead.

Guarantees:
    * Never more than `size` threads of one ReaderThreads work, whatever a signal handler interrupts. A handler's
      exception can hide from `submit` that a thread was started. So what `submit` knows of its threads decides only
      whether to start one more: each thread registers itself, under a lock, and leaves at once where there are enough.
    * Nobody waits for that lock but threads of the readers, which do not run handlers: a handler may call anything.
    * Those that work are numbered, 0 … size - 1, and their names end in "_" and the number.
    * A thread is on record before it runs, and its start cannot be interrupted.
    * No thread outlives `stop()` but inside user code, which Python cannot end: such a thread ends with its call.
      `join()` waits for it, at most as long as it is told.
    * They end with their owner, without any Python code that a handler could interrupt (see `end_with`).
    * Where the system has no thread to give, jobs run in the thread that submits them.
    * No thread meets the end of the interpreter, which waits for the calls at hand, for at most CLOSE_SECONDS: a
      thread that comes back from C++ into an interpreter that has ended aborts the process.
    * Threads get closures through one queue; what they share beyond that is said where it is.
"""

import _thread
import atexit
import contextlib
import functools
import itertools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, final

from millstream.loader.pipeline.elements import Elements
from millstream.loader.threads.timed_queue import TimedQueue
from millstream.signal_safe_lock import SignalSafeLock

CLOSE_SECONDS = 2.0
"""How long the end of an executor, and of the interpreter, waits for threads that are inside user code."""

LOOK_SECONDS = 0.02
"""The time for which `join` waits for the word of a thread before it checks the thread, in seconds."""

THREAD_NAME = "millstream-read"


@final
class ReaderThreads:
    """Threads that run jobs in the order given; started when first needed. Jobs may submit jobs.

    Args:
        size: how many threads may work at once.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        # A job, or anything else to end the thread that takes it.
        self._jobs: queue.SimpleQueue[Callable[[], Any] | weakref.ref[Any] | None] = queue.SimpleQueue()
        # Those that have not ended.
        self._started: set[threading.Thread] = set()
        self._begun: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended: TimedQueue[None] = TimedQueue()
        # The number of each, by its identity.
        self._working: dict[int, int] = {}
        self._busy: set[int] = set()
        self._registering = SignalSafeLock(threading.Lock())
        self._is_stopped = False
        self._owner: weakref.ref[Any] | None = None
        self._process = 0
        _end_readers_at_exit()
        _all_readers.add(self)

    def end_with(self, owner: Any) -> None:
        """Stops the readers when its owner is gone.

        The collector calls the queue's own `put`, which is C code: a callback in Python, `weakref.finalize` too, could
        be interrupted by a signal's handler and leave the threads waiting forever.
        """
        self._owner = weakref.ref(owner, self._jobs.put)

    def submit(self, job: Callable[[], Any]) -> None:
        """Queues a job, which must not raise. Once stopped, it is dropped."""
        if self.is_stopped:
            return
        self._jobs.put(job)
        # Interrupted here, or in waiting for the thread, the job waits for the next one's thread: whoever is
        # interrupted drops the work, or repeats it. Too small a count, where a thread has not registered yet, costs a
        # thread that leaves at once.
        if len(self._working) < self.size:
            self._start_thread()

    @property
    def is_stopped(self) -> bool:
        """Whether jobs are dropped: after `stop()`, and when the owner is gone."""
        return self._is_stopped or (self._owner is not None and self._owner() is None)

    @property
    def num_busy(self) -> int:
        """How many threads are at a job. Any thread may ask."""
        return len(self._busy)

    @property
    def busy_threads(self) -> list[threading.Thread]:
        """Those that are at a job."""
        return [thread for thread in self._started.copy() if thread.ident in self._busy]

    def check_process(self) -> None:
        """Raises a RuntimeError in a forked process: threads do not come along, and it would wait for them forever."""
        if self._started and self._process != os.getpid():
            raise RuntimeError(
                "This iterator belongs to the process that made it, and its threads too. "
                "Call iter(loader) in the forked process."
            )

    def resize(self, size: int) -> None:
        """Sets how many threads may work at once, at least 1. Those too many end after the job at hand."""
        self.size = size
        for _ in range(len(self._working) - size):
            # Idle ones wake up and find that they are too many.
            self._jobs.put(_do_nothing)

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

        A single None goes from thread to thread, to those as well that are being started.
        """
        self._is_stopped = True
        self._jobs.put(None)

    def join(self, seconds: float) -> None:
        """Waits for the threads to end, at most this long for all of them."""
        if self._process != os.getpid():
            return
        # Not by `Thread.join`: up to Python 3.12, a handler's exception may leave the lock taken that it waits for.
        deadline = time.monotonic() + seconds
        while self._started - {threading.current_thread()} and (left := deadline - time.monotonic()) > 0:
            # Several may wait: what one misses, it finds out at the next look.
            with contextlib.suppress(queue.Empty):
                self._ended.get(timeout=min(left, LOOK_SECONDS))

    def _start_thread(self) -> None:
        self._process = os.getpid()
        try:
            _thread.start_new_thread(self._begin_thread, ())
        except RuntimeError:
            # The system has no more threads to give: those that work do the job, or this one where there are none.
            self.size = max(1, len(self._working))
            if not self._working:
                with contextlib.suppress(queue.Empty):
                    self._work_off(self._jobs.get_nowait)
        else:
            self._begun.get()

    def _begin_thread(self) -> None:
        """Starts a thread from one where no handler runs.

        `threading.Thread.start` does not bear to be interrupted: it may leave behind a thread that is on record for
        ever and never runs, or one that fails as it begins. What starts this here is a single call of C code.
        """
        # A daemon: a read that hangs must not keep the interpreter from leaving.
        thread = threading.Thread(target=self._live, name=THREAD_NAME, daemon=True)
        self._started.add(thread)
        try:
            thread.start()
        except RuntimeError:
            # There is one thread, this one.
            self._started.discard(thread)
            self._begun.put(None)
            self._live()
        else:
            self._begun.put(None)

    def _live(self) -> None:
        """The life of a thread. It keeps this object alive, and not the owner, whose end stops it."""
        try:
            self._work_off(self._jobs.get)
        finally:
            if self.is_stopped:
                self._pass_on()
            self._started.discard(threading.current_thread())
            self._ended.put(None)

    def _work_off(self, take: Callable[[], Any]) -> None:
        """Runs jobs while there is room for this thread among those that work, until all are stopped."""
        me, process = threading.get_ident(), os.getpid()
        try:
            while self._register(me):
                job = take()
                if self.is_stopped:
                    return
                self._busy.add(me)
                job()
                if os.getpid() != process:
                    # Forked by the job, and back from it: nobody here has a use for this thread.
                    os._exit(0)
                self._busy.discard(me)
                del job
        finally:
            # Even if this thread had not registered yet, when a handler's exception came.
            self._busy.discard(me)
            self._working.pop(me, None)

    def _register(self, me: int) -> bool:
        """Makes this thread one of those that work, if it is not; returns whether it is one now."""
        if self._working.get(me, self.size) < self.size >= len(self._working):
            return True
        with self._registering:
            self._working.pop(me, None)
            if len(self._working) < self.size and not self.is_stopped:
                taken = set(self._working.values())
                number = next(number for number in itertools.count() if number not in taken)
                # There are sources that tell their readers apart by what comes after the underscore: the threads of
                # `concurrent.futures` have it.
                thread = threading.current_thread()
                if thread.name.startswith(THREAD_NAME):
                    thread.name = f"{THREAD_NAME}_{number}"
                self._working[me] = number
            return me in self._working

    def _pass_on(self) -> None:
        """Lets go of jobs that were dropped, which refer to the readers, and tells the next thread to end."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)


def _do_nothing() -> None:
    """The job that wakes a thread."""


_all_readers: "weakref.WeakSet[ReaderThreads]" = weakref.WeakSet()


@functools.cache
def _end_readers_at_exit() -> None:
    """Makes the end of the interpreter wait for all readers. Done once, with the first of them: not at import."""
    atexit.register(_end_readers)


def _end_readers() -> None:
    everyone = list(_all_readers)
    for readers in everyone:
        readers.stop()
    deadline = time.monotonic() + CLOSE_SECONDS
    for readers in everyone:
        readers.join(deadline - time.monotonic())
