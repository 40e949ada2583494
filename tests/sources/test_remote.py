"""Sources of objects in stores far away, read from a real server that is slow, fails and forgets, and from fakes."""

import contextlib
import gzip
import io
import itertools
import os
import pickle
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millstream
from millstream.errors import DataSourceError
from millstream.sources import ParquetDataSource, TextLineDataSource, TFRecordDataSource, WebDatasetDataSource
from millstream.sources.file_formats import format_of_file
from millstream.sources.files import byte_files
from millstream.sources.files.byte_files import RemoteFile
from millstream.sources.files.paths import FileIdentity
from millstream.sources.remote import object_clients, object_stores
from support.files.record_files import (
    every_record,
    records_of,
    tfrecord_bytes,
    write_array_record,
    write_mds,
    write_megatron,
    write_tar,
    write_zarr,
)
from support.files.small_sources import NUM_RECORDS, SOURCES, at_urls
from support.processes.worker_pools import at_most, python
from support.stores.fake_stores import fake_gcs, fake_s3
from support.stores.object_server import ObjectServer, Request
from support.stores.store_clients import clients_of

pytestmark = pytest.mark.third_party

RECORDS = [b"record %d " % number * 20 for number in range(400)]
SPREAD = [number.to_bytes(2, "little") * 20_000 for number in range(301)]
"""Records of which every other one takes a request of its own: the one between is not read along."""

SCHEMES = ["gs", "http", "s3"]

ROWS = 300


def parquet_bytes(numbers: Iterable[int]) -> bytes:
    """Returns a Parquet file of rows of 4 KB, in row groups of 100."""
    rows = [parquet_row(number) for number in numbers]
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), file, row_group_size=100, use_dictionary=False, compression="none")
    return file.getvalue()


def parquet_row(number: int) -> dict[str, Any]:
    return {"id": number, "wide": number.to_bytes(2, "little") * 2048}


FORMS: dict[str, tuple[Any, Callable[[Iterable[int]], bytes], Callable[[int], Any]]] = {
    "TFRecord": (
        TFRecordDataSource,
        lambda numbers: tfrecord_bytes(map(SPREAD.__getitem__, numbers)),
        SPREAD.__getitem__,
    ),
    "Parquet": (ParquetDataSource, parquet_bytes, parquet_row),
}
"""The class, the content of a file of some records, and the record of a number."""


@pytest.fixture
def url(store: ObjectServer) -> str:
    """The URL of an object of RECORDS, read by HTTP."""
    store.objects["bucket/a"] = tfrecord_bytes(RECORDS)
    return f"{store.url}/bucket/a"


def location(store: ObjectServer, scheme: str) -> str:
    return f"{store.url}/bucket" if scheme == "http" else f"{scheme}://bucket"


@pytest.mark.parametrize("scheme", [*SCHEMES, "az"])
def test_every_store_is_read_alike(store: ObjectServer, scheme: str) -> None:
    """The records, the number of them and the fingerprint are those of the files; names may hold anything."""
    for name in ("a b", "ü%20", "d/c"):
        store.objects[f"bucket/{name}"] = tfrecord_bytes([name.encode(), b"", *RECORDS])
    names = [name.replace("%", "%25") if scheme == "http" else name for name in ("a b", "ü%20", "d/c")]
    with TFRecordDataSource([f"{location(store, scheme)}/{name}" for name in names]) as source:
        assert every_record(source) == [
            record for name in ("a b", "ü%20", "d/c") for record in [name.encode(), b"", *RECORDS]
        ]
        assert source[402] == "ü%20".encode()


