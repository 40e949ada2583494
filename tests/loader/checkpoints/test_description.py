"""Descriptions tell values apart, are equal wherever a value is built, and have two tiers."""

import ast
import collections
import dataclasses
import functools
import io
import itertools
import math
import mmap
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
import pytest

import millstream
from millstream.loader.checkpoints.description import (
    ENTRY_LIMIT,
    SAMPLE_BYTES,
    SAMPLE_RUNS,
    TEXT_LIMIT,
    Description,
)
from millstream.transforms import Map


def listed(value: object) -> dict[str, str]:
    return described(value).identity


def content(value: object) -> dict[str, str]:
    return described(value).content


def described(value: object) -> Description:
    found = Description()
    found.add("it", value)
    return found


def define(body: str, name: str = "made", **names: Any) -> Any:
    """Returns what `name` is after running the code, as if a user's file had been edited to hold it."""
    space = {"__name__": "users_module", "functools": functools, "np": np, "Map": Map, **names}
    exec(compile(textwrap.dedent(body), "users_file.py", "exec", dont_inherit=True), space)
    return space[name]


# Values that have the same words whenever they are built, here and in other processes; no two have the same ones.
EXPRESSIONS = """
True | False | 0 | 1 | 2**70 | 10**5000 | 10**5000 + 1 | 1.0 | 0.0 | -0.0 | 1e300 | float("nan") | 1j | "" | "1"
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
np.ones(2, [("a", "i1"), ("b", "i8")]) | np.array(1.0) | np.zeros((0, 3)) | np.zeros(0) | np.arange(0)
functools.partial(max, 1) | functools.partial(max, 2) | functools.partial(min, 1) | functools.partial(max, key=len)
scaled(2) | scaled(3) | Frozen(1, (2, 3)) | Frozen(1, (2, 4)) | Slots(1) | Slots(2) | Scale(2) | Scale(3) | Scale(2).map
Scale(3).map | Child(2) | Map(scaled(2)) | Map(scaled(3)) | Cyclic() | Private(2) | Private(3)
Stateful(1, 2) | Stateful(3, 2) | Local(4) | Local(5) | ["a", "b"] | ["a, b"] | ["a', 'b"] | {1: 2} | {"1: 2"}
[[1, 2]] | [[1], [2]] | [(1, 2)] | {(1, 2)} | {1, 2} | {1: [2]} | {(1,): 2} | [{1}, 2]
Tool.CALL | Tool.CALL_3 | Tool.NAMES | Tool.PAIR | [Tool.PAIR] | [Tool.NAMES]
cmath.sqrt | len | abs | str.lower | list[int] | list[str] | slice(2) | slice(3) | np.sqrt | np.sin
"000" + 4 * "\x1f" + 6 * "\U00010000"
"""
PRELUDE = '''
import cmath, collections, dataclasses, enum, functools, math, operator, os, pathlib, re, sys, threading, types
import numpy as np
from millstream.loader.checkpoints.description import Description
from millstream.transforms import Map

class Color(enum.Enum):
    RED = "r"
    BLUE = "b"

class Tool(enum.Enum):
    CALL = functools.partial(max)
    CALL_3 = functools.partial(max, 3)
    NAMES = frozenset({"a", "b", "c", "d"})
    PAIR = ("é", object())

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
        f"d = Description(); d.add('it', {expression}); print(ascii((d.identity, sorted(d.content.items()))))"
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
        identity, _ = ast.literal_eval(text)
        assert all(re.fullmatch(f"[ -~]{{0,{TEXT_LIMIT}}}", each) for each in identity.values())
        assert str(tmp_path) not in text
        assert " at 0x" not in text


CLASS = """
class made(Map):
    _SIZE = 2
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
    ("_SIZE = 2", "_SIZE = 20", "it._SIZE", "2", "20"),
    ("self.factor = 3", "self.factor = 4", "it.factor", "3", "4"),
    ("(0.5, [1])", "(0.5, [2])", "it._rate", "(0.5, [1])", "(0.5, [2])"),
]
CODE_EDITS = [
    ("self.scale(x) * gain", "self.scale(x) / gain", "map"),
    ("x * self.factor", "x + self.factor", "scale"),
    ("return x + 1", "return x + 9", "still"),
    ("self.factor + 2", "self.factor - 2", "shown"),
    ("] * 4", "] * 5", "table"),
]


def test_an_edited_parameter_is_seen_in_the_words_and_edited_code_in_its_mark() -> None:
    """Each edit of a class changes exactly what it is about: one text, or the mark of one method."""
    before = operation(CLASS)
    for old, new, path, saved, here in WORD_EDITS:
        after = operation(CLASS.replace(old, new))
        assert after.content == before.content
        assert after.identity == before.identity | {path: here}
        assert before.identity[path] == saved
    for old, new, name in CODE_EDITS:
        assert CLASS.count(old) == 1
        after = operation(CLASS.replace(old, new))
        assert after.identity == before.identity
        marks = before.content
        assert [key for key, mark in after.content.items() if marks[key] != mark] == [f"it.{name}()"]


def operation(body: str) -> Description:
    found = Description()
    found.add_object("it", define(body), "Map made")
    return found


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


def test_a_function_is_its_name_and_its_content_is_defaults_closure_and_code() -> None:
    """Defaults and closure have paths of their own; what only people read does not count."""
    assert listed(define(FUNCTION)) == {"it": "made"}
    before = content(define(FUNCTION))
    assert before.pop("it()").startswith("code #")
    assert before == {"it.y": "5", "it.z": "'z'", "it.scale": "7", "it.shift": "(1, 2)"}
    for old, new in [("x * scale", "x + scale"), ("range(3)", "range(4)"), ("ValueError", "TypeError"), ('"a"', '"b"')]:
        after = define(FUNCTION.replace(old, new))
        assert listed(after) == listed(define(FUNCTION))
        assert content(after)["it()"] != content(define(FUNCTION))["it()"], new
    for old, new in HARMLESS_EDITS:
        assert FUNCTION.replace(old, new) != FUNCTION
        assert vars(described(define(FUNCTION.replace(old, new)))) == vars(described(define(FUNCTION))), new


def test_a_private_container_as_a_default_is_a_cache() -> None:
    """The usual way to keep results between calls does not count, neither empty nor filled."""
    empty, filled = (define(f"def made(x, _cache={cache}):\n    return x") for cache in ("{}", "{1: 2}"))
    assert vars(described(empty)) == vars(described(filled))


class Tokenizer:
    """An object of another library."""

    def __init__(self) -> None:
        self.calls = 0


@dataclasses.dataclass
class Settings:
    sizes: tuple[int, ...]
    tokenizer: Any = None


class Cached(Map):
    @functools.cached_property
    def table(self) -> list[int]:
        return [1, 4]

    def map(self, element: Any) -> Any:
        return element


class Named:
    """An object that says what it is."""

    def __init__(self, noise: int) -> None:
        self.noise = noise

    def fingerprint(self) -> str:
        return "a"


@pytest.mark.parametrize(
    ("value", "identity", "others"),
    [
        ([1, 3], {""}, set()),
        (np.ones(3), {""}, set()),
        (slice(3), {""}, set()),
        (len, {""}, set()),
        (Named(1), {""}, set()),
        (Settings((3,), Tokenizer()), {"", ".sizes"}, {".tokenizer"}),
        (np.zeros(10**5), set(), {""}),
        (list(range(10**5)), set(), {""}),
        (pathlib.PurePath("a"), set(), {""}),
        (threading.Lock(), set(), set()),
        (io.StringIO(), set(), set()),
        (None, set(), set()),
        (np.random.default_rng(0), set(), set()),
    ],
    ids=lambda value: "" if isinstance(value, set) else str(value)[:24],
)
def test_each_kind_of_value_has_its_tier(value: object, identity: set[str], others: set[str]) -> None:
    """Plain values, small arrays and fingerprints are identity; objects and what is large are content."""
    found = described(value)
    assert {path.removeprefix("it") for path in found.identity} == identity
    assert {path.removeprefix("it") for path in found.content if not path.endswith("()")} == others


def test_what_was_made_when_first_used_does_not_count() -> None:
    """The result of a cached property may come and go; an object that says what it is may change within."""
    used = Cached()
    assert used.table == [1, 4]
    assert vars(described(used)) == vars(described(Cached()))
    assert listed(Named(1)) == listed(Named(3)) == {"it": "Named(a)"}


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
    identity, successor = (content(jax.jit(define(f"made = lambda x: {body}"))) for body in ("x", "x + 1"))
    assert identity
    assert identity != successor


def chain(length: int) -> list[Any]:
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
        assert len(str(vars(described(value)))) < 200 * ENTRY_LIMIT
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
        assert " at 0x" not in str(vars(described(value)))
        assert vars(described(value)) == vars(described(value))
    assert listed(Refusing(2)) != listed(Refusing(3))


def test_objects_are_described_by_attribute_and_long_values_by_a_crc() -> None:
    """An object that declares its attributes has a text for each, so that the one that differs can be shown."""
    config = types.SimpleNamespace(rates=[0.1] * 9, names={"left": "a" * 40, "right": "b" * 40})
    assert listed(config) == {
        "it": "SimpleNamespace",
        "it.names": listed({"left": "a" * 40, "right": "b" * 40})["it"],
        "it.rates": "[0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]",
    }
    for kind, value in (("list", [0.5] * 99), ("dict", dict.fromkeys(range(99), "a"))):
        assert re.fullmatch(kind + r" of 99 #[0-9a-f]{8}", listed(value)["it"])


class Counted:
    """An array of any size, in a file for instance, that counts the bytes and the runs that are read."""

    shape: tuple[int, ...] = ()
    dtype: Any = None

    def __init__(self, shape: tuple[int, ...], dtype: str, changed: int = -1) -> None:
        self.shape, self.dtype = shape, np.dtype(dtype)
        self.changed = changed
        self.num_bytes = self.num_runs = 0

    def __getitem__(self, index: Any) -> Any:
        starts = [key if isinstance(key, int) else key.start for key in index]
        first = int(np.ravel_multi_index((*starts, *[0] * (len(self.shape) - len(index))), self.shape))
        below = self.shape[len(index) :]
        found = np.arange(first, first + (index[-1].stop - index[-1].start) * math.prod(below))
        self.num_bytes += len(found) * self.dtype.itemsize
        self.num_runs += 1
        return (found == self.changed).astype(self.dtype)

    def __array__(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError(arguments, options)


@pytest.mark.parametrize("dtype", ["u1", "f8"])
@pytest.mark.parametrize("shape", [(10**7,), (10**5, 10**5), (10**4, 3, 10**8), (7, 10**13), (10**9, 2, 2)], ids=str)
def test_an_array_of_any_size_costs_a_few_runs(shape: tuple[int, ...], dtype: str) -> None:
    """At most SAMPLE_BYTES, in SAMPLE_RUNS runs, from the first value to the last. Changes there are seen."""
    texts = []
    for changed in (-1, 0, math.prod(shape) - 1):
        array = Counted(shape, dtype, changed)
        texts.append(content(array)["it"])
        assert 0 < array.num_bytes <= SAMPLE_BYTES
        assert array.num_runs <= SAMPLE_RUNS
    assert len(set(texts)) == 3


def test_many_arrays_cost_as_much_as_one() -> None:
    """A value that holds several has few bytes for each."""
    for build in (list, lambda arrays: dict(enumerate(arrays)), lambda arrays: {"a": [tuple(arrays)]}):
        arrays = [Counted((10**9,), "f8") for _ in range(300)]
        content(build(arrays))
        assert sum(array.num_bytes for array in arrays) < 2 * SAMPLE_BYTES
        assert all(array.num_bytes for array in arrays)


def test_large_values_in_memory_and_in_files_are_content_of_a_few_runs(tmp_path: pathlib.Path) -> None:
    """Bytes, text, memory maps and buffers of 100 MB take milliseconds, and their ends count."""
    size = 10**8
    (tmp_path / "data").touch()
    os.truncate(tmp_path / "data", size)
    found = []
    for end in (b"\0", b"\1"):
        with (tmp_path / "data").open("r+b") as file:
            file.seek(size - 1)
            file.write(end)
            file.flush()
            buffer = memoryview(np.memmap(tmp_path / "data", np.uint8, "r"))  # type: ignore[arg-type]
            held = [np.asarray(buffer), np.asarray(buffer).reshape(10, -1).T, buffer, mmap.mmap(file.fileno(), size)]
            held += [b"a" * 10**7 + end, "a" * 10**7 + end.decode()]
            start = time.process_time()
            found.append([content(value)["it"] for value in held])
            assert time.process_time() - start < 2
    assert all(one != other for one, other in zip(*found, strict=True))


class Unreadable:
    """An open file of another library."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, key: int) -> int:
        return key

    def __getstate__(self) -> Any:
        raise TypeError("I am not to be pickled")


@pytest.mark.parametrize("path", ["source", "operations[0]"])
def test_an_object_without_a_state_is_loaded_without_workers(path: str) -> None:
    """Whatever its `__getstate__` raises; with workers, the error names it and says what to do."""

    class Shifting(Unreadable, Map):
        def map(self, element: int) -> int:
            return element

    source: Any = Unreadable() if path == "source" else range(4)
    operations = [Shifting()] if path != "source" else []
    with iter(millstream.load(source, transformations=operations, num_epochs=1, batch_size=2)) as batches:
        state = batches.get_state()
        assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3]]
        batches.set_state(state, strict=True)
    with (
        pytest.raises(TypeError, match=r"(data_source|Shifting).* cannot be sent to worker processes: I am not to be"),
        millstream.load(source, transformations=operations, batch_size=2, worker_count=1) as loader,
    ):
        next(iter(loader))
