"""TFRecord files and their checksums: every record as it was written, or an error that says where."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import DataSourceError
from millstream.sources import TFRecordDataSource
from millstream.sources.file_formats import format_of_file
from millstream.sources.formats import tfrecord
from support.files.record_files import assert_records, emptied, records_of, write_tfrecord


@settings(max_examples=50)
@given(st.lists(st.lists(st.binary(max_size=40), max_size=8), min_size=1, max_size=4), st.integers(12, 80))
def test_any_records_are_read_in_any_order(folder: Path, files: list[list[bytes]], block_bytes: int) -> None:
    """Any records are read, whatever their lengths, however spread over files, and wherever blocks of the scan end."""
    everything = [record for records in files for record in records]
    emptied(folder)
    paths = [write_tfrecord(folder / f"{number}.tfrecord", records) for number, records in enumerate(files)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tfrecord, "_BLOCK_BYTES", block_bytes)
        with TFRecordDataSource(paths) as source:
            assert_records(source, everything)


def test_large_records_are_found_header_by_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large records are found between small ones, however many are looked for at once."""
    monkeypatch.setattr(tfrecord, "_HEADERS_ALONE", 3)
    monkeypatch.setattr(tfrecord, "_BLOCK_BYTES", 40_000)
    records = [bytes([n]) * size for n, size in enumerate([5, 90_000, *[30_000] * 8, 7, 7, 7, 50_000, 0])]
    path = write_tfrecord(tmp_path / "a", records)

    assert records_of(TFRecordDataSource(path)) == records


def test_without_the_library_records_are_read_unchecked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without google-crc32c, `check_crc` is an error at construction; lengths are checked and records read without."""
    records = [b"x" * length for length in range(200)]
    path = write_tfrecord(tmp_path / "a", records)
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    tfrecord.crc32c_function.cache_clear()
    try:
        with pytest.raises(ImportError, match=r"pip install 'millstream\[tfrecord\]', or pass check_crc=False"):
            TFRecordDataSource(path)
        assert records_of(TFRecordDataSource(path, check_crc=False)) == records
        assert format_of_file(str(path)).name == "tfrecord"
    finally:
        tfrecord.crc32c_function.cache_clear()


def test_files_without_checksums_can_be_read(tmp_path: Path) -> None:
    """Some writers leave zeros for checksums: `check_crc=False` looks at none, not even at those of lengths."""
    content = b"".join(len(r).to_bytes(8, "little") + bytes(4) + r + bytes(4) for r in (b"one", b"", b"three"))
    (tmp_path / "a").write_bytes(content)

    with pytest.raises(DataSourceError, match=r"not a TFRecord file, or is damaged: the length of record 0, at byte 0"):
        TFRecordDataSource(tmp_path / "a")
    assert records_of(TFRecordDataSource(tmp_path / "a", check_crc=False)) == [b"one", b"", b"three"]


def test_a_range_beyond_its_file_is_an_error(tmp_path: Path) -> None:
    """A range of records that ends beyond its file is an error at construction."""
    write_tfrecord(tmp_path / "a", [b"%d" % n for n in range(10)])
    with pytest.raises(DataSourceError, match=r"a' has 10 records, but a range of it ends at record 40"):
        TFRecordDataSource(f"{tmp_path}/a[2:40]")
