"""A recording in Chrome's trace event format, which https://ui.perfetto.dev opens.

"Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, describes it.
Times are microseconds. They are rounded to nanoseconds here, because Perfetto rounds start and duration separately, and
a nested span must not end after the one around it.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from millstream.loader.measuring import TRAINER, Event, Sample, Span

TROUBLE = "deaths and stalls"


def chrome_trace(spans: Sequence[Span], memory: Iterable[Sample], events: Iterable[Event]) -> str:
    """Returns a recording of this process as JSON that Perfetto and chrome://tracing open."""
    here = os.getpid()
    events = list(events)
    trouble = {TROUBLE: 1 + len(lanes_of(spans))} if events else {}
    traced = [
        *_tracks(spans, here, trouble),
        *_spans(spans, here),
        *_counters(memory, spans, here),
        *_instants(events, here, trouble),
    ]
    return json.dumps({"traceEvents": traced, "displayTimeUnit": "ms"})


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """Returns the names of the trainer, then of threads and workers in the order of their numbers."""
    return sorted({span.who for span in spans}, key=lambda who: (who != TRAINER, len(who), who))


def batches_text(first: int, last: int) -> str:
    return f"batch {first}" if first == last else f"batches {first} to {last}"


def _tracks(spans: Sequence[Span], here: int, trouble: dict[str, int]) -> Iterator[dict[str, Any]]:
    """Yields names and order of the tracks: the trainer, then workers. Perfetto adds the numbers to the names."""
    workers = {span.process: span.who.removesuffix(f" {span.process}") for span in spans if span.process is not None}
    processes = {here: TRAINER} | dict(sorted(workers.items()))
    for row, (process, name) in enumerate(processes.items()):
        yield _metadata(process, process, "process_name", {"name": name})
        yield _metadata(process, process, "process_sort_index", {"sort_index": row})
        threads = {name: process} if process != here else _threads_of(spans, here) | trouble
        for number, (who, thread) in enumerate(threads.items()):
            yield _metadata(process, thread, "thread_name", {"name": who})
            yield _metadata(process, thread, "thread_sort_index", {"sort_index": number})


def _metadata(process: int, thread: int, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": name, "pid": process, "tid": thread, "args": arguments}


def _threads_of(spans: Iterable[Span], here: int) -> dict[str, int]:
    """Returns the threads of the trainer's process with their numbers, the trainer's own first, even if it was idle.

    The main thread has the number of its process, as on Linux. No thread has the number 0, which means the idle task.
    """
    others = [who for who in lanes_of(span for span in spans if span.process is None) if who != TRAINER]
    return {TRAINER: here} | {who: number for number, who in enumerate(others, 1)}


def _spans(spans: Sequence[Span], here: int) -> Iterator[dict[str, Any]]:
    threads = _threads_of(spans, here)
    for span in spans:
        name, arguments = span.what, dict[str, Any]()
        if span.blocks is not None:
            arguments = {"first batch": span.blocks[0], "last batch": span.blocks[1]}
            if span.process is not None:
                name = batches_text(*span.blocks)
        arguments |= {f"{stage} (ms)": round(seconds * 1e3, 3) for stage, seconds in span.stages}
        start, stop = _nanoseconds(span.start), _nanoseconds(span.stop)
        yield {
            "ph": "X",
            "name": name,
            "pid": here if span.process is None else span.process,
            "tid": threads[span.who] if span.process is None else span.process,
            "ts": start / 1000,
            "dur": max(0, stop - start) / 1000,
            "args": arguments,
        }


def _counters(memory: Iterable[Sample], spans: Iterable[Span], here: int) -> Iterator[dict[str, Any]]:
    processes = {span.who: span.process for span in spans}
    for sample in memory:
        process = processes.get(sample.who)
        yield {
            "ph": "C",
            "name": "memory",
            "pid": here if process is None else process,
            "ts": _nanoseconds(sample.at) / 1000,
            "args": {"bytes": sample.num_bytes},
        }


def _instants(events: Iterable[Event], here: int, trouble: dict[str, int]) -> Iterator[dict[str, Any]]:
    for event in events:
        yield {
            "ph": "i",
            "s": "t",
            "name": event.text.splitlines()[0],
            "pid": here,
            "tid": trouble[TROUBLE],
            "ts": _nanoseconds(event.at) / 1000,
        }


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
