"""Bounded waits: for threads that run calls, and for user code in the consumer's thread, which nothing can interrupt.

Guarantees:
    * The consumer's wait for threads or a worker ends: a warning comes first, then an error with their stacks. Only
      time that the consumer spends waiting counts.
    * A call in the consumer's thread that runs longer than STALL_WARNING_SECONDS, or its stall timeout if that is
      shorter, is logged once, with the record and operation if they are known, and with the stack of its thread.
    * A watched call costs a time and an entry in a dict.
    * One thread per process watches, as long as an engine exists whose consumer may run user code. It ends with the
      last of them, without any Python code that a signal handler could interrupt.
    * Frames of a thread that runs are never touched, because CPython may free them meanwhile.
    * Time in which the whole machine was suspended does not count: a slice of a wait then takes much longer than asked.
"""

import _thread
import collections
import contextlib
import faulthandler
import functools
import math
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any, Final, Generic, TypeVar, final

from millstream.core.warn import log_warning
from millstream.errors import WorkerStalledError
from millstream.loader.pipeline import steps
from millstream.loader.pipeline.elements import Origins, describe_origin, describe_records

STALL_WARNING_SECONDS = 30.0
"""Threads or workers that finish nothing for this long, while the consumer waits, are reported in the log."""

SLICE_SECONDS = 1.0
"""The longest single wait. If one takes longer, the whole machine was suspended, which is not a stall."""


@final
class StallClock:
    """The seconds that the consumer has waited since the last sign of life of threads, or of a worker.

    Attributes:
        timeout: the number of seconds after which the wait is an error.
        waited: the number of seconds so far.
        is_reported: True if the log has a line about this wait.
    """

    def __init__(self, timeout: float) -> None:
        self.timeout = timeout
        self.waited = 0.0
        self.is_reported = False

    @property
    def seconds(self) -> float:
        """The length of the next slice of the wait, at least 0."""
        limit = self.timeout if self.is_reported else min(self.timeout, STALL_WARNING_SECONDS)
        return max(0.0, min(SLICE_SECONDS, limit - self.waited))

    @property
    def is_over(self) -> bool:
        """True if the wait is an error now."""
        return self.waited >= self.timeout

    def passed(self, seconds: float) -> None:
        """Records that a slice has passed without a sign of life. More than a slice was time of a suspended machine."""
        self.waited += min(SLICE_SECONDS, seconds)

    def restart(self) -> None:
        self.waited, self.is_reported = 0.0, False

    def is_due(self) -> bool:
        """Returns True once if the log should have a line about this wait."""
        is_due = self.waited >= STALL_WARNING_SECONDS and not self.is_reported
        self.is_reported = self.is_reported or is_due
        return is_due

    def stall_of(self, records: str, threads: Iterable[threading.Thread]) -> WorkerStalledError | None:
        """Returns the error of threads if the wait is over. Logs it before.

        `records` describes the records of the oldest call, and `threads` run calls.
        """
        if self.is_over:
            return WorkerStalledError(
                f"The threads that read have finished nothing for {self.waited:.1f} s (stall_timeout), "
                f"with {records}. Stacks:\n{_stacks(threads)}"
            )
        if self.is_due():
            limit = "never" if math.isinf(self.timeout) else f"after {self.timeout:g} s"
            log_warning(
                f"the threads that read have finished nothing for {self.waited:.1f} s, with {records}. This becomes "
                f"an error {limit} (stall_timeout). Stacks:\n{_stacks(threads)}"
            )
        return None


def _stacks(threads: Iterable[threading.Thread]) -> str:
    return stacks_of({thread.ident: thread.name for thread in threads if thread.ident is not None})


def stacks_of(names: Mapping[int, str]) -> str:
    """Returns the stacks of threads, given their names by identifier, in the format of `faulthandler`."""
    frames = sys._current_frames()  # noqa: SLF001  (the only access to the stacks of other threads)
    stacks = [
        f"Thread {name} (most recent call first):\n{stack_of(frames[ident])}"
        for ident, name in names.items()
        if ident in frames
    ]
    return "\n\n".join(stacks) or "(no thread is running)"


def stack_of(frame: FrameType) -> str:
    """Returns the calls of a thread, the most recent one first.

    Source lines are omitted, because files would be read for them, on a file system that may hang.
    """
    calls = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)
    return "\n".join(f'  File "{call.filename}", line {call.lineno} in {call.name}' for call in calls)


ItemT = TypeVar("ItemT")


