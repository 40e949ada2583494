"""Bagz files: every record as it was written, compressed or not."""

import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import DataSourceError
from millstream.sources import BagzDataSource
from millstream.sources.formats import bagz
from support.faults.memory_limits import measured_peak
from support.files.record_files import assert_records, emptied, every_record, records_of, write_bagz


@settings(max_examples=60)
@given(st.lists(st.binary(max_size=60), max_size=20), st.sampled_from([".bag", ".bagz"]), st.integers(8, 40))
def test_any_records_are_read_in_any_order(folder: Path, records: list[bytes], suffix: str, block_bytes: int) -> None:
    """Any records, empty ones or none too, are read in any order, however many limits are read at once."""
    path = write_bagz(emptied(folder) / f"a{suffix}", records)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bagz, "BLOCK_BYTES", block_bytes)
        with BagzDataSource(path) as source:
            assert_records(source, records)


def test_a_record_that_becomes_too_large_is_an_error(tmp_path: Path) -> None:
    """A record of more than max_record_bytes, decompressed, is an error with file and record."""
    records = [b"small", bytes(40_000_000), np.random.default_rng(0).bytes(1_000_000)]
    path = write_bagz(tmp_path / "a.bagz", records)
    for limit, too_large in ((999_999, {1, 2}), (1_000_000, {1}), (39_999_999, {1}), (40_000_000, set())):
        with BagzDataSource(path, max_record_bytes=limit) as source:
            for key in {0, 1, 2} - too_large:
                assert source[key] == records[key]
            for key in too_large:
                reason = f"larger than {limit:,} bytes.*increase max_record_bytes"
                with pytest.raises(DataSourceError, match=rf"record {key} .*a.bagz.*{reason}"):
                    source[key]


def test_the_memory_of_a_record_that_is_too_large_is_bounded(tmp_path: Path) -> None:
    """A record of 256 MB, stored in 12 KB, takes memory for a few times the limit."""
    compressor = zstandard.ZstdCompressor().compressobj()
    span = b"".join(compressor.compress(bytes(8 << 20)) for _ in range(32)) + compressor.flush()
    (tmp_path / "a.bagz").write_bytes(span + len(span).to_bytes(8, "little"))
    with BagzDataSource(tmp_path / "a.bagz", max_record_bytes=16 << 20) as source:
        with measured_peak() as peak, pytest.raises(DataSourceError, match="larger than"):
            source[0]
        assert peak() < 64 << 20


@pytest.mark.parametrize("block_bytes", [8, 1 << 20])
def test_limits_that_fall_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block_bytes: int) -> None:
    """Limits that fall are an error, however many are read at once: a record cannot end before it begins."""
    monkeypatch.setattr(bagz, "BLOCK_BYTES", block_bytes)
    path = write_bagz(tmp_path / "a.bag", [b"first", b"second", b"third"])
    content = bytearray(path.read_bytes())
    content[16] = 12  # The first record would end after the second.
    path.write_bytes(content)

    with pytest.raises(DataSourceError, match="damaged"):
        BagzDataSource(path)


def test_a_frame_that_is_not_whole_is_an_error(tmp_path: Path) -> None:
    """A frame that is not whole is an error, and does not yield the part of the record that is there."""
    path = write_bagz(tmp_path / "a.bagz", [b"first " * 2000])
    frame = path.read_bytes()[:-8]
    for stored in (frame[:-3], frame + b"more"):
        path.write_bytes(stored + len(stored).to_bytes(8, "little"))
        with (
            BagzDataSource(path) as source,
            pytest.raises(DataSourceError, match=r"record 0 .*it (is not a single|cannot)"),
        ):
            source[0]


def test_without_the_library_uncompressed_files_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library, uncompressed files are read; for compressed ones, the error says what to install."""
    monkeypatch.setitem(sys.modules, "zstandard", None)
    (tmp_path / "b.bagz").write_bytes(write_bagz(tmp_path / "a.bag", [b"one"]).read_bytes())
    with BagzDataSource(tmp_path / "a.bag") as source:
        assert source[0] == b"one"
    with pytest.raises(ImportError, match=r"pip install 'millstream\[bagz\]'"):
        BagzDataSource(tmp_path / "b.bagz")


@pytest.mark.parametrize("name", ["a.bag", "a.bagz"])
@pytest.mark.parametrize("records", [[b"one", b"", b"three" * 90], [b""] * 3])
def test_limits_may_be_in_a_file_of_their_own(tmp_path: Path, name: str, records: list[bytes]) -> None:
    """The limits may be in a file of their own beside the records."""
    content = write_bagz(tmp_path / name, records).read_bytes()
    begin = int.from_bytes(content[-8:], "little")
    (tmp_path / name).write_bytes(content[:begin])
    (tmp_path / f"limits.{name}").write_bytes(content[begin:])
    assert records_of(BagzDataSource(tmp_path / name)) == records


SIZE = (11).to_bytes(8, "little")
"""The size of the file of one record, which the last limit must be."""
WRONG_LIMITS = [b"", bytes(7), bytes(8), (99).to_bytes(8, "little"), b"\xff" * 8, (99).to_bytes(8, "little") + SIZE]


@pytest.mark.parametrize("content", [*WRONG_LIMITS, b"\xff" * 8 + SIZE])
def test_limits_that_do_not_fit_are_not_used(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """A file of limits that does not fit is logged and ignored; without limits at its end, the data is an error."""
    path = write_bagz(tmp_path / "a.bag", [b"one"])
    (tmp_path / "limits.a.bag").write_bytes(content)
    with caplog.at_level("INFO", "millstream"), BagzDataSource(path) as source:
        assert every_record(source) == [b"one"]
    assert "limits.a.bag' does not have the limits of" in caplog.text

    path.write_bytes(b"one")
    with pytest.raises(DataSourceError, match=r"a\.bag' is not a Bagz file"):
        BagzDataSource(path)
