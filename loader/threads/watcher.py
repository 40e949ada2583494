"""A watcher of user code in the consumer's thread, which nothing can interrupt: a call that hangs is at least logged.

Guarantees:
    * A call that runs longer than STALL_WARNING_SECONDS, or its stall timeout if that is shorter, is logged once, with
      the record and operation if they are known, and with the stack of its thread.
    * A call costs no more than the time at which it begins: the watcher finds it on the stacks of all threads.
    * There is one thread per process, as long as an executor exists whose consumer may run user code. It ends with the
      last of them, without any Python code that a signal handler could interrupt.
    * Time in which the whole machine was suspended does not count.
"""

import _thread
import contextlib
import functools
import math
import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Final, NamedTuple, TypeVar, final

from millstream.core.warn import log_warning
from millstream.loader.operations.elements import Origins, describe_origin, describe_records
from millstream.loader.threads.waiting import SLICE_SECONDS, STALL_WARNING_SECONDS

Result = TypeVar("Result")


def watched(
    work: Callable[[], Result],
    describe: Callable[[], str],  # noqa: ARG001
    stall_timeout: float,  # noqa: ARG001
) -> Result:
    """Calls a function in the consumer's thread. The watcher reads the variables of this frame if it does not return.

    `describe` returns a description of the work. The watcher's thread calls it.
    """
    begun = time.perf_counter()  # noqa: F841
    return work()


@final
class Watch(weakref.ref[Any]):
    """A reference to an executor while its consumer may run user code."""

    __slots__ = ("is_over", "limit")

    def __init__(self, executor: Any, _: Callable[[Any], object], stall_timeout: float) -> None:
        super().__init__(executor)
        self.limit = min(STALL_WARNING_SECONDS, stall_timeout)
        self.is_over = False

    def __new__(cls, executor: Any, callback: Callable[[Any], object], _: float) -> "Watch":
        return super().__new__(cls, executor, callback)

    def end(self) -> None:
        self.is_over = True
        _watcher.messages.put(self)


class _Call(NamedTuple):
    """A call of `watched` that a thread is in."""

    thread: int
    begun: float
    limit: float
    frame: FrameType


@final
class _Watcher:
    """The thread that looks at the stacks of consumers.

    It wakes up at least once per shortest limit. A call that began just after it looked is then younger than its limit,
    and the watcher looks again when the call reaches it.
    """

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[Watch] = queue.SimpleQueue()
        # Held by the thread.
        self._slot = threading.Lock()

    def watch(self, executor: Any, stall_timeout: float) -> Watch:
        watch = Watch(executor, self.messages.put, stall_timeout)
        self.messages.put(watch)
        if not self._slot.locked():
            # If the system has no thread left, the next executor tries again.
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
    """Adds a new watch, or removes one that is over. Its executor has then ended, or is no longer used."""
    if watches.pop(id(watch), None) is None and not watch.is_over:
        watches[id(watch)] = watch


_watcher: Final = _Watcher()


@functools.cache
def _forget_in_forked_processes() -> None:
    # The thread is not in the other process, and may have held the slot.
    os.register_at_fork(after_in_child=_watcher.__init__)  # type: ignore[misc]


def watch(executor: Any, stall_timeout: float) -> Watch:
    """Watches the calls of an executor's consumer until `end` of the result, or until the executor has ended."""
    _forget_in_forked_processes()
    return _watcher.watch(executor, stall_timeout)


def _running_calls() -> Iterator[_Call]:
    """Yields the innermost call of each thread that is inside of one."""
    for thread, top in sys._current_frames().items():  # noqa: SLF001  (the only access to other threads' stacks)
        frame: FrameType | None = top
        while frame is not None and frame.f_code is not watched.__code__:
            frame = frame.f_back
        # A call that has just begun has no such variable yet.
        if frame is not None and "begun" in (variables := frame.f_locals):
            limit = min(STALL_WARNING_SECONDS, variables["stall_timeout"])
            yield _Call(thread, variables["begun"], limit, frame)


def _report_hung(reported: set[tuple[int, float]], now: float, resumed: float) -> float:
    """Reports calls that have reached their limits, each once. Returns the seconds until the next one may do so.

    A function of its own, because a frame keeps all that its variables refer to, such as open files.
    """
    calls = list(_running_calls())
    reported &= {call[:2] for call in calls}
    seconds = math.inf
    for call in calls:
        left = max(call.begun, resumed) + call.limit - now
        if left > 0:
            seconds = min(seconds, left)
        elif call[:2] not in reported:
            reported.add(call[:2])
            _report(call, now - call.begun)
    return seconds


def _report(call: _Call, seconds: float) -> None:
    top = sys._current_frames().get(call.thread)  # noqa: SLF001  (as above)
    stack = list(_frames(top, call.frame))
    if not stack:
        return
    text = next(filter(None, map(_element_at, stack)), None)
    log_warning(
        f"the consumer's thread has been busy for {seconds:.1f} s with {text or call.frame.f_locals['describe']()}. "
        "No timeout ends a call in this thread. Stack:\n"
        f"{''.join(traceback.format_stack(top))}"
    )


def _frames(top: FrameType | None, last: FrameType) -> Iterator[FrameType]:
    """Yields the frames from a thread's innermost one to `last`; none if the thread has left that."""
    frames: list[FrameType] = []
    while top is not None:
        frames.append(top)
        if top is last:
            return iter(frames)
        top = top.f_back
    return iter(())


def _element_at(frame: FrameType) -> str | None:
    """Returns the operation and the record that a step of a pipeline is busy with, if this is the frame of one.

    Steps collect results in `values`, one for each element of `origins` or of `run`. Its length is that of the results
    so far, because `list.extend` adds them one by one.
    """
    if not frame.f_globals["__name__"].startswith("millstream.loader.operations."):
        return None
    variables = frame.f_locals
    where, origins = variables.get("where"), variables.get("origins", getattr(variables.get("run"), "origins", None))
    if not isinstance(where, str) or not isinstance(origins, Origins):
        return None
    row = len(values) if isinstance(values := variables.get("values"), list) else None
    if row is not None and row < len(origins):
        return f"{where}, at {describe_origin(origins, row)}"
    return f"{where}, with {describe_records(origins)}"
