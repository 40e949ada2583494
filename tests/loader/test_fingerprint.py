"""A description tells values apart, and is the same wherever and whenever the same value is built."""

import collections
import dataclasses
import enum
import functools
import itertools
import math
import operator
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.loader.fingerprint import ITEM_LIMIT, SOURCE_RECORDS, TEXT_LIMIT, describe, describe_source
from millstream.transforms import Map

PRINTABLE = re.compile(f"[ -~]{{0,{TEXT_LIMIT}}}")


def define(body: str, name: str = "made", **names: Any) -> Any:
    """Returns what `name` is after running the code, as if a user's file had been edited to hold it."""
    space = {"__name__": "users_module", "functools": functools, "np": np, "Map": Map, **names}
    exec(compile(textwrap.dedent(body), "users_file.py", "exec", dont_inherit=True), space)
    return space[name]


def lambda_of(body: str) -> Any:
    """Returns the value of an expression, as a user's edited file would have it."""
    return define(f"made = {body}")


# Values: built alike they are described alike, here and in other processes; any two of these are told apart.
EXPRESSIONS = """
None | True | False | 0 | 1 | -1 | 2**70 | 10**5000 | -(10**5000) | 10**5000 + 1 | 1.0 | 0.0 | -0.0 | 1e300
float("nan") | 1j | 1 + 1j | "" | "1" | "None" | "a" * 64 | "a" * 65 | "a" * 66 | "é" | "\\ud800" | "\\n" | "\\\\n"
b"" | b"1" | b"a" * 99 | bytearray(b"1") | ... | NotImplemented | [] | () | {} | set() | frozenset() | [1] | (1,)
[1, 2] | [2, 1] | [[1], 2] | {"a": 1} | {"a": 2} | {"b": 1} | {1: "a"} | {"a", "b", "c"} | {"a", "b", "d"}
frozenset({"a", "b", "c"}) | {("a", 1), ("b", 2)} | list(range(100)) | list(range(101)) | [*range(99), 100]
tuple(range(100)) | dict.fromkeys("abcdefghijk") | list(range(10**5)) | {str(i) for i in range(500)}
{str(i) for i in range(501)} | {frozenset({str(i), "x"}) for i in range(500)} | range(3) | range(4) | slice(1)
slice(2) | int | str | Point | math | os.path | len | math.sqrt | math.sin | str.upper | "a".join | "b".join
re.compile("a") | re.compile("b") | re.compile("a", re.I) | operator.itemgetter(1) | operator.itemgetter(1, 2)
operator.attrgetter("a") | collections.deque([1]) | collections.Counter("aab") | collections.OrderedDict(a=1)
collections.defaultdict(list, a=[1]) | Point(1, 2) | Point(2, 1) | Color.RED | Color.BLUE | pathlib.PurePath("a/b")
pathlib.PurePath("a/c") | types.SimpleNamespace(a=1) | types.SimpleNamespace(a=2) | types.SimpleNamespace(b=1)
np.int64(1) | np.int32(1) | np.float32(1) | np.bool_(True) | np.str_("1") | np.datetime64("2020-01-01")
np.longdouble(1) | np.dtype("f4") | np.dtype("i4") | np.dtype([("a", "f4")]) | np.add | np.multiply | np.mean
np.median | np.arange(6) | np.arange(6).reshape(2, 3) | np.arange(6.0) | np.arange(1, 7) | np.arange(6, dtype=">i8")
np.arange(10**6) | np.array(["a", "b"]) | np.array(["a", "c"]) | np.array([1, "a", None], object)
np.array([1, "b", None], object) | np.zeros(2, [("a", "i1"), ("b", "i8")]) | np.ones(2, [("a", "i1"), ("b", "i8")])
np.array(1.0) | np.zeros((0, 3)) | np.zeros(0) | np.ones(2, np.longdouble) | np.array([1, 2], np.longdouble)
np.random.default_rng(0) | threading.Lock() | object() | functools.partial(max, 1) | functools.partial(max, 2)
functools.partial(min, 1) | functools.partial(max, key=len) | lambda x: x | lambda x: x + 1 | lambda x: x + 2
lambda x: -x | lambda x, y=1: x | lambda x, y=2: x | lambda x, *, y=1: x | scaled(2) | scaled(3) | counted()
Frozen(1, (2, 3)) | Frozen(1, (2, 4)) | Slots(1) | Slots(2) | Scale(2) | Scale(3) | Scale(2).map | Scale(3).map
Scale(2).other | Child(2) | Map(scaled(2)) | Map(scaled(3)) | Cyclic() | Hostile() | Items([1]) | Items([2])
functools.lru_cache(scaled(2)) | functools.lru_cache(scaled(3)) | lambda x: x in {"a", "b"}
lambda x: x in {"a", "c"} | lambda x: (lambda: x) | lambda x: (lambda: -x) | [i for i in (scaled(4), scaled(5))]
iter([1]) | (i for i in [1]) | list[int]
"""
PRELUDE = '''
import collections, dataclasses, enum, functools, math, operator, os, pathlib, re, sys, threading, types
import numpy as np
from millstream.loader.fingerprint import describe
from millstream.transforms import Map

class Color(enum.Enum):
    RED = "r"
    BLUE = "b"

Point = collections.namedtuple("Point", "x y")

def scaled(scale):
    def scale_by(x, offset=0, *, names=frozenset({"left", "right", "up"})):
        """Scales."""
        return x * scale + offset if x in {"a", "b", "c"} else [y for y in x]
    return scale_by

def counted():
    def count(n):
        return count(n - 1) if n else 0
    return count

@dataclasses.dataclass(frozen=True)
class Frozen:
    a: int
    b: tuple

@dataclasses.dataclass(slots=True)
class Slots:
    a: int

class Scale:
    sizes = (1, 2)
    def __init__(self, factor):
        self.factor = factor
        self._seen = {}
        self._number = factor + 1
        self.names = {"a", "b", "c", "d"}
    def map(self, x):
        return x * self.factor
    def other(self, x):
        return x / self.factor

class Child(Scale):
    pass

class Cyclic:
    def __init__(self):
        self.me = [self]
        self.names = {"x": self}

class Items(list):
    def __iter__(self):
        raise RuntimeError("no")
    def __len__(self):
        raise RuntimeError("no")

class Hostile:
    def __init__(self):
        self.a = 1
    def __getattr__(self, name):
        raise RuntimeError(name)
    def __eq__(self, other):
        raise RuntimeError("no")
    __hash__ = None
    def __repr__(self):
        raise RuntimeError("no")
    @property
    def b(self):
        raise RuntimeError("no")
    def __dir__(self):
        raise RuntimeError("no")
'''
LISTED = [expression for line in EXPRESSIONS.strip().splitlines() for expression in line.split(" | ")]


