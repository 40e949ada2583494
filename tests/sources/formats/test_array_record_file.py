"""Reads of one file, counted, with a reader that misbehaves as no file on disk does."""

import os
from pathlib import Path
from typing import Any

import pytest
from array_record.python.array_record_module import (
    ArrayRecordReader,
)

from millstream.errors import DataSourceError
from millstream.sources.formats import array_record
from millstream.sources.formats.array_record import _footer_offset, count_records, open_array_record
from support.files.record_files import write_array_record
from support.processes.worker_pools import python


class Reader:
    """Has 100 records, the decimal numbers, and notes how it was asked for them."""

    def __init__(self, path: str | bytes, options: str) -> None:
        self.path = path
        self.options = options
        self.calls: list[tuple[Any, ...]] = []

    def read(self, *indices: Any) -> list[bytes]:
        """Returns the records of `read([3, 1, 4])` or of `read(begin, end)`."""
        self.calls.append(indices)
        return [b"%d" % n for n in (indices[0] if len(indices) == 1 else range(*indices))]

    def ok(self) -> bool:
        return True

    def num_records(self) -> int:
        return 100

    def writer_options_string(self) -> str | None:
        """Returns the writer options that files from before October 2022 record."""
        return None

    def close(self) -> None:
        """Closes it."""


class EndsEarly(Reader):
    """Gives one record less than it is asked for in a batch."""

    def read(self, *indices: Any) -> list[bytes]:
        return super().read(*indices)[: -1 if len(indices) == 1 else None]


class Stumbles(Reader):
    """Fails in every batched read."""

    def read(self, *indices: Any) -> list[bytes]:
        if len(indices) == 1:
            raise RuntimeError("the network stumbled")
        return super().read(*indices)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A file that is there."""
    (tmp_path / "file").touch()
    return str(tmp_path / "file")


def set_costs(monkeypatch: pytest.MonkeyPatch, batched_read: float, fast_record: float) -> None:
    """Sets the costs that are assumed for the two ways to read."""
    monkeypatch.setattr(array_record, "_BATCHED_READ_SECONDS", batched_read)
    monkeypatch.setattr(array_record, "_BATCHED_READ_SECONDS_PER_RECORD_IN_FILE", 0.0)
    monkeypatch.setattr(array_record, "_BATCHED_READ_SECONDS_PER_THREAD", 0.0)
    monkeypatch.setattr(array_record, "_FAST_RECORD_SECONDS", fast_record)


@pytest.mark.parametrize("slow_from", [1, 2, 3, 7, 40, 90, 1000])
def test_records_come_in_order_whenever_they_turn_slow(
    path: str, slow_from: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the first slow record the rest is asked for in one call, and nothing is lost or read twice."""
    set_costs(monkeypatch, batched_read=0.0, fast_record=1e9)

    class TurnsSlow(Reader):
        def read(self, *indices: Any) -> list[bytes]:
            if len(self.calls) + 1 == slow_from:
                monkeypatch.setattr(array_record, "_FAST_RECORD_SECONDS", -1e15)
            return super().read(*indices)

    reader = TurnsSlow(path, "")
    positions = [number * 37 % 100 for number in range(100)]
    records = open_array_record(lambda *_: reader, path, {}, path).read(positions, positions)
    assert records == [b"%d" % position for position in positions]
    one_by_one = [call for call in reader.calls if len(call) == 2]
    assert len(one_by_one) == min(slow_from, len(positions))
    assert len(reader.calls) - len(one_by_one) == (len(one_by_one) < len(positions))


@pytest.mark.parametrize("num_records", range(1, 12))
def test_a_batched_read_costs_less_than_it_saves(path: str, num_records: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """If each record loses a second, one for 2.5 s comes after 3 records, if 4 more are left: it waits for one."""
    set_costs(monkeypatch, batched_read=2.5, fast_record=-1.0)
    reader = Reader(path, "")
    positions = list(range(num_records))
    open_array_record(lambda *_: reader, path, {}, path).read(positions, positions)
    batched = [call for call in reader.calls if len(call) == 1]
    assert batched == ([(positions[3:],)] if num_records >= 7 else [])


@pytest.mark.parametrize("reader_class", [EndsEarly, Stumbles])
def test_a_batched_read_that_fails_is_done_one_by_one(
    path: str, reader_class: type[Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If every single record can be read after all, nothing is wrong with the file."""
    set_costs(monkeypatch, batched_read=0.0, fast_record=0.0)
    file = open_array_record(reader_class, path, {}, path)
    assert file.read([5, 6, 7, 6], [0, 1, 2, 3]) == [b"5", b"6", b"7", b"6"]


@pytest.mark.parametrize(
    ("member", "result", "message"),
    [
        ("read", [], r"Cannot read record 5 of '.*file' \(record key 50\): not enough values"),
        ("ok", False, r"file' is not an ArrayRecord file, .*: the library gives no reason\."),
        ("num_records", 1 << 31, "at most 2,147,483,647 records, got 2,147,483,648"),
    ],
)
def test_results_that_make_no_sense_are_errors(
    path: str, monkeypatch: pytest.MonkeyPatch, member: str, result: Any, message: str
) -> None:
    """No record, a failure without a reason, and more records than the 32-bit numbers of the library can address."""
    monkeypatch.setattr(Reader, member, lambda *_: result)
    with pytest.raises(DataSourceError, match=message):
        open_array_record(Reader, path, {}, path).read([5, 6], [50, 60])


def test_options_of_the_caller_come_last(path: str) -> None:
    """The defaults are those for random access; an option given replaces its default."""
    given: list[dict[str, str]] = [{}, {"max_parallelism": "4", "footer_prefetch_bytes": "1M"}]
    assert [open_array_record(Reader, path, options, path).reader.options for options in given] == [
        "readahead_buffer_size:0,max_parallelism:0",
        "readahead_buffer_size:0,max_parallelism:4,footer_prefetch_bytes:1M",
    ]


BLOCK = 1 << 16


def write(path: Path, records: list[bytes], options: str = "group_size:1") -> str:
    return str(write_array_record(path, records, options))


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


def test_leaves_other_files_to_the_reader(tmp_path: Path) -> None:
    """Groups of several records, text, zeros, noise, and parts of an ArrayRecord file have no count."""
    for count, group in [(2, 2), (100, 7), (100, 1000)]:
        assert count_records(write(tmp_path / "file", [b"x"] * count, f"group_size:{group}")) is None
    assert count_records(write(tmp_path / "file", [b"x"], "group_size:10")) == 1
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
    with path.open("r+b", buffering=0) as file:
        for start, stop in [(64, 104), (footer, footer + 40), (len(healthy) - BLOCK, len(healthy) - BLOCK + 112)]:
            for bit in range(start * 8, stop * 8):
                os.pwrite(file.fileno(), bytes([healthy[bit // 8] ^ 1 << bit % 8]), bit // 8)
                count = count_records(str(path))
                assert count is None or count >= 0
                os.pwrite(file.fileno(), healthy[bit // 8 : bit // 8 + 1], bit // 8)
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
    answer = python("-c", program, path, check=True)
    assert answer.stdout == "3 1 True True\n"
