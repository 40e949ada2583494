"""Resuming at a late step is no more work than starting: what is read and what is computed is counted."""

import dataclasses
import operator
import os
import signal
import timeit
from collections import Counter
from typing import Any, SupportsIndex

import numpy as np
import pytest
from numpy.typing import NDArray

from millstream.loader import DataLoader, DataLoaderIterator, ReadOptions
from millstream.record import RecordMetadata
from millstream.samplers import IndexSampler
from millstream.sharding import ShardOptions
from millstream.transforms import Batch, RandomMap
from support.processes.worker_pools import loader_of, pids_of

STEP = 1_000_000
GLOBAL_BATCH = 12


@dataclasses.dataclass(frozen=True)
class CountingSource:
    """A thousand numbers, and how many of them were read."""

    work: "Counter[str]"

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, key: SupportsIndex) -> int:
        self.work["records"] += 1
        return operator.index(key)


@dataclasses.dataclass(frozen=True)
class CountingSampler:
    """An endless shuffled order, and how many of its keys were computed."""

    work: "Counter[str]"
    order: IndexSampler = IndexSampler(1000, shuffle=True, seed=8)  # noqa: RUF009  (frozen)
    seed = order.seed
    num_records = order.num_records
    length = None

    def __getitem__(self, position: int) -> RecordMetadata:
        self.work["keys"] += 1
        return self.order[position]

    def record_keys(self, start: int, stop: int) -> NDArray[np.int64]:
        self.work["keys"] += stop - start
        return self.order.record_keys(start, stop)

    def record_keys_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        self.work["keys"] += positions.size
        return self.order.record_keys_at(positions)


@dataclasses.dataclass(frozen=True)
class CountingNoise(RandomMap):
    """Adds a random number, and counts how often."""

    work: "Counter[str]"

    def random_map(self, element: int, rng: np.random.Generator) -> int:
        self.work["elements"] += 1
        return element + int(rng.integers(1 << 20))


def iterator_of(shard: ShardOptions, work: "Counter[str]") -> DataLoaderIterator:
    """Returns the iterator of a loader that counts its work."""
    batch = Batch(shard.local_batch_size(GLOBAL_BATCH), drop_remainder=True)
    return iter(
        DataLoader(
            data_source=CountingSource(work),
            sampler=CountingSampler(work),
            operations=[CountingNoise(work), batch],
            shard_options=shard,
            read_options=ReadOptions(num_threads=0),
        )
    )


def first_batch(shard: ShardOptions, state: bytes | None) -> tuple[Any, "Counter[str]"]:
    """Returns the first batch of a new loader that resumes from a state, and the work that all of this was."""
    work: Counter[str] = Counter()
    with iterator_of(shard, work) as batches:
        if state is not None:
            batches.set_state(state)
        return next(batches), work


@pytest.mark.parametrize(("saved_by", "restored_by"), [(1, 1), (4, 4), (4, 2), (1, 3)])
def test_resuming_late_is_the_work_of_a_fresh_start(saved_by: int, restored_by: int) -> None:
    """Resuming takes as many records, keys and calls as step 0, on any number of shards; seeking reads nothing."""
    work: Counter[str] = Counter()
    with iterator_of(ShardOptions(saved_by - 1, saved_by, drop_remainder=True), work) as batches:
        batches.seek(STEP)
        state = batches.get_state()
    for index in range(restored_by):
        shard = ShardOptions(index, restored_by, drop_remainder=True)
        _, fresh = first_batch(shard, None)
        batch, resumed = first_batch(shard, state)
        assert resumed == fresh
        assert resumed["records"] == resumed["elements"] == len(batch) == GLOBAL_BATCH // restored_by
        with iterator_of(shard, work) as batches:
            batches.seek(STEP)
            assert np.array_equal(next(batches), batch)
    assert work["records"] == GLOBAL_BATCH


def test_a_state_takes_microseconds_and_asks_no_worker() -> None:
    """`get_state` returns the same bytes while all workers are stopped; the quickest of 500 calls takes < 0.2 ms."""
    with iter(loader_of()) as iterator:
        next(iterator)
        before, workers = iterator.get_state(), pids_of(iterator)
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        try:
            assert iterator.get_state() == before
            assert min(timeit.repeat(iterator.get_state, number=1, repeat=500)) < 0.0002
        finally:
            for pid in workers:
                os.kill(pid, signal.SIGCONT)