def program(margin: int) -> str:
    """Returns a program that prints the description of each expression, `margin` lines further down than usual."""
    shown = [f"print(describe({expression}))" for expression in LISTED]
    return "\n".join([*["# a comment"] * margin, PRELUDE, *shown])


def output(path: pathlib.Path, margin: int, hash_seed: str) -> list[str]:
    """Returns what the program prints when run from a file at this place, under this hash seed."""
    path.parent.mkdir()
    path.write_text(program(margin), encoding="utf-8")
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, path.name]
    ran = subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


def test_descriptions_are_the_same_in_every_process(tmp_path: pathlib.Path) -> None:
    """Other hash seeds, directories, files and lines change nothing; and no two of the values are taken for another."""
    first = output(tmp_path / "a" / "first.py", 0, "1")
    second = output(tmp_path / "elsewhere" / "second.py", 7, "2")
    third = output(tmp_path / "third place" / "third.py", 70, "random")
    assert dict(zip(LISTED, first, strict=True)) == dict(zip(LISTED, second, strict=True))
    assert first == third
    alike = collections.defaultdict(list)
    for expression, text in zip(LISTED, first, strict=True):
        alike[text].append(expression)
    assert [expressions for expressions in alike.values() if len(expressions) > 1] == []
    for text in first:
        assert PRINTABLE.fullmatch(text)
        assert str(tmp_path) not in text
        assert " at 0x" not in text


