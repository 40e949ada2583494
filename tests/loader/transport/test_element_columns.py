"""Elements that cross as columns, and requests with them, are what they were, and cost a few arrays."""

import pickletools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.loader.pipeline.calls import Fed, Group
from millstream.loader.pipeline.elements import Elements, Origins
from millstream.loader.pipeline.recycled_memory import ALIGNMENT
from millstream.loader.transport.payload import (
    LARGE_BYTES,
    UNALIGNED_BYTES,
    dump_request,
    load_request,
    to_columns,
    to_elements,
)
from millstream.loader.transport.pickling import ClassTable
from millstream.transforms.packing.rows import Rows
from support.draw.elements_of_all_kinds import SHAPES, array_of, arrays_in, elements
from support.streams import comparable

NUMBERS = 11 * len(SHAPES) * 6
"""The number of kinds of arrays that `array_of` makes, each with different contents."""


@st.composite
def alike(draw: st.DrawFn, depth: int = 3) -> list[Any]:
    """Draws elements of one structure, whose arrays are alike where their paths are the same."""
    count = draw(st.integers(0, 5))
    kind = draw(st.sampled_from(["dict", "tuple", "leaf"] if depth else ["leaf"]))
    if kind == "leaf":
        number = draw(st.integers(0, NUMBERS - 1))
        scalars = draw(st.sampled_from([range(5), "abcde", [1.5] * 5, [None] * 5]))
        return draw(
            st.sampled_from([[array_of(number + NUMBERS * row) for row in range(count)], list(scalars)[:count]])
        )
    parts = [draw(alike(depth - 1)) for _ in range(draw(st.integers(0, 3)))]
    rows = list(zip(*parts, strict=False)) or [()] * count
    names = draw(st.sampled_from([("a", "b", "c"), ("a", 1, None)]))
    return rows if kind == "tuple" else [dict(zip(names, row, strict=False)) for row in rows]


@given(alike() | st.lists(elements, max_size=4) | st.tuples(alike(), alike()).map(lambda both: both[0] + both[1]))
@settings(deadline=None, max_examples=150)
def test_elements_come_back_unchanged(values: list[Any]) -> None:
    """Structure, keys and their types and order, dtypes, shapes, bytes and writability, alike or not.

    In a request, kind, stage and origins are the same on the other side, too.
    """
    before = [comparable(value) for value in values]
    carried = Elements(values, origins_of(len(values)))
    for request in (Group(3, carried), Fed(carried)):
        received = load_request(dump_request(request, CLASSES), CLASSES)
        assert (type(received), received[:-1]) == (type(request), request[:-1])
        assert list(map(comparable, received.elements.values)) == before
        assert np.array_equal(received.elements.origins.table, carried.origins.table)
    arrived = to_elements(to_columns(values, np.empty))
    assert [comparable(value) for value in arrived] == before == [comparable(value) for value in values]
    for array, original in zip(arrays_in(arrived), arrays_in(values), strict=True):
        assert array.flags.writeable == original.flags.writeable
    for element, original in zip(arrived, values, strict=True):
        if isinstance(element, dict):
            assert [(type(key), key) for key in element] == [(type(key), key) for key in original]


@pytest.mark.parametrize(
    ("row_bytes", "together"),
    [
        (1, True),
        (UNALIGNED_BYTES - 1, True),
        (UNALIGNED_BYTES, True),
        (UNALIGNED_BYTES + 1, False),
        (UNALIGNED_BYTES + ALIGNMENT, True),
        (LARGE_BYTES - ALIGNMENT, True),
        (LARGE_BYTES, False),
    ],
)
def test_small_arrays_cross_together(row_bytes: int, *, together: bool) -> None:
    """Arrays become rows of one where they are small and do not lose the alignment that they are promised."""
    values = [{"image": (np.full(row_bytes, row, np.uint8),), "label": row} for row in range(3)]
    memory: list[np.ndarray[Any, Any]] = []

    def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        memory.append(np.empty(shape, dtype))
        return memory[-1]

    arrived = to_elements(to_columns(values, allocate))
    assert [comparable(value) for value in arrived] == [comparable(value) for value in values]
    assert len(memory) == together
    assert all(np.shares_memory(array, memory[0]) is together for array in arrays_in(arrived) for _ in memory)


