"""The pickler of pipelines: it lists their classes, maps their files, and shares their lists of records.

It also diagnoses pipelines: objects that cannot be pickled, and memory that workers cannot share.
"""

import inspect
import io
import operator
import pickle
import weakref
from collections.abc import Iterator, Sequence
from types import FunctionType
from typing import Any, final

from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.transport.class_table import ClassTable
from millstream.loader.transport.mapped_arrays import MappedFiles
from millstream.loader.transport.shared_records import SharedRecords, share
from millstream.loader.transport.value_pickler import BinaryFile, BufferCallback, ValuePickler
from millstream.signals import is_from_signal_handler
from millstream.sources.base import HeldRecords
from millstream.warn import log_warning

LARGE_BUFFER_BYTES = 1 << 16
"""Arrays of at least this size are stored in the pipeline file as they are. All workers share their pages."""


def stays_in(buffer: pickle.PickleBuffer) -> bool:
    """Returns True if an array's memory stays in the pickle, of which each worker has its own copy."""
    return buffer.raw().nbytes < LARGE_BUFFER_BYTES


def dump_with_classes(value: Any, file: BinaryFile, buffer_callback: BufferCallback) -> ClassTable:
    """Writes the pickle of a value and its classes that cross by value. Returns these classes.

    Raises:
        Exception: the value cannot be pickled.
    """
    pickler = PipelinePickler(file, buffer_callback)
    # The list comes second: it is then complete, and refers to classes that the value's pickle has defined.
    pickler.dump((value, pickler.classes))
    return ClassTable(pickler.classes)


@final
class PipelinePickler(ValuePickler):
    """A pickler of pipelines, or of objects in them.

    Attributes:
        classes: the classes that were pickled by value.
    """

    def __init__(self, file: BinaryFile, buffer_callback: BufferCallback) -> None:
        super().__init__(file, buffer_callback, files=MappedFiles())
        self.classes: list[type] = []

    def reducer_override(self, value: Any) -> Any:
        """Returns the reduction of a value, and records classes that cross by value."""
        if type(value) is HeldRecords and (shared := share(value.records)) is not value.records:
            # Without the wrapper, because every read of shared records copies.
            return unwrapped, (shared,)
        reduced = super().reducer_override(value)
        if isinstance(value, type) and reduced is not NotImplemented:
            self.classes.append(value)
        return reduced


def unwrapped(shared: SharedRecords) -> SharedRecords:
    """Returns its argument: a reduction needs a function."""
    return shared


PRIVATE_BYTES = 1 << 26
"""A warning is logged if the memory of a pipeline that each worker needs for itself reaches this size."""

_reported: "weakref.WeakSet[Pipeline]" = weakref.WeakSet()
"""The pipelines with a logged warning. They are not reported again when workers are started again."""


def unpicklable_object(pipelines: Sequence[Pipeline]) -> str:
    """Returns a description of the first object that cannot be pickled: source, sampler or operation, and attribute."""
    for name, owner in _objects(pipelines):
        if _num_bytes(owner) is None:
            culprits = ", ".join(member for member, value in _members(owner) if _num_bytes(value) is None)
            return f"{name} ({culprits})" if culprits else name
    return "the pipeline"


def warn_of_private_memory(pipelines: Sequence[Pipeline], num_bytes: int) -> None:
    """Logs, once per pipeline, the object that takes most of each worker's private memory, if that is large.

    Args:
        pipelines: the pipelines that were pickled.
        num_bytes: the size of the pickle, which cannot be shared.
    """
    if num_bytes < PRIVATE_BYTES or all(pipeline in _reported for pipeline in pipelines):
        return
    _reported.update(pipelines)
    sizes = [(_num_bytes(share(owner)) or 0, name, owner) for name, owner in _objects(pipelines)]
    size, name, owner = max(sizes, key=operator.itemgetter(0))
    members = {member: _num_bytes(value) or 0 for member, value in _members(owner)}
    culprit = max(members, key=lambda member: members[member], default="")
    log_warning(
        f"each worker needs at least {size >> 20} MB of its own for {f'{name} ({culprit})' if culprit else name}, "
        "because it cannot be shared. NumPy arrays, memory-mapped ones included, are shared, and so is a list of "
        "records that is the data_source or in a MapDataset.source or an InMemoryDataSource. Keep the data in one of "
        "these, or read it from files when it is needed."
    )


def _objects(pipelines: Sequence[Pipeline]) -> list[tuple[str, Any]]:
    return [named for pipeline in pipelines for named in pipeline.objects]


def _members(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of an object and the variables of functions among them, with descriptions."""
    for name, value in getattr(owner, "__dict__", {}).items():
        if not isinstance(value, FunctionType):
            yield f"attribute {name}", value
            continue
        variables = inspect.getclosurevars(value)
        for variable, content in {**variables.globals, **variables.nonlocals}.items():
            yield f"variable {variable} of {value.__qualname__}", content


class _Counter(io.RawIOBase):
    """A file that keeps only the number of bytes written."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def write(self, data: Any, /) -> int:
        self.num_bytes += memoryview(data).nbytes
        return memoryview(data).nbytes


def _num_bytes(value: Any) -> int | None:
    """Returns the length of the pickle of a value, without shared memory; None if it cannot be pickled."""
    file = _Counter()
    try:
        PipelinePickler(file, stays_in).dump(value)
    except Exception as error:
        if is_from_signal_handler(error):
            raise
        # Any error means that it cannot be pickled.
        return None
    return file.num_bytes
