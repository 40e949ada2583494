"""The launch context that workers share with the trainer: flags, import path, arguments, folder, resource tracker.

Import path and folder are those at the construction of the loader. A relative entry of `sys.path` keeps the meaning
that it had then, even if the trainer changes its folder later.
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
"""The program of a fork server. Until the path is set, it imports only built-in modules, and no file of any folder.

Garbage collection is off while modules are imported, because nothing is garbage then.
"""


class LaunchContext(NamedTuple):
    """The environment of the trainer when it built a loader."""

    path: tuple[str, ...]  # All entries are absolute.
    arguments: tuple[str, ...]
    folder: str | None  # None if it did not exist.


def launch_context() -> LaunchContext:
    folder = current_folder()
    # An entry need not be a string. Imports ignore the others.
    entries = [entry for entry in sys.path if isinstance(entry, str)]
    if folder is not None:
        # Not pathlib, which would turn "" into "." and is slow.
        entries = [os.path.join(folder, entry) if entry else folder for entry in entries]  # noqa: PTH118
    record_import_path(entries)
    arguments = tuple(argument for argument in getattr(sys, "argv", ()) if isinstance(argument, str))
    return LaunchContext(tuple(entries), arguments, folder)


def write_launch_context(context: LaunchContext) -> int:
    """Returns the descriptor of an anonymous file for `_START`. A long import path may not fit on a command line."""
    content = marshal.dumps((list(context.path), list(context.arguments)))
    descriptor = create_arena_file(len(content))
    os.pwrite(descriptor, content, 0)
    return descriptor


def command(*numbers: int) -> list[str]:
    """Returns the command line that starts a fork server with the flags of this interpreter.

    The numbers are the descriptor from `write_launch_context`, and the arguments of `fork_server.main`. Where Python is
    embedded in another program, the interpreter may be unknown, which is a RuntimeError.
    """
    if not sys.executable:
        raise RuntimeError(
            f"Worker processes are started with sys.executable, which is {sys.executable!r}. "
            "Set it to the path of a Python interpreter, or use no worker processes."
        )
    import subprocess  # noqa: PLC0415  (lazy: a fork server imports this module, but not subprocess)

    # multiprocessing uses the same function. -P: the script's folder is on the import path only if the trainer has it.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
    return [sys.executable, *flags, "-P", "-c", _START, *map(str, numbers)]


def tracker_descriptor() -> int | None:
    """Returns the descriptor of `multiprocessing`'s resource tracker, or None if none is needed.

    Workers share it, like children of `multiprocessing`. With a tracker of its own, the end of a worker would unlink
    the user's shared memory that it had attached.
    """
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    if tracker is None:
        return None
    # If user code may use shared memory, this starts the tracker.
    is_needed = "multiprocessing.shared_memory" in sys.modules
    descriptor = tracker.getfd() if is_needed else tracker._resource_tracker._fd  # noqa: SLF001
    return None if descriptor is None else int(descriptor)


def keep_tracker(descriptor: int) -> None:
    """Imports the module that `share_tracker` needs, before any fork."""
    from multiprocessing import resource_tracker  # noqa: F401, PLC0415  (lazy: slow to import, and rarely needed)

    os.set_inheritable(descriptor, False)


def share_tracker(descriptor: int) -> None:
    """Makes this process use the resource tracker of another one.

    Called after the fork: Python 3.14 closes the descriptor of its known tracker in a forked process, which would then
    start its own.
    """
    from multiprocessing import resource_tracker  # noqa: PLC0415  (lazy, as above)

    resource_tracker._resource_tracker._fd = descriptor  # type: ignore[attr-defined]  # noqa: SLF001


def current_folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109  (a string is needed)
    except OSError:
        return None
