"""Elements read in advance are bounded in bytes, for any pipeline and any place."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.loader.engine.engine import Engine, ReadAhead
from millstream.loader.threads import options
from millstream.transforms import Batch, Filter, FlatMap, Map, Transformation
from support.processes.worker_pools import made_all

RECORD_BYTES = 100_000
MAX_BYTES = 2_000_000


class Recorded:
    """Records of RECORD_BYTES; a file grows by one byte for each that is read, in whichever process."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, key: int) -> np.ndarray[Any, Any]:
        with self._file.open("ab", buffering=0) as file:
            file.write(b"\0")
        return np.full(RECORD_BYTES, key % 200, np.uint8)


def eighths(record: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
    """Returns eight children that have the bytes of a record between them."""
    return list(record.reshape(8, -1))


SHAPES: dict[str, list[Transformation]] = {
    "Batch": [Batch(4)],
    "no Batch": [Map(np.copy)],
    "Filter, Batch": [Filter(lambda record: bool(record[0] % 2)), Batch(4)],
    "FlatMap, Batch": [FlatMap(eighths, max_fan_out=8), Batch(4)],
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("worker_count", [0, 2])
def test_what_is_read_ahead_takes_no_more_bytes_than_allowed(shape: str, worker_count: int, tmp_path: Path) -> None:
    """However many records may be ahead, they never take more than max_buffer_bytes, a call and an output excepted."""
    file = tmp_path / "read"
    reading = millstream.ReadOptions(4, prefetch_buffer_size=10_000, max_buffer_bytes=MAX_BYTES)
    options: dict[str, Any] = {"read_options": reading, "worker_count": worker_count}
    loader = millstream.load(Recorded(file), transformations=SHAPES[shape], **options)
    # A Filter drops every second record.
    weight = 2 if "Filter" in shape else 1
    delivered = 0
    with iter(loader) as iterator:
        for _ in range(60):
            size = next(iterator).nbytes * weight
            delivered += size
            held = file.stat().st_size * RECORD_BYTES - delivered
            assert held <= MAX_BYTES * weight + 2 * max(size, 4 * RECORD_BYTES)
            engine = iterator._running_executor()
            if isinstance(engine, Engine) and isinstance(engine.budget, ReadAhead):
                engine.budget.calls_ahead = 10_000  # As once the consumer has often waited.


class Waiting(Recorded):
    """Records of a storage that answers after some milliseconds, so that workers have several reads in flight."""

    def __init__(self, file: Path, size: int) -> None:
        super().__init__(file)
        self._size = size

    def __getitem__(self, key: int) -> np.ndarray[Any, Any]:
        assert not threading.Event().wait(0.006)
        return super().__getitem__(key)[: self._size].copy()


MANY = 2 * (1 + 4)
"""The batches in flight of two workers that have several reads each."""


@pytest.mark.parametrize("limit", [None, 1_000_000])
def test_batches_in_flight_take_few_bytes_however_reads_wait(
    limit: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Workers hold worker_count * (1 + worker_buffer_size) batches, or more of them if these take few bytes.

    An explicit `max_buffer_bytes` bounds both.
    """
    monkeypatch.setattr(options, "FLIGHT_BYTES", 3_000_000)
    counts = {}
    for size in (RECORD_BYTES, 1000):
        file = tmp_path / str(size)
        reading = millstream.ReadOptions(8, max_buffer_bytes=limit)
        arguments: dict[str, Any] = {"batch_size": 4, "worker_count": 2, "read_options": reading}
        with iter(millstream.load(Waiting(file, size), **arguments)) as iterator:
            most = 0
            # On a busy machine, workers may see late that their reads wait, and have few in flight until then.
            for step in range(1, 3000):
                next(iterator)
                made_all(iterator)
                if step > 10:  # From then on, their size is known.
                    most = max(most, file.stat().st_size // 4 - step)
                if step >= 30 and (size == RECORD_BYTES or most >= MANY):
                    break
        counts[size] = most
    bound = 3_000_000 if limit is None else limit
    assert counts[RECORD_BYTES] * 4 * RECORD_BYTES <= bound
    assert counts[RECORD_BYTES] < 2 * (1 + 1) + 4
    assert counts[1000] >= MANY


def test_a_budget_below_one_block_is_slow_and_not_stuck(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One block is made at a time, and the log says once what to do."""
    file = tmp_path / "read"
    reading = millstream.ReadOptions(max_buffer_bytes=1000)
    with iter(millstream.load(Recorded(file), batch_size=4, read_options=reading)) as iterator:
        for number in range(10):
            assert next(iterator)[0, 0] == 4 * number
            assert file.stat().st_size <= 4 * number + 8
    assert sum("max_buffer_bytes" in message for message in caplog.messages) == 1


@pytest.mark.parametrize(("num_threads", "most"), [(0, 3), (4, 12)])
def test_no_record_is_split_before_a_batch_needs_its_children(num_threads: int, most: int, tmp_path: Path) -> None:
    """A batch of 16 reads two records, whose children fill it, and threads a few more, as far as the buffer allows."""
    file = tmp_path / "read"
    reading = millstream.ReadOptions(num_threads, prefetch_buffer_size=4)
    split = [FlatMap(eighths, max_fan_out=8)]
    with iter(millstream.load(Recorded(file), transformations=split, batch_size=16, read_options=reading)) as iterator:
        next(iterator)
        assert file.stat().st_size <= most
