"""A list of records crosses as memory that all workers share, and reads as the list does."""

import dataclasses
import operator
import threading
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream.loader.transport import pipeline_file, shared_records
from millstream.loader.transport.pickling import ClassTable
from millstream.loader.transport.shared_records import LARGE_ARRAY_BYTES, SharedRecords, share
from millstream.sources.record_copies import MAX_COPIED_BYTES
from support.draw.elements_of_all_kinds import elements
from support.processes.pickles import sent
from support.processes.worker_pools import pids_of
from support.streams import comparable


@dataclasses.dataclass(slots=True)
class Sample:
    image: Any
    label: int


@pytest.fixture
def everything_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes lists of any size be shared."""
    monkeypatch.setattr(shared_records, "SMALLEST_BYTES", 0)
    monkeypatch.setattr(shared_records, "SMALLEST_RECORD_BYTES", 0)


def arrived(records: Any) -> Any:
    """Returns records as they are in a worker."""
    pickled, buffers = sent(share(records))
    return ClassTable().loads(pickled, buffers)[0]


RECORDS: dict[str, Callable[[], Sequence[Any]]] = {
    "bytes": lambda: [bytes([number]) * number for number in range(100)],
    "texts": lambda: ["ä€\ud800" * number for number in range(100)],
    "dicts": lambda: [{"image": np.full((number, 3), number), "label": number} for number in range(100)],
    "arrays": lambda: [np.arange(number, dtype=np.int32)[::-1] for number in range(100)],
    "arrays of dates": lambda: [np.full(number, "2024-02-29", "M8[D]") for number in range(100)],
    "arrays in big-endian order": lambda: [np.arange(number).astype(">u2") for number in range(100)],
    "arrays of several dtypes": lambda: [np.arange(5, dtype=kind) for kind in ("i4", "i8", "f2") * 3],
    "images": lambda: [np.full((number, 3), number) for number in range(100)],
    "large arrays": lambda: [np.full(LARGE_ARRAY_BYTES * (number % 3), number, np.uint8) for number in range(20)],
    "large arrays in parts": lambda: [
        {"a": [np.arange(LARGE_ARRAY_BYTES)[::2]] * 2, "b": number} for number in range(9)
    ],
    "objects": lambda: [Sample(np.full(3, number), number) for number in range(100)],
    "mixed": lambda: [1, "text", None, b"bytes", np.zeros(3), (1, 2)],
    "tuple": lambda: tuple({"a": number} for number in range(70)),
}


@pytest.mark.usefixtures("everything_is_shared")
@pytest.mark.parametrize("name", RECORDS)
def test_shared_records_are_those_of_the_list(name: str) -> None:
    """Shared records equal the list's, by any index or slice, and raise the list's own errors."""
    records = RECORDS[name]()
    shared = arrived(records)

    assert type(shared) is SharedRecords
    assert len(shared) == len(records)
    for number in (*range(-len(records), len(records)), np.int64(3)):
        assert comparable(shared[number]) == comparable(records[number])
    assert comparable(shared[2:9:3]) == comparable(records[2:9:3])
    for numbers in ([*reversed(range(len(records))), 0], [-1, 0], [3], []):
        assert comparable(shared.__getitems__(numbers)) == comparable([records[number] for number in numbers])
    for beyond in (len(records), -len(records) - 1):
        with pytest.raises(IndexError, match=f"{type(records).__name__} index out of range"):
            shared[beyond]
        with pytest.raises(IndexError, match=f"{type(records).__name__} index out of range"):
            shared.__getitems__([0, beyond])
        with pytest.raises(IndexError, match=f"{type(records).__name__} index out of range"):
            records[beyond]


@pytest.mark.usefixtures("everything_is_shared")
@given(records=st.lists(elements, min_size=1, max_size=4))
@settings(deadline=None, max_examples=40)
def test_records_of_all_kinds_can_be_shared(records: list[Any]) -> None:
    """Structure, dtype, shape and bytes of whatever a record is are kept."""
    assert [comparable(record) for record in arrived(records)] == [comparable(record) for record in records]


@pytest.mark.usefixtures("everything_is_shared")
def test_records_keep_their_classes() -> None:
    """A class that crosses by value does so once, not with each record."""

    @dataclasses.dataclass
    class Local:
        image: Any

    records = [Local(number) for number in range(100)]
    shared = share(records)

    assert type(shared) is SharedRecords
    assert shared.__reduce__()[1][0].memory.nbytes < 100 * len(records)
    assert [type(shared[number]) is Local for number in range(len(shared))] == [True] * len(records)
    assert len({type(record) for record in arrived(records)[:]}) == 1


@pytest.mark.usefixtures("everything_is_shared")
def test_large_arrays_of_records_are_not_copied() -> None:
    """Two reads of a record give two views of the same memory."""
    shared = arrived([{"image": np.ones(MAX_COPIED_BYTES + 1, np.uint8)} for _ in range(3)])

    assert np.shares_memory(shared[1]["image"], shared[1]["image"])
    assert not np.shares_memory(shared[0]["image"], shared[1]["image"])


@pytest.mark.usefixtures("everything_is_shared")
def test_arrays_of_one_dtype_lie_end_to_end() -> None:
    """Nothing but their bytes is sent; a worker's are its own, to be written to, unless they are large."""
    records = [np.arange(number, dtype=np.uint16) for number in (3, 0, MAX_COPIED_BYTES, 2)]
    shared = arrived(records)

    assert shared.__reduce__()[1][0].memory.tobytes() == b"".join(record.tobytes() for record in records)
    shared[0][:] = 7
    assert shared[0].tolist() == [0, 1, 2]
    assert shared[3].flags.aligned
    assert np.shares_memory(shared[2], shared[2])
    assert [array.flags.writeable for array in shared[:]] == [True, True, False, True]


