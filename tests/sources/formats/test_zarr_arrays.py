"""Zarr and N5 arrays: every version and compressor, chunks of a shuffle, what is refused, and damage."""

import json
import pickle
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream.core.columnar import ColumnarRecords
from millstream.errors import DataSourceError
from millstream.sources import ZarrDataSource
from millstream.sources.formats import zarr_arrays
from millstream.sources.remote.object_clients import ATTEMPTS
from millstream.sources.shared_units import share_units_in
from support.files.files_of_libraries import FOLDER
from support.files.record_files import write_zarr
from support.stores.object_server import ObjectServer

pytestmark = pytest.mark.third_party


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["zarr", "zarr3", "n5"]),
    st.lists(st.integers(1, 4), max_size=2).flatmap(
        lambda shape: st.integers(1, 40).map(lambda count: (count, *shape))
    ),
    st.sampled_from(["<f4", "<i2", "<u8", "i1", "<f8"]),
    st.integers(1, 50),
)
def test_rows_are_those_that_were_written(
    folder: Path, driver: str, shape: tuple[int, ...], dtype: str, chunk: int
) -> None:
    """In every format, shape, dtype and size of chunks: one by one, in batches, and stacked."""
    rng, count = np.random.default_rng(0), shape[0]
    rows = rng.integers(0, 100, shape).astype(dtype)
    path = folder / "array"
    shutil.rmtree(path, ignore_errors=True)
    write_zarr(path, rows, min(chunk, count), driver)
    source = ZarrDataSource({"x": path}, cache_bytes=1000 * (count % 2))
    keys = rng.integers(0, count, 20)
    records: Any = source.__getitems__(keys)

    assert len(source) == count
    assert isinstance(records, ColumnarRecords)
    for record, key in zip([*records, *map(source.__getitem__, keys)], [*keys, *keys], strict=True):
        assert record["x"].dtype == rows.dtype
        assert record["x"].tolist() == rows[key].tolist()
    assert records.stack(np.empty)["x"].tolist() == rows[keys].tolist()
    assert int(source.unit_sizes.sum()) == count
    assert source.unit_sizes[0] == min(chunk, count)


def write_sharded(path: Path, rows: Any) -> None:
    """Writes an array of Zarr 3 in shards of 16 rows, of which each chunk has two."""
    inner = [{"name": "bytes"}, {"name": "zstd", "configuration": {"level": 1}}, {"name": "crc32c"}]
    sharding = {"chunk_shape": [2, 3], "codecs": inner}
    metadata = {
        "shape": list(rows.shape),
        "data_type": rows.dtype.name,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [16, 3]}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}, "metadata": metadata}
    tensorstore.open(spec, create=True).result().write(rows).result()


