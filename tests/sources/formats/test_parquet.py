"""Parquet files: types, batches made of columns, row groups that are kept, damage, and files in stores."""

import datetime as dt
import decimal
import operator
import pickle
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as pads
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyarrow.parquet import encryption

import millstream
from millstream.core import tree
from millstream.core.columnar import ColumnarRecords
from millstream.errors import DataSourceError
from millstream.sources import FileCache, ParquetDataSource
from millstream.sources.arrow.tables import normalised, plain_types
from millstream.sources.formats import parquet
from millstream.sources.remote import object_stores
from millstream.transforms.batching.stack import stack
from support.files.record_files import every_record
from support.stores.object_server import ObjectServer
from support.streams import same

ROWS = 100


def table_of(rows: int = ROWS) -> pa.Table:
    """Returns a table of the usual kinds of columns."""
    return pa.table(
        {
            "id": pa.array(range(rows), pa.int64()),
            "label": pa.array([number % 7 for number in range(rows)], pa.int32()),
            "text": pa.array([f"row {number} é" for number in range(rows)], pa.string()),
            "image": pa.array([b"%d\0" % number for number in range(rows)], pa.binary()),
            "tokens": pa.array([[number, number + 1, 7] for number in range(rows)], pa.list_(pa.uint16())),
        }
    )


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of a hundred rows in row groups of 30."""
    pq.write_table(table_of(), tmp_path / "a.parquet", row_group_size=30)
    return tmp_path / "a.parquet"


ZONE = dt.timezone(dt.timedelta(hours=1))
NOON = dt.datetime(2024, 2, 29, 12, 0, 0, 123456, tzinfo=dt.UTC)


TYPES: dict[str, tuple[Any, Any]] = {
    "bool": (pa.array([True, False, True]), np.bool_(True)),
    "int8": (pa.array([1, 2, -3], pa.int8()), np.int8(-3)),
    "uint64": (pa.array([1, 2, 2**64 - 1], pa.uint64()), np.uint64(2**64 - 1)),
    "float16": (pa.array(np.array([1, 2, 0.5], np.float16)), np.float16(0.5)),
    "float32": (pa.array([1, 2, 0.25], pa.float32()), np.float32(0.25)),
    "float64": (pa.array([1, 2, 0.1]), np.float64(0.1)),
    "text": (pa.array(["", "b", "日本"]), "日本"),
    "large text": (pa.array(["", "b", "c\0"], pa.large_string()), "c\0"),
    "text view": (pa.array(["", "b", "c" * 20], pa.string_view()), "c" * 20),
    "bytes": (pa.array([b"", b"b", b"\xff\0"], pa.binary()), b"\xff\0"),
    "large bytes": (pa.array([b"", b"b", b"c"], pa.large_binary()), b"c"),
    "fixed bytes": (pa.array([b"aa", b"bb", b"c\0"], pa.binary(2)), b"c\0"),
    "date": (pa.array([dt.date(1, 1, 1), None, dt.date(2024, 2, 29)][::2] * 2)[:3], np.datetime64("0001-01-01", "D")),
    "date64": (pa.array([dt.date(2020, 1, 1)] * 3, pa.date64()), np.datetime64("2020-01-01", "D")),
    "timestamp": (pa.array([NOON] * 3, pa.timestamp("us")), np.datetime64("2024-02-29T12:00:00.123456", "us")),
    "timestamp of a zone": (
        pa.array([NOON.astimezone(ZONE)] * 3, pa.timestamp("ns", "Europe/Berlin")),
        np.datetime64("2024-02-29T12:00:00.123456", "ns"),
    ),
    "time": (pa.array([dt.time(12, 30)] * 3, pa.time32("ms")), np.timedelta64(45_000_000, "ms")),
    "time64": (pa.array([dt.time(12, 30)] * 3, pa.time64("us")), np.timedelta64(45_000_000_000, "us")),
    "duration": (pa.array([dt.timedelta(days=1)] * 3, pa.duration("s")), np.timedelta64(86_400, "s")),
    "decimal": (pa.array([decimal.Decimal("1.10")] * 3), decimal.Decimal("1.10")),
    "nulls": (pa.array([None, None, None], pa.null()), None),
    "null": (pa.array([1, 2, None]), None),
    "dictionary": (pa.array(["x", "y", "x"]).dictionary_encode(), "x"),
    "list": (pa.array([[1], [], [2, 3]], pa.list_(pa.int8())), np.array([2, 3], np.int8)),
    "empty list": (pa.array([[1], [2], []], pa.list_(pa.int8())), np.array([], np.int8)),
    "large list": (pa.array([[1], [], [2, 3]], pa.large_list(pa.float32())), np.array([2, 3], np.float32)),
    "fixed list": (pa.array([[1, 2], [3, 4], [5, 6]], pa.list_(pa.int8(), 2)), np.array([5, 6], np.int8)),
    "list with a null": (pa.array([[1], [], [2, None]], pa.list_(pa.int8())), np.array([np.int8(2), None], object)),
    "list beside one with a null": (pa.array([[None], None, [2]], pa.list_(pa.int8())), np.array([2], np.int8)),
    "list of flags": (pa.array([[True], [], [True, False]]), np.array([True, False])),
    "list of dates": (pa.array([[], [], [dt.date(2020, 1, 1)]]), np.array(["2020-01-01"], "datetime64[D]")),
    "list of texts": (pa.array([["a"], [], ["b", "c"]]), ["b", "c"]),
    "list of text views": (pa.array([["a"], [], ["b", "c" * 20]], pa.list_(pa.string_view())), ["b", "c" * 20]),
    "list of lists": (pa.array([[[1]], [], [[2], [3, 4]]]), [np.array([2]), np.array([3, 4])]),
    "struct": (pa.array([{"a": 1, "b": "x"}] * 3), {"a": np.int64(1), "b": "x"}),
    "null struct": (pa.array([{"a": 1}, {"a": 2}, None]), None),
    "null in a struct": (pa.array([{"a": 1, "b": 1}, {"a": 1, "b": None}] * 2)[1:], {"a": np.int64(1), "b": None}),
    "list of structs": (pa.array([[], [], [{"a": 1}, {"a": 2}]]), [{"a": np.int64(1)}, {"a": np.int64(2)}]),
    "map": (pa.array([[("k", 1)]] * 3, pa.map_(pa.string(), pa.int8())), [("k", 1)]),
    "map of text views": (pa.array([[("k", "x" * 20)]] * 3, pa.map_(pa.string(), pa.string_view())), [("k", "x" * 20)]),
    "list of decimals": (pa.array([[decimal.Decimal("1.5")]] * 3), [decimal.Decimal("1.5")]),
    "tensor": (
        pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(18, dtype=np.int32).reshape(3, 2, 3)),
        np.arange(12, 18, dtype=np.int32).reshape(2, 3),
    ),
    "tensor with a null": (
        pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int8(), [1, 2]), pa.array([[1, 2], [3, 4], [None, 5]], pa.list_(pa.int8(), 2))
        ),
        np.array([[None, np.int8(5)]], object),
    ),
    "tensor beside one with a null": (
        pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int8(), [1, 2]), pa.array([[1, None], [3, 4], [4, 5]], pa.list_(pa.int8(), 2))
        ),
        np.array([[4, 5]], np.int8),
    ),
}
if hasattr(pa, "uuid"):
    TYPES["uuid"] = (pa.array([b"0123456789abcdef"] * 3, pa.uuid()), b"0123456789abcdef")


@pytest.mark.parametrize("name", TYPES)
def test_each_type_has_its_meaning(tmp_path: Path, name: str) -> None:
    """The last of three records, alone and in a read of all; a batch is what its records stack to, and writable."""
    array, expected = TYPES[name]
    try:
        pq.write_table(pa.table({"x": array, "n": range(3)}), tmp_path / "a.parquet", row_group_size=2)
    except pa.ArrowNotImplementedError as error:
        pytest.skip(f"An older pyarrow writes no views: {error}")
    with ParquetDataSource(tmp_path / "a.parquet") as source:
        records = source.__getitems__([2, 0, 1])
        assert same(source[2], {"x": expected, "n": np.int64(2)})
        assert all(map(same, list(records), [source[2], source[0], source[1]]))
        if isinstance(records, ColumnarRecords):
            batch = records.stack(np.empty)
            assert same(batch, stack(list(records)))
            assert same(stack(records[1:]), stack(list(records)[1:]))
            assert all(column.flags.writeable for _, column in tree.leaves(batch))


LISTS = st.lists(st.lists(st.one_of(st.none(), st.integers(-9, 9)), max_size=20), min_size=1, max_size=30)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.one_of(st.none(), st.text(max_size=3)), min_size=1, max_size=30),
    lists=LISTS,
    size=st.integers(1, 9),
)
def test_any_values_come_back(tmp_path: Path, rows: list[Any], lists: list[Any], size: int) -> None:
    """Nulls wherever they are, texts of any characters, lists of any lengths; in row groups of any size."""
    count = min(len(rows), len(lists))
    table = pa.table({"x": pa.array(rows[:count], pa.string()), "y": pa.array(lists[:count], pa.list_(pa.int8()))})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=size)
    with ParquetDataSource(tmp_path / "a.parquet") as source:
        records = every_record(source)

    assert [record["x"] for record in records] == rows[:count]
    assert [None if record["y"] is None else list(record["y"]) for record in records] == lists[:count]


def test_a_changed_record_changes_no_other(path: Path) -> None:
    """A record that is changed in place changes neither another one nor the next read."""
    with ParquetDataSource(path) as source:
        first, second = source.__getitems__([5, 5])
        first["tokens"][:] = 0
        assert second["tokens"].tolist() == source[5]["tokens"].tolist() == [5, 6, 7]


def test_the_rows_of_several_files_and_ranges_lie_end_to_end(tmp_path: Path, path: Path) -> None:
    """The units are their row groups, cut where a range cuts them; files without rows or row groups have none."""
    shutil.copy(path, tmp_path / "b.parquet")
    with ParquetDataSource([f"{path}[20:70]", tmp_path / "b.parquet", f"{path}[95:95]", f"{path}[31:33]"]) as source:
        ids = [int(record["id"]) for record in every_record(source)]
        sizes = source.unit_sizes
    pq.write_table(table_of(0), tmp_path / "none.parquet")
    pq.ParquetWriter(tmp_path / "no-groups.parquet", table_of().schema).close()
    for name, count in (("none", 0), ("no-groups", 0), ("n*", 0), ("*", 200)):
        with ParquetDataSource(tmp_path / f"{name}.parquet") as source:
            assert len(every_record(source)) == count

    assert ids == [*range(20, 70), *range(100), 31, 32]
    assert sizes.tolist() == [10, 30, 10, 30, 30, 30, 10, 2]
    assert sizes.dtype == np.int64


class Counting(ParquetDataSource):
    """Counts the row groups that are decoded."""

    decoded = 0

    def _decoded(self, number: int, key: int, row: int) -> Any:
        self.decoded += 1
        return super()._decoded(number, key, row)


@pytest.mark.parametrize("window", [1, 2, 100])
def test_a_window_shuffle_reads_each_row_once_and_decodes_each_row_group_once(path: Path, window: int) -> None:
    """A window shuffle in four threads delivers each row once and decodes each row group once."""
    with Counting(path) as source:
        sampler = millstream.HierarchicalSampler(source.unit_sizes, window_units=window, seed=0, num_epochs=1)
        threads = millstream.ReadOptions(num_threads=4)
        loader = millstream.DataLoader(
            data_source=source, sampler=sampler, operations=[millstream.Batch(8)], read_options=threads
        )
        with iter(loader) as batches:
            ids = np.concatenate([batch["id"] for batch in batches])
        assert sorted(ids.tolist()) == list(range(ROWS))
        assert source.decoded == 4


@pytest.mark.parametrize(("batch_size", "cache_bytes"), [(1, 700), (3, 0), (3, 700), (40, 700), (40, 1 << 20)])
def test_batches_that_need_some_row_groups_of_a_window_get_their_rows(
    tmp_path: Path, batch_size: int, cache_bytes: int
) -> None:
    """Batches over any row groups, cached, evicted or new, have the rows of their keys."""
    pq.write_table(table_of(240), tmp_path / "a.parquet", row_group_size=10)
    with warnings.catch_warnings(), ParquetDataSource(tmp_path / "a.parquet", cache_bytes=cache_bytes) as source:
        warnings.simplefilter("ignore", UserWarning)
        sampler = millstream.HierarchicalSampler(source.unit_sizes, window_units=8, seed=0, num_epochs=2)
        for start in range(0, 480, batch_size):
            keys = sampler.record_keys(start, min(start + batch_size, 480))
            records = list(source.__getitems__(keys))
            assert [int(record["id"]) for record in records] == keys.tolist()
            assert [record["text"] for record in records] == [f"row {key} é" for key in keys.tolist()]
            assert [record["tokens"][1] for record in records] == (keys + 1).tolist()


@pytest.mark.parametrize("cache_bytes", [0, 150_000, 1 << 20])
def test_no_more_memory_than_the_cache_is_kept(tmp_path: Path, cache_bytes: int) -> None:
    """After batches of any rows, Arrow has row groups of `cache_bytes`, or the only one."""
    rows = pa.array(np.arange(3200 * 100, dtype=np.int64))
    lists = pa.ListArray.from_arrays(pa.array(range(0, 320_001, 100), pa.int32()), rows)
    pq.write_table(pa.table({"x": lists}), tmp_path / "a.parquet", row_group_size=50)
    rng = np.random.default_rng(0)
    with ParquetDataSource(tmp_path / "a.parquet", cache_bytes=cache_bytes) as source:
        before = pa.total_allocated_bytes()
        for count in rng.integers(1, 300, 20).tolist():
            start = int(rng.integers(0, 3200 - count))
            keys = rng.integers(0, 3200, count) if count % 3 else np.arange(start, start + count)
            assert [record["x"][7] for record in source.__getitems__(keys)] == (keys * 100 + 7).tolist()
            # A row group is 40 KB, which Arrow allocates generously.
            assert pa.total_allocated_bytes() - before <= 1.6 * max(cache_bytes, 50 * 808)


@pytest.mark.third_party
def test_columns_whose_metadata_are_encrypted_do_not_hide_the_others(store: ObjectServer, tmp_path: Path) -> None:
    """They are an error when they are read, from a disk or a store; pyarrow ends a process that asks for them."""

    class Keys(encryption.KmsClient):  # type: ignore[misc]
        def wrap_key(self, key: bytes, name: str) -> bytes:  # noqa: ARG002
            return key

        unwrap_key = wrap_key

    factory = encryption.CryptoFactory(lambda _: Keys())
    properties = factory.file_encryption_properties(
        encryption.KmsConnectionConfig(),
        encryption.EncryptionConfiguration(footer_key="k", column_keys={"k": ["id"]}, plaintext_footer=True),
    )
    pq.write_table(table_of(), tmp_path / "a.parquet", encryption_properties=properties)
    store.objects["bucket/a.parquet"] = (tmp_path / "a.parquet").read_bytes()
    try:
        pq.read_table(tmp_path / "a.parquet", columns=["text"])
    except OSError as error:
        pytest.skip(f"An older pyarrow reads no column beside encrypted ones: {error}")
    for path in (str(tmp_path / "a.parquet"), f"{store.url}/bucket/a.parquet"):
        with ParquetDataSource(path, columns=["text", "tokens"], cache_bytes=0) as source:
            assert source[7]["text"] == "row 7 é"
            assert source.window_units == 1
        with ParquetDataSource(path) as source, pytest.raises(DataSourceError, match=r"record key 7\).*[Dd]ecrypt"):
            source[7]


def test_a_global_shuffle_works_and_logs_once_what_to_do(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """If row groups are dropped mostly unread, which sampler to use; if one has no room in the cache, both sizes."""
    pq.write_table(pa.table({"id": range(2000)}), tmp_path / "a.parquet", row_group_size=20)
    with ParquetDataSource(tmp_path / "a.parquet", cache_bytes=700) as source:
        keys = np.random.default_rng(0).permutation(2000)
        ids = [int(record["id"]) for at in range(0, 2000, 50) for record in source.__getitems__(keys[at : at + 50])]
        assert ids == keys.tolist()
    (message,) = caplog.messages
    assert re.search(r"of \d+ rows in \d+ evicted row groups were read.*window_units=2, seed", message)
    # In order, each row group is used up before it is dropped: there is nothing to say.
    with ParquetDataSource(tmp_path / "a.parquet", cache_bytes=700) as source:
        assert [int(source[key]["id"]) for key in range(2000)] == list(range(2000))
    with ParquetDataSource(tmp_path / "a.parquet", cache_bytes=100) as source:
        assert [source[key]["id"] for key in (0, 50)] == [0, 50]
    assert re.search(r"20 rows, which take \d+ bytes .* cache_bytes=100.*row_group_size", caplog.messages[1])
    assert len(caplog.messages) == 2


@pytest.mark.parametrize("mixed", [False, True])
def test_a_shuffled_load_of_more_than_fits_decodes_each_row_group_once(tmp_path: Path, *, mixed: bool) -> None:
    """`load(shuffle=True)` shuffles by windows if the file exceeds the cache, and globally if it fits."""
    pq.write_table(pa.table({"id": range(2000)}), tmp_path / "a.parquet", row_group_size=20)
    with Counting(tmp_path / "a.parquet", cache_bytes=8000) as source:
        assert source.window_units is not None
        assert 2 <= source.window_units <= 25
        options: Any = {"weights": {"a": 1}, "drop_remainder": True} if mixed else {}
        sources = {"a": source} if mixed else source
        loader = millstream.load(sources, shuffle=True, seed=3, num_epochs=1, batch_size=10, **options)
        ids = np.concatenate([batch["id"] for batch in loader])
        assert sorted(ids.tolist()) == list(range(2000))
        assert ids.tolist() != sorted(ids.tolist())
        assert source.decoded == 100
    with ParquetDataSource(tmp_path / "a.parquet") as small:
        assert small.window_units is None
        loader = millstream.load(small, shuffle=True, seed=3, num_epochs=1)
        keys = millstream.IndexSampler(2000, shuffle=True, seed=3).record_keys(0, 2000)
        assert [int(record["id"]) for record in loader] == keys.tolist()


def test_windows_count_the_wanted_columns_and_decoded_numbers(tmp_path: Path) -> None:
    """Numbers count as decoded, without the dictionary of the file; columns of similar names do not count."""
    table = pa.table({"the.id": np.zeros(4000, np.int64), "the.id2": ["x" * 100] * 4000})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=100)
    for columns, cache_bytes, expected in ((["the.id"], 32_000, None), (["the.id"], 31_000, 19), (None, 1000, 1)):
        with ParquetDataSource(tmp_path / "a.parquet", columns=columns, cache_bytes=cache_bytes) as source:
            assert source.window_units == expected


def test_columns_are_those_asked_for_in_that_order(path: Path) -> None:
    """`columns` selects and orders the columns, and changes the fingerprint; an unknown one is an error."""
    with ParquetDataSource(path, columns=["text", "id"]) as source:
        assert list(source[0]) == ["text", "id"]
        assert "columns=2:" in source.fingerprint()
        assert source.fingerprint() != ParquetDataSource(path).fingerprint()
    with pytest.raises(ValueError, match=r"has the columns 'id', 'label'.*'it' are wanted"):
        ParquetDataSource(path, columns=["id", "it"])


def test_files_must_agree_in_the_columns_that_are_read(tmp_path: Path, path: Path) -> None:
    """Files must agree in the names and meaning of their columns, not in how these are stored."""
    pq.write_table(table_of().drop_columns(["text"]), tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"are those of the first file"):
        ParquetDataSource([path, tmp_path / "b.parquet"])
    floats = table_of().set_column(1, "label", pa.array(np.zeros(ROWS)))
    pq.write_table(floats, tmp_path / "c.parquet")
    with pytest.raises(ValueError, match=r"Column 'label' is float64 in .*c\.parquet', but int32"):
        ParquetDataSource([path, tmp_path / "c.parquet"])
    large = table_of().set_column(2, "text", table_of()["text"].cast(pa.large_string()).dictionary_encode())
    pq.write_table(large, tmp_path / "d.parquet")
    with ParquetDataSource([path, tmp_path / "d.parquet"]) as source:
        assert [record["text"] for record in source.__getitems__([199, 99, 0])] == ["row 99 é", "row 99 é", "row 0 é"]


@pytest.fixture
def grown(tmp_path: Path) -> Path:
    """A folder of tables as jobs write them over the years, with columns that came and widened, and marks of jobs."""
    folder = tmp_path / "table"
    day = dt.datetime(2024, 1, 1, tzinfo=dt.UTC)
    parts = {
        "year=2023/lang=en/0": {
            "id": pa.array([1, 2], pa.int32()),
            "at": pa.array([day] * 2, pa.timestamp("s", "UTC")),
        },
        "year=2024/lang=a%20b/0": {
            "at": pa.array([day], pa.timestamp("us", "UTC")),
            "id": pa.array([2**40], pa.int64()),
            "price": pa.array([decimal.Decimal("1.10")], pa.decimal128(5, 2)),
        },
        "year=2024/lang=__HIVE_DEFAULT_PARTITION__/0": {
            "id": pa.array([4]),
            "price": pa.array([decimal.Decimal("123.456")], pa.decimal128(9, 3)),
        },
    }
    for name, columns in parts.items():
        (folder / name).parent.mkdir(parents=True)
        pq.write_table(pa.table(columns), folder / f"{name}.parquet")
    for mark in ("_SUCCESS", "_metadata", ".part-0.crc", "year=2023/_SUCCESS", "README.md"):
        (folder / mark).write_bytes(b"no table")
    return folder


@pytest.mark.parametrize("schema", ["union", "given"])
def test_a_folder_of_tables_is_read_as_by_pyarrow(grown: Path, schema: Any) -> None:
    """Missing columns are None, types are promoted, and folders are columns; marks of jobs are no tables."""
    wide = pa.schema({"id": pa.int64(), "at": pa.timestamp("us", "UTC"), "price": pa.decimal128(9, 3)})
    partitions = [pa.field("year", pa.int64()), pa.field("lang", pa.string())]
    if schema == "given":
        schema = pa.unify_schemas([wide, pa.schema(partitions)])
    pattern = pads.HivePartitioning(pa.schema(partitions))
    table = pads.dataset(
        grown, pa.schema([*wide, *partitions]), "parquet", partitioning=pattern, exclude_invalid_files=True
    )
    expected = table.to_table().to_pylist()
    with ParquetDataSource(grown, schema=schema) as source:
        records = every_record(pickle.loads(pickle.dumps(source)))
        assert {frozenset(record) for record in records} == {frozenset(["id", "at", "price", "year", "lang"])}
        key = operator.itemgetter("id")
        for record, row in zip(sorted(records, key=key), sorted(expected, key=key), strict=True):
            at = row["at"] and np.datetime64(row["at"].replace(tzinfo=None), "us")
            assert record == row | {"at": at}
        assert records[0]["year"].dtype == np.int64
    batch = next(iter(millstream.load(ParquetDataSource(grown, schema="union", columns=["id", "year"]), batch_size=4)))
    assert batch["id"].dtype == batch["year"].dtype == np.int64
    assert sorted(zip(batch["id"].tolist(), batch["year"].tolist(), strict=True)) == [
        (1, 2023),
        (2, 2023),
        (4, 2024),
        (2**40, 2024),
    ]


def test_folders_are_columns_if_a_pattern_asks_for_them(grown: Path) -> None:
    """Files keep their own columns; a named column that they lack comes from folders; another schema is refused."""
    pattern = f"{grown}/year=2024/*/*"
    with ParquetDataSource(f"{grown}/year=2023/*/*") as source:
        assert list(source[0]) == ["id", "at"]
    with ParquetDataSource(pattern, columns=["lang", "id"]) as one, ParquetDataSource(pattern, columns=["id"]) as other:
        assert {record["lang"] for record in every_record(one)} == {"a b", None}
        assert one.fingerprint() != other.fingerprint()
    with ParquetDataSource(pattern, columns=["lang"]) as source:
        assert [record["lang"] for record in source.__getitems__([1, 0])] == ["a b", None]
    (grown / "year=2024" / "lang=a%20b" / "_SUCCESS").touch()
    with ParquetDataSource(f"{grown}/year=2024/lang=a*/*") as source:
        assert len(source) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "has the columns .* are those of the first file.* or schema='union' to read missing ones as None"),
        ({"schema": "all"}, r"^schema must be a pyarrow\.Schema, 'union', or None, got 'all'\.$"),
        ({"schema": pa.schema({"id": pa.int16()})}, "Column 'id' is int32 in .* cannot be promoted to int16"),
        ({"schema": pa.schema({"idd": pa.int64()})}, "No file has the column 'idd'"),
        ({"schema": pa.schema({"lang": pa.int64()})}, "has the value 'en', which is not int64"),
        ({"schema": "union", "columns": ["id", "day"]}, "No file has the column 'day'"),
    ],
)
def test_schemas_that_files_cannot_have_are_refused(grown: Path, arguments: Any, message: str) -> None:
    """Values would be lost, or a name is wrong: the error at construction names the column and the file."""
    with pytest.raises((TypeError, ValueError), match=message):
        ParquetDataSource(grown, **arguments)
    (grown / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="There is no Parquet file in"):
        ParquetDataSource(grown / "empty")


def test_damaged_text_is_an_error_of_its_own_record_only(tmp_path: Path) -> None:
    """The other rows of the row group can be read."""
    damaged = pa.StringArray.from_buffers(3, *pa.array([b"good", b"\xff\xfe", b"fine"]).buffers()[1:])
    pq.write_table(pa.table({"x": damaged}), tmp_path / "a.parquet")
    with ParquetDataSource(tmp_path / "a.parquet") as source:
        assert [record["x"] for record in source.__getitems__([2, 0])] == ["fine", "good"]
        for read in (lambda: source[1], lambda: source.__getitems__([0, 1])):
            with pytest.raises(DataSourceError, match=r"record 1 of .*a\.parquet' \(record key 1\).*utf-8"):
                read()


@pytest.mark.parametrize("values", [["a", "b"], [b"a", b"b"]], ids=["text", "bytes"])
def test_the_values_of_a_dictionary_may_exceed_two_gibibytes(values: list[Any]) -> None:
    """A dictionary is decoded with offsets of 64 bits, because its values may come many times in a row group."""
    column = pa.DictionaryArray.from_arrays(pa.array([0, 1, 1], pa.int8()), pa.array(values))
    chunk = pa.record_batch({"x": column})
    types = plain_types(chunk.schema, ["x"])
    assert types == [pa.large_string() if values == ["a", "b"] else pa.large_binary()]
    decoded = normalised(chunk, ["x"], types).column("x")
    assert (decoded.type, decoded.to_pylist()) == (types[0], [values[0], values[1], values[1]])


def content_of(folder: Path, rows: int = 400) -> bytes:
    """Returns a file with small columns, and beside them one that takes 4 KB a row, in row groups of 100."""
    wide = np.random.default_rng(0).integers(0, 256, (rows, 4096), np.uint8)
    table = pa.table({"id": range(rows), "wide": [row.tobytes() for row in wide], "label": ["a"] * rows})
    pq.write_table(table, folder / "made.parquet", row_group_size=100, write_page_checksum=True)
    return (folder / "made.parquet").read_bytes()


def test_a_flipped_byte_is_found_by_the_checksums_of_pages(tmp_path: Path) -> None:
    """The rows of its row group are errors, and those of the others are read."""
    content = bytearray(content_of(tmp_path))
    content[300_000] ^= 1
    (tmp_path / "made.parquet").write_bytes(content)
    with ParquetDataSource(tmp_path / "made.parquet") as source:
        with pytest.raises(DataSourceError, match=r"of '.*made.parquet' .*its row group, number 0, cannot be decoded"):
            source[7]
        assert source[150]["id"] == 150


@pytest.mark.third_party
def test_columns_of_a_row_group_come_by_a_few_requests_at_once(
    store: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Near columns by one request, a large one by several in flight together; before that, the footer only."""
    monkeypatch.setattr(parquet, "_CHUNK_BYTES", 100_000)
    monkeypatch.setattr(object_stores, "_REQUEST_BYTES", 100_000)
    content = store.objects["bucket/a"] = content_of(tmp_path)
    with ParquetDataSource(f"{store.url}/bucket/a", columns=["id"]) as source:
        assert sum((request.stop or 0) - (request.start or 0) for request in store.requests) < len(content) / 4
        source[0]
        store.forget()
        assert [int(record["id"]) for record in source.__getitems__([105, 199])] == [105, 199]
        assert len(store.requests) == 1
        with pickle.loads(pickle.dumps(source)) as copy:
            assert copy[5]["id"] == 5
        assert len(store.requests) <= 4
    with ParquetDataSource(f"{store.url}/bucket/a", columns=["wide"]) as source:
        source[0]
        store.forget()
        source[100]
        pieces = len(store.requests)
        assert 5 <= pieces <= 8
        store.forget()
        store.gathering = pieces
        source[200]
        assert len(store.requests) == store.most_at_once == pieces


@pytest.mark.third_party
def test_row_groups_are_read_from_copies(store: ObjectServer, tmp_path: Path) -> None:
    """With a cache, the whole file is copied once, and its row groups are read from the copy."""
    store.objects["bucket/a"] = content_of(tmp_path)
    with ParquetDataSource(f"{store.url}/bucket/a", cache=FileCache(1 << 26, tmp_path / "copies")) as source:
        assert source[0]["id"] == 0
        store.forget()
        assert [record["id"] for record in every_record(source)] == [*range(400)]
    assert store.requests == []
