"""The description of a value in two tiers, by paths such as `operations[0].size`.

*Identity*: plain values (numbers, texts, enums, None), small arrays, and lists, tuples, sets, dicts and dataclasses of
them; classes; whatever an object's `fingerprint()` returns. A difference is another stream.

*Content*: code, closures and defaults, large arrays and containers, and all other objects, by the state that pickling
would send. A difference may well be the same stream: a tokenizer changes itself when it is called.

Descriptions are equal in every process: they contain no addresses, hashes or folders of code. The work is bounded:
what is large counts by its size and an even sample. Random generators, locks, open files, results of
`functools.cached_property` and attributes that are None do not count.
"""

import collections
import dataclasses
import enum
import functools
import os
import re
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from millstream.loader.checkpoints.code_marks import (
    closure,
    closures_of_methods,
    code_mark,
    crc_of,
    defaults,
    is_foreign,
    marks_of_methods,
    written_name,
)
from millstream.signal_exceptions import is_from_signal_handler
from millstream.transforms.transformation import Transformation

TEXT_LIMIT = 80
"""The maximum number of characters of a text; a longer value is described by its parts, or by a CRC."""
ENTRY_LIMIT = 32
"""The maximum number of texts that describe a value and its parts."""
PLAIN_LIMIT = 10_000
"""Containers of more values, all levels together, are content."""
ARRAY_LIMIT = 1 << 16
"""Arrays of more bytes are content."""
_SHOWN_DEPTH = 8
_NODE_LIMIT, _DEPTH_LIMIT, _SAMPLE, _BLOCKS, _BYTE_LIMIT = 50_000, 32, 4096, 64, 1 << 20
_PLAIN = (bool, float, complex, types.NoneType, types.EllipsisType, types.NotImplementedType, slice, range)
_CONSTANTS = (*_PLAIN, int, str, bytes, tuple, frozenset, list, dict, set, np.ndarray, np.generic, enum.Enum)
_SELF_DESCRIBING = ("datetime", "decimal", "fractions", "operator", "re", "uuid")
"""Modules of Python whose objects have no attributes, but show what they are."""
_FLEETING = ("_io", "_thread", "io", "random", "threading", "numpy.random")


class Description:
    """A description of several values.

    Attributes:
        identity: texts that decide the stream, by path.
        content: marks of what may decide the stream, by path.
    """

    def __init__(self) -> None:
        self.identity: dict[str, str] = {}
        self.content: dict[str, str] = {}

    def add(self, path: str, value: object, *, is_content: bool = False) -> None:
        """Adds a value and its parts. Never raises, and calls only `__getstate__` and `fingerprint` of the user's.

        Args:
            path: how to reach the value.
            value: the value.
            is_content: whether all of it is content.
        """
        limit = len(self.identity) + len(self.content) + ENTRY_LIMIT
        try:
            self._add(path, value, limit, is_content=is_content)
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            # A class may fail at any access.
            self.content[path] = f"<unreadable {written_name(type(value))}>"

    def add_object(self, path: str, value: object, head: str, *, is_content: bool = False) -> None:
        """Adds an object by its attributes, the constants of its class, and marks of its methods.

        Args:
            path: how to reach the object.
            value: the object.
            head: what it is: its class, say. This is identity.
            is_content: whether the attributes are content.
        """
        self.identity[path] = printable(head)
        self.add_code(path, type(value))
        for name, item in _attributes(value).items():
            self.add(f"{path}.{name}", item, is_content=is_content)

    def _add(self, path: str, value: object, limit: int, *, is_content: bool) -> None:
        if value is None or _is_fleeting(type(value)):
            return
        inner = _unwrapped(value)
        if isinstance(inner, types.FunctionType):
            (self.content if is_content else self.identity)[path] = printable(written_name(inner))
            if not is_foreign(inner.__module__):
                self.content[f"{path}()"] = code_mark(inner)
            for name, item in (defaults(inner) | closure(inner)).items():
                self.add(f"{path}.{name}", item, is_content=True)
            return
        walk = _Walk()
        text = walk.text(value)
        tier = self.identity if walk.is_plain and not is_content else self.content
        parts = _parts(value) if path.count(".") + path.count("[") <= _SHOWN_DEPTH else None
        left = limit - len(self.identity) - len(self.content)
        if (walk.is_plain and len(text) <= TEXT_LIMIT) or parts is None or len(parts) >= left:
            tier[path] = _shortened(text, _head(value))
        else:
            (self.content if is_content else self.identity)[path] = printable(_head(value))
            for label, item in parts:
                self._add(path + label, item, limit, is_content=is_content)
        self.add_code(path, type(value))

    def add_code(self, path: str, kind: type) -> None:
        """Adds marks of the methods of a class, and what they have of the functions around it."""
        if issubclass(kind, tuple):  # The methods of named tuples are Python's.
            return
        marks = marks_of_methods(kind)
        if len(marks) > ENTRY_LIMIT:
            marks = {"()": "code " + crc_of(map("".join, marks.items()))}
        self.content |= {f"{path}{'.' * (name != '()')}{name}": mark for name, mark in marks.items()}
        for name, item in closures_of_methods(kind).items():
            self.add(f"{path}.{name}", item, is_content=True)


