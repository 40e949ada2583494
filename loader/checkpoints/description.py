"""The description of values in two tiers: texts by path, such as `operations[0].size`.

*Identity*, where a difference means another stream:

- numbers, texts, bools, enums, ranges, dtypes and regular expressions; classes and functions by name;
- arrays of at most ARRAY_LIMIT bytes; lists, tuples, sets and dicts of all these, of at most VALUE_LIMIT values and
  SAMPLE_BYTES;
- the attributes, private ones and class constants included, of objects that declare them: operations, samplers,
  selection maps, dataclasses, partial functions and objects of millstream;
- the result of the `fingerprint()` of any object.

*Content*, where a difference may well be the same stream: code, closures, larger arrays and containers, and other
objects by the state that pickling would send. A tokenizer, for instance, changes itself when it is called.

Of a sampler, all values are identity, whatever their size, because they decide the order.

Descriptions are equal in every process: they contain no addresses, hashes or folders of code. The work is bounded: of
what is large, in a file or in memory, SAMPLE_BYTES are read, in SAMPLE_RUNS contiguous runs.
Random generators, locks, open files, results of `functools.cached_property` and attributes that are None are left out.

Digests of code cover the bytecode that functions and classes run, without positions, comments and docstrings.
"""

import array
import copyreg
import dataclasses
import enum
import functools
import inspect
import math
import mmap
import numbers
import os
import re
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from millstream.core.signals import is_from_signal_handler
from millstream.transforms.base import Transformation
from millstream.transforms.grain_classes import DatasetSelectionMap

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


TEXT_LIMIT = 80
"""The maximum number of characters of a text. A longer one is a CRC."""
ENTRY_LIMIT = 32
"""Objects of more attributes are described as a whole, and classes of more methods by one digest."""
VALUE_LIMIT = 10_000
"""Containers of more values are content; of more than three times as many values, at all levels together, too."""
ARRAY_LIMIT = 1 << 16
"""Arrays of more bytes are content."""
SAMPLE_BYTES, SAMPLE_RUNS = 1 << 20, 64
"""The number of bytes of a large value that are read, and the number of contiguous runs they are in."""

_DEPTH_LIMIT, _LONG_TEXT, _MIN_RUN_BYTES = 32, 4096, 512
_BRACKETS = {list: ("[", "]"), tuple: ("(", ")"), dict: ("{", "}")}
_CONSTANTS = (numbers.Number, str, bytes, tuple, frozenset, list, dict, set, range, np.ndarray, np.generic, enum.Enum)
_TEXTS = (str, bytes, bytearray)
_SERIES = (*_TEXTS, memoryview, array.array, mmap.mmap)
_NUMBERS = ({int}, {float}, {int, float})
_NAMED = (types.BuiltinFunctionType, types.MethodDescriptorType, types.MethodType, np.ufunc)
_TRANSIENT = ("_io.", "_thread.", "io.", "random.", "threading.", "numpy.random.")
"""The modules, and a dot, whose objects are specific to a process, or change with every use."""


