"""Files that appear under their names whole, or not at all."""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def new_file(path: str) -> Iterator[BinaryIO]:
    """Gives a file to write to, which is at `path` once the block ends, in place of what was there.

    Until then it has another name in the same folder, which begins with a dot. If the block raises, it is removed.

    Raises:
        OSError: the folder takes no new file.
    """
    folder, name = os.path.split(path)
    temporary = os.path.join(folder, f".{name.lstrip('.')[:100]}.{os.urandom(6).hex()}.part")  # noqa: PTH118
    file = open(temporary, "xb", opener=functools.partial(os.open, mode=0o666))  # noqa: SIM115
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)  # noqa: PTH108
        raise
