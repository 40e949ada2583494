"""Parquet files in stores far away, read from a real server that is slow, fails and forgets."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millstream
from millstream.errors import DataSourceError
from millstream.sources import FileCache, ParquetDataSource
from millstream.sources.remote import object_stores
from millstream.sources.tables import parquet_file
from support.stores.object_server import ObjectServer

pytestmark = pytest.mark.third_party

ROWS = 400


def content_of(folder: Path, rows: int = ROWS, first: int = 0, group: int = 100) -> bytes:
    """Returns a file with a small column, and beside it one that takes 4 KB a row."""
    wide = np.random.default_rng(first).integers(0, 256, (rows, 4096), np.uint8)
    table = pa.table({"id": range(first, first + rows), "wide": [row.tobytes() for row in wide], "label": ["a"] * rows})
    pq.write_table(table, folder / "made.parquet", row_group_size=group, write_page_checksum=True)
    return (folder / "made.parquet").read_bytes()


def test_columns_of_a_row_group_come_by_a_few_requests_at_once(
    store: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns near each other take one request; a large one takes several, in flight together; others none."""
    monkeypatch.setattr(parquet_file, "_CHUNK_BYTES", 100_000)
    monkeypatch.setattr(object_stores, "_REQUEST_BYTES", 100_000)
    store.objects["bucket/a"] = content_of(tmp_path)
    with ParquetDataSource(f"{store.url}/bucket/a", columns=["id"]) as source:
        source[0]
        store.forget()
        assert [int(record["id"]) for record in source.__getitems__([105, 199])] == [105, 199]
        assert len(store.requests) == 1
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


def test_a_source_is_made_of_footers(store: ObjectServer, tmp_path: Path) -> None:
    """Nothing else is read before it is needed; a copy in another process knows size and version."""
    content = store.objects["bucket/a"] = content_of(tmp_path)
    with ParquetDataSource(f"{store.url}/bucket/a") as source:
        sent = sum((request.stop or 0) - (request.start or 0) for request in store.requests if request.stop)
        assert sent < len(content) / 4
        pickled = pickle.dumps(source)
    store.forget()
    with pickle.loads(pickled) as copy:
        assert copy[5]["id"] == 5
    assert len(store.requests) <= 3


def test_damage_in_a_row_group_is_found_when_it_is_read(store: ObjectServer, tmp_path: Path) -> None:
    """Damage in a row group is found by its page checksums when it is read."""
    content = bytearray(content_of(tmp_path))
    content[300_000] ^= 255
    store.objects["bucket/a"] = bytes(content)
    with ParquetDataSource(f"{store.url}/bucket/a") as source:
        with pytest.raises(DataSourceError, match=r"of '.*bucket/a' .*its row group, number 0, cannot be decoded"):
            source[7]
        assert source[150]["id"] == 150


@pytest.mark.parametrize("copies", [False, True])
def test_threads_and_workers_make_the_same_batches(store: ObjectServer, tmp_path: Path, copies: bool) -> None:
    """Workers deliver the same batches, from the store and from copies, each made once."""
    for number in range(3):
        store.objects[f"bucket/{number}.parquet"] = content_of(tmp_path, rows=60, first=number * 60, group=20)
    cache = FileCache(1 << 26, tmp_path / "copies") if copies else None
    source = ParquetDataSource(
        [f"{store.url}/bucket/{number}.parquet" for number in range(3)], columns=["id", "label"], cache=cache
    )

    def ids(**options: Any) -> list[list[int]]:
        sampler = millstream.HierarchicalSampler(source.unit_sizes, window_units=2, seed=1, num_epochs=1)
        loader = millstream.DataLoader(
            data_source=source,
            sampler=sampler,
            operations=[millstream.Batch(16)],
            shard_options=millstream.NoSharding(),
            **options,
        )
        with loader:
            return [batch["id"].tolist() for batch in loader]

    expected = ids(read_options=millstream.ReadOptions(num_threads=0))
    assert sorted(number for batch in expected for number in batch) == list(range(180))
    if copies:
        assert len([path for path in (tmp_path / "copies").iterdir() if path.name != "lock"]) == 3
        store.forget()
    assert ids(worker_count=2) == expected
    if copies:  # The workers have read the footers.
        assert all((request.start or 0) > 0 for request in store.requests)
    source.close()
