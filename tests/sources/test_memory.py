"""The sources in memory against plain Python, and what they refuse."""

import collections
import pickle
import types
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.core.columnar import ColumnarRecords
from millstream.dataset import MapDataset
from millstream.sources import ConcatenatedDataSource, InMemoryDataSource, RangeDataSource
from millstream.transforms.batching.stack import stack
from support.draw.elements_of_all_kinds import Example, Pair
from support.faults.memory_limits import measured_peak
from support.processes.worker_pools import environment, python
from support.streams import comparable


@settings(deadline=None)
@given(st.integers(-50, 50), st.integers(-50, 50), st.integers(-7, 7), st.sampled_from([0, 10**30]), st.data())
def test_range_is_pythons_range(start: int, stop: int, step: int, shift: int, data: st.DataObject) -> None:
    """The records are those of `range`, as Python ints of any size; a step of 0 or 2**63 integers are an error."""
    if step == 0:
        with pytest.raises(ValueError, match="step must not be 0"):
            RangeDataSource(start, stop, step)
        return
    expected = range(start + shift, stop + shift, step)
    source = RangeDataSource(start + shift, stop + shift, step)
    keys = data.draw(st.lists(st.sampled_from(range(len(expected))))) if expected else []
    assert len(source) == len(expected)
    assert [source[key] for key in range(len(expected))] == list(expected)
    records = source.__getitems__(keys)
    assert records == [expected[key] for key in keys]
    assert all(type(record) is int for record in records)
    assert RangeDataSource(0, 2**63 - 1)[2**63 - 2] == 2**63 - 2
    for make in (RangeDataSource, MapDataset.range):
        with pytest.raises(ValueError, match=r"fewer than 2\*\*63 integers, got range\(0, 9223372036854775808\)"):
            make(0, 2**63)


def test_sequences_hand_out_their_own_records() -> None:
    """Those of a list, a tuple, and any class with `len` and `[]`; its own `__getitems__` gets all keys as ints."""
    records = [object() for _ in range(9)]
    for sequence in (records, tuple(records), collections.deque(records)):
        source = InMemoryDataSource(sequence)
        assert [source[key] for key in range(9)] == records
        assert list(source.__getitems__([3, 3, 0, 8])) == [records[3], records[3], records[0], records[8]]
    batched = type("Batched", (list,), {"__getitems__": lambda _, keys: [repr(keys)]})
    assert InMemoryDataSource(batched(records)).__getitems__(np.array([2, 0])) == ["[2, 0]"]


@pytest.mark.parametrize("kind", [list, tuple])
def test_containers_are_handed_out_as_copies(kind: Any) -> None:
    """A record that is a dict or list is a copy: the next reader does not see changes to it, or to what it holds."""

    def records() -> list[Any]:
        return [{"number": n, "boxes": [1, 2]} if n % 3 else [n, "a"] if n else n for n in range(5)]

    given = kind(records())
    source = InMemoryDataSource(given)
    for _ in range(2):
        for record in [source[2], *source.__getitems__([2, 4, 2])]:
            record["number"] += 1
            record.pop("boxes").append(3)
        for record in [source[3], *source.__getitems__([3, 3])]:
            record.clear()
    assert list(given) == records()
    assert list(source.__getitems__(range(5))) == records()
    cycle: dict[str, Any] = {}
    cycle["self"] = cycle
    copied = InMemoryDataSource(kind([cycle]))[0]
    assert copied["self"] is copied is not cycle


def row_of_objects(values: list[Any]) -> Any:
    """The values as an array of objects."""
    return np.fromiter(values, dtype=object, count=len(values))


def spoil(value: Any) -> None:
    """Changes all in a record that can be changed, at any level."""
    if isinstance(value, (dict, list, tuple, np.ndarray)) and np.asarray(value, object).dtype == object:
        for member in value.values() if isinstance(value, dict) else value:
            if isinstance(member, (dict, list, tuple, np.ndarray)):
                spoil(member)
    if isinstance(value, (dict, list)):
        value.clear()
    elif isinstance(value, np.ndarray):
        value[...] = 0


