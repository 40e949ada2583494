"""`millstream top` on a terminal: redraws at an interval, scrolls, and responds to keys."""

import contextlib
import os
import re
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from millstream.tools.top_lines import FULL, HEAD, HOT, PLAIN, SOFT, Line, Segment

if TYPE_CHECKING:
    from rich.text import Text

_STYLES = {HEAD: "bold", SOFT: "dim", FULL: "cyan", HOT: "bold red", PLAIN: ""}

_HELP = "q quit · s stacks · ↓ and ↑ scroll"

_SCROLLS = {
    **dict.fromkeys(("j", " ", "\x1b[B", "\x1bOB", "\x1b[6~"), 1),
    **dict.fromkeys(("k", "\x1b[A", "\x1bOA", "\x1b[5~"), -1),
}
"""Half pages to move down for j, space, the arrow and page down, and for their opposites."""

_KEY = re.compile(r"\x1b[\[O][0-9;]*[A-Za-z~]|.", re.DOTALL)
"""One key. An arrow is a sequence that begins with the byte of Escape, which alone quits."""

MAX_BYTES = 1024
"""Number of bytes that are read together."""


def show_live(
    next_lines: Callable[[int], Sequence[Line]],
    stacks: Callable[[], Sequence[Line]],
    seconds: float,
    *,
    with_stacks: bool = False,
) -> None:
    """Redraws until q is pressed or the trainer ends.

    Args:
        next_lines: returns the current lines of at most the given number of characters. It is called every `seconds`.
        stacks: returns the lines of stacks. It is called when s is pressed.
        seconds: interval between two calls of `next_lines`.
        with_stacks: True to display the stacks from the beginning.

    Raises:
        ImportError: rich is not installed.
    """
    try:
        from rich.console import Console  # noqa: PLC0415  (lazy: only terminals need it)
        from rich.live import Live  # noqa: PLC0415
    except ImportError:
        raise ImportError(
            "The live display needs rich: pip install 'millstream[top]'. Without it, use --once for one snapshot."
        ) from None
    shown: Sequence[Line] = stacks() if with_stacks else ()
    top = 0
    console = Console(highlight=False)
    with _unbuffered_keys(), Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
        while True:
            lines = [*next_lines(console.size.width), *shown]
            room = max(1, console.size.height - 2)
            top = max(0, min(top, len(lines) - room))
            live.update(_rendered(lines, top, room), refresh=True)
            for key in _read_keys(seconds):
                if key in ("q", "\x1b", "\x04"):
                    return
                if key == "s":
                    shown = () if shown else stacks()
                top += room // 2 * _SCROLLS.get(key, 0)


def _rendered(lines: Sequence[Line], top: int, room: int) -> "Text":
    from rich.text import Text  # noqa: PLC0415  (lazy: only terminals need it)

    below = max(0, len(lines) - top - room)
    text = Text(no_wrap=True, overflow="ellipsis")
    more = f" · {below} more lines below" if below else ""
    for line in [*lines[top : top + room], [], [Segment(f"{_HELP}{more}", SOFT)]]:
        for segment in line:
            text.append(segment.text, style=_STYLES[segment.style])
        text.append("\n")
    text.rstrip()
    return text


@contextlib.contextmanager
def _unbuffered_keys() -> Iterator[None]:
    """Makes the terminal pass on each key when it is pressed, without an echo. Ctrl-C still interrupts."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _read_keys(seconds: float) -> list[str]:
    """Returns the keys that are pressed until the first of them has arrived, within the given time."""
    source = [sys.stdin] if sys.stdin.isatty() else []
    ready, _, _ = select.select(source, [], [], seconds)
    return _KEY.findall(os.read(sys.stdin.fileno(), MAX_BYTES).decode(errors="replace")) if ready else []
