"""The checksum of TFRecord files, with a library and without."""

import sys

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.sources import crc32c
from millstream.sources.crc32c import crc32c_by_tables, masked_crc32c, masked_crc32c_of_rows

# The examples of RFC 3720, appendix B.4, and the usual one.
KNOWN = {
    bytes(32): 0x8A9136AA,
    b"\xff" * 32: 0x62A8AB43,
    bytes(range(32)): 0x46DD794E,
    bytes(range(31, -1, -1)): 0x113FDB5C,
    b"123456789": 0xE3069283,
    b"": 0,
}


def test_known_values_come_out() -> None:
    """Known checksums come out, all of them at once, whatever the lengths."""
    assert crc32c_by_tables(list(KNOWN)).tolist() == list(KNOWN.values())
    assert crc32c_by_tables([]).tolist() == []


@given(st.lists(st.integers(0, 700), max_size=20), st.integers(0, 2**32 - 1))
def test_tables_agree_with_the_library(lengths: list[int], seed: int) -> None:
    """The tables agree with the library for any mixture of lengths, around every number of blocks."""
    rng = np.random.default_rng(seed)
    pieces = [rng.bytes(length) for length in lengths]

    assert crc32c_by_tables(pieces).tolist() == [google_crc32c.value(piece) for piece in pieces]


def test_long_pieces_agree_with_the_library() -> None:
    """Long pieces agree with the library beside short ones, over many levels of pairs."""
    pieces = [np.random.default_rng(0).bytes(length) for length in (1_000_003, 5, 65_536, 0, 4_095)]

    assert crc32c_by_tables(pieces).tolist() == [google_crc32c.value(piece) for piece in pieces]


@pytest.mark.parametrize("width", [0, 1, 8, 60])
def test_rows_are_masked_like_pieces(width: int) -> None:
    """A table of short pieces has the checksums of its rows, and without the library they are the same."""
    rows = np.random.default_rng(width).integers(0, 256, (50, width), np.uint8)

    expected = masked_crc32c([row.tobytes() for row in rows])

    assert masked_crc32c_of_rows(rows).tolist() == expected.tolist()


def test_without_the_library_values_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library, values are the same: it is for speed only."""
    pieces = [b"a", b"record" * 100, b""]
    expected = masked_crc32c(pieces).tolist()
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    crc32c._library.cache_clear()
    try:
        assert crc32c._library() is None
        assert masked_crc32c(pieces).tolist() == expected
    finally:
        crc32c._library.cache_clear()
