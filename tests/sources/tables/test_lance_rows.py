"""Lance datasets: versions, filters, types, what is refused, and damage."""

import datetime as dt
import pickle
import re
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

import millstream
from millstream.columnar import ColumnarRecords
from millstream.errors import DataSourceError
from millstream.sources import LanceDataSource
from support.processes.forked import source_error_after_fork
from support.stores.fake_stores import fake_s3

pytestmark = pytest.mark.third_party


def write_rows(path: Path, count: int = 60) -> Any:
    """Writes a dataset of the usual kinds of columns in three fragments."""
    numbers = np.arange(count)
    rows = {
        "id": pa.array(numbers),
        "text": pa.array([f"row {number} é" for number in numbers]),
        "image": pa.array([b"%d\0" % number for number in numbers]),
        "tokens": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(3 * count, dtype=np.uint16)), 3),
        "day": pa.array([dt.date(2020, 1, 1)] * count),
    }
    return lance.write_dataset(pa.table(rows), path, max_rows_per_file=20)


def test_records_have_the_values_of_parquet_files(tmp_path: Path) -> None:
    """Numbers, texts, bytes, lists and dates: alone, in batches with repeated keys, and as columns of a batch."""
    write_rows(tmp_path / "a.lance")
    source = LanceDataSource(tmp_path / "a.lance")
    record = source[41]

    assert list(record) == ["id", "text", "image", "tokens", "day"]
    assert (record["id"], record["text"], record["image"]) == (41, "row 41 é", b"41\0")
    assert (record["tokens"].tolist(), record["tokens"].dtype) == ([123, 124, 125], np.uint16)
    assert record["day"] == np.datetime64("2020-01-01")
    keys = np.random.default_rng(0).integers(0, 60, 100)
    assert [each["id"] for each in source.__getitems__(keys)] == keys.tolist()
    records: Any = LanceDataSource(tmp_path / "a.lance", columns=["tokens", "id"]).__getitems__(keys)
    assert isinstance(records, ColumnarRecords)
    batch: Any = records.stack(np.empty)
    assert list(batch) == ["tokens", "id"]
    assert batch["tokens"].tolist() == [[3 * key, 3 * key + 1, 3 * key + 2] for key in keys]


def test_a_version_stays_as_it_is(tmp_path: Path) -> None:
    """Rows that are deleted or appended later belong to another version, which is another source."""
    dataset = write_rows(tmp_path / "a.lance")
    first = LanceDataSource(tmp_path / "a.lance")
    dataset.delete("id % 10 = 3")
    dataset.insert(dataset.to_table().slice(0, 5))
    latest = LanceDataSource(tmp_path / "a.lance")
    again = LanceDataSource(tmp_path / "a.lance", version=first.version)

    assert (first.version, latest.version) == (1, 3)
    for source in (first, again, pickle.loads(pickle.dumps(first))):
        assert [record["id"] for record in source.__getitems__(range(len(source)))] == [*range(60)]
        assert source.fingerprint() == first.fingerprint()
    expected = [number for number in range(60) if number % 10 != 3] + [0, 1, 2, 4, 5]
    assert [record["id"] for record in latest.__getitems__(range(len(latest)))] == expected
    assert latest.fingerprint() != first.fingerprint()


def test_a_filter_selects_rows_once(tmp_path: Path) -> None:
    """In the order of the dataset, without deleted rows; worker processes read the same."""
    write_rows(tmp_path / "a.lance").delete("id in (8, 33)")
    source = LanceDataSource(tmp_path / "a.lance", columns=["id"], filter="id % 4 = 0 and text like 'row%'")
    expected = [number for number in range(0, 60, 4) if number != 8]

    assert [record["id"] for record in source.__getitems__(range(len(source)))] == expected
    assert source.fingerprint() != LanceDataSource(tmp_path / "a.lance", columns=["id"]).fingerprint()
    alone, others = (
        [
            batch["id"].tolist()
            for batch in millstream.load(source, shuffle=True, seed=1, batch_size=4, num_epochs=1, worker_count=count)
        ]
        for count in (0, 2)
    )
    assert alone == others
    assert {number for numbers in alone for number in numbers} <= set(expected)


def test_a_fork_is_an_error_and_not_a_deadlock(tmp_path: Path) -> None:
    """Lance's threads are not in a forked process, which says so."""
    write_rows(tmp_path / "a.lance")
    source = LanceDataSource(tmp_path / "a.lance")
    assert "after a fork" in source_error_after_fork(lambda: source[3])
    assert source[3]["id"] == 3


