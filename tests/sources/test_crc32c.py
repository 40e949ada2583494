"""The checksum of TFRecord files."""

import google_crc32c
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from millstream.sources.crc32c import masked_crc32c, masked_crc32c_of_lengths


def masked(crc: int) -> int:
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32


def test_known_values_come_out() -> None:
    """The examples of RFC 3720, appendix B.4, come out, whatever the lengths."""
    known = {bytes(32): 0x8A9136AA, bytes(range(32)): 0x46DD794E, b"123456789": 0xE3069283, b"": 0}

    assert masked_crc32c(list(known)).tolist() == [masked(crc) for crc in known.values()]


@given(st.lists(st.binary(min_size=8, max_size=8), max_size=20))
def test_checksums_of_lengths_are_those_of_the_library(lengths: list[bytes]) -> None:
    """The tables give the library's checksum of each row of eight bytes."""
    rows = np.frombuffer(b"".join(lengths), np.uint8).reshape(-1, 8)

    assert masked_crc32c_of_lengths(rows).tolist() == [masked(google_crc32c.value(length)) for length in lengths]
