"""Which modules another process can import: what they define crosses by name, everything else by value.

A module may be known here under a name that means nothing elsewhere: it was run as a script, made by
`types.ModuleType`, or loaded from a file that no folder of `sys.path` leads to.
"""

import functools
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from millstream.signal_exceptions import is_from_signal_handler

_MAIN_MODULES = frozenset({"__main__", "__mp_main__"})

_paths: dict[tuple[str, ...], None] = {}
"""The import paths of the loaders that this process has built: "" in `sys.path` may mean another folder by now."""


def note_import_path(path: Sequence[str]) -> None:
    """Says which import path, all of it absolute, a worker has: what it leads to can be imported there."""
    _paths[tuple(path)] = None


def is_importable(name: str) -> bool:
    """Returns whether a worker, or the trainer, imports under a name what this process knows by it."""
    module = sys.modules.get(name)
    if module is None or name in _MAIN_MODULES:
        return False
    here = tuple(map(str, sys.path))
    return any(_is_importable(name, id(module), path) for path in (here, *_paths))


@functools.lru_cache(maxsize=4096)
def _is_importable(name: str, _module: int, import_path: tuple[str, ...]) -> bool:
    """Looks for a module where an import would; once for each module and path, as that asks the file system."""
    module = sys.modules.get(name)
    package = name.rpartition(".")[0]
    if package and not is_importable(package):
        return False
    spec = getattr(module, "__spec__", None)
    file = getattr(module, "__file__", None)
    # What a package makes in passing has no file, or is a module with another name, such as `collections.abc`: it is
    # there when the package is imported. The classes of C code, from wherever it was loaded, cannot cross by value.
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
        # Finders are anybody's: the import may well succeed where the search did not.
        return True
    return found is not None and (found.origin == getattr(spec, "origin", None) or _is_same_file(found.origin, file))


def has_name(value: Any, module: ModuleType | None) -> bool:
    """Returns whether a module's attribute of a value's qualified name is this very value."""
    found: Any = module
    for part in getattr(value, "__qualname__", value.__name__).split("."):
        found = getattr(found, part, None)
    return found is value


def _find(name: str, path: Sequence[str] | None, import_path: Sequence[str]) -> importlib.machinery.ModuleSpec | None:
    """Returns where an import would find a module, if nobody had imported it yet.

    Args:
        name: the module's.
        path: where its package looks for modules; None for a module without a package.
        import_path: stands for `sys.path`.
    """
    for finder in sys.meta_path:
        find_spec = getattr(finder, "find_spec", None)
        # This finder alone looks at `sys.path` by itself.
        searched = import_path if path is None and finder is importlib.machinery.PathFinder else path
        spec: importlib.machinery.ModuleSpec | None = None if find_spec is None else find_spec(name, searched, None)
        if spec is not None:
            return spec
    return None


def _is_same_file(found: str | None, known: str | None) -> bool:
    if found is None or known is None:
        return found is known
    return os.path.realpath(found) == os.path.realpath(known)
