"""The pipelines of this process that may be looked at from outside, and what is said of them.

Guarantees:
    * They are held weakly: to be looked at keeps nothing alive.
    * What runs in the server's thread only reads: names are found where a pipeline is served, by the thread that does
      it, and no code of the user's is called from then on.
    * What it reads changes meanwhile. It may be a moment old; it is never waited for.
"""

import dataclasses
import functools
import itertools
import logging
import os
import sys
import time
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from millstream.loader.iterator import DataLoaderIterator
from millstream.loader.monitoring.client import FORMAT
from millstream.loader.monitoring.server import Server
from millstream.loader.monitoring.thread_stacks import stacks_of_threads
from millstream.loader.processes.process_report import process_report
from millstream.loader.reporting.advice import advice_of
from millstream.loader.reporting.phrases import who_works
from millstream.loader.reporting.snapshot import LoaderFacts
from millstream.loader.snapshot_of_loader import facts_later
from millstream.signal_exceptions import is_from_signal_handler

if TYPE_CHECKING:
    from millstream.loader.execution import Execution

logger = logging.getLogger("millstream")


class _Served(NamedTuple):
    """A pipeline, and what was known of it when it was served."""

    execution: "weakref.ref[Execution]"
    facts: LoaderFacts


_served: dict[int, _Served] = {}
_numbers = itertools.count()


def serve(execution: "Execution") -> None:
    """Lets a pipeline be looked at, until it is closed or gone.

    Raises:
        OSError: there can be no private socket.
    """
    if not sys.platform.startswith("linux"):
        raise OSError("A pipeline can be looked at from outside on Linux only: elsewhere, use loader.summary().")
    if all(served.execution() is not execution for served in list(_served.values())):
        _served[next(_numbers)] = _Served(weakref.ref(execution), execution.facts())
    _server().start()


def serve_unasked(execution: "Execution") -> None:
    """Does the same because the environment says so: what goes wrong is a line in the log, and training continues."""
    try:
        serve(execution)
    except Exception as error:
        if is_from_signal_handler(error):
            raise
        logger.warning("millstream: this pipeline cannot be looked at by `millstream top`: %s", error)


@functools.cache
def _server() -> Server:
    os.register_at_fork(after_in_child=_served.clear)
    return Server(_answer, lambda: bool(_living()))


def _living() -> "dict[int, tuple[Execution, LoaderFacts]]":
    """Returns the pipelines that are still there, by number; the others are forgotten."""
    living = {}
    for number, served in list(_served.items()):
        execution = served.execution()
        if execution is None or execution.is_closed:
            _served.pop(number, None)
        else:
            living[number] = execution, served.facts
    return living


def _answer(question: str) -> object:
    """Returns what to say to a question of `millstream top`.

    Raises:
        ValueError: it is another question.
    """
    if question == "snapshot":
        return _snapshot()
    if question == "stacks":
        return _stacks()
    raise ValueError(f"the question {question!r} is not known: another version of millstream is asked")


def _snapshot() -> dict[str, Any]:
    return {
        "format": FORMAT,
        "pid": os.getpid(),
        "command": sys.orig_argv,
        "process": _report(os.getpid()),
        "pipelines": [_pipeline(number, *living) for number, living in _living().items()],
        # Last: what was counted was counted before.
        "at": time.perf_counter(),
    }


def _pipeline(number: int, execution: "Execution", before: LoaderFacts) -> dict[str, Any]:
    execution.count_delivered()
    facts = facts_later(before, execution.profiler)
    measured = facts.measured
    references = execution.iterators.valuerefs()
    iterators = [iterator for reference in references if (iterator := reference()) is not None]
    return {
        "number": number,
        "source": facts.source.name,
        "order": facts.order.name,
        "shard": facts.shard,
        "who": who_works(facts),
        "num_records": facts.order.length,
        "measured": dataclasses.asdict(measured),
        "stages": [
            {"label": stage.label, "where": stage.place.value, "seconds": stage.seconds} for stage in facts.stages
        ],
        "advice": [advice.text for advice in advice_of(facts)],
        "iterators": [_iterator(iterator) for iterator in iterators],
    }


def _iterator(iterator: DataLoaderIterator) -> dict[str, Any]:
    look = dataclasses.asdict(iterator.look())
    for worker in (look["load"] or {}).get("workers", ()):
        worker["process"] = _report(worker["pid"]) if worker["is_here"] and worker["pid"] is not None else None
    return look


def _report(pid: int) -> Mapping[str, Any] | None:
    report = process_report(pid)
    return None if report is None else report._asdict()


def _stacks() -> dict[str, Any]:
    """Returns the stacks of this process's threads, and of the worker processes."""
    workers: dict[int, str] = {}
    for execution, _ in _living().values():
        for reference in execution.iterators.valuerefs():
            if (iterator := reference()) is not None:
                workers |= iterator.worker_stacks()
    of_workers = [{"who": f"worker process {pid}", "text": text} for pid, text in sorted(workers.items())]
    return {
        "format": FORMAT,
        "stacks": [{"who": f"process {os.getpid()}", "text": stacks_of_threads()}, *of_workers],
    }