def test_units_are_the_chunks_that_are_decoded(tmp_path: Path) -> None:
    """Those of the column with the most bytes; within a shard, its inner chunks. Two windows fit into the cache."""
    rows = np.arange(100 * 3, dtype=np.int32).reshape(100, 3)
    write_sharded(tmp_path / "sharded", rows)
    write_zarr(tmp_path / "label", rows[:, 0], 50)
    paths = {"label": tmp_path / "label", "x": tmp_path / "sharded"}
    source = ZarrDataSource(paths, cache_bytes=1000)

    assert source.unit_sizes.tolist() == [2] * 50
    assert source.window_units == 1000 // (2 * 2 * 16)
    assert ZarrDataSource(paths).window_units is None
    batches = list(millstream.load(source, shuffle=True, seed=0, batch_size=10, num_epochs=1))
    assert sorted(np.concatenate([batch["label"] for batch in batches]).tolist()) == rows[:, 0].tolist()
    for batch in batches:
        assert (batch["x"][:, 0] == batch["label"]).all()
        assert len(np.unique(batch["label"] // 6)) <= 2 * source.window_units


def test_damage_is_an_error_with_array_and_record_or_what_stands_in_the_file(tmp_path: Path) -> None:
    """Each flip and truncation of a chunk: the rows of the other chunks are as they were."""
    rows = np.arange(48, dtype=np.int32).reshape(16, 3)
    write_sharded(tmp_path / "x", rows)
    source = ZarrDataSource({"x": tmp_path / "x"}, cache_bytes=0)
    shard = tmp_path / "x" / "c" / "0" / "0"
    whole, failed = shard.read_bytes(), 0
    flipped = [whole[:n] + bytes([whole[n] ^ 0x41]) + whole[n + 1 :] for n in range(0, len(whole), 5)]
    for content in [*flipped, *(whole[:n] for n in range(0, len(whole), 11))]:
        shard.write_bytes(content)
        good: list[bool] = []
        for key in range(16):
            try:
                good.append(source[key]["x"].tolist() == rows[key].tolist())
            except DataSourceError as error:
                text = str(error)
                good.append(f"Cannot read record {key} of '{tmp_path}/x' (record key {key}): " in text)
                failed += 1
        assert all(good)
    with pytest.raises(DataSourceError, match=re.escape(f"Cannot read record 0 of '{tmp_path}/x'")):
        source.__getitems__([0, 3])
    assert failed > 100


ZSTD3 = {"name": "zstd", "configuration": {"level": 1}}
LAYOUTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "plain": ("zarr3", {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}]}, True),
    "zstd": ("zarr3", {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, ZSTD3]}, True),
    "dots": ("zarr3", {"chunk_key_encoding": {"name": "v2", "configuration": {"separator": "."}}}, True),
    "plain-2": ("zarr", {"compressor": None, "dimension_separator": "/"}, True),
    "zstd-2": ("zarr", {"compressor": {"id": "zstd", "level": 1}}, True),
    "blosc": ("zarr", {"compressor": {"id": "blosc"}}, False),
    "columns": ("zarr", {"compressor": None, "order": "F"}, False),
    "big": ("zarr3", {"codecs": [{"name": "bytes", "configuration": {"endian": "big"}}]}, False),
    "checked": (
        "zarr3",
        {"codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]},
        False,
    ),
    "cut": ("zarr3", {"chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4, 2]}}}, False),
}


@pytest.fixture
def shares_units(tmp_path: Path) -> Iterator[None]:
    """This process shares decoded chunks, as workers do."""
    folder = tmp_path / "units"
    folder.mkdir()
    share_units_in(str(folder))
    yield
    share_units_in("")


@pytest.mark.usefixtures("shares_units")
@pytest.mark.parametrize("name", LAYOUTS)
def test_plain_chunks_are_read_as_by_tensorstore(tmp_path: Path, name: str) -> None:
    """Layouts that are plain, and no others; chunks that are missing, cut short, longer or damaged included."""
    driver, metadata, is_plain = LAYOUTS[name]
    rows = np.arange(90, dtype=np.uint16).reshape(30, 3)
    if driver == "zarr3":
        grid = {"name": "regular", "configuration": {"chunk_shape": [4, 3]}}
        metadata = {"shape": [30, 3], "data_type": "uint16", "chunk_grid": grid, "fill_value": 7, **metadata}
    else:
        metadata = {"shape": [30, 3], "dtype": "<u2", "chunks": [4, 3], "fill_value": 7, **metadata}
    spec = {"driver": driver, "kvstore": {"driver": "file", "path": f"{tmp_path}/x/"}, "metadata": metadata}
    tensorstore.open(spec, create=True).result().write(rows).result()

    def outcome(key: int, *, without: bool) -> Any:
        source = ZarrDataSource({"x": tmp_path / "x"})
        assert bool(source._plain) == is_plain == any(chunks.is_quicker for chunks in source._plain.values())
        if without:
            source._plain.clear()
        try:
            return source[key]["x"].tolist()
        except DataSourceError as error:
            return str(error)

    source = ZarrDataSource({"x": tmp_path / "x"}, cache_bytes=100)
    for keys in ([29, 0, 5, 5, 4], list(range(30))):
        assert [record["x"].tolist() for record in source.__getitems__(keys)] == rows[keys].tolist()
    chunk = next(path for path in sorted((tmp_path / "x").rglob("*")) if path.is_file() and path.name[0] not in ".z")
    content = chunk.read_bytes()
    for damaged in (content[:-1], content + b"x", b"", bytes(len(content)), None):
        chunk.unlink()
        if damaged is not None:
            chunk.write_bytes(damaged)
        assert outcome(1, without=False) == outcome(1, without=True)
    assert outcome(1, without=False) == [7, 7, 7] or name == "cut"


def test_metadata_that_changed_are_an_error(tmp_path: Path) -> None:
    """In a copy for another process, of an array that was replaced meanwhile; or one that is gone."""
    write_zarr(tmp_path / "x", np.arange(20), 4)
    pickled = pickle.dumps(ZarrDataSource({"x": tmp_path / "x"}))
    shutil.rmtree(tmp_path / "x")
    with pytest.raises(FileNotFoundError, match="No Zarr or N5 array"):
        pickle.loads(pickled)[0]
    write_zarr(tmp_path / "x", np.arange(20), 5)
    with pytest.raises(DataSourceError, match="has changed since the source was constructed"):
        pickle.loads(pickled)[0]


def test_what_cannot_be_read_is_an_error_at_construction(tmp_path: Path) -> None:
    """With the array and the reason."""
    write_zarr(tmp_path / "x", np.arange(20), 4)
    write_zarr(tmp_path / "y", np.arange(10), 4)
    write_zarr(tmp_path / "damaged", np.arange(10), 4)
    metadata = tmp_path / "damaged" / "zarr.json"
    metadata.write_text(json.dumps(json.loads(metadata.read_text()) | {"data_type": "int7"}))
    wrong: list[tuple[Any, type[Exception], str]] = [
        ({"x": tmp_path / "none"}, FileNotFoundError, "No Zarr or N5 array.*none"),
        ({"x": tmp_path / "x" / "c"}, FileNotFoundError, "No Zarr or N5 array"),
        ({"x": tmp_path}, ValueError, "is a group. Write one of its arrays: '.*/damaged', '.*/x', '.*/y'"),
        ({"x": FOLDER / "zarr2.zarr"}, ValueError, "is a group.*zarr2.zarr/deep/n', '.*/rows', '.*/score'"),
        ({"x": FOLDER / "zarr3.zarr"}, ValueError, "is a group.*zarr3.zarr/deep/n', '.*/rows', '.*/score'"),
        ({"x": tmp_path / "damaged"}, DataSourceError, "Cannot open the array .*damaged.*TensorStore lacks"),
        ({"x": tmp_path / "x", "y": tmp_path / "y"}, ValueError, "'x' has 20, 'y' has 10"),
        ({}, ValueError, "at least one column"),
        ([tmp_path / "x"], TypeError, "must be a mapping of columns"),
    ]
    for arrays, error, message in wrong:
        with pytest.raises(error, match=message):
            ZarrDataSource(arrays)


@pytest.mark.parametrize("driver", ["zarr", "zarr3", "n5", "shards"])
def test_other_chunks_under_the_same_names_are_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, driver: str
) -> None:
    """At a resume, of local arrays; a copy elsewhere is the same data."""
    rows = np.arange(60, dtype=np.int32).reshape(20, 3)
    write: Any = write_sharded if driver == "shards" else lambda path, rows: write_zarr(path, rows, 4, driver)
    write(tmp_path / "x", rows)
    shutil.copytree(tmp_path / "x", tmp_path / "copy")
    write(tmp_path / "other", rows + 1)

    def loader(name: str) -> Any:
        return millstream.load(ZarrDataSource({"x": tmp_path / name}), batch_size=4)

    state = iter(loader("x")).get_state()
    for name, is_warned in (("copy", False), ("other", True)):
        caplog.clear()
        iter(loader(name)).set_state(state)
        assert ("first_and_last_bytes" in caplog.text) is is_warned, caplog.text


def test_a_store_that_does_not_answer_is_an_error_soon(
    store: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the attempts of all other sources, with the array, the record and the chunk."""
    monkeypatch.setattr(zarr_arrays, "LONGEST_DELAY_SECONDS", 0.1)
    monkeypatch.setattr(zarr_arrays, "FIRST_DELAY_SECONDS", 0.1)
    write_zarr(tmp_path / "x", np.arange(20), 4, "zarr")
    for path in (tmp_path / "x").iterdir():
        store.objects[f"bucket/x/{path.name}"] = path.read_bytes()
    source = ZarrDataSource({"x": f"{store.url}/bucket/x"})
    assert source[1]["x"] == 1
    store.failure = lambda request: 503 if request.key == "bucket/x/2" else None
    with pytest.raises(DataSourceError, match=r"Cannot read record 9 of '.*/bucket/x' \(record key 9\): .*x/2: All 7"):
        source.__getitems__([1, 9])
    assert sum(request.key == "bucket/x/2" for request in store.requests) == 2 * ATTEMPTS
