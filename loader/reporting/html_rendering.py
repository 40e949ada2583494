"""The picture of a loader for notebooks and pages: HTML that needs nothing else."""

from millstream.html_fragments import card, escaped, figure, leaf_lines, proportions, words
from millstream.loader.reporting.advice import advice_of
from millstream.loader.reporting.locations import frames, is_bottleneck
from millstream.loader.reporting.phrases import trainer_text
from millstream.loader.reporting.quantities import seconds_text, share_text
from millstream.loader.reporting.snapshot import LoaderFacts, StageFacts

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
"""What this picture needs beside the style of all."""

_FLOW = '<div class="ms-flow">↓</div>'


def loader_picture(facts: LoaderFacts) -> str:
    """Returns the picture of a loader, with the style that it needs."""
    return figure(loader_parts(facts), style=STYLE)


def iterator_picture(name: str, facts: LoaderFacts) -> str:
    """Returns the picture of an iterator that has no loader beside it: where it is, and what it runs."""
    return figure(card("iterator", name), '<div class="ms-flow">runs</div>', loader_parts(facts), style=STYLE)


def summary_picture(facts: LoaderFacts) -> str:
    """Returns the picture of a loader with the advice about it."""
    return figure(loader_parts(facts), advice_list(facts), style=STYLE)


def loader_parts(facts: LoaderFacts) -> str:
    """Returns the picture of a loader without its style: source, order, stages in the hands of those who do them."""
    source = card("source", facts.source.name, *([proportions(facts.source.parts)] if facts.source.parts else []))
    order = card("order", facts.order.name, *([proportions(facts.order.weights)] if facts.order.weights else []))
    boxes = [source, order, *(_frame(facts, who, stages) for who, stages in frames(facts)), _trainer(facts)]
    return _FLOW.join(boxes)


def advice_list(facts: LoaderFacts) -> str:
    """Returns the advice about a loader as a list."""
    return f"<ul>{''.join(f'<li>{escaped(item.text)}</li>' for item in advice_of(facts))}</ul>"


def _frame(facts: LoaderFacts, who: str, stages: list[StageFacts]) -> str:
    rows = "".join(_stage(facts, stage) for stage in stages)
    return f'<div class="ms-frame"><div class="ms-soft">{escaped(who)}</div>{rows}</div>'


def _stage(facts: LoaderFacts, stage: StageFacts) -> str:
    mark = " ms-slowest" if is_bottleneck(facts, stage) else ""
    numbers = _numbers(facts, stage) if facts.pipeline_seconds else ""
    leaves = leaf_lines(stage.structure or ())
    row = f'<div class="ms-row"><code>{escaped(stage.label)}</code>{numbers}</div>'
    return f'<div class="ms-stage{mark}">{row}{leaves}</div>'


def _numbers(facts: LoaderFacts, stage: StageFacts) -> str:
    batches, share = facts.measured.batches, facts.share(stage)
    each = f"{seconds_text(stage.seconds / batches)} a batch" if batches else ""
    rate = f"{batches / stage.seconds:,.0f} batches/s" if batches and stage.seconds else ""
    return _bar(share) + "".join(
        f'<span class="ms-number{soft}" title="{title}">{escaped(text)}</span>'
        for text, soft, title in (
            (share_text(share), "", "part of the work's time"),
            (each, "", "time for a batch, all who work on it added up"),
            (rate, " ms-soft", "what one core could do if it did nothing else"),
        )
    )


def _trainer(facts: LoaderFacts) -> str:
    measured = facts.measured
    parts = [words({"": trainer_text(measured)})]
    if measured.seconds:
        parts.append(
            '<div class="ms-row"><span>waits</span>'
            f'{_bar(measured.wait_share)}<span class="ms-number">{share_text(measured.wait_share)}</span></div>'
        )
    return card("trainer", "next(batches)", *parts)


def _bar(share: float) -> str:
    return f'<div class="ms-bar"><span style="width:{share:.1%}"></span></div>'
