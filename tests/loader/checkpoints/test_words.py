"""Words tell values apart, and are the same wherever and whenever the same value is built."""

import collections
import dataclasses
import functools
import gc
import itertools
import os
import pathlib
import re
import subprocess
import sys
import textwrap
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millstream.loader.checkpoints import words as words_module
from millstream.loader.checkpoints.words import ENTRY_LIMIT, TEXT_LIMIT, describe
from millstream.transforms import Map


def listed(value: object) -> dict[str, str]:
    """Returns the words of a value as a checkpoint has them."""
    return describe(value).words.listed("it")


def define(body: str, name: str = "made", **names: Any) -> Any:
    """Returns what `name` is after running the code, as if a user's file had been edited to hold it."""
    space = {"__name__": "users_module", "functools": functools, "np": np, "Map": Map, **names}
    exec(compile(textwrap.dedent(body), "users_file.py", "exec", dont_inherit=True), space)
    return space[name]


# Values that have the same words whenever they are built, here and in other processes; no two have the same ones.
EXPRESSIONS = """
None | True | False | 0 | 1 | 2**70 | 10**5000 | 10**5000 + 1 | 1.0 | 0.0 | -0.0 | 1e300 | float("nan") | 1j | "" | "1"
"None" | "a" * 64 | "a" * 65 | "é" | "\\ud800" | "\\n" | "\\\\n" | b"" | b"1" | b"a" * 99 | ... | [] | () | {} | set()
frozenset() | [1] | (1,) | [1, 2] | [2, 1] | [[1], 2] | {"a": 1} | {"a": 2} | {"b": 1} | {1: "a"} | {"a", "b", "c"}
{"a", "b", "d"} | {("a", 1), ("b", 2)} | list(range(100)) | list(range(101)) | [*range(99), 100] | tuple(range(100))
list(range(10**5)) | {str(i) for i in range(500)} | {str(i) for i in range(501)} | {i: str(i) for i in range(5000)}
{i: str(i) if i != 77 else "" for i in range(5000)} | [(i, str(i)) for i in range(4000)]
[(i, str(i)) if i != 77 else () for i in range(4000)] | {frozenset({str(i), "x"}) for i in range(500)} | range(3)
range(4) | int | str | Point | math | os.path | math.sqrt | math.sin | str.upper | "a".join | "b".join | re.compile("a")
re.compile("b") | re.compile("a", re.I) | operator.itemgetter(1) | operator.itemgetter(1, 2) | operator.attrgetter("a")
collections.deque([1]) | collections.Counter("aab") | collections.defaultdict(list, a=[1]) | Point(1, 2) | Point(2, 1)
Color.RED | Color.BLUE | pathlib.PurePath("a/b") | pathlib.PurePath("a/c") | types.SimpleNamespace(a=1)
types.SimpleNamespace(a=2) | types.SimpleNamespace(b=1) | np.int64(1) | np.int32(1) | np.float32(1) | np.bool_(True)
np.datetime64("2020-01-01") | np.dtype("f4") | np.dtype("i4") | np.dtype([("a", "f4")]) | np.add | np.multiply
np.arange(6) | np.arange(6).reshape(2, 3) | np.arange(6.0) | np.arange(1, 7) | np.arange(6, dtype=">i8")
np.arange(10**6) | np.arange(10**6) + (np.arange(10**6) == 777777) | np.array(["a", "b"]) | np.array(["a", "c"])
np.array([1, "a", None], object) | np.array([1, "b", None], object) | np.zeros(2, [("a", "i1"), ("b", "i8")])
np.ones(2, [("a", "i1"), ("b", "i8")]) | np.array(1.0) | np.zeros((0, 3)) | np.zeros(0) | np.random.default_rng(0)
functools.partial(max, 1) | functools.partial(max, 2) | functools.partial(min, 1) | functools.partial(max, key=len)
scaled(2) | scaled(3) | Frozen(1, (2, 3)) | Frozen(1, (2, 4)) | Slots(1) | Slots(2) | Scale(2) | Scale(3) | Scale(2).map
Scale(3).map | Child(2) | Map(scaled(2)) | Map(scaled(3)) | Cyclic() | Private(2) | Private(3)
Stateful(1, 2) | Stateful(3, 2) | functools.lru_cache(scaled(2)) | functools.lru_cache(scaled(3)) | Local(4) | Local(5)
"""
PRELUDE = '''
import collections, dataclasses, enum, functools, math, operator, os, pathlib, re, sys, threading, types
import numpy as np
from millstream.loader.checkpoints.words import describe
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
        self.names = {"a", "b", "c", "d"}
    def map(self, x):
        return x * self.factor

class Child(Scale):
    pass

class Private:
    def __init__(self, size):
        self._sizes = [size, (size,)]
        self.__table = {"k": np.full(20, size)}

class Stateful:
    def __init__(self, kept, dropped):
        self.kept, self.dropped = kept, dropped
    def __getstate__(self):
        return {"kept": self.kept}

def Local(number):
    class Hidden(Map):
        def map(self, x):
            return x * number
    return Hidden()

class Cyclic:
    def __init__(self):
        self.me = [self]
'''
LISTED = [expression for line in EXPRESSIONS.strip().splitlines() for expression in line.split(" | ")]


