"""A recording as Chrome's trace events, which https://ui.perfetto.dev opens.

The format is described in "Trace Event Format",
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Times are microseconds.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from millstream.loader.threads.recorder import TRAINER, Event, Sample, Span

TRAINER_PROCESS = 0
"""The number that the trainer's process has in a trace: those of workers are their own."""


def chrome_trace(spans: Sequence[Span], memory: Iterable[Sample], events: Iterable[Event]) -> str:
    """Returns a recording as JSON that Perfetto and chrome://tracing open."""
    traced = [*_tracks(spans), *_pieces(spans), *_counters(memory, spans), *_instants(events)]
    return json.dumps({"traceEvents": traced, "displayTimeUnit": "ms"})


def lanes_of(spans: Iterable[Span]) -> list[str]:
    """Returns who worked, the trainer first, then threads and workers in the order of their numbers."""
    return sorted({span.who for span in spans}, key=lambda who: (who != TRAINER, len(who), who))


def _tracks(spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    processes = {TRAINER_PROCESS: TRAINER} | {span.process: span.who for span in spans if span.process is not None}
    for process, name in processes.items():
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    for number, who in enumerate(lanes_of(span for span in spans if span.process is None)):
        yield {"ph": "M", "name": "thread_name", "pid": TRAINER_PROCESS, "tid": number, "args": {"name": who}}


def _pieces(spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    threads = {who: number for number, who in enumerate(lanes_of(span for span in spans if span.process is None))}
    for span in spans:
        arguments: dict[str, Any] = {}
        if span.blocks is not None:
            arguments = {"first block": span.blocks[0], "last block": span.blocks[1]}
        arguments |= {f"{stage} (ms)": round(seconds * 1e3, 3) for stage, seconds in span.stages}
        yield {
            "ph": "X",
            "name": span.what,
            "pid": TRAINER_PROCESS if span.process is None else span.process,
            "tid": threads.get(span.who, 0) if span.process is None else 0,
            "ts": span.start * 1e6,
            "dur": max(0.0, span.stop - span.start) * 1e6,
            "args": arguments,
        }


def _counters(memory: Iterable[Sample], spans: Iterable[Span]) -> Iterator[dict[str, Any]]:
    processes = {span.who: span.process for span in spans}
    for sample in memory:
        process = processes.get(sample.who)
        yield {
            "ph": "C",
            "name": "memory",
            "pid": TRAINER_PROCESS if process is None else process,
            "ts": sample.at * 1e6,
            "args": {"bytes": sample.num_bytes},
        }


def _instants(events: Iterable[Event]) -> Iterator[dict[str, Any]]:
    for event in events:
        yield {
            "ph": "i",
            "s": "g",
            "name": event.text.splitlines()[0],
            "pid": TRAINER_PROCESS,
            "tid": 0,
            "ts": event.at * 1e6,
        }