@pytest.mark.parametrize("at", [0, 17, 39])
@pytest.mark.parametrize(
    "inner", [lambda: np.ones(2), lambda: [1, 2], lambda: ({"x": [1]}, 1)], ids=["array", "list", "tuple"]
)
@pytest.mark.parametrize("outer", [list, tuple, row_of_objects, lambda values: dict(enumerate(values))])
def test_all_of_a_record_is_copied(outer: Any, inner: Any, at: int) -> None:
    """A value that can be changed is copied, wherever it is among the values of a record of many."""

    def records() -> list[Any]:
        return [outer([*range(at), inner(), *range(39 - at)]) for _ in range(3)]

    held = records()
    source = InMemoryDataSource(held)
    for record in [source[2], *source.__getitems__([2, 1, 2])]:
        spoil(record)
    assert repr(held) == repr(records())


COLUMNS = {
    "array": np.arange(24).reshape(12, 2),
    "dict": {"image": np.arange(36, dtype=np.uint8).reshape(12, 3), "label": np.arange(12, dtype=np.int16)},
    "nested": {"a": {"b": np.arange(12.0), "c": (np.arange(12), np.ones((12, 1, 2)))}, "d": np.arange(12) > 5},
    "tuple": (np.arange(12), np.arange(12) * 1j),
    "named tuple": Pair(np.arange(12, dtype=np.float32), np.arange(12).astype("M8[D]")),
    "dataclass": Example(np.arange(12), [np.ones((12, 2)), types.MappingProxyType({"x": np.arange(12)})]),
    "mapping": types.MappingProxyType({"a": np.arange(12), "none": {}, "nothing": (), "list": []}),
    "objects": {"o": np.array([None, "x"] * 6)},
    "text": {
        "text": np.array([f"word {n}" for n in range(12)]),
        "raw": np.array([b"\0" * n + b"x" for n in range(12)]),
    },
}


def row(columns: Any, key: int) -> Any:
    """The oracle: row `key` of every array."""
    if isinstance(columns, Mapping):
        return {name: row(column, key) for name, column in columns.items()}
    if isinstance(columns, Example):
        return Example(row(columns.image, key), row(columns.label, key))
    if isinstance(columns, list):
        return [row(column, key) for column in columns]
    if isinstance(columns, Pair):
        return Pair(*(row(column, key) for column in columns))
    if isinstance(columns, tuple):
        return tuple(row(column, key) for column in columns)
    return columns[key]


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(sorted(COLUMNS)), st.lists(st.integers(0, 11), min_size=1))
def test_columns_give_rows(kind: str, keys: list[int]) -> None:
    """Record k is row k of every array, and a batch of columns, which text and objects lack, its records stacked."""
    columns = COLUMNS[kind]
    source = InMemoryDataSource(columns)
    expected = [row(columns, key) for key in keys]
    assert len(source) == 12
    assert comparable([source[key] for key in keys]) == comparable(expected)
    records = source.__getitems__(keys)
    assert comparable(list(records)) == comparable(expected)
    assert isinstance(records, ColumnarRecords) == (kind not in ("text", "objects"))
    if isinstance(records, ColumnarRecords):
        assert comparable(stack(records)) == comparable(stack(expected))
        assert len(keys) == 1 or comparable(stack(records[1:])) == comparable(stack(expected[1:]))
        assert comparable(records[-1]) == comparable(expected[-1])


