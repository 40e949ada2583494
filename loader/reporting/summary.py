"""Loaders as text and as HTML: their stages, and the summary, with the time that each stage takes and advice.

The HTML, for notebooks and reports, loads nothing from elsewhere.
"""

import textwrap
from collections.abc import Iterator, Sequence
from typing import final

from millstream.core.html_fragments import card, escaped, figure, leaf_lines, proportions, soft
from millstream.loader.reporting.advice import Advice, advice_of
from millstream.loader.reporting.phrases import (
    aligned,
    components_text,
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
from millstream.loader.reporting.snapshot import LoaderSnapshot, StageSnapshot

WIDTH = 80

STYLE = """
.millstream .ms-flow{margin:.1em 1em;color:var(--ms-soft)}
.millstream .ms-frame{border:1px dashed var(--ms-line);border-radius:8px;padding:.5em .7em;margin:0}
.millstream .ms-frame>.ms-soft{margin-bottom:.3em}
.millstream .ms-stage{padding:.2em 0 .2em .6em;border-left:3px solid var(--ms-line);margin:.25em 0;
overflow-wrap:anywhere}
.millstream .ms-row{display:grid;grid-template-columns:minmax(0,1fr) 7rem 3.2rem 7rem 9rem;gap:.6em;align-items:center}
.millstream .ms-number{text-align:right;white-space:nowrap}
.millstream .ms-bar{background:var(--ms-line);height:.55em;border-radius:3px;overflow:hidden}
.millstream .ms-bar>span{display:block;height:100%;background:var(--ms-bar)}
.millstream .ms-slowest{border-left-color:var(--ms-hot)}
.millstream .ms-slowest .ms-bar>span{background:var(--ms-hot)}
.millstream .ms-slowest code::after{content:"slowest";color:var(--ms-hot);margin-left:.8em;
font-family:system-ui,sans-serif}
.millstream ul{margin:.5em 0 0;padding-left:1.3em}
.millstream h1{font-size:1.3em;margin:0 0 .3em}
.millstream h2{font-size:1.1em;margin:1.4em 0 .5em}
"""

_FLOW = '<div class="ms-flow">↓</div>'


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
        return render_loader(self._snapshot, with_advice=True)


def render_text(snapshot: LoaderSnapshot) -> str:
    return "\n".join(_lines_of_loader(snapshot))


def _lines_of_loader(snapshot: LoaderSnapshot) -> Iterator[str]:
    yield f"DataLoader, shard {snapshot.shard}"
    yield f"  source  {snapshot.source.name}"
    yield f"  order   {snapshot.order.name}"
    yield from (f"  {text}" for text in mixture_texts(snapshot))
    width = max(len(stage.text) for stage in snapshot.stages)
    for location, stages in stages_by_location(snapshot):
        yield f"  ┌ {location}"
        for stage in stages:
            text = stage.text
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

    stages = snapshot.running_stages
    total = measured.seconds or 1.0
    head, *lines = aligned(
        [
            ("stage", "where", "seconds", "per batch", "share"),
            *(row(stage.text, stage.location.value, stage.seconds, snapshot.share(stage)) for stage in stages),
            ("the first batch of each pass", "", f"{measured.first_seconds:.3f}", "", ""),
            row("the trainer waits", "trainer", measured.wait_seconds, measured.wait_seconds / total),
            row("the trainer works", "trainer", measured.trainer_seconds, measured.trainer_seconds / total),
        ],
        left=2,
    )
    marks = ["  <- slowest" if is_bottleneck(snapshot, stage) else "" for stage in stages]
    rule = "-" * len(head)
    return [head, rule, *map(str.__add__, lines, marks), rule, *lines[len(stages) :]]


def render_loader(snapshot: LoaderSnapshot, *, iterator: str = "", with_advice: bool = False) -> str:
    """Returns the rendering of a loader, if given after the description of a chain's iterator, with its style sheet."""
    before = (card("iterator", iterator), '<div class="ms-flow">runs</div>') if iterator else ()
    after = (advice_list(snapshot),) if with_advice else ()
    return figure(*before, loader_boxes(snapshot), *after, style=STYLE)


def loader_boxes(snapshot: LoaderSnapshot) -> str:
    """Returns boxes for source, order, stages by location, and trainer, without a style sheet."""
    source, order = (
        card(kind, described.name, *(proportions(shares, caption) for caption, shares in described.bars), soft(text))
        for kind, described, text in (
            ("source", snapshot.source, ""),
            ("order", snapshot.order, components_text(snapshot.measured)),
        )
    )
    boxes = [source, order, *_frames(snapshot), _trainer(snapshot)]
    return _FLOW.join(boxes)


def advice_list(snapshot: LoaderSnapshot) -> str:
    return f"<ul>{''.join(f'<li>{escaped(item.text)}</li>' for item in advice_of(snapshot))}</ul>"


def _frames(snapshot: LoaderSnapshot) -> Iterator[str]:
    for location, stages in stages_by_location(snapshot):
        rows = "".join(_stage(snapshot, stage) for stage in stages)
        yield f'<div class="ms-frame"><div class="ms-soft">{escaped(location)}</div>{rows}</div>'


def _stage(snapshot: LoaderSnapshot, stage: StageSnapshot) -> str:
    mark = " ms-slowest" if is_bottleneck(snapshot, stage) else ""
    numbers = _numbers(snapshot, stage) if is_measured(snapshot) else ""
    leaves = leaf_lines(stage.structure or ())
    row = f'<div class="ms-row"><code>{escaped(stage.text)}</code>{numbers}</div>'
    return f'<div class="ms-stage{mark}">{row}{leaves}</div>'


def _numbers(snapshot: LoaderSnapshot, stage: StageSnapshot) -> str:
    share = snapshot.share(stage)
    rate = f"{snapshot.measured.batches / stage.seconds:,.0f} batches/s" if stage.seconds else ""
    return _bar(share) + "".join(
        f'<span class="ms-number{soft}" title="{title}">{escaped(text)}</span>'
        for text, soft, title in (
            (share_text(share), "", "share of all stages' time"),
            (each_text(snapshot, stage), "", "time per batch, summed over threads and processes"),
            (rate, " ms-soft", "rate of one core that runs this stage only"),
        )
    )


def _trainer(snapshot: LoaderSnapshot) -> str:
    measured = snapshot.measured
    fragments = [soft(trainer_text(measured))]
    if measured.seconds:
        fragments.append(
            '<div class="ms-row"><span>waits</span>'
            f'{_bar(measured.wait_share)}<span class="ms-number">{share_text(measured.wait_share)}</span></div>'
        )
    return card("trainer", "next(batches)", *fragments)


def _bar(share: float) -> str:
    return f'<div class="ms-bar"><span style="width:{share:.1%}"></span></div>'
