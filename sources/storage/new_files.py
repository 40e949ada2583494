"""Files that appear under their names whole, or not at all."""

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import BinaryIO


@contextlib.contextmanager
def new_file(path: str, fits: Callable[[], bool] | None = None) -> Iterator[BinaryIO]:
    """Gives a file to write to, which is at `path` once the block ends.

    Until then it has another name in the same folder, which begins with a dot. If the block raises, it is removed.

    Args:
        path: its name.
        fits: returns whether what has that name by now is as good: then that stays, and this one is removed. Whatever
            has the name is replaced where it is None.

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
            yield file
            file.flush()
            os.fsync(file.fileno())
        if fits is None or not _linked(temporary, path, fits):
            os.replace(temporary, path)  # noqa: PTH105
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)  # noqa: PTH108


def _linked(temporary: str, path: str, fits: Callable[[], bool]) -> bool:
    """Gives a file its name unless there is one that fits, and returns whether either is so."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        return fits()
    except OSError:  # Not all file systems have links.
        return False
    return True
