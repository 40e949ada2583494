"""Exceptions that concern the process and not a record, and that are therefore raised immediately."""

import signal
import threading


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
