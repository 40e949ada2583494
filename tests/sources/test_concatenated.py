"""ConcatenatedDataSource: sources end to end, one read each, errors that name the source."""

import itertools
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream import ConcatenatedDataSource, InMemoryDataSource, RangeDataSource
from millstream.core import tree
from millstream.core.columnar import ColumnarRecords
from millstream.errors import StackError
from millstream.transforms.batching.stack import stack
from support.draw.elements_of_all_kinds import Pair


class Counted:
    """Records 0, 10, 20, …; knows how often it was asked."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, key: int) -> int:
        if key == 3:
            raise RuntimeError("three")
        return 10 * key

    def __getitems__(self, keys: list[int]) -> list[int]:
        self.asked.append(list(keys))
        return [self[key] for key in keys]


@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=6), data=st.data())
def test_it_is_a_list_of_all_records(sizes: list[int], data: st.DataObject) -> None:
    """Any keys, one by one or at once, give the list's records and their origins; in a pickled copy, too."""
    lists = [[(number, key) for key in range(size)] for number, size in enumerate(sizes)]
    expected = list(itertools.chain.from_iterable(lists))
    kinds = [list, tuple, InMemoryDataSource]
    source = ConcatenatedDataSource([data.draw(st.sampled_from(kinds))(records) for records in lists])
    keys = data.draw(st.lists(st.integers(0, len(expected) - 1), min_size=1, max_size=20))
    assert len(source) == len(expected)
    for one in (source, pickle.loads(pickle.dumps(source))):
        assert list(one.__getitems__(keys)) == [expected[key] for key in keys]
        assert list(one.__getitems__(np.array(keys))) == [expected[key] for key in keys]
        assert [one[key] for key in keys] == [expected[key] for key in keys]
    parts, own = source.locate(keys)
    assert list(zip(parts.tolist(), own.tolist(), strict=True)) == [expected[key] for key in keys]


def test_each_source_is_asked_once() -> None:
    """A batch takes one call of each of its sources; like columns are stacked without a record in between."""
    sources = [Counted(3), Counted(3), Counted(3)]
    assert ConcatenatedDataSource(sources).__getitems__([7, 0, 8, 1, 0]) == [10, 0, 20, 10, 0]
    assert [source.asked for source in sources] == [[[0, 1, 0]], [], [[1, 2]]]
    both = ConcatenatedDataSource([InMemoryDataSource({"x": np.arange(count)}) for count in (4, 9)])
    records = both.__getitems__([12, 0, 3, 4])
    assert isinstance(records, ColumnarRecords)
    assert (records.stack(np.empty)["x"].tolist(), "_records" in vars(records)) == ([8, 0, 3, 0], False)


def test_few_records_that_can_be_changed_are_copied_among_many_that_cannot() -> None:
    """A dict is a copy also where it is one record among very many numbers: those of a short list beside a long one."""
    records = [{"a": 1}]
    source = ConcatenatedDataSource([range(5), list(range(1000)), records, list(range(1000))])
    held = ConcatenatedDataSource([list(range(1000)), records, list(range(1000))])
    for concatenated, key in ((source, 1005), (held, 1000)):
        for _ in range(2):
            concatenated.__getitems__([key, 3])[0]["a"] = 3
            concatenated[key]["a"] = 2
    assert records == [{"a": 1}]


def test_an_error_names_the_source_and_its_record() -> None:
    """An error names the source and its record, or that a source returned too few."""
    source = ConcatenatedDataSource({"web": [1, 2], "books": Counted(9)})
    with pytest.raises(RuntimeError, match="three") as caught:
        source[5]
    assert caught.value.__notes__ == ["millstream: in source 'books', its record 3."]
    with pytest.raises(RuntimeError) as caught:
        source.__getitems__([0, 5, 4])
    assert caught.value.__notes__ == ["millstream: in source 'books', its records 3, 2."]
    short = Counted(4)
    short.__getitems__ = lambda keys: [0 for _ in keys[1:]]  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="source 1, a Counted, must return one record per key, got 1 for 2 keys"):
        ConcatenatedDataSource([[1], short]).__getitems__([0, 1, 2])


