"""What the threads of this process are doing: their stacks, taken while they run on."""

import sys
import threading
import traceback


def stacks_of_threads() -> str:
    """Returns the stacks of all threads of this process but the one that asks, the main thread first.

    The text is as `faulthandler` writes it: a head for each thread, then its frames, the most recent call first.
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
    # Without the lines of the source, which would have to be read.
    found = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)  # type: ignore[arg-type]
    return [f'  File "{one.filename}", line {one.lineno} in {one.name}' for one in found]
