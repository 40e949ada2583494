"""Stacking elements into a batch."""

import collections
import copy
import dataclasses
import enum
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis.extra.numpy as hnp
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from millstream.errors import StackError
from millstream.transforms.batching.stack import Array, stack
from support.draw.elements_of_all_kinds import Example, Pair
from support.streams import comparable


def oracle(elements: list[Any]) -> Any:
    """The batch as the definition says it, one leaf after the other."""
    first = elements[0]
    if first is None:
        return None
    if isinstance(first, dict):
        return {key: oracle([element[key] for element in elements]) for key in first}
    if isinstance(first, Example):
        return Example(oracle([e.image for e in elements]), oracle([e.label for e in elements]))
    if isinstance(first, list | tuple):
        columns = [oracle(list(column)) for column in zip(*elements, strict=True)]
        return Pair(*columns) if isinstance(first, Pair) else type(first)(columns)
    as_objects = isinstance(first, bytes) or (isinstance(first, str) and any("\0" in text for text in elements))
    if not isinstance(first, np.ndarray | np.void) and not as_objects:
        return np.array(elements)
    shape, dtype = ((), np.dtype(object)) if as_objects else (first.shape, first.dtype)
    batch = np.empty((len(elements), *shape), dtype)
    for row, element in enumerate(elements):
        batch[row, ...] = element
    return batch


def assert_same(expected: Any, actual: Any) -> None:
    assert comparable(expected) == comparable(actual)


def leaves(batch: Any) -> Iterator[Array]:
    """Yields the arrays of a batch."""
    if isinstance(batch, np.ndarray):
        yield batch
    elif isinstance(batch, Example):
        yield from leaves((batch.image, batch.label))
    elif batch is not None:
        for child in batch.values() if isinstance(batch, dict) else batch:
            yield from leaves(child)


class Arena:
    """Memory that is handed out piece by piece, 64-byte aligned, full of rubbish, as shared memory is."""

    def __init__(self) -> None:
        self.memory = np.full(1 << 16, 0xA5, np.uint8)
        self.used = -self.memory.ctypes.data % 64
        self.pieces: list[Array] = []

    def __call__(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        piece: Array = np.ndarray(shape, dtype, buffer=self.memory.data, offset=self.used)
        self.used += -(-piece.nbytes // 64) * 64
        self.pieces.append(piece)
        return piece


BOXES = np.dtype([("id", "i4"), ("box", "f4", (2,))])
DTYPES = [*map(np.dtype, ["?", "u1", ">i4", "f2", "f8", "c8", "M8[s]", "m8[D]", "S3", "U2"]), BOXES]
SHAPES = [(), (1,), (3,), (0,), (2, 0, 3), (2, 3), (1, 2, 2)]
OBJECTS = st.none() | st.integers() | st.text()
SCALAR_LEAVES: list[st.SearchStrategy[Any]] = [
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=5),
    st.binary(max_size=5),
    *(hnp.from_dtype(np.dtype(dtype)) for dtype in ["?", "u1", "i8", "f4", "c16", "M8[s]", "m8[D]"]),
    st.binary(min_size=3, max_size=3).map(np.void),
    hnp.arrays(BOXES, ()).map(lambda array: array[()]),
]


ARRAY_LEAVES = st.builds(hnp.arrays, st.sampled_from(DTYPES), st.sampled_from(SHAPES))
OBJECT_LEAVES = st.builds(hnp.arrays, st.just(np.dtype(object)), st.sampled_from(SHAPES), elements=st.just(OBJECTS))
LEAVES = st.sampled_from(SCALAR_LEAVES) | ARRAY_LEAVES | OBJECT_LEAVES

KEYS = ("image", 7, ("a", 1))
CONTAINERS: list[Callable[..., st.SearchStrategy[Any]]] = [
    lambda *parts: st.fixed_dictionaries(dict(zip(KEYS, parts, strict=False))),
    st.tuples,
    lambda *parts: st.tuples(*parts).map(list),
    lambda *parts: st.builds(Pair, *[*parts, st.none(), st.none()][:2]),
    lambda *parts: st.builds(Example, *[*parts, st.none(), st.none()][:2]),
]


def template(depth: int) -> st.SearchStrategy[st.SearchStrategy[Any]]:
    """Draws the structure of an element, and the type, shape and dtype of each leaf: the strategy of such elements."""
    parts = st.lists(st.deferred(lambda: template(depth - 1)), max_size=len(KEYS))
    made = st.builds(lambda container, parts: container(*parts), st.sampled_from(CONTAINERS), parts)
    return LEAVES | made if depth else LEAVES


@settings(max_examples=150)
@given(template(depth=3).flatmap(lambda alike: st.lists(alike, min_size=1, max_size=4)))
def test_stack_equals_the_oracle(elements: list[Any]) -> None:
    """Any nested structure stacks to exactly what the definition says, into the allocator's memory, and apart from it.

    The memory starts as rubbish, so equal bytes mean that every byte was written. Each array lies in it, arrays of
    objects aside. Overwriting the whole batch leaves the elements as they were.
    """
    expected = oracle(elements)
    arena = Arena()
    batch = stack(elements, arena)
    assert_same(expected, batch)
    for leaf in leaves(batch):
        within = not leaf.dtype.hasobject and leaf.size > 0
        assert np.shares_memory(leaf, arena.memory) is within
        assert (leaf.ctypes.data % 64 == 0) or not within
        leaf[...] = np.zeros((), leaf.dtype)
    assert len(arena.pieces) == sum(not leaf.dtype.hasobject for leaf in leaves(batch))
    assert_same(expected, stack(elements))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(-(2**63), 2**64 - 1), min_size=1, max_size=5))
