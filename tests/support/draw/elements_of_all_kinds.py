"""Elements of every kind that a pipeline may yield."""

import collections
import dataclasses
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
STRUCTURED = np.dtype([("place", np.int16), ("name", "<U3"), ("weights", np.float32, (2,))])
SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (2, 3), (40, 41), (33, 8, 60)]
"""From no element to 15,840: arrays of a few bytes up to 250 KB, on both sides of every limit in the transport."""


class Pair(NamedTuple):
    """A named tuple."""

    first: Any
    second: Any


@dataclasses.dataclass
class Example:
    """A dataclass."""

    image: Any
    label: Any


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenExample:
    """A dataclass without a `__dict__`."""

    image: Any


DTYPES = [*map(np.dtype, ["u1", "i8", ">i4", "f4", "c16", "?", "<U5", "S3", "M8[s]"]), BFLOAT16, STRUCTURED]


def array_of(number: int) -> NDArray[Any]:
    """Returns an array that a number says all about: its dtype, shape, layout, flags and content."""
    number, which = divmod(number, len(DTYPES))
    number, shape = divmod(number, len(SHAPES))
    number, layout = divmod(number, 6)
    return with_layout(filled(SHAPES[shape], DTYPES[which], number), layout)


def filled(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> NDArray[Any]:
    """Returns an array of a shape and dtype with content that differs from seed to seed."""
    count = int(np.prod(shape))
    if dtype.kind == "U":
        return np.array([f"{seed}é{i}"[:5] for i in range(count)], dtype=dtype).reshape(shape)
    if dtype.names:
        array = np.zeros(shape, dtype)
        for name in dtype.names:
            field = array[name]
            field[...] = filled(field.shape, field.dtype, seed)
        return array
    numbers = np.random.default_rng(seed).integers(0, 2, count * dtype.itemsize, dtype=np.uint8)
    scale = 1 if dtype.kind == "b" else 97
    return np.frombuffer((numbers * scale).tobytes(), dtype=dtype).reshape(shape).copy()


def with_layout(array: NDArray[Any], layout: int) -> NDArray[Any]:
    """Returns the same array, laid out in memory in one of six ways."""
    if layout == 1:
        return np.array(array, order="F")
    if layout == 2 and array.ndim:
        return np.repeat(array, 2, axis=0)[::2]
    if layout == 3 and array.ndim > 1:
        return np.ascontiguousarray(array.swapaxes(0, 1)).swapaxes(0, 1)
    if layout == 4:
        array.flags.writeable = False
    if layout == 5 and array.ndim:
        return array[::-1]
    return array


def object_array(values: list[Any]) -> NDArray[Any]:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**80), 2**80),
    st.floats(),
    st.complex_numbers(),
    st.text(max_size=8),
    st.binary(max_size=8),
    st.integers(2_000, 60_000).map(bytes),
    st.integers(2_000, 60_000).map("é".__mul__),
    st.sampled_from([bytearray(2000), np.float32(1.5), np.datetime64("2020-01-01")]),
    st.builds(np.int8, st.integers(-128, 127)),
    st.builds(ml_dtypes.bfloat16, st.floats(-100, 100)),
)
arrays = st.builds(array_of, st.integers(0, 11 * len(SHAPES) * 6 * 5 - 1))
leaves = st.one_of(scalars, arrays, arrays, st.builds(object_array, st.lists(scalars, max_size=3)))
elements = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers(0, 5)), inner, max_size=3),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(collections.OrderedDict),
        st.builds(Pair, inner, inner),
        st.builds(Example, inner, inner),
        st.builds(FrozenExample, inner),
    ),
    max_leaves=6,
)


def arrays_in(element: Any) -> list[NDArray[Any]]:
    """Returns the arrays in an element."""
    if isinstance(element, np.ndarray):
        return [element]
    if dataclasses.is_dataclass(element) and not isinstance(element, type):
        element = [getattr(element, field.name) for field in dataclasses.fields(element)]
    children = element.values() if isinstance(element, dict) else element if isinstance(element, list | tuple) else ()
    return [array for child in children for array in arrays_in(child)]