@final
class TimedQueue(Generic[ItemT]):
    """A first-in, first-out queue for any number of threads. An item wakes one of the threads that wait.

    With several, one whose item comes together with another's may find it only at the end of its wait. All waits are
    bounded, whatever signal handlers do: `queue.SimpleQueue.get` of Python 3.11 and 3.12 waits forever
    after a handler that outlasts its timeout.
    """

    def __init__(self) -> None:
        self._items: collections.deque[ItemT] = collections.deque()
        # Locked unless an item has arrived since it was last acquired.
        self._has_item = threading.Lock()
        self._has_item.acquire()

    def put(self, item: ItemT) -> None:
        self._items.append(item)
        if self._has_item.locked():
            try:
                self._has_item.release()
            except RuntimeError:
                # Another thread has put an item at the same moment.
                return

    def get(self, timeout: float) -> ItemT:
        """Removes the next item and returns it. Raises queue.Empty if none arrives in time, in seconds."""
        deadline = time.monotonic() + timeout
        while True:
            if self._items:
                try:
                    return self._items.popleft()
                except IndexError:
                    # Another thread has taken it.
                    continue
            if (seconds := deadline - time.monotonic()) <= 0:
                raise queue.Empty
            self._has_item.acquire(timeout=seconds)

    def take(self, clock: StallClock) -> ItemT:
        """Removes the next item and returns it. Raises queue.Empty if none arrives in a slice of the clock's wait."""
        since = time.monotonic()
        try:
            return self.get(timeout=clock.seconds)
        except queue.Empty:
            clock.passed(time.monotonic() - since)
            raise

    def __len__(self) -> int:
        return len(self._items)


ResultT = TypeVar("ResultT")

BLOCKED_SECONDS = 0.05
"""A thread is blocked if it uses no processor time for this long."""


def watched(work: Callable[[], ResultT], describe: Callable[[], str], stall_timeout: float) -> ResultT:
    """Calls a function in the consumer's thread. The watcher logs it if it does not return.

    `describe` returns a description of the work. The watcher's thread calls it.
    """
    thread = threading.get_ident()
    outer = _running.get(thread)
    _running[thread] = time.perf_counter(), stall_timeout, describe
    # Signal handlers run after calls, and there is none between the end of this one and the end of the entry.
    try:
        return work()
    finally:
        if outer is None:
            del _running[thread]
        else:
            _running[thread] = outer


_running: dict[int, tuple[float, float, Callable[[], str]]] = {}
"""The innermost call of each thread that is inside of one: when it began, its stall timeout, and its description."""


@final
class Watch(weakref.ref[Any]):
    """A reference to an engine while its consumer may run user code."""

    __slots__ = ("is_over", "limit")

    def __init__(self, engine: Any, callback: Callable[[Any], object], stall_timeout: float) -> None:
        super().__init__(engine, callback)  # type: ignore[call-arg]  # typeshed: `weakref.ref` has no __init__
        self.limit = min(STALL_WARNING_SECONDS, stall_timeout)
        self.is_over = False

    def __new__(cls, engine: Any, callback: Callable[[Any], object], _: float) -> "Watch":
        return super().__new__(cls, engine, callback)

    def end(self) -> None:
        self.is_over = True
        _watcher.messages.put(self)


@final
class _Watcher:
    """The thread that looks at the calls of consumers.

    It wakes up at least once per shortest limit. A call that began just after it looked is then younger than its limit,
    and the watcher looks again when the call reaches it.
    """

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[Watch] = queue.SimpleQueue()
        # Held by the thread.
        self._slot = threading.Lock()

    def watch(self, engine: Any, stall_timeout: float) -> Watch:
        watch = Watch(engine, self.messages.put, stall_timeout)
        self.messages.put(watch)
        if not self._slot.locked():
            # If the system has no thread left, the next engine tries again.
            with contextlib.suppress(RuntimeError, MemoryError):
                _thread.start_new_thread(self._begin, ())
        return watch

    def _begin(self) -> None:
        # A Thread object registers its name. `reader_threads` explains why another thread creates it.
        with contextlib.suppress(RuntimeError, MemoryError):
            threading.Thread(target=self._run, name="millstream-watch", daemon=True).start()

    def _run(self) -> None:
        while not self.messages.empty() and self._slot.acquire(blocking=False):
            try:
                self._watch_all()
            finally:
                self._slot.release()

    def _watch_all(self) -> None:
        """Watches until all watches are over."""
        watches: dict[int, Watch] = {}
        reported: set[tuple[int, float]] = set()
        resumed = seconds = 0.0
        while True:
            begin = time.perf_counter()
            with contextlib.suppress(queue.Empty):
                _take(watches, self.messages.get(timeout=seconds))
                while True:
                    _take(watches, self.messages.get_nowait())
            if not watches:
                return
            now = time.perf_counter()
            if now - begin > seconds + SLICE_SECONDS:
                # The machine was suspended.
                resumed = now
            limit = min([watch.limit for watch in watches.values()])
            seconds = min(limit, _report_hung(reported, now, resumed))


