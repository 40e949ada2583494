"""The report on a loader: one self-contained HTML page."""

import base64
import datetime as dt
import importlib.metadata
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from millstream.html_fragments import document, escaped, figure
from millstream.loader.reporting.chrome_trace import chrome_trace
from millstream.loader.reporting.html_rendering import STYLE, advice_list, loader_boxes
from millstream.loader.reporting.phrases import trainer_text, workers_text
from millstream.loader.reporting.quantities import bytes_text, count_text
from millstream.loader.reporting.snapshot import LoaderSnapshot
from millstream.loader.reporting.timeline import STYLE as TIMELINE_STYLE
from millstream.loader.reporting.timeline import timeline
from millstream.loader.threads.profiler import Event, Profiler
from millstream.loader.threads.recorder import Sample, Span

PACKAGES = ("millstream", "numpy", "jax", "torch")
"""The packages whose versions a report states, if they are imported."""


def write_report(path: str | Path, profiler: Profiler, snapshot: Callable[[], LoaderSnapshot]) -> Path:
    """Writes a page, or the recording as a trace, and returns the path. The arguments are those of `Insight.report`."""
    path, recorder = Path(path), profiler.recorder
    if path.suffix not in (".html", ".json"):
        raise ValueError(f"The path of a report must end in .html or .json, got {str(path)!r}.")
    if path.suffix == ".json" and recorder is None:
        raise ValueError("There is no trace to write. Build the loader with enable_profiling=True.")
    # Copies, because other threads may append to these.
    spans = [] if recorder is None else list(recorder.spans.copy())
    memory = [] if recorder is None else list(recorder.memory.copy())
    events = list(profiler.events.copy())
    if path.suffix == ".json":
        text = chrome_trace(spans, memory, events)
    else:
        text = _page(snapshot(), spans, memory, events, is_recorded=recorder is not None)
    path.write_text(text, encoding="utf-8")
    return path


def _page(
    snapshot: LoaderSnapshot,
    spans: Sequence[Span],
    memory: Sequence[Sample],
    events: Sequence[Event],
    *,
    is_recorded: bool,
) -> str:
    parts = [
        f"<h1>{escaped(snapshot.source.name)}</h1>",
        f"<p>{escaped(workers_text(snapshot))}; {escaped(trainer_text(snapshot.measured))}.</p>",
        f'<p class="ms-soft">{escaped(_origin_text())}</p>',
        "<h2>Advice</h2>",
        advice_list(snapshot),
        "<h2>The pipeline</h2>",
        loader_boxes(snapshot),
        "<h2>The last seconds</h2>",
        _timeline_part(spans, memory, events, is_recorded=is_recorded),
        *_memory_part(memory),
        "<h2>Workers that died or stalled</h2>",
        _events_part(events, spans),
    ]
    return document("millstream: report on a loader", figure(*parts, style=STYLE + TIMELINE_STYLE))


def _origin_text() -> str:
    """Returns time, host and versions."""
    now = dt.datetime.now().astimezone()
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES if name in sys.modules]
    return f"{now:%Y-%m-%d %H:%M:%S %Z}, {platform.node()}, {platform.system()}; {', '.join(versions)}"


def _timeline_part(
    spans: Sequence[Span], memory: Sequence[Sample], events: Sequence[Event], *, is_recorded: bool
) -> str:
    if not is_recorded:
        return "<p>Not recorded. Build the loader with <code>enable_profiling=True</code>.</p>"
    if not spans:
        return "<p>Nothing has been recorded yet.</p>"
    data = base64.b64encode(chrome_trace(spans, memory, events).encode()).decode()
    return (
        f"{timeline(spans, events)}<p>Hover over a span for its batches. "
        f'<a download="millstream-trace.json" href="data:application/json;base64,{data}">The complete trace of '
        f'{escaped(count_text(len(spans), "span"))}</a> opens in <a href="https://ui.perfetto.dev">Perfetto</a>.</p>'
    )


def _memory_part(memory: Sequence[Sample]) -> Iterator[str]:
    largest: dict[str, int] = {}
    for sample in memory:
        largest[sample.who] = max(sample.num_bytes, largest.get(sample.who, 0))
    if largest:
        rows = (f"<li>{escaped(who)}: at most {escaped(bytes_text(size))}</li>" for who, size in largest.items())
        yield f"<h2>Memory</h2><ul>{''.join(rows)}</ul>"


def _events_part(events: Sequence[Event], spans: Sequence[Span]) -> str:
    if not events:
        return "<p>None.</p>"
    last = max([event.at for event in events] + [span.stop for span in spans])
    items = (f"<li>{last - event.at:,.1f} s before the end: {escaped(event.text)}</li>" for event in events)
    return f"<ul>{''.join(items)}</ul>"