@pytest.mark.parametrize("scheme", ["gs", "s3", "az"])
def test_patterns_are_looked_up_where_there_are_lists(store: ObjectServer, scheme: str) -> None:
    """Matches come sorted; a name that reads as a pattern is that object, if there is one."""
    for name in ("t-2", "t-1", "t-10", "u", "d/t-3", "odd[1]", "t/e"):
        store.objects[f"bucket/x/{name}"] = tfrecord_bytes([name.encode()])
    base = f"{location(store, scheme)}/x"
    for pattern, names in {
        "t-*": [b"t-1", b"t-10", b"t-2"],
        "t-?": [b"t-1", b"t-2"],
        "**/t-[23]": [b"d/t-3", b"t-2"],
        "odd[1]": [b"odd[1]"],
    }.items():
        assert records_of(TFRecordDataSource(f"{base}/{pattern}")) == names
    with pytest.raises(FileNotFoundError, match=r"No TFRecord file matches the pattern.*x/v\*"):
        TFRecordDataSource(f"{base}/v*")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://host/data/*.tfrecord", "Pass each URL, got"),
        ("ftp://host/a", "must begin with gs://, s3://, az://, hf://, http:// or https://"),
        ("gs://bucket", "must name a bucket and an object"),
        ("s3://bucket/", "must name a bucket and an object"),
        ("https://host", "must name a host and an object"),
        ("ftp://user:pw@host/a?pw", r"got 'ftp://…@host/a\?…'"),
        ("gs://bucket/a//b", "has an empty part"),
        ("gs://bucket/a[3:2]", "0 <= start <= stop"),
        (Path("gs://bucket/a"), "URLs must be str"),
    ],
)
def test_urls_that_mean_nothing_are_refused(url: Any, message: str) -> None:
    """A URL that cannot be read is an error at construction with the rule."""
    with pytest.raises((ValueError, DataSourceError), match=message):
        TFRecordDataSource(url)


