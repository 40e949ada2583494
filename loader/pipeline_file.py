"""The file that all workers read the pipeline from: written once by the parent, mapped by each worker."""

import contextlib
import io
import mmap
import os
import pickle
from typing import Any, final

import cloudpickle
from numpy.typing import NDArray

from millstream.loader.arena import create_arena_file
from millstream.loader.array_pickles import Reduced
from millstream.loader.class_table import ClassTable
from millstream.loader.mapped_arrays import MappedFiles
from millstream.loader.messages import PipelineFile
from millstream.loader.plan import Plan
from millstream.loader.shared_records import share
from millstream.loader.value_pickler import BufferCallback, ValuePickler
from millstream.sources import InMemoryDataSource

LARGE_BUFFER_BYTES = 1 << 16
"""Arrays of the pipeline from this size on lie in the pipeline file as they are, and all workers share their pages."""


def write_pipeline(plan: Plan) -> tuple[int, PipelineFile, ClassTable]:
    """Returns an anonymous file with the pipeline, where things are in it, and the classes in it by value.

    Raises:
        TypeError: something in it cannot be pickled; the text names the operation and the attribute.
    """
    taken_out: list[memoryview] = []

    def take_out(buffer: Any) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= LARGE_BUFFER_BYTES:
            taken_out.append(raw)
        return bool(raw.nbytes < LARGE_BUFFER_BYTES)

    file = io.BytesIO()
    try:
        classes = dump_with_classes(_recipe(plan), file, take_out)
    except Exception as error:
        raise TypeError(
            f"worker_count: {unpicklable_part(plan)} cannot be sent to worker processes: {error}\n"
            "Make it in __setstate__ or when it is first used, or use worker_count=0."
        ) from error
    pieces, buffers, end = [file.getbuffer()], [], file.getbuffer().nbytes
    for raw in taken_out:
        start = -(-end // 64) * 64
        pieces += [memoryview(bytes(start - end)), raw]
        buffers.append((start, raw.nbytes))
        end = start + raw.nbytes
    num_bytes = len(pieces[0])
    descriptor = create_arena_file(end)
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        with os.fdopen(descriptor, "wb", closefd=False) as target:
            for piece in pieces:
                target.write(piece)
        undo.pop_all()
    return descriptor, PipelineFile(num_bytes, tuple(buffers), end), classes


def read_pipeline(descriptor: int, file: PipelineFile) -> tuple[Plan, ClassTable]:
    """Returns the plan that the parent has written, and the classes that came along by value.

    The plan's large arrays are private views of pages that all workers share.

    Raises:
        Exception: whatever the user's classes raise when unpickled.
    """
    whole = memoryview(mmap.mmap(descriptor, file.file_bytes, access=mmap.ACCESS_COPY))
    buffers = [whole[offset : offset + length] for offset, length in file.buffers]
    (source, *recipe), classes = pickle.loads(whole[: file.num_bytes], buffers=buffers)  # noqa: S301  (written by the parent)
    return Plan(source, *recipe), ClassTable(classes)


def dump_with_classes(value: Any, file: io.BytesIO, buffer_callback: BufferCallback) -> ClassTable:
    """Writes the pickle of a value and, behind it, the list of the classes that are in it by value; returns these.

    Raises:
        Exception: the value cannot be pickled.
    """
    pickler = _PipelinePickler(file, buffer_callback)
    # In this order: the list is pickled when it is complete, and then refers to what the value's pickle has defined.
    pickler.dump((value, pickler.classes))
    return ClassTable(pickler.classes)


@final
class _PipelinePickler(ValuePickler):
    def __init__(self, file: io.BytesIO, buffer_callback: BufferCallback) -> None:
        super().__init__(file, buffer_callback)
        self.classes: list[type] = []
        self._files = MappedFiles()

    def reduce_array(self, array: NDArray[Any]) -> Reduced:
        return self._files.reduce(array) or super().reduce_array(array)

    def reducer_override(self, value: Any) -> Any:
        if type(value) is InMemoryDataSource:
            state = vars(value)
            return _with_state, (InMemoryDataSource, {**state, "_records": share(state["_records"])})
        reduced = super().reducer_override(value)
        if isinstance(value, type) and reduced is not NotImplemented:
            self.classes.append(value)
        return reduced


def _with_state(kind: type, state: dict[str, Any]) -> Any:
    """Returns an object with some attributes."""
    made: Any = object.__new__(kind)
    vars(made).update(state)
    return made


def _recipe(plan: Plan) -> tuple[Any, ...]:
    """Returns what a plan is made of, a list of records among it as memory that can be shared."""
    _, (source, *rest) = plan.__reduce__()
    return share(source), *rest


def unpicklable_part(plan: Plan) -> str:
    """Returns what in a pipeline cannot be pickled: the source, the sampler or an operation, and which attribute."""
    for name, part in plan.parts():
        if _can_pickle(part):
            continue
        culprits = [attribute for attribute, value in getattr(part, "__dict__", {}).items() if not _can_pickle(value)]
        attributes = f" (attribute {', '.join(culprits)})" if culprits else ""
        return f"{name}{attributes}"
    return "the pipeline"


def _can_pickle(value: Any) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # noqa: BLE001  (whatever pickling raises means no)
        return False
    return True
