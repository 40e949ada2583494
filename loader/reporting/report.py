"""The report on a loader: one self-contained HTML page with a recording as an SVG drawing, or the recording as a trace.

The trace is in Chrome's trace event format, which https://ui.perfetto.dev opens.
"Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, describes it.
Times are microseconds. They are rounded to nanoseconds here, because Perfetto rounds start and duration separately, and
a nested span must not end after the one around it.
"""

import base64
import datetime as dt
import itertools
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from millstream.core.html_fragments import document, escaped, figure
from millstream.loader.measuring import STARTS, TRAINER, TRAINS, WAITS, Event, Recorder, Sample, Span
from millstream.loader.reporting.snapshot import (
    LoaderSnapshot,
    bytes_text,
    count_text,
    seconds_text,
    trainer_text,
    workers_text,
)
from millstream.loader.reporting.summary import STYLE, advice_list, loader_boxes

PACKAGES = ("millstream", "numpy", "jax", "torch")
SECONDS_SHOWN = 10.0

WIDTH = 1000
"""Width of a lane in units of the drawing. Spans that begin within the same unit are drawn as one."""

LANE = 20
GUTTER = 190
_OF_TRAINER = {STARTS: "ms-starts", WAITS: "ms-waits", TRAINS: "ms-trains"}

_KEYS = {
    "start-up, until the first batch of a pass": "var(--ms-soft)",
    "the trainer waits": "var(--ms-hot)",
    "the trainer computes": "var(--ms-line)",
}

LABEL = 60
"""Smallest width of a start-up with a label, in units of the drawing."""

TIMELINE_STYLE = """
.millstream svg{width:100%;height:auto;font:14px system-ui,sans-serif}
.millstream svg text{fill:var(--ms-text)}
.millstream svg .ms-label{fill:var(--ms-page)}
.millstream svg .ms-lane{fill:var(--ms-box)}
.millstream svg .ms-starts{fill:var(--ms-soft)}
.millstream svg .ms-waits{fill:var(--ms-hot)}
.millstream svg .ms-trains{fill:var(--ms-line)}
.millstream svg .ms-event{stroke:var(--ms-hot);stroke-width:1.5}
.millstream a{color:var(--ms-bar)}
"""


def write_report(
    path: str | Path, recorder: Recorder | None, events: Sequence[Event], snapshot: Callable[[], LoaderSnapshot]
) -> Path:
    """Writes a page, or the recording as a trace, and returns the path."""
    path = Path(path)
    if path.suffix not in (".html", ".json"):
        raise ValueError(f"The path of a report must end in .html or .json, got {str(path)!r}.")
    if path.suffix == ".json" and recorder is None:
        raise ValueError("There is no trace to write. Build a DataLoader with enable_profiling=True.")
    # Copies, because other threads may append to them.
    spans = [] if recorder is None else list(recorder.spans.copy())
    memory = [] if recorder is None else list(recorder.memory.copy())
    if path.suffix == ".json":
        text = chrome_trace(spans, memory, events)
    else:
        text = _page(snapshot(), None if recorder is None else spans, memory, events)
    path.write_text(text, encoding="utf-8")
    return path


def _page(
    snapshot: LoaderSnapshot, spans: Sequence[Span] | None, memory: Sequence[Sample], events: Sequence[Event]
) -> str:
    """Returns the page. Without a recording, there are no spans."""
    sections = [
        f"<h1>{escaped(snapshot.source.name)}</h1>",
        f"<p>{escaped(workers_text(snapshot))}; {escaped(trainer_text(snapshot.measured))}.</p>",
        f'<p class="ms-soft">{escaped(_origin_text())}</p>',
        "<h2>Advice</h2>",
        advice_list(snapshot),
        "<h2>The pipeline</h2>",
        loader_boxes(snapshot),
        "<h2>The last seconds</h2>",
        _timeline_section(spans, memory, events),
        *_memory_section(memory),
        "<h2>Workers that died or stalled</h2>",
        _events_section(events, spans or ()),
    ]
    return document("millstream: report on a loader", figure(*sections, style=STYLE + TIMELINE_STYLE))


def _origin_text() -> str:
    now = dt.datetime.now().astimezone()
    versions = [f"Python {platform.python_version()}"]
    versions += [f"{name} {getattr(sys.modules[name], '__version__', '')}" for name in PACKAGES if name in sys.modules]
    return f"{now:%Y-%m-%d %H:%M:%S %Z}, {platform.node()}, {platform.system()}; {', '.join(versions)}"