def test_a_store_that_is_not_configured_is_an_error(store: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store without configuration is an error with the object's name, before any request."""
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(DataSourceError, match=r"Cannot read 'az://bucket/a': its store is not configured: .*"):
        TFRecordDataSource("az://bucket/a")
    assert store.requests == []


def test_ranges_of_records_and_files_on_disk_go_together(url: str, tmp_path: Path) -> None:
    """A source may have files of many places, and parts of them."""
    (tmp_path / "b").write_bytes(tfrecord_bytes(RECORDS))
    paths = [f"{url}[10:20]", tmp_path / "b", "gs://bucket/a[1:2]"]
    with TFRecordDataSource(paths) as source:
        assert every_record(source) == [*RECORDS[10:20], *RECORDS, RECORDS[1]]
        assert "files=3 records=411" in source.fingerprint()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_batch_is_asked_for_at_once(store: ObjectServer, scheme: str) -> None:
    """More than 64 requests are in flight together, of a pickled copy without any other; neighbours come by one."""
    for number in range(3):
        store.objects[f"bucket/{number}"] = tfrecord_bytes(SPREAD[number * 100 : number * 100 + 100])
    store.objects["bucket/small"] = tfrecord_bytes(RECORDS)
    names = (0, 1, 2, "small")
    with TFRecordDataSource([f"{location(store, scheme)}/{name}" for name in names]) as source:
        copy = pickle.loads(pickle.dumps(source))
    with copy:
        store.forget()
        store.gathering = 65
        keys = np.random.default_rng(0).permutation(150) * 2
        assert copy.__getitems__(keys) == [SPREAD[key] for key in keys]
        assert 64 < store.most_at_once <= object_stores.MAX_CONCURRENT_REQUESTS
        assert len(store.requests) == 150
        store.forget()
        store.gathering = 0
        assert copy.__getitems__(range(400, 656)) == RECORDS[100:356]
    assert len(store.requests) == 1


def test_the_index_is_kept_for_the_version_it_is_of(store: ObjectServer, tmp_path: Path) -> None:
    """One request per object, whatever the signature; the fingerprint is that of local files of these names."""
    fingerprints = set()
    for number in range(3):
        store.objects[f"bucket/{number}"] = tfrecord_bytes(RECORDS)
        (tmp_path / f"{number}").write_bytes(tfrecord_bytes(RECORDS))
    for signature in ("first", "second"):
        store.forget()
        urls = [f"{store.url}/bucket/{number}?X-Signature={signature}" for number in range(3)]
        with TFRecordDataSource(urls) as source:
            fingerprints.add(source.fingerprint())
    assert len(store.requests) == 3
    assert len(list((tmp_path / "cache").iterdir())) == 3
    with TFRecordDataSource([tmp_path / f"{number}" for number in range(3)]) as source:
        assert fingerprints == {source.fingerprint()}

    store.objects["bucket/1"] = tfrecord_bytes(RECORDS[:7])
    with TFRecordDataSource([f"{store.url}/bucket/{number}" for number in range(3)]) as source:
        assert every_record(source) == [*RECORDS, *RECORDS[:7], *RECORDS]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("form", FORMS)
def test_what_fails_now_and_then_is_repeated(store: ObjectServer, form: str, scheme: str) -> None:
    """A request that fails once, in any way, is repeated, at construction and when reading."""
    kind, content, record = FORMS[form]
    store.objects["bucket/a"] = content(range(ROWS))
    seen: set[int | None] = set()
    failures: itertools.cycle[str | int] = itertools.cycle([429, 500, 503, "reset", "short"])

    def fails_first(request: Request) -> str | int | None:
        is_first = request.start not in seen
        seen.add(request.start)
        return next(failures) if is_first else None

    store.failure = fails_first
    with kind(f"{location(store, scheme)}/a") as source:
        assert every_record(source) == [record(number) for number in range(ROWS)]
        for _ in range(2):
            keys = np.random.default_rng(0).permutation(ROWS // 2)[:32] * 2
            assert list(source.__getitems__(keys)) == [record(key) for key in keys.tolist()]
            seen.clear()
    assert len(store.requests) > 10


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (500, "Cannot read '.*bucket/a'.*500 Internal"),
        ("reset", "Cannot read '.*bucket/a'"),
        ("short", "Cannot read '.*bucket/a'"),
        ("long", "Cannot read '.*bucket/a'.* sent more bytes than were requested"),
        (403, "refuses"),
        (404, "was removed"),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_what_fails_for_ever_is_an_error(store: ObjectServer, form: str, failure: str | int, message: str) -> None:
    """A request that keeps failing is an error with record, file and the store's answer; reading works again after."""
    kind, content, record = FORMS[form]
    store.objects["bucket/a"] = content(range(ROWS))
    with kind(f"{store.url}/bucket/a") as source:
        assert source[1] == record(1)
        store.failure = lambda request: failure if (request.start or 0) > 500_000 else None
        with pytest.raises(DataSourceError, match=rf"record 250 of '.*bucket/a' \(record key 250\).*{message}"):
            source.__getitems__([1, 250])
        store.failure = lambda _: None
        assert source[250] == record(250)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_not_there_or_may_not_be_read_is_an_error(store: ObjectServer, scheme: str) -> None:
    """FileNotFoundError, or PermissionError with the names of the credentials; later it is the record's error."""
    store.objects["bucket/a"] = tfrecord_bytes(RECORDS)
    url = f"{location(store, scheme)}/a"
    with pytest.raises(FileNotFoundError, match=r"No such TFRecord file: '.*/b'"):
        TFRecordDataSource([url, f"{location(store, scheme)}/b"])
    with TFRecordDataSource(url) as source:
        store.failure = lambda _: 403
        with pytest.raises(PermissionError, match=r"refuses.*GOOGLE_APPLICATION_CREDENTIALS.*AWS_PROFILE.*bucket/a"):
            TFRecordDataSource(url)
        with pytest.raises(DataSourceError, match=r"Cannot read record 3 of '.*a' \(record key 3\).*refuses"):
            source[3]
        store.failure = lambda _: None
        del store.objects["bucket/a"]
        with pytest.raises(DataSourceError, match=r"record 3 of '.*a' \(record key 3\).*was removed"):
            source[3]


@pytest.mark.parametrize(
    ("scheme", "numbers"),
    [
        *((scheme, range(ROWS)[::-1]) for scheme in [*SCHEMES, "az"]),
        ("http", range(20)),
        ("http", range(ROWS + 1)),
    ],
)
@pytest.mark.parametrize("form", FORMS)
def test_a_replaced_object_is_an_error(store: ObjectServer, form: str, scheme: str, numbers: range) -> None:
    """No byte of a replaced object is read, whatever its size: reading is an error; a new source has the new object."""
    kind, content, record = FORMS[form]
    store.objects["bucket/a"] = content(range(ROWS))
    url = f"{location(store, scheme)}/a"
    with kind(url) as source:
        assert source[ROWS - 1] == record(ROWS - 1)
        store.objects["bucket/a"] = content(numbers)
        with pytest.raises(DataSourceError, match=r"record 5 of '.*a' \(record key 5\).*has changed.*again"):
            source.__getitems__([5, ROWS - 1])
    with kind(url) as source:
        assert every_record(source) == [record(number) for number in numbers]


@pytest.mark.parametrize("etag", [None, 'W/"weak"'])
def test_a_server_without_versions_is_trusted(store: ObjectServer, etag: str | None) -> None:
    """Size, beginning and end stand for the version, so that the index of another object is not used."""
    store.etags["bucket/a"] = etag
    url = f"{store.url}/bucket/a"
    for records in (RECORDS, RECORDS[::-1], []):
        store.objects["bucket/a"] = tfrecord_bytes([*records, b"last"])
        assert records_of(TFRecordDataSource(url)) == [*records, b"last"]


def test_a_request_without_a_response_is_repeated(
    store: ObjectServer, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A silent connection is given up and the request repeated, until the attempts are used up."""
    # A busy machine has two seconds for the response to the second request.
    monkeypatch.setattr(object_clients, "SILENCE_SECONDS", 2.0)
    with TFRecordDataSource(url) as source:
        store.forget()
        store.failure = lambda request: "hang" if request.number == 0 else None
        assert source[7] == RECORDS[7]
        assert store.num_requests(2) == 2
    monkeypatch.setattr(object_clients, "SILENCE_SECONDS", 0.3)
    object_clients.open_store.cache_clear()
    with TFRecordDataSource(url) as source:
        store.forget()
        store.failure = lambda _: "hang"
        with pytest.raises(DataSourceError, match=r"record 8 .*Cannot read '.*bucket/a'"):
            source[8]
        # Four attempts, and one for the size of the object.
        assert store.num_requests(5) == 5


def test_every_wait_for_a_store_has_a_limit(store: ObjectServer, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that never returns ends with an error after the time limit."""
    with TFRecordDataSource(url) as source:
        monkeypatch.setattr(object_clients, "REQUEST_SECONDS", 0.25)
        store.failure = lambda _: "hang"
        with at_most(0.5), pytest.raises(DataSourceError, match=r"record 8 .*Timed out.*no response within 1 sec"):
            source[8]


@pytest.mark.parametrize(
    "form",
    [
        "http://{host}/bucket/a?X-Signature=0123abcd&b=1",
        "HTTP://{host}/bucket/a?X-Signature=0123abcd",
        "http://user:0123abcd@{host}/bucket/a",
        "http://{host}/bucket/a#0123abcd",
        "http://0123abcd@{host}/bucket/a?b='0123abcd",
    ],
)
def test_secrets_of_a_url_are_in_no_text(
    store: ObjectServer, caplog: pytest.LogCaptureFixture, form: str, tmp_path: Path
) -> None:
    """Secrets of a URL are in no error, cause, log, `repr`, state or file name."""
    store.objects["bucket/a"] = tfrecord_bytes(RECORDS)
    url = form.format(host=store.url.partition("://")[2])
    failures: list[Callable[[Request], int]] = [lambda _: 500, lambda _: 403, lambda _: 404]
    found = []
    with caplog.at_level("DEBUG"), TFRecordDataSource(f"{url}") as source:
        found.append(repr(source))
        with millstream.load(source, batch_size=2) as loader:
            found += [f"{loader!r} {loader._repr_html_()} bucket/a", f"{iter(loader).get_state()!r} bucket/a"]
        for failure in failures:
            store.failure = failure
            with pytest.raises(DataSourceError) as reading:
                source[3]
            for path in (url, SimpleNamespace(filename=url, skip=0, take=2)):
                with pytest.raises(OSError) as opening:  # noqa: PT011  (which one depends on the failure)
                    TFRecordDataSource(path)
                found.append("".join(traceback.format_exception(opening.value)))
            found.append("".join(traceback.format_exception(reading.value)))
    assert [text for text in found if "bucket/a" not in text] == []
    assert "0123abcd" not in "".join([*found, caplog.text, *map(str, tmp_path.rglob("*"))])


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (millstream.ImageFolderDataSource, "got '.*bucket/a"),
        (lambda url: millstream.TfdsDataSource(url, "train"), "read from local folders.*bucket/a"),
        (format_of_file, "the format of '.*bucket/a"),
        (TextLineDataSource, r"bucket/a\?…' is compressed.* Download it, .* convert a a\.unpacked$"),
    ],
)
def test_secrets_of_urls_that_cannot_be_read_are_in_no_text(
    store: ObjectServer, kind: Callable[[str], Any], message: str
) -> None:
    """Errors at construction show the object or the folder alone, in the command that they advise, too."""
    store.objects["bucket/a"] = gzip.compress(b"line")
    with pytest.raises((OSError, ValueError), match=message) as opening:
        kind(f"{store.url}/bucket/a?X-Signature=0123abcd")
    assert "0123abcd" not in str(opening.value)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("m", millstream.MegatronDataSource),
        ("m.bin", millstream.MegatronDataSource),
        ("m.bin", lambda url: millstream.TokenDataSource(url, 15)),
        ("mds", millstream.MdsDataSource),
        ("x/", lambda url: millstream.ZarrDataSource({"x": url})),
    ],
)
def test_all_files_of_a_signed_url_are_read_by_it(
    store: ObjectServer, tmp_path: Path, name: str, kind: Callable[[str], Any]
) -> None:
    """The query of the URL signs each file; an error shows neither it nor another name."""
    write_megatron(tmp_path / "m", [np.arange(length, dtype=np.uint16) for length in range(1, 30)])
    write_mds(tmp_path / "mds", {"n": "int"}, [{"n": bytes([n] * 8)} for n in range(29)], 10)
    write_zarr(tmp_path / "x", np.arange(29), 4)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    store.objects |= {f"bucket/{path.relative_to(tmp_path)}": path.read_bytes() for path in files}
    url = f"{store.url}/bucket/{name}?X-Signature=0123abcd"
    assert repr(every_record(kind(url))) == repr(every_record(kind(f"{tmp_path}/{name}")))
    assert store.queries == {"X-Signature=0123abcd"}
    store.objects.clear()
    with pytest.raises(FileNotFoundError, match=f"bucket/{name}") as caught:
        kind(url)
    assert "0123abcd" not in str(caught.value)


