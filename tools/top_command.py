"""`millstream top`: a monitor of the pipelines of a running trainer.

A screen is a list of lines, and each line a list of styled segments: a terminal displays them in colours, and a pipe
gets their text. On a terminal, it is redrawn at an interval, scrolls, and responds to keys.
"""

import contextlib
import os
import re
import select
import shutil
import sys
import termios
import textwrap
import time
import tty
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from millstream.loader.monitoring import NONE_SERVED, NotServed, query, served_processes
from millstream.loader.reporting.snapshot import bytes_text, count_text, seconds_text, share_text

if TYPE_CHECKING:
    from rich.text import Text


BAR = 24

WIDTH = 100
"""Width to which advice is wrapped if the terminal's is unknown."""

BESIDE_LABELS = 4 + 2 + 7 + 2 + BAR + 6
"""Characters beside a stage's label: margins, the location, the bar and the share."""

MAX_COMMAND = 200
MIN_LABEL = 16
LARGE_WAIT = 0.05
MIN_FRAMES = 2
_OWN = re.compile(r"/millstream/(?:loader|dataset)/|/threading\.py\"|^File \"<string>\"")
_HEAD = re.compile(r"^(?:Current thread|Thread) (.*) \(most recent call first\):$")

HEAD, SOFT, FULL, HOT, PLAIN = "head", "soft", "full", "hot", ""
"""The styles of segments."""


class Segment(NamedTuple):
    """A text with a style."""

    text: str
    style: str = PLAIN


Line: TypeAlias = Sequence[Segment]
Snapshot: TypeAlias = Mapping[str, Any]


def plain(line: Line) -> str:
    return "".join(segment.text for segment in line).rstrip()


def lines_of(before: Snapshot, now: Snapshot, width: int | None = None) -> Iterator[Line]:
    """Yields the lines to display, of at most `width` characters if it is given."""
    seconds = max(1e-9, now["at"] - before["at"])
    head = f"Process {now['pid']}  "
    yield [Segment(head, HEAD), Segment(command_text(now, (width or MAX_COMMAND) - len(head)), SOFT)]
    yield [Segment(f"  {_process_text(before.get('process'), now.get('process'), seconds)}", SOFT)]
    earlier = {pipeline["number"]: pipeline for pipeline in before["pipelines"]}
    for pipeline in now["pipelines"]:
        yield []
        yield from _pipeline_lines(earlier.get(pipeline["number"]), pipeline, seconds, width)


def command_text(snapshot: Snapshot, limit: int = MAX_COMMAND) -> str:
    """Returns the command of a process in one line: that of `python -c` has many."""
    text = " ".join(" ".join(snapshot["command"]).split())
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _pipeline_lines(before: Snapshot | None, now: Snapshot, seconds: float, width: int | None) -> Iterator[Line]:
    yield [Segment(f"{now['source']}, {now['order']}", HEAD)]
    for text in now["mixture"]:
        yield [Segment(f"  {text}", SOFT)]
    yield [Segment(f"  {now['who']}; shard {now['shard']}", SOFT)]
    measured = now["measured"]
    yield from _rate_lines(before or now, now, seconds, width)
    yield from _progress_lines(now)
    yield from _stage_lines(before or now, now, width)
    yield from _worker_lines(before, now, seconds)
    if measured["deaths"] or measured["stalls"]:
        yield [Segment(f"  workers: {measured['deaths']} died, {measured['stalls']} stalled", HOT)]
    for text in now["advice"]:
        mark = "  * "
        for row in textwrap.wrap(text, (width or WIDTH) - len(mark), break_long_words=False):
            yield [Segment(mark, FULL), Segment(row)]
            mark = "    "


def _rate_lines(before: Snapshot, now: Snapshot, seconds: float, width: int | None) -> Iterator[Line]:
    measured, earlier = now["measured"], before["measured"]
    batches = (measured["batches"] - earlier["batches"]) / seconds
    text = f"  {batches:,.1f} batches/s"
    if measured["records"] is not None:
        text += f", {(measured['records'] - earlier['records']) / seconds:,.0f} records/s"
    if measured["batch_bytes"]:
        text += f", {bytes_text(batches * measured['batch_bytes'])}/s"
    yield [Segment(text, HEAD), Segment(f"   {count_text(measured['batches'], 'batch')} so far", SOFT)]
    share = min(1.0, max(0.0, (_waited(now) - _waited(before)) / seconds))
    total = measured["wait_seconds"] + measured["trainer_seconds"]
    since = f"   {share_text(measured['wait_seconds'] / total)} since the start" if total else ""
    first = f", {seconds_text(measured['first_seconds'])} for first batches" if measured["first_seconds"] else ""
    style = HOT if share > LARGE_WAIT else FULL
    shown = [Segment("  waits for data  "), *_bar(share, style), Segment(f" {share_text(share):>5}")]
    if width is not None and len(plain(shown)) + len(since + first) > width:
        first = ""
    yield [*shown, Segment(since + first, SOFT)]


