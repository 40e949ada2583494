"""Shared memory and descriptors of the pool: scarce ones are not used up, and what is kept is never rewritten.

A limit that forbids workers is an error with its name and a remedy; one that leaves room changes nothing.
"""

import contextlib
import ctypes
import errno
import gc
import itertools
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.loader.processes import pool
from millstream.loader.processes.process_report import DESCRIPTORS_PER_WORKER, create_crash_log
from millstream.loader.transport.pipeline_file import write_chunks
from support.faults.user_faults import WAIT_SECONDS, At, exit_at_once
from support.processes.process_tree import open_descriptors, settled_descriptors
from support.processes.worker_pools import SIZE, environment, loader_of, made_all, place_of, pool_of, python

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


def test_descriptors_grow_with_workers_only() -> None:
    """A pool holds three descriptors a worker, three more, and one for its fork server, whatever is kept."""

    def settle(iterator: millstream.DataLoaderIterator) -> list[int]:
        """Waits for the results and the process handles of all workers, and returns their numbers."""
        pids = made_all(iterator)
        while not all(worker.handle for worker in pool_of(iterator).workers):
            place_of(iterator)._receive(1.0)
        return pids

    before = len(open_descriptors())
    for worker_count in (1, 4):
        with iter(big_loader(worker_count=worker_count)) as iterator:
            kept = []
            for batch in iterator:
                kept.append(batch)
                if len(kept) in (1, 10, 40):
                    settle(iterator)
                    expected = before + DESCRIPTORS_PER_WORKER * worker_count + 4
                    assert len(settled_descriptors(expected)) == expected
            del kept, batch
        assert len(settled_descriptors(before)) == before
    with iter(loader_of()) as iterator:
        for number in range(5):
            next(iterator)
            os.kill(settle(iterator)[number % 2], signal.SIGKILL)
        next(iterator)
        settle(iterator)
        expected = before + DESCRIPTORS_PER_WORKER * 2 + 4
        assert len(settled_descriptors(expected)) == expected


def test_every_lack_of_descriptors_is_told_and_overcome() -> None:
    """Whichever open file is one too many, the error says what to do, leaks none, and the next try works."""
    code = """
import errno, os, resource
import millstream.loader.engine.processes
from millstream.loader.processes.fork_servers import FORK_SERVERS
from support.processes import worker_pools

def count():
    return len(os.listdir("/proc/self/fd")) - 1 - len(FORK_SERVERS.idle)

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


def test_a_lack_of_descriptors_for_another_pipeline_is_overcome(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset that workers could not get when it was opened in advance is sent again, and the stream is the same."""
    files = [millstream.MapDataset.range(3 * start, 3 * start + 3).to_iter_dataset() for start in range(6)]
    chain = millstream.experimental.InterleaveIterDataset(files, cycle_length=2).batch(2, batch_fn=list)
    calls = itertools.count(1)

    def write_sometimes(chunks: Sequence[memoryview]) -> int:
        if next(calls) in (2, 4):  # The first is that of the pipelines that workers start with.
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return write_chunks(chunks)

    monkeypatch.setattr(pool, "write_chunks", write_sometimes)
    with iter(chain.mp_prefetch(millstream.MultiprocessingOptions(num_workers=2))) as iterator:
        assert list(iterator) == list(chain)
    assert next(calls) > 4


