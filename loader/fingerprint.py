"""Descriptions in words of what a user gave us, by which a checkpoint recognises the pipeline that it belongs to.

A description is the same in every process and on every host: it holds no addresses, no hashes of this process and no
directories of code. What a person can read comes first (`Scale(factor=2)`); code, arrays and long contents follow as
CRCs. Code is seen through its bytecode, so another minor version of Python describes the same function differently.

The work is bounded, whatever the value: cycles are cut, and of long containers and large arrays an even sample is read.
Nothing of the user's is called, except a source's `fingerprint()` and `len()`. What a function reads from the module
around it is not looked at.
"""

import contextlib
import copyreg
import enum
import functools
import inspect
import itertools
import math
import os
import re
import types
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

TEXT_LIMIT = 160
"""The most characters of a description; a longer one ends in the CRC of its whole text."""
SHOWN_LIMIT = 8
"""Containers with more items than this are shown as a count and a CRC."""
ITEM_LIMIT = 1024
"""Containers with more items than this are sampled."""
NODE_LIMIT = 100_000
"""The most values that one description looks at, all levels together: some tenths of a second."""
DEPTH_LIMIT = 12
SAMPLE_BYTES = 1 << 20
"""Of arrays, bytes and strings larger than this, as many bytes are read, in blocks spread evenly."""
SAMPLE_BLOCKS = 64
SOURCE_RECORDS = 16
"""How many records of a plain sequence are looked at."""

# A class's code counts, except for what Python, millstream and arrays bring: their updates leave the stream as it is.
_FOREIGN_MODULES = (
    *("abc", "builtins", "collections", "dataclasses", "enum", "functools", "random", "typing"),
    *("jax", "jaxlib", "millstream", "numpy"),
)
_PLAIN_TYPES = (bool, int, float, complex, str, np.generic)
_CONSTANT_TYPES = (bool, int, float, complex, str, bytes, list, tuple, dict, np.ndarray)
_CACHE_TYPES = (dict, list, set)
_BUILTIN_FUNCTIONS = (
    types.BuiltinFunctionType,
    types.ClassMethodDescriptorType,
    types.MethodDescriptorType,
    types.MethodWrapperType,
    types.WrapperDescriptorType,
)
# How the contents of an instance of a subclass are reached without calling what the subclass overrides.
_BUILTIN_BASES: tuple[tuple[type, Callable[[Any], object]], ...] = (
    (int, int.__index__),
    (float, float.__float__),
    (complex, complex.__complex__),
    (str, str.__str__),
    (bytes, bytes.__bytes__),
    (list, list.copy),
    (tuple, lambda value: tuple.__getitem__(value, slice(None))),
    (dict, lambda value: list(itertools.islice(dict.items(value), ITEM_LIMIT))),
    (set, lambda value: set(set.__iter__(value))),
    (frozenset, lambda value: frozenset(frozenset.__iter__(value))),
)
# Before Python 3.14 the first constant of every `def` is its docstring or None; later a flag says so.
_DOCSTRING_FLAG: int = getattr(inspect, "CO_HAS_DOCSTRING", inspect.CO_OPTIMIZED)


def describe(value: object) -> str:
    """Returns `value` in words: printable ASCII, at most TEXT_LIMIT characters, equal for values built alike.

    Shown are plain values, the contents of containers and arrays, the attributes of objects, and the defaults and the
    closure of functions. After `#` stands a CRC: of a function's code, of the methods of an object's class, or of
    contents too long to show. Attributes that start with an underscore count only if they are numbers or strings;
    others are taken for caches. Never raises.
    """
    return _clipped(_Describer().words(value))