class Description:
    """A description of several values.

    Args:
        is_complete: True to read all bytes of a value and make it identity, as for a sampler.
        is_identity: True for the classes whose objects declare their attributes, to describe nothing but identity;
            None for a description with content.

    Attributes:
        identity: texts that decide the stream, by path.
        content: digests of what may decide the stream, by path.
        changes: identity that counts only from a position of the sampler on, as (position, path, text).
    """

    def __init__(self, *, is_complete: bool = False, is_identity: Callable[[type], bool] | None = None) -> None:
        self.is_complete = is_complete
        self._is_identity = is_identity
        self.identity: dict[str, str] = {}
        self.content: dict[str, str] = {}
        self.changes: list[tuple[int, str, str]] = []

    def include(self, other: "Description") -> None:
        self.identity |= other.identity
        self.content |= other.content
        self.changes += other.changes

    def add(self, path: str, value: object, *, is_content: bool = False) -> None:
        """Adds a value. Never raises; of user code only `__getstate__`, `__reduce__` and `fingerprint` are called."""
        if is_content and self._is_identity is not None:
            return
        try:
            self._add(path, value, is_content)
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            self.content[path] = _unreadable(value)

    def add_object(self, path: str, value: object, head: str, *, is_content: bool = False) -> None:
        """Adds an object by its attributes, the constants of its class, and digests of its methods.

        `head` is the text at the path itself, which is identity whatever `is_content` says of the attributes.
        """
        self.identity[path] = printable(head)
        try:
            attributes = _attributes(value, with_constants=self._is_identity is None)
        except Exception as error:  # Of a `__getstate__`: an open file, for instance, cannot be pickled.
            if is_from_signal_handler(error):
                raise
            attributes = {}
            self.content[f"{path}.__getstate__"] = _unreadable(value)
        for name, item in attributes.items():
            self.add(f"{path}.{name}", item, is_content=is_content)
        self.add_code(path, type(value))

    def add_code(self, path: str, kind: type) -> None:
        """Adds the digests of the methods of a class, and the values that they hold; of many methods, one digest."""
        if self._is_identity is not None:
            return
        methods = {} if issubclass(kind, tuple) else methods_of(kind)  # Methods of named tuples are generated.
        if len(methods) > ENTRY_LIMIT:
            self.content[f"{path}()"] = CODE + crc_of(f"{name} {digest_of(methods[name])}" for name in methods)
            return
        for name, functions in methods.items():
            self._add_functions(f"{path}.{name}", functions)

    def _add_functions(self, path: str, functions: Sequence[types.FunctionType]) -> None:
        self.content[f"{path}()"] = digest_of(functions)
        for function in functions:
            for name, item in values_held_by(function).items():
                self.add(f"{path}.{name}", item, is_content=True)

    def _add(self, path: str, value: Any, is_content: bool) -> None:
        if value is None or f"{type(value).__module__}.".startswith(_TRANSIENT):
            return
        is_one_text = is_content or path.count(".") > _DEPTH_LIMIT
        if isinstance(function := _unwrapped(value), types.FunctionType):
            (self.content if is_content else self.identity)[path] = printable(written_name(function))
            if not is_foreign(function.__module__) and self._is_identity is None:
                self._add_functions(path, [function])
        elif isinstance(value, _NAMED) and (name := _name_in_c(value)):
            # As a function: its name, and for a method, what it belongs to.
            (self.content if is_content else self.identity)[path] = printable(name)
            if self._is_identity is not None and self._declares(held := getattr(value, "__self__", None)):
                self._add(path, held, is_content)
            elif not isinstance(getattr(value, "__self__", None), types.ModuleType | None):
                self.content[f"{path}()"] = text_of(value)
        elif not is_content and _is_complex_enum(value):
            self.identity[path] = printable(_head(value))
            self.add_code(path, type(value))
            self._add(f"{path}.value", value._value_, is_content)
        elif self._declares(value) and not is_one_text and len(_attributes(value)) <= ENTRY_LIMIT:
            self.add_object(path, value, _head(value))
        else:
            writer = _Writer(is_complete=self.is_complete)
            text = _shortened(writer.text(value), value)
            is_identity = not is_content and (writer.is_plain or self.is_complete)
            (self.identity if is_identity else self.content)[path] = text
            self.add_code(path, type(value))

    def _declares(self, value: object) -> bool:
        is_declared = self._is_identity is not None and self._is_identity(type(value))
        return declares_attributes(value) or (is_declared and not callable(getattr(value, "fingerprint", None)))


def _name_in_c(value: Any) -> str:
    if not hasattr(value, "__qualname__"):  # A ufunc, of NumPy 2.0 or of another library.
        name = value.__name__
        return f"numpy.{name}" if vars(np).get(name) is value else ""
    module = "" if isinstance(value, types.MethodType) else getattr(value, "__module__", None)
    return f"{module}.{value.__qualname__}" if module else written_name(value)


