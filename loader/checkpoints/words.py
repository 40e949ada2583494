"""A value in words: what it is made of, and, apart from that, a mark of the code that it runs.

One rule covers every object: its class, and what pickling it would send. Of a function count its name, its defaults and
its closure. Words are the same in every process and on every host: they hold no addresses, no hashes of this process
and no folders of code. Code is seen through its bytecode, which differs between minor versions of Python, so it never
enters the words.

Not looked at: what a function reads from the module around it, results of `functools.cached_property`, what random
generators hold, attributes that cannot be pickled (locks, open files) and attributes that are None, since an open file
is often None first. The work is bounded: long containers and large arrays count by their size and an even sample.
"""

import collections
import enum
import functools
import itertools
import marshal
import os
import re
import types
import weakref
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from millstream.interruptions import is_from_signal_handler
from millstream.loader.checkpoints.contents import (
    ITEM_LIMIT,
    PLAIN_TYPES,
    class_constants,
    closure,
    code_mark,
    crc_of,
    is_cache,
    is_foreign,
    methods,
    sent,
    written_name,
)

TEXT_LIMIT = 80
"""The most characters of one text; a longer value is shown as its parts, or as a CRC."""
SHOWN_LIMIT = 16
"""Containers with more items than this are shown as a count and a CRC."""
ENTRY_LIMIT = 32
"""The most texts that describe one value, all its parts together; this many functions are marked one by one, too."""
PLAIN_LIMIT = 1 << 16
"""The same where all items are plain numbers and strings, which are read a thousand times as fast."""
NODE_LIMIT = 50_000
"""The most values that one description looks at, all levels together: a tenth of a second."""
DEPTH_LIMIT = 32
BYTE_LIMIT = 1 << 24
"""The most bytes of arrays and long strings that one description reads, in blocks spread evenly over larger ones."""
FILE_BYTE_LIMIT = 1 << 20
"""The same for an array that lies in a file."""
SAMPLE_BLOCKS = 64


class Words(NamedTuple):
    """A value in words.

    Attributes:
        text: all of the value; its head and a CRC if that is longer than TEXT_LIMIT.
        head: what to call the value where its parts are listed one by one.
        parts: what it consists of: how to reach each part from the value, as in Python, and the part's words.
        is_cut: whether `text` ends in a CRC.
    """

    text: str
    head: str = ""
    parts: tuple[tuple[str, "Words"], ...] = ()
    is_cut: bool = False

    def listed(self, path: str) -> dict[str, str]:
        """Returns the texts of the value and of as many of its parts as ENTRY_LIMIT allows, by their paths.

        Parts that are short are not taken apart: their text says it all.
        """
        entries = {path: self}
        queue = collections.deque([path])
        while queue:
            where = queue.popleft()
            words = entries[where]
            if (words.is_cut or where == path) and 0 < len(words.parts) <= ENTRY_LIMIT - len(entries):
                entries[where] = Words(words.head)
                for label, part in words.parts:
                    entries[where + label] = part
                    queue.append(where + label)
        return {printable(where): printable(words.text) for where, words in entries.items()}


class Description(NamedTuple):
    """A value in words, and the mark of each function that belongs to it, by name."""

    words: Words
    code: Mapping[str, int]


_first: dict[int, tuple["weakref.ref[Any]", Description]] = {}
"""What objects were when they were first described, as long as they live: using one fills its caches."""


def describe(value: object) -> Description:
    """Returns a value in words, with the marks of its code.

    An object or function that was described before has the words that it had then, whatever has become of it. Calls
    what pickling calls (`__reduce_ex__`, `__getstate__`), and nothing else of the user's. Never raises.
    """
    walk = _Walk()
    return Description(walk.words(value), walk.code)


def printable(text: str) -> str:
    """Returns a text in printable ASCII."""
    return re.sub("[^ -~]", lambda match: match[0].encode("unicode_escape").decode(), text)


