"""The summary of a loader: a table of where the time goes, and advice."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import final

from millstream.loader.reporting.advice import Advice, advice_of
from millstream.loader.reporting.phrases import trainer_text, who_works
from millstream.loader.reporting.quantities import seconds_text
from millstream.loader.reporting.snapshot import Kind, LoaderFacts, StageFacts

WIDTH = 80
"""Advice is wrapped at this many characters."""


@final
class Summary:
    """Where the time of a loader goes, and what would make it faster. Printed, it is a page.

    Attributes:
        advice: sentences, each with a stable word for its kind (`advice[0].kind`, `advice[0].text`).
    """

    def __init__(self, facts: LoaderFacts) -> None:
        self._facts = facts
        self.advice: tuple[Advice, ...] = advice_of(facts)

    def __repr__(self) -> str:
        return "\n".join(_lines(self._facts, self.advice))

    __str__ = __repr__

    def _repr_html_(self) -> str:
        from millstream.loader.reporting.html_rendering import summary_picture  # noqa: PLC0415  (for notebooks)

        return summary_picture(self._facts)


def _lines(facts: LoaderFacts, advice: Sequence[Advice]) -> Iterator[str]:
    yield f"{facts.source.name}, {facts.order.name}"
    yield f"{who_works(facts)}; {trainer_text(facts.measured)}"
    yield ""
    yield from _table(facts)
    yield ""
    for item in advice:
        yield from textwrap.wrap(item.text, WIDTH, initial_indent="* ", subsequent_indent="  ", break_long_words=False)


def _table(facts: LoaderFacts) -> list[str]:
    shown = [stage for stage in facts.stages if stage.kind is not Kind.HAND_OVER or facts.num_workers]
    width = max(len("stage"), *(len(stage.label) for stage in shown), len("the first batch of each pass"))
    batches = facts.measured.batches
    head = f"{'stage':<{width}}  {'where':<7}  {'seconds':>9}  {'a batch':>9}  share"
    rule = "-" * len(head)

    def row(label: str, place: str, seconds: float, share: float) -> str:
        each = seconds_text(seconds / batches) if batches else ""
        return f"{label:<{width}}  {place:<7}  {seconds:>9.3f}  {each:>9}  {share:>5.0%}"

    slowest = facts.slowest if facts.pipeline_seconds else None

    def stage_row(stage: StageFacts) -> str:
        mark = "  <- slowest" if stage is slowest else ""
        return row(stage.label, stage.place.value, stage.seconds, facts.share(stage)) + mark

    measured = facts.measured
    whole = measured.seconds or 1.0
    return [
        head,
        rule,
        *map(stage_row, shown),
        rule,
        f"{'the first batch of each pass':<{width}}  {'':<7}  {measured.first_seconds:>9.3f}",
        row("the trainer waits", "trainer", measured.wait_seconds, measured.wait_seconds / whole),
        row("the trainer works", "trainer", measured.trainer_seconds, measured.trainer_seconds / whole),
    ]