def text_of(value: object) -> str:
    return _shortened(_Writer().text(value), value)


def identity_of(value: object) -> str:
    found = Description()
    found.add("", value)
    first, *details = [found.identity.pop("", ""), *(f"{path[1:]}: {text}" for path, text in found.identity.items())]
    return f"{first}({', '.join(details)})" if details else first


def printable(text: str) -> str:
    return re.sub("[^ -~]", lambda match: match[0].encode("unicode_escape").decode(), text)


def declared_fingerprint(value: object) -> str | None:
    method = None if isinstance(value, type) else getattr(value, "fingerprint", None)
    if not callable(method):
        return None
    text = method()
    if not isinstance(text, str):
        raise TypeError(f"{type(value).__name__}.fingerprint() must return a str, got {type(text).__name__}.")
    return printable(text)


class _Writer:
    """Writes a value as text. It is plain until a part of the value was content."""

    def __init__(self, *, is_complete: bool = False) -> None:
        self.is_plain = True
        self._is_complete = is_complete
        self._limit: float = math.inf if is_complete else VALUE_LIMIT
        self._budget = 3 * self._limit
        self._byte_budget: float = math.inf if is_complete else SAMPLE_BYTES
        self._depth = 0

    def text(self, value: Any) -> str:
        """Returns the text of a value; that of a large one is a CRC."""
        self._budget -= 1
        if self._budget < 0 or self._depth > _DEPTH_LIMIT:
            return self._as_content("...")
        self._depth += 1
        try:
            text = self._text(value)
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            return self._as_content(_unreadable(value))
        finally:
            self._depth -= 1
        return text if len(text) <= _LONG_TEXT else f"{_head(value)} {crc_of([text])}"

    def _as_content(self, text: str) -> str:
        self.is_plain = False
        return text

    def _text(self, value: Any) -> str:
        kind = type(value)
        for kinds, write in _LEAVES:
            if issubclass(kind, kinds) and not _is_complex_enum(value):
                return write(value)
        is_array = all(hasattr(kind, name) for name in ("__array__", "dtype", "shape"))
        if is_array or issubclass(kind, _SERIES):
            return self._array(value) if is_array else self._series(value)
        if (declared := declared_fingerprint(value)) is not None:
            return f"{written_name(kind)}({declared})"
        if issubclass(kind, list | tuple | dict | set | frozenset):
            texts = self._ordered(value) if issubclass(kind, list | tuple) else self._unordered(value)
            opening, closing = _BRACKETS.get(kind, (f"{_head(value)}[", "]"))
            return f"{opening}{', '.join(texts)}{closing}"
        if isinstance(value, os.PathLike):
            return self._as_content(os.fspath(value))
        self.is_plain &= declares_attributes(value) or isinstance(value, enum.Enum)
        held = values_held_by(_unwrapped(value)) if isinstance(_unwrapped(value), types.FunctionType) else None
        return f"{_head(value)}{self.text(_state(value) if held is None else held)}"

    def _ordered(self, value: Sequence[Any]) -> list[str]:
        if len(value) > VALUE_LIMIT and self._is_complete and set(map(type, value)) in _NUMBERS:
            return [self._array(np.array(value))]
        step = 1 if self._is_complete else 1 + len(value) // VALUE_LIMIT
        self.is_plain &= step == 1
        return [self.text(value[row]) for row in range(0, len(value), step)]

    def _unordered(self, value: Any) -> list[str]:
        # The order differs by process: what is too large to be read completely is described by its size.
        items = value.items() if isinstance(value, dict) else ((item,) for item in value)
        texts = [": ".join(map(self.text, item)) for item in items] if len(value) <= self._limit else []
        return sorted(texts) if len(texts) == len(value) and self._budget >= 0 else [self._as_content(f"{len(value)}")]

    def _series(self, value: Any) -> str:
        count, size = len(value), getattr(value, "itemsize", 1)
        is_text = isinstance(value, _TEXTS)
        is_complete = (is_text and count <= _MIN_RUN_BYTES) or self._spend(count * size)
        self.is_plain &= is_text and is_complete
        if is_text and is_complete and count <= _LONG_TEXT:
            return ascii(value)
        runs = [value] if is_complete else (value[start:stop] for start, stop in self._runs(count, size))
        return f"{type(value).__name__} of {count} {crc_of(runs)}"

    def _array(self, value: Any) -> str:
        shape = tuple(value.shape)
        count, size = math.prod(shape), getattr(value.dtype, "itemsize", 8)
        self.is_plain &= self._is_complete or count * size <= ARRAY_LIMIT
        if self._spend(count * size):
            runs = [np.asarray(value)]
        else:
            self.is_plain = False
            value = _as_stored(np.asarray(value)) if is_foreign(type(value).__module__) else value
            runs = [np.asarray(value[_box(*run, value.shape)]) for run in self._runs(count, size)]
        dtype = runs[0].dtype
        head = f"{dtype} array {shape}"
        if dtype.kind not in "biufcSUmM" or dtype.char in "gG":
            # The bytes are addresses, or have padding that is arbitrary.
            shown = min(-(-_LONG_TEXT // len(runs)), 1 + SAMPLE_BYTES // size)
            shown = count if self._is_complete else shown
            return f"{head} {self.text([item for run in runs for item in run.flat[:shown].tolist()])}"
        if 0 < count <= 8 and dtype.kind in "biufc":
            return f"{dtype}{runs[0].tolist() if shape else f'({runs[0]})'}"
        return f"{head} {crc_of(map(_bytes_of, runs))}"

    def _spend(self, num_bytes: int) -> bool:
        """Returns True if so many bytes may be read."""
        is_affordable = num_bytes <= self._byte_budget
        self._byte_budget -= num_bytes if is_affordable else 0
        return is_affordable

    def _runs(self, count: int, size: int) -> list[tuple[int, int]]:
        """Returns the beginnings and ends of the runs to read of a value, spread over all of it."""
        num_bytes = max(_MIN_RUN_BYTES, int(self._byte_budget) // 2)
        self._byte_budget -= num_bytes
        num_runs = min(SAMPLE_RUNS, max(4, num_bytes // 4096))
        length = min(count, max(1, num_bytes // num_runs // max(1, size)))
        return [
            (start, start + length) for start in ((count - length) * run // (num_runs - 1) for run in range(num_runs))
        ]


def _as_stored(values: Any) -> Any:
    """Returns an array with its axes in the order in which they lie in memory, so that runs are contiguous."""
    return values.transpose(sorted(range(values.ndim), key=lambda axis: -abs(values.strides[axis])))


def _box(start: int, stop: int, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Returns an index for a part of about stop - start values of an array, which are contiguous in C order.

    The arrays of other libraries, such as those in files, can be indexed alike.
    """
    axis, below = len(shape) - 1, 1
    while axis > 0 and below * shape[axis] <= stop - start:
        below *= shape[axis]
        axis -= 1
    rows = max(1, (stop - start) // below)
    *above, row = np.unravel_index(start // below, shape[: axis + 1])
    first = max(0, min(int(row), shape[axis] - rows))
    return (*map(int, above), slice(first, first + rows))


def _bytes_of(values: Any) -> Any:
    # Without a copy of a large one.
    is_flat = values.nbytes > SAMPLE_BYTES and values.flags.c_contiguous
    return values.reshape(-1).view(np.uint8).data if is_flat else values.tobytes()


def _int_text(value: int) -> str:
    # Decimal digits of a large number take quadratic time, and Python refuses to write more than some thousands.
    return f"int {crc_of([hex(value)])}" if value.bit_length() > 256 else str(int(value))


_LEAVES: tuple[tuple[Any, Callable[[Any], str]], ...] = (
    (enum.Enum, lambda value: f"{written_name(type(value))}.{value.name}({value._value_!r})"),
    (np.generic, lambda value: f"{value.dtype}({value!s})"),
    ((bool, types.NoneType, types.EllipsisType, types.NotImplementedType, range, slice), repr),
    (int, _int_text),
    (numbers.Number, repr),
    (re.Pattern, lambda value: f"re.compile({value.pattern!r}, {value.flags})"),
    (np.dtype, lambda value: f"dtype({value.descr if value.names else str(value)!r})"),
    (type, written_name),
    (types.ModuleType, lambda value: f"module {value.__name__}"),
)
"""The functions that write values without parts, by class. The first class that fits counts."""


def _state(value: Any) -> Any:
    """Returns the state of an object: its attributes if it declares them, else the state that pickling would send."""
    if isinstance(value, enum.Enum):
        return (value._value_,)
    if declares_attributes(value):
        return _attributes(value)
    reduce = copyreg.dispatch_table.get(type(value))
    reduced = value.__reduce_ex__(2) if reduce is None else reduce(value)
    if isinstance(reduced, str):  # The name of a global.
        return reduced
    _, arguments, state, items, pairs = (*reduced, None, None, None)[:5]
    return [item for item in (arguments, state, list(items or ()), dict(pairs or ())) if item]


def _attributes(value: Any, *, with_constants: bool = True) -> dict[str, object]:
    """Returns the attributes that pickling would send, and the constants of the class, by name."""
    kind = type(value)
    if isinstance(value, functools.partial):
        return {"func": value.func, **{f"args[{row}]": item for row, item in enumerate(value.args)}, **value.keywords}
    state = value.__getstate__()
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):  # Attributes, and slots.
        state = {**(state[0] or {}), **state[1]}
    if dataclasses.is_dataclass(value) and isinstance(state, list):  # Of dataclass(slots=True).
        state = {field.name: item for field, item in zip(dataclasses.fields(value), state, strict=True)}
    classes = [base for base in reversed(kind.__mro__) if not is_foreign(base.__module__)]
    members = {name: member for base in classes for name, member in vars(base).items()}
    held = {name: member for name, member in members.items() if with_constants and isinstance(member, _CONSTANTS)}
    held |= state if isinstance(state, Mapping) else {"state": state}
    cached = {name for name, member in members.items() if isinstance(member, functools.cached_property)}
    named = {str(name): item for name, item in held.items() if item is not None and name not in cached}
    return {name: named[name] for name in sorted(named) if not name.endswith("__")}


def declares_attributes(value: object) -> bool:
    """Returns True if the attributes of an object are its parameters, and it has no `fingerprint()`."""
    is_own = type(value).__module__.startswith("millstream.")
    is_record = dataclasses.is_dataclass(value) and not isinstance(value, type)
    is_declared = (
        is_own
        or is_record
        or isinstance(value, Transformation | DatasetSelectionMap | types.SimpleNamespace | functools.partial)
    )
    return is_declared and not callable(getattr(value, "fingerprint", None))


def _is_complex_enum(value: object) -> bool:
    """Returns True for an enum if the `repr` of its value has an address, or a set, whose order differs by process."""
    if not isinstance(value, enum.Enum) or isinstance(value._value_, str | bytes):
        return False
    return re.search(r" at 0x|\{", repr(value._value_)) is not None


def _unwrapped(value: Any) -> Any:
    """Returns the function inside a decorated one; anything else unchanged."""
    inner = None if isinstance(value, type) else getattr(value, "__dict__", {}).get("__wrapped__")
    return value if inner is None else inner


def _head(value: Any) -> str:
    """Returns the name of a value, whose parts follow."""
    if isinstance(value, list | tuple | dict | set | frozenset):
        return f"{written_name(type(value))} of {len(value)}"
    if isinstance(value, enum.Enum):
        return f"{written_name(type(value))}.{value.name}"
    return written_name(value if hasattr(value, "__qualname__") else type(value))


def _shortened(text: str, value: object) -> str:
    return printable(text if len(text) <= TEXT_LIMIT else f"{_head(value)} {crc_of([text])}")


def _unreadable(value: object) -> str:
    return f"<unreadable {written_name(type(value))}>"
