"""How a pipeline is pickled: with the classes in it, its files mapped, and its lists of records shared."""

import pickle
from typing import Any, final

from numpy.typing import NDArray

from millstream.loader.transport.array_pickles import Reduced
from millstream.loader.transport.class_table import ClassTable
from millstream.loader.transport.mapped_arrays import MappedFiles
from millstream.loader.transport.shared_records import SharedRecords, share
from millstream.loader.transport.value_pickler import BinaryFile, BufferCallback, ValuePickler
from millstream.sources.base import HeldRecords

LARGE_BUFFER_BYTES = 1 << 16
"""Arrays of the pipeline from this size on lie in the pipeline file as they are, and all workers share their pages."""


def stays_in(buffer: pickle.PickleBuffer) -> bool:
    """Returns whether the memory of an array stays in the pickle, of which each worker has its own."""
    return buffer.raw().nbytes < LARGE_BUFFER_BYTES


def dump_with_classes(value: Any, file: BinaryFile, buffer_callback: BufferCallback) -> ClassTable:
    """Writes the pickle of a value and, after it, the list of the classes that are in it by value; returns these.

    Raises:
        Exception: the value cannot be pickled.
    """
    pickler = PipelinePickler(file, buffer_callback)
    # In this order: the list is pickled when it is complete, and then refers to what the value's pickle has defined.
    pickler.dump((value, pickler.classes))
    return ClassTable(pickler.classes)


@final
class PipelinePickler(ValuePickler):
    """A pickler of pipelines, or of parts of them.

    Attributes:
        classes: those that were pickled by value.
    """

    def __init__(self, file: BinaryFile, buffer_callback: BufferCallback) -> None:
        super().__init__(file, buffer_callback)
        self.classes: list[type] = []
        self._files = MappedFiles()

    def reduce_array(self, array: NDArray[Any]) -> Reduced:
        """Returns how to pickle an array: by its place in a file, or by its bytes."""
        return self.in_file(array) or super().reduce_array(array)

    def in_file(self, array: NDArray[Any]) -> Reduced | None:
        """Returns how to pickle an array by its place in a file, None where it is in none."""
        return self._files.reduce(array)

    def reducer_override(self, value: Any) -> Any:
        """Returns how to pickle a value, and takes note of classes that cross by value."""
        if type(value) is HeldRecords and (shared := share(value.records)) is not value.records:
            # In its place: each read of these copies what is read.
            return in_its_place, (shared,)
        reduced = super().reducer_override(value)
        if isinstance(value, type) and reduced is not NotImplemented:
            self.classes.append(value)
        return reduced


def in_its_place(shared: SharedRecords) -> SharedRecords:
    """Returns what a worker has where the user's process has records in a list."""
    return shared
