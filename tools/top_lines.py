"""What `millstream top` shows: lines made of two looks at a trainer, the rates between them, and what there is now.

Each line is a list of pieces with a style, so that a terminal shows in colours what a pipe gets as text.
"""

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from millstream.loader.reporting.quantities import bytes_text, count_text, seconds_text, share_text

BAR = 24
"""How wide a bar is."""

WIDTH = 100
"""Advice is wrapped at this many characters, where the terminal does not say how wide it is."""

BESIDE_LABELS = 4 + 2 + 7 + 2 + BAR + 6
"""What stands beside the label of a stage: margins, the place, the bar and the share."""

LONGEST_COMMAND = 200
"""Of a longer command, the beginning is shown."""

SHORTEST_LABEL = 16
"""Labels are not shortened to less than this, however narrow the terminal is."""

LARGE_WAIT = 0.05
"""A trainer that waits for more than this part of its time is marked."""

HEAD, SOFT, FULL, HOT, PLAIN = "head", "soft", "full", "hot", ""
"""The styles of pieces."""


class Piece(NamedTuple):
    """A text, and how it looks."""

    text: str
    style: str = PLAIN


Line: TypeAlias = Sequence[Piece]
Snapshot: TypeAlias = Mapping[str, Any]


def plain(line: Line) -> str:
    """Returns a line as text alone."""
    return "".join(piece.text for piece in line).rstrip()


def lines_of(before: Snapshot, now: Snapshot, width: int | None = None) -> Iterator[Line]:
    """Yields what there is to see.

    Args:
        before: what the trainer said some time ago.
        now: what it says now.
        width: how many characters a line may have; None where it does not matter.
    """
    seconds = max(1e-9, now["at"] - before["at"])
    head = f"Process {now['pid']}  "
    yield [Piece(head, HEAD), Piece(command_text(now, (width or LONGEST_COMMAND) - len(head)), SOFT)]
    yield [Piece(f"  {_process_text(before.get('process'), now.get('process'), seconds)}", SOFT)]
    earlier = {pipeline["number"]: pipeline for pipeline in before["pipelines"]}
    for pipeline in now["pipelines"]:
        yield []
        yield from _pipeline_lines(earlier.get(pipeline["number"]), pipeline, seconds, width)


def command_text(snapshot: Snapshot, most: int = LONGEST_COMMAND) -> str:
    """Returns the command of a process in one line of at most this many characters: `python -c` has many lines."""
    text = " ".join(" ".join(snapshot["command"]).split())
    return text if len(text) <= most else f"{text[: most - 1]}…"


def _pipeline_lines(before: Snapshot | None, now: Snapshot, seconds: float, width: int | None) -> Iterator[Line]:
    yield [Piece(f"{now['source']}, {now['order']}", HEAD)]
    yield [Piece(f"  {now['who']}; shard {now['shard']}", SOFT)]
    measured = now["measured"]
    yield from _rate_lines(before or now, now, seconds, width)
    for iterator in now["iterators"]:
        yield from _iterator_lines(iterator)
    yield from _stage_lines(before or now, now, width)
    for iterator in now["iterators"]:
        yield from _worker_lines(before, iterator, seconds)
    if measured["deaths"] or measured["stalls"]:
        yield [Piece(f"  workers that died: {measured['deaths']}, that stalled: {measured['stalls']}", HOT)]
    for text in now["advice"]:
        mark = "  * "
        for part in textwrap.wrap(text, (width or WIDTH) - len(mark), break_long_words=False):
            yield [Piece(mark, FULL), Piece(part)]
            mark = "    "


def _rate_lines(before: Snapshot, now: Snapshot, seconds: float, width: int | None) -> Iterator[Line]:
    """Yields how fast batches come, and how much the trainer waits for them."""
    measured, earlier = now["measured"], before["measured"]
    batches = (measured["batches"] - earlier["batches"]) / seconds
    records = (_records(now) - _records(before)) / seconds
    text = f"  {batches:,.1f} batches/s"
    if records >= 0:
        text += f", {records:,.0f} records/s"
    if measured["batch_bytes"]:
        text += f", {bytes_text(batches * measured['batch_bytes'])}/s"
    yield [Piece(text, HEAD), Piece(f"   {count_text(measured['batches'], 'batch')} so far", SOFT)]
    share = min(1.0, max(0.0, (_waited(now) - _waited(before)) / seconds))
    whole = measured["wait_seconds"] + measured["trainer_seconds"]
    since = f"   {share_text(measured['wait_seconds'] / whole)} since the start" if whole else ""
    first = f", {seconds_text(measured['first_seconds'])} for first batches" if measured["first_seconds"] else ""
    style = HOT if share > LARGE_WAIT else FULL
    shown = [Piece("  waits for data  "), *_bar(share, style), Piece(f" {share_text(share):>5}")]
    if width is not None and len(plain(shown)) + len(since + first) > width:
        first = ""
    yield [*shown, Piece(since + first, SOFT)]


