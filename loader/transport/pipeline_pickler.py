"""The pickler of pipelines: it lists their classes, maps their files, and shares their lists of records."""

import pickle
from typing import Any, final

from millstream.loader.transport.class_table import ClassTable
from millstream.loader.transport.mapped_arrays import MappedFiles
from millstream.loader.transport.shared_records import SharedRecords, share
from millstream.loader.transport.value_pickler import BinaryFile, BufferCallback, ValuePickler
from millstream.sources.base import HeldRecords

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
