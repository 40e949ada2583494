"""Workers are killed again and again: the stream is the oracle's, and nothing is left of the dead.

`make kills` kills a thousand.
"""

import dataclasses
import gc
import itertools
import math
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest

import millstream
from millstream.transforms import Batch, Filter, RandomMap, Transformation
from support.oracle.stream import oracle
from support.processes.worker_pools import executor_of, fork_server_of, made_all, pool_of
from support.streams import comparable

# Workers need not import pytest to have the operations below.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

KILLS = int(os.environ.get("MILLSTREAM_SOAK_KILLS", "30"))
SIZE = 200
WARM_UP = 40
"""Batches before the baseline is taken: by then, memory has grown to what the stream needs."""

LEAK_BYTES = 2_000
"""What may be left of each death, at most: no object that matters fits into it, and a kilobyte of log is noise."""

NOISE_BYTES = 8 << 20
"""How much the memory of a process that leaks nothing may differ between two moments."""

pytestmark = pytest.mark.timeout(600 + KILLS)


class Noisy(RandomMap):
    """Makes an array of 4 KB that depends on the record's randomness."""

    def random_map(self, element: int, rng: np.random.Generator) -> dict[str, Any]:
        """Returns the array and the number."""
        return {"array": rng.integers(0, 1000, 512), "number": element}


class Most(Filter):
    """Drops one element of eight."""

    def filter(self, element: dict[str, Any]) -> bool:
        """Says whether the number is not a multiple."""
        return bool(element["number"] % 8)


PIPELINES: dict[str, list[Transformation]] = {
    "batches": [Noisy(), Batch(8)],
    "regrouped": [Noisy(), Most(), Batch(8)],
    "elements": [Noisy(), Most()],
}


@dataclasses.dataclass(frozen=True)
class Holdings:
    """What a process holds."""

    descriptors: int
    arenas: int
    threads: int
    processes: int

    @classmethod
    def of_this_process(cls) -> "Holdings":
        """Returns what this process holds now."""
        gc.collect()
        return cls(
            descriptors=len(os.listdir("/proc/self/fd")),  # noqa: PTH208  (no paths are wanted)
            arenas=Path("/proc/self/maps").read_text().count("memfd:millstream"),
            # The thread that waits for an idle pool's time to be up ends a moment after the pool was taken.
            threads=sum(thread.name != "millstream-idle" for thread in threading.enumerate()),
            processes=len(psutil.Process().children(recursive=True)),
        )


class Reaper:
    """Kills workers at random.

    It spares a worker whose call has killed another one before, and does not kill many in a row while they start:
    the pool would take that for a fault of the pipeline.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._killed: set[tuple[int, int]] = set()

    def kill(self, iterator: millstream.DataLoaderIterator) -> bool:
        """Kills a worker, if there is one to be killed."""
        executor, fork_server = executor_of(iterator), fork_server_of(iterator)
        assigned = executor._assignments._assigned
        candidates = [
            worker
            for worker in pool_of(iterator).workers
            if worker.handle is not None
            and (worker.is_ready or executor._deaths_at_start < 3)
            and (fork_server, worker.number) not in self._killed
            and not any(assigned[call].deaths for call in worker.calls if call in assigned)
        ]
        if not candidates:
            return False
        worker = self._random.choice(candidates)
        signal.pidfd_send_signal(worker.handle or 0, signal.SIGKILL)
        self._killed.add((fork_server, worker.number))
        return True


@pytest.mark.parametrize("pipeline", sorted(PIPELINES))
def test_killing_workers_again_and_again(pipeline: str) -> None:
    """The stream is exact; dead workers leave neither descriptors nor memory, while it runs or after."""
    before = Holdings.of_this_process()
    sampler = millstream.IndexSampler(SIZE, shuffle=True, num_epochs=20 + KILLS, seed=1)
    loader = millstream.DataLoader(
        data_source=range(SIZE),
        sampler=sampler,
        operations=PIPELINES[pipeline],
        worker_count=3,
        worker_buffer_size=2,
    )
    stream = map(comparable, oracle(range(SIZE), sampler, PIPELINES[pipeline]))
    steps, reaper, kills = random.Random(KILLS), Reaper(KILLS), 0
    with iter(loader) as iterator:

        def check(count: int) -> None:
            expected = list(itertools.islice(stream, count))
            assert [comparable(element) for element in itertools.islice(iterator, count)] == expected
            assert len(expected) == count

        check(WARM_UP)
        baseline, memory = at_rest(iterator), memory_of(iterator)
        while kills < math.ceil(KILLS / len(PIPELINES)):
            check(steps.choice([0, 0, 1, 1, 2, 5]))
            if reaper.kill(iterator):
                kills += 1
            else:
                check(1)
        check(WARM_UP)
        assert at_rest(iterator) == baseline
        for name, now in memory_of(iterator).items():
            assert now - memory[name] < NOISE_BYTES + LEAK_BYTES * kills, name
    assert Holdings.of_this_process() == before


def at_rest(iterator: millstream.DataLoaderIterator) -> Holdings:
    """Returns what this process holds when all workers are there, and nothing made by dead ones is left."""
    iterator.set_state(iterator.get_state())
    iterator.start_prefetch()
    made_all(iterator)
    return Holdings.of_this_process()


def memory_of(iterator: millstream.DataLoaderIterator) -> dict[str, int]:
    """Returns the bytes that the consumer's process and the fork server occupy."""
    gc.collect()
    return {
        "this process": psutil.Process().memory_info().rss,
        "the fork server": psutil.Process(fork_server_of(iterator)).memory_info().rss,
    }
