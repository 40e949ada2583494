"""Threads that run jobs, such as reads in advance.

Guarantees:
    * At most `size` threads of one ReaderThreads work, whatever a signal handler interrupts. A handler's exception may
      hide from `submit` that a thread was started. The state of `submit` therefore only decides whether to start
      another: each thread registers itself, under a lock, and ends immediately if there are enough.
    * Only the readers' own threads wait for this lock, and these run no handlers: a handler may call any method.
    * Working threads are numbered 0 … size - 1, and their names end in "_" and the number.
    * A thread is listed before it runs, and its start cannot be interrupted.
    * No thread outlives `stop()`, except inside user code, which Python cannot interrupt: it ends after that call.
      `join()` waits for it for a limited time.
    * They end with their owner, without any Python code that a handler could interrupt (see `end_with`).
    * `at_end` runs once, after the last job, in the thread that ends last: what the jobs use is never closed meanwhile.
    * If the system has no thread left, jobs run in the thread that submits them.
    * The interpreter's exit waits up to EXIT_SECONDS for running jobs, because a thread that returns from C++ into an
      interpreter that has ended aborts the process.
    * Threads receive closures through one queue. Other shared state is described at its definition.
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
from typing import Any, TypeVar, final

from millstream.core.signals import SignalSafeLock
from millstream.loader.threads.waiting import TimedQueue

ResultT = TypeVar("ResultT")

CLOSE_SECONDS = 1.0
"""The time that the end of an engine waits for threads inside user code, in seconds."""

EXIT_SECONDS = 2.0
"""The time that the end of the interpreter waits for them, in seconds."""

JOIN_SECONDS = 0.02
"""The time that `join` waits for a thread's notification before it checks the threads, in seconds."""

THREAD_NAME = "millstream-read"