def _views(rows: int) -> dict[str, tuple[Any, Any]]:
    """Returns views of large arrays that are not contiguous or not aligned, each with the same values laid out anew."""
    images = np.zeros((rows, 3, 16, 16), np.uint8)
    images[:] = np.arange(rows, dtype=np.uint8).reshape(-1, 1, 1, 1) + np.arange(16, dtype=np.uint8)
    pairs = np.zeros(rows, [("image", np.uint8, (3, 16, 16)), ("label", np.int32)])
    pairs["image"] = images
    tokens = np.arange(rows * 64, dtype=np.int32)
    unaligned = np.frombuffer(b"x" + tokens.tobytes(), np.uint8)[1:].view(np.int32).reshape(rows, 64)
    views = {
        "transposed": images.transpose(0, 2, 3, 1),
        "half of the columns": images[..., :8],
        "every second row": images[::2],
        "a field": pairs["image"],
        "overlapping windows": np.lib.stride_tricks.sliding_window_view(tokens, 65)[::64],
        "unaligned": unaligned,
        "backwards": tokens[::-1],
    }
    return {name: (view, view.copy()) for name, view in views.items()}


@pytest.mark.parametrize("name", _views(2))
def test_rows_of_a_view_are_read_without_copying_it(name: str) -> None:
    """A batch, a mixed batch, records and a record take memory for themselves, and equal those of a contiguous copy."""
    view, copy = _views(20_000)[name]
    keys = np.random.default_rng(0).integers(0, len(view), 64)
    expected = copy[keys]
    limit = 4 * expected.nbytes + 200_000
    source = InMemoryDataSource({"x": view})
    mixed = ConcatenatedDataSource([source, InMemoryDataSource({"x": view})])
    assert view.nbytes > limit
    with measured_peak() as peak:
        batch = source.__getitems__(keys.tolist()).stack(np.empty)  # type: ignore[attr-defined]
        both = mixed.__getitems__((keys + len(view) * (keys % 2)).tolist()).stack(np.empty)  # type: ignore[attr-defined]
        records = [record["x"] for record in source.__getitems__(keys.tolist())]
        one = source[int(keys[0])]["x"]
        assert peak() < 4 * limit
    for found in (batch["x"], both["x"], np.stack(records)):
        assert np.array_equal(found, expected)
    assert np.array_equal(one, expected[0])
    if view.ndim > 1:
        one[...] = 0
        assert np.array_equal(view[keys[0]], expected[0])


def test_records_of_columns_are_copies() -> None:
    """Changing a record in place leaves the source as it is, however the record was read."""
    pixels = np.zeros((4, 3))
    table = np.zeros(8, dtype=[("x", "i4")])
    source = InMemoryDataSource((pixels, table[:4], table[::2]))
    for record in (source[1], source.__getitems__([1])[0]):
        record[0].fill(1)
        record[1]["x"] = record[2]["x"] = 1
    assert not pixels.any()
    assert not table["x"].any()


@pytest.mark.parametrize(
    ("records", "error", "message"),
    [
        ({"a": np.zeros(3), "b": np.zeros(4)}, ValueError, r"\['a'\] has 3, \['b'\] has 4"),
        ({"a": {"b": np.zeros(3)}, "c": (np.zeros(2),)}, ValueError, r"\['a'\]\['b'\] has 3, \['c'\]\[0\] has 2"),
        ((np.zeros(3), np.zeros(4)), ValueError, r"\[0\] has 3, \[1\] has 4"),
        ({"a": np.array(3)}, ValueError, r"Column \['a'\] must have one row per record, got a 0-dimensional"),
        (np.array(3), ValueError, "0-dimensional"),
        ({"a": [1, 2]}, TypeError, r"Column \['a'\]\[0\] must .*got int: pass np\.asarray.*, also of a list"),
        ({"a": None}, TypeError, r"Column \['a'\] must be .*got NoneType"),
        ({"a": np.ma.masked_array([1, 2], [True, False])}, TypeError, "got MaskedArray"),
        ({1, 2}, TypeError, "must be a sequence of records.* got set"),
        (iter([1]), TypeError, r"must be a sequence of records.*: an iterator has no random access\. Pass list"),
        (types.MappingProxyType({"a": [1, 2]}), TypeError, r"Column \['a'\]\[0\] must be"),
    ],
)
def test_what_is_no_source_is_refused(records: Any, error: type[Exception], message: str) -> None:
    """Each wrong argument has its own message, which names the column and what is wrong with it."""
    with pytest.raises(error, match=message):
        InMemoryDataSource(records)


