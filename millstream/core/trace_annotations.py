"""Names for what a loader does on the timelines of JAX's profiler, which XProf and Perfetto show beside the steps.

Guarantees:
    * JAX is not imported. In a process that has not imported it, such as a worker, an annotation is nothing.
    * While no trace is taken, an annotation takes less than a microsecond.
"""

import contextlib
import functools
import sys
from collections.abc import Callable
from typing import Any, TypeVar

Result = TypeVar("Result")

PREFIX = "millstream: "
WAIT = "wait for a batch"
TRANSFER = "transfer to the device"

_NOTHING = contextlib.nullcontext()


def annotation(what: str) -> contextlib.AbstractContextManager[Any]:
    """Returns a context manager that names the work in it on the timeline of this thread."""
    return annotation_if_tracing(what) or _NOTHING


def annotation_if_tracing(what: str) -> contextlib.AbstractContextManager[Any] | None:
    """Returns the context manager of `annotation`; None if JAX is not imported, so that no trace is possible."""
    if (jax := sys.modules.get("jax")) is None:
        return None
    # An import by another thread may not have finished.
    make = getattr(getattr(jax, "profiler", None), "TraceAnnotation", None)
    return None if make is None else make(PREFIX + what)


def annotated(what: str, function: Callable[..., Result]) -> Callable[..., Result]:
    """Returns the function, whose calls have a name on the timelines of their threads."""

    @functools.wraps(function)
    def call(*arguments: Any) -> Result:
        with annotation(what):
            return function(*arguments)

    return call
