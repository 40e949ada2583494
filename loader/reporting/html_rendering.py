"""The HTML rendering of a loader, for notebooks and reports. It loads nothing from elsewhere."""

from collections.abc import Iterator

from millstream.html_fragments import card, escaped, figure, leaf_lines, proportions, soft
from millstream.loader.reporting.advice import advice_of
from millstream.loader.reporting.phrases import (
    components_text,
    each_text,
    is_bottleneck,
    is_measured,
    share_text,
    stages_by_location,
    trainer_text,
)
from millstream.loader.reporting.snapshot import LoaderSnapshot, StageSnapshot

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
"""Style sheet of loaders, in addition to the common one."""

_FLOW = '<div class="ms-flow">↓</div>'


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
    """Returns the advice about a loader as a list."""
    return f"<ul>{''.join(f'<li>{escaped(item.text)}</li>' for item in advice_of(snapshot))}</ul>"


def _frames(snapshot: LoaderSnapshot) -> Iterator[str]:
    for location, stages in stages_by_location(snapshot):
        rows = "".join(_stage(snapshot, stage) for stage in stages)
        yield f'<div class="ms-frame"><div class="ms-soft">{escaped(location)}</div>{rows}</div>'


def _stage(snapshot: LoaderSnapshot, stage: StageSnapshot) -> str:
    mark = " ms-slowest" if is_bottleneck(snapshot, stage) else ""
    numbers = _numbers(snapshot, stage) if is_measured(snapshot) else ""
    leaves = leaf_lines(stage.structure or ())
    row = f'<div class="ms-row"><code>{escaped(stage.label)}</code>{numbers}</div>'
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
