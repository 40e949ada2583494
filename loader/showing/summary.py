"""The summary of a loader: a table of where the time goes, and advice."""

import textwrap
from collections.abc import Iterator, Sequence
from typing import final

from millstream.loader.showing.advice import Advice, advice_of
from millstream.loader.showing.amounts import bytes_text, count_text, seconds_text, share_text
from millstream.loader.showing.facts import Kind, LoaderFacts, Measured, StageFacts

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
        from millstream.loader.showing.picture import summary_picture  # noqa: PLC0415  (which imports this module)

        return summary_picture(self._facts)


def _lines(facts: LoaderFacts, advice: Sequence[Advice]) -> Iterator[str]:
    yield f"{facts.source.name}, {facts.order.name}"
    yield f"{who_works(facts)}; {trainer_text(facts.measured)}"
    yield ""
    yield from _table(facts)
    yield ""
    for item in advice:
        yield from textwrap.wrap(item.text, WIDTH, initial_indent="* ", subsequent_indent="  ", break_long_words=False)


def who_works(facts: LoaderFacts) -> str:
    """Returns who makes the batches, as a part of a sentence."""
    threads = count_text(facts.num_threads, "thread") if facts.num_threads else "no threads"
    if facts.num_workers:
        workers = count_text(facts.num_workers, facts.front.worker)
        where = " for them" if facts.front.is_on_cluster else ""
        return f"{workers} with {threads}{' each' if facts.num_workers > 1 else ''}, {_cores(facts)}{where}"
    return (
        f"no worker processes, up to {threads}, {_cores(facts)}"
        if facts.num_threads
        else (f"no worker processes, {threads}, {_cores(facts)}")
    )


def trainer_text(measured: Measured) -> str:
    """Returns what the trainer got so far, as a part of a sentence."""
    if not measured.batches:
        return "no batch yet"
    size = "" if measured.batch_bytes is None else f" of {bytes_text(measured.batch_bytes)}"
    if not measured.seconds:
        return f"{count_text(measured.batches, 'batch')}{size}"
    return (
        f"{count_text(measured.batches, 'batch')}{size} in {seconds_text(measured.seconds)}, "
        f"{share_text(measured.wait_share)} of it waiting"
    )


def _cores(facts: LoaderFacts) -> str:
    return count_text(facts.num_cores, "core")


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
