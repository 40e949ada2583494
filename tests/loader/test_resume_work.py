"""Resuming at a late step is no more work than starting: what is read and what is computed is counted."""

import operator
import os
import signal
import timeit
from collections import Counter
from typing import Any, SupportsIndex

import numpy as np
import pytest
from numpy.typing import NDArray

from millstream.loader import DataLoaderIterator
from millstream.samplers import IndexSampler
from millstream.sharding import ShardOptions
from millstream.transforms import Batch, RandomMap
from support.laws import inline_loader
from support.processes.worker_pools import loader_of, pids_of

STEP = 1_000_000
GLOBAL_BATCH = 12


WORK: "Counter[str]" = Counter()
"""The records read, keys computed and elements drawn for."""


class CountingSource:
    """A thousand numbers."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, key: SupportsIndex) -> int:
        WORK["records"] += 1
        return operator.index(key)


class CountingSampler(IndexSampler):
    """An order that counts the keys computed."""

    def record_keys_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        WORK["keys"] += positions.size
        return super().record_keys_at(positions)


def noise(element: int, rng: np.random.Generator) -> int:
    WORK["elements"] += 1
    return element + int(rng.integers(1 << 20))


def iterator_of(shard: ShardOptions) -> DataLoaderIterator:
    """Returns the iterator of an endless shuffled loader that counts its work."""
    batch = Batch(shard.local_batch_size(GLOBAL_BATCH), drop_remainder=True)
    sampler = CountingSampler(1000, shuffle=True, seed=8)
    return iter(inline_loader(CountingSource(), sampler, RandomMap(noise), batch, shard_options=shard))


def first_batch(shard: ShardOptions, state: bytes | None) -> tuple[Any, "Counter[str]"]:
    """Returns the first batch of a new loader that resumes from a state, and the work that all of this was."""
    WORK.clear()
    with iterator_of(shard) as batches:
        if state is not None:
            batches.set_state(state)
        return next(batches), WORK.copy()


@pytest.mark.parametrize(("saved_by", "restored_by"), [(1, 1), (4, 4), (4, 2), (1, 3)])
def test_resuming_late_is_the_work_of_a_fresh_start(saved_by: int, restored_by: int) -> None:
    """Resuming takes as many records, keys and calls as step 0, on any number of shards; seeking reads nothing."""
    WORK.clear()
    with iterator_of(ShardOptions(saved_by - 1, saved_by, drop_remainder=True)) as batches:
        batches.seek(STEP)
        state = batches.get_state()
    assert not WORK["records"]
    for index in range(restored_by):
        shard = ShardOptions(index, restored_by, drop_remainder=True)
        _, fresh = first_batch(shard, None)
        batch, resumed = first_batch(shard, state)
        assert resumed == fresh
        assert resumed["records"] == resumed["elements"] == len(batch) == GLOBAL_BATCH // restored_by
        with iterator_of(shard) as batches:
            batches.seek(STEP)
            assert np.array_equal(next(batches), batch)


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