@final
class ReaderThreads:
    """Threads that run jobs in the order given. They are started on demand. Jobs may submit jobs.

    Args:
        size: the maximum number of working threads.
        at_end: called once when all have ended, by the last of them; by `stop()` if there are none. It must not raise.
    """

    def __init__(self, size: int, at_end: Callable[[], object] = lambda: None) -> None:
        self.size = size
        # Popped by the thread that calls it.
        self._at_end = [at_end]
        # A job, or any other object to end the thread that takes it.
        self._jobs: queue.SimpleQueue[Callable[[], Any] | weakref.ref[Any] | None] = queue.SimpleQueue()
        # The threads that have not ended, and those of them that take no more jobs.
        self._started: set[threading.Thread] = set()
        self._ending: set[threading.Thread] = set()
        self._begun: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._ended: TimedQueue[None] = TimedQueue()
        # The number of each working thread, by its identity.
        self._working: dict[int, int] = {}
        self._busy: set[int] = set()
        self._registering = SignalSafeLock(threading.Lock())
        self._is_stopped = False
        self._owner: weakref.ref[Any] | None = None
        self._process = 0
        _end_readers_at_exit()
        _all_readers.add(self)

    def end_with(self, owner: Any) -> None:
        """Stops the readers when the owner ends.

        The garbage collector calls the queue's own `put`, which is C code. A Python callback, like that of
        `weakref.finalize`, could be interrupted by a signal handler, and the threads would wait forever.
        """
        self._owner = weakref.ref(owner, self._jobs.put)

    def submit(self, job: Callable[[], Any]) -> None:
        """Queues a job, which must not raise. Drops it if the readers have stopped."""
        if self.is_stopped:
            return
        self._jobs.put(job)
        # If an interrupt hits here, or the wait for the thread, the job waits for the thread of the next one, because
        # the interrupted caller drops the work or repeats it. The count may be too small while a thread registers. That
        # costs one thread that ends immediately.
        if len(self._working) < self.size:
            self._start_thread()

    @property
    def is_stopped(self) -> bool:
        """True if jobs are dropped: after `stop()`, and when the owner has ended."""
        return self._is_stopped or (self._owner is not None and self._owner() is None)

    @property
    def num_busy(self) -> int:
        return len(self._busy)

    @property
    def busy_threads(self) -> list[threading.Thread]:
        return [thread for thread in self._started.copy() if thread.ident in self._busy]

    def check_process(self) -> None:
        """Raises a RuntimeError in a forked process, which has no threads and would wait for them forever."""
        if self._started and self._process != os.getpid():
            raise RuntimeError(
                "This iterator and its threads belong to the process that created them. Call iter(loader) in the "
                "forked process."
            )

    def resize(self, size: int) -> None:
        """Sets the maximum number of working threads, at least 1. Surplus threads end after their current job."""
        self.size = size
        for _ in range(len(self._working) - size):
            # Wakes an idle thread, which finds that it is surplus.
            self._jobs.put(lambda: None)

    def run_timed(
        self, work: Callable[[], ResultT], failed: Callable[[BaseException], ResultT]
    ) -> tuple[ResultT, float]:
        """Runs work, and returns its result and the seconds that it would take alone.

        If it raises, the result is that of `failed`.
        """
        start, start_work = time.perf_counter(), time.thread_time()
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  (the consumer gets any error)
            result = failed(error)
        return result, self.seconds_alone(start, start_work)

    def seconds_alone(self, start: float, start_work: float) -> float:
        """Returns the seconds that this thread would have taken alone since it read two clocks.

        The more threads work, the longer each waits for the interpreter's lock and for a core. This wait is not a
        property of the work. Only time beyond the processor time of all threads, one after another, is a wait for
        something else, such as a disk or network.

        Args:
            start: the time of `time.perf_counter`.
            start_work: the time of `time.thread_time`.
        """
        seconds, working = time.perf_counter() - start, time.thread_time() - start_work
        return working + max(0.0, seconds - working * max(1, len(self._busy)))

    def stop(self) -> None:
        """Ends the threads after their current jobs, and drops the others. Idempotent.

        A single None is passed from thread to thread, also to threads that are being started.
        """
        self._is_stopped = True
        self._jobs.put(None)
        self._end_if_last()

    def join(self, seconds: float) -> None:
        if self._process != os.getpid():
            return
        # Not by `Thread.join`: up to Python 3.12, a handler's exception may leave its lock locked.
        deadline = time.monotonic() + seconds
        while self._started - {threading.current_thread()} and (seconds := deadline - time.monotonic()) > 0:
            # Several threads may wait here. One that misses a notification checks again after a slice.
            with contextlib.suppress(queue.Empty):
                self._ended.get(timeout=min(seconds, JOIN_SECONDS))

    def _start_thread(self) -> None:
        self._process = os.getpid()
        try:
            _thread.start_new_thread(self._begin_thread, ())
        except (RuntimeError, MemoryError):
            # The system has no thread left. Other threads run the job, or this one if there are none.
            self.size = max(1, len(self._working))
            if not self._working:
                with contextlib.suppress(queue.Empty):
                    self._run_jobs(self._jobs.get_nowait)
        else:
            self._begun.get()

    def _begin_thread(self) -> None:
        """Starts a thread from one that runs no handlers.

        An interrupt in `threading.Thread.start` may leave a thread that is listed forever and never runs, or one that
        fails at its start. This function itself is started by a single call of C code.
        """
        thread: threading.Thread | None = None
        try:
            # A daemon: a read that hangs must not keep the interpreter from exiting.
            thread = threading.Thread(target=self._run_thread, name=THREAD_NAME, daemon=True)
            self._started.add(thread)
            thread.start()
        except (RuntimeError, MemoryError):
            # No other thread is available: this one runs the jobs.
            self._started.discard(thread)
            thread = None
        finally:
            # Whatever has failed, because the consumer waits for this.
            self._begun.put(None)
        if thread is None:
            self._run_thread()

    def _run_thread(self) -> None:
        """Runs a thread. It keeps this object alive, but not the owner, whose end stops it."""
        try:
            self._run_jobs(self._jobs.get)
        finally:
            me = threading.current_thread()
            self._ending.add(me)
            if self.is_stopped:
                self._pass_on()
                self._end_if_last()
            self._started.discard(me)
            self._ending.discard(me)
            self._ended.put(None)

    def _run_jobs(self, take: Callable[[], Any]) -> None:
        """Runs jobs while this thread is among the first `size`, until all are stopped."""
        me, process = threading.get_ident(), os.getpid()
        try:
            while self._register(me):
                job = take()
                if self.is_stopped:
                    return
                self._busy.add(me)
                job()
                if os.getpid() != process:
                    # Forked by the job, and returned from it: this process has no use for the thread.
                    os._exit(0)
                self._busy.discard(me)
                del job
        finally:
            # Even if a handler's exception came before this thread had registered.
            self._busy.discard(me)
            self._working.pop(me, None)

    def _register(self, me: int) -> bool:
        """Returns True if this thread is registered as working, now or before, because there is room."""
        if self._working.get(me, self.size) < self.size >= len(self._working):
            return True
        with self._registering:
            self._working.pop(me, None)
            if len(self._working) < self.size and not self.is_stopped:
                taken = set(self._working.values())
                number = next(number for number in itertools.count() if number not in taken)
                # Some sources distinguish their readers by the number after the underscore, which the threads of
                # `concurrent.futures` have.
                thread = threading.current_thread()
                if thread.name.startswith(THREAD_NAME):
                    thread.name = f"{THREAD_NAME}_{number}"
                self._working[me] = number
            return me in self._working

    def _end_if_last(self) -> None:
        if self._started <= self._ending:
            with contextlib.suppress(IndexError):
                self._at_end.pop()()

    def _pass_on(self) -> None:
        """Drops the jobs left, which refer to the readers, and ends the next thread."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)


_all_readers: weakref.WeakSet[ReaderThreads] = weakref.WeakSet()


@functools.cache
def _end_readers_at_exit() -> None:
    """Makes the interpreter's exit wait for all readers. Registered with the first of them, not at import."""
    atexit.register(_end_readers)


def _end_readers() -> None:
    all_readers = list(_all_readers)
    for readers in all_readers:
        readers.stop()
    deadline = time.monotonic() + EXIT_SECONDS
    for readers in all_readers:
        readers.join(deadline - time.monotonic())
