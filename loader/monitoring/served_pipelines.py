"""The pipelines of this process that `millstream top` and Prometheus may query, and the answers about them.

Guarantees:
    * Pipelines are held weakly: serving keeps nothing alive.
    * The server's thread only reads. Descriptions are taken by the thread that calls `serve`, and no user code runs in
      the server's thread.
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
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from millstream.loader.monitoring.client import FORMAT
from millstream.loader.monitoring.metrics_endpoint import VARIABLE, MetricsEndpoint
from millstream.loader.monitoring.server import Server
from millstream.loader.processes.process_report import process_report
from millstream.loader.reporting.advice import advice_of
from millstream.loader.reporting.metrics import exposition
from millstream.loader.reporting.phrases import mixture_texts, workers_text
from millstream.loader.reporting.snapshot import LoaderSnapshot
from millstream.signals import is_from_signal_handler

logger = logging.getLogger("millstream")


class Execution(Protocol):
    """A pipeline, and its views with the iterators that exist: those of `execution.py` and `insight.py`."""

    is_closed: bool
    insight: Any


class _Served(NamedTuple):
    """A pipeline, and its snapshot from when `serve` was called."""

    execution: "weakref.ref[Execution]"
    snapshot: LoaderSnapshot


_served: dict[int, _Served] = {}
_numbers = itertools.count()


def serve(execution: Execution) -> None:
    """Lets `millstream top` query a pipeline until it is closed or collected."""
    if not sys.platform.startswith("linux"):
        raise OSError("`millstream top` needs Linux. Use loader.summary() instead.")
    _add(execution)
    _server().start()


def serve_by_environment(execution: Execution) -> None:
    """Serves a pipeline in the ways that the environment asks for: failures are logged, and training continues."""
    if os.environ.get("MILLSTREAM_TOP") == "1":
        try:
            serve(execution)
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            logger.warning("millstream: `millstream top` cannot monitor this pipeline: %s", error)
    if text := os.environ.get(VARIABLE):
        _add(execution)
        _start_endpoint(text)


def _add(execution: Execution) -> None:
    _forget_in_forked_processes()
    if all(served.execution() is not execution for served in list(_served.values())):
        _served[next(_numbers)] = _Served(weakref.ref(execution), execution.insight.snapshot())


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
    return exposition(
        {str(number): execution.insight.updated(before) for number, (execution, before) in _living().items()}
    )


def _living() -> dict[int, tuple[Execution, LoaderSnapshot]]:
    """Returns the pipelines that are neither closed nor collected, by number, and forgets the others."""
    living = {}
    for number, served in list(_served.items()):
        execution = served.execution()
        if execution is None or execution.is_closed:
            _served.pop(number, None)
        else:
            living[number] = execution, served.snapshot
    return living


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
        "pipelines": [_pipeline(number, *living) for number, living in _living().items()],
        # Last, so that no count is newer than the time.
        "at": time.perf_counter(),
    }


def _pipeline(number: int, execution: Execution, before: LoaderSnapshot) -> dict[str, Any]:
    snapshot = execution.insight.updated(before)
    measured = snapshot.measured
    return {
        "number": number,
        "source": snapshot.source.name,
        "order": snapshot.order.name,
        "mixture": list(mixture_texts(snapshot)),
        "shard": snapshot.shard,
        "who": workers_text(snapshot),
        "measured": dataclasses.asdict(measured),
        "stages": [
            {"label": stage.label, "where": stage.location.value, "seconds": stage.seconds} for stage in snapshot.stages
        ],
        "advice": [advice.text for advice in advice_of(snapshot)],
        "iterators": [_iterator(iterator) for iterator in execution.insight.living_iterators()],
    }


def _iterator(iterator: Any) -> dict[str, Any]:
    status = dataclasses.asdict(iterator.status())
    for worker in (status["load"] or {}).get("workers", ()):
        worker["process"] = _report(worker["pid"]) if worker["is_here"] and worker["pid"] is not None else None
    return status


def _report(pid: int) -> Mapping[str, Any] | None:
    report = process_report(pid)
    return None if report is None else report._asdict()


def _stacks() -> dict[str, Any]:
    workers: dict[int, str] = {}
    for execution, _ in _living().values():
        for iterator in execution.insight.living_iterators():
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