atoms = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=80)
    | st.binary(max_size=40)
)
hashable = st.recursive(atoms, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=4), max_leaves=6)
values = st.recursive(
    hashable,
    lambda inner: (
        st.lists(inner, max_size=12) | st.dictionaries(hashable, inner, max_size=4) | st.sets(hashable, max_size=4)
    ),
    max_leaves=20,
)


def spelled(value: Any) -> str:
    """Returns the oracle: a value spelled out in full, sets and dicts in sorted order."""
    if isinstance(value, dict):
        return "{" + ",".join(sorted(f"{spelled(key)}:{spelled(item)}" for key, item in value.items())) + "}"
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [spelled(item) for item in value]
        return f"{type(value).__name__}({','.join(items if isinstance(value, (list, tuple)) else sorted(items))})"
    return repr(value)


def rebuilt(value: Any) -> Any:
    """Returns an equal value made of new objects, with sets and dicts filled in the opposite order."""
    if isinstance(value, dict):
        return {rebuilt(key): rebuilt(item) for key, item in reversed(value.items())}
    if isinstance(value, (list, tuple)):
        return type(value)(map(rebuilt, value))
    if isinstance(value, (set, frozenset)):
        return type(value)(rebuilt(item) for item in [*value][::-1])
    return value


@settings(deadline=None, max_examples=150)
@given(values, values)
def test_plain_values_are_alike_exactly_if_they_are_equal(one: Any, other: Any) -> None:
    """The description of a nested value is that of its copy, and another one than that of any different value."""
    assert describe(one) == describe(rebuilt(one))
    assert (describe(one) == describe(other)) == (spelled(one) == spelled(other))
    assert PRINTABLE.fullmatch(describe(one))


@settings(deadline=None, max_examples=200)
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")), st.text(min_size=1))
def test_every_text_is_printable_and_short(name: str, extra: str) -> None:
    """Names and strings of any characters and length come out as printable ASCII, and still tell apart."""
    described = describe(type("x" + name, (), {"value": extra * 50})())
    assert PRINTABLE.fullmatch(described)
    assert described != describe(type("x" + name, (), {"value": extra * 51})())
    assert described != describe(type("y" + name, (), {"value": extra * 50})())


CLASS = """
class made(Map):
    size = 2
    def __init__(self):
        self.factor = 3
        self._rate = 0.5
    def map(self, x, gain=1):
        return self.scale(x) * gain
    def scale(self, x):
        return x * self.factor
    @staticmethod
    def still(x):
        return x + 1
    @property
    def shown(self):
        return self.factor + 2
    @functools.cached_property
    def table(self):
        return [self.factor] * 4
made = made()
"""
CLASS_EDITS = [
    ("size = 2", "size = 20"),
    ("self.factor = 3", "self.factor = 4"),
    ("self._rate = 0.5", "self._rate = 0.25"),
    ("self.factor = 3", "self.factor = 3; self.more = None"),
    ("gain=1", "gain=2"),
    ("self.scale(x) * gain", "self.scale(x) / gain"),
    ("x * self.factor", "x + self.factor"),
    ("return x + 1", "return x + 9"),
    ("self.factor + 2", "self.factor - 2"),
    ("] * 4", "] * 5"),
    ("def still", "def calm"),
]


def test_an_edited_class_is_another() -> None:
    """A changed parameter, constant or body of any kind of method is seen in the description of an instance."""
    assert describe(define(CLASS)) == describe(define(CLASS))
    for old, new in CLASS_EDITS:
        assert CLASS.count(old) == 1
        assert describe(define(CLASS)) != describe(define(CLASS.replace(old, new))), new


