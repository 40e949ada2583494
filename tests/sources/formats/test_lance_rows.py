"""Lance datasets: versions, filters, types, what is refused, and damage."""

import datetime as dt
import pickle
from pathlib import Path
from typing import Any

import lance
import numpy as np
import pyarrow as pa
import pytest

from millstream.core.columnar import ColumnarRecords
from millstream.errors import DataSourceError
from millstream.sources import LanceDataSource
from support.files.record_files import every_record
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
    """In the order of the dataset, without deleted rows."""
    write_rows(tmp_path / "a.lance").delete("id in (8, 33)")
    source = LanceDataSource(tmp_path / "a.lance", columns=["id"], filter="id % 4 = 0 and text like 'row%'")
    expected = [number for number in range(0, 60, 4) if number != 8]

    assert [record["id"] for record in source.__getitems__(range(len(source)))] == expected
    assert source.fingerprint() != LanceDataSource(tmp_path / "a.lance", columns=["id"]).fingerprint()


def test_a_dataset_may_be_in_a_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of a dataset in a fake of S3 are those of the local one."""
    write_rows(tmp_path / "a.lance")
    files = [path for path in (tmp_path / "a.lance").rglob("*") if path.is_file()]
    with fake_s3({str(path.relative_to(tmp_path)): path.read_bytes() for path in files}) as address:
        keys = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}
        for name, value in {**keys, "AWS_ENDPOINT": address, "AWS_ALLOW_HTTP": "true"}.items():
            monkeypatch.setenv(name, value)
        remote, local = LanceDataSource("s3://bucket/a.lance"), LanceDataSource(tmp_path / "a.lance")
        assert repr(every_record(remote)) == repr(every_record(local))
        assert repr(remote[59]) == repr(local[59])


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
        ({"path": path, "filter": "width > 3"}, ValueError, "got 'width > 3': .*No field named width"),
        ({"path": path, "filter": 3}, TypeError, "filter must be a condition"),
        ({"path": path, "filter": "id > 1000"}, ValueError, "must have records"),
    ]
    for arguments, error, message in wrong:
        with pytest.raises(error, match=message):
            LanceDataSource(**arguments)


def test_damage_is_an_error_or_what_stands_in_the_file(tmp_path: Path) -> None:
    """A file that is gone, cut or flipped, for which Lance may panic: refused, or an error that names the row."""
    path, rows = tmp_path / "a.lance", {"id": np.arange(12), "text": [f"row {number}" for number in range(12)]}
    lance.write_dataset(pa.table(rows), str(path), max_rows_per_file=6)
    fragments = [path / "data" / fragment.data_files()[0].path for fragment in lance.dataset(path).get_fragments()]
    refusals: list[str] = []
    errors: list[tuple[bool, str]] = []
    for file in (fragments[0], next((path / "_versions").glob("*.manifest"))):
        whole = file.read_bytes()
        flips = [whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :] for at in range(0, len(whole), 6)]
        for content in (None, whole[:100], *flips):
            file.unlink() if content is None else file.write_bytes(content)
            try:
                source = LanceDataSource(path)
            except (OSError, ValueError) as error:
                refusals.append(str(error))
                continue
            for key in range(min(12, len(source))):
                try:
                    assert source[key]["id"] == key or key < 6
                except DataSourceError as error:
                    is_named = f"Cannot read record {key} of '{path}' (record key {key}): " in str(error)
                    errors.append((is_named and (key < 6 or file != fragments[0]), str(error)))
        file.write_bytes(whole)
    assert len(refusals) > 10
    assert all(str(path) in refusal for refusal in refusals)
    assert len(errors) > 100
    assert [text for is_right, text in errors if not is_right] == []