def _timeline_section(spans: Sequence[Span] | None, memory: Sequence[Sample], events: Sequence[Event]) -> str:
    if spans is None:
        return "<p>Not recorded. A DataLoader with <code>enable_profiling=True</code> records its work.</p>"
    if not spans:
        return "<p>Nothing has been recorded yet.</p>"
    data = base64.b64encode(chrome_trace(spans, memory, events).encode()).decode()
    return (
        f"{timeline(spans, events)}<p>Hover over a span for its batches. "
        f'<a download="millstream-trace.json" href="data:application/json;base64,{data}">The complete trace of '
        f'{escaped(count_text(len(spans), "span"))}</a> opens in <a href="https://ui.perfetto.dev">Perfetto</a>.</p>'
    )


def _memory_section(memory: Sequence[Sample]) -> Iterator[str]:
    largest: dict[str, int] = {}
    for sample in memory:
        largest[sample.who] = max(sample.num_bytes, largest.get(sample.who, 0))
    if largest:
        rows = (f"<li>{escaped(who)}: at most {escaped(bytes_text(size))}</li>" for who, size in largest.items())
        yield f"<h2>Memory</h2><ul>{''.join(rows)}</ul>"


def _events_section(events: Sequence[Event], spans: Sequence[Span]) -> str:
    if not events:
        return "<p>None.</p>"
    last = max([event.at for event in events] + [span.stop for span in spans])
    items = (f"<li>{last - event.at:,.1f} s before the end: {escaped(event.text)}</li>" for event in events)
    return f"<ul>{''.join(items)}</ul>"


def timeline(spans: Sequence[Span], events: Iterable[Event]) -> str:
    """Returns the last seconds of a recording as a drawing; "" if there are no spans."""
    if not spans:
        return ""
    stop = max(span.stop for span in spans)
    start = max(min(span.start for span in spans), stop - SECONDS_SHOWN)
    shown = [span for span in spans if span.stop > start]
    rows = [
        ("the trainer", [span for span in shown if span.what in _OF_TRAINER]),
        *(
            (f"{who}'s own work" if who == TRAINER else who, of_lane)
            for who in lanes_of(shown)
            if (of_lane := [span for span in shown if span.who == who and span.what not in _OF_TRAINER])
        ),
    ]
    stages = dict.fromkeys(span.what for span in shown if span.what not in _OF_TRAINER)
    # From green to violet, because red is the trainer's wait.
    colours = {
        stage: f"hsl({90 + (110 + number * 137.5) % 230:.0f} 55% 55%)" for number, stage in enumerate(stages, start=1)
    }
    scale = WIDTH / max(stop - start, 1e-9)
    body = [
        _lane(number, name, of_lane, start=start, scale=scale, colours=colours)
        for number, (name, of_lane) in enumerate(rows)
    ]
    height = LANE * len(rows)
    for event in events:
        if start <= event.at <= stop:
            x = GUTTER + (event.at - start) * scale
            title = f"<title>{escaped(event.text)}</title>"
            body.append(f'<line class="ms-event" x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height}">{title}</line>')
    axis = (
        f'<text x="{GUTTER}" y="{height + 14}">{escaped(seconds_text(stop - start))} ago</text>'
        f'<text x="{GUTTER + WIDTH}" y="{height + 14}" text-anchor="end">the end</text>'
    )
    legend = "".join(
        f'<span class="ms-key" style="background:{colour}"></span>{escaped(key)}'
        for key, colour in (_KEYS | colours).items()
    )
    drawing = f'<svg viewBox="0 0 {GUTTER + WIDTH} {height + 18}" role="img">{"".join(body)}{axis}</svg>'
    return f'{drawing}<div class="ms-soft">{legend}</div>'


def _lane(number: int, name: str, spans: Sequence[Span], *, start: float, scale: float, colours: dict[str, str]) -> str:
    y = number * LANE
    sections = [
        f'<text x="0" y="{y + 14}">{escaped(name)}</text>',
        f'<rect class="ms-lane" x="{GUTTER}" y="{y + 2}" width="{WIDTH}" height="{LANE - 4}"></rect>',
    ]
    ordered = sorted(spans, key=lambda span: span.start)
    for (what, _), run in itertools.groupby(ordered, key=lambda span: (span.what, int((span.start - start) * scale))):
        near = list(run)
        first = max(0.0, (near[0].start - start) * scale)
        last = max((max(span.stop for span in near) - start) * scale, first + 0.4)
        style = f'class="{_OF_TRAINER[what]}"' if what in _OF_TRAINER else f'style="fill:{colours[what]}"'
        sections.append(
            f'<rect {style} x="{GUTTER + first:.1f}" y="{y + 3}" width="{last - first:.1f}" height="{LANE - 6}">'
            f"<title>{escaped(_title(near))}</title></rect>"
        )
        if what == STARTS and last - first >= LABEL:
            sections.append(f'<text class="ms-label" x="{GUTTER + first + 4:.1f}" y="{y + 14}">start-up</text>')
    return "".join(sections)