@pytest.mark.parametrize(
    ("sources", "error", "message"),
    [
        ([], ValueError, "at least one source"),
        ([[1], []], ValueError, "Source 1 must have at least one record"),
        ([[1], 5], TypeError, r"Source 1 must have len\(source\)"),
        ({"a": "path"}, TypeError, "Source 'a' must be a source of records"),
        ("path", TypeError, "must be a list, or a mapping"),
        ([range(2**62)] * 3, ValueError, r"at most 2\*\*63 records"),
    ],
)
def test_what_is_no_list_of_sources_is_refused(sources: Any, error: type[Exception], message: str) -> None:
    """Anything but a list or mapping of sources with records is an error at construction."""
    with pytest.raises(error, match=message):
        ConcatenatedDataSource(sources)


def test_fingerprints_follow_the_parts() -> None:
    """Another part, another name or another order is another source."""
    texts = [
        ConcatenatedDataSource(parts).fingerprint()
        for parts in (
            [RangeDataSource(0, 5), RangeDataSource(0, 6)],
            [RangeDataSource(0, 6), RangeDataSource(0, 5)],
            {"a": RangeDataSource(0, 5), "b": RangeDataSource(0, 6)},
            [RangeDataSource(0, 5)] * 30,
        )
    ]
    assert len(set(texts)) == 4
    assert max(map(len, texts)) < 250


def test_closing_closes_the_parts() -> None:
    """`close` closes those parts that can be closed."""
    part, closed = Counted(3), []
    part.close = lambda: closed.append(part)  # type: ignore[attr-defined]
    with ConcatenatedDataSource([part, [1]]):
        pass
    assert closed == [part]


COLUMNS: list[Callable[[int], Any]] = [
    lambda n: {"x": np.arange(n), "y": np.ones((n, 2), np.float32)},
    lambda n: {"y": np.ones((n, 2), np.float32), "x": np.arange(n)},
    lambda n: {"x": np.arange(n), "y": np.ones((n, 3), np.float32)},
    lambda n: {"x": np.arange(n, dtype=np.int32), "y": np.ones((n, 2), np.float32)},
    lambda n: (np.arange(n), np.zeros(n)),
    lambda n: Pair(np.arange(n), np.zeros(n)),
    lambda n: {"x": [np.arange(n)], "y": np.ones((n, 2), np.float32)},
    lambda n: {"x": np.array([f"{k:03}" for k in range(n)])},
    lambda n: np.arange(3 * n).reshape(n, 3),
]
"""Columns of n rows: alike, alike but for the order of their names, and unlike."""


def outcome(records: Sequence[Any]) -> Any:
    """Returns the batch of records in a form that can be compared, or the error's text."""
    try:
        batch = stack(records)
    except StackError as error:
        return str(error)
    return [(path, leaf.dtype, leaf.tolist()) for path, leaf in tree.leaves(batch)], repr(batch)


@given(data=st.data(), kinds=st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=4), alike=st.booleans())
def test_columns_are_stacked_as_their_records_are(
    data: st.DataObject, kinds: list[Callable[[int], Any]], alike: bool
) -> None:
    """A batch of columns of several sources is that of their records, and so is the error where they do not stack."""
    parts = [(kinds[0] if alike else kind)(data.draw(st.integers(1, 5))) for kind in kinds]
    source = ConcatenatedDataSource([InMemoryDataSource(columns) for columns in parts])
    keys = data.draw(st.lists(st.integers(0, len(source) - 1), min_size=1, max_size=12))
    records = source.__getitems__(keys)

    assert outcome(records) == outcome([source[key] for key in keys])
    assert outcome(records[2:]) == outcome([source[key] for key in keys[2:]])
