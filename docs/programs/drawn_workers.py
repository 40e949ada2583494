"""Draws how workers work, for the page that explains it: who there is, and a run in which one of them was killed.

The run is a real one. Each batch takes a given time to make, so that the picture shows the order of things and not the
speed of a machine.
"""

import dataclasses
import html
import os
import signal
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

import millstream

SECONDS = (0.2, 0.3, 0.1, 0.2, 0.25, 0.1, 0.15, 0.25, 0.2, 0.15, 0.2, 0.2)
"""The time that each batch of the run takes."""

KILLED_AT, KILLED_AFTER = 4, 0.12
"""The batch at which a worker is killed, once; and how many seconds after it has begun."""

KILLED_MARK = " \N{MULTIPLICATION SIGN}"
"""The mark after the number of a batch whose worker was killed."""

STEP_SECONDS = 0.07
"""The duration of a training step of the run."""

WIDTH, EDGE = 700, 8
"""The width of the picture, and of its margins."""

PLOT, ROW, HIGH = 104, 42, 28
"""The left edge of the bars; the distance between rows; the height of a bar."""

STYLE = """<style>
text { font: 14px system-ui, sans-serif; fill: #24292f }
.small { font-size: 12px; fill: #57606a }
.box { fill: #eef2f5; stroke: #8c959f }
.a { fill: #b6dcd6; stroke: #2a7f74 }
.b { fill: #f3d9b1; stroke: #a86b14 }
.c { fill: #d8d3ee; stroke: #6a5aa5 }
.lost { fill: none; stroke: #c4432b; stroke-dasharray: 4 3; stroke-width: 1.5 }
.frame { fill: none; stroke: #8c959f; stroke-dasharray: 4 3 }
.line { stroke: #8c959f; fill: none; stroke-width: 1.5 }
.tip { fill: #8c959f }
@media (prefers-color-scheme:dark) {
  text { fill: #e6edf3 } .small { fill: #9da7b3 } .box { fill: #2d333b; stroke: #768390 }
  .a { fill: #1d4d47; stroke: #63bfb2 } .b { fill: #5c4013; stroke: #d9a750 } .c { fill: #3a3263; stroke: #a99be0 }
  .lost { stroke: #f0846e } .frame, .line { stroke: #768390 } .tip { fill: #768390 }
}
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="6" markerHeight="6" orient="auto">
<path class="tip" d="M0 0L8 4L0 8z"/></marker></defs>
"""

COLOURS = "abc"
"""The classes of workers, the first one first."""


class Piece(NamedTuple):
    """A span of a process's work in the run."""

    who: int  # The number of the process.
    batch: int
    start: float  # In seconds.
    stop: float
    is_lost: bool = False  # The process was killed meanwhile.


@final
@dataclasses.dataclass(frozen=True)
class Prepare(millstream.Map):
    """Takes its time over a batch, and notes that in a file. One worker is killed meanwhile."""

    notes: str

    def map(self, batch: NDArray[np.int64]) -> NDArray[np.int64]:
        number, start = int(batch[0]), time.perf_counter()
        killed = Path(f"{self.notes}.killed")
        if number == KILLED_AT and not killed.exists():
            killed.touch()
            time.sleep(KILLED_AFTER)
            self._note(number, start, is_lost=True)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(SECONDS[number])
        self._note(number, start)
        return batch

    def _note(self, number: int, start: float, *, is_lost: bool = False) -> None:
        with Path(self.notes).open("a", encoding="ascii") as file:
            file.write(f"{os.getpid()} {number} {start} {time.perf_counter()} {int(is_lost)}\n")


def recorded() -> tuple[list[Piece], list[Piece]]:
    """Returns what the workers did in a run, the first worker first, and the steps of the trainer."""
    with tempfile.TemporaryDirectory() as folder:
        notes = Path(folder, "notes")
        notes.touch()
        steps: list[Any] = []
        operations = [millstream.Batch(1), Prepare(str(notes))]
        source = range(len(SECONDS))
        with millstream.load(source, num_epochs=1, transformations=operations, worker_count=2) as loader:
            for batch in loader:
                start = time.perf_counter()
                time.sleep(STEP_SECONDS)
                steps.append((int(batch[0]), start, time.perf_counter()))
        made = [[float(word) for word in line.split()] for line in notes.read_text().splitlines()]
    zero = min(start for _, _, start, _, _ in made)
    # Calls are given out in their order, so these are the workers in theirs.
    workers = list(dict.fromkeys(who for who, *_ in sorted(made, key=lambda piece: piece[1])))
    pieces = [
        Piece(workers.index(who), int(batch), start - zero, stop - zero, bool(is_lost))
        for who, batch, start, stop, is_lost in made
    ]
    return sorted(pieces), [Piece(len(workers), batch, start - zero, stop - zero) for batch, start, stop in steps]


