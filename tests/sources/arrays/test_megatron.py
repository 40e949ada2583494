"""Megatron's indexed datasets: the tokens of every sequence, in the dtype that they were written with."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import DataSourceError
from millstream.sources import MegatronDataSource
from millstream.sources.arrays import megatron
from support.files.record_files import MEGATRON_CODES, emptied, every_record, write_megatron

SEQUENCES = [np.arange(length, dtype=np.uint16) * 300 for length in (3, 0, 5, 2)]


@settings(max_examples=50)
@given(
    st.lists(st.integers(0, 20), min_size=1, max_size=20), st.sampled_from(sorted(MEGATRON_CODES)), st.integers(1, 5)
)
def test_any_sequences_are_read_in_any_order(folder: Path, lengths: list[int], dtype: str, at_once: int) -> None:
    """Any sequences, empty ones too, are read in any order; each is an array of its own that can be written to."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(0, 100, length).astype(dtype) for length in lengths]
    prefix = write_megatron(emptied(folder) / "data", sequences)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(megatron, "_SEQUENCES_PER_READ", at_once)
        with MegatronDataSource(prefix) as source:
            order = rng.permutation(len(lengths))
            records = source.__getitems__(order)

    assert [record.tolist() for record in records] == [sequences[key].tolist() for key in order]
    assert {record.dtype for record in records} == {np.dtype(dtype)}
    assert all(record.flags.writeable for record in records)


def test_paths_are_prefixes_files_and_patterns(tmp_path: Path) -> None:
    """Paths are prefixes, files or patterns, with and without the ending of the data's file."""
    for name in ("b", "a"):
        write_megatron(tmp_path / f"{name}_document", [np.array([ord(name)], np.int32)])
    for prefix in (
        tmp_path / "*_document",
        tmp_path / "*.bin",
        [tmp_path / "a_document", f"{tmp_path}/b_document.bin"],
    ):
        with MegatronDataSource(prefix) as source:
            assert [record.tolist() for record in every_record(source)] == [[97], [98]]


def changed(prefix: Path, **parts: Any) -> None:
    """Writes to a part of the index of `SEQUENCES`."""
    places = {
        "magic": (0, "<B"),
        "version": (9, "<Q"),
        "code": (17, "<B"),
        "count": (18, "<Q"),
        "length": (34, "<i"),
        "start": (58, "<q"),
    }
    content = bytearray(prefix.with_name("data.idx").read_bytes())
    for part, value in parts.items():
        struct.pack_into(places[part][1], content, places[part][0], value)
    prefix.with_name("data.idx").write_bytes(content)


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"magic": 0}, "does not begin as one"),
        ({"version": 2}, "version 2"),
        ({"code": 99}, "dtype 99"),
        ({"count": 2**40}, "ends before the offsets"),
        ({"count": 3}, "not contiguous|have [0-9]+ bytes"),
        ({"length": -1}, "not contiguous"),
        ({"length": 4}, "not contiguous"),
        ({"start": 2}, "not contiguous"),
    ],
)
def test_an_index_that_does_not_fit_is_an_error(tmp_path: Path, parts: dict[str, int], words: str) -> None:
    """An index that does not fit is an error at construction that says what is wrong with it."""
    prefix = write_megatron(tmp_path / "data", SEQUENCES)
    changed(prefix, **parts)
    with pytest.raises(DataSourceError, match=rf"data\.idx' is not the index .*({words})"):
        MegatronDataSource(prefix)


def test_a_missing_index_is_the_usual_error(tmp_path: Path) -> None:
    """A missing index is a FileNotFoundError that names the file."""
    (tmp_path / "data.bin").write_bytes(bytes(8))
    with pytest.raises(FileNotFoundError, match=r"data\.idx"):
        MegatronDataSource(tmp_path / "data")
