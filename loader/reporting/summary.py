"""The summary of a loader: a table of the time that each stage takes, and advice."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import final

from millstream.loader.reporting.advice import Advice, advice_of
from millstream.loader.reporting.phrases import mixture_texts, trainer_text, workers_text
from millstream.loader.reporting.quantities import seconds_text
from millstream.loader.reporting.snapshot import Kind, LoaderSnapshot, StageSnapshot

WIDTH = 80
"""Width to which advice is wrapped, in characters."""


@final
class Summary:
    """The time that each stage of a loader takes, and advice. Printed, it is a page of text.

    Attributes:
        advice: pieces of advice, each with a stable identifier and a text (`advice[0].kind`, `advice[0].text`).
    """

    def __init__(self, snapshot: LoaderSnapshot) -> None:
        self._snapshot = snapshot
        self.advice: tuple[Advice, ...] = advice_of(snapshot)

    def __repr__(self) -> str:
        return "\n".join(_lines(self._snapshot, self.advice))

    __str__ = __repr__

    def _repr_html_(self) -> str:
        from millstream.loader.reporting.html_rendering import render_summary  # noqa: PLC0415  (lazy: for notebooks)

        return render_summary(self._snapshot)


def _lines(snapshot: LoaderSnapshot, advice: Sequence[Advice]) -> Iterator[str]:
    yield f"{snapshot.source.name}, {snapshot.order.name}"
    yield from mixture_texts(snapshot)
    yield f"{workers_text(snapshot)}; {trainer_text(snapshot.measured)}"
    yield ""
    yield from _table(snapshot)
    yield ""
    for item in advice:
        yield from textwrap.wrap(item.text, WIDTH, initial_indent="* ", subsequent_indent="  ", break_long_words=False)


def _table(snapshot: LoaderSnapshot) -> list[str]:
    shown = [stage for stage in snapshot.stages if stage.kind is not Kind.HAND_OVER or snapshot.num_workers]
    width = max(len("stage"), *(len(stage.label) for stage in shown), len("the first batch of each pass"))
    batches = snapshot.measured.batches
    head = f"{'stage':<{width}}  {'where':<7}  {'seconds':>9}  {'a batch':>9}  share"
    rule = "-" * len(head)

    def row(label: str, location: str, seconds: float, share: float) -> str:
        each = seconds_text(seconds / batches) if batches else ""
        return f"{label:<{width}}  {location:<7}  {seconds:>9.3f}  {each:>9}  {share:>5.0%}"

    slowest = snapshot.slowest if snapshot.pipeline_seconds else None

    def stage_row(stage: StageSnapshot) -> str:
        mark = "  <- slowest" if stage is slowest else ""
        return row(stage.label, stage.location.value, stage.seconds, snapshot.share(stage)) + mark

    measured = snapshot.measured
    total = measured.seconds or 1.0
    return [
        head,
        rule,
        *map(stage_row, shown),
        rule,
        f"{'the first batch of each pass':<{width}}  {'':<7}  {measured.first_seconds:>9.3f}",
        row("the trainer waits", "trainer", measured.wait_seconds, measured.wait_seconds / total),
        row("the trainer works", "trainer", measured.trainer_seconds, measured.trainer_seconds / total),
    ]
