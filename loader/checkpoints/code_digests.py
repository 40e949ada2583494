"""Digests of the code that functions and classes run: bytecode without positions, comments and docstrings."""

import functools
import inspect
import types
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

CODE = "code "
"""The beginning of a digest of code. Digests of two minor versions of Python cannot be compared."""

# An update of Python, millstream or an array library leaves the stream as it is.
_FOREIGN_MODULES = (
    *("abc", "builtins", "collections", "dataclasses", "enum", "functools", "random", "typing"),
    *("jax", "jaxlib", "millstream", "numpy"),
)
_CALLED = ("__call__", "__getitem__", "__getitems__", "__len__")
# Before Python 3.14 the first constant of every `def` is its docstring or None; since then a flag says so.
_DOCSTRING_FLAG: int = getattr(inspect, "CO_HAS_DOCSTRING", inspect.CO_OPTIMIZED)


def crc_of(texts: Iterable[str | bytes | bytearray | memoryview]) -> str:
    """Returns `#` and the CRC-32 of several texts. It depends on where one ends and the next begins."""
    crc = 0
    for text in texts:
        data = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
        crc = zlib.crc32(data, zlib.crc32(b"%d:" % len(data), crc))
    return f"#{crc:08x}"


def written_name(value: Any) -> str:
    text = type.__getattribute__(value, "__qualname__") if isinstance(value, type) else value.__qualname__
    return str(text).rpartition("<locals>.")[2]


def is_foreign(module: object) -> bool:
    return str(module).partition(".")[0] in _FOREIGN_MODULES


def digest_of(functions: Iterable[types.FunctionType]) -> str:
    return CODE + crc_of(_digest(function.__code__) for function in functions)


def methods_of(kind: type) -> dict[str, list[types.FunctionType]]:
    """Returns the functions of each method of a user's class and its bases, by name.

    Methods that only build, print and compare instances are left out.
    """
    found: dict[str, list[types.FunctionType]] = {}
    for base in kind.__mro__:
        if not is_foreign(base.__module__):
            for name, member in sorted(vars(base).items()):
                if (functions := list(_functions(member))) and (name in _CALLED or not name.endswith("__")):
                    found.setdefault(name, functions)
    return found


def values_held_by(function: types.FunctionType) -> dict[str, object]:
    """Returns the defaults of a function and the variables of the functions around it, by name.

    Private containers among the defaults are left out, because they cache results between calls.
    """
    code, defaults = function.__code__, function.__defaults__ or ()
    arguments = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    held = dict(zip(arguments, defaults, strict=True)) | (function.__kwdefaults__ or {})
    held = {name: item for name, item in held.items() if not (name[0] == "_" and isinstance(item, dict | list | set))}
    for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
        if name != "__class__" and cell != types.CellType():  # The variable may not be set yet.
            held[name] = cell.cell_contents
    return held


def _functions(member: Any) -> Iterator[types.FunctionType]:
    if isinstance(member, property):
        found = [member.fget, member.fset]
    elif isinstance(member, functools.cached_property | functools.partialmethod):
        found = [member.func]
    else:
        found = [getattr(member, "__wrapped__", member)] if callable(member) or hasattr(member, "__func__") else []
    return (function for function in found if isinstance(function, types.FunctionType))


def _digest(code: types.CodeType) -> str:
    constants = list(code.co_consts)
    if code.co_flags & _DOCSTRING_FLAG and not code.co_name.startswith("<") and isinstance(constants[0], str):
        constants[0] = None
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    return crc_of([code.co_code, code.co_exceptiontable, *map(_constant, (*counts, *code.co_names, *constants))])


def _constant(value: object) -> str:
    if isinstance(value, types.CodeType):
        return _digest(value)
    if isinstance(value, tuple):
        return f"({', '.join(map(_constant, value))})"
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(_constant, value)))}}}"
    return repr(value)
