"""Indices of `tfrecord2idx` beside TFRecord files: used where they fit, and otherwise the records are the same."""

import itertools
import logging
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from record_files import every_record, tfrecord_bytes, write_tfrecord

from millstream.errors import DataSourceError
from millstream.sources import TFRecordDataSource, tfrecord

RECORDS = [b"record %d " % number * (number % 5) for number in range(200)]


def index_text(records: list[bytes]) -> str:
    """Returns what `tfrecord2idx` writes: where each record begins, and how long it is with all that frames it."""
    sizes = [len(record) + 16 for record in records]
    starts = [0, *itertools.accumulate(sizes)][:-1]
    return "".join(f"{start} {size}\n" for start, size in zip(starts, sizes, strict=True))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file of records."""
    return write_tfrecord(tmp_path / "a.tfrecord", RECORDS)


@pytest.mark.parametrize("name", ["a.idx", "a.tfrecord.idx"])
def test_an_index_that_fits_is_used(
    path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No header is looked for; the records are those of the file, and damage in them is found as ever."""
    caplog.set_level(logging.INFO, "millstream")
    path.with_name(name).write_text(index_text(RECORDS))
    monkeypatch.setattr(tfrecord, "_headers_of_block", None)
    with TFRecordDataSource(path) as source:
        assert every_record(source) == RECORDS
    assert caplog.text == ""


@given(records=st.lists(st.binary(max_size=30), min_size=1, max_size=9), data=st.data())
def test_the_records_are_the_same_whatever_the_index_says(
    records: list[bytes], data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Numbers that are others, lines that are missing or cut, and things that are no index change nothing."""
    folder = tmp_path_factory.mktemp("dali")
    path = write_tfrecord(folder / "a.tfrecord", records)
    text = index_text(records)
    cut = data.draw(st.integers(0, len(text)))
    other = data.draw(st.text("0123456789 \n", max_size=3) | st.text(max_size=3))
    (folder / "a.idx").write_text(text[:cut] + other + text[cut + data.draw(st.integers(0, 3)) :])
    with TFRecordDataSource(path) as source:
        assert every_record(source) == records


@pytest.mark.parametrize("content", ["", "\n", "0\n", "0 x\n", "-1 5\n", "0 99999999999999999999999999\n"])
def test_one_that_does_not_fit_is_named_in_the_log(path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    """Once: afterwards there is an index of our own."""
    caplog.set_level(logging.INFO, "millstream")
    (path.parent / "a.idx").write_text(content)
    for _ in range(2):
        with TFRecordDataSource(path) as source:
            assert every_record(source) == RECORDS
    assert caplog.text.count("a.idx' is not the index of") == 1


def test_one_that_is_older_than_the_file_is_not_used(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The file may have other records of the same sizes by now, or be written to by half."""
    caplog.set_level(logging.INFO, "millstream")
    index = path.parent / "a.idx"
    index.write_text(index_text(RECORDS))
    os.utime(index, ns=(0, path.stat().st_mtime_ns - 1))
    with TFRecordDataSource(path) as source:
        assert every_record(source) == RECORDS
    assert "a.idx' is older than" in caplog.text


def test_an_index_does_not_hide_that_a_file_was_cut_short(path: Path) -> None:
    """The error is the same as without it."""
    (path.parent / "a.idx").write_text(index_text(RECORDS))
    path.write_bytes(tfrecord_bytes(RECORDS)[:-3])
    os.utime(path, ns=(0, 0))
    with pytest.raises(DataSourceError, match="cut short"):
        TFRecordDataSource(path)