def program(margin: int) -> str:
    """Returns a program that prints the description of each expression, `margin` lines further down than usual."""
    shown = [
        f"d = describe({expression}); print(ascii((d.words.listed('it'), sorted(d.code.items()))))"
        for expression in LISTED
    ]
    return "\n".join([*["# a comment"] * margin, PRELUDE, *shown])


def output(path: pathlib.Path, margin: int, hash_seed: str) -> list[str]:
    """Returns what the program prints when run from a file at this path, under this hash seed."""
    path.parent.mkdir()
    path.write_text(program(margin), encoding="utf-8")
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, path.name]
    ran = subprocess.run(command, cwd=path.parent, env=environment, capture_output=True, text=True, check=True)
    return ran.stdout.splitlines()


def test_descriptions_are_the_same_in_every_process(tmp_path: pathlib.Path) -> None:
    """Other hash seeds, folders, files and lines change nothing, and no two of the values have the same words."""
    first = output(tmp_path / "a" / "first.py", 0, "1")
    second = output(tmp_path / "elsewhere" / "second.py", 7, "2")
    assert dict(zip(LISTED, first, strict=True)) == dict(zip(LISTED, second, strict=True))
    alike = collections.defaultdict(list)
    for expression, text in zip(LISTED, first, strict=True):
        alike[text].append(expression)
    assert [expressions for expressions in alike.values() if len(expressions) > 1] == []
    for text in first:
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
        st.lists(inner, max_size=30) | st.dictionaries(hashable, inner, max_size=4) | st.sets(hashable, max_size=4)
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


@example("000\x1f\x1f\x1f\x1f" + 6 * "\U00010000", [])
@settings(deadline=None, max_examples=150)
@given(values, values)
def test_plain_values_are_alike_exactly_if_they_are_equal(one: Any, other: Any) -> None:
    """A nested value has the same words as its copy, and other words than any different value."""
    assert listed(one) == listed(rebuilt(one))
    assert (listed(one) == listed(other)) == (spelled(one) == spelled(other))
    assert len(listed(one)) <= ENTRY_LIMIT
    for text in listed(one).values():
        assert re.fullmatch(f"[ -~]{{0,{TEXT_LIMIT}}}", text)