def test_an_edited_base_class_is_another() -> None:
    """The methods that a class inherits count like its own."""
    child = "class Child(type(made)):\n    pass\nmade = Child()\n"
    assert describe(define(CLASS + child)) == describe(define(CLASS + child))
    assert describe(define(CLASS + child)) != describe(define(CLASS.replace("x * self", "x - self") + child))


def test_millstreams_own_classes_do_not_count() -> None:
    """An update of millstream changes no description: its classes are named, without their code."""
    assert re.fullmatch(r"Map\(\w+=<lambda>#[0-9a-f]{8}\)", describe(define("made = Map(lambda x: x)")))


FUNCTION = '''
def outer(scale, shift=(1, 2)):
    def made(x, y=5, *, z="z"):
        """Returns more."""
        total = [x * scale for _ in range(3)]
        try:
            return sum(total) + y + shift[0]
        except ValueError:
            return {"a": None}
    return made
made = outer(7)
'''
FUNCTION_EDITS = [
    ("made = outer(7)", "made = outer(8)"),
    ("shift=(1, 2)", "shift=(1, 3)"),
    ("y=5", "y=6"),
    ('z="z"', 'z="w"'),
    ("x * scale", "x + scale"),
    ("range(3)", "range(4)"),
    ("sum(total)", "max(total)"),
    ("except ValueError", "except TypeError"),
    ('"a": None', '"b": None'),
    ("+ y +", "- y +"),
]
HARMLESS_EDITS = [
    ('"""Returns more."""', '"""Returns less."""'),
    ("total =", "total   =  "),
    ("total", "result"),
    ("        try:", "\n\n        # A comment.\n        try:"),
    ("def outer", "import os\n\n\ndef outer"),
]


def test_an_edited_function_is_another() -> None:
    """A changed operator, constant, name, default or closure is seen, in inner code too."""
    for old, new in FUNCTION_EDITS:
        assert FUNCTION.count(old) == 1
        assert describe(define(FUNCTION)) != describe(define(FUNCTION.replace(old, new))), new


def test_comments_lines_and_docstrings_do_not_count() -> None:
    """What a person edits for other persons leaves the stream as it is."""
    for old, new in HARMLESS_EDITS:
        assert FUNCTION.replace(old, new) != FUNCTION
        assert describe(define(FUNCTION)) == describe(define(FUNCTION.replace(old, new))), new


def test_words_come_before_digits() -> None:
    """A person reads in a description what the value is: names, parameters, defaults and closure."""
    assert re.fullmatch(
        r"outer\.<locals>\.made#[0-9a-f]{8}\(y=5, z='z', scale=7, shift=\(1, 2\)\)", describe(define(FUNCTION))
    )
    assert re.fullmatch(r"made\(_rate=0\.5, factor=3, size=2\)#[0-9a-f]{8}", describe(define(CLASS)))
    assert re.fullmatch(r"<lambda>#[0-9a-f]{8}\(scale=2\)", describe(lambda_of("lambda x, scale=2: x * scale")))
    partial = describe(functools.partial(define(FUNCTION), 1, y=2))
    assert partial.startswith("partial(outer.<locals>.made#")
    assert partial.endswith(", 1, y=2)")
    assert describe(math.sqrt) == "math.sqrt"
    assert describe([np.float32(1.5), "a", None, {1: (2,)}]) == "[float32(1.5), 'a', None, {1: (2)}]"


def test_using_a_value_does_not_change_its_description() -> None:
    """Specialised bytecode, caches behind an underscore and cached properties are no part of what a value is."""
    made = define(CLASS)
    function = define("def made(x, _cache={}):\n    return _cache.setdefault(x, x + 1)")
    before = describe(made), describe(function)
    for number in range(5000):
        made.map(number)
        function(number)
    made._seen = {1: 2}
    assert made.table == [3] * 4
    assert (describe(made), describe(function)) == before


