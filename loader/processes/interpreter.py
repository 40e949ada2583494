"""What a worker's interpreter has in common with the trainer's: flags, path, arguments, folder, resource tracker.

The import path and the folder are those of the moment at which the loader was built: a relative entry of `sys.path`
means the folder that it meant then, wherever the trainer has gone since.
"""

import marshal
import os
import sys
from typing import NamedTuple

from millstream.loader.transport.arena import create_arena_file
from millstream.loader.transport.importable_modules import record_import_path

_START = """
import gc, marshal, sys
gc.disable()
with open(int(sys.argv[1]), "rb", buffering=0) as file:
    sys.path[:], arguments = marshal.load(file)
numbers, sys.argv = [int(number) for number in sys.argv[2:]], arguments
from millstream.loader.processes.fork_server import main
main(*numbers)
"""
"""What a fork server runs. Until the path is set it imports only what is built in, and no file of any folder.

Nothing is garbage while modules are imported, so collections are off until that is done.
"""


class Surroundings(NamedTuple):
    """Where the trainer was when it built a loader.

    Attributes:
        path: the import path, all of it absolute.
        arguments: the command-line arguments.
        folder: the working directory; None if it was gone.
    """

    path: tuple[str, ...]
    arguments: tuple[str, ...]
    folder: str | None


def surroundings() -> Surroundings:
    """Returns where this process is."""
    folder = _current_folder()
    # Not every entry need be a string: imports pass over the others.
    entries = [entry for entry in sys.path if isinstance(entry, str)]
    if folder is not None:
        # Not pathlib, which makes "" of nothing and takes its time.
        entries = [os.path.join(folder, entry) if entry else folder for entry in entries]  # noqa: PTH118
    record_import_path(entries)
    arguments = tuple(argument for argument in getattr(sys, "argv", ()) if isinstance(argument, str))
    return Surroundings(tuple(entries), arguments, folder)


def write_surroundings(here: Surroundings) -> int:
    """Returns the descriptor of an anonymous file for `_START`: a command line has no room for a long import path."""
    written = marshal.dumps((list(here.path), list(here.arguments)))
    descriptor = create_arena_file(len(written))
    os.pwrite(descriptor, written, 0)
    return descriptor


def command(*numbers: int) -> list[str]:
    """Returns the command line that starts a fork server with the flags of this interpreter.

    Args:
        numbers: the descriptor from `write_surroundings`, and what `fork_server.main` takes.

    Raises:
        RuntimeError: the interpreter is not known, as where Python is embedded in another program.
    """
    if not sys.executable:
        raise RuntimeError(
            f"Worker processes are started with sys.executable, which is {sys.executable!r}. "
            "Set it to the path of a Python interpreter, or use no worker processes."
        )
    import subprocess  # noqa: PLC0415  (a fork server imports this module, too, and does without)

    # The function that multiprocessing uses. -P: the folder is on the import path only if the trainer has it there.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
    return [sys.executable, *flags, "-P", "-c", _START, *map(str, numbers)]


def folder_to_enter(here: Surroundings) -> str | None:
    """Returns the folder in which to start a process, None for the one where this process is."""
    return None if here.folder == _current_folder() else here.folder


def tracker_descriptor() -> int | None:
    """Returns the descriptor of the resource tracker of `multiprocessing`, None where nobody needs one.

    Workers share it, as the children of `multiprocessing` do. If they had their own, the end of a worker would unlink
    the user's shared memory that it had attached.
    """
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    if tracker is None:
        return None
    # Where the user's code has to do with shared memory, it is started if need be.
    is_needed = "multiprocessing.shared_memory" in sys.modules
    descriptor = tracker.getfd() if is_needed else tracker._resource_tracker._fd  # noqa: SLF001
    return None if descriptor is None else int(descriptor)


def keep_tracker(descriptor: int) -> None:
    """Has at hand what the processes that this one forks need for `share_tracker`."""
    from multiprocessing import resource_tracker  # noqa: F401, PLC0415  (takes its time, and few need it)

    os.set_inheritable(descriptor, False)


def share_tracker(descriptor: int) -> None:
    """Makes this process use the resource tracker of another one.

    After the fork, and not before it: Python 3.14 closes the descriptor of what it knows as the tracker in a forked
    process, which would then start its own.
    """
    from multiprocessing import resource_tracker  # noqa: PLC0415  (as above)

    resource_tracker._resource_tracker._fd = descriptor  # type: ignore[attr-defined]  # noqa: SLF001


def _current_folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109  (a name is wanted)
    except OSError:
        return None
