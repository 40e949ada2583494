"""Work that is interrupted once, at each moment at which CPython runs the handlers of signals, one after the other."""

import dis
import functools
import sys
from collections.abc import Callable
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
        within: the package whose code is interrupted.

    Returns:
        True if there were that many: else nothing was interrupted.
    """
    left = number
    is_over = False

    def enter(frame: FrameType, _event: str, _argument: object) -> Any:
        if is_over or not frame.f_globals.get("__name__", "").startswith(within):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        moments = moments_of(frame.f_code)

        def step(frame: FrameType, event: str, _argument: object) -> Any:
            nonlocal left, is_over
            if event == "opcode" and not is_over and frame.f_lasti in moments:
                left -= 1
                if left < 0:
                    is_over = True
                    raise Interruption
            return step

        return step

    traced = sys.gettrace()
    sys.settrace(enter)
    try:
        work()
    except Interruption:
        return True
    finally:
        sys.settrace(traced)
    return is_over
