"""Shared memory and descriptors of the pool: scarce ones are not used up, and what is kept is never rewritten."""

import ctypes
import gc
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.loader.processes import pool
from millstream.loader.processes.limits import DESCRIPTORS_PER_WORKER
from support.faults.memory_limits import memory_limit
from support.faults.user_faults import WAIT_SECONDS
from support.processes.process_tree import open_descriptors, settled_descriptors
from support.processes.worker_pools import SIZE, executor_of, loader_of, made_all, pool_of, python

BIG = 1 << 15
"""Numbers in an element: a batch of them has 1 MiB."""
EPOCHS = 4


def big_loader(**options: Any) -> millstream.DataLoader:
    """Returns a loader of large batches, over several epochs; the first is that of EXPECTED."""
    sampler = millstream.IndexSampler(SIZE, shuffle=True, num_epochs=EPOCHS, seed=5)
    return loader_of(lambda number: np.full(BIG, number), sampler=sampler, **options)


def expected_numbers() -> list[list[int]]:
    """Returns the number that each row of each large batch is filled with."""
    return [batch[:, 0].tolist() for batch in big_loader(worker_count=0)]


def is_full_of(batch: Any, numbers: list[int]) -> bool:
    return bool((batch == np.array(numbers)[:, np.newaxis]).all())


def is_shared(batch: Any) -> bool:
    """Says whether a batch lies in an arena."""
    while isinstance(batch, np.ndarray):
        batch = batch.base
    return isinstance(batch, ctypes.Array)


def test_dev_shm_is_not_used() -> None:
    """Arenas are anonymous memory: containers limit /dev/shm, and other programs may fill it."""
    with iter(big_loader()) as iterator:
        batch = next(iterator)
        mapped = Path("/proc/self/maps").read_text()
        assert "/memfd:millstream-arena" in mapped
        assert not [line for line in mapped.splitlines() if "millstream" in line and "/dev/shm" in line]
        del batch