def test_arrays_count_by_their_values_whatever_their_layout() -> None:
    """Equal arrays are alike in any memory order; one changed element, dtype or shape is seen."""
    array = np.arange(24.0).reshape(4, 6)
    changed = array.copy()
    changed[2, 3] += 1
    assert describe(array) == describe(np.asfortranarray(array)) == describe(np.repeat(array, 2, axis=0)[::2])
    assert len({*map(describe, (array, changed, array.astype("f4"), array.reshape(6, 4), array.T))}) == 5
    padded = np.dtype([("a", "i1"), ("b", "i8")], align=True)
    dirty = np.frombuffer(bytes(range(32)), padded).copy()
    clean = np.zeros(2, padded)
    for name in ("a", "b"):
        clean[name] = dirty[name]
    assert describe(dirty) == describe(clean)


def test_arrays_of_jax_count_by_their_values() -> None:
    """A parameter may be a JAX array, and a function may be compiled."""
    import jax
    import jax.numpy as jnp

    assert describe(jnp.arange(3)) == describe(jnp.arange(3))
    assert describe(jnp.arange(3)) != describe(jnp.arange(1, 4))
    assert describe(jax.jit(lambda_of("lambda x: x"))) == describe(jax.jit(lambda_of("lambda x: x")))
    assert describe(jax.jit(lambda_of("lambda x: x"))) != describe(jax.jit(lambda_of("lambda x: x + 1")))


def chain(length: int) -> list[Any]:
    """Returns lists nested `length` deep."""
    made: list[Any] = []
    for _ in range(length):
        made = [made]
    return made


def bush(depth: int) -> list[Any]:
    """Returns a list that holds one list eight times, and so on: 8**depth paths through few objects."""
    made: list[Any] = [1]
    for _ in range(depth):
        made = [made] * 8
    return made


def vast() -> Iterator[Any]:
    """Yields values that would take long, or for ever, to look at wholly."""
    yield list(range(10**6))
    yield [list(range(1000)) for _ in range(1000)]
    yield {i: [i] * 100 for i in range(20_000)}
    yield set(range(10**6))
    yield {frozenset({i, str(i)}) for i in range(50_000)}
    yield "a" * 10**7
    yield bytes(10**7)
    yield np.zeros(10**9, np.uint8)
    yield np.zeros((30_000, 30_000), np.float32).T
    yield np.array([None] * 10**6)
    yield 7 ** (10**6)
    yield chain(100_000)
    yield bush(40)
    yield types.SimpleNamespace(**{f"attribute_{i}": [i] * 500 for i in range(2000)})
    yield itertools.count()
    yield [Map(functools.partial(max, i)) for i in range(10_000)]


def test_the_work_is_bounded() -> None:
    """Vast, deep and entangled values take a bounded time."""
    for value in vast():
        start = time.process_time()
        assert PRINTABLE.fullmatch(describe(value))
        assert time.process_time() - start < 5


def test_long_values_are_told_apart_by_length_and_sample() -> None:
    """Beyond what is read wholly, the length, the ends and an even sample still count."""
    count = 10 * ITEM_LIMIT
    numbers = list(range(count))
    for changed in ([*numbers, 1], [-1, *numbers[1:]], [*numbers[:-1], -1], [number + 1 for number in numbers]):
        assert describe(numbers) != describe(changed)
    array = np.zeros(10**7, np.uint8)
    for place in (0, -1):
        changed_array = array.copy()
        changed_array[place] = 1
        assert describe(array) != describe(changed_array)
    assert describe("a" * 10**7) != describe("a" * 10**7 + "b")


class Raising:
    """Raises whatever is asked of it; counts nothing, holds nothing."""

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


class Posing:
    """Pretends to be a list."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return list


class Meta(type):
    """A class of classes that raise when asked for names."""

    def __getattribute__(cls, name: str) -> Any:
        raise RuntimeError(name)


class Nameless(metaclass=Meta):
    """Cannot be asked its name."""


def test_hostile_objects_are_described_without_running_their_code() -> None:
    """Whatever a user's class does when it is looked at, a description comes out, without addresses."""
    unset = define(
        "def outer():\n    def made():\n        return later\n    return made\n    later = 1\nmade = outer()"
    )
    entangled: dict[str, Any] = {}
    entangled["self"] = [entangled, {"again": entangled}]
    for value in (Raising(), Posing(), Nameless(), Nameless, unset, entangled, threading.Thread(), sys, os.environ):
        assert PRINTABLE.fullmatch(describe(value))
        assert " at 0x" not in describe(value)
        assert describe(value) == describe(value)


