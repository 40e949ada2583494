"""Values as they cross to a worker process: a pickle, and the memory that goes with it."""

import io
from typing import Any

from millstream.loader.transport.pipeline_file import dump_with_classes


def sent(value: Any) -> tuple[bytes, list[Any]]:
    """Returns the pickle of a value in a pipeline, and the memory that goes with it."""
    file, buffers = io.BytesIO(), []

    def take_out(buffer: Any) -> bool:
        buffers.append(buffer)
        return False

    dump_with_classes(value, file, take_out)
    return file.getvalue(), buffers
