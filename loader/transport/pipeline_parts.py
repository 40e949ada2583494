"""What in pipelines cannot cross to workers, or costs each of them memory of its own."""

import inspect
import io
import logging
import operator
import weakref
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any

from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.transport.pipeline_pickler import PipelinePickler, stays_in
from millstream.loader.transport.shared_records import share
from millstream.signal_exceptions import is_from_signal_handler

PRIVATE_BYTES = 1 << 26
"""What each worker has for itself of a pipeline is told in the log from this size on."""

logger = logging.getLogger("millstream")

_told: "weakref.WeakSet[Pipeline]" = weakref.WeakSet()
"""The pipelines whose size was told: once is enough, however often workers are started."""


def unpicklable_part(pipelines: Sequence[Pipeline]) -> str:
    """Returns what in pipelines cannot be pickled: the source, the sampler or an operation, and what in it."""
    for name, part in _parts(pipelines):
        if _num_bytes(part) is None:
            culprits = ", ".join(word for word, value in _members(part) if _num_bytes(value) is None)
            return f"{name} ({culprits})" if culprits else name
    return "the pipeline"


def tell_of_private_memory(pipelines: Sequence[Pipeline], num_bytes: int) -> None:
    """Logs, once for each of some pipelines, what of them each worker has to keep for itself, if that is much.

    Args:
        pipelines: what was pickled.
        num_bytes: how much of the pickle cannot be shared.
    """
    if num_bytes < PRIVATE_BYTES or all(pipeline in _told for pipeline in pipelines):
        return
    _told.update(pipelines)
    sizes = [(_num_bytes(share(part)) or 0, name, part) for name, part in _parts(pipelines)]
    size, name, part = max(sizes, key=operator.itemgetter(0))
    members = {word: _num_bytes(value) or 0 for word, value in _members(part)}
    culprit = max(members, key=lambda word: members[word], default="")
    logger.warning(
        "millstream: each worker needs at least %d MB of its own for %s, since it cannot be shared. NumPy arrays, "
        "memory-mapped ones too, are shared, and so is a list of records that is the data_source or in a "
        "MapDataset.source or an InMemoryDataSource: hold the data in one of these, or read it from files when it is "
        "needed.",
        size >> 20,
        f"{name} ({culprit})" if culprit else name,
    )


def _parts(pipelines: Sequence[Pipeline]) -> list[tuple[str, Any]]:
    """Returns what pipelines consist of, with what to call each part."""
    return [part for pipeline in pipelines for part in pipeline.parts]


def _members(part: Any) -> Iterator[tuple[str, Any]]:
    """Yields what a part of a pipeline refers to: its attributes, and the variables of functions among them."""
    for name, value in getattr(part, "__dict__", {}).items():
        if not isinstance(value, FunctionType):
            yield f"attribute {name}", value
            continue
        variables = inspect.getclosurevars(value)
        for variable, content in {**variables.globals, **variables.nonlocals}.items():
            yield f"variable {variable} of {value.__qualname__}", content


class _Counter(io.RawIOBase):
    """A file that keeps nothing of what is written to it but its length."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def writable(self) -> bool:
        """Returns that it can be written to."""
        return True

    def write(self, data: Any, /) -> int:
        """Counts some bytes."""
        self.num_bytes += memoryview(data).nbytes
        return memoryview(data).nbytes


def _num_bytes(value: Any) -> int | None:
    """Returns how long the pickle of a value is, what can be shared not counted; None if it cannot be pickled."""
    file = _Counter()
    try:
        PipelinePickler(file, stays_in).dump(value)
    except Exception as error:
        if is_from_signal_handler(error):
            raise
        # Whatever pickling raises means no.
        return None
    return file.num_bytes