DIFFERENT: list[Any] = [
    [1, 2, 3],
    [1, 2, 4],
    [1, 2, 3, 4],
    [1.0, 2.0, 3.0],
    [True, 2, 3],
    ["1", "2", "3"],
    [b"1", b"2", b"3"],
    [[1], [2], [3]],
    [(1,), (2,), (3,)],
    [{"a": 1}, {"a": 2}, {"a": 3}],
    [{"b": 1}, {"b": 2}, {"b": 3}],
    [None, None, None],
    [{"a"}, {"b"}, {"c"}],
    np.array([1, 2, 3]),
    np.array([1, 2, 3], dtype=np.int32),
    np.array([1, 2, 4]),
    np.array(["a", "b", None], dtype=object),
    {"a": np.array([1, 2, 3])},
    {"b": np.array([1, 2, 3])},
    {"a": np.array([[1], [2], [3]])},
    (np.array([1, 2, 3]),),
]


def fingerprints() -> list[str]:
    return [InMemoryDataSource(records).fingerprint() for records in DIFFERENT]


def test_fingerprints_tell_sources_apart() -> None:
    """Another length, type, dtype, shape, name or value is another fingerprint; a copy has the same."""
    assert len(set(fingerprints())) == len(DIFFERENT)
    assert [InMemoryDataSource(pickle.loads(pickle.dumps(r))).fingerprint() for r in DIFFERENT] == fingerprints()
    assert RangeDataSource(0, 10, 3).fingerprint() == "Range start=0 stop=10 step=3"
    columns = InMemoryDataSource({"x": np.zeros((2, 3), np.uint8)})
    assert columns.fingerprint().startswith("InMemory records=2 ['x']=uint8[3] crc32=")
    # The last record counts, although its number has more digits than a float; few are read.
    for count in (1 << 60, (1 << 63) - 1):
        assert InMemoryDataSource(range(count)).fingerprint() != InMemoryDataSource(range(count - 1)).fingerprint()


def test_fingerprints_are_the_same_in_every_process() -> None:
    """A fingerprint does not depend on addresses, hash seeds or interned strings."""
    program = (
        "import importlib.util, sys; spec = importlib.util.spec_from_file_location('here', sys.argv[1]);"
        "module = importlib.util.module_from_spec(spec); sys.modules['here'] = module;"
        "spec.loader.exec_module(module); print('\\n'.join(module.fingerprints()))"
    )
    answer = python("-c", program, __file__, env=environment() | {"PYTHONHASHSEED": "1"}, check=True)
    assert answer.stdout.split("\n")[:-1] == fingerprints()


def test_records_that_shared_memory_would_change_are_refused() -> None:
    """In a process of its own, because workers of one that uses shared memory share Python's tracker of it."""
    script = """
import millstream
for records in (b"text", *([0, record] for record in ({}, 2**63, -(2**63) - 1, b"a\\0", "a\\0", millstream))):
    try:
        millstream.InMemoryDataSource(records, name="records-of-a-test")
    except TypeError as error:
        print(str(error).partition("got ")[2])
try:
    millstream.InMemoryDataSource(name="records-of-a-test")
except FileNotFoundError as error:
    print(*error.__notes__)
"""
    assert python("-c", script, check=True).stdout.splitlines() == [
        "bytes.",
        *(f"{kind} as record 1." for kind in ("dict", "int", "int", "bytes", "str", "module")),
        "Create InMemoryDataSource(records, name='records-of-a-test') first, in a process of this machine.",
    ]