@pytest.mark.usefixtures("everything_is_shared")
def test_arrays_that_must_not_be_written_to_stay_so() -> None:
    """A record in a worker refuses what it would refuse in the user's process."""
    records = [np.frombuffer(bytes([number] * 8), np.uint8) for number in range(9)]

    assert [array.flags.writeable for array in arrived(records)[:]] == [False] * 9


@pytest.mark.usefixtures("everything_is_shared")
def test_large_arrays_in_a_file_are_not_sent(tmp_path: Path) -> None:
    """Documents that are parts of a mapped file of tokens cross as places in it, if they are large."""
    np.zeros(4 * LARGE_ARRAY_BYTES, np.uint8).tofile(tmp_path / "tokens")
    tokens = np.asarray(np.memmap(tmp_path / "tokens", np.uint8, "r+"))
    records = np.split(tokens, 4)

    assert share(records).__reduce__()[1][0].memory.nbytes < LARGE_ARRAY_BYTES
    assert comparable(arrived(records)[:]) == comparable(records)


LONG = {"table": "x" * 1_000_000}

KEPT: dict[str, Callable[[], Any]] = {
    "small lists": lambda: [b"x" * 100] * 100,
    "lists of numbers": lambda: list(range(1_000_000)),
    "one record, many times": lambda: [b"x" * 1_000_000] * 1000,
    "records with much in common": lambda: [{"all": LONG, "number": number} for number in range(1000)],
    "other sequences": lambda: range(1 << 40),
    "nothing": list,
}


@pytest.mark.parametrize("name", KEPT)
def test_lists_stay_lists_where_sharing_does_not_pay(name: str) -> None:
    """Lists are not shared where they are small, hold small records, or would grow by pickling records one by one."""
    records = KEPT[name]()

    assert share(records) is records


def own_bytes(pid: int) -> int:
    """Returns how much memory a process has that is in no file: a map of one process alone counts as private, too."""
    rows = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    return next(int(row[1]) for row in rows if row[0] == "Anonymous:") << 10


HOLDS: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "held": millstream.InMemoryDataSource,
    "chain": millstream.MapDataset.source,
    "many lists": lambda records: millstream.ConcatenatedDataSource(
        [records[at : at + 100] for at in range(0, 6_000, 100)]
    ),
    "with another source": lambda records: millstream.ConcatenatedDataSource(
        [millstream.InMemoryDataSource(records[:9]), records]
    ),
}


