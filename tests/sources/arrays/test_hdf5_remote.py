"""HDF5 files in object stores, read from a real server."""

import pickle
import re
from pathlib import Path

import h5py
import numpy as np
import pytest

from millstream.errors import DataSourceError
from millstream.sources import Hdf5DataSource
from support.stores.object_server import ObjectServer

pytestmark = pytest.mark.third_party

NAMES = ("plain", "chunks", "gzip", "rows", "lzf")


def content_of(folder: Path, first: int = 0) -> bytes:
    """Returns a file of three demonstrations of 20 rows, with columns that are read as they are and decoded."""
    with h5py.File(folder / "made", "w") as file:
        for demo in range(3):
            numbers = np.arange(20) + first + 20 * demo
            rows = np.repeat(numbers, 400).reshape(-1, 20, 20).astype(np.int32)
            group = file.create_group(f"data/{demo}")
            group["plain"] = numbers
            group.create_dataset("chunks", data=rows, chunks=(3, 20, 20))
            group.create_dataset("gzip", data=rows, chunks=(3, 20, 20), compression="gzip", shuffle=True)
            group.create_dataset("rows", data=rows, chunks=(1, 20, 20), compression="gzip")
            group.create_dataset("lzf", data=rows, chunks=(3, 20, 20), compression="lzf")
    return (folder / "made").read_bytes()


@pytest.mark.parametrize("scheme", ["gs", "http", "s3"])
def test_every_store_is_read_as_files_are(store: ObjectServer, tmp_path: Path, scheme: str) -> None:
    """The records and units are those of the files, in all layouts; in buckets, file names may be patterns."""
    for number in range(2):
        store.objects[f"bucket/{number}.h5"] = content_of(tmp_path, 60 * number)
        (tmp_path / f"{number}.h5").write_bytes(store.objects[f"bucket/{number}.h5"])
    root = f"{store.url}/bucket" if scheme == "http" else f"{scheme}://bucket"
    pattern = "0.h5" if scheme == "http" else "*.h5"
    files, source = (
        Hdf5DataSource({name: f"{folder}/{pattern}/data/*/{name}" for name in NAMES}) for folder in (tmp_path, root)
    )
    keys = np.random.default_rng(0).integers(0, len(files), 50)
    with files, source, pickle.loads(pickle.dumps(source)) as copy:
        assert len(source) == (60 if scheme == "http" else 120)
        assert source.fingerprint() == files.fingerprint()
        assert source.unit_sizes.tolist() == files.unit_sizes.tolist()
        for each in (source, copy):
            assert repr(list(each.__getitems__(keys))) == repr(list(files.__getitems__(keys)))
        assert repr(source[59]) == repr(files[59])


def test_rows_and_chunks_of_a_batch_are_requested_together(store: ObjectServer, tmp_path: Path) -> None:
    """Of all demonstrations and columns; a chunk is requested once, and metadata when the source is constructed."""
    store.objects["bucket/a.h5"] = content_of(tmp_path)
    columns = {name: f"{store.url}/bucket/a.h5/data/*/{name}" for name in ("chunks", "gzip")}
    with Hdf5DataSource(columns) as source:
        assert len(store.requests) < 20
        store.forget()
        store.gathering = 6
        assert [record["gzip"][0, 0] for record in source.__getitems__([0, 25, 45])] == [0, 25, 45]
        assert len(store.requests) == store.most_at_once == 6
        store.gathering = 0
        store.forget()
        source.__getitems__([1, 24, 44])
        assert len(store.requests) == 3  # The rows without filters.


def test_a_store_that_lost_or_changed_the_file_is_an_error(store: ObjectServer, tmp_path: Path) -> None:
    """With its URL and the record; before construction, an object of another format, or none, is refused."""
    url = f"{store.url}/bucket/a.h5"
    for name in NAMES:
        store.objects["bucket/a.h5"] = content_of(tmp_path)
        with Hdf5DataSource({name: f"{url}/data/*/{name}"}) as source:
            store.objects["bucket/a.h5"] = content_of(tmp_path, first=1)
            with pytest.raises(DataSourceError, match=r"\(record key 21\)") as changed:
                source[21]
            del store.objects["bucket/a.h5"]
            with pytest.raises(DataSourceError, match=r"\(record key 22\)") as removed:
                source[22]
            assert url in str(changed.value)
            assert f"{url!r} was removed" in str(removed.value)
    store.objects["bucket/a.h5"] = b"%PDF" * 1000
    with pytest.raises(DataSourceError, match=re.escape(url)):
        Hdf5DataSource({"x": f"{url}/x"})
    with pytest.raises(FileNotFoundError, match="No HDF5 file is at the beginning"):
        Hdf5DataSource({"x": f"{store.url}/bucket/b.h5/x"})