def _records(pipeline: Snapshot) -> int:
    return sum(iterator["records"] for iterator in pipeline["iterators"])


def _waited(pipeline: Snapshot) -> float:
    """Returns for how long the trainer has waited, the wait at hand too."""
    measured = pipeline["measured"]
    waits = [iterator["waits_for"] or 0.0 for iterator in pipeline["iterators"]]
    return float(measured["wait_seconds"] + measured["first_seconds"] + max(waits, default=0.0))


def _iterator_lines(now: Snapshot) -> Iterator[Line]:
    """Yields where an iterator is, and what it has ready."""
    epoch = "" if now["epoch"] is None else f", epoch {now['epoch']:,}"
    doing = now["lifecycle"] if now["waits_for"] is None else f"in next() for {seconds_text(now['waits_for'])}"
    yield [Piece(f"  step {now['step']:,}{epoch}"), Piece(f"   {doing}", SOFT)]
    load = now["load"]
    if load is None:
        return
    ready = min(load["ready"], load["begun"])
    share = ready / load["begun"] if load["begun"] else 0.0
    threads = f", {load['busy_threads']} of {load['most_threads']} threads at work" if load["most_threads"] else ""
    more = f", {now['at_hand']:,} at hand" if now["at_hand"] else ""
    yield [
        Piece("  made ahead      "),
        *_bar(share, FULL),
        Piece(f" {ready} of {load['begun']} begun{more}{threads}"),
    ]


def _stage_lines(before: Snapshot, now: Snapshot, width: int | None) -> Iterator[Line]:
    """Yields where the time of the work goes: since the look before, or since the start where there was none then."""
    earlier = {stage["label"]: stage["seconds"] for stage in before["stages"]}
    spent = {stage["label"]: stage["seconds"] - earlier.get(stage["label"], 0.0) for stage in now["stages"]}
    if sum(spent.values()) <= 0:
        spent = {stage["label"]: stage["seconds"] for stage in now["stages"]}
    whole = sum(spent.values())
    if not whole:
        return
    room = max(len(label) for label in spent)
    if width is not None:
        room = min(room, max(SHORTEST_LABEL, width - BESIDE_LABELS))
    slowest = max(spent, key=lambda label: spent[label])
    for stage in now["stages"]:
        label, share = stage["label"], spent[stage["label"]] / whole
        yield [
            Piece(f"    {label if len(label) <= room else f'{label[: room - 1]}…':<{room}}  "),
            Piece(f"{stage['where']:<7}  ", SOFT),
            *_bar(share, HOT if label == slowest else FULL),
            Piece(f" {share_text(share):>5}"),
        ]


def _worker_lines(before: Snapshot | None, now: Snapshot, seconds: float) -> Iterator[Line]:
    """Yields what each worker does."""
    workers = (now["load"] or {}).get("workers", ())
    iterators = [] if before is None else before["iterators"]
    earlier = {
        worker["pid"]: worker["process"]
        for iterator in iterators
        for worker in (iterator["load"] or {}).get("workers", ())
    }
    for worker in workers:
        process = worker["process"]
        who = "starting" if worker["pid"] is None else f"pid {worker['pid']}"
        state = _process_text(earlier.get(worker["pid"]), process, seconds)
        begun = "" if worker["begun"] is None else f", at {worker['begun']}"
        yield [
            Piece(f"    worker {worker['number']:<2} {who}  "),
            Piece(f"{state}, {count_text(worker['calls'], 'call')}{begun}", SOFT),
        ]


def _process_text(before: Snapshot | None, now: Snapshot | None, seconds: float) -> str:
    """Returns what a process does, as far as the system tells."""
    if now is None:
        return "not seen by this machine"
    text = f"{now['state']}, {bytes_text(now['memory_bytes'])}"
    if before is not None:
        busy = max(0.0, now["processor_seconds"] - before["processor_seconds"]) / seconds
        text += f", {share_text(busy)} of a core"
    return text


def _bar(share: float, style: str) -> list[Piece]:
    full = round(BAR * min(1.0, max(0.0, share)))
    return [Piece("█" * full, style), Piece("░" * (BAR - full), SOFT)]
