"""The file that all workers read their pipelines from: written once by the parent, mapped by each worker."""

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
from millstream.loader.transport.pipeline_parts import tell_of_private_memory, unpicklable_part
from millstream.loader.transport.pipeline_pickler import dump_with_classes, stays_in
from millstream.loader.transport.shared_records import share
from millstream.signal_exceptions import is_from_signal_handler


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


def pickle_pipelines(
    pipelines: Sequence[Pipeline], argument: str = "worker_count"
) -> tuple[memoryview, list[memoryview], ClassTable]:
    """Returns the pickle of pipelines, the memory of their large arrays, and the classes in them by value.

    Args:
        pipelines: what to pickle.
        argument: what has asked for workers, for the error.

    Raises:
        TypeError: something in it cannot be pickled; the text names the operation and the attribute.
    """
    taken_out: list[memoryview] = []

    def take_out(buffer: Any) -> bool:
        if stays_in(buffer):
            return True
        taken_out.append(buffer.raw())
        return False

    file = io.BytesIO()
    try:
        classes = dump_with_classes((_prelude(), tuple(map(with_shared_records, pipelines))), file, take_out)
    except Exception as error:
        if is_from_signal_handler(error):
            raise
        raise TypeError(
            f"{argument}: {unpicklable_part(pipelines)} cannot be sent to worker processes: {error}\n"
            "Make it when it is first used, in a function with functools.cache for instance; or leave it out in "
            "__getstate__ and make it in __setstate__; or use no workers."
        ) from error
    # Not a copy, and not a view of the file, which could not be closed as long as there is one.
    pickled = memoryview(file.getvalue())
    tell_of_private_memory(pipelines, pickled.nbytes)
    return pickled, taken_out, classes


def unpickle_pipelines(pickled: Any, buffers: Iterable[Any]) -> tuple[tuple[Pipeline, ...], ClassTable]:
    """Returns the pipelines that `pickle_pipelines` was given, and the classes that came along by value.

    Raises:
        Exception: whatever the user's classes raise when unpickled.
    """
    (_, pipelines), classes = pickle.loads(pickled, buffers=buffers)  # noqa: S301  (written by the parent)
    return pipelines, ClassTable(classes)


def pack_pipelines(pipelines: Sequence[Pipeline]) -> tuple[list[memoryview], PipelineFile, ClassTable]:
    """Returns what the file of pipelines is to hold, piece by piece, where things are in it, and classes by value.

    Raises:
        TypeError: something in it cannot be pickled; the text names the operation and the attribute.
    """
    pickled, taken_out, classes = pickle_pipelines(pipelines)
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


def read_pipelines(descriptor: int, file: PipelineFile) -> tuple[tuple[Pipeline, ...], ClassTable]:
    """Returns the pipelines that the parent has written, and the classes that came along by value.

    Their large arrays are private views of pages that all workers share.

    Raises:
        Exception: whatever the user's classes raise when unpickled.
    """
    whole = memoryview(mmap.mmap(descriptor, file.file_bytes, access=mmap.ACCESS_COPY))
    buffers = [whole[offset : offset + length] for offset, length in file.buffers]
    return unpickle_pipelines(whole[: file.num_bytes], buffers)


def with_shared_records(pipeline: Pipeline) -> Pipeline:
    """Returns a pipeline whose records, where they are a list, lie in memory that can be shared."""
    return dataclasses.replace(pipeline, source=share(pipeline.source))


def _prelude() -> object:
    """Returns a value that, unpickled before the pipelines, serves `grain` from millstream, if this process does so."""
    imports = sys.modules.get("millstream.grain_imports")
    return imports.Installed() if imports is not None and imports.is_installed() else None
