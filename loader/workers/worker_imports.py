"""Imports of a worker: each module of the user has the trainer's code, and libraries get the trainer's settings.

Guarantees:
    * A module that the trainer has imported from a file of the user's is imported from the same content, or not at all.
      One that only workers import has the same content in all of them. Installed packages and the standard library are
      not compared.
    * The trainer reads each of these files once, when a loader with workers is built or starts them. A file that was
      edited before, but after the trainer had imported it, is recognised by the code of its functions, and by the
      compiled file that Python has written.
"""

import functools
import importlib.machinery
import inspect
import os
import struct
import sys
import time
import zipimport
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any, final

from millstream.sources.digests import digest

DIGEST_BYTES = 16
CHANGED = b""
"""The digest of a file that is no longer what the trainer has imported."""

_WRAPPERS = (FunctionType, staticmethod, classmethod, functools._lru_cache_wrapper)  # noqa: SLF001  (it has no name)

_PACKAGE_FOLDERS = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


_seen: dict[str, tuple[Any, bytes | None]] = {}
"""The spec by which each module was imported, which a reload replaces, and its digest; None if it is not the user's."""


def code_digests() -> dict[str, bytes]:
    """Returns the digests of the files of all modules of the user that this process has imported, by their names."""
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        if name not in _seen or _seen[name][0] is not spec:
            _seen[name] = spec, _digest_of(name, module, spec)
    return {name: found for name, (_, found) in list(_seen.items()) if found is not None and name in sys.modules}


def is_of_user(name: str, spec: Any) -> bool:
    """Returns True for a module that was imported from a file of the user's, by its name and its spec."""
    origin: Any = getattr(spec, "origin", None)
    return not _is_library(name) and _is_source_of_user(origin)


def is_imported(name: str) -> bool:
    module = sys.modules.get(name)
    return module is not None and not getattr(module.__spec__, "_initializing", False)


def _digest_of(name: str, module: Any, spec: Any) -> bytes | None:
    if not is_of_user(name, spec):
        return None
    try:
        status, content = _read(spec)
    except (OSError, zipimport.ZipImportError):
        return CHANGED
    # Other loaders may compile something else than the file has.
    may_differ = type(spec.loader) is importlib.machinery.SourceFileLoader and status.st_mtime > _process_start()
    if may_differ and (_is_newer(status, spec.cached) or not _has_code_of(module, content, spec.origin)):
        return CHANGED
    return digest(DIGEST_BYTES, content)


def _read(spec: Any) -> tuple[os.stat_result, bytes]:
    """Returns the content of a module's file, and the status of that, or of the archive that it is in."""
    if isinstance(spec.loader, zipimport.zipimporter):
        return os.stat(spec.loader.archive), spec.loader.get_data(spec.origin)  # noqa: PTH116  (not pathlib, which is slow)
    with open(spec.origin, "rb") as file:  # noqa: PTH123  (as above)
        return os.fstat(file.fileno()), file.read()


def _is_library(name: str) -> bool:
    top = name.partition(".")[0]
    return top in sys.stdlib_module_names or top == "millstream"


def _is_source(origin: object) -> bool:
    return isinstance(origin, str) and origin.endswith(".py")


def _is_source_of_user(origin: object) -> bool:
    return _is_source(origin) and not any(folder in str(origin) for folder in _PACKAGE_FOLDERS)


def _process_start() -> float:
    """Returns the time at which this process has started, or 0 if the system does not tell."""
    try:
        with open("/proc/self/stat", encoding="utf-8", errors="replace") as file:  # noqa: PTH123  (as above)
            ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, AttributeError, IndexError):
        return 0.0


def _is_newer(status: os.stat_result, cached: str | None) -> bool:
    """Returns True if a file is not the one of its compiled code, which its import has used or written."""
    if cached is None or sys.dont_write_bytecode:
        return False
    try:
        with open(cached, "rb") as file:  # noqa: PTH123  (as above)
            _, flags, seconds, size = struct.unpack("<4sIII", file.read(16))
    except (OSError, struct.error):
        return False
    return flags == 0 and (seconds, size) != (int(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF)


def _has_code_of(module: ModuleType, content: bytes, origin: str) -> bool:
    """Returns True if the functions of a module, and the methods of its classes, are those of a source."""
    try:
        known = set(_codes(compile(content, origin, "exec", dont_inherit=True)))
    except (SyntaxError, ValueError):
        return False
    owners = [
        value for value in vars(module).values() if inspect.isclass(value) and value.__module__ == module.__name__
    ]
    values = [value for owner in (module, *owners) for value in list(vars(owner).values())]
    values += [value.fget for value in values if isinstance(value, property)]
    functions: list[Any] = [inspect.unwrap(value) for value in values if isinstance(value, _WRAPPERS)]  # type: ignore[arg-type]
    codes = [function.__code__ for function in functions if isinstance(function, FunctionType)]
    return all(code in known for code in codes if code.co_filename == origin)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


@final
class WorkerImports:
    """The first finder of a worker: it compares code, and calls functions after the modules that they wait for.

    Args:
        code: the digests of the trainer's modules.
        report: called with the name and the digest of each other module of the user's.
    """

    def __init__(self, code: Mapping[str, bytes], report: Callable[[str, bytes], object]) -> None:
        self._code = code
        self._report = report
        self._actions: dict[str, list[Callable[[], object]]] = {}

    def install(self) -> None:
        sys.meta_path.insert(0, self)
        # A folder that was missing when the fork server began may have modules now.
        for entry, finder in list(sys.path_importer_cache.items()):
            if finder is None:
                del sys.path_importer_cache[entry]

    def after(self, name: str, action: Callable[[], object]) -> None:
        """Calls a function after a module was imported: now, if it is."""
        if is_imported(name):
            action()
        else:
            self._actions.setdefault(name, []).append(action)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Returns the spec of a module that needs attention, otherwise None for the other finders.

        Raises:
            RuntimeError: the module's file is not what the trainer has imported.
        """
        actions = self._actions.get(fullname)
        if actions is None and _is_library(fullname):
            return None
        for finder in list(sys.meta_path):
            find_spec: Any = None if finder is self else getattr(finder, "find_spec", None)
            found: importlib.machinery.ModuleSpec | None = find_spec and find_spec(fullname, path, target)
            if found is not None:
                # On another machine, a module may be installed that is a file of the user's here.
                if _is_source_of_user(found.origin) or (fullname in self._code and _is_source(found.origin)):
                    self._compare(fullname, found)
                if actions is not None:
                    self._call_after(fullname, found)
                return found
        return None

    def _compare(self, name: str, spec: Any) -> None:
        _, content = _read(spec)
        found = digest(DIGEST_BYTES, content)
        if name not in self._code:
            self._report(name, found)
        elif self._code[name] != found:
            raise changed(name, spec.origin)

    def _call_after(self, name: str, spec: importlib.machinery.ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = loader.exec_module

        def execute_and_call(module: ModuleType) -> None:
            del loader.exec_module
            execute(module)
            for action in self._actions.pop(name, []):
                action()

        loader.exec_module = execute_and_call


def changed(name: str, origin: str) -> RuntimeError:
    """Returns the error about a module whose file is not what was imported elsewhere."""
    return RuntimeError(
        f"Cannot import {name} in a worker: {origin} has changed since the trainer imported it, or another worker, so "
        "that batches would depend on the process that computes them. Restart the program, or restore the file."
    )
