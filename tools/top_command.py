"""`millstream top`: a monitor of the pipelines of a running trainer."""

import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from millstream.loader.monitoring.client import NONE_SERVED, NotServed, query, served_processes
from millstream.loader.reporting.phrases import count_text
from millstream.tools.top_lines import HEAD, SOFT, Line, Segment, Snapshot, command_text, lines_of, plain

MIN_FRAMES = 2
"""Smallest number of frames to which a stack is shortened."""

_OWN = re.compile(r"/millstream/(?:loader|dataset)/|/threading\.py\"|^File \"<string>\"")
_HEAD = re.compile(r"^(?:Current thread|Thread) (.*) \(most recent call first\):$")


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

    Args:
        pid: the process; None for the only one that can be monitored.
        once: True to print one snapshot and exit on a terminal, too.
        stacks: True to display the stacks as well.
        interval: seconds between two snapshots. Rates are averages over it.

    Raises:
        NotServed: the process cannot be monitored.
        OSError: it does not answer.
    """
    pid = _only_process() if pid is None else pid
    snapshots = _Snapshots(pid)
    if once or not sys.stdout.isatty():
        time.sleep(interval)
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        lines = [*snapshots.next(width), *(snapshots.stacks() if stacks else ())]
        print("\n".join(map(plain, lines)))
        return
    from millstream.tools.top_screen import show_live  # noqa: PLC0415  (lazy: only terminals need it)

    show_live(snapshots.next, snapshots.stacks, interval, with_stacks=stacks)


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
        """Returns the current stacks."""
        return list(stack_lines(query(self._pid, "stacks")["stacks"]))


def _only_process() -> int:
    """Returns the only process that can be monitored.

    Raises:
        NotServed: there is none, or there are several.
    """
    processes = served_processes()
    if not processes:
        raise NotServed(NONE_SERVED)
    if len(processes) > 1:
        raise NotServed(f"Choose a process to monitor: {', '.join(map(str, processes))}.")
    return processes[0]


def stack_lines(stacks: Sequence[Mapping[str, str]]) -> Iterator[Line]:
    """Yields stacks in the format of `faulthandler` as lines. Threads with equal stacks are counted, not repeated."""
    for one in stacks:
        yield []
        yield [Segment(f"Stacks of {one['who']}", HEAD), Segment(", the most recent call first", SOFT)]
        for (frames, number), names in _grouped(one["text"]).items():
            yield [Segment(f"  {names if number == 1 else count_text(number, 'thread')}", SOFT)]
            yield from ([Segment(f"    {frame}")] for frame in frames)


def _grouped(text: str) -> dict[tuple[tuple[str, ...], int], str]:
    """Returns the different stacks, each with the number of threads that have it and the name of one of them."""
    names: dict[tuple[str, ...], str] = {}
    counts: Counter[tuple[str, ...]] = Counter()
    for stack in text.split("\n\n"):
        lines = stack.strip("\n").splitlines()
        if not lines:
            continue
        head = _HEAD.match(lines[0])
        frames = _shortened([line.strip() for line in (lines[1:] if head else lines)])
        counts[frames] += 1
        names.setdefault(frames, head.group(1) if head else "")
    return {(frames, number): names[frames] for frames, number in counts.items()}


def _shortened(frames: list[str]) -> tuple[str, ...]:
    """Returns frames without the outermost ones of the library and of Python, but at least MIN_FRAMES."""
    last = max((number for number, frame in enumerate(frames) if not _OWN.search(frame)), default=-1)
    return tuple(frames[: max(last + 2, MIN_FRAMES)])
