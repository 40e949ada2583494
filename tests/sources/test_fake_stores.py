"""Every format, read from fakes of S3 and Google Cloud Storage; ArrayRecord files of gs:// by their own library."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millstream
from millstream.sources import ArrayRecordDataSource
from support.files.record_files import (
    every_record,
    write_array_record,
    write_bagz,
    write_megatron,
    write_tar,
    write_tfrecord,
)
from support.stores.fake_stores import fake_gcs, fake_s3
from support.stores.object_server import ObjectServer
from support.stores.store_clients import clients_of

pytestmark = pytest.mark.third_party

RECORDS = [b"record %d " % number * 50 for number in range(300)]

SOURCES: dict[str, Any] = {
    "a.array_record": millstream.ArrayRecordDataSource,
    "a.bag": millstream.BagzDataSource,
    "a.bagz": millstream.BagzDataSource,
    "a.csv": millstream.CsvDataSource,
    "a.jsonl": millstream.JsonLinesDataSource,
    "a.parquet": millstream.ParquetDataSource,
    "a.tar": millstream.WebDatasetDataSource,
    "a.tfrecord": millstream.TFRecordDataSource,
    "a.txt": millstream.TextLineDataSource,
    "m.bin": millstream.MegatronDataSource,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of each format."""
    folder = tmp_path_factory.mktemp("files")
    write_array_record(folder / "a.array_record", RECORDS)
    write_bagz(folder / "a.bag", RECORDS)
    write_bagz(folder / "a.bagz", RECORDS)
    (folder / "a.csv").write_text("n,twice\n" + "".join(f"{n},{2 * n}\n" for n in range(300)))
    (folder / "a.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in range(300)))
    rows = {"n": [*range(300)], "text": [f"row {n}" for n in range(300)]}
    pq.write_table(pa.table(rows), folder / "a.parquet", row_group_size=50)
    write_tar(folder / "a.tar", [(f"{n}.txt", record) for n, record in enumerate(RECORDS)])
    write_tfrecord(folder / "a.tfrecord", RECORDS)
    (folder / "a.txt").write_text("".join(f"line {n}\n" for n in range(300)))
    write_megatron(folder / "m", [np.arange(n, dtype=np.uint16) for n in range(300)])
    return folder


@pytest.fixture(params=["gs", "s3"])
def scheme(request: pytest.FixtureRequest, files: Path, tmp_path: Path) -> Iterator[str]:
    """The beginning of URLs whose objects a fake has: those files, in a folder of a bucket."""
    objects = {f"folder/{path.name}": path.read_bytes() for path in files.iterdir() if path.name[0] != "."}
    fake = {"gs": fake_gcs, "s3": fake_s3}[request.param]
    with fake(objects) as address, clients_of(address, tmp_path / "cache"):
        yield request.param


def test_the_records_are_those_of_the_files(scheme: str, files: Path, tmp_path: Path) -> None:
    """Records and fingerprint of every format are those of the local files; ArrayRecord uses a cache."""
    for name, kind in SOURCES.items():
        options = {"cache": millstream.FileCache(10**8, tmp_path / "copies")} if name == "a.array_record" else {}
        with kind(files / name) as local:
            expected = [repr(record) for record in every_record(local)]
            fingerprint, units = local.fingerprint(), local.unit_sizes.tolist()
        assert len(expected) == 300
        with kind(f"{scheme}://bucket/folder/{name}", **options) as source:
            assert [repr(record) for record in every_record(source)] == expected
            assert repr(source[299]) == expected[299]
            assert (source.fingerprint(), source.unit_sizes.tolist()) == (fingerprint, units)
    with millstream.BagzDataSource(f"{scheme}://bucket/*/a.bag*") as source:
        assert every_record(source) == [*RECORDS, *RECORDS]


def test_what_is_not_there_is_an_error_with_its_url(scheme: str) -> None:
    """An object, and a bucket, that is not there."""
    for url in (f"{scheme}://bucket/folder/none", f"{scheme}://none/folder/a.tfrecord"):
        with pytest.raises(FileNotFoundError, match=url):
            millstream.TFRecordDataSource(url)
    with pytest.raises(FileNotFoundError, match="none-"):
        millstream.TFRecordDataSource(f"{scheme}://bucket/folder/none-*")


@pytest.fixture
def bucket(store: ObjectServer, tmp_path: Path) -> dict[str, str]:
    """Two objects of a hundred records, in the environment of the process that reads them."""
    for name in ("a", "b"):
        path = write_array_record(tmp_path / name, [b"%s %d" % (name.encode(), number) for number in range(100)])
        store.objects[f"bucket/d/{name}"] = path.read_bytes()
    return {**os.environ, "CLOUD_STORAGE_EMULATOR_ENDPOINT": store.url}


def run(code: str, environment: dict[str, str], folder: Path) -> str:
    """Returns what a process prints."""
    words = [sys.executable, "-c", f"import millstream\n{code}"]
    done = subprocess.run(words, env=environment, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_records_come_from_the_bucket(bucket: dict[str, str], tmp_path: Path) -> None:
    """Objects, ranges of them and patterns, one by one and many at once, in this process and in workers."""
    code = """
source = millstream.ArrayRecordDataSource(["gs://bucket/d/b[10:12]", "gs://bucket/d/a"])
print(len(source), source[0], source.__getitems__([101, 2, 1]), source.unit_sizes.tolist())
print(len(millstream.ArrayRecordDataSource("gs://bucket/d/*")))
with millstream.load(source, batch_size=51, worker_count=1, num_epochs=1) as loader:
    print([batch.tolist()[-1] for batch in loader])
"""
    assert run(code, bucket, tmp_path).splitlines() == [
        "102 b'b 10' [b'a 99', b'a 0', b'b 11'] [2, 100]",
        "200",
        "[b'a 48', b'a 99']",
    ]


def test_what_the_library_cannot_read_is_an_error(bucket: dict[str, str], tmp_path: Path) -> None:
    """A missing object is an error at construction, a range beyond the end at the read, with the object's name."""
    code = """
for read in (
    lambda: millstream.ArrayRecordDataSource("gs://bucket/d/c"),
    lambda: millstream.ArrayRecordDataSource("gs://bucket/d/a[0:200]")[0],
):
    try:
        read()
    except millstream.DataSourceError as error:
        print(error)
"""
    first, second = run(code, bucket, tmp_path).splitlines()
    assert first.startswith("'gs://bucket/d/c' cannot be read: ")
    assert second.endswith("'gs://bucket/d/a' has 100 records, but a range of it ends at record 200.")


@pytest.mark.parametrize("url", ["s3://bucket/a", "https://host/a", ["gs://bucket/a[0:1]", "http://host/a"]])
def test_stores_that_the_library_does_not_read_need_a_cache(url: Any) -> None:
    """URLs that the library cannot read are an error that names the cache, before any request."""
    with pytest.raises(
        ValueError, match=r"which reads local files and gs://, got '.*/a'.*cache=FileCache\(max_bytes\)"
    ):
        ArrayRecordDataSource(url)