def text_of(value: object) -> str:
    """Returns a value as one short text, both tiers together."""
    return _shortened(_Walk().text(value), _head(value))


def identity_of(value: object) -> str:
    """Returns the identity of a value as one text."""
    found = Description()
    found.add("", value)
    whole, *parts = [found.identity.pop("", ""), *(f"{path[1:]}: {text}" for path, text in found.identity.items())]
    return f"{whole}({', '.join(parts)})" if parts else whole


def printable(text: str) -> str:
    """Returns a text in printable ASCII."""
    return re.sub("[^ -~]", lambda match: match[0].encode("unicode_escape").decode(), text)


def spread(count: int, limit: int) -> Sequence[int]:
    """Returns at most `limit` indices below `count`, the first and the last among them, evenly spread."""
    if count <= limit:
        return range(count)
    return [number * (count - 1) // (limit - 1) for number in range(limit)]


def own_fingerprint(value: object) -> str | None:
    """Returns what an object's `fingerprint()` says; None if its class has none.

    Raises:
        TypeError: it is not a string.
    """
    own = None if isinstance(value, type) else getattr(value, "fingerprint", None)
    if not callable(own):
        return None
    text = own()
    if not isinstance(text, str):
        raise TypeError(f"{type(value).__name__}.fingerprint() must return a str, got {type(text).__name__}.")
    return printable(text)


class _Walk:
    """A walk through a value.

    Attributes:
        is_plain: False once anything was found that is content.
    """

    def __init__(self) -> None:
        self.is_plain = True
        self._left = _NODE_LIMIT
        self._path: set[int] = set()

    def text(self, value: object) -> str:
        """Returns a value as text; that of a large part is a CRC."""
        self._left -= 1
        if id(value) in self._path or len(self._path) >= _DEPTH_LIMIT or self._left <= 0:
            return self._as_content("...")
        if self._left < _NODE_LIMIT - PLAIN_LIMIT:
            self.is_plain = False
        self._path.add(id(value))
        try:
            text = self._text(value)
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            return self._as_content(f"<unreadable {written_name(type(value))}>")
        finally:
            self._path.discard(id(value))
        return text if len(text) <= _SAMPLE else f"{_head(value)} {crc_of([text])}"

    def _as_content(self, text: str) -> str:
        self.is_plain = False
        return text

    def _text(self, value: Any) -> str:
        kind = type(value)
        for kinds, text in _LEAVES:
            if issubclass(kind, kinds):
                return text(value)
        if kind.__module__ in _SELF_DESCRIBING:
            return repr(value)
        if isinstance(value, os.PathLike):
            return self._as_content(f"Path({os.fspath(value)!r})")
        if all(hasattr(kind, name) for name in ("__array__", "dtype", "shape")):
            return self._array(value)
        if (own := own_fingerprint(value)) is not None:
            return f"{written_name(kind)}({own})"
        is_container = issubclass(kind, list | tuple | set | frozenset | dict | collections.deque)
        return self._container(value) if is_container else self._object(value)

    def _container(self, value: Any) -> str:
        count = len(value)
        if count > PLAIN_LIMIT:
            self.is_plain = False
        head = f"{written_name(type(value))} of {count}"
        if isinstance(value, dict):
            if count <= PLAIN_LIMIT:
                texts = sorted(f"{self.text(key)}: {self.text(item)}" for key, item in value.items())
                return f"{_named(value)}{{{', '.join(texts)}}}"
            keys = list(value)
            texts = [f"{self.text(keys[row])}: {self.text(value[keys[row]])}" for row in spread(count, _SAMPLE)]
        elif isinstance(value, set | frozenset):
            if count > PLAIN_LIMIT:  # Sets are in another order in each process, so that a sample would be another one.
                return head
            return f"{type(value).__name__}{{{', '.join(sorted(map(self.text, value)))}}}"
        elif isinstance(value, tuple) and hasattr(value, "_fields"):
            texts = [f"{name}={self.text(item)}" for name, item in zip(value._fields, value, strict=True)]
            return f"{_head(value)}({', '.join(texts)})"
        else:
            texts = [self.text(value[row]) for row in spread(count, _SAMPLE if count > PLAIN_LIMIT else count)]
            if count <= PLAIN_LIMIT:
                opened, closed = "()" if isinstance(value, tuple) else "[]"
                return f"{_named(value)}{opened}{', '.join(texts)}{',' * (opened == '(' and count == 1)}{closed}"
        return f"{head} {crc_of(texts)}"

    def _array(self, value: Any) -> str:
        try:
            array = np.asarray(value)  # Only what the array holds counts, not what a subclass makes of it.
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            # Some arrays of other libraries have a shape only, such as JAX's keys.
            return self._as_content(f"{value.dtype} {written_name(type(value))} {tuple(value.shape)}")
        head = f"{array.dtype if array.dtype.names is None else 'struct'} array {array.shape}"
        if array.dtype.names is not None:  # Their bytes hold padding, which is arbitrary.
            return f"{head}({', '.join(f'{name!r}={self.text(array[name])}' for name in array.dtype.names)})"
        if array.dtype.hasobject or array.dtype.char in "gG":  # Their bytes are addresses, or hold padding.
            if array.size > _SAMPLE:
                self.is_plain = False
            return f"{head} {crc_of(self.text(array.flat[index]) for index in spread(array.size, _SAMPLE))}"
        if 0 < array.size <= 8 and array.dtype.kind in "biufc":
            return f"{array.dtype}{array.tolist() if array.ndim else f'({array})'}"
        if array.nbytes > ARRAY_LIMIT:
            self.is_plain = False
        if array.nbytes <= _BYTE_LIMIT:
            return f"{head} {crc_of([array.tobytes()])}"
        block = max(1, _BYTE_LIMIT // _BLOCKS // array.itemsize)
        starts = spread(array.size - block + 1, _BLOCKS)
        return f"{head} {crc_of(array.flat[start : start + block].tobytes() for start in starts)}"

    def _object(self, value: Any) -> str:
        kind, inner = type(value), _unwrapped(value)
        if _is_fleeting(kind):
            return self._as_content(written_name(kind))
        if isinstance(inner, types.FunctionType | types.BuiltinFunctionType | np.ufunc):
            held = (defaults(inner) | closure(inner)) if isinstance(inner, types.FunctionType) else {}
            owner = getattr(inner, "__self__", None)
            held |= {} if owner is None or isinstance(owner, types.ModuleType) else {"self": owner}
            self.is_plain = False
            head = getattr(inner, "__qualname__", inner.__name__)
        elif isinstance(value, types.MethodType):
            head, held = written_name(value), {"self": value.__self__}
            self.is_plain = False
        else:
            head, held = written_name(kind), _attributes(value)
            if not _is_container_like(value):
                self.is_plain = False
        texts = [f"{name}={self.text(item)}" for name, item in sorted(held.items()) if item is not None]
        return f"{head.rpartition('<locals>.')[2]}({', '.join(text for text in texts if '<unreadable' not in text)})"


def _int_text(value: int) -> str:
    # Decimal digits of a large number take quadratic time, and Python refuses to make too many.
    return f"int {crc_of([hex(value)])}" if value.bit_length() > 256 else str(int(value))


def _characters_text(value: "str | bytes | bytearray") -> str:
    is_long = len(value) > _SAMPLE
    return f"{type(value).__name__} of {len(value)} {crc_of([value])}" if is_long else ascii(value)


_LEAVES: tuple[tuple[Any, Callable[[Any], str]], ...] = (
    (enum.Enum, lambda value: f"{written_name(type(value))}.{value.name}({value._value_!r})"),
    (_PLAIN, repr),
    (np.generic, lambda value: f"{value.dtype}({value!s})"),
    (int, _int_text),
    ((str, bytes, bytearray), _characters_text),
    (np.dtype, lambda value: f"dtype({value.descr if value.names else str(value)!r})"),
    (type, written_name),
    (types.ModuleType, lambda value: f"module {value.__name__}"),
)
"""How values that have no parts are described, by their classes; the first that fits counts."""


def _attributes(value: Any) -> dict[str, object]:
    """Returns the attributes that pickling would send, and the constants of the class, by name."""
    kind = type(value)
    if isinstance(value, functools.partial):
        return {"func": value.func, **{f"args[{row}]": item for row, item in enumerate(value.args)}, **value.keywords}
    state = value.__getstate__()
    if isinstance(state, tuple) and len(state) == 2 and isinstance(state[1], dict):  # Attributes, and slots.
        state = {**(state[0] or {}), **state[1]}
    if dataclasses.is_dataclass(value) and isinstance(state, list):  # Of dataclass(slots=True).
        state = {field.name: item for field, item in zip(dataclasses.fields(value), state, strict=True)}
    if not isinstance(state, Mapping):
        state = {} if state is None else {"state": state}
    members = [item for base in kind.__mro__ for item in vars(base).items()]
    cached = {name for name, member in members if isinstance(member, functools.cached_property)}
    held = {str(name): item for name, item in state.items() if str(name) not in cached and not str(name).endswith("__")}
    return dict(sorted((_constants(kind) | held).items()))


def _constants(kind: type) -> dict[str, object]:
    """Returns the constants in the bodies of a user's class and its bases, which are parameters, too."""
    return {
        name: member
        for base in reversed(kind.__mro__)
        if not is_foreign(base.__module__)
        for name, member in vars(base).items()
        if isinstance(member, _CONSTANTS) and not name.endswith("__") and not isinstance(kind, enum.EnumType)
    }


def _is_fleeting(kind: type) -> bool:
    """Returns whether objects of a class come and go, or move on with every use, as generators do."""
    return any(kind.__module__ == name or kind.__module__.startswith(f"{name}.") for name in _FLEETING)


def _is_container_like(value: object) -> bool:
    """Returns whether an object is described by its attributes, one by one."""
    is_value = dataclasses.is_dataclass(value) and not isinstance(value, type)
    # The library's own objects are parameters of its operations: the layout of a packer's rows, say.
    is_own = type(value).__module__.startswith("millstream.")
    return is_value or is_own or isinstance(value, Transformation | types.SimpleNamespace | functools.partial)


def _parts(value: Any) -> list[tuple[str, object]] | None:
    """Returns the parts of a value with their labels; None if they are not described one by one."""
    if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
        return [(f"[{row}]", item) for row, item in enumerate(value[:ENTRY_LIMIT])] if value else None
    if isinstance(value, dict):
        if len(value) > ENTRY_LIMIT or not {str, int} >= set(map(type, value)):
            return None
        return [(f"[{key!r}]", value[key]) for key in sorted(value, key=str)]
    if hasattr(value, "_fields"):
        return [(f".{name}", item) for name, item in zip(value._fields, value, strict=True)]
    if _is_container_like(value) and own_fingerprint(value) is None:
        return [(f".{name}", item) for name, item in _attributes(value).items()]
    return None


def _unwrapped(value: Any) -> Any:
    """Returns the function that a decorated one wraps; what is not one is returned as it is."""
    if callable(value) and not isinstance(value, type):
        inner = getattr(value, "__dict__", {}).get("__wrapped__")
        return value if inner is None else inner
    return value


def _head(value: object) -> str:
    """Returns what to call a value whose parts are described one by one."""
    kind = type(value)
    return written_name(kind) + (f" of {len(value)}" if kind in (list, dict, tuple) else "")  # type: ignore[arg-type]


def _named(value: object) -> str:
    """Returns the name of a class derived from a container, which literals do not show."""
    return "" if type(value) in (list, tuple, dict) else written_name(type(value))


def _shortened(text: str, head: str) -> str:
    return printable(text if len(text) <= TEXT_LIMIT else f"{head} {crc_of([text])}")