def describe_source(source: Any) -> str:
    """Returns a source in words, as `describe` does: what its `fingerprint()` says, or its length and what it is.

    Records are read, SOURCE_RECORDS of them, only where they lie in memory: in a list, tuple, range or array.

    Raises:
        TypeError: `fingerprint()` returned something else than a string.
    """
    own = getattr(source, "fingerprint", None)
    if callable(own):
        text = own()
        if not isinstance(text, str):
            raise TypeError(f"{type(source).__name__}.fingerprint() must return a str, got {type(text).__name__}.")
        return _clipped(text)
    if type(source) in (list, tuple, range, np.ndarray):
        what = f"{source.dtype} array {source.shape}" if isinstance(source, np.ndarray) else type(source).__name__
        records = [_Describer().words(source[key]) for key in _spread(len(source), SOURCE_RECORDS)]
        return _clipped(f"{len(source)} records of {what}{_mark(records)}")
    return _clipped(f"{len(source)} records of {_Describer().words(source)}")


def describe_keys(keys: Sequence[int] | np.ndarray[Any, np.dtype[Any]]) -> str:
    """Returns record keys in words: how many, and a CRC over all of them, some seconds' work for a billion."""
    array = np.asarray(keys, dtype="<i8")
    starts = range(0, len(array), SAMPLE_BYTES)
    return f"{len(array)} keys{_mark(array[start : start + SAMPLE_BYTES].tobytes() for start in starts)}"