def test_a_dataset_may_be_in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a dataset in a fake of S3 are those of the local one, in worker processes too."""
    write_rows(tmp_path / "a.lance")
    files = [path for path in (tmp_path / "a.lance").rglob("*") if path.is_file()]
    with fake_s3({str(path.relative_to(tmp_path)): path.read_bytes() for path in files}) as address:
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        for name, value in {**keys, "AWS_ENDPOINT": address, "AWS_ALLOW_HTTP": "true"}.items():
            monkeypatch.setenv(name, value)
        remote, local = LanceDataSource("s3://bucket/a.lance"), LanceDataSource(tmp_path / "a.lance")
        assert len(remote) == len(local) == 60
        assert repr(remote[59]) == repr(local[59])
        here, far = (
            millstream.load(source, shuffle=True, seed=1, num_epochs=1, batch_size=4, worker_count=count)
            for source, count in ((local, 0), (remote, 1))
        )
        assert [batch["id"].tolist() for batch in far] == [batch["id"].tolist() for batch in here]


def test_damage_is_an_error_with_dataset_and_record(tmp_path: Path) -> None:
    """A file of a fragment that is cut or gone: its rows are errors, and the others are as they were."""
    write_rows(tmp_path / "a.lance")
    files = {len(path.read_bytes()): path for path in (tmp_path / "a.lance" / "data").iterdir()}
    path = next(iter(files.values()))
    whole = path.read_bytes()
    for damage in (lambda: path.write_bytes(whole[:100]), path.unlink):
        damage()
        source = LanceDataSource(tmp_path / "a.lance")
        failed = []
        for key in range(60):
            try:
                assert source[key]["id"] == key
            except DataSourceError as error:
                failed.append(f"Cannot read record {key} of '{tmp_path}/a.lance' (record key {key}): " in str(error))
        assert failed == [True] * 20
        with pytest.raises(DataSourceError, match=r"Cannot read record \d+ of"):
            source.__getitems__(range(60))


def test_what_cannot_be_read_is_an_error_at_construction(tmp_path: Path) -> None:
    """With the dataset and the reason."""
    path = tmp_path / "a.lance"
    write_rows(path)
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"path": tmp_path / "none.lance"}, FileNotFoundError, "No Lance dataset.*none.lance"),
        ({"path": path, "version": 9}, FileNotFoundError, "No Lance dataset with version 9"),
        ({"path": path, "version": 0}, ValueError, "version must be at least 1"),
        ({"path": path, "columns": ["id", "none"]}, ValueError, "'id', 'none' are wanted"),
        ({"path": path, "columns": "id"}, TypeError, "columns must be a sequence of names"),
        ({"path": path, "filter": "width > 3"}, ValueError, re.escape("got 'width > 3': Invalid user input")),
        ({"path": path, "filter": 3}, TypeError, "filter must be a condition"),
        ({"path": path, "filter": "id > 1000"}, ValueError, "must have records"),
    ]
    for arguments, error, message in wrong:
        with pytest.raises(error, match=message):
            LanceDataSource(**arguments)


def error_of(source: LanceDataSource, key: int) -> str:
    """Returns the text of the error of a record; empty if it is read."""
    try:
        source[key]
    except DataSourceError as error:
        return str(error)
    return ""


def test_a_flipped_byte_is_an_error_or_what_stands_in_the_file(tmp_path: Path) -> None:
    """Of a fragment or a manifest: refused with the path, or each row is read or an error that names it.

    Lance panics for some of these, and a panic is not an Exception.
    """
    path = tmp_path / "a.lance"
    lance.write_dataset(pa.table({"id": np.arange(6), "text": [f"row {number}" for number in range(6)]}), str(path))
    refusals: list[str] = []
    failed = 0
    for file in [next((path / "data").iterdir()), next((path / "_versions").glob("*.manifest"))]:
        whole = file.read_bytes()
        for offset in range(0, len(whole), 6):
            file.write_bytes(whole[:offset] + bytes([whole[offset] ^ 0x41]) + whole[offset + 1 :])
            try:
                source = LanceDataSource(path)
            except (DataSourceError, ValueError) as error:
                refusals.append(str(error))
                continue
            errors = [error_of(source, key) for key in range(min(6, len(source)))]
            for key, text in enumerate(errors):
                assert not text or f"Cannot read record {key} of '{path}' (record key {key}): " in text
            failed += sum(map(bool, errors))
        file.write_bytes(whole)
    assert len(refusals) > 10
    assert all(str(path) in refusal for refusal in refusals)
    assert failed > 100