def test_ints_are_exact(ints: list[int]) -> None:
    """Python ints are int64 where all fit, else uint64 where all fit, else an error; never rounded."""
    if max(ints) < 2**63 or min(ints) >= 0:
        batch = stack(ints)
        assert batch.tolist() == ints
        assert batch.dtype == (np.int64 if max(ints) < 2**63 else np.uint64)
    else:
        with pytest.raises(StackError, match="int64") as caught:
            stack(ints)
        assert {min(ints), max(ints)} == {ints[row] for row in caught.value.rows}


@pytest.mark.parametrize(
    ("elements", "dtype"),
    [
        (["a", "bcd", ""], "<U3"),
        (["a"] * 255 + ["b" * 1000], "<U1000"),  # Uneven, but small.
        (["a" * 500] * 255 + ["b" * 4000], "<U4000"),  # Large, but not eight times what the characters take.
        (["a"] * 255 + ["b" * 10_000], "O"),
        (["日本"] * 255 + ["é" * 1_000_000], "O"),
        (["", ""], "<U1"),
        (["日本", "é"], "<U2"),
        ([np.str_("a"), np.str_("bc")], "<U2"),
        (["a\0", "b"], "O"),
        (["a\0b", "c"], "O"),
        ([b"a\0\0", b"", b"\0"], "O"),
        ([np.bytes_(b"ab"), np.bytes_(b"c")], "O"),
    ],
)
def test_text_and_bytes_are_exact(elements: list[Any], dtype: str) -> None:
    """Strings come back as they were, NUL characters at their ends too, and bytes with their trailing zeros."""
    batch = stack(elements)
    assert batch.dtype == dtype
    assert batch.tolist() == elements
    # Objects are those of the elements.
    assert dtype != "O" or all(one is other for one, other in zip(batch, elements, strict=True))


@st.composite
def arrays_of_strings(draw: st.DrawFn) -> list[Array]:
    """Arrays of one shape and one kind of string, of any widths."""
    shape, kind = draw(hnp.array_shapes(min_dims=0, max_dims=2, max_side=3)), draw(st.sampled_from("US"))
    widths = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
    return [draw(hnp.arrays(f"{kind}{width}", shape)) for width in widths]


@settings(max_examples=50)
@given(arrays_of_strings())
def test_arrays_of_strings_of_several_widths_stack(elements: list[Array]) -> None:
    """The batch is as wide as the widest, as NumPy's is; in all else, arrays must agree."""
    assert_same(np.stack(elements), stack(elements))
    with pytest.raises(StackError, match="agree in dtype"):
        stack([*elements, np.ones(elements[0].shape)])
    with pytest.raises(StackError, match="agree in shape"):
        stack([*elements, elements[0][np.newaxis]])


