"""The environment of a program when it built a loader: its import path, arguments and folder, for workers."""

import os
import sys
from typing import NamedTuple

from millstream.loader.transport.importable_modules import record_import_path


class LaunchContext(NamedTuple):
    """The environment of the trainer when it built a loader.

    Attributes:
        path: the import path. All entries are absolute.
        folder: the working folder; None if it did not exist.
        limits_threads: True if linear algebra in a worker uses one thread, unless the program has set a number. False
            for workers that must compute the bytes that the trainer would.
    """

    path: tuple[str, ...]
    arguments: tuple[str, ...]
    folder: str | None
    limits_threads: bool = True


def launch_context(*, limits_threads: bool = True) -> LaunchContext:
    folder = current_folder()
    # An entry need not be a string. Imports ignore the others.
    entries = [entry for entry in sys.path if isinstance(entry, str)]
    if folder is not None:
        # Not pathlib, which would turn "" into "." and is slow.
        entries = [os.path.join(folder, entry) if entry else folder for entry in entries]  # noqa: PTH118
    record_import_path(entries)
    arguments = tuple(argument for argument in getattr(sys, "argv", ()) if isinstance(argument, str))
    return LaunchContext(tuple(entries), arguments, folder, limits_threads)


def current_folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109  (a string is needed)
    except OSError:
        return None
