"""Every format, read from fakes of S3 and Google Cloud Storage; ArrayRecord files of gs:// by their own library."""

import os
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.sources import ArrayRecordDataSource
from support.files.record_files import every_record, write_array_record
from support.files.small_sources import NUM_RECORDS, SOURCES, at_urls
from support.processes.worker_pools import python
from support.stores.fake_stores import fake_gcs, fake_s3
from support.stores.object_server import ObjectServer
from support.stores.store_clients import clients_of

pytestmark = pytest.mark.third_party

NAMES = ["ArrayRecord", "Bagz", "CSV", "JSONL", "Megatron", "Parquet", "TFRecord", "WebDataset", "text"]


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_the_records_are_those_of_the_files(scheme: str, tmp_path: Path) -> None:
    """Records and fingerprint of every format are those of the local files; ArrayRecord uses a cache.

    An object, and a bucket, that is not there is an error with its URL.
    """
    sources: dict[str, Any] = {}
    objects: dict[str, bytes] = {}
    for name in NAMES:
        folder = tmp_path / name
        folder.mkdir()
        sources[name] = SOURCES[name](folder)
        objects |= {f"{name}/{path.name}": path.read_bytes() for path in folder.iterdir()}
    with {"gs": fake_gcs, "s3": fake_s3}[scheme](objects) as address, clients_of(address, tmp_path / "cache"):
        for name, local in sources.items():
            options = {"cache": millstream.FileCache(10**8, tmp_path / "copies")} if name == "ArrayRecord" else {}
            expected = [repr(record) for record in every_record(local)]
            with local, at_urls(local, f"{scheme}://bucket/{name}", **options) as source:
                assert [repr(record) for record in every_record(source)] == expected
                assert repr(source[NUM_RECORDS - 1]) == expected[-1]
                assert source.fingerprint() == local.fingerprint()
        with millstream.BagzDataSource(f"{scheme}://bucket/*/[ab].bag*") as source:
            assert every_record(source) == [b"record %d" % number for number in range(25)]
        for url in (f"{scheme}://bucket/folder/none", f"{scheme}://none/TFRecord/a", f"{scheme}://bucket/TFRecord/n*"):
            with pytest.raises(FileNotFoundError) as caught:
                millstream.TFRecordDataSource(url)
            assert url in str(caught.value)


LIBRARY = """
import millstream
source = millstream.ArrayRecordDataSource(["gs://bucket/d/b[10:12]", "gs://bucket/d/a"])
print(len(source), source[0], source.__getitems__([101, 2, 1]), source.unit_sizes.tolist())
print(len(millstream.ArrayRecordDataSource("gs://bucket/d/*")))
with millstream.load(source, batch_size=51, worker_count=1, num_epochs=1) as loader:
    print([batch.tolist()[-1] for batch in loader])
for read in (
    lambda: millstream.ArrayRecordDataSource("gs://bucket/d/c"),
    lambda: millstream.ArrayRecordDataSource("gs://bucket/d/a[0:200]")[0],
):
    try:
        read()
    except millstream.DataSourceError as error:
        print(error)
"""


def test_the_library_reads_array_record_files_of_a_bucket(store: ObjectServer) -> None:
    """Objects, ranges of them and patterns, one by one and many at once, in this process and in workers.

    A missing object is an error at construction, a range beyond the end at the read, with the object's name.
    """
    for name in (b"a", b"b"):
        path = write_array_record(Path(name.decode()), [b"%s %d" % (name, number) for number in range(100)])
        store.objects[f"bucket/d/{path}"] = path.read_bytes()
    ran = python("-c", LIBRARY, env=os.environ | {"CLOUD_STORAGE_EMULATOR_ENDPOINT": store.url}, check=True)
    *printed, missing, beyond = ran.stdout.splitlines()
    assert printed == ["102 b'b 10' [b'a 99', b'a 0', b'b 11'] [2, 100]", "200", "[b'a 48', b'a 99']"]
    assert missing.startswith("'gs://bucket/d/c' cannot be read: ")
    assert beyond.endswith("'gs://bucket/d/a' has 100 records, but a range of it ends at record 200.")


@pytest.mark.parametrize("url", ["s3://bucket/a", "https://host/a", ["gs://bucket/a[0:1]", "http://host/a"]])
def test_stores_that_the_library_does_not_read_need_a_cache(url: Any) -> None:
    """URLs that the library cannot read are an error that names the cache, before any request."""
    with pytest.raises(
        ValueError, match=r"which reads local files and gs://, got '.*/a'.*cache=FileCache\(max_bytes\)"
    ):
        ArrayRecordDataSource(url)
