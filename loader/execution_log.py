"""The log of the debug mode: an execution summary of each pipeline, once a minute while it is read and at the end."""

import logging
import time
import weakref
from typing import final

from millstream.loader.insight import Insight
from millstream.loader.iterator import DataLoaderIterator
from millstream.loader.reporting.execution_summary import execution_summary

PERIOD_SECONDS = 60.0
"""The time between two summaries of one pipeline."""


def log_execution(iterator: DataLoaderIterator, insight: Insight) -> None:
    """Logs summaries of a pipeline from now on.

    Args:
        iterator: the iterator that is going to read it. When it is closed, has ended or is collected, one comes last.
        insight: the measurements.
    """
    log = _ExecutionLog(insight)
    insight.profiler.on_wait = log.write_if_due
    iterator.call_at_end(log.write)
    weakref.finalize(iterator, log.write)


@final
class _ExecutionLog:
    """Writes the summaries of one pipeline."""

    def __init__(self, insight: Insight) -> None:
        self._insight = insight
        self._due = time.perf_counter() + PERIOD_SECONDS
        self._written = 0

    def write_if_due(self) -> None:
        """Writes a summary if the last one is a minute old."""
        if time.perf_counter() >= self._due:
            self.write()

    def write(self) -> None:
        """Writes a summary, unless nothing was delivered after the last one."""
        self._due = time.perf_counter() + PERIOD_SECONDS
        snapshot, costs = self._insight.snapshot(), self._insight.profiler.costs
        if costs is not None and snapshot.measured.batches > self._written:
            self._written = snapshot.measured.batches
            # A warning, because programs that do not configure logging see no other level.
            logging.getLogger("millstream").warning("%s", execution_summary(snapshot, costs.read()))