def _title(spans: Sequence[Span]) -> str:
    seconds = seconds_text(sum(span.stop - span.start for span in spans))
    text = f"{spans[0].what}: {seconds}{f' in {len(spans)} spans' if len(spans) > 1 else ''}"
    blocks = [block for span in spans for block in span.blocks or ()]
    if blocks:
        text += f", {batches_text(min(blocks), max(blocks))}"
    return text + "".join(f"\n{stage}: {seconds_text(spent)}" for span in spans[:1] for stage, spent in span.stages)


TROUBLE = "deaths and stalls"


def chrome_trace(spans: Sequence[Span], memory: Iterable[Sample], events: Iterable[Event]) -> str:
    """Returns a recording of this process as JSON that Perfetto and chrome://tracing open."""
    trainer_pid, events = os.getpid(), list(events)
    others = [who for who in lanes_of(span for span in spans if span.process is None) if who != TRAINER]
    # The main thread has the number of its process, as on Linux. No thread has the number 0, which means the idle task.
    threads = {TRAINER: trainer_pid} | {who: 1 + row for row, who in enumerate([*others, *[TROUBLE] * bool(events)])}
    workers = {span.process: span.who.removesuffix(f" {span.process}") for span in spans if span.process is not None}
    processes = {span.who: span.process for span in spans if span.process is not None}
    traced = [
        *_tracks({trainer_pid: TRAINER} | dict(sorted(workers.items())), threads),
        *(_traced_span(span, trainer_pid, threads) for span in spans),
    ]
    for sample in memory:
        at, pid = _nanoseconds(sample.at) / 1000, processes.get(sample.who, trainer_pid)
        traced.append({"ph": "C", "name": "memory", "pid": pid, "ts": at, "args": {"bytes": sample.num_bytes}})
    for event in events:
        at, name = _nanoseconds(event.at) / 1000, event.text.splitlines()[0]
        traced.append({"ph": "i", "s": "t", "name": name, "pid": trainer_pid, "tid": threads[TROUBLE], "ts": at})
    return json.dumps({"traceEvents": traced, "displayTimeUnit": "ms"})


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """Returns the names of the trainer, then of threads and workers in the order of their numbers."""
    return sorted({span.who for span in spans}, key=lambda who: (who != TRAINER, len(who), who))


def batches_text(first: int, last: int) -> str:
    return f"batch {first}" if first == last else f"batches {first} to {last}"


def _tracks(processes: dict[int, str], threads: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yields names and order of the tracks: the trainer, which has threads, then workers.

    Perfetto adds the numbers to the names.
    """

    def described(process: int, thread: int, kind: str, name: str, row: int) -> Iterator[dict[str, Any]]:
        for key, arguments in ((f"{kind}_name", {"name": name}), (f"{kind}_sort_index", {"sort_index": row})):
            yield {"ph": "M", "name": key, "pid": process, "tid": thread, "args": arguments}

    for row, (process, name) in enumerate(processes.items()):
        yield from described(process, process, "process", name, row)
        for number, (who, thread) in enumerate(({name: process} if row else threads).items()):
            yield from described(process, thread, "thread", who, number)


def _traced_span(span: Span, trainer_pid: int, threads: dict[str, int]) -> dict[str, Any]:
    name, arguments = span.what, dict[str, Any]()
    if span.blocks is not None:
        arguments = {"first batch": span.blocks[0], "last batch": span.blocks[1]}
        if span.process is not None:
            name = batches_text(*span.blocks)
    arguments |= {f"{stage} (ms)": round(seconds * 1e3, 3) for stage, seconds in span.stages}
    start, stop = _nanoseconds(span.start), _nanoseconds(span.stop)
    return {
        "ph": "X",
        "name": name,
        "pid": trainer_pid if span.process is None else span.process,
        "tid": threads[span.who] if span.process is None else span.process,
        "ts": start / 1000,
        "dur": max(0, stop - start) / 1000,
        "args": arguments,
    }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
