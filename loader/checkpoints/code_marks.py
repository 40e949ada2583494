"""Marks of the code that functions and classes run: bytecode without positions, comments and docstrings."""

import functools
import inspect
import types
import zlib
from collections.abc import Iterable, Iterator
from typing import Any

CODE = "code "
"""The beginning of the mark of code in a description. Marks of two minor versions of Python cannot be compared."""

# Updates of Python, millstream and arrays leave the stream as it is.
_FOREIGN_MODULES = (
    *("abc", "builtins", "collections", "dataclasses", "enum", "functools", "random", "typing"),
    *("jax", "jaxlib", "millstream", "numpy"),
)
_CALLED = ("__call__", "__getitem__", "__getitems__", "__len__")
# Before Python 3.14 the first constant of every `def` is its docstring or None; later a flag says so.
_DOCSTRING_FLAG: int = getattr(inspect, "CO_HAS_DOCSTRING", inspect.CO_OPTIMIZED)


def crc_of(parts: Iterable[str | bytes | bytearray | memoryview]) -> str:
    """Returns `#` and the CRC-32 of some texts, of which it matters where one ends and the next begins."""
    crc = 0
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        crc = zlib.crc32(data, zlib.crc32(b"%d:" % len(data), crc))
    return f"#{crc:08x}"


def written_name(value: Any) -> str:
    """Returns the name of a class or a function, as its author wrote it."""
    text = type.__getattribute__(value, "__qualname__") if isinstance(value, type) else value.__qualname__
    return str(text).rpartition("<locals>.")[2]


def is_foreign(module: object) -> bool:
    """Returns whether a module is Python's, an array library's or millstream's own."""
    return str(module).partition(".")[0] in _FOREIGN_MODULES


def code_mark(function: types.FunctionType) -> str:
    """Returns the mark of what a function does, wherever it is defined."""
    return f"{CODE}{_mark(function.__code__)}"


def marks_of_methods(kind: type) -> dict[str, str]:
    """Returns the marks of the methods of a user's class and its bases, by name.

    Methods that only make, show and compare instances do not count.
    """
    marks: dict[str, str] = {}
    for base in kind.__mro__:
        if not is_foreign(base.__module__):
            for name, member in sorted(vars(base).items()):
                if name in _CALLED or not name.endswith("__"):
                    texts = [_mark(one.__code__, one.__defaults__ or ()) for one in _functions(member)]
                    if texts and f"{name}()" not in marks:
                        marks[f"{name}()"] = CODE + (texts[0] if len(texts) == 1 else crc_of(texts))
    return marks


def closures_of_methods(kind: type) -> dict[str, object]:
    """Returns what the methods of a user's class have of the functions around it, by name."""
    found: dict[str, object] = {}
    for base in reversed(kind.__mro__):
        if not is_foreign(base.__module__):
            for member in vars(base).values():
                for function in _functions(member):
                    found |= closure(function)
    return found


def closure(function: types.FunctionType) -> dict[str, object]:
    """Returns what a function has of the functions around it; neither what `super()` needs, nor names not yet set."""
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        if name != "__class__" and cell != types.CellType()
    }


def defaults(function: types.FunctionType) -> dict[str, object]:
    """Returns the defaults of a function, without private containers, which keep results between calls."""
    arguments = function.__code__.co_varnames[: function.__code__.co_argcount]
    given = function.__defaults__ or ()
    held = dict(zip(arguments[len(arguments) - len(given) :], given, strict=True)) | (function.__kwdefaults__ or {})
    return {
        name: item for name, item in held.items() if not (name.startswith("_") and isinstance(item, dict | list | set))
    }


def _functions(member: Any) -> Iterator[types.FunctionType]:
    """Yields the functions that a name in a class body stands for."""
    if isinstance(member, property):
        found = [member.fget, member.fset]
    elif isinstance(member, functools.cached_property | functools.partialmethod):
        found = [member.func]
    else:
        found = [getattr(member, "__wrapped__", member)] if callable(member) or hasattr(member, "__func__") else []
    return (function for function in found if isinstance(function, types.FunctionType))


def _mark(code: types.CodeType, given: tuple[object, ...] = ()) -> str:
    constants = list(code.co_consts)
    if code.co_flags & _DOCSTRING_FLAG and not code.co_name.startswith("<") and isinstance(constants[0], str):
        constants[0] = None
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    texts = [_constant(item) for item in (*counts, *code.co_names, *constants, *given)]
    return crc_of([code.co_code, code.co_exceptiontable, *texts])


def _constant(value: object) -> str:
    """Returns a constant of code as text."""
    if isinstance(value, types.CodeType):
        return _mark(value)
    if type(value) in (tuple, frozenset):
        texts = [_constant(item) for item in value]  # type: ignore[attr-defined]  # one of the two
        return f"{type(value).__name__}({', '.join(texts if type(value) is tuple else sorted(texts))})"
    is_plain = type(value) in (bool, int, float, complex, str, bytes, types.NoneType)
    return repr(value) if is_plain else written_name(type(value))
