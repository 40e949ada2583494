"""The file that all workers read the pipeline from: written once by the parent, mapped by each worker."""

import contextlib
import dataclasses
import io
import mmap
import os
import pickle
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.transport.arena import create_arena_file
from millstream.loader.transport.class_table import ClassTable
from millstream.loader.transport.pipeline_parts import tell_of_private_memory, unpicklable_part
from millstream.loader.transport.pipeline_pickler import dump_with_classes
from millstream.loader.transport.shared_records import share

LARGE_BUFFER_BYTES = 1 << 16
"""Arrays of the pipeline from this size on lie in the pipeline file as they are, and all workers share their pages."""


class PipelineFile(NamedTuple):
    """Where the pipeline lies in the file that all workers read it from.

    Attributes:
        num_bytes: the length of the pickle, at the beginning of the file.
        buffers: offset and length of each large array that the pickle left out.
        file_bytes: the length of the whole file.
    """

    num_bytes: int
    buffers: tuple[tuple[int, int], ...]
    file_bytes: int


def pickle_pipeline(
    pipeline: Pipeline, argument: str = "worker_count"
) -> tuple[memoryview, list[memoryview], ClassTable]:
    """Returns the pickle of a pipeline, the memory of its large arrays, and the classes in it by value.

    Args:
        pipeline: what to pickle.
        argument: what has asked for workers, for the error.

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
        classes = dump_with_classes(with_shared_records(pipeline), file, take_out)
    except Exception as error:
        raise TypeError(
            f"{argument}: {unpicklable_part(pipeline)} cannot be sent to worker processes: {error}\n"
            "Make it when it is first used, in a function with functools.cache for instance; or leave it out in "
            "__getstate__ and make it in __setstate__; or use no workers."
        ) from error
    tell_of_private_memory(pipeline, file.getbuffer().nbytes)
    return file.getbuffer(), taken_out, classes


def unpickle_pipeline(pickled: Any, buffers: Iterable[Any]) -> tuple[Pipeline, ClassTable]:
    """Returns the pipeline that `pickle_pipeline` was given, and the classes that came along by value.

    Raises:
        Exception: whatever the user's classes raise when unpickled.
    """
    pipeline, classes = pickle.loads(pickled, buffers=buffers)  # noqa: S301  (written by the parent)
    return pipeline, ClassTable(classes)


def pack_pipeline(pipeline: Pipeline) -> tuple[list[memoryview], PipelineFile, ClassTable]:
    """Returns what the file of a pipeline is to hold, piece by piece, where things are in it, and classes by value.

    Raises:
        TypeError: something in it cannot be pickled; the text names the operation and the attribute.
    """
    pickled, taken_out, classes = pickle_pipeline(pipeline)
    pieces, buffers, end = [pickled], [], pickled.nbytes
    for raw in taken_out:
        start = -(-end // 64) * 64
        pieces += [memoryview(bytes(start - end)), raw]
        buffers.append((start, raw.nbytes))
        end = start + raw.nbytes
    return pieces, PipelineFile(len(pickled), tuple(buffers), end), classes


def write_pieces(pieces: Sequence[memoryview]) -> int:
    """Returns the descriptor of an anonymous file that holds these bytes."""
    descriptor = create_arena_file(sum(piece.nbytes for piece in pieces))
    with contextlib.ExitStack() as undo:
        undo.callback(os.close, descriptor)
        with os.fdopen(descriptor, "wb", closefd=False) as target:
            for piece in pieces:
                target.write(piece)
        undo.pop_all()
    return descriptor


def read_pipeline(descriptor: int, file: PipelineFile) -> tuple[Pipeline, ClassTable]:
    """Returns the pipeline that the parent has written, and the classes that came along by value.

    Its large arrays are private views of pages that all workers share.

    Raises:
        Exception: whatever the user's classes raise when unpickled.
    """
    whole = memoryview(mmap.mmap(descriptor, file.file_bytes, access=mmap.ACCESS_COPY))
    buffers = [whole[offset : offset + length] for offset, length in file.buffers]
    return unpickle_pipeline(whole[: file.num_bytes], buffers)


def with_shared_records(pipeline: Pipeline) -> Pipeline:
    """Returns a pipeline whose records, where they are a list, lie in memory that can be shared."""
    return dataclasses.replace(pipeline, source=share(pipeline.source))
