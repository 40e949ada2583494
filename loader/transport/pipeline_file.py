"""Pipelines on their way to workers: pickled, written once to a file that each worker maps, and diagnosed on failure.

The pickle lists the classes that cross by value, maps the files of arrays, and shares lists of records.
"""

import contextlib
import dataclasses
import inspect
import io
import mmap
import operator
import os
import pickle
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FunctionType, MethodType
from typing import Any, NamedTuple, TypeAlias, final

from millstream.core.signals import is_from_signal_handler
from millstream.core.warn import log_warning
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.recycled_memory import ALIGNMENT
from millstream.loader.transport.arena import create_arena_file
from millstream.loader.transport.array_pickles import MappedFiles
from millstream.loader.transport.pickling import BinaryFile, BufferCallback, ClassTable, ValuePickler, taking_out
from millstream.loader.transport.shared_records import SharedRecords, share
from millstream.sources.base import HeldRecords

MAPPED_BYTES = 1 << 20
"""Smaller files without large arrays are read instead of mapped."""

LARGE_BUFFER_BYTES = 1 << 16
"""Arrays of at least this size are stored in the pipeline file as they are. All workers share their pages."""

_MAX_DEPTH = 3
"""The number of objects within each other that are searched for what cannot be pickled."""

PRIVATE_BYTES = 1 << 26
"""A warning is logged if the memory of a pipeline that each worker needs for itself reaches this size."""

WorkerInit: TypeAlias = Callable[[int, int], object] | None
"""The user's function that each worker calls once, with its index and the number of workers; None for nothing."""

_reported: "weakref.WeakSet[Pipeline]" = weakref.WeakSet()
"""The pipelines with a logged warning. They are not reported again when workers are started again."""


class PipelineFile(NamedTuple):
    """The layout of the pipeline file."""

    num_bytes: int  # The length of the pickle, at the beginning of the file.
    buffers: tuple[tuple[int, int], ...]  # The offset and length of each large array that the pickle leaves out.
    file_bytes: int
    modules: tuple[str, ...] = ()  # The modules of millstream that the pickle names, in its order.


_MODULE = re.compile(rb"millstream\.(?:dataset|samplers|sources|transforms)\.[a-z0-9_.]+")


def _modules_in(pickled: memoryview) -> tuple[str, ...]:
    """Returns the modules of parts of pipelines that a pickle names. A text that looks like one of them is another."""
    names = (match[0].decode() for match in _MODULE.finditer(pickled))
    return tuple(dict.fromkeys(name for name in names if name in sys.modules))


def pickle_pipelines(
    pipelines: Sequence[Pipeline], worker_init_fn: WorkerInit = None, argument: str = "worker_count"
) -> tuple[memoryview, list[memoryview], ClassTable]:
    """Returns the pickle of pipelines, the memory of their large arrays, and their classes that cross by value.

    The pickle contains `worker_init_fn`, which may share objects with the pipelines.

    Raises:
        TypeError: an attribute of a pipeline cannot be pickled. The text names the operation and the attribute, and
            `argument`, which requires workers.
    """
    large: list[memoryview] = []
    file = io.BytesIO()
    try:
        shared = tuple(dataclasses.replace(pipeline, source=share(pipeline.source)) for pipeline in pipelines)
        classes = dump_with_classes((_prelude(), shared, worker_init_fn), file, taking_out(large, LARGE_BUFFER_BYTES))
    except Exception as error:
        if is_from_signal_handler(error):
            raise
        raise TypeError(
            f"{argument}: {unpicklable_object(pipelines, worker_init_fn)} cannot be sent to worker processes: {error}\n"
            "Create it when it is first used, for instance in a function with functools.cache. Or leave it out in "
            "__getstate__ and create it in __setstate__. Or use no workers."
        ) from error
    # `getvalue` does not copy. A view of the file itself would prevent closing it.
    pickled = memoryview(file.getvalue())
    warn_of_private_memory(pipelines, pickled.nbytes)
    return pickled, large, classes


class ReadPipelines(NamedTuple):
    """The content of the pickle of pipelines."""

    pipelines: tuple[Pipeline, ...]
    worker_init_fn: WorkerInit
    classes: ClassTable


def unpickle_pipelines(pickled: Any, buffers: Iterable[Any]) -> ReadPipelines:
    (_, pipelines, worker_init_fn), classes = pickle.loads(pickled, buffers=buffers)  # noqa: S301  (from the parent)
    return ReadPipelines(pipelines, worker_init_fn, ClassTable(classes))


def pack_pipelines(
    pipelines: Sequence[Pipeline], worker_init_fn: WorkerInit = None
) -> tuple[list[memoryview], PipelineFile, ClassTable]:
    """Returns the content of the pipeline file in chunks, its layout, and the classes that cross by value."""
    pickled, large, classes = pickle_pipelines(pipelines, worker_init_fn)
    chunks, (_, *buffers) = laid_out([pickled, *large])
    num_bytes = sum(chunk.nbytes for chunk in chunks)
    return chunks, PipelineFile(len(pickled), tuple(buffers), num_bytes, _modules_in(pickled)), classes


def laid_out(buffers: Iterable[memoryview]) -> tuple[list[memoryview], list[tuple[int, int]]]:
    """Returns the chunks of a file with aligned buffers, and the offset and the length of each buffer."""
    chunks: list[memoryview] = []
    spans, end = [], 0
    for buffer in buffers:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        chunks += [memoryview(bytes(start - end)), buffer]
        spans.append((start, buffer.nbytes))
        end = start + buffer.nbytes
    return chunks, spans


