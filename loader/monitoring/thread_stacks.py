"""Stacks of all threads of this process, taken while they run."""

import sys
import threading
import traceback


def stacks_of_threads() -> str:
    """Returns the stacks of all threads except the calling one, the main thread first.

    The format is that of `faulthandler`: a head per thread, then its frames, the most recent call first.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    frames = sys._current_frames()  # noqa: SLF001  (documented, for tools like this)
    order = sorted((ident for ident in frames if ident != own), key=lambda ident: (ident != main, ident))
    return "\n\n".join(
        "\n".join([f"Thread {names.get(ident, hex(ident))} (most recent call first):", *_lines_of(frames[ident])])
        for ident in order
    )


def _lines_of(frame: object) -> list[str]:
    # Source lines are omitted, because files would be read for them.
    found = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)  # type: ignore[arg-type]
    return [f'  File "{one.filename}", line {one.lineno} in {one.name}' for one in found]