@pytest.mark.parametrize(
    ("name", "held"), [("bytes", "list"), ("arrays", "list"), *(("dicts", held) for held in HOLDS)]
)
def test_workers_share_the_records_of_a_list(name: str, held: str) -> None:
    """The batches are the inline ones, and a worker's own memory is a fraction of the list's."""
    texts = [bytes([number % 256]) * 8000 for number in range(6_000)]
    records = {
        "bytes": texts,
        "arrays": [np.frombuffer(bytearray(text), np.int16) for text in texts],
        "dicts": [{"x": text, "y": number} for number, text in enumerate(texts)],
    }
    source = HOLDS[held](records[name])
    inline, with_a_worker = (
        millstream.load(source, shuffle=True, seed=1, num_epochs=1, batch_size=64, worker_count=worker_count)
        for worker_count in (0, 1)
    )
    with iter(with_a_worker) as iterator:
        batches = [comparable(next(iterator)) for _ in range(50)]
        if Path("/proc/self/smaps_rollup").exists():
            assert own_bytes(pids_of(iterator)[0]) < 32_000_000
        batches += map(comparable, iterator)
    assert batches == list(map(comparable, inline))


@pytest.mark.usefixtures("everything_is_shared")
def test_errors_of_shared_records_are_those_of_the_list() -> None:
    """Errors of operations and of the source have the same text with workers as inline."""
    records = [{"x": number} for number in range(9)]

    def error(worker_count: int, **options: Any) -> list[str]:
        loader = millstream.load(records, num_epochs=1, worker_count=worker_count, **options)
        with pytest.raises(KeyError) as caught:
            list(loader)
        return [str(caught.value), *caught.value.__notes__]

    assert error(1, transformations=[operator.itemgetter("y")]) == error(0, transformations=[operator.itemgetter("y")])


@pytest.mark.usefixtures("everything_is_shared")
def test_a_record_that_cannot_be_pickled_is_named() -> None:
    """Before anything starts: the source is named, and what is wrong."""
    with pytest.raises(TypeError, match=r"data_source.* cannot be sent to worker processes: cannot pickle"):
        next(iter(millstream.load([{"x": threading.Lock()}] * 3, worker_count=1)))


class Holder:
    """A source that has its records in a list of its own."""

    def __init__(self, num_bytes: int) -> None:
        self.records: list[Any] = [bytes([number]) * (num_bytes // 64) for number in range(64)]

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, key: int) -> int:
        return len(self.records[key])


def test_what_cannot_be_shared_and_is_large_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log says which part of the pipeline each worker keeps for itself, how much that is, and what to do."""
    monkeypatch.setattr(pipeline_file, "PRIVATE_BYTES", 1 << 22)
    table, arrays = Holder(1 << 23), Holder(0)
    arrays.records = [np.zeros(1 << 15, np.uint8) for _ in range(256)]  # Only large ones are shared.
    small = millstream.load(Holder(1 << 16), num_epochs=1, worker_count=1)
    large = millstream.load(Holder(1 << 23), num_epochs=1, worker_count=1)
    used = millstream.load(range(4), num_epochs=1, worker_count=1, transformations=[lambda number: table[number]])
    small_arrays = millstream.load(arrays, num_epochs=1, worker_count=1)
    for loader in (small, large, large, used, small_arrays):
        with iter(loader) as iterator:
            next(iterator)
    told = [record.getMessage() for record in caplog.records]

    assert len(told) == 3
    for text in (told[0], told[2]):
        assert "at least 8 MB of its own for data_source (attribute records)" in text
    assert "(variable table of test_what_cannot_be_shared_and_is_large_is_told_once.<locals>.<lambda>)" in told[1]
    assert all("InMemoryDataSource" in text for text in told)


@pytest.mark.parametrize("character", ["a", "日"])
def test_many_texts_are_shared_without_a_second_copy(character: str) -> None:
    """Texts are encoded a slice at a time: what is needed beyond the shared memory is a fraction of it."""
    texts = [f"{number}{character * 120}" for number in range(150_000)]
    tracemalloc.start()
    try:
        shared = share(texts)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert isinstance(shared, SharedRecords)
    written = int(shared._recipe.ends[-1])
    assert shared[::9999] == texts[::9999]
    # Memory is counted when it is reserved, at most four bytes a character, and used only where it is written.
    assert peak <= kept + written / 2
