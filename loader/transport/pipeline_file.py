"""The file with the pipelines, written once by the parent and mapped by each worker."""

import contextlib
import dataclasses
import io
import mmap
import os
import pickle
import sys
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.transport.arena import create_arena_file
from millstream.loader.transport.class_table import ClassTable
from millstream.loader.transport.pipeline_pickler import (
    dump_with_classes,
    stays_in,
    unpicklable_object,
    warn_of_private_memory,
)
from millstream.loader.transport.shared_records import share
from millstream.signals import is_from_signal_handler

MAPPED_BYTES = 1 << 20
"""Smaller files without large arrays are read instead of mapped."""


class PipelineFile(NamedTuple):
    """The layout of the pipeline file.

    Attributes:
        num_bytes: the length of the pickle, at the beginning of the file.
        buffers: the offset and length of each large array that the pickle leaves out.
        file_bytes: the length of the file.
    """

    num_bytes: int
    buffers: tuple[tuple[int, int], ...]
    file_bytes: int


def pickle_pipelines(
    pipelines: Sequence[Pipeline], argument: str = "worker_count"
) -> tuple[memoryview, list[memoryview], ClassTable]:
    """Returns the pickle of pipelines, the memory of their large arrays, and their classes that cross by value.

    Args:
        pipelines: the pipelines to pickle.
        argument: the argument that requires workers, for the error.

    Raises:
        TypeError: an attribute of a pipeline cannot be pickled. The text names the operation and the attribute.
    """
    large: list[memoryview] = []

    def take_out(buffer: Any) -> bool:
        if stays_in(buffer):
            return True
        large.append(buffer.raw())
        return False

    file = io.BytesIO()
    try:
        shared = tuple(dataclasses.replace(pipeline, source=share(pipeline.source)) for pipeline in pipelines)
        classes = dump_with_classes((_prelude(), shared), file, take_out)
    except Exception as error:
        if is_from_signal_handler(error):
            raise
        raise TypeError(
            f"{argument}: {unpicklable_object(pipelines)} cannot be sent to worker processes: {error}\n"
            "Create it when it is first used, for instance in a function with functools.cache. Or leave it out in "
            "__getstate__ and create it in __setstate__. Or use no workers."
        ) from error
    # `getvalue` does not copy. A view of the file itself would prevent closing it.
    pickled = memoryview(file.getvalue())
    warn_of_private_memory(pipelines, pickled.nbytes)
    return pickled, large, classes


def unpickle_pipelines(pickled: Any, buffers: Iterable[Any]) -> tuple[tuple[Pipeline, ...], ClassTable]:
    """Returns the pipelines that `pickle_pipelines` pickled, and the classes that crossed by value.

    Raises:
        Exception: a class of the user raises when unpickled.
    """
    (_, pipelines), classes = pickle.loads(pickled, buffers=buffers)  # noqa: S301  (written by the parent)
    return pipelines, ClassTable(classes)


def pack_pipelines(pipelines: Sequence[Pipeline]) -> tuple[list[memoryview], PipelineFile, ClassTable]:
    """Returns the content of the pipeline file in chunks, its layout, and the classes that cross by value.

    Raises:
        TypeError: an attribute of a pipeline cannot be pickled. The text names the operation and the attribute.
    """
    pickled, large, classes = pickle_pipelines(pipelines)
    chunks, buffers, end = [pickled], [], pickled.nbytes
    for raw in large:
        start = -(-end // 64) * 64
        chunks += [memoryview(bytes(start - end)), raw]
        buffers.append((start, raw.nbytes))
        end = start + raw.nbytes
    return chunks, PipelineFile(len(pickled), tuple(buffers), end), classes


def write_chunks(chunks: Sequence[memoryview]) -> int:
    """Returns the descriptor of an anonymous file with the given content."""
    descriptor = create_arena_file(sum(chunk.nbytes for chunk in chunks))
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        with os.fdopen(descriptor, "wb", closefd=False) as target:
            for chunk in chunks:
                target.write(chunk)
        undo.pop_all()
    return descriptor


def read_pipelines(descriptor: int, file: PipelineFile) -> tuple[tuple[Pipeline, ...], ClassTable]:
    """Returns the pipelines that the parent has written, and the classes that crossed by value.

    Their large arrays are copy-on-write views of pages that all workers share.

    Raises:
        Exception: a class of the user raises when unpickled.
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
