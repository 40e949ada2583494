"""`millstream top` on a terminal: the picture is drawn anew, and keys are listened to."""

import contextlib
import os
import select
import sys
import termios
import tty
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from millstream.tools.top_lines import FULL, HEAD, HOT, PLAIN, SOFT, Line, Piece

if TYPE_CHECKING:
    from rich.text import Text

_STYLES = {HEAD: "bold", SOFT: "dim", FULL: "cyan", HOT: "bold red", PLAIN: ""}

_KEYS = "q quits, s shows the stacks of now, and hides them"


def show_live(
    look: Callable[[int], Sequence[Line]],
    stacks: Callable[[], Sequence[Line]],
    seconds: float,
    *,
    with_stacks: bool = False,
) -> None:
    """Draws what there is to see until q is pressed, or the trainer is gone.

    Args:
        look: returns what to draw in lines of this many characters; it is asked every `seconds`.
        stacks: returns the stacks to draw beneath; it is asked when s is pressed.
        seconds: how long to wait between two looks.
        with_stacks: whether to draw the stacks from the beginning.

    Raises:
        ImportError: rich is not installed.
    """
    try:
        from rich.console import Console  # noqa: PLC0415  (for those who look)
        from rich.live import Live  # noqa: PLC0415
    except ImportError:
        raise ImportError(
            "A live picture needs rich: pip install 'millstream[top]'. Without it, --once prints one look."
        ) from None
    shown: Sequence[Line] = stacks() if with_stacks else ()
    console = Console(highlight=False)
    with _keys_at_once(), Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
        while True:
            lines = [*look(console.size.width), *shown]
            live.update(_drawn(lines, console.size.height), refresh=True)
            key = _key(seconds)
            if key in ("q", "\x1b", "\x04"):
                return
            if key == "s":
                shown = () if shown else stacks()


def _drawn(lines: Sequence[Line], height: int) -> "Text":
    """Returns as many lines as the terminal has, and the keys on the last one."""
    from rich.text import Text  # noqa: PLC0415

    room = max(1, height - 2)
    if len(lines) > room:
        more = len(lines) - room + 1
        lines = [*lines[: room - 1], [Piece(f"… {more} more lines: --once --stacks prints them all", SOFT)]]
    text = Text(no_wrap=True, overflow="ellipsis")
    for line in [*lines, [], [Piece(_KEYS, SOFT)]]:
        for piece in line:
            text.append(piece.text, style=_STYLES[piece.style])
        text.append("\n")
    text.rstrip()
    return text


@contextlib.contextmanager
def _keys_at_once() -> Iterator[None]:
    """Has the terminal give keys as they are pressed, without showing them; Ctrl-C stays what it is."""
    if not sys.stdin.isatty():
        yield
        return
    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


def _key(seconds: float) -> str:
    """Returns the key that is pressed, having waited for one for at most this long; "" for none."""
    source = [sys.stdin] if sys.stdin.isatty() else []
    ready, _, _ = select.select(source, [], [], seconds)
    return os.read(sys.stdin.fileno(), 1).decode(errors="replace") if ready else ""
