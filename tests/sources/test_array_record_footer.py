"""Counting records without a reader, against the reader."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from array_record.python.array_record_module import (
    ArrayRecordReader,
    ArrayRecordWriter,
)

from millstream.sources.array_record_footer import _footer_offset, count_records

BLOCK = 1 << 16


def write(path: Path, records: list[bytes], options: str = "group_size:1") -> str:
    """Writes the records and returns the path."""
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return str(path)


@pytest.mark.parametrize("codec", ["zstd", "brotli", "snappy", "uncompressed", "transpose", "pad_to_block_boundary"])
@pytest.mark.parametrize("count", [0, 1, 2, 127, 128, 1000])
def test_counts_files_of_single_records(tmp_path: Path, codec: str, count: int) -> None:
    """The count is the reader's for every codec."""
    path = write(tmp_path / "file", [b"%d" % n for n in range(count)], f"group_size:1,{codec}")
    assert count_records(path) == count


def test_counts_wherever_the_footer_begins(tmp_path: Path) -> None:
    """The footer's header may be cut in two by the header of a block, at each of its bytes."""
    bytes_before_boundary = set()
    for length in range(BLOCK - 180, BLOCK - 80):
        path = write(tmp_path / "file", [b"x" * length], "group_size:1,uncompressed")
        assert count_records(path) == 1
        with Path(path).open("rb") as file:
            offset = _footer_offset(file, Path(path).stat().st_size)
        assert offset is not None
        bytes_before_boundary.add(-offset % BLOCK)
    assert bytes_before_boundary >= set(range(41))


def test_leaves_groups_to_the_reader(tmp_path: Path) -> None:
    """Groups of several records are not guessed at, unless there is only one record."""
    for count, group in [(2, 2), (100, 7), (100, 1000)]:
        path = write(tmp_path / "file", [b"x"] * count, f"group_size:{group}")
        assert count_records(path) is None
    assert count_records(write(tmp_path / "file", [b"x"], "group_size:10")) == 1


def test_leaves_other_files_to_the_reader(tmp_path: Path) -> None:
    """Text, zeros, noise, and parts of an ArrayRecord file have no count."""
    whole = Path(write(tmp_path / "whole", [b"x" * 1000] * 300, "group_size:1,uncompressed")).read_bytes()
    others = [b"", b"text" * 50_000, bytes(1 << 18), os.urandom(1 << 18), whole[:-1], whole[:-BLOCK], whole[BLOCK:]]
    for number, content in enumerate(others):
        path = tmp_path / str(number)
        path.write_bytes(content)
        assert count_records(str(path)) is None


def test_a_damaged_index_is_no_crash(tmp_path: Path) -> None:
    """A flipped bit of the footer gives a count or None, and never an exception."""
    path = Path(write(tmp_path / "file", [b"x"] * 3))
    healthy = path.read_bytes()
    footer = healthy.rindex(b"r\x04", 0, BLOCK) - 24
    for start, stop in [(64, 104), (footer, footer + 40), (len(healthy) - BLOCK, len(healthy) - BLOCK + 112)]:
        for bit in range(start * 8, stop * 8):
            damaged = bytearray(healthy)
            damaged[bit // 8] ^= 1 << bit % 8
            path.write_bytes(damaged)
            count = count_records(str(path))
            assert count is None or count >= 0
    path.write_bytes(healthy)
    reader = ArrayRecordReader(str(path))
    assert reader.num_records() == count_records(str(path)) == 3
    reader.close()


def test_constructing_a_source_starts_no_threads(tmp_path: Path) -> None:
    """A process that only constructs and pickles a source keeps no thread, but has imported what reads need."""
    path = write(tmp_path / "file", [b"x"] * 3)
    program = (
        "import os, pickle, sys, threading; from millstream.sources import ArrayRecordDataSource;"
        "source = ArrayRecordDataSource(sys.argv[1]);"
        "pickle.dumps(source); print(len(source), threading.active_count(), len(os.listdir('/proc/self/task')) < 32,"
        "'array_record.python.array_record_module' in sys.modules)"
    )
    answer = subprocess.run(
        [sys.executable, "-c", program, path], check=True, capture_output=True, text=True, timeout=300
    )
    assert answer.stdout == "3 1 True True\n"