def write_chunks(chunks: Sequence[memoryview]) -> int:
    descriptor = create_arena_file(sum(chunk.nbytes for chunk in chunks))
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        with os.fdopen(descriptor, "wb", closefd=False) as target:
            for chunk in chunks:
                target.write(chunk)
        undo.pop_all()
    return descriptor


def read_pipelines(descriptor: int, file: PipelineFile) -> ReadPipelines:
    """Returns the pipelines that the parent has written.

    Their large arrays are copy-on-write views of pages that all workers share.
    """
    if not file.buffers and file.num_bytes < MAPPED_BYTES:
        # A map would keep a descriptor as long as the pipelines.
        return unpickle_pipelines(os.pread(descriptor, file.num_bytes, 0), ())
    content = memoryview(mmap.mmap(descriptor, file.file_bytes, access=mmap.ACCESS_COPY))
    buffers = [content[offset : offset + length] for offset, length in file.buffers]
    return unpickle_pipelines(content[: file.num_bytes], buffers)


def _prelude() -> object:
    """Returns a value that installs millstream as `grain` when it is unpickled, if this process has it installed."""
    imports = sys.modules.get("millstream.grain_imports")
    return imports.Installed() if imports is not None and imports.is_installed() else None


def dump_with_classes(value: Any, file: BinaryFile, buffer_callback: BufferCallback) -> ClassTable:
    """Writes the pickle of a value and its classes that cross by value. Returns these classes."""
    pickler = PipelinePickler(file, buffer_callback)
    # The list comes second: it is then complete, and refers to classes that the value's pickle has defined.
    pickler.dump((value, pickler.classes))
    return ClassTable(pickler.classes)


@final
class PipelinePickler(ValuePickler):
    """A pickler of pipelines, or of objects in them."""

    def __init__(self, file: BinaryFile, buffer_callback: BufferCallback) -> None:
        super().__init__(file, buffer_callback, files=MappedFiles())

    def reducer_override(self, value: Any) -> Any:
        if type(value) is HeldRecords and (shared := share(value.records)) is not value.records:
            # Without the wrapper, because every read of shared records copies.
            return unwrapped, (shared,)
        return super().reducer_override(value)


def unwrapped(shared: SharedRecords) -> SharedRecords:
    """Returns its argument: a reduction needs a function."""
    return shared


# ---------------------------------------------------------------------------------------------------------------------


def unpicklable_object(pipelines: Sequence[Pipeline], worker_init_fn: WorkerInit) -> str:
    """Returns a description of the first object that cannot be pickled: source, sampler or operation, and attribute."""
    for name, owner in [*_objects(pipelines), ("worker_init_fn", worker_init_fn)]:
        if _num_bytes(owner) is None:
            culprits = ", ".join(_unpicklable_members(owner, "attribute ", _MAX_DEPTH))
            return f"{name} ({culprits})" if culprits else name
    return "the pipeline"


def _unpicklable_members(owner: Any, prefix: str, depth: int) -> Iterator[str]:
    """Yields descriptions of the innermost members of an object that cannot be pickled."""
    for member, value in _members(owner, prefix):
        if _num_bytes(value) is None:
            has_inner = depth and not isinstance(value, type | FunctionType)
            inner = [*_unpicklable_members(value, f"{type(value).__qualname__}.", depth - 1)] if has_inner else []
            yield from inner or [member]


def warn_of_private_memory(pipelines: Sequence[Pipeline], num_bytes: int) -> None:
    """Logs, once per pipeline, the object that takes most of each worker's private memory, if that is large.

    `num_bytes` is the size of the pickle of all of them, which cannot be shared.
    """
    if num_bytes < PRIVATE_BYTES or all(pipeline in _reported for pipeline in pipelines):
        return
    _reported.update(pipelines)
    sizes = [(_num_bytes(share(owner)) or 0, name, owner) for name, owner in _objects(pipelines)]
    size, name, owner = max(sizes, key=operator.itemgetter(0))
    members = {member: _num_bytes(value) or 0 for member, value in _members(owner, "attribute ")}
    culprit = max(members, key=lambda member: members[member], default="")
    log_warning(
        f"each worker needs at least {size >> 20} MB of its own for {f'{name} ({culprit})' if culprit else name}, "
        "because it cannot be shared. NumPy arrays, memory-mapped ones included, are shared, and so is a list of "
        "records that is the data_source or in a MapDataset.source or an InMemoryDataSource. Keep the data in one of "
        "these, or read it from files when it is needed."
    )


def _objects(pipelines: Sequence[Pipeline]) -> list[tuple[str, Any]]:
    return [named for pipeline in pipelines for named in pipeline.objects]


def _members(owner: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    """Yields the attributes of an object with descriptions.

    Those of the object of a bound method, and the variables of a function, stand for the method and the function.
    """
    for name, value in _attributes(owner).items():
        if isinstance(value, MethodType) and (bound := _attributes(value.__self__)):
            kind = type(value.__self__).__qualname__
            yield from ((f"{kind}.{member}", content) for member, content in bound.items())
        elif isinstance(value, FunctionType):
            variables = inspect.getclosurevars(value)
            for variable, content in {**variables.globals, **variables.nonlocals}.items():
                yield f"variable {variable} of {value.__qualname__}", content
        else:
            yield f"{prefix}{name}", value


def _attributes(owner: Any) -> dict[str, Any]:
    found: dict[str, Any] = getattr(owner, "__dict__", {})
    return found


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
        PipelinePickler(file, taking_out([], LARGE_BUFFER_BYTES)).dump(value)
    except Exception as error:
        if is_from_signal_handler(error):
            raise
        # Any error means that it cannot be pickled.
        return None
    return file.num_bytes