EXACT = st.integers(-(2**53), 2**53)


@given(st.lists(EXACT | st.floats(allow_nan=False), min_size=1, max_size=6))
def test_numbers_of_json_stack_as_numpy_stacks_them(numbers: list[float]) -> None:
    """Ints among floats become floats of the same value, and an int that no float has is refused by its element."""
    kinds = set(map(type, numbers))
    assert_same(np.array(numbers), stack(numbers))
    assert stack(numbers).tolist() == numbers
    if kinds == {int, float}:
        for beyond in (2**53 + 1, -(2**60), 2**2000):
            with pytest.raises(StackError, match=r"must be within 2\*\*53.* at \['x'\], got") as caught:
                stack([{"x": number} for number in [*numbers, beyond]])
            assert caught.value.rows == (len(numbers),)


class Label(enum.IntEnum):
    CAT = 3
    DOG = 5


class Tensor:
    """An array of another library."""

    def __init__(self, values: Any) -> None:
        self.values = np.asarray(values)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Array:
        if self.values.size == 0:
            raise RuntimeError("This tensor has no memory.")
        return np.array(self.values, dtype, copy=copy)


class Tagged(np.ndarray[Any, np.dtype[Any]]):
    """A subclass of numpy's array."""


class Names(list[Any]):
    """A subclass of list."""


class Size(tuple[int, ...]):
    __slots__ = ()


TAGGED = [np.arange(6.0).reshape(2, 3)[:, ::-1].view(Tagged), np.ones((2, 3)).view(Tagged)]


@pytest.mark.parametrize(
    ("elements", "batch"),
    [
        ([Label.CAT, Label.DOG], np.array([3, 5])),
        ([Tensor([1, 2]), Tensor([3, 4])], np.array([[1, 2], [3, 4]])),
        ([Tensor(1.5), Tensor(2.5)], np.array([1.5, 2.5])),
        (TAGGED, np.array([np.asarray(element) for element in TAGGED])),
        ([Names([1]), Names([2])], [np.array([1, 2])]),
        ([Size([1]), Size([2])], (np.array([1, 2]),)),
        ([jnp.ones(2, jnp.bfloat16)] * 3, np.ones((3, 2), jnp.bfloat16)),
        ([jnp.float32(row) for row in range(3)], np.arange(3, dtype=np.float32)),
        (
            [types.MappingProxyType({"a": 1, "b": 2}), types.MappingProxyType({"b": 4, "a": 3})],
            {"a": np.array([1, 3]), "b": np.array([2, 4])},
        ),
    ],
)
def test_values_of_other_classes_become_plain_ones(elements: list[Any], batch: Any) -> None:
    """Enums of numbers, arrays of other libraries, mappings and subclasses stack to plain arrays and structures."""
    assert_same(batch, stack(elements))


@settings(deadline=None, max_examples=100)
@given(
    st.sampled_from(["u1", ">i2", "f4", "c16", "O"]),
    st.sampled_from([(), (3,)]),
    st.integers(1, 6),
    st.lists(
        st.sampled_from(["plain", "flipped", "upside down", "turned", "channels reversed"]), min_size=1, max_size=4
    ),
)
def test_images_of_all_kinds_of_views_stack(
    dtype: str, leading: tuple[int, ...], channels: int, views: list[str]
) -> None:
    """Large arrays stack to what the definition says, whichever way their pixels lie in memory."""
    numbers = np.random.default_rng(len(views)).integers(0, 250, (len(views), *leading, 72, 72, channels)).astype(dtype)
    look: dict[str, Callable[[Array], Array]] = {
        "plain": lambda image: image[..., 2:66, 5:69, :],
        "flipped": lambda image: image[..., 2:66, 68:4:-1, :],
        "upside down": lambda image: image[..., 65:1:-1, 68:4:-1, :],
        "turned": lambda image: np.swapaxes(image[..., 2:66, 68:4:-1, :], -2, -3),
        "channels reversed": lambda image: image[..., 2:66, 68:4:-1, ::-1],
    }
    elements = [look[view](image) for view, image in zip(views, numbers, strict=True)]
    assert_same(oracle(elements), stack(elements))


