"""Loaders as text: their stages, and the summary, with a table of the time that each stage takes and advice."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import final

from millstream.loader.reporting.advice import Advice, advice_of
from millstream.loader.reporting.phrases import (
    aligned,
    each_text,
    is_bottleneck,
    is_measured,
    mixture_texts,
    seconds_text,
    share_text,
    stages_by_location,
    trainer_text,
    workers_text,
)
from millstream.loader.reporting.snapshot import Kind, LoaderSnapshot

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

    def _repr_html_(self) -> str:
        from millstream.loader.reporting.html_rendering import render_loader  # noqa: PLC0415  (lazy: for notebooks)

        return render_loader(self._snapshot, with_advice=True)


def render_text(snapshot: LoaderSnapshot) -> str:
    """Returns a loader as lines of text: its stages, where they run and, after a first batch, their durations."""
    return "\n".join(_lines_of_loader(snapshot))


def _lines_of_loader(snapshot: LoaderSnapshot) -> Iterator[str]:
    yield f"DataLoader, shard {snapshot.shard}"
    yield f"  source  {snapshot.source.name}"
    yield f"  order   {snapshot.order.name}"
    yield from (f"  {text}" for text in mixture_texts(snapshot))
    width = max(len(stage.label) for stage in snapshot.stages)
    for location, stages in stages_by_location(snapshot):
        yield f"  ┌ {location}"
        for stage in stages:
            text = stage.label
            if is_measured(snapshot):
                mark = "  <- slowest" if is_bottleneck(snapshot, stage) else ""
                text = (
                    f"{text:<{width}}  {each_text(snapshot, stage):>17}  {share_text(snapshot.share(stage)):>5}{mark}"
                )
            yield f"  │ {text}"
            yield from (f"  │     {leaf}" for leaf in stage.structure or ())
        yield "  └"
    yield f"  trainer: {trainer_text(snapshot.measured)}"


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
    measured = snapshot.measured

    def row(label: str, location: str, seconds: float, share: float) -> tuple[str, ...]:
        each = seconds_text(seconds / measured.batches) if measured.batches else ""
        return label, location, f"{seconds:.3f}", each, f"{share:.0%}"

    stages = [stage for stage in snapshot.stages if stage.kind is not Kind.HAND_OVER or snapshot.num_workers]
    total = measured.seconds or 1.0
    head, *lines = aligned(
        [
            ("stage", "where", "seconds", "per batch", "share"),
            *(row(stage.label, stage.location.value, stage.seconds, snapshot.share(stage)) for stage in stages),
            ("the first batch of each pass", "", f"{measured.first_seconds:.3f}", "", ""),
            row("the trainer waits", "trainer", measured.wait_seconds, measured.wait_seconds / total),
            row("the trainer works", "trainer", measured.trainer_seconds, measured.trainer_seconds / total),
        ],
        left=2,
    )
    marks = ["  <- slowest" if is_bottleneck(snapshot, stage) else "" for stage in stages]
    rule = "-" * len(head)
    return [head, rule, *map(str.__add__, lines, marks), rule, *lines[len(stages) :]]