class Folder:
    """A source whose records are slow to read: here, reading is an error."""

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, key: int) -> Any:
        raise AssertionError(key)


class Signed(Folder):
    """A source that knows what it is."""

    def fingerprint(self) -> Any:
        """Returns what it was told to."""
        return self.path


def test_a_source_is_its_length_and_its_attributes() -> None:
    """A custom source is described without reading a record; its parameters and length count."""
    text = describe_source(Folder("train", 7))
    assert re.fullmatch(r"7 records of Folder\(path='train', size=7\)#[0-9a-f]{8}", text)
    assert len({text, describe_source(Folder("train", 8)), describe_source(Folder("test", 7))}) == 3


def test_a_source_may_say_what_it_is() -> None:
    """`fingerprint()` of a source is what counts, made printable and short; it must be a string."""
    assert describe_source(Signed("corpus v1", 7)) == "corpus v1"
    assert describe_source(Signed("é\n", 7)) == "\\xe9\\n"
    long = describe_source(Signed("a" * 1000, 7))
    assert PRINTABLE.fullmatch(long)
    assert long != describe_source(Signed("a" * 999, 7))
    with pytest.raises(TypeError, match=r"Signed\.fingerprint\(\) must return a str, got bytes"):
        describe_source(Signed(b"corpus", 7))  # type: ignore[arg-type]


SEQUENCES: list[Callable[[range], Any]] = [
    list,
    tuple,
    np.array,
    lambda keys: [{"image": np.full(9, key)} for key in keys],
]


def test_a_plain_sequence_is_its_length_and_some_records() -> None:
    """Of a list, tuple or array, the length, the type and evenly spread records count."""
    ranges = [range(1000), range(999), range(1, 1001), range(0, 2000, 2), range(5), range(0)]
    every = []
    for build in SEQUENCES:
        texts = [describe_source(build(keys)) for keys in ranges]
        assert texts == [describe_source(build(keys)) for keys in ranges]
        assert texts[0].startswith("1000 records of ")
        assert all(PRINTABLE.fullmatch(text) for text in texts)
        every += texts if build is not SEQUENCES[-1] else texts[:-1]  # An empty list is an empty list.
    assert len({*every}) == len(every)


def test_a_range_may_be_vast() -> None:
    """A range is described by its ends and steps, of whatever length."""
    assert describe_source(range(10**12)) == describe_source(range(0, 10**12, 1))
    assert len({*map(describe_source, (range(10**12), range(10**12 + 1), range(0, 2 * 10**12, 2)))}) == 3


def test_few_records_are_looked_at() -> None:
    """However long a plain sequence is, a fixed number of its records is looked at."""
    records = list(range(100))
    looked_at = [
        key for key in records if describe_source([*records[:key], -1, *records[key + 1 :]]) != describe_source(records)
    ]
    assert len(looked_at) == SOURCE_RECORDS
    assert {0, 99} <= {*looked_at}


class Color(enum.Flag):
    """Flags, whose combinations have no name of their own."""

    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Nested:
    """A dataclass that holds functions and flags."""

    function: Any
    color: Color


def test_functions_and_flags_within_attributes_count() -> None:
    """A callable is described in full wherever it is held."""
    plain = Nested(lambda_of("lambda x: x"), Color.RED)
    assert describe(plain) == describe(Nested(lambda_of("lambda x: x"), Color.RED))
    assert describe(plain) != describe(Nested(lambda_of("lambda x: x * 2"), Color.RED))
    assert describe(plain) != describe(Nested(lambda_of("lambda x: x"), Color.RED | Color.BLUE))
    assert describe(plain) != describe(Nested(operator.itemgetter(0), Color.RED))
