"""`millstream top`: a running trainer's pipelines, asked over its private socket."""

import shutil
import sys
import time
from collections.abc import Iterator
from typing import Any

from millstream.loader.monitoring.client import HOW_TO_SERVE, NotServed, asked, served_processes
from millstream.tools.top_lines import Line, Snapshot, command_text, lines_of, plain
from millstream.tools.top_stacks import stack_lines


def listed() -> Iterator[str]:
    """Yields a line for each process of this user that can be looked at."""
    processes = served_processes()
    for pid in processes:
        # One that ends just now, or does not answer, keeps nobody from the others.
        try:
            snapshot = asked(pid, "snapshot")
        except (NotServed, OSError) as error:
            yield f"{pid:>8}  {error}"
        else:
            yield f"{pid:>8}  {command_text(snapshot)}"
    if not processes:
        yield f"No trainer of this user can be looked at. {HOW_TO_SERVE.replace('it', 'one', 1)}"


def shown(pid: int | None, *, once: bool, stacks: bool, interval: float) -> None:
    """Shows the pipelines of a process: live on a terminal, else one look as text.

    Args:
        pid: its number; None for the only one there is.
        once: whether one look is enough, on a terminal too.
        stacks: whether to show the stacks, too.
        interval: seconds between two looks, over which rates are taken.

    Raises:
        NotServed: it cannot be looked at.
        OSError: it does not answer.
    """
    pid = _only_one() if pid is None else pid
    looks = _Looks(pid)
    if once or not sys.stdout.isatty():
        time.sleep(interval)
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        lines = [*looks.next(width), *(looks.stacks() if stacks else ())]
        print("\n".join(map(plain, lines)))
        return
    from millstream.tools.top_screen import show_live  # noqa: PLC0415  (for a terminal)

    show_live(looks.next, looks.stacks, interval, with_stacks=stacks)


class _Looks:
    """Looks at a process, one after the other: each shows what has happened since the one before."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._before = self._asked("snapshot")

    def next(self, width: int | None) -> list[Line]:
        """Returns what there is to see since the last look, in lines of this many characters."""
        now: Snapshot = self._asked("snapshot")
        before, self._before = self._before, now
        return list(lines_of(before, now, width))

    def stacks(self) -> list[Line]:
        """Returns the stacks of now."""
        return list(stack_lines(self._asked("stacks")["stacks"]))

    def _asked(self, question: str) -> Any:
        return asked(self._pid, question)


def _only_one() -> int:
    """Returns the one process that can be looked at.

    Raises:
        NotServed: there is none, or there are several.
    """
    processes = served_processes()
    if len(processes) != 1:
        raise NotServed(
            f"Say which process to look at: {', '.join(map(str, processes))}."
            if processes
            else f"No trainer of this user can be looked at. {HOW_TO_SERVE.replace('it', 'one', 1)}"
        )
    return processes[0]