@pytest.mark.parametrize("status", [302, 308])
def test_servers_may_send_elsewhere(store: ObjectServer, status: int) -> None:
    """Each request is sent on, so that an address that is no longer good does not matter."""
    store.objects["cdn/a b"] = store.objects["cdn/new"] = tfrecord_bytes(SPREAD)
    address = "cdn/a b"
    store.moved = lambda _: address

    def sends_on(request: Request) -> int | None:
        return status if request.key == "bucket/a" else None if request.key == address else 403

    store.failure = sends_on
    with TFRecordDataSource(f"{store.url}/bucket/a") as source:
        for address in ("cdn/a b", "cdn/new"):
            store.forget()
            keys = np.random.default_rng(0).permutation(150)[:64] * 2
            assert source.__getitems__(keys) == [SPREAD[key] for key in keys]
            assert {request.key for request in store.requests} == {"bucket/a", address}
        store.objects["cdn/new"] = tfrecord_bytes(SPREAD[::-1])
        with pytest.raises(DataSourceError, match="has changed"):
            source[0]


@pytest.mark.parametrize(("moved", "words"), [("bucket/a", "redirect"), ("nowhere", "No such TFRecord file")])
def test_servers_that_send_in_circles_are_errors(store: ObjectServer, moved: str, words: str) -> None:
    """A redirect loop, or a redirect to a missing object, is an error that names the URL."""
    store.moved = lambda _: moved
    store.failure = lambda request: 302 if request.key == "bucket/a" else None
    with pytest.raises(OSError, match=words) as caught:
        TFRecordDataSource(f"{store.url}/bucket/a")
    assert "bucket/a" in str(caught.value)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_empty_objects_are_files_without_records(store: ObjectServer, scheme: str) -> None:
    """An empty object is a file without records, in every store."""
    store.objects["bucket/a"] = b""
    store.objects["bucket/b"] = b"line\n"
    with TextLineDataSource([f"{location(store, scheme)}/{name}" for name in "aba"]) as source:
        assert every_record(source) == ["line"]
        assert source.unit_sizes.tolist() == [0, 1, 0]