CLASS = """
class made(Map):
    size = 2
    def __init__(self):
        self.factor = 3
        self._rate = (0.5, [1])
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
WORD_EDITS = [
    ("size = 2", "size = 20", "it.size", "2", "20"),
    ("self.factor = 3", "self.factor = 4", "it.factor", "3", "4"),
    ("(0.5, [1])", "(0.5, [2])", "it._rate", "(0.5, [1])", "(0.5, [2])"),
]
CODE_EDITS = [
    ("gain=1", "gain=2", "made.map"),
    ("self.scale(x) * gain", "self.scale(x) / gain", "made.map"),
    ("x * self.factor", "x + self.factor", "made.scale"),
    ("return x + 1", "return x + 9", "made.still"),
    ("self.factor + 2", "self.factor - 2", "made.shown"),
    ("] * 4", "] * 5", "made.table"),
]


def test_an_edited_parameter_is_seen_in_the_words_and_edited_code_in_its_mark() -> None:
    """Each edit of a class changes exactly what it is about: one text, or the mark of one method."""
    before = define(CLASS)
    for old, new, path, saved, here in WORD_EDITS:
        after = define(CLASS.replace(old, new))
        assert {path: (saved, here)} == {
            key: (text, listed(after)[key]) for key, text in listed(before).items() if listed(after)[key] != text
        }
        assert describe(after).code == describe(before).code
    for old, new, name in CODE_EDITS:
        assert CLASS.count(old) == 1
        after = define(CLASS.replace(old, new))
        assert listed(after) == listed(before)
        marks = describe(before).code
        assert [key for key, mark in describe(after).code.items() if marks[key] != mark] == [name]


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
HARMLESS_EDITS = [
    ('"""Returns more."""', '"""Returns less."""'),
    ("total =", "total   =  "),
    ("total", "result"),
    ("        try:", "\n\n        # A comment.\n        try:"),
    ("def outer", "import os\n\n\ndef outer"),
]


def test_a_function_is_its_name_its_defaults_its_closure_and_its_code() -> None:
    """Defaults and closure are words; operators, constants and names are code; what only people read is neither."""
    assert listed(define(FUNCTION)) == {
        "it": "made",
        "it.y": "5",
        "it.z": "'z'",
        "it.scale": "7",
        "it.shift": "(1, 2)",
    }
    for old, new in [("x * scale", "x + scale"), ("range(3)", "range(4)"), ("ValueError", "TypeError"), ('"a"', '"b"')]:
        after = define(FUNCTION.replace(old, new))
        assert listed(after) == listed(define(FUNCTION))
        assert describe(after).code != describe(define(FUNCTION)).code, new
    for old, new in HARMLESS_EDITS:
        assert FUNCTION.replace(old, new) != FUNCTION
        assert describe(define(FUNCTION.replace(old, new))) == describe(define(FUNCTION)), new


def test_a_private_container_as_a_default_is_a_cache() -> None:
    """The usual way to keep results between calls does not count, neither empty nor filled."""
    empty, filled = (define(f"def made(x, _cache={cache}):\n    return x") for cache in ("{}", "{1: 2}"))
    assert listed(empty) == listed(filled) == {"it": "made"}


class Lazy(Map):
    """An operation that keeps much of what it has seen."""

    def __init__(self) -> None:
        self._table: dict[int, int] = {}
        self._file: Any = None

    @functools.cached_property
    def squares(self) -> list[int]:
        """Made when first used."""
        return [1, 4]

    def map(self, element: int) -> int:
        """Fills every cache."""
        self._table[element] = self.squares[0]
        self._file = self._file or iter(self._table)
        return element


def test_what_cannot_be_pickled_and_cached_properties_do_not_count() -> None:
    """An open file, a lock, a generator or the result of a cached property may come and go without any change."""
    used = Lazy()
    used.map(1)
    used._table.clear()
    assert listed(used) == listed(Lazy()) == {"it": "Lazy", "it._table": "{}"}
    assert describe(types.SimpleNamespace(a=1, lock=threading.Lock())).words.text == "SimpleNamespace(a=1)"


def test_an_object_keeps_its_first_words_as_long_as_it_lives() -> None:
    """What has been described is described alike after use, wherever it is held, and is not kept alive."""
    used = Lazy()
    before = listed(used)
    used.map(1)
    assert listed(used) == before
    assert "'_table': {}" not in str(listed(Map(used.map)))
    assert listed(Lazy()) == before
    key = id(used)
    assert key in words_module._first
    del used
    gc.collect()
    assert key not in words_module._first


def test_arrays_count_by_their_values_whatever_their_layout() -> None:
    """Equal arrays are alike in any memory order; one changed element, dtype or shape is seen."""
    array = np.arange(24.0).reshape(4, 6)
    changed = array.copy()
    changed[2, 3] += 1
    assert listed(array) == listed(np.asfortranarray(array)) == listed(np.repeat(array, 2, axis=0)[::2])
    assert len({str(listed(a)) for a in (array, changed, array.astype("f4"), array.reshape(6, 4), array.T)}) == 5


def test_arrays_of_jax_count_by_their_values() -> None:
    """A parameter may be a JAX array, and a function may be compiled."""
    import jax
    import jax.numpy as jnp

    assert listed(jnp.arange(3)) == listed(jnp.arange(3)) != listed(jnp.arange(1, 4))
    identity, successor = (describe(jax.jit(define(f"made = lambda x: {body}"))).code for body in ("x", "x + 1"))
    assert identity
    assert identity != successor


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
    """Yields values that would take long, or forever, to look at completely."""
    yield list(range(2 * 10**6))
    yield [list(range(1000)) for _ in range(1000)]
    yield {i: [i] * 100 for i in range(20_000)}
    yield set(range(10**6))
    yield {frozenset({i, str(i)}) for i in range(50_000)}
    yield "a" * 10**8
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
    """Vast, deep and entangled values take a bounded time, and few words."""
    for value in vast():
        start = time.process_time()
        assert len(str(listed(value))) < 200 * ENTRY_LIMIT
        assert time.process_time() - start < 5


class Posing:
    """Pretends to be a list, and raises at every access."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return list

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError(name)


@dataclasses.dataclass
class Refusing:
    """Cannot be pickled, and says so."""

    size: int

    def __reduce__(self) -> Any:
        raise TypeError("I am not to be pickled")


def test_whatever_fails_when_looked_at_has_words() -> None:
    """No object makes describing raise, or gets an address into the words; what refuses to be pickled counts, too."""
    for value in (Posing(), threading.Thread(), sys, os.environ, Refusing(2)):
        assert " at 0x" not in str(listed(value))
        assert listed(value) == listed(value)
    assert listed(Refusing(2)) != listed(Refusing(3))


def test_long_values_are_shown_by_their_parts() -> None:
    """A value that is too long for one text is listed part by part, so that the part that differs can be shown."""
    config = types.SimpleNamespace(rates=[0.1] * 9, names={"left": "a" * 40, "right": "b" * 40}, table=list(range(99)))
    assert listed(config) == {
        "it": "SimpleNamespace",
        "it.names": "dict of 2",
        "it.names['left']": repr("a" * 40),
        "it.names['right']": repr("b" * 40),
        "it.rates": "[0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]",
        "it.table": listed(list(range(99)))["it"],
    }
