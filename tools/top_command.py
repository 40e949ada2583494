"""`millstream top`: a monitor of the pipelines of a running trainer.

On a terminal, it redraws at an interval, scrolls, and responds to keys.
"""

import contextlib
import os
import re
import select
import shutil
import sys
import termios
import time
import tty
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from millstream.loader.monitoring import NONE_SERVED, NotServed, query, served_processes
from millstream.tools.top_lines import (
    FULL,
    HEAD,
    HOT,
    PLAIN,
    SOFT,
    Line,
    Segment,
    Snapshot,
    command_text,
    lines_of,
    plain,
    stack_lines,
)

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


def trainer_lines() -> Iterator[str]:
    """Yields a line for each process of this user that can be monitored."""
    processes = served_processes()
    for pid in processes:
        # A process that ends meanwhile, or does not answer, must not hide the others.
        try:
            snapshot = query(pid, "snapshot")
        except (NotServed, OSError) as error:
            yield f"{pid:>8}  {error}"
        else:
            yield f"{pid:>8}  {command_text(snapshot)}"
    if not processes:
        yield NONE_SERVED


def monitor(pid: int | None, *, once: bool, stacks: bool, interval: float) -> None:
    """Displays the pipelines of a process: live on a terminal, otherwise one snapshot as text.

    `pid` may be None if only one process can be monitored. Rates are averages over `interval` seconds.
    """
    pid = _only_process() if pid is None else pid
    snapshots = _Snapshots(pid)
    if once or not sys.stdout.isatty():
        time.sleep(interval)
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        lines = [*snapshots.next(width), *(snapshots.stacks() if stacks else ())]
        print("\n".join(map(plain, lines)))
        return
    _show_live(snapshots, interval, with_stacks=stacks)


class _Snapshots:
    """Snapshots of a process. Each is displayed with the changes since the one before."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before: Snapshot = query(pid, "snapshot")

    def next(self, width: int | None) -> list[Line]:
        """Returns lines of at most `width` characters about the time since the last snapshot."""
        now: Snapshot = query(self._pid, "snapshot")
        before, self._before = self._before, now
        return list(lines_of(before, now, width))

    def stacks(self) -> list[Line]:
        return list(stack_lines(query(self._pid, "stacks")["stacks"]))


def _only_process() -> int:
    processes = served_processes()
    if not processes:
        raise NotServed(NONE_SERVED)
    if len(processes) > 1:
        raise NotServed(f"Choose a process to monitor: {', '.join(map(str, processes))}.")
    return processes[0]


def _show_live(snapshots: _Snapshots, seconds: float, *, with_stacks: bool) -> None:
    """Redraws at an interval until q is pressed or the trainer ends."""
    try:
        from rich.console import Console  # noqa: PLC0415  (lazy: only terminals need it)
        from rich.live import Live  # noqa: PLC0415
    except ImportError:
        raise ImportError(
            "The live display needs rich: pip install 'millstream[top]'. Without it, use --once for one snapshot."
        ) from None
    shown: Sequence[Line] = snapshots.stacks() if with_stacks else ()
    top = 0
    console = Console(highlight=False)
    with _unbuffered_keys(), Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
        while True:
            lines = [*snapshots.next(console.size.width), *shown]
            room = max(1, console.size.height - 2)
            top = max(0, min(top, len(lines) - room))
            live.update(_rendered(lines, top, room), refresh=True)
            for key in _read_keys(seconds):
                if key in ("q", "\x1b", "\x04"):
                    return
                if key == "s":
                    shown = () if shown else snapshots.stacks()
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
