"""Work that is interrupted once, at each moment at which CPython runs the handlers of signals, one after the other."""

import contextlib
import dis
import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any

CHECKED = ("CALL", "JUMP_BACKWARD", "RESUME")
"""Handlers run after instructions whose names begin so."""


class Interruption(KeyboardInterrupt):
    """The exception of the handler: that of Ctrl-C."""


@functools.cache
def moments_of(code: CodeType) -> frozenset[int]:
    """Returns the offsets of instructions before which a handler may have raised.

    What a handler raises after a call is caught where the call is. An instruction that other handlers of exceptions
    guard than the call before it is left out.
    """
    guards = dis._parse_exception_table(code)  # type: ignore[attr-defined]  # (no public name)

    def guard_of(offset: int) -> int | None:
        return next((guard.target for guard in guards if guard.start <= offset < guard.end), None)

    found, before = set(), None
    for one in dis.get_instructions(code):
        if before is not None and before.opname.startswith(CHECKED) and guard_of(before.offset) == guard_of(one.offset):
            found.add(one.offset)
        before = one
    return frozenset(found)


def interrupt_at(number: int, work: Callable[[], Any], within: str = "millstream") -> bool:
    """Does some work, with an exception at one of the moments in the library's code at which a handler could run.

    Args:
        number: which of these moments, from 0.
        work: what is done, in this thread.
        within: the package or module whose code is interrupted.

    Returns:
        True if there were that many: else nothing was interrupted.
    """
    left, is_over, thread = number, False, threading.get_ident()
    path = f"{os.sep}{within.replace('.', os.sep)}{os.sep}"

    def check(code: CodeType, offset: int) -> None:
        nonlocal left, is_over
        if (
            is_over
            or path not in f"{code.co_filename.removesuffix('.py')}{os.sep}"
            or offset not in moments_of(code)
            or threading.get_ident() != thread
        ):
            return
        left -= 1
        if left < 0:
            is_over = True
            raise Interruption

    try:
        # The tracing ends first: a destructor may run between the two ends.
        with losing_interruptions(), before_instructions(check):
            work()
    except Interruption:
        return True
    return is_over


@contextlib.contextmanager
def losing_interruptions() -> Iterator[None]:
    """Ignores interruptions in destructors and callbacks of Python's, which lose them as they lose Ctrl-C."""
    report = sys.unraisablehook

    def report_others(unraisable: Any) -> None:
        if not isinstance(unraisable.exc_value, Interruption):
            report(unraisable)

    sys.unraisablehook = report_others
    try:
        yield
    finally:
        sys.unraisablehook = report


@contextlib.contextmanager
def before_instructions(check: Callable[[CodeType, int], None]) -> Iterator[None]:
    """Calls a function before each instruction of the block, with its code and offset."""
    if sys.version_info >= (3, 13):
        # The first tracing of a function by `settrace` has no events for its instructions there.
        monitoring = sys.monitoring
        monitoring.use_tool_id(monitoring.DEBUGGER_ID, "interrupted")
        monitoring.register_callback(monitoring.DEBUGGER_ID, monitoring.events.INSTRUCTION, check)
        monitoring.set_events(monitoring.DEBUGGER_ID, monitoring.events.INSTRUCTION)
        try:
            yield
        finally:
            monitoring.set_events(monitoring.DEBUGGER_ID, monitoring.events.NO_EVENTS)
            monitoring.free_tool_id(monitoring.DEBUGGER_ID)
    else:

        def enter(frame: FrameType, _event: str, _argument: object) -> Any:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            return step

        def step(frame: FrameType, event: str, _argument: object) -> Any:
            if event == "opcode":
                check(frame.f_code, frame.f_lasti)
            return step

        traced = sys.gettrace()
        # Python 3.12 has these events only if a frame asks for them before `settrace`.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(enter)
        try:
            yield
        finally:
            sys.settrace(traced)
