"""The file that all workers read the pipeline from: written once by the parent, mapped by each worker."""

import contextlib
import io
import mmap
import os
import pickle
from typing import Any

from millstream.loader.arena import create_arena_file
from millstream.loader.class_table import ClassTable
from millstream.loader.messages import PipelineFile
from millstream.loader.pipeline_parts import tell_of_private_memory, unpicklable_part
from millstream.loader.pipeline_pickler import dump_with_classes
from millstream.loader.plan import Plan
from millstream.loader.shared_records import share

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
            "Make it when it is first used, in a function with functools.cache for instance; or leave it out in "
            "__getstate__ and make it in __setstate__; or use worker_count=0."
        ) from error
    tell_of_private_memory(plan, file.getbuffer().nbytes)
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


def _recipe(plan: Plan) -> tuple[Any, ...]:
    """Returns what a plan is made of, a list of records among it as memory that can be shared."""
    _, (source, *rest) = plan.__reduce__()
    return share(source), *rest