def _take(watches: dict[int, Watch], watch: Watch) -> None:
    """Adds a new watch, or removes one that is over. Its engine has then ended, or is no longer used."""
    if watches.pop(id(watch), None) is None and not watch.is_over:
        watches[id(watch)] = watch


_watcher: Final = _Watcher()


@functools.cache
def _forget_in_forked_processes() -> None:
    # The thread is not in the other process, and may have held the slot.
    os.register_at_fork(after_in_child=_watcher.__init__)


def watch(engine: Any, stall_timeout: float) -> Watch:
    """Watches the calls of an engine's consumer until `end` of the result, or until the engine has ended."""
    _forget_in_forked_processes()
    return _watcher.watch(engine, stall_timeout)


def _report_hung(reported: set[tuple[int, float]], now: float, resumed: float) -> float:
    """Reports calls that have reached their limits, each once. Returns the seconds until the next one may do so."""
    calls = _running.copy()
    reported &= {(thread, begun) for thread, (begun, *_) in calls.items()}
    seconds = math.inf
    for thread, (begun, stall_timeout, describe) in calls.items():
        until_report = max(begun, resumed) + min(STALL_WARNING_SECONDS, stall_timeout) - now
        if until_report > 0:
            seconds = min(seconds, until_report)
        elif (thread, begun) not in reported:
            reported.add((thread, begun))
            _report(thread, begun, describe)
    return seconds


def _report(thread: int, begun: float, describe: Callable[[], str]) -> None:
    text, stack = None, None
    # A report without details is better than none.
    with contextlib.suppress(Exception):
        if _is_blocked(thread):
            text, stack = _seen_in_frames(thread)
    with contextlib.suppress(Exception):
        stack = stack or _dumped_stack(thread)
    entry = _running.get(thread)
    if entry is None or entry[0] != begun:
        # It has just returned.
        return
    log_warning(
        f"the consumer's thread has been busy for {time.perf_counter() - begun:.1f} s with {text or describe()}. "
        f"No timeout ends a call in this thread. Stack:\n{stack or '(unknown)'}"
    )


def _is_blocked(thread: int) -> bool:
    """Returns True if a thread uses no processor time. Its frames then stay."""
    try:
        clock = time.pthread_getcpuclockid(thread)
        before = time.clock_gettime(clock)
        time.sleep(BLOCKED_SECONDS)
        return thread in _running and time.clock_gettime(clock) - before < BLOCKED_SECONDS / 100
    except (AttributeError, OSError):
        return False


def _seen_in_frames(thread: int) -> tuple[str | None, str | None]:
    """Returns operation and record that a blocked thread is busy with, if they are known, and its stack."""
    top = sys._current_frames().get(thread)  # noqa: SLF001  (the only access to other threads' stacks)
    frame, text = top, None
    while frame is not None and frame.f_code is not watched.__code__ and text is None:
        text, frame = _element_at(frame), frame.f_back
    return text, None if top is None else stack_of(top)


def _dumped_stack(thread: int) -> str:
    """Returns the stack of a thread that runs, as the interpreter dumps it without touching frames."""
    import tempfile  # noqa: PLC0415  (lazy: slow to import, and only hangs need it)

    with tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        sections = file.read().decode(errors="replace").split("\n\n")
    return next((section for section in sections if f"{thread:016x}" in section.partition("\n")[0]), "(unknown)")


def _element_at(frame: FrameType) -> str | None:
    """Returns the operation and the record that a step of a pipeline is busy with, if this is the frame of one.

    Steps collect results in `values`, one for each element of `origins` or of `run`. Its length is that of the results
    so far, because `list.extend` adds them one by one.
    """
    if frame.f_globals["__name__"] != steps.__name__:
        return None
    variables = frame.f_locals
    where, origins = variables.get("where"), variables.get("origins", getattr(variables.get("run"), "origins", None))
    if not isinstance(where, str) or not isinstance(origins, Origins):
        return None
    row = len(values) if isinstance(values := variables.get("values"), list) else None
    if row is not None and row < len(origins):
        return f"{where}, at {describe_origin(origins, row)}"
    return f"{where}, with {describe_records(origins)}"