def _waited(pipeline: Snapshot) -> float:
    """Returns the seconds that the trainer has waited, including the current wait."""
    measured = pipeline["measured"]
    return float(measured["wait_seconds"] + measured["first_seconds"] + (pipeline["waits_for"] or 0.0))


def _progress_lines(now: Snapshot) -> Iterator[Line]:
    step, epoch = now["measured"]["step"], now["measured"]["epoch"]
    doing = now["lifecycle"] if now["waits_for"] is None else f"in next() for {seconds_text(now['waits_for'])}"
    yield [
        Segment(f"  step {step:,}{'' if epoch is None else f', epoch {epoch:,}'}"),
        Segment(f"   {doing}", SOFT),
    ]
    if not (loads := now["loads"]):
        return
    begun, ready = (sum(load[count] for load in loads) for count in ("begun", "ready"))
    ready = min(ready, begun)
    # Streams may share their threads.
    busy, most = (max(load[count] for load in loads) for count in ("busy_threads", "max_threads"))
    threads = f", {busy} of {most} threads busy" if most else ""
    more = f", {now['num_ready']:,} fetched" if now["num_ready"] else ""
    yield [
        Segment("  prefetched      "),
        *_bar(ready / begun if begun else 0.0, FULL),
        Segment(f" {ready} of {begun} calls ready{more}{threads}"),
    ]


def _stage_lines(before: Snapshot, now: Snapshot, width: int | None) -> Iterator[Line]:
    """Yields the share of each stage: since the previous snapshot, or since the start if nothing ran since then."""
    earlier = {stage["label"]: stage["seconds"] for stage in before["stages"]}
    spent = {stage["label"]: stage["seconds"] - earlier.get(stage["label"], 0.0) for stage in now["stages"]}
    if sum(spent.values()) <= 0:
        spent = {stage["label"]: stage["seconds"] for stage in now["stages"]}
    total = sum(spent.values())
    if not total:
        return
    room = max(len(label) for label in spent)
    if width is not None:
        room = min(room, max(MIN_LABEL, width - BESIDE_LABELS))
    slowest = max(spent, key=lambda label: spent[label])
    for stage in now["stages"]:
        label, share = stage["label"], spent[stage["label"]] / total
        yield [
            Segment(f"    {label if len(label) <= room else f'{label[: room - 1]}…':<{room}}  "),
            Segment(f"{stage['where']:<7}  ", SOFT),
            *_bar(share, HOT if label == slowest else FULL),
            Segment(f" {share_text(share):>5}"),
        ]


def _worker_lines(before: Snapshot | None, now: Snapshot, seconds: float) -> Iterator[Line]:
    loads = [] if before is None else before["loads"]
    earlier = {worker["pid"]: worker["process"] for load in loads for worker in load["workers"]}
    for worker in (worker for load in now["loads"] for worker in load["workers"]):
        process = worker["process"]
        who = "starting" if worker["pid"] is None else f"pid {worker['pid']}"
        state = _process_text(earlier.get(worker["pid"]), process, seconds)
        begun = "" if worker["begun"] is None else f", at {worker['begun']}"
        yield [
            Segment(f"    worker {worker['number']:<2} {who}  "),
            Segment(f"{state}, {count_text(worker['calls'], 'call')}{begun}", SOFT),
        ]


def _process_text(before: Snapshot | None, now: Snapshot | None, seconds: float) -> str:
    if now is None:
        return "not on this machine"
    text = f"{now['state']}, {bytes_text(now['memory_bytes'])}"
    if before is not None:
        busy = max(0.0, now["processor_seconds"] - before["processor_seconds"]) / seconds
        text += f", {share_text(busy)} of a core"
    return text


def _bar(share: float, style: str) -> list[Segment]:
    full = round(BAR * min(1.0, max(0.0, share)))
    return [Segment("█" * full, style), Segment("░" * (BAR - full), SOFT)]


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
