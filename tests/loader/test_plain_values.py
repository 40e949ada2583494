"""Plain values may be pickled by anyone: the fast way and the general one say the same."""

import io
import pickle
from typing import Any

import numpy as np
import pytest
from elements_of_all_kinds import Pair, array_of, elements
from hypothesis import given, settings
from hypothesis import strategies as st
from streams import comparable

from millstream.loader import class_table
from millstream.loader.class_table import ClassTable
from millstream.loader.plain_values import MOST_CHILDREN, MOST_LEVELS, is_plain

BATCH = np.zeros((4, 3), np.float32)


def pickled_generally(value: Any, buffers: list[bytes]) -> bytes:
    """Returns the pickle of a value that is not looked at first, and puts aside the memory of its arrays."""
    file = io.BytesIO()

    def take_out(buffer: pickle.PickleBuffer) -> bool:
        buffers.append(bytes(buffer.raw()))
        return False

    class_table._NumberingPickler(file, {}, take_out, np.empty).dump(value)
    return file.getvalue()


@given(value=st.one_of(elements, st.integers(0, 10**6).map(array_of), st.lists(elements, min_size=1, max_size=1)))
@settings(deadline=None, max_examples=300)
def test_plain_values_need_no_more_than_pickle(value: Any) -> None:
    """What is plain comes out of both picklers with the same buffers, and as the same value."""
    if not is_plain(value):
        return
    here: list[bytes] = []
    there: list[bytes] = []
    fast = pickle.dumps(value, protocol=5, buffer_callback=lambda buffer: here.append(bytes(buffer.raw())))
    general = pickled_generally(value, there)
    assert here == there
    assert comparable(pickle.loads(fast, buffers=here)) == comparable(pickle.loads(general, buffers=there))
    assert comparable(pickle.loads(fast, buffers=here)) == comparable(value)


@pytest.mark.parametrize(
    "value",
    [
        ({"tokens": BATCH, "labels": [BATCH, (BATCH.T, None)], "step": 3}, b"origins"),
        ([BATCH] * MOST_CHILDREN, b"origins"),
        ["text", 1.5, 2j, True] * MOST_CHILDREN,
        np.array(3),
        BATCH[:0],
    ],
)
def test_batches_are_plain(value: Any) -> None:
    """What most messages carry takes the fast way."""
    assert is_plain(value)


class Text(str):
    """A class of somebody's, which may be pickled in any way."""

    __slots__ = ()


@pytest.mark.parametrize(
    "value",
    [
        Text("x"),
        {Text("x"): BATCH},
        [Pair(BATCH, BATCH)],
        np.float32(3),
        BATCH.view(np.ma.MaskedArray),
        np.array([None]),
        np.array(["2020"], "M8[s]"),
        np.zeros(2, [("a", np.int8)]),
        BATCH[:, ::2],
        [BATCH] * (MOST_CHILDREN + 1),
        int,
        Text,
        len,
    ],
)
def test_all_else_is_left_to_the_general_way(value: Any) -> None:
    """Classes of the user's, arrays that NumPy would copy, and what is too large to look at are not plain."""
    assert not is_plain(value)
    assert not is_plain([{"a": value}])


def test_a_value_that_contains_itself_is_not_looked_at_for_ever() -> None:
    """Nor is one that goes very deep; both are pickled in the general way."""
    loop: list[Any] = []
    loop.append(loop)
    deep: Any = BATCH
    for _ in range(MOST_LEVELS + 1):
        deep = [deep]
    assert not is_plain(loop)
    assert not is_plain(deep)
    (again,) = ClassTable().loads(ClassTable().dumps(loop))
    assert again[0] is again


def test_a_word_that_looks_like_a_class_is_a_word() -> None:
    """Text with the name that stands for a table's classes comes back as text, with and without a table."""
    value = [class_table.class_of_number.__name__, {class_table.__name__: Text("x")}]
    for table in ClassTable(), ClassTable([Text]):
        again = table.loads(table.dumps(value))
        assert again == value
        assert type(again[1][class_table.__name__]) is Text