def spread(count: int, limit: int) -> Sequence[int]:
    """Returns at most `limit` indices below `count`, the first and the last among them, evenly spread."""
    if count <= limit:
        return range(count)
    return [number * (count - 1) // (limit - 1) for number in range(limit)]


class _Walk:
    """One walk through a value.

    Attributes:
        left: how many values may still be looked at.
        bytes_left: how many bytes may still be read.
        path: the identities of the values that enclose the present one.
        code: the marks of the functions seen so far, by name.
    """

    def __init__(self) -> None:
        self.left = NODE_LIMIT
        self.bytes_left = BYTE_LIMIT
        self.path: set[int] = set()
        self.code: dict[str, int] = {}

    def words(self, value: object) -> Words:
        """Returns the words of a value."""
        if id(value) in self.path:
            return Words("<cycle>")
        if self.left <= 0 or len(self.path) >= DEPTH_LIMIT:
            return Words("...")
        self.left -= 1
        self.path.add(id(value))
        try:
            return self._rule(value)(self, value)
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            # A value whose class fails when looked at has words all the same.
            return Words(f"<unreadable {written_name(type(value))}>")
        finally:
            self.path.discard(id(value))

    def _rule(self, value: object) -> "Callable[[_Walk, Any], Words]":
        """Returns the method that describes values of this type; `type`, because `__class__` may be the user's."""
        kind = type(value)
        if kind in self._EXACT:
            return self._EXACT[kind]
        for kinds, rule in self._RULES:
            if issubclass(kind, kinds):
                return rule
        is_array = all(hasattr(kind, name) for name in ("__array__", "dtype", "shape"))
        return _Walk._array_like if is_array else _Walk._object

    def _plain(self, value: object) -> Words:
        return Words(repr(value))

    def _int(self, value: int) -> Words:
        # Decimal digits of a large number take quadratic time, and Python refuses to make too many.
        is_large = value.bit_length() > 256
        return Words(f"int of {value.bit_length()} bits {crc_of([hex(value)])}" if is_large else repr(value))

    def _characters(self, value: str | bytes | bytearray) -> Words:
        # Escapes make a text longer than what it says.
        if len(value) <= TEXT_LIMIT - 16 and len(text := ascii(value)) <= TEXT_LIMIT:
            return Words(text)
        sample = [value[block] for block in self._blocks(value)]
        return Words(f"{type(value).__name__} of {len(value)} {crc_of(sample)}", is_cut=True)

    def _sequence(self, value: list[object] | tuple[object, ...]) -> Words:
        head, brackets = f"{type(value).__name__} of {len(value)}", "[]" if type(value) is list else "()"
        if len(value) <= SHOWN_LIMIT:
            parts = [(f"[{number}]", self.words(item)) for number, item in enumerate(value)]
            return _whole(head, brackets, [words.text for _, words in parts], parts)
        sample = [*value[:: _stride(value, PLAIN_LIMIT)], value[-1]]
        if set(map(type, sample)) <= PLAIN_TYPES:
            return Words(f"{head} {crc_of([marshal.dumps(sample, 2)])}", is_cut=True)
        sample = [*value[:: _stride(value, ITEM_LIMIT)], value[-1]]
        return Words(f"{head} {crc_of([self.words(item).text for item in sample])}", is_cut=True)

    def _dict(self, value: dict[Any, object]) -> Words:
        head = f"dict of {len(value)}"
        if len(value) <= SHOWN_LIMIT:
            # Equal dicts may differ in the order of their items.
            pairs = sorted((self.words(key).text, self.words(item)) for key, item in value.items())
            return _whole(head, "{}", [f"{key}: {words.text}" for key, words in pairs], _labelled("[{}]", pairs))
        items = list(itertools.islice(value.items(), 0, None, _stride(value, PLAIN_LIMIT)))
        if {type(key) for key, _ in items} in ({str}, {int}) and {type(item) for _, item in items} <= PLAIN_TYPES:
            return Words(f"{head} {crc_of([marshal.dumps(sorted(items), 2)])}", is_cut=True)
        items = list(itertools.islice(value.items(), 0, None, _stride(value, ITEM_LIMIT)))
        texts = sorted(f"{self.words(key).text}: {self.words(item).text}" for key, item in items)
        return Words(f"{head} {crc_of(texts)}", is_cut=True)

    def _set(self, value: set[Any] | frozenset[Any]) -> Words:
        # Sets are in another order in each process, so that a sample of a large one would be another one, too.
        head = f"{type(value).__name__} of {len(value)}"
        if len(value) > SHOWN_LIMIT and set(map(type, value)) in ({str}, {int}, {bytes}):
            is_small = len(value) <= PLAIN_LIMIT
            return Words(f"{head} {crc_of([marshal.dumps(sorted(value), 2)])}" if is_small else head, is_cut=True)
        if len(value) > ITEM_LIMIT:
            return Words(head, is_cut=True)
        return _whole(head, (f"{type(value).__name__}{{", "}"), sorted(self.words(item).text for item in value))

    def _enum(self, value: enum.Enum) -> Words:
        return Words(f"{written_name(type(value))}.{value._name_}({self.words(value._value_).text})")

    def _dtype(self, value: np.dtype[Any]) -> Words:
        return Words(f"dtype({value.descr if value.names else str(value)!r})")

    def _scalar(self, value: np.generic) -> Words:
        text = f"{value.dtype}({value!s})"
        return Words(text) if len(text) <= TEXT_LIMIT else Words(f"{value.dtype} {crc_of([text])}", is_cut=True)

    def _array(self, value: np.ndarray[Any, np.dtype[Any]]) -> Words:
        array = np.asarray(value)  # Only what the array holds counts, not what a subclass makes of it.
        head = f"{array.dtype if array.dtype.names is None else 'struct'} array {array.shape}"
        if array.dtype.names is not None:  # Their bytes hold padding, which is arbitrary.
            fields = [(f"[{name!r}]", self.words(array[name])) for name in array.dtype.names]
            return _whole(head, (f"{head}(", ")"), [f"{label}={words.text}" for label, words in fields], fields)
        if 0 < array.size <= SHOWN_LIMIT // 2 and array.dtype.kind in "biufc":
            shown = array.tolist() if array.ndim else f"({array})"
            return _whole(head, ("", ""), [f"{array.dtype}{shown}"])
        if array.dtype.hasobject or array.dtype.char in "gG":  # Their bytes are addresses, or hold padding.
            items = [self.words(array.flat[index]).text for index in spread(array.size, ITEM_LIMIT)]
            return Words(f"{head} {crc_of(items)}", is_cut=True)
        most = FILE_BYTE_LIMIT if isinstance(value, np.memmap) else BYTE_LIMIT
        blocks = self._blocks(array.flat, array.itemsize, most)
        return Words(f"{head} {crc_of(array.flat[block].tobytes() for block in blocks)}", is_cut=True)

    def _array_like(self, value: Any) -> Words:
        """Describes an array of another library, as JAX's or PyTorch's; some have a shape only, such as JAX's keys."""
        try:
            return self._array(np.asarray(value))
        except Exception as error:
            if is_from_signal_handler(error):
                raise
            # Each library has errors of its own.
            return Words(f"{value.dtype} {written_name(type(value))} {tuple(value.shape)}")

    def _blocks(self, items: Any, item_bytes: int = 1, most: int = BYTE_LIMIT) -> Iterator[slice]:
        """Yields slices of the items: all of them, or SAMPLE_BLOCKS evenly spread ones of the bytes that are left."""
        count = len(items)
        most = min(most, max(self.bytes_left, SAMPLE_BLOCKS * 1024))
        self.bytes_left -= min(most, count * item_bytes)
        block = max(1, most // SAMPLE_BLOCKS // max(1, item_bytes))
        starts = [0] if count <= block * SAMPLE_BLOCKS else spread(count - block + 1, SAMPLE_BLOCKS)
        return (slice(start, count if len(starts) == 1 else start + block) for start in starts)

    def _type(self, value: type) -> Words:
        return Words(written_name(value))

    def _module(self, value: types.ModuleType) -> Words:
        return Words(f"module {value.__name__}")

    def _path(self, value: "os.PathLike[Any]") -> Words:
        return Words(f"Path({self.words(os.fspath(value)).text})")

    def _partial(self, value: "functools.partial[Any]") -> Words:
        held = {"func": value.func, **{f"args[{i}]": item for i, item in enumerate(value.args)}, **value.keywords}
        return self._with_parts("partial", held)

    def _function(self, value: types.FunctionType) -> Words:
        return self._once(value, lambda: self._function_words(value))

    def _function_words(self, value: types.FunctionType) -> Words:
        code = value.__code__
        arguments = code.co_varnames[: code.co_argcount]
        defaults = value.__defaults__ or ()
        held = dict(zip(arguments[len(arguments) - len(defaults) :], defaults, strict=True))
        held |= value.__kwdefaults__ or {}
        held = {name: item for name, item in held.items() if not is_cache(name, item)} | closure(value)
        name = written_name(value)
        if not is_foreign(value.__module__):
            self._mark(name, code_mark(code))
        return self._with_parts(name, held)

    def _object(self, value: object) -> Words:
        return self._once(value, lambda: self._object_words(value))

    def _object_words(self, value: object) -> Words:
        kind = type(value)
        name = written_name(kind)
        if f"{kind.__module__}.".startswith(("numpy.random.", "random.")):
            return Words(name, name)  # What a generator holds moves on with every draw.
        try:
            attributes, arguments = sent(value)
        except Exception as error:
            # Not what is only held by the pipeline, such as an open file: that comes and goes.
            if is_from_signal_handler(error) or (len(self.path) > 1 and not callable(value)):
                raise
            attributes, arguments = dict(vars(value)), []
        closures: dict[str, object] = {}
        if not (issubclass(kind, tuple) and hasattr(kind, "_fields")):  # The methods of named tuples are Python's.
            for label, function in methods(kind):
                self._mark(f"{name}.{label}", code_mark(function.__code__, function.__defaults__))
                closures |= {f"{label}.{free}": item for free, item in closure(function).items()}
        cached = {
            attribute
            for base in kind.__mro__
            for attribute, member in vars(base).items()
            if isinstance(member, functools.cached_property)
        }
        attributes = class_constants(kind) | closures | attributes
        return self._with_parts(
            name,
            {str(key): item for key, item in attributes.items() if item is not None and key not in cached},
            [words for words in map(self.words, arguments) if not words.text.startswith("<unreadable")],
        )

    def _with_parts(self, name: str, attributes: Mapping[str, object], arguments: Sequence[Words] = ()) -> Words:
        """Returns the words of something that has attributes; those that cannot be pickled are left out."""
        named = [(key, self.words(item)) for key, item in sorted(attributes.items())]
        named = [(key, words) for key, words in named if not words.text.startswith("<unreadable")]
        texts = [*(words.text for words in arguments), *(f"{key}={words.text}" for key, words in named)]
        if not texts:
            return Words(name, name)
        numbered = [(f"({number})", words) for number, words in enumerate(arguments)]
        return _whole(name, (f"{name}(", ")"), texts, [*numbered, *_labelled(".{}", named)])

    def _once(self, value: object, make: Callable[[], Words]) -> Words:
        """Returns the first words of an object, and adds the marks of its code."""
        known = _first.get(id(value))
        if known is not None and known[0]() is value:
            words, found = known[1]
        else:
            outer, self.code = self.code, {}
            try:
                words = make()
            finally:
                found, self.code = self.code, outer
            self._remember(value, Description(words, found))
        for name, mark in found.items():
            self._mark(name, mark)
        return words

    def _remember(self, value: object, description: Description) -> None:
        if self.left > 0 and type(value).__weakrefoffset__:
            key, forget = id(value), _first.pop
            _first[key] = weakref.ref(value, lambda _: forget(key, None)), description

    def _mark(self, name: str, mark: int) -> None:
        """Notes the mark of a function; of several that share a name, such as lambdas, all count."""
        known = self.code.get(name, mark)
        self.code[name] = mark if known == mark else zlib.crc32(b"%d,%d" % (known, mark))

    _EXACT: ClassVar[dict[type, Callable[["_Walk", Any], Words]]] = {
        **dict.fromkeys((bool, types.NoneType, types.EllipsisType, types.NotImplementedType, float, complex), _plain),
        int: _int,
        **dict.fromkeys((str, bytes, bytearray), _characters),
        **dict.fromkeys((list, tuple), _sequence),
        dict: _dict,
        **dict.fromkeys((set, frozenset), _set),
    }
    _RULES: ClassVar[tuple[tuple[type | tuple[type, ...], Callable[["_Walk", Any], Words]], ...]] = (
        (enum.Enum, _enum),
        (np.generic, _scalar),
        (np.ndarray, _array),
        (np.dtype, _dtype),
        (type, _type),
        (types.ModuleType, _module),
        (os.PathLike, _path),
        (functools.partial, _partial),
        (types.FunctionType, _function),
    )


def _whole(head: str, brackets: Sequence[str], texts: Sequence[str], parts: Sequence[tuple[str, Words]] = ()) -> Words:
    """Returns the words of something made of several texts."""
    text = brackets[0] + ", ".join(texts) + brackets[1]
    kept = tuple(parts) if len(dict(parts)) == len(parts) <= ENTRY_LIMIT else ()
    if len(text) <= TEXT_LIMIT:
        return Words(text, head, kept)
    return Words(f"{head} {crc_of(texts)}", head, kept, is_cut=True)


def _labelled(form: str, named: Iterable[tuple[str, Words]]) -> list[tuple[str, Words]]:
    return [(form.format(name), words) for name, words in named]


def _stride(items: Any, limit: int) -> int:
    return -(-len(items) // limit) or 1
