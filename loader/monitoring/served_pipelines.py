"""The pipelines of this process that `millstream top` and Prometheus may query, and the answers about them.

Guarantees:
    * Pipelines are held weakly: serving keeps nothing alive.
    * The server's thread only reads. Pipelines are described by the thread that calls `serve`, and no user code runs in
      the server's thread.
    * Streams that another served pipeline draws from are part of it: the trainer waits for the outermost one.
    * Answers may be a moment old. They wait for nothing.
"""

import dataclasses
import functools
import itertools
import logging
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, Self

from millstream.core.signals import is_from_signal_handler
from millstream.loader.monitoring.client import FORMAT
from millstream.loader.monitoring.metrics_endpoint import VARIABLE, MetricsEndpoint
from millstream.loader.monitoring.server import Server
from millstream.loader.processes.process_report import process_report
from millstream.loader.reporting.advice import advice_of
from millstream.loader.reporting.metrics import exposition
from millstream.loader.reporting.phrases import mixture_texts, workers_text
from millstream.loader.reporting.snapshot import LoaderSnapshot

logger = logging.getLogger("millstream")


class Pipeline(Protocol):
    """The views of a pipeline: an `Insight`, which is above this room."""

    is_closed: bool

    def snapshot(self) -> LoaderSnapshot: ...
    def status(self) -> Any: ...
    def everything_below(self) -> Iterable[Self]: ...
    def living_iterators(self) -> Sequence[Any]: ...


_served: "weakref.WeakKeyDictionary[Pipeline, int]" = weakref.WeakKeyDictionary()
_numbers = itertools.count()


def serve(insight: Pipeline) -> None:
    """Lets `millstream top` query a pipeline until it is closed or collected."""
    if not sys.platform.startswith("linux"):
        raise OSError("`millstream top` needs Linux. Use loader.summary() instead.")
    _add(insight)
    _server().start()


def serve_by_environment(insight: Pipeline) -> None:
    """Serves a pipeline in the ways that the environment asks for: failures are logged, and training continues."""
    if os.environ.get("MILLSTREAM_TOP") == "1":
        try:
            serve(insight)
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            logger.warning("millstream: `millstream top` cannot monitor this pipeline: %s", error)
    if text := os.environ.get(VARIABLE):
        _add(insight)
        _start_endpoint(text)


def _add(insight: Pipeline) -> None:
    _forget_in_forked_processes()
    if insight not in _served:
        insight.snapshot()
        _served[insight] = next(_numbers)


@functools.cache
def _forget_in_forked_processes() -> None:
    os.register_at_fork(after_in_child=_served.clear)


@functools.cache
def _server() -> Server:
    return Server(_answer, lambda: bool(_living()))


@functools.cache
def _start_endpoint(text: str) -> None:
    """Starts the endpoint for Prometheus, once for a value of the environment variable: a failure is logged once."""
    try:
        endpoint = MetricsEndpoint(_page_of_metrics, text)
    except (OSError, ValueError) as error:
        logger.warning("millstream: no metrics for Prometheus: %s", error)
    else:
        logger.info("millstream: metrics for Prometheus at /metrics, port %d", endpoint.port)


def _page_of_metrics() -> str:
    return exposition({str(number): insight.snapshot() for number, insight in _living().items()})


def _living() -> dict[int, Pipeline]:
    """Returns the outermost pipelines that are neither closed nor collected, by number."""
    references = _served.keyrefs()
    living = [insight for reference in references if (insight := reference()) is not None and not insight.is_closed]
    below = {id(one) for insight in living for one in insight.everything_below()}
    return {_served[insight]: insight for insight in living if id(insight) not in below}


def _answer(question: str) -> object:
    if question == "snapshot":
        return _snapshot()
    if question == "stacks":
        return _stacks()
    raise ValueError(f"unknown question {question!r}: the client has another version of millstream")


def _snapshot() -> dict[str, Any]:
    return {
        "format": FORMAT,
        "pid": os.getpid(),
        "command": sys.orig_argv,
        "process": _report(os.getpid()),
        "pipelines": [_pipeline(number, insight) for number, insight in _living().items()],
        # Last, so that no count is newer than the time.
        "at": time.perf_counter(),
    }


def _pipeline(number: int, insight: Pipeline) -> dict[str, Any]:
    snapshot, status = insight.snapshot(), dataclasses.asdict(insight.status())
    for load in status["loads"]:
        for worker in load["workers"]:
            worker["process"] = _report(worker["pid"]) if worker["is_here"] and worker["pid"] is not None else None
    return status | {
        "number": number,
        "source": snapshot.source.name,
        "order": snapshot.order.name,
        "mixture": list(mixture_texts(snapshot)),
        "shard": snapshot.shard,
        "who": workers_text(snapshot),
        "measured": dataclasses.asdict(snapshot.measured),
        "stages": [
            {"label": stage.text, "where": stage.location.value, "seconds": stage.seconds}
            for stage in snapshot.running_stages
        ],
        "advice": [advice.text for advice in advice_of(snapshot)],
    }


def _report(pid: int) -> Mapping[str, Any] | None:
    report = process_report(pid)
    return None if report is None else report._asdict()


def _stacks() -> dict[str, Any]:
    workers: dict[int, str] = {}
    for insight in _living().values():
        for one in (insight, *insight.everything_below()):
            for iterator in one.living_iterators():
                workers |= iterator.worker_stacks()
    of_workers = [{"who": f"worker process {pid}", "text": text} for pid, text in sorted(workers.items())]
    return {
        "format": FORMAT,
        "stacks": [{"who": f"process {os.getpid()}", "text": _stacks_of_threads()}, *of_workers],
    }


def _stacks_of_threads() -> str:
    """Returns the stacks of all threads except the calling one, the main thread first.

    The format is that of `faulthandler`: a head per thread, then its frames, the most recent call first.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    main, own = threading.main_thread().ident, threading.get_ident()
    frames = sys._current_frames()  # noqa: SLF001  (documented, for tools like this)
    order = sorted((ident for ident in frames if ident != own), key=lambda ident: (ident != main, ident))
    return "\n\n".join(
        "\n".join([f"Thread {names.get(ident, hex(ident))} (most recent call first):", *_lines_of(frames[ident])])
        for ident in order
    )


def _lines_of(frame: object) -> list[str]:
    # Source lines are omitted, because files would be read for them.
    found = traceback.StackSummary.extract(traceback.walk_stack(frame), lookup_lines=False)  # type: ignore[arg-type]
    return [f'  File "{one.filename}", line {one.lineno} in {one.name}' for one in found]
