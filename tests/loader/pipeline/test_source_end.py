"""StopIteration from a source ends the stream; and streams in the guise of sources are read by reader threads alone."""

import contextlib
import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import millstream
from millstream import CheckpointError
from millstream.loader.engine import policy
from millstream.transforms import Batch, ConcatThenSplit, Filter, FlatMap, Map
from support.laws import INLINE, assert_resumes_everywhere

END = 11


class Ending:
    """A source that says it has twenty records, and has eleven."""

    def __len__(self) -> int:
        return 20

    def __getitem__(self, key: int) -> int:
        if key >= END:
            raise StopIteration("no more")
        return key


class Together(Ending):
    """The same, which is asked for several at once."""

    def __getitems__(self, keys: Sequence[int]) -> list[int]:
        return list(map(self.__getitem__, keys))


def numbers_of(outputs: Any) -> list[Any]:
    return [output["a"].tolist() if isinstance(output, dict) else np.asarray(output).tolist() for output in outputs]


def document(key: int) -> dict[str, Any]:
    return {"a": np.full(key, key)}


PIPELINES: dict[str, tuple[list[Any], list[Any]]] = {
    "records": ([], list(range(11))),
    "batches": ([Batch(4)], [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]),
    "whole batches": ([Batch(4, drop_remainder=True)], [[0, 1, 2, 3], [4, 5, 6, 7]]),
    "filtered": ([Filter(lambda key: key % 3 > 0), Batch(3)], [[1, 2, 4], [5, 7, 8], [10]]),
    "split": ([FlatMap(lambda key: [key] * (key % 3), 2), Batch(4)], [[1, 2, 2, 4], [5, 5, 7, 8], [8, 10]]),
    "packed": (
        [Map(document), ConcatThenSplit({"a": 40}), Batch(1)],
        [
            [[token for key in range(9) for token in [key] * key] + [9] * 4],
            [[9] * 5 + [10] * 10 + [0] * 25],
        ],
    ),
}
"""Operations, and what they make of 0 … 10."""


def loader_of(operations: Sequence[Any], source: Any = None, **options: Any) -> millstream.DataLoader:
    source = Ending() if source is None else source
    sampler = millstream.SequentialSampler(len(source))
    return millstream.DataLoader(data_source=source, sampler=sampler, operations=operations, **options)


@pytest.mark.parametrize("how", ["inline", "threads", "workers", "together"])
@pytest.mark.parametrize("name", PIPELINES)
def test_a_source_ends_the_stream(name: str, how: str) -> None:
    """The end of a source ends the stream after its last, short batch, for every reader and every further `next`."""
    operations, expected = PIPELINES[name]
    threads = millstream.ReadOptions(num_threads=0 if how == "inline" else 2)
    source = Together() if how == "together" else Ending()
    with iter(loader_of(operations, source, worker_count=2 * (how == "workers"), read_options=threads)) as iterator:
        assert numbers_of(iterator) == expected
        assert next(iterator, None) is next(iterator, None) is None
        assert iterator.step == len(expected)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_stream_resumes_before_its_end(name: str) -> None:
    """A fresh iterator yields the rest from each state, that after the last output included."""
    operations, expected = PIPELINES[name]
    assert len(assert_resumes_everywhere(loader_of(operations, read_options=INLINE))[0]) == len(expected)


def test_each_logical_shard_ends() -> None:
    """A shard that runs several gives what each of them has left."""
    operations = [Filter(lambda _: True), Batch(4)]
    shard = millstream.ShardOptions(0, 1, logical_shards=2)
    batches = numbers_of(loader_of(operations, shard_options=shard))

    assert sorted(key for batch in batches for key in batch) == list(range(END))


def test_a_chain_ends_too() -> None:
    """The source of a MapDataset may end, through any later operations; a single record beyond the end is an error."""
    dataset = millstream.MapDataset.source(Ending())
    joined = millstream.MapDataset.concatenate([dataset.map(abs), millstream.MapDataset.range(3)])

    assert numbers_of(dataset.map(abs).to_iter_dataset().batch(4)) == PIPELINES["batches"][1]
    assert list(dataset.filter(lambda key: key > 8)) == [9, 10]
    assert list(joined) == list(range(END))
    with pytest.raises(RuntimeError, match="StopIteration"):
        joined[END]


def test_an_operation_that_reads_a_source_which_ends_fails() -> None:
    """An operation that reads beyond the end of another source fails, and does not end the stream."""
    other = millstream.MapDataset.source(Ending())
    with pytest.raises(RuntimeError, match="StopIteration was raised where a result was expected"):
        list(loader_of([Map(lambda key: other[key + 5])], range(20)))


