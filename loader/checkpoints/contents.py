"""What an object and a function consist of: what pickling sends of them, and a mark of the code that they run."""

import copyreg
import dataclasses
import functools
import inspect
import itertools
import types
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

ITEM_LIMIT = 4096
"""Containers with more items than this are sampled."""
PLAIN_TYPES = frozenset({bool, int, float, str, bytes, types.NoneType})

# Updates of Python, millstream and arrays leave the stream as it is.
_FOREIGN_MODULES = (
    *("abc", "builtins", "collections", "dataclasses", "enum", "functools", "random", "typing"),
    *("jax", "jaxlib", "millstream", "numpy"),
)
_CONSTANT_TYPES = (bool, int, float, complex, str, bytes, tuple, frozenset, list, dict, set, np.ndarray)
_CACHE_TYPES = (dict, list, set)
_CALLED = ("__call__", "__getitem__", "__getitems__", "__len__")
# Before Python 3.14 the first constant of every `def` is its docstring or None; later a flag says so.
_DOCSTRING_FLAG: int = getattr(inspect, "CO_HAS_DOCSTRING", inspect.CO_OPTIMIZED)


def crc_of(parts: Iterable[str | bytes | bytearray]) -> str:
    """Returns `#` and the CRC-32 of some texts, of which it matters where one ends and the next begins."""
    crc = 0
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        crc = zlib.crc32(data, zlib.crc32(b"%d:" % len(data), crc))
    return f"#{crc:08x}"


def sent(value: object) -> tuple[dict[Any, object], list[object]]:
    """Returns what pickling an object would send: its attributes by name, and all else in order."""
    kind = type(value)
    reduce: Callable[[Any], Any] | None = copyreg.dispatch_table.get(kind)
    reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    wrapped = {"__wrapped__": inner} if (inner := getattr(value, "__dict__", {}).get("__wrapped__")) else {}
    if isinstance(reduced, str):
        return wrapped, [reduced]
    _, given, state, items, pairs = (*reduced, None, None, None)[:5]
    arguments = [argument for argument in given if argument is not kind]
    arguments += [list(itertools.islice(items, ITEM_LIMIT))] if items is not None else []
    arguments += [dict(itertools.islice(pairs, ITEM_LIMIT))] if pairs is not None else []
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):  # Attributes, and slots.
        state = {**(state[0] or {}), **state[1]}
    if dataclasses.is_dataclass(value) and isinstance(state, list):  # Of dataclass(slots=True).
        state = {field.name: item for field, item in zip(dataclasses.fields(value), state, strict=True)}
    if not isinstance(state, dict):
        return wrapped, arguments if state is None else [*arguments, state]
    return {key: item for key, item in state.items() if not str(key).endswith("__")} | wrapped, arguments


def class_constants(kind: type) -> dict[str, object]:
    """Returns the constants in the bodies of a class and its bases, which are parameters, too; caches are not."""
    return {
        name: member
        for base in reversed(kind.__mro__)
        if not is_foreign(base.__module__)
        for name, member in vars(base).items()
        if type(member) in _CONSTANT_TYPES and not name.endswith("__") and not is_cache(name, member)
    }


def methods(kind: type) -> Iterator[tuple[str, types.FunctionType]]:
    """Yields the functions in the bodies of a class and its bases, but for what makes, shows and compares instances."""
    for base in kind.__mro__:
        if not is_foreign(base.__module__):
            for name, member in sorted(vars(base).items()):
                if name in _CALLED or not name.endswith("__"):
                    yield from ((name, function) for function in _functions(member))


def _functions(member: Any) -> list[types.FunctionType]:
    """Returns the functions that a name in a class body stands for."""
    if isinstance(member, property):
        found = [member.fget, member.fset]
    elif isinstance(member, (functools.cached_property, functools.partialmethod)):
        found = [member.func]
    else:
        found = [getattr(member, "__wrapped__", member)] if callable(member) or hasattr(member, "__func__") else []
    return [function for function in found if isinstance(function, types.FunctionType)]


def closure(function: types.FunctionType) -> dict[str, object]:
    """Returns what a function has of the functions around it; neither what `super()` needs, nor names not yet set."""
    return {
        name: cell.cell_contents
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        if name != "__class__" and cell != types.CellType()
    }


def code_mark(code: types.CodeType, defaults: tuple[object, ...] | None = None) -> int:
    """Returns the mark of what code does, wherever it stands, whatever its comments and its docstring are."""
    constants = list(code.co_consts)
    if code.co_flags & _DOCSTRING_FLAG and not code.co_name.startswith("<") and isinstance(constants[0], str):
        constants[0] = None
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    texts = [_constant(item) for item in (*counts, *code.co_names, *constants, *(defaults or ()))]
    return int(crc_of([code.co_code, code.co_exceptiontable, *texts])[1:], 16)


def _constant(value: object) -> str:
    """Returns a constant of code in words."""
    if isinstance(value, types.CodeType):
        return f"code {code_mark(value)}"
    if type(value) in (tuple, frozenset):
        texts = [_constant(item) for item in value]  # type: ignore[attr-defined]  # one of the two
        return f"{type(value).__name__}({', '.join(texts if type(value) is tuple else sorted(texts))})"
    return repr(value) if type(value) in (*PLAIN_TYPES, complex) else written_name(type(value))


def is_cache(name: str, value: object) -> bool:
    """Returns whether a default or a class's constant is taken for a cache: a private container."""
    return name.startswith("_") and isinstance(value, _CACHE_TYPES)


def is_foreign(module: object) -> bool:
    """Returns whether a module is Python's, an array library's or millstream's own."""
    return str(module).partition(".")[0] in _FOREIGN_MODULES


def written_name(value: Any) -> str:
    """Returns the name of a class or a function, as its author wrote it."""
    text = type.__getattribute__(value, "__qualname__") if isinstance(value, type) else value.__qualname__
    return str(text).rpartition("<locals>.")[2]