MIRRORED = np.zeros((64, 64, 3), np.uint8)[:, ::-1]


@pytest.mark.parametrize("other", [MIRRORED[0], MIRRORED[:, 1:], MIRRORED.astype("i1"), MIRRORED[..., 0], np.array(0)])
def test_a_flipped_image_among_others_is_refused(other: Array) -> None:
    """Arrays that differ are an error, wherever the one stands for which the others are copied in another way."""
    for elements in ([MIRRORED, other], [MIRRORED[:, ::-1], MIRRORED, other]):
        with pytest.raises(StackError, match=r"agree in (shape|dtype)") as caught:
            stack(elements)
        assert caught.value.rows == (0, len(elements) - 1)


@given(st.integers(0, 20), st.integers(1, 5), st.randoms(use_true_random=False))
def test_wide_dicts_stack(num_keys: int, num_elements: int, random: Any) -> None:
    """Dicts of any number of keys stack key by key, in the first one's order; one that lacks a key is named."""
    keys = [f"key {number}" for number in range(num_keys)]
    elements = [{key: (row, key) for key in random.sample(keys, num_keys)} for row in range(num_elements)]
    assert_same(oracle(elements), stack(elements))
    if num_keys:
        other = {**elements[0], "another": elements[0][keys[0]]}
        del other[random.choice(keys)]
        with pytest.raises(StackError, match="agree in keys") as caught:
            stack([*elements, other])
        assert caught.value.rows == (0, num_elements)


def test_a_missing_key_is_not_made_up() -> None:
    """Stacking reads the elements and leaves them as they are, also if a mapping would add a key."""
    elements = [collections.defaultdict(int, a=1, b=2), collections.defaultdict(int, a=1, c=2)]
    before = copy.deepcopy(elements)
    with pytest.raises(StackError, match="keys"):
        stack(elements)
    assert elements == before
    source = np.arange(12).reshape(4, 3)
    for views in ([source[0]], list(source), [source[::2, 1:]]):
        assert not np.shares_memory(stack(views), source)


@dataclasses.dataclass
class Scaled:
    """A dataclass with a check, a computed field and a cache, none of which is to run on a batch."""

    value: float
    half: float = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.value, float):
            raise TypeError("value must be a float.")
        self.half = self.value / 2

    @functools.cached_property
    def double(self) -> float:
        return 2 * self.value


def test_dataclasses_are_not_called() -> None:
    """A batch of dataclass instances has every field stacked, without __post_init__ and without stale caches."""
    elements = [Scaled(1.0), Scaled(3.0)]
    assert elements[0].double == 2.0
    batch = stack(elements)
    assert type(batch) is Scaled
    assert_same(np.array([1.0, 3.0]), batch.value)
    assert_same(np.array([0.5, 1.5]), batch.half)
    assert_same(np.array([2.0, 6.0]), batch.double)


ZEROS = np.zeros((2, 3), np.uint8)


class Metres(np.ndarray):
    """An array with a unit, as astropy and unyt have it."""

    @property
    def unit(self) -> object:
        return object()


class Quantity:
    """A quantity of another library, as pint has it."""

    units = object()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        return np.ones(2)


