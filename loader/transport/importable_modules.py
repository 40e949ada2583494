"""Import paths, and the modules that other processes can import with them.

A loader records the import path of its workers when it is built. Definitions of modules that can be imported with
such a path cross by name, everything else by value. The name of a module may mean nothing elsewhere: if the module was
run as a script, created by `types.ModuleType`, or loaded from a file outside the folders of `sys.path`.
"""

import functools
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

from millstream.core.signals import is_from_signal_handler


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


_MAIN_MODULES = frozenset({"__main__", "__mp_main__"})

MAX_PATHS = 16
"""The maximum number of import paths that are kept. A notebook may change `sys.path` before each loader."""

_paths: dict[tuple[str, ...], None] = {}
"""The latest import paths of this process's loaders, absolute: "" in `sys.path` may mean another folder by now."""


def record_import_path(path: Sequence[str]) -> None:
    """Records the import path of a loader's workers, whose modules can be imported there. All entries are absolute."""
    recorded = tuple(path)
    _paths.pop(recorded, None)
    _paths[recorded] = None
    for old in list(_paths)[:-MAX_PATHS]:
        _paths.pop(old, None)


def is_importable(name: str) -> bool:
    """Returns True if a worker, or the trainer, would import the same module under this name."""
    module = sys.modules.get(name)
    if module is None or name in _MAIN_MODULES:
        return False
    current = tuple(map(str, sys.path))
    return any(_is_importable(name, id(module), path) for path in (current, *_paths))


@functools.lru_cache(maxsize=4096)
def _is_importable(name: str, _module: int, import_path: tuple[str, ...]) -> bool:
    """Searches for a module as an import would. Cached per module and path, because it reads the file system."""
    module = sys.modules.get(name)
    package = name.rpartition(".")[0]
    if package and not is_importable(package):
        return False
    spec = getattr(module, "__spec__", None)
    file = getattr(module, "__file__", None)
    # A module that its package creates has no file, or another name, such as `collections.abc`. It exists once the
    # package is imported. The classes of C code cannot cross by value, wherever the code was loaded from.
    is_made_by_package = file is None or getattr(spec, "name", name) != name
    if (package and is_made_by_package) or isinstance(
        getattr(spec, "loader", None), importlib.machinery.ExtensionFileLoader
    ):
        return True
    try:
        found = _find(name, getattr(sys.modules.get(package), "__path__", None), import_path)
    except Exception as error:
        if is_from_signal_handler(error):
            raise
        # A finder may be third-party code: the import may succeed although the search failed.
        return True
    return found is not None and (found.origin == getattr(spec, "origin", None) or _is_same_file(found.origin, file))


def has_name(value: Any, module: ModuleType | None) -> bool:
    found: Any = module
    for attribute in getattr(value, "__qualname__", value.__name__).split("."):
        found = getattr(found, attribute, None)
    return found is value


def _find(name: str, path: Sequence[str] | None, import_path: Sequence[str]) -> importlib.machinery.ModuleSpec | None:
    """Returns the spec that an import would find, ignoring `sys.modules`.

    `path` is the `__path__` of the package; None for a module without one. `import_path` replaces `sys.path`.
    """
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        # Only this finder reads `sys.path` itself.
        searched = import_path if path is None and finder is importlib.machinery.PathFinder else path
        spec: importlib.machinery.ModuleSpec | None = None if find_spec is None else find_spec(name, searched, None)
        if spec is not None:
            return spec
    return None


def _is_same_file(found: str | None, known: str | None) -> bool:
    if found is None or known is None:
        return found is known
    return os.path.realpath(found) == os.path.realpath(known)
