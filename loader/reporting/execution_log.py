"""The log of the debug mode: an execution summary of each pipeline, once a minute while it is read and at the end.

A summary is a table with a row per node.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from typing import final

from millstream.loader.measuring import Cost, Node, Profiler
from millstream.loader.reporting.phrases import (
    aligned,
    bytes_text,
    seconds_text,
    share_text,
    trainer_text,
    workers_text,
)
from millstream.loader.reporting.snapshot import Kind, LoaderSnapshot

PERIOD_SECONDS = 60.0
COLUMNS = ("node", "wait share", "total", "min", "max", "mean", "elements", "memory")


@final
class ExecutionLog:
    """Writes summaries of a pipeline, given a function that returns its measurements so far."""

    def __init__(self, profiler: Profiler, snapshot: Callable[[], LoaderSnapshot]) -> None:
        self._profiler = profiler
        self._snapshot = snapshot
        self._due = time.perf_counter() + PERIOD_SECONDS
        self._written = 0

    def write_if_due(self) -> None:
        if time.perf_counter() >= self._due:
            self.write()

    def write(self) -> None:
        """Writes a summary, unless nothing was delivered after the last one."""
        self._due = time.perf_counter() + PERIOD_SECONDS
        snapshot, costs = self._snapshot(), self._profiler.costs
        if costs is not None and snapshot.measured.batches > self._written:
            self._written = snapshot.measured.batches
            # A warning, because programs that do not configure logging see no other level.
            logging.getLogger("millstream").warning("%s", _execution_summary(snapshot, costs.read()))


def _execution_summary(snapshot: LoaderSnapshot, costs: Mapping[Node, Cost]) -> str:
    lines = aligned([COLUMNS, *_rows(snapshot, costs)])
    rule = "-" * max(map(len, lines))
    return "\n".join(
        [
            f"Execution summary: {snapshot.source.name}, {trainer_text(snapshot.measured)}",
            f"{workers_text(snapshot)}",
            "The wait share is the share of the time of all nodes, summed over threads and workers. Times are totals",
            "and per element of a call. The memory is that of the elements of the largest call.",
            lines[0],
            rule,
            *lines[1:],
        ]
    )


def _rows(snapshot: LoaderSnapshot, costs: Mapping[Node, Cost]) -> Iterator[tuple[str, ...]]:
    nodes = sorted(node for node in costs if node[0])
    total = snapshot.pipeline_seconds or 1.0
    for stage in snapshot.running_stages:
        cost = costs.get((0, stage.label), Cost())
        # The functions of a packer that return no elements have a duration, too.
        seconds = stage.seconds if not cost.elements or stage.regroups else cost.seconds
        if stage.kind is Kind.READ:
            # The nodes of a MapDataset run within the read, and have rows of their own.
            seconds = max(0.0, seconds - sum(costs[node].seconds for node in nodes))
            cost = cost._replace(max_seconds=0.0) if nodes else cost
        yield _row(stage.label, seconds, seconds / total, cost)
        if stage.kind is Kind.READ:
            for node in nodes:
                yield _row(node[1], costs[node].seconds, costs[node].seconds / total, costs[node])


def _row(label: str, seconds: float, share: float, cost: Cost) -> tuple[str, ...]:
    row = (label, share_text(share), seconds_text(seconds))
    if not cost.elements:
        return *row, "", "", "", "", ""
    extremes = (seconds_text(cost.min_seconds), seconds_text(cost.max_seconds)) if cost.max_seconds else ("", "")
    mean = seconds_text(seconds / cost.elements)
    return *row, *extremes, mean, f"{cost.elements:,}", bytes_text(cost.max_bytes)