class _Describer:
    """One walk through a value: what is left of the budget, and which values enclose the present one.

    Attributes:
        left: how many values may still be looked at.
        path: the identities of the enclosing values.
        marks: the marks of the classes and the code seen so far.
        with_classes: whether objects get the mark of their class; not within a class's mark, which thus ends.
    """

    def __init__(self, with_classes: bool = True) -> None:
        self.left = NODE_LIMIT
        self.path: set[int] = set()
        self.marks: dict[object, str] = {}
        self.with_classes = with_classes

    def words(self, value: object) -> str:
        """Returns the whole text of `value`."""
        if id(value) in self.path:
            return "<cycle>"
        if self.left <= 0 or len(self.path) >= DEPTH_LIMIT:
            return "..."
        self.left -= 1
        self.path.add(id(value))
        try:
            return self._rule(value)(self, value)
        except Exception:  # noqa: BLE001  (a value whose class fails when looked at has a description all the same)
            return f"<unreadable {type.__getattribute__(type(value), '__name__')}>"
        finally:
            self.path.discard(id(value))

    def _rule(self, value: object) -> "Callable[[_Describer, Any], str]":
        """Returns the method that describes values of this type; `type`, because `__class__` may be the user's."""
        kind = type(value)
        if kind in self._EXACT:
            return self._EXACT[kind]
        for kinds, rule in self._RULES:
            if issubclass(kind, kinds):
                return rule
        is_array = all(hasattr(kind, name) for name in ("__array__", "dtype", "shape"))
        return _Describer._array_like if is_array else _Describer._object

    def _repr(self, value: object) -> str:
        return repr(value)

    def _int(self, value: int) -> str:
        if value.bit_length() <= 256:
            return repr(value)
        # Decimal digits of a large number take quadratic time, and Python refuses to make too many.
        low = (abs(value) & ((1 << 4096) - 1)).to_bytes(512, "little")
        high = (abs(value) >> max(0, value.bit_length() - 4096)).to_bytes(512, "little")
        return f"int({value < 0}, {value.bit_length()} bits){_mark([low, high])}"

    def _str(self, value: str) -> str:
        if len(value) <= 64:
            return ascii(value)
        return f"str({len(value)}){_mark(value[block] for block in _blocks(len(value), 1))}"

    def _bytes(self, value: bytes | bytearray) -> str:
        if len(value) <= 32:
            return repr(value)
        return f"{type(value).__name__}({len(value)}){_mark(bytes(value[block]) for block in _blocks(len(value), 1))}"

    def _sequence(self, value: list[object] | tuple[object, ...]) -> str:
        texts = [self.words(value[index]) for index in _spread(len(value), ITEM_LIMIT)]
        return _contents("[]" if type(value) is list else "()", texts, len(value))

    def _dict(self, value: dict[object, object]) -> str:
        step = -(-len(value) // ITEM_LIMIT) or 1
        items = itertools.islice(value.items(), 0, None, step)
        # Equal dicts may differ in the order of their items.
        texts = sorted(f"{self.words(key)}: {self.words(item)}" for key, item in items)
        return _contents("{}", texts, len(value))

    def _set(self, value: set[object] | frozenset[object]) -> str:
        # Sets are in another order in each process. Equal shares of the budget keep that out of the text, also where
        # the budget ends; a share below a few values would say nothing, so of a very large set only the size counts.
        share = self.left // (len(value) or 1)
        if share < 4:
            return f"{type(value).__name__}({len(value)} items)"
        before, used, texts = self.left, 0, []
        for item in value:
            self.left = share
            texts.append(self.words(item))
            used += share - self.left
        self.left = before - used
        return type(value).__name__ + _contents("{}", sorted(texts), len(value))

    def _enum(self, value: enum.Enum) -> str:
        return f"{type(value).__qualname__}.{value._name_}({self.words(value._value_)})"

    def _dtype(self, value: np.dtype[Any]) -> str:
        return f"dtype({value.descr if value.names else str(value)!r})"

    def _scalar(self, value: np.generic) -> str:
        item = value.item()
        return f"{value.dtype}({self.words(item) if type(item) in self._EXACT else value})"

    def _array(self, value: np.ndarray[Any, np.dtype[Any]]) -> str:
        array = np.asarray(value)  # Only what the array holds counts, not what a subclass makes of it.
        head = f"{type(value).__qualname__}({array.dtype if array.dtype.names is None else 'struct'}, {array.shape}"
        if array.dtype.names is not None:  # Their bytes hold padding, which is arbitrary.
            fields = (f"{name}={self.words(array[name])}" for name in array.dtype.names)
            return f"{head}, {', '.join(fields)})"
        if array.dtype.hasobject or array.dtype.char in "gG":  # Their bytes are addresses, or hold padding.
            items = (self.words(array.flat[index]) for index in _spread(array.size, ITEM_LIMIT))
            return f"{head}){_mark(items)}"
        return f"{head}){_mark(array.flat[block].tobytes() for block in _blocks(array.size, array.itemsize))}"

    def _type(self, value: type) -> str:
        return value.__qualname__

    def _module(self, value: types.ModuleType) -> str:
        return f"<module {value.__name__}>"

    def _path(self, value: "os.PathLike[Any]") -> str:
        return f"Path({self.words(os.fspath(value))})"

    def _partial(self, value: "functools.partial[Any]") -> str:
        keywords = (f"{name}={self.words(item)}" for name, item in sorted(value.keywords.items()))
        return f"partial({', '.join([*map(self.words, (value.func, *value.args)), *keywords])})"

    def _builtin(self, value: Any) -> str:
        text = f"{getattr(value, '__module__', None) or 'builtins'}.{value.__qualname__}"
        owner = getattr(value, "__self__", None)
        return text if owner is None or isinstance(owner, types.ModuleType) else f"{text} of {self.words(owner)}"

    def _method(self, value: types.MethodType) -> str:
        return f"{self.words(value.__func__)} of {self.words(value.__self__)}"

    def _function(self, value: types.FunctionType) -> str:
        code = value.__code__
        arguments = code.co_varnames[: code.co_argcount]
        defaults = value.__defaults__ or ()
        parameters = dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
        parameters |= dict(sorted((value.__kwdefaults__ or {}).items()))
        for name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            if name != "__class__" and cell != types.CellType():  # What `super()` needs; a name not yet set.
                parameters[name] = cell.cell_contents
        texts = [
            f"{name}={self.words(item)}"
            for name, item in parameters.items()
            if not (name.startswith("_") and isinstance(item, _CACHE_TYPES))
        ]
        return f"{value.__qualname__}{self._code(code)}" + (f"({', '.join(texts)})" if texts else "")

    def _code(self, code: types.CodeType) -> str:
        """Returns the mark of what the code does, whatever its place, its comments and its docstring are."""
        if code not in self.marks:
            constants = list(code.co_consts)
            if code.co_flags & _DOCSTRING_FLAG and not code.co_name.startswith("<") and isinstance(constants[0], str):
                constants[0] = None
            inner = _Describer(with_classes=False)
            counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
            texts = map(inner.words, (counts, code.co_names, *constants))
            self.marks[code] = _mark([code.co_code, code.co_exceptiontable, *texts])
        return self.marks[code]

    def _object(self, value: object) -> str:
        kind = type(value)
        if f"{kind.__module__}.".startswith(("numpy.random.", "random.")):
            return f"{kind.__qualname__}()"  # What a generator holds moves on with every draw.
        texts = [self.words(convert(value)) for base, convert in _BUILTIN_BASES if issubclass(kind, base)]
        texts += [f"{name}={self.words(item)}" for name, item in sorted(_attributes(value).items())[:ITEM_LIMIT]]
        texts += [self.words(item) for name, item in _state(value).items() if name == "__wrapped__"]
        if not texts and not any(isinstance(member, types.FunctionType) for member in vars(kind).values()):
            texts = self._reduced(value)
        mark = self._class(kind) if self.with_classes else ""
        return f"{kind.__qualname__}({', '.join(texts)}){mark}"

    def _array_like(self, value: Any) -> str:
        """Describes an array of another library, as JAX's. A large one may be a file: only its shape counts."""
        text = f"{value.dtype}, {tuple(value.shape)}"
        with contextlib.suppress(Exception):  # Not every array can become numpy's: keys of JAX, gradients of PyTorch.
            if math.prod(value.shape) * np.dtype(value.dtype).itemsize <= SAMPLE_BYTES:
                text = self.words(np.asarray(value))
        return f"{type(value).__qualname__}({text})"

    def _reduced(self, value: object) -> list[str]:
        """Returns what an object written in C would pickle, in words: its only contents that can be reached."""
        reduce: Callable[[Any], Any] = copyreg.dispatch_table.get(type(value), lambda given: given.__reduce_ex__(4))
        try:
            reduced = reduce(value)
        except TypeError:  # Locks, files, generators: they have no contents.
            return []
        if isinstance(reduced, str):
            return [reduced]
        arguments, state, items, pairs = (*reduced[1:5], None, None, None)[:4]
        contents = [argument for argument in arguments if argument is not type(value)]
        contents += [state] if state is not None else []
        contents += [list(itertools.islice(more, ITEM_LIMIT)) for more in (items, pairs) if more is not None]
        return [self.words(content) for content in contents]

    def _class(self, kind: type) -> str:
        """Returns the mark of all functions in the bodies of the class and its bases; empty where there are none."""
        if kind not in self.marks:
            inner = _Describer(with_classes=False)
            texts = [
                f"{name}={inner.words(function)}"
                for base in kind.__mro__
                if not _is_foreign(base)
                for name, member in sorted(vars(base).items())
                for function in _functions(member)
            ]
            self.marks[kind] = _mark(texts) if texts else ""
        return self.marks[kind]

    _EXACT: ClassVar[dict[type, Callable[["_Describer", Any], str]]] = {
        **dict.fromkeys((bool, types.NoneType, types.EllipsisType, types.NotImplementedType, float, complex), _repr),
        int: _int,
        str: _str,
        **dict.fromkeys((bytes, bytearray), _bytes),
        **dict.fromkeys((list, tuple), _sequence),
        dict: _dict,
        **dict.fromkeys((set, frozenset), _set),
        types.CodeType: _code,
    }
    _RULES: ClassVar[tuple[tuple[type | tuple[type, ...], Callable[["_Describer", Any], str]], ...]] = (
        (enum.Enum, _enum),
        (np.generic, _scalar),
        (np.ndarray, _array),
        (np.dtype, _dtype),
        (type, _type),
        (types.ModuleType, _module),
        (os.PathLike, _path),
        (functools.partial, _partial),
        (types.FunctionType, _function),
        (types.MethodType, _method),
        (_BUILTIN_FUNCTIONS, _builtin),
    )


def _state(value: object) -> dict[object, object]:
    """Returns the instance's own `__dict__`; empty where it has none or keeps it to itself."""
    try:
        return dict(object.__getattribute__(value, "__dict__"))
    except Exception:  # noqa: BLE001  (`__dict__` may be a property of the user's)
        return {}


def _attributes(value: object) -> dict[str, object]:
    """Returns the attributes that count: of the class body, of slots, of the instance; no code of the class is run."""
    found: dict[object, object] = {}
    cached: set[object] = set()
    for base in reversed(type(value).__mro__):
        for name, member in vars(base).items():
            if isinstance(member, types.MemberDescriptorType) and (
                not name.startswith("_") or "__slots__" in vars(base)
            ):  # One of `__slots__`, or of an object written in C.
                with contextlib.suppress(AttributeError):  # A slot not yet filled.
                    found[name] = member.__get__(value)
            elif type(member) in _CONSTANT_TYPES and not _is_foreign(base):
                found[name] = member
            elif isinstance(member, functools.cached_property):
                cached.add(name)
    found |= _state(value)
    return {
        name: item
        for name, item in found.items()
        if isinstance(name, str) and name not in cached and _counts(name, item)
    }


def _counts(name: str, value: object) -> bool:
    """Returns whether an attribute counts: it is public, or a number or string that Python did not put there."""
    return not name.startswith("_") or (isinstance(value, _PLAIN_TYPES) and not name.endswith("__"))


def _functions(member: Any) -> list[object]:
    """Returns the functions that a name in a class body stands for."""
    if isinstance(member, types.FunctionType):
        return [member]
    if isinstance(member, (staticmethod, classmethod)):
        return [member.__func__]
    if isinstance(member, property):
        return [function for function in (member.fget, member.fset) if function is not None]
    return [member.func] if isinstance(member, (functools.cached_property, functools.partialmethod)) else []


def _is_foreign(kind: type) -> bool:
    """Returns whether the class is Python's or millstream's own."""
    return str(kind.__module__).partition(".")[0] in _FOREIGN_MODULES


def _spread(count: int, limit: int) -> Sequence[int]:
    """Returns at most `limit` indices below `count`, the first and the last among them, evenly spread."""
    if count <= limit:
        return range(count)
    return [number * (count - 1) // (limit - 1) for number in range(limit)]


def _blocks(count: int, item_bytes: int) -> Iterator[slice]:
    """Yields slices of `count` items: all of them, or SAMPLE_BLOCKS evenly spread ones of SAMPLE_BYTES altogether."""
    block = max(1, SAMPLE_BYTES // SAMPLE_BLOCKS // max(1, item_bytes))
    if count <= block * SAMPLE_BLOCKS:
        yield slice(0, count)
        return
    for start in _spread(count - block + 1, SAMPLE_BLOCKS):
        yield slice(start, start + block)


def _contents(brackets: str, texts: list[str], count: int) -> str:
    """Returns the items of a container, or their number and mark."""
    inside = ", ".join(texts) if count <= SHOWN_LIMIT else f"{count} items"
    return brackets[0] + inside + brackets[1] + ("" if count <= SHOWN_LIMIT else _mark(texts))


def _mark(parts: Iterable[str | bytes]) -> str:
    """Returns `#` and the CRC-32 of the parts, in which their lengths keep them apart."""
    crc = 0
    for part in parts:
        data = part.encode("utf-8", "surrogatepass") if isinstance(part, str) else part
        crc = zlib.crc32(data, zlib.crc32(b"%d:" % len(data), crc))
    return f"#{crc:08x}"


def _clipped(text: str) -> str:
    """Returns the text in printable ASCII; its beginning and the mark of all of it if it is too long."""
    text = re.sub("[^ -~]", lambda match: match[0].encode("unicode_escape").decode(), text)
    if len(text) <= TEXT_LIMIT:
        return text
    mark = _mark([text])
    return f"{text[: TEXT_LIMIT - len(mark) - 3]}...{mark}"