def test_a_worker_that_could_not_be_replaced_is_replaced_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a lack of descriptors leaves no worker, that is an error at most, and the next wait starts one."""
    die = At(0, exit_at_once, once=tmp_path / "once")
    files = [millstream.MapDataset.range(50 * start, 50 * start + 50).to_iter_dataset().map(die) for start in range(4)]
    chain = millstream.experimental.InterleaveIterDataset(files, cycle_length=2).map(abs).batch(3, batch_fn=list)
    calls = itertools.count(1)

    def create_sometimes() -> int:
        if next(calls) == 2:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return create_crash_log()

    monkeypatch.setattr(pool, "create_crash_log", create_sometimes)
    batches: list[Any] = []
    with iter(chain.mp_prefetch(millstream.MultiprocessingOptions(num_workers=1))) as iterator:
        with contextlib.suppress(OSError):
            batches.extend(iterator)
        batches.extend(iterator)
    assert batches == list(chain)
    assert next(calls) > 3


LIMITED = """
import resource, sys
import numpy as np
import millstream.loader.engine.processes
from support.processes import worker_pools
name, limit, worker_count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
loader = worker_pools.loader_of(lambda number: np.full((512, 512), number), worker_count=worker_count)
if name == "RLIMIT_AS":
    with open("/proc/self/statm") as file:
        limit += int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(getattr(resource, name), (limit, limit))
try:
    assert [batch[:, 0, 0].tolist() for batch in loader] == worker_pools.EXPECTED
    print("the stream")
except OSError as error:
    print(error, *error.__notes__)
"""


@pytest.mark.parametrize(
    ("name", "limit", "option"),
    [
        ("RLIMIT_FSIZE", 1000, "-f"),
        ("RLIMIT_FSIZE", 100_000, "-f"),
        ("RLIMIT_NPROC", 1, "-u"),
        ("RLIMIT_NPROC", 3, "-u"),
    ],
)
def test_a_limit_that_forbids_workers_is_named(name: str, limit: int, option: str) -> None:
    """The error says which limit it is, how high, what the workers need, and what to do.

    That of processes is named whichever is one too many: the fork server, or a worker.
    """
    become: list[str] = []
    if name == "RLIMIT_NPROC":
        setpriv = shutil.which("setpriv")
        if setpriv is None or os.getuid() != 0:
            pytest.skip("only root can become a user who has no other processes")
        # The kernel lets root, and processes with these capabilities, have any number.
        capabilities = "-sys_resource,-sys_admin"
        become = [setpriv, "--ruid=54321", f"--bounding-set={capabilities}", f"--inh-caps={capabilities}"]
    done = subprocess.run(
        [*become, sys.executable, "-c", LIMITED, name, str(limit), "2"],
        check=False,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=3 * WAIT_SECONDS,
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "2 worker processes need" in done.stdout
    assert f" {limit}" in done.stdout
    assert f"Raise the limit (`ulimit {option}`) or use " in done.stdout


@pytest.mark.parametrize(
    ("name", "limit", "worker_count"),
    [("RLIMIT_FSIZE", 10 << 20, 2), ("RLIMIT_AS", 100 << 20, 0), ("RLIMIT_AS", 100 << 20, 2)],
)
def test_limits_that_leave_room_change_nothing(name: str, limit: int, worker_count: int) -> None:
    """Arenas are no larger than the limits of files and address space, and no more threads start than these allow.

    Of 16 threads, whose stacks take more, as many start as leave room for arrays.
    """
    done = python("-c", LIMITED, name, str(limit), str(worker_count))

    assert (done.returncode, done.stdout, done.stderr) == (0, "the stream\n", "")


def test_a_worker_that_may_not_map_its_arena_says_so() -> None:
    """The trainer gets an error with the limit's name, instead of the death of one worker after another."""
    code = """
import resource
from pathlib import Path
import millstream.loader.engine.processes
from support.processes import worker_pools
from millstream.loader.processes import pool

pool.arena_size = lambda budget, num_workers: 1 << 38
iterator = iter(worker_pools.loader_of())
connect = pool.PoolProcesses.connect

def connect_limited(processes):
    connect(processes)
    resource.prlimit(processes.fork_server.pid, resource.RLIMIT_AS, (1 << 36, 1 << 36))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))

pool.PoolProcesses.connect = connect_limited
try:
    next(iterator)
except OSError as error:
    print(error, *error.__notes__)
"""
    done = python("-c", code)

    assert (done.returncode, done.stderr) == (0, "")
    assert "Cannot allocate memory" in done.stdout
    assert "(`ulimit -v`)" in done.stdout
