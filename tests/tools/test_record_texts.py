"""Records as bytes, and the display of records and sizes: functions against plain Python."""

import datetime as dt
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import DataSourceError
from millstream.tools.inspection import histogram, preview_lines
from millstream.tools.record_writers import Encoding, choose_encoding, compression_level, encode_records
from support.files.example_messages import example_message

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(), values, max_size=4),
    max_leaves=12,
)


@given(st.lists(JSON, min_size=1, max_size=5))
def test_json_is_read_as_what_it_was(records: list[Any]) -> None:
    """Every JSON value is written to one line of UTF-8 and parsed back."""
    texts = encode_records(Encoding("json"), records, range(len(records)))

    assert [json.loads(text.decode()) for text in texts] == records
    assert all(b"\n" not in text for text in texts)


def test_values_of_numpy_and_times_are_json() -> None:
    """Arrays become lists, scalars numbers, and times ISO 8601 text."""
    record = {
        "array": np.arange(4, dtype=np.uint8).reshape(2, 2),
        "number": np.float32(0.5),
        "flag": np.bool_(True),
        "day": dt.date(2026, 1, 2),
        "time": np.datetime64("2026-01-02T03:04:05.000000006"),
        "times": np.array(["2026-01-02"], "M8[D]"),
    }
    (text,) = encode_records(Encoding("json"), [record], [0])
    assert json.loads(text) == {
        "array": [[0, 1], [2, 3]],
        "number": 0.5,
        "flag": True,
        "day": "2026-01-02",
        "time": "2026-01-02T03:04:05.000000006",
        "times": ["2026-01-02"],
    }


@pytest.mark.parametrize(
    ("record", "encoding"),
    [
        (b"a", "raw"),
        ("a", "raw"),
        (np.zeros(3), "raw"),
        ({"a": b"", "b": 1}, "example"),
        ({"a": np.zeros(3)}, "example"),
        ({"a": 1, "b": "x"}, "json"),
        ([1, 2], "json"),
        (3, "json"),
    ],
)
def test_the_first_record_chooses_an_encoding_that_it_has(record: Any, encoding: str) -> None:
    """The encoding chosen for the first record can write it."""
    assert choose_encoding(record) == Encoding(encoding)
    assert len(encode_records(Encoding(encoding), [record], [0])) == 1


def test_halves_of_characters_are_an_error() -> None:
    """A lone surrogate has no UTF-8 and is an error with its record."""
    with pytest.raises(DataSourceError, match=r"Cannot write record 1 with encode='json': .*surrogates"):
        encode_records(Encoding("json"), ["a", "\ud800"], [0, 1])


@pytest.mark.parametrize("encoding", ["raw", "json", "example"])
def test_the_record_that_cannot_be_written_is_named(encoding: str) -> None:
    """A record that cannot be encoded is an error with its key and the cause."""
    good: Any = {"raw": b"", "json": 1, "example": {}}[encoding]
    bad: Any = {"a": object()} if encoding == "example" else object()
    with pytest.raises(
        DataSourceError, match=rf"Cannot write record 12 with encode='{encoding}': .*object.*Choose another"
    ):
        encode_records(Encoding(encoding), [good, good, bad], [10, 11, 12])


def test_raw_arrays_are_little_endian() -> None:
    """Arrays of any byte order and layout are written little-endian in C order."""
    array = np.arange(12, dtype=">u2").reshape(3, 4)
    assert encode_records(Encoding("raw"), [array.T], [0]) == [array.T.astype("<u2").tobytes()]


@given(st.lists(st.integers(0, 2**45), min_size=1, max_size=200))
def test_histograms_count_every_record_once(sizes: list[int]) -> None:
    """A histogram has at most twelve short lines that count every record once; none if all sizes are similar."""
    lines = list(histogram(np.array(sizes)))

    assert len(lines) <= 12
    assert all(len(line) <= 80 for line in lines)
    assert not lines or sum(int(line.split()[-1].replace(",", "")) for line in lines) == len(sizes)
    assert not lines or max(line.count("#") for line in lines) == 40
    assert lines or max(sizes) <= 2 * max(1, min(sizes))


@settings(max_examples=40)
@given(
    st.recursive(
        JSON | st.binary(max_size=300) | st.just(np.arange(1000)) | st.just(np.float16(1)),
        lambda values: st.dictionaries(st.text(), values, max_size=50),
        max_leaves=60,
    )
)
def test_records_are_shown_in_bounded_space(record: Any) -> None:
    """The preview of any record has at most 34 lines."""
    lines = list(preview_lines(record))

    assert 1 <= len(lines) <= 34
    assert all(len(line.splitlines()) <= 1 for line in map(ascii, lines))


@given(st.binary(max_size=60))
def test_any_bytes_can_be_shown(record: bytes) -> None:
    """Any bytes have a preview, also those that are almost an Example."""
    whole = example_message({"a": ("int64", [1, 300]), "b": ("bytes", [b"x"])})
    assert "a tf.train.Example" in next(preview_lines(whole))
    for cut in (record, whole[: len(record)], record + whole, whole + record):
        assert list(preview_lines(cut))


@pytest.mark.parametrize(
    ("extension", "compression", "level"),
    [
        (".array_record", None, None),
        (".array_record", "none", None),
        (".array_record", "zstd", 3),
        (".array_record", "zstd:22", 22),
        (".bag", None, None),
        (".bagz", None, 3),
        (".bagz", "zstd:1", 1),
    ],
)
def test_levels_of_compression(extension: str, compression: str | None, level: int | None) -> None:
    """Each format has its own default level of compression; an unknown compression is an error with the valid ones."""
    assert compression_level(extension, compression) == level
    for unknown in ("zstd:", "zstd:0", "zstd:x", "none:1", "", "gzip", "zstd:-1"):
        with pytest.raises(ValueError, match=r"must be (none, zstd|between 1 and 22)"):
            compression_level(extension, unknown)
