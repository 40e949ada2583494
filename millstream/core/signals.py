"""Signals: exceptions that concern the process and not a record, and a lock that handlers cannot leave locked."""

import operator
import signal
import threading
from typing import Any, final


def cannot_wait(error: BaseException) -> bool:
    """Returns True if an exception must be raised immediately, and not at the turn of the element that raised it.

    That is SystemExit, which ends the process, and a possible Ctrl-C: a KeyboardInterrupt in the main thread, unless
    the process ignores Ctrl-C, as workers do.
    """
    if isinstance(error, KeyboardInterrupt):
        in_main_thread = threading.current_thread() is threading.main_thread()
        return in_main_thread and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN
    return isinstance(error, SystemExit)


def interrupts(error: BaseException) -> bool:
    """Returns True if an exception may have come at any line of the library, and must be raised immediately."""
    return cannot_wait(error) or is_from_signal_handler(error)


def is_from_signal_handler(error: BaseException) -> bool:
    """Returns True if an exception comes from one of the current signal handlers, or from a call by it."""
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    handlers = [getattr(handler, "func", handler) for handler in handlers if callable(handler)]
    # A function or method, or an object with a method of that name.
    functions = [*handlers, *(getattr(handler, "__call__", None) for handler in handlers)]  # noqa: B004
    codes = {getattr(function, "__code__", None) for function in functions}
    entry = error.__traceback__
    while entry is not None:
        if entry.tb_frame.f_code in codes:
            return True
        entry = entry.tb_next
    return False


@final
class SignalSafeLock:
    """Holds a lock during a `with` block: it is held in the block and not after it, whatever a signal handler raises.

    `with lock:` alone guarantees that up to Python 3.13. Python 3.14 checks for signals between the call that acquires
    the lock and the block, where an exception of a handler would leave the lock acquired forever
    (https://github.com/python/cpython/issues/148874).

    Args:
        lock: a `threading.Lock` or a `threading.RLock` that no other code acquires.
    """

    __slots__ = ("_lock", "_taken")

    def __init__(self, lock: "threading.Lock | threading.RLock") -> None:
        self._lock = lock
        # Acquires the lock for each element.
        self._taken = iter(lock.acquire, None)

    def __enter__(self) -> None:
        # Python checks for signals after calls and when a function begins. A loop asks for its next element without a
        # call, so no check follows the acquisition, neither here nor when this function ends.
        for _ in self._taken:
            return

    # The lock's own method, without a Python function around it, whose start would be a check before the release.
    __exit__: Any = property(operator.attrgetter("_lock.__exit__"))