def drawn(pieces: Sequence[Piece], steps: Sequence[Piece]) -> str:
    """Returns the picture as SVG."""
    count = 1 + max(piece.who for piece in pieces)
    top = 300
    height = top + (count + 1) * ROW + 14
    words = "Trainer, fork server, workers and the memory between them; and a run in which a worker is killed"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{html.escape(words)}">\n{STYLE}'
        + "\n".join([*processes(pieces), *run(pieces, steps, top)])
        + "\n</svg>\n"
    )


def processes(pieces: Sequence[Piece]) -> Iterable[str]:
    """Yields the upper part: who there is, and what goes between them."""
    yield box("box", EDGE, 8, 190, 222)
    yield text(EDGE + 95, 92, "trainer")
    lines = "your loop calls next(), which", "gives calls to workers and", "puts batches in order"
    for row, line in enumerate(lines):
        yield text(EDGE + 95, 116 + 18 * row, line, "small")
    yield box("box", 262, 8, 176, 44)
    yield text(350, 27, "fork server")
    yield text(350, 44, "forks and watches workers", "small")
    yield arrow(198, 30, 262, "starts")
    yield box("frame", 500, 8, 192, 222)
    yield arrow(438, 30, 500)
    yield text(596, 35, "workers", "small")
    for who in (0, 1):
        y = 64 + 64 * who
        yield box(COLOURS[who], 512, y, 168, 52)
        yield text(596, y + 22, f"worker {who}")
        yield text(596, y + 40, "reads, runs operations", "small")
        yield arrow(198, y + 8, 512, "calls", at=230)
        yield box("box", 262, y + 18, 176, 34)
        yield text(308, y + 40, "memory", "small")
        mine = [piece.batch for piece in pieces if piece.who == who]
        for column, batch in enumerate([*map(str, mine[:2]), ""]):
            yield box(COLOURS[who] if batch else "frame", 346 + 30 * column, y + 23, 26, 24)
            yield text(359 + 30 * column, y + 40, batch)
        yield arrow(512, y + 38, 438, "writes")
        yield arrow(262, y + 38, 198, "views")
    yield box("box", 262, 196, 176, 34)
    yield text(350, 218, "pipeline, written once", "small")
    yield arrow(198, 213, 262, "writes")
    yield arrow(438, 213, 500, "shared")


def run(pieces: Sequence[Piece], steps: Sequence[Piece], top: int) -> Iterable[str]:
    """Yields the lower part: a row for each worker, and one for the trainer, whose steps have their makers' colours."""
    scale = (WIDTH - EDGE - PLOT) / max(step.stop for step in steps)
    yield text(
        EDGE, top - 22, f"A run of {len(steps)} batches: a worker is killed at batch {KILLED_AT}", anchor="start"
    )
    yield text(WIDTH - EDGE, top - 22, "time \N{RIGHTWARDS ARROW}", "small", anchor="end")
    makers = {piece.batch: piece.who for piece in pieces if not piece.is_lost}
    for who in range(steps[0].who + 1):
        name = f"worker {who}" if who < steps[0].who else "trainer"
        yield text(EDGE, top + ROW * who + 19, name, anchor="start")
    for piece in [*pieces, *steps]:
        left, width, y = PLOT + scale * piece.start, scale * (piece.stop - piece.start), top + ROW * piece.who
        yield box("lost" if piece.is_lost else COLOURS[makers[piece.batch]], left, y, width, HIGH)
        yield text(left + width / 2, y + 19, f"{piece.batch}{KILLED_MARK if piece.is_lost else ''}")
    for lost in (piece for piece in pieces if piece.is_lost):
        again = next(piece for piece in pieces if piece.batch == lost.batch and not piece.is_lost)
        start, stop = (PLOT + scale * lost.stop, top + ROW * lost.who + HIGH), top + ROW * again.who + HIGH / 2
        bend = PLOT + scale * again.start
        yield f'<path class="lost" d="M{start[0]:.1f} {start[1]}V{stop}H{bend:.1f}" marker-end="url(#tip)"/>'


def box(kind: str, left: float, top: float, width: float, height: float) -> str:
    return f'<rect class="{kind}" x="{left:.1f}" y="{top:.1f}" width="{width:.1f}" height="{height:.1f}" rx="4"/>'


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    small = f' class="{kind}"' if kind else ""
    return f'<text{small} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(words)}</text>'


def arrow(start: float, y: float, stop: float, words: str = "", at: float | None = None) -> str:
    """Returns an arrow from left to right, or from right to left, with words above it."""
    label = text((start + stop) / 2 if at is None else at, y - 5, words, "small")
    return f'<path class="line" d="M{start} {y}H{stop}" marker-end="url(#tip)"/>{label}'
