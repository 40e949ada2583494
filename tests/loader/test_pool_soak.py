"""Workers are killed again and again: the stream is exact, and nothing is left behind.

`make soak` kills a thousand; the tests kill fewer. `MILLSTREAM_SOAK_KILLS` says how many.
"""

import contextlib
import gc
import os
import random
import signal
import threading
from pathlib import Path

import numpy as np
import psutil
from worker_pools import executor_of, workers_of

import millstream
from millstream.loader.pool import Worker

KILLS = int(os.environ.get("MILLSTREAM_SOAK_KILLS", "25"))
BATCH = 16
MOST_GROWTH_BYTES = 64 << 20
"""What the allocators of Python and NumPy may keep of a run; what a leak of one arena page per kill exceeds."""


def to_image(record: int) -> dict[str, np.ndarray | int]:
    """Returns an element with a leaf large enough for a chunk of the arena of its own."""
    return {"image": np.full((64, 64), record, dtype=np.float32), "label": record}


def innocent(iterator: millstream.DataLoaderIterator) -> list[Worker]:
    """Returns the workers none of whose calls has lost a worker before: one that kills twice is an error by design."""
    assigned = executor_of(iterator)._assigned
    return [
        worker
        for worker in workers_of(iterator)
        if all(number not in assigned or assigned[number].deaths == 0 for number in worker.calls)
    ]


def memory_maps() -> int:
    """Returns how many arenas this process has mapped."""
    return Path("/proc/self/maps").read_text().count("millstream-arena")


def test_killed_workers_change_nothing_and_leave_nothing() -> None:
    """After every kill the stream goes on; at the end maps, descriptors, threads and memory are what they were."""
    chance = random.Random(2)
    sampler = millstream.IndexSampler(500, shuffle=True, seed=2)
    loader = millstream.DataLoader(
        data_source=range(500), sampler=sampler, operations=[to_image, millstream.Batch(BATCH)], worker_count=3
    )
    process = psutil.Process()
    gc.collect()
    before = memory_maps(), process.num_fds(), threading.active_count()
    memory = process.memory_info().rss
    killed = step = 0
    with iter(loader) as iterator:
        while killed < KILLS:
            for _ in range(chance.randint(1, 3)):
                labels = next(iterator)["label"]
                assert labels.tolist() == sampler.record_keys(step * BATCH, (step + 1) * BATCH).tolist()
                step += 1
            victims = innocent(iterator)
            # One that was killed a moment ago may be among them still.
            with contextlib.suppress(ProcessLookupError, IndexError):
                os.kill(chance.choice(victims).pid or 0, signal.SIGKILL)
                killed += 1
        for _ in range(20):
            batch = next(iterator)
            expected = sampler.record_keys(step * BATCH, (step + 1) * BATCH)
            assert batch["label"].tolist() == expected.tolist()
            assert (batch["image"] == expected[:, np.newaxis, np.newaxis]).all()
            step += 1
        del batch, labels, victims
    gc.collect()

    assert (memory_maps(), process.num_fds(), threading.active_count()) == before
    assert process.memory_info().rss - memory < MOST_GROWTH_BYTES