def test_the_end_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Once for each iterator's loader, with the record: it may be a mistake in the source."""
    loader = loader_of([Batch(4)], read_options=INLINE)
    assert len(list(loader)) == len(list(loader)) == 3

    (message,) = caplog.messages
    assert "StopIteration" in message
    assert "Ending, at record key 11" in message


class Stream(millstream.RandomAccessDataSource[Any]):
    """A stream in the guise of a source, as clients of Grain have it: what it is asked for does not matter."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._records: Iterator[int] | None = None

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, key: int) -> dict[str, Any]:
        if self._records is None:
            self._records = iter(range(200))
        reader = int(threading.current_thread().name.split("_")[1])
        return {"number": next(self._records), "reader": reader}


def numbered(record: dict[str, Any]) -> tuple[int, int]:
    """Returns the number and the reader, having changed the record in place."""
    record["seen"] = True
    return record["number"], record["reader"]


@pytest.mark.parametrize("length", [1000, 10_000_000_000])
@pytest.mark.parametrize("worker_count", [0, 1])
def test_a_stream_is_read_by_reader_threads(worker_count: int, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However short a read is: never by the consumer's thread, nor a worker's main one; with one reader in order."""
    monkeypatch.setattr(policy, "HAND_OVER_SECONDS", 1000.0)
    reading = millstream.ReadOptions(num_threads=1, prefetch_buffer_size=64)
    operations = [] if length == 1000 else [numbered]
    loader = loader_of(operations, Stream(length), worker_count=worker_count, read_options=reading)
    read = [(one["number"], one["reader"]) if isinstance(one, dict) else one for one in loader]

    assert read == [(number, 0) for number in range(200)]


@pytest.mark.parametrize(
    "operations", [[Batch(8)], [lambda record: {"a": np.full(5, record[0])}, ConcatThenSplit({"a": 40})]]
)
def test_each_pass_reads_a_stream_from_its_beginning_in_a_worker(operations: list[Any]) -> None:
    """After a pass to the end, and after one that was left, as in Grain: the next worker has the source anew."""
    reading = millstream.ReadOptions(num_threads=1, prefetch_buffer_size=64)
    loader = loader_of([numbered, *operations], Stream(10_000_000_000), worker_count=1, read_options=reading)

    def read(iterator: Iterator[Any], most: int | None = None) -> list[Any]:
        return [(row[0] if isinstance(row, tuple) else row["a"]).tolist() for row in itertools.islice(iterator, most)]

    whole = read(iter(loader))
    assert len(whole) == 25
    for _ in range(2):
        iterator = iter(loader)
        assert read(iterator, 3) == whole[:3]
        # The one before is dropped when the new one is there already.
        iterator = iter(loader)
        assert read(iterator) == whole
        assert list(iterator) == []


class Numbers:
    """As many numbers as a stream claims to have, at random."""

    def __len__(self) -> int:
        return 10_000_000_000

    def __getitem__(self, key: int) -> int:
        return key


class NamedNumbers(Numbers):
    def fingerprint(self) -> str:
        return "numbers"


def test_a_stream_says_why_it_cannot_resume_and_loses_no_record_to_a_look() -> None:
    """Moving or previewing a stream is an error that loses no record; a source with a fingerprint is not a stream."""
    for source in (NamedNumbers(), Numbers()):
        reading = millstream.ReadOptions(num_threads=1, prefetch_buffer_size=64)
        with iter(loader_of([Batch(4)], source, read_options=reading)) as iterator:
            next(iterator)
            state = iterator.get_state()
            for error, move in (
                (CheckpointError, lambda: iterator.set_state(state)),  # noqa: B023  (called here, as those below)
                (CheckpointError, lambda: iterator.set_states([state])),  # noqa: B023
                (TypeError, lambda: iterator.seek(2)),
                (TypeError, iterator.trace),
                (TypeError, iterator.preview),
            ):
                refusal = pytest.raises(error, match=r"Cannot \w+: Numbers claims 10,000,000,000 .* fingerprint\(\)")
                with contextlib.nullcontext() if isinstance(source, NamedNumbers) else refusal:
                    move()


def test_readers_are_numbered() -> None:
    """Several readers have the numbers from 0 on, whichever of them begins first, and as many as are asked for."""
    options = {"worker_count": 0, "read_options": millstream.ReadOptions(num_threads=3, prefetch_buffer_size=64)}
    for _ in range(5):
        readers = {one["reader"] for one in itertools.islice(loader_of([], Stream(10_000_000_000), **options), 200)}
        assert readers <= {0, 1, 2}
