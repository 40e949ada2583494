"""WindowDataSource: windows of consecutive records of a source, and within its records."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream import WindowDataSource
from millstream.sources import InMemoryDataSource
from support.faults.memory_limits import measured_peak
from support.files.record_files import write_zarr

GROUPS = st.lists(st.integers(0, 12), min_size=1, max_size=8)


def expected_starts(groups: list[int], size: int, stride: int) -> list[tuple[int, int]]:
    """Returns the number of the group, and the offset in it, of each window."""
    return [(number, start) for number, group in enumerate(groups) for start in range(0, group - size + 1, stride)]


@settings(max_examples=80)
@given(groups=GROUPS, size=st.integers(1, 5), stride=st.integers(1, 4), data=st.data())
def test_windows_are_those_of_each_group(groups: list[int], size: int, stride: int, data: st.DataObject) -> None:
    """Any keys, in columns or one by one, within records or over them, give the windows that a loop finds."""
    expected = expected_starts(groups, size, stride)
    kind = data.draw(st.sampled_from(["records", "columns", "within"]))
    begins = np.cumsum([0, *groups])
    rows = np.arange(begins[-1] * 2).reshape(-1, 2)
    source: Any = [{"x": row, "n": number, "name": f"{number}"} for number, row in enumerate(rows)]
    options: dict[str, Any] = {"groups": groups}
    if kind == "columns":
        source = InMemoryDataSource({"x": rows, "n": np.arange(len(rows))})
    if kind == "within":
        source, options = (
            [rows[start : start + group] for start, group in zip(begins, groups, strict=False)],
            {"lengths": groups},
        )
    if not expected:
        with pytest.raises(ValueError, match=r"size must be at most|at least one record"):
            WindowDataSource(source, size, stride=stride, **options)
        return
    windows = WindowDataSource(source, size, stride=stride, **options)
    assert len(windows) == len(expected)
    keys = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=9))
    for key, found in zip(keys, windows.__getitems__(keys), strict=True):
        number, start = expected[key]
        first = begins[number] + start
        if kind == "within":
            assert found.tolist() == rows[first : first + size].tolist()
            continue
        assert found["x"].tolist() == rows[first : first + size].tolist()
        assert found["n"].tolist() == list(range(first, first + size))
        assert kind == "columns" or found["name"].tolist() == [str(n) for n in range(first, first + size)]
        found["x"][:] = -1
    assert [repr(windows[key]) for key in keys] == list(
        map(repr, pickle.loads(pickle.dumps(windows)).__getitems__(keys))
    )


class Units:
    """A source that is read in units, and counts the records that it reads."""

    def __init__(self, sizes: list[int]) -> None:
        self.unit_sizes, self.window_units, self.reads = np.array(sizes), 2, list[int]()

    def __len__(self) -> int:
        return int(self.unit_sizes.sum())

    def __getitem__(self, key: int) -> int:
        return key

    def __getitems__(self, keys: list[int]) -> list[int]:
        self.reads += keys
        return keys

    def locate(self, key: int) -> tuple[str, int]:
        return "file", key


@settings(max_examples=60)
@given(sizes=GROUPS.filter(any), stride=st.integers(1, 4), size=st.integers(1, 4), data=st.data())
def test_units_are_those_in_which_windows_begin(sizes: list[int], stride: int, size: int, data: st.DataObject) -> None:
    """Each window belongs to the unit of its first record, also within records, whatever the groups are."""
    source = Units(sizes)
    ends = sorted(data.draw(st.lists(st.integers(0, len(source)), max_size=3)))
    groups = np.diff([0, *ends, len(source)]).tolist()
    counts = data.draw(st.lists(st.integers(0, 6), min_size=len(source), max_size=len(source)))
    for options, series in (({"groups": groups}, groups), ({"lengths": counts}, counts)):
        expected = expected_starts(series, size, stride)
        if not expected:
            continue
        windows = WindowDataSource(source, size, stride=stride, **options)
        records = [
            number if "lengths" in options else int(np.cumsum([0, *groups])[number]) + start
            for number, start in expected
        ]
        units = np.searchsorted(np.cumsum(sizes), records, side="right")
        assert windows.unit_sizes is not None
        assert windows.unit_sizes.tolist() == np.bincount(units, minlength=len(sizes)).tolist()
        assert [windows.locate(key) for key in range(len(windows))] == [("file", record) for record in records]


def test_a_read_costs_the_same_for_any_number_of_groups() -> None:
    """It allocates no array that is as long as the groups."""
    windows = WindowDataSource(range(2_000_000), 2, groups=np.full(1_000_000, 2))
    with measured_peak() as peak:
        assert [window.tolist() for window in windows.__getitems__([5, 999_999])] == [[10, 11], [1_999_998, 1_999_999]]
        assert peak() < 100_000


def test_records_of_a_batch_are_read_once_and_load_shuffles_in_units() -> None:
    """Windows that overlap share their records; the order is that of the units below."""
    source = Units([10] * 10)
    windows = WindowDataSource(source, 4)
    windows.__getitems__([3, 5, 4, 3])
    assert source.reads == [3, 4, 5, 6, 7, 8]
    made = millstream.load(windows, shuffle=True, seed=0, num_epochs=1, batch_size=8)
    assert isinstance(made.sampler, millstream.HierarchicalSampler)
    assert sorted(np.concatenate(list(made))[:, 0].tolist()) == list(range(97))
    assert not hasattr(WindowDataSource([1, 2], 2), "locate")


@pytest.mark.third_party
def test_windows_of_files(tmp_path: Path) -> None:
    """Of Parquet and Zarr, with workers, windows are those of the rows; a state of another size is refused."""
    rows = np.arange(60, dtype=np.float32).reshape(20, 3)
    write_zarr(tmp_path / "x", rows, 4)
    pq.write_table(pa.table({"x": list(rows)}), tmp_path / "rows.parquet", row_group_size=4)
    for source in (
        millstream.ZarrDataSource({"x": tmp_path / "x"}),
        millstream.ParquetDataSource(tmp_path / "rows.parquet"),
    ):
        windows = WindowDataSource(source, 3, groups=[12, 8])
        made = millstream.load(windows, num_epochs=1, batch_size=4, worker_count=1)
        with iter(made) as batches:
            first, state, second = next(batches), batches.get_state(), next(batches)
        found = np.concatenate([first["x"], second["x"]])
        assert found.tolist() == [rows[start : start + 3].tolist() for start in range(8)]
        other = millstream.load(WindowDataSource(source, 2, groups=[12, 8]), num_epochs=1, batch_size=4)
        with pytest.raises(millstream.CheckpointError, match="size"):
            iter(other).set_state(state)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"size": 0}, ValueError, "size must be at least 1, got 0"),
        ({"size": 6}, ValueError, "size must be at most 5, the largest of the records, got 6"),
        ({"size": 4, "groups": [3, 2]}, ValueError, "size must be at most 3, the largest of groups, got 4"),
        ({"size": 4, "lengths": [3] * 5}, ValueError, "size must be at most 3, the largest of lengths, got 4"),
        ({"stride": 0}, ValueError, "stride must be at least 1"),
        ({"groups": [3, 3]}, ValueError, "groups must have the sum 5, the number of records, got 6"),
        ({"groups": [6, -1]}, ValueError, "groups must be numbers from 0 on, got -1"),
        ({"groups": [2.5, 2.5]}, TypeError, "groups must be a one-dimensional array of integers, got dtype float64"),
        ({"lengths": [3]}, ValueError, "lengths must have one number for each of the 5 records, got 1"),
        ({"groups": [5], "lengths": [3] * 5}, ValueError, "exclude each other"),
        ({"source": 3}, TypeError, "source"),
        (
            {"source": millstream.MapDataset.range(5).shuffle(seed=0)},
            ValueError,
            "must have the same records in each epoch",
        ),
        ({"length": 1}, TypeError, "did you mean 'lengths'"),
    ],
)
def test_what_does_not_fit_is_refused_when_it_is_built(options: Any, error: type[Exception], text: str) -> None:
    """Each wrong argument is named, with its rule."""
    with pytest.raises(error, match=text):
        WindowDataSource(**{"source": list(range(5)), "size": 2, **options})


@pytest.mark.parametrize(
    ("source", "options", "text"),
    [
        ([np.ones(2), np.ones(3)], {}, r"records 0 to 1 of a window: they must have one shape and dtype, .*\(3,\)"),
        ([{"a": 1}, {"b": 1}], {}, "they must have one structure, got {'a': 1} and {'b': 1}"),
        ([np.ones(2)], {"lengths": [3]}, r"Record 0 has no array of 3 rows, which lengths\[0\] says"),
    ],
)
def test_records_that_do_not_fit_are_named(source: Any, options: Any, text: str) -> None:
    """While reading, with their numbers."""
    with pytest.raises(ValueError, match=text):
        WindowDataSource(source, 2, **options)[0]