def test_a_server_that_sends_whole_files_only_is_refused(store: ObjectServer, url: str) -> None:
    """A server that ignores ranges is an error that says so."""
    store.supports_ranges = False
    with pytest.raises(DataSourceError, match=r"Cannot read '.*bucket/a' at random: its server sends only whole files"):
        TFRecordDataSource(url)


@pytest.mark.parametrize("tells_sizes", [True, False])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_one_request_identifies_an_object(store: ObjectServer, scheme: str, tells_sizes: bool) -> None:
    """Size and version of an object take one request; if ranges do not carry the size, it comes from the headers."""
    store.tells_sizes = tells_sizes
    for size in (0, 1, 3_000_000):
        store.objects["bucket/a"] = bytes(size)
        store.forget()
        assert object_stores.state_of(f"{location(store, scheme)}/a")[0] == size
        assert not (size and tells_sizes) or len(store.requests) == 1


def test_a_size_that_is_not_true_is_an_error(store: ObjectServer, url: str) -> None:
    """Reading all of an object that is said to have an exabyte requests a few blocks of it."""
    TFRecordDataSource(url).close()
    store.forget()
    file = RemoteFile(url, FileIdentity.of_object(1 << 60, b"version"))
    with contextlib.closing(file), pytest.raises(DataSourceError, match="has changed"):
        file.read(0, 1 << 60)
    assert len(store.requests) < 10


