"""Files that appear under their names whole, or not at all."""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def new_file(path: str, *, mode: int | None = None, is_synced: bool = True) -> Iterator[BinaryIO]:
    """Gives a file to write to, which is at `path` once the block ends.

    Until then it has another name in the same folder, which begins with a dot. If the block raises, it is removed.

    Args:
        path: its name.
        mode: its permissions; None for those of any new file.
        is_synced: True if it must be whole after a power failure.

    Raises:
        OSError: the folder takes no new file.
    """
    folder, name = os.path.split(path)
    with contextlib.suppress(FileNotFoundError):
        os.lstat(path)  # A name that is too long is an error now.
    temporary = os.path.join(folder, f".{name.lstrip('.')[:100]}.{os.urandom(6).hex()}.part")  # noqa: PTH118
    file = open(temporary, "x+b", opener=functools.partial(os.open, mode=0o666))  # noqa: SIM115
    try:
        with file:
            if mode is not None:
                with contextlib.suppress(OSError):  # Not all file systems have permissions.
                    os.fchmod(file.fileno(), mode)  # The process's mask could make it unreadable.
            yield file
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
        os.replace(temporary, path)  # noqa: PTH105
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)  # noqa: PTH108