@pytest.mark.parametrize("budget", [1 << 30, 12 << 20, 1 << 12], ids=["room for all", "room for some", "no room"])
def test_batches_that_are_kept_are_never_rewritten(budget: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch can be kept and written to: once the arenas are full, batches are private copies."""
    monkeypatch.setattr(pool, "memory_budget", lambda: budget)
    expected = expected_numbers()
    kept = []
    with iter(big_loader()) as iterator:
        for batch in iterator:
            np.add(batch, 1000, out=batch)
            kept.append(batch)
    shared = [is_shared(batch) for batch in kept]

    assert all(is_full_of(batch - 1000, numbers) for batch, numbers in zip(kept, expected, strict=True))
    assert sum(shared) << 20 <= budget
    assert all(shared) == (budget == 1 << 30)
    assert any(shared) == (budget > 1 << 20)


def test_batches_outlive_whatever_made_them() -> None:
    """Batches stay valid after their worker was killed, their iterator closed and their loader dropped."""
    expected = expected_numbers()
    iterator = iter(big_loader())
    kept = [next(iterator) for _ in range(8)]
    for pid in made_all(iterator):
        os.kill(pid, signal.SIGKILL)
    kept += [next(iterator) for _ in range(8)]
    iterator.close()
    del iterator
    gc.collect()

    assert all(map(is_shared, kept))
    assert all(map(is_full_of, kept, expected))


def test_memory_of_batches_that_are_gone_serves_again() -> None:
    """A consumer that lets go of its batches gets new ones at the same few addresses, not at ever new ones."""
    places, files = set(), set()
    with iter(big_loader()) as iterator:
        for batch in iterator:
            places.add(batch.__array_interface__["data"][0])
            files.add(len(open_descriptors()))

    assert len(places) <= 12
    assert max(files) - min(files) <= 2


def test_the_limit_of_a_control_group_is_the_memory_that_there_is() -> None:
    """Arenas do not count on memory that the container, or the job, of this process does not have."""
    code = """
import sys
from millstream.loader.threads.resources import memory_available
before = memory_available()
print(flush=True)
sys.stdin.readline()
print(before, memory_available())
"""
    with memory_limit(300 << 20) as limit:
        command = [sys.executable, "-c", code]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            limit.apply(process.pid)
            before, after = map(int, process.communicate("go\n", WAIT_SECONDS)[0].split())
    assert 200 << 20 < after < 300 << 20 if limit.group else before > 1 << 20


def test_descriptors_grow_with_workers_only() -> None:
    """A pool holds three descriptors per worker and two more, however many batches are kept."""

    def settle(iterator: millstream.DataLoaderIterator) -> list[int]:
        """Waits for the results and the process handles of all workers, and returns their numbers."""
        pids = made_all(iterator)
        while not all(worker.handle for worker in pool_of(iterator).workers):
            executor_of(iterator)._receive(1.0)
        return pids

    before = len(open_descriptors())
    for worker_count in (1, 4):
        with iter(big_loader(worker_count=worker_count)) as iterator:
            kept = []
            for batch in iterator:
                kept.append(batch)
                if len(kept) in (1, 10, 40):
                    settle(iterator)
                    expected = before + DESCRIPTORS_PER_WORKER * worker_count + 2
                    assert len(settled_descriptors(expected)) == expected
            del kept, batch
        assert len(settled_descriptors(before)) == before
    with iter(loader_of()) as iterator:
        for number in range(5):
            next(iterator)
            os.kill(settle(iterator)[number % 2], signal.SIGKILL)
        next(iterator)
        settle(iterator)
        expected = before + DESCRIPTORS_PER_WORKER * 2 + 2
        assert len(settled_descriptors(expected)) == expected


def test_every_lack_of_descriptors_is_told_and_overcome() -> None:
    """Whichever open file is one too many, the error says what to do, leaks none, and the next try works."""
    code = """
import errno, os, resource
import millstream.loader.processes.pool_executor
from support.processes import worker_pools

def count():
    return len(os.listdir("/proc/self/fd")) - 1

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
usual, errors = resource.getrlimit(resource.RLIMIT_NOFILE)[0], 0
loader = worker_pools.loader_of()
iterator = iter(loader)
for limit in range(count(), count() + 40):
    before = count()
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        first = next(iterator)
        break
    except OSError as error:
        assert error.errno == errno.EMFILE, error
        assert any("ulimit -n" in note for note in error.__notes__), error.__notes__
        errors += 1
        del error
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (usual, hard))
    assert count() == before, (limit, count(), before)
assert first.tolist() == worker_pools.EXPECTED[0]
assert [batch.tolist() for batch in iterator] == worker_pools.EXPECTED[1:]
print(errors)
"""
    done = python("-c", code)

    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) >= 2 * DESCRIPTORS_PER_WORKER + 2


def test_a_lack_of_descriptors_for_a_new_worker_is_told() -> None:
    """The error says so when a dead worker cannot be replaced; with more descriptors the stream resumes.

    Closing needs no free descriptor, also after the fork server was killed.
    """
    code = """
import os, resource, signal
from support.processes import worker_pools

before = len(os.listdir("/proc/self/fd"))
usual, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
iterator = iter(worker_pools.loader_of())
next(iterator)
for pid in worker_pools.made_all(iterator):
    os.kill(pid, signal.SIGKILL)
    assert worker_pools.still_there([pid]) == []
resource.setrlimit(resource.RLIMIT_NOFILE, (5, hard))
try:
    list(iterator)
except OSError as error:
    print(error.__notes__[-1])
resource.setrlimit(resource.RLIMIT_NOFILE, (usual, hard))
step = iterator.step
assert [batch.tolist() for batch in iterator] == worker_pools.EXPECTED[step:]
iterator.seek(0)
next(iterator)
processes = worker_pools.processes_of(iterator)
os.kill(processes[0], signal.SIGKILL)
assert worker_pools.still_there(processes) == []
resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
iterator.close()
resource.setrlimit(resource.RLIMIT_NOFILE, (usual, hard))
assert len(os.listdir("/proc/self/fd")) == before
"""
    done = python("-c", code)

    assert done.returncode == 0, done.stderr
    assert "2 worker processes need 6 open files of the 5 that this process may have" in done.stdout
    assert "Raise the limit (`ulimit -n`) or use fewer workers." in done.stdout
