"""The report on a loader: one page that needs nothing else."""

import base64
from collections.abc import Sequence

from millstream.html_fragments import document, escaped, figure
from millstream.loader.reporting.chrome_trace import chrome_trace
from millstream.loader.reporting.html_rendering import STYLE, advice_list, loader_parts
from millstream.loader.reporting.phrases import trainer_text, who_works
from millstream.loader.reporting.quantities import count_text
from millstream.loader.reporting.snapshot import LoaderFacts
from millstream.loader.reporting.timeline import STYLE as TIMELINE_STYLE
from millstream.loader.reporting.timeline import memory_drawing, timeline
from millstream.loader.threads.profiler import Event
from millstream.loader.threads.recorder import Sample, Span


def report_page(
    facts: LoaderFacts, spans: Sequence[Span], memory: Sequence[Sample], events: Sequence[Event], *, is_recorded: bool
) -> str:
    """Returns the page: advice, picture, timeline, memory, and what went wrong.

    Args:
        facts: about the loader.
        spans: who did what, as recorded.
        memory: looks at the memory of processes.
        events: deaths and stalls.
        is_recorded: whether the loader records its timeline.
    """
    parts = [
        f"<h1>{escaped(facts.source.name)}</h1>",
        f"<p>{escaped(who_works(facts))}; {escaped(trainer_text(facts.measured))}.</p>",
        "<h2>What to change</h2>",
        advice_list(facts),
        "<h2>The pipeline</h2>",
        loader_parts(facts),
        "<h2>The last seconds</h2>",
        _timeline_part(spans, memory, events, is_recorded=is_recorded),
    ]
    if drawing := memory_drawing(memory):
        parts += ["<h2>Memory</h2>", drawing]
    parts += ["<h2>Workers that died or stalled</h2>", _events_part(events, spans)]
    return document("millstream: report on a loader", figure(*parts, style=STYLE + TIMELINE_STYLE))


def _timeline_part(
    spans: Sequence[Span], memory: Sequence[Sample], events: Sequence[Event], *, is_recorded: bool
) -> str:
    if not is_recorded:
        return "<p>Not recorded: build the loader with <code>enable_profiling=True</code>.</p>"
    if not spans:
        return "<p>Nothing was recorded yet.</p>"
    data = base64.b64encode(chrome_trace(spans, memory, events).encode()).decode()
    return (
        f"{timeline(spans, events)}<p>Red: the trainer waits; grey: it works. Hover over a piece for its batches. "
        f'All of it: <a download="millstream-trace.json" href="data:application/json;base64,{data}">the trace of '
        f'{escaped(count_text(len(spans), "piece"))} of work</a>, for <a href="https://ui.perfetto.dev">Perfetto</a>.</p>'
    )


def _events_part(events: Sequence[Event], spans: Sequence[Span]) -> str:
    if not events:
        return "<p>None.</p>"
    last = max([event.at for event in events] + [span.stop for span in spans])
    items = (f"<li>{last - event.at:,.1f} s before the end: {escaped(event.text)}</li>" for event in events)
    return f"<ul>{''.join(items)}</ul>"