DAMAGED: list[tuple[Callable[[str], Any], bytes, str]] = [
    (TFRecordDataSource, tfrecord_bytes(RECORDS)[:-1], "was cut short"),
    (TFRecordDataSource, b"{}\n" * 100, "is not a TFRecord file"),
    (WebDatasetDataSource, b"{}\n" * 1000, "is not a tar archive"),
    (millstream.BagzDataSource, b"{}\n" * 1000, "is not a Bagz file"),
    (ParquetDataSource, b"PAR1" + bytes(5000) + b"PAR1", "is not a Parquet file, is damaged"),
    (ParquetDataSource, b"", "is not a Parquet file, is damaged"),
    (millstream.MegatronDataSource, b"abc", "is not the index of a Megatron dataset"),
]


@pytest.mark.parametrize(("kind", "content", "message"), DAMAGED)
def test_damaged_objects_are_errors_that_name_them(
    store: ObjectServer, kind: Callable[[str], Any], content: bytes, message: str
) -> None:
    """Damaged objects are errors that name the object."""
    store.objects["bucket/a.bin"] = store.objects["bucket/a.idx"] = content
    with pytest.raises(DataSourceError, match=f"bucket/a.* {message}"):
        kind(f"{store.url}/bucket/a.bin")


def test_a_long_object_is_read_ahead_of_the_search(
    store: ObjectServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A scan reads a long object in blocks, each once, and skips the content of large members."""
    monkeypatch.setattr(byte_files, "_BLOCK_BYTES", 1000)
    files = [(f"{number}.txt", bytes(20_000 if number == 5 else 10)) for number in range(20)]
    store.objects["bucket/a"] = write_tar(tmp_path / "a", files).read_bytes()
    with WebDatasetDataSource(f"{store.url}/bucket/a") as source:
        asked = [(request.start or 0, request.stop or 0) for request in store.requests]
        blocks = [start for start, stop in asked if stop - start > 500]
        assert [sample["txt"] for sample in every_record(source)] == [content for _, content in files]
    assert len(set(blocks)) == len(blocks)
    assert len(blocks) < len(store.objects["bucket/a"]) / 1000 - 10


NAMES = ["ArrayRecord", "Bagz", "CSV", "JSONL", "Megatron", "Parquet", "TFRecord", "WebDataset", "text"]


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_the_records_are_those_of_the_files(scheme: str, tmp_path: Path) -> None:
    """Records and fingerprint of every format are those of the files; a missing object or bucket is an error."""
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
    """Objects, ranges and patterns, in workers, too; a missing object or a range beyond the end is an error."""
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
        millstream.ArrayRecordDataSource(url)