@pytest.mark.parametrize(
    ("elements", "path", "rows", "words"),
    [
        ([], "", (), "at least one element, got none"),
        ([1, 2, "3"], "", (0, 2), "agree in type: element 0 holds int 1, element 2 holds str '3'"),
        ([True, 1, 2.0], "", (0, 1), "agree in type"),
        ([True, 1], "", (0, 1), "bool True, element 1 holds int 1"),
        ([None, 1], "", (0, 1), "NoneType, element 1 holds int 1"),
        ([ZEROS, ZEROS, None], "", (0, 2), 'element 2 holds NoneType.* raise an error .* on_error="skip"'),
        ([{"a": None}, {"a": 1}], "['a']", (0, 1), r"agree in type at \['a'\]"),
        ([np.float32(1), np.float64(1)], "", (0, 1), "float32 .* float64"),
        ([np.datetime64(1, "s"), np.datetime64(1, "D")], "", (0, 1), r"agree in dtype: .*\[s\].*\[D\]"),
        ([{"a": 1, "b": 2}, {"a": 1, "b": 2}, {"b": 2}], "", (0, 2), r"keys \['a', 'b'\], element 2 .* keys \['b'\]"),
        ([{"a": 1}, {"b": 1}], "", (0, 1), "agree in keys"),
        ([{"t": [1]}, {"t": [1, 2]}], "['t']", (0, 1), "agree in length .*np.asarray.* length 1, .* length 2"),
        ([(1, 2), (1,)], "", (0, 1), "agree in length"),
        ([(1,), [1]], "", (0, 1), "tuple of length 1, element 1 holds list of length 1"),
        ([ZEROS, ZEROS[1:], ZEROS], "", (0, 1), r"agree in shape: .*\(2, 3\) and dtype uint8, .*\(1, 3\)"),
        ([ZEROS, ZEROS.T, ZEROS[0]], "", (0, 1), "agree in shape"),
        ([ZEROS[:, :0], ZEROS[:, :0].astype("f4")], "", (0, 1), "agree in dtype: .*uint8, .*float32"),
        ([np.zeros(1, "<i4"), np.zeros(1, ">i4")], "", (0, 1), "agree in dtype"),
        ([np.array(["ab"]), np.array([b"abc"])], "", (0, 1), "agree in dtype: .*<U2, .*|S3"),
        ([Example([Pair(1, z)], 1) for z in (ZEROS, ZEROS.T)], ".image[0].second", (0, 1), r"\.image\[0\]\.s"),
        ([{(1, "k"): 1}, {(1, "k"): "x"}], "[(1, 'k')]", (0, 1), "int 1, element 1 holds str 'x'"),
        ([-1, 2, 2**63], "", (0, 2), "all fit int64, or all fit uint64, got -1 to 9223372036854775808"),
        ([0, 2**64], "", (0, 1), "all fit int64, or all fit uint64"),
        ([{"tags": {1}}] * 2, "['tags']", (0,), r"stack at \['tags'\] set \{1\} of element 0 of a batch: .*Map"),
        ([pa.table({"a": [1]}), pa.table({"a": ["x"]})], "", (0, 1), "agree in schema: .*Table"),
        ([bytearray(b"a")], "", (0,), "bytearray"),
        ([object()], "", (0,), "batch_fn"),
        ([Pair], "", (0,), "Cannot stack"),
        ([np.ma.masked_array([1], [True])], "", (0,), "mask would be lost"),
        ([{"x": np.ma.masked}], "['x']", (0,), "mask would be lost"),
        ([Image.new(mode, (2, 2)) for mode in "LP"], "", (1,), r"palette would be lost.* Call convert\('RGB'\)"),
        ([{"x": Image.new("PA", (2, 2))}], "['x']", (0,), r"the Image at \['x'\] .* palette would be lost"),
        ([np.ones(2).view(Metres)], "", (0,), "the Metres of element 0 .* unit would be lost"),
        ([Quantity()], "", (0,), "the Quantity of element 0 .* unit would be lost"),
        ([Scaled(1.0), object.__new__(Scaled)], "", (1,), "Element 1 .* Scaled whose field value is not set"),
        ([Tensor([])], "", (0,), "Tensor of element 0 of a batch to a NumPy array: This tensor has no m"),
        ([{"a": Tensor([1])}, {"a": Tensor([])}], "['a']", (1,), r"the Tensor at \['a'\] of element 1 of a batch"),
    ],
)
def test_what_does_not_stack_is_refused(elements: list[Any], path: str, rows: tuple[int, ...], words: str) -> None:
    """Elements that do not stack are an error that names the leaf, the elements that differ, and their values."""
    with pytest.raises(StackError, match=words) as caught:
        stack(elements)
    assert (caught.value.path, caught.value.rows) == (path, rows)
    assert len(str(caught.value)) < 400
