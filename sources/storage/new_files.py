"""Files that appear under their names only when they are complete."""

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import BinaryIO


@contextlib.contextmanager
def new_file(path: str, *, mode: int | None = None, is_synced: bool = True) -> Iterator[BinaryIO]:
    """Opens a new file for writing, which is renamed to `path` at the end of the block.

    Until then it has a temporary name in the same folder, which begins with a dot. If the block raises, it is removed.
    A file that is synced survives a power failure.
    """
    folder, name = os.path.split(path)
    with contextlib.suppress(FileNotFoundError):
        os.lstat(path)  # Raises immediately if the name is too long.
    temporary = os.path.join(folder, f".{name.lstrip('.')[:100]}.{os.urandom(6).hex()}.part")  # noqa: PTH118
    file = open(temporary, "x+b", opener=functools.partial(os.open, mode=0o666))  # noqa: SIM115
    try:
        with file:
            if mode is not None:
                with contextlib.suppress(OSError):  # Not all file systems have permissions.
                    os.fchmod(file.fileno(), mode)  # The umask could make it unreadable.
            yield file
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
        os.replace(temporary, path)  # noqa: PTH105
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)  # noqa: PTH108