@given(
    lengths=st.lists(st.integers(0, 700), min_size=2, max_size=8).filter(lambda lengths: len(set(lengths)) > 1),
    dtype=st.sampled_from(["u1", "<i4", ">i8", "f8", "M8[s]", "S3"]),
    shape=st.sampled_from([(), (2,), (3,), (0,)]),
    writeable=st.booleans(),
)
@settings(deadline=None)
def test_documents_come_back_unchanged(lengths: list[int], dtype: str, shape: tuple[int, ...], writeable: bool) -> None:
    """Arrays that differ in their lengths, with their bytes and writability; large ones as aligned as they were."""
    rng, entry = np.random.default_rng(sum(lengths)), int(np.prod(shape)) * np.dtype(dtype).itemsize
    values = [np.frombuffer(rng.bytes(length * entry), dtype).reshape(length, *shape).copy() for length in lengths]
    for value in values:
        value.flags.writeable = writeable
    arrived = to_elements(to_columns(values, aligned))
    assert [comparable(value) for value in arrived] == [comparable(value) for value in values]
    assert all(array.flags.writeable == writeable for array in arrived)
    if max(array.nbytes for array in values) >= UNALIGNED_BYTES:
        assert all(
            array.__array_interface__["data"][0] % ALIGNMENT == 0
            for array in arrived
            if array.nbytes >= UNALIGNED_BYTES and not any(array is value for value in values)
        )


def aligned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Returns memory as an arena gives it."""
    memory = np.empty(int(np.prod(shape)) * dtype.itemsize + ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % ALIGNMENT
    return memory[start : len(memory) - ALIGNMENT + start].view(dtype).reshape(shape)


def test_documents_cross_in_one_array() -> None:
    """However many there are; unless they are large on average, or would not be aligned."""
    for lengths, dtype, together in (
        ([3, 5, 0], "i4", True),
        ([300, 2000], "i4", True),
        ([1, LARGE_BYTES], "u1", True),
        ([LARGE_BYTES, LARGE_BYTES + 1], "u1", False),
        ([300, 2000], "S3", False),
        ([300, 200], "S3", True),
    ):
        columns = to_columns([np.zeros(length, dtype) for length in lengths], np.empty)
        assert isinstance(columns, list) is not together


def test_an_element_may_contain_itself() -> None:
    """An endless structure is taken apart to a limited depth only, and comes back containing itself."""
    values: list[dict[str, Any]] = [{"image": np.full(3, row)} for row in range(3)]
    for value in values:
        value["self"] = value
    for row, value in enumerate(to_elements(to_columns(values, np.empty))):
        inner = value
        for _ in range(100):
            assert inner["image"].tolist() == [row] * 3
            inner = inner["self"]


def test_an_element_alone_is_left_as_it_is() -> None:
    """A batch, which is one element, costs nothing."""
    batch = [{"image": np.zeros((2, 3))}]
    assert to_columns(batch, np.empty) is batch
    assert to_elements(batch) is batch


CLASSES = ClassTable()


def origins_of(count: int) -> Origins:
    return Origins(np.arange(7 * count).reshape(7, count))


def test_documents_and_rows_are_few_arrays() -> None:
    """Hundreds of documents are one array in the pickle, and rows that were laid out together their columns."""
    documents = [(np.arange(length, dtype=np.int32),) for length in range(1, 300)]
    columns = {name: np.arange(64, dtype=np.int32).reshape(8, 8) for name in ("tokens", "tokens_positions")}
    rows = Rows(columns, {})[2:6]
    for values, num_arrays in ((documents, 1), (rows, 2)):
        data = dump_request(Group(1, Elements(values, origins_of(len(values)))), CLASSES)
        num_buffers = sum(opcode.name.startswith("BYTEARRAY") for opcode, _, _ in pickletools.genops(data))
        assert num_buffers <= num_arrays + 1  # The table of origins is one, too.
        arrived = load_request(data, CLASSES).elements.values
        assert list(map(comparable, arrived)) == list(map(comparable, values))
    assert isinstance(arrived, Rows)
