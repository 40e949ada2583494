"""Looking at the worker processes of an iterator from outside, and waiting for processes to be gone."""

import concurrent.futures
import contextlib
import dataclasses
import itertools
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import millstream
from millstream.loader.engine.processes import Processes
from millstream.loader.processes import fork_servers
from millstream.loader.processes.fork_servers import FORK_SERVERS
from millstream.loader.processes.pool import Pool, Worker
from millstream.loader.processes.process_control import wait_slices
from millstream.loader.processes.process_report import describe_process
from support.faults.user_faults import WAIT_SECONDS

TESTS = Path(__file__).parents[2]

LATE_SECONDS = 5.0
"""The delay that anything may have because one process was suspended for a moment, or waited for a disk or a core.

What bounds rule out are waits for what never comes, or comes at the end of a timeout of a minute.
"""
LOOK_SECONDS = 0.05
"""The interval of looks at what runs."""
ATTEMPTS = 12
"""The number of late attempts after which something that must be quick counts as slow."""
BATCH = 4
SIZE = 48


def loader_of(*operations: Any, **options: Any) -> millstream.DataLoader:
    """Returns a loader of the numbers below SIZE, shuffled and in batches of BATCH, with two workers by default."""
    arguments: dict[str, Any] = {
        "data_source": range(SIZE),
        "sampler": millstream.IndexSampler(SIZE, shuffle=True, num_epochs=1, seed=5),
        "operations": [*operations, millstream.Batch(BATCH)],
        "worker_count": 2,
        "stall_timeout": WAIT_SECONDS,
    }
    return millstream.DataLoader(**(arguments | options))


def batches(loader: millstream.DataLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


EXPECTED = batches(loader_of(worker_count=0))
"""The batches of every such loader whose operations change nothing."""
STEP = 5
BAD = EXPECTED[STEP][2]
"""An element in the middle of batch STEP."""


def place_of(iterator: millstream.DataLoaderIterator) -> Processes:
    engine: Any = getattr(iterator, "_inner", iterator)._executor  # A chain has the iterator of a loader.
    assert isinstance(engine.budget.place, Processes)
    return engine.budget.place


def pool_of(iterator: millstream.DataLoaderIterator) -> Pool:
    return place_of(iterator)._pool


def workers_of(iterator: millstream.DataLoaderIterator) -> list[Worker]:
    """Returns the workers of an iterator, once all of them are there and ready."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not all(worker.is_ready and worker.pid for worker in pool_of(iterator).workers):
        assert time.monotonic() < deadline, "the workers do not start"
        place_of(iterator)._receive(1.0)
    return pool_of(iterator).workers


def pids_of(iterator: millstream.DataLoaderIterator) -> list[int]:
    return [worker.pid or 0 for worker in workers_of(iterator)]


def expect_stalls(iterator: millstream.DataLoaderIterator, seconds: float) -> None:
    """Shortens the stall timeout, once the workers are there: how long they take to start depends on the machine.

    What the consumer has waited for them so far does not count. Workers that replace them have the timeout, too.
    """
    for worker in workers_of(iterator):
        worker.clock.restart()
        worker.clock.timeout = seconds
    place, pool = place_of(iterator), pool_of(iterator)
    place._options = pool._options = dataclasses.replace(place._options, stall_timeout=seconds)


def wait_until(pid: int, state: str) -> None:
    """Waits until what a process is doing, as a report says it, begins with some words."""
    deadline = time.monotonic() + WAIT_SECONDS
    while not describe_process(pid).startswith(state):
        assert time.monotonic() < deadline, describe_process(pid)


def wait_inside(function: Any, thread: int) -> None:
    """Waits until a thread is inside a function, or in one that it calls."""
    deadline = time.monotonic() + WAIT_SECONDS
    while all(
        frame.f_code is not function.__code__ for frame, _ in traceback.walk_stack(sys._current_frames()[thread])
    ):
        assert time.monotonic() < deadline, f"the thread does not come to {function.__name__}"


def fork_server_of(iterator: millstream.DataLoaderIterator) -> int:
    fork_server = pool_of(iterator)._state.fork_server
    assert fork_server is not None
    return fork_server.pid


def processes_of(iterator: millstream.DataLoaderIterator) -> list[int]:
    return [fork_server_of(iterator), *pids_of(iterator)]


def made_all(iterator: millstream.DataLoaderIterator, but: int | None = None) -> list[int]:
    """Waits until the workers of an iterator have made all that they were given; returns their process numbers.

    It does not wait for the process `but`.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    while any(worker.calls for worker in workers_of(iterator) if worker.pid != but):
        assert time.monotonic() < deadline, "the workers do not answer"
        place_of(iterator)._receive(1.0)
    return pids_of(iterator)


def blameless_workers(iterator: millstream.DataLoaderIterator) -> list[Worker]:
    """Returns the workers of an iterator that may be killed: their calls have killed no other."""
    assigned = place_of(iterator)._assignments._assigned
    calls = {number for number, one in assigned.items() if one.deaths}
    return [worker for worker in pool_of(iterator).workers if worker.handle and calls.isdisjoint(worker.calls)]


def send(worker: Worker, number: signal.Signals) -> bool:
    """Sends a signal to a worker, and says whether it was still there."""
    try:
        signal.pidfd_send_signal(worker.handle or 0, number)
    except ProcessLookupError:
        return False
    return True


def still_there(pids: Iterable[int], seconds: float = 2.0) -> list[int]:
    """Returns the processes that have not ended after the given seconds. They may be children of other processes.

    They have more time where the machine is busy with other things. An idle fork server of this process counts as
    ended: it has no workers, and waits for the next loader.
    """
    pids = [pid for pid in pids if pid not in {server.process.pid for server in FORK_SERVERS.idle}]
    waits = wait_slices(seconds + LATE_SECONDS if seconds else 0.0)
    left = [pid for pid in pids if not has_ended(pid, waits)]
    if left and (factor := slowness()) > 1:
        waits = wait_slices(seconds * factor)
        left = [pid for pid in left if not has_ended(pid, waits)]
    return left


def has_ended(pid: int, waits: Iterator[float]) -> bool:
    """Returns True if a process has ended, or ends within the given waits."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return any(select.select([handle], [], [], wait)[0] for wait in itertools.chain(waits, [0.0]))
    finally:
        os.close(handle)


def slowness() -> float:
    """Returns the factor by which work takes longer than on an idle machine, at least 1."""
    start, end = time.monotonic(), time.thread_time() + 0.05
    while time.thread_time() < end:
        pass
    factor = (time.monotonic() - start) / 0.05
    # Several processes must each get their turn, one after the other.
    return 1.0 if factor < 1.2 else 5.0 * factor


@contextlib.contextmanager
def stopwatch() -> Iterator[Callable[[], float]]:
    """Yields what returns the seconds since the beginning of the block, without those in which all stood still.

    A machine that is shared is suspended for seconds now and then. Clocks go on, and no process makes progress: a law
    about seconds is about those in which it could.
    """
    begin, stood_still, has_ended = time.monotonic(), 0.0, threading.Event()

    def watch() -> None:
        nonlocal stood_still
        is_over = False
        while not is_over:
            look = time.monotonic()
            is_over = has_ended.wait(LOOK_SECONDS)
            stood_still += max(0.0, time.monotonic() - look - LOOK_SECONDS)

    watcher = threading.Thread(target=watch, name="stopwatch")

    def seconds() -> float:
        has_ended.set()
        watcher.join()
        return time.monotonic() - begin - stood_still

    watcher.start()
    try:
        yield seconds
    finally:
        has_ended.set()
        watcher.join()


@contextlib.contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Fails if what is done within takes longer than this would be on an idle machine, and not only by chance."""
    with stopwatch() as seconds_so_far:
        try:
            yield
        finally:
            # Of what raises an error as well.
            taken = seconds_so_far()
            assert taken <= seconds + LATE_SECONDS or taken <= seconds * slowness(), f"took {taken:.2f} s"


@contextlib.contextmanager
def sooner_than(timeout: float) -> Iterator[None]:
    """Fails if what is done within waits for a timeout of this many seconds, however busy the machine is.

    The timeout must be long beside what is done, which has half of it.
    """
    with stopwatch() as seconds_so_far:
        yield
        taken = seconds_so_far()
    assert taken < timeout / 2, f"took {taken:.2f} s"


@contextlib.contextmanager
def patient_pools() -> Iterator[None]:
    """Lets pools that start within wait a minute for workers to exit, before they kill them: see `assert_exits`."""
    start, seconds = fork_servers._START, fork_servers.CLOSE_SECONDS
    patience = f"from millstream.loader.processes import fork_server\nfork_server.GRACE_SECONDS = {WAIT_SECONDS}\nmain("
    fork_servers._START = start.replace("main(", patience)
    fork_servers.CLOSE_SECONDS = 4 * WAIT_SECONDS
    try:
        yield
    finally:
        fork_servers._START, fork_servers.CLOSE_SECONDS = start, seconds


def assert_exits(iterator: millstream.DataLoaderIterator, processes: Iterable[int]) -> None:
    """Closes an iterator of a patient pool. Fails if a process exits only when it is killed, or never."""
    with sooner_than(WAIT_SECONDS):
        iterator.close()
    assert still_there(processes, WAIT_SECONDS) == []


@contextlib.contextmanager
def in_background(action: Callable[[], object]) -> Iterator[None]:
    """Does something in a thread meanwhile, and waits for it; what it raises is raised here."""
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        done = thread.submit(action)
        yield
        done.result(WAIT_SECONDS)


def environment(*folders: Path) -> dict[str, str]:
    """Returns this process's environment, in which the test's support modules, and more folders, can be imported."""
    path = [*map(str, folders), str(TESTS), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path))}


def python(*arguments: object, check: bool = False, **options: Any) -> "subprocess.CompletedProcess[str]":
    """Returns the outcome of a Python process that ended by itself; with `check`, it must have ended well."""
    settings: dict[str, Any] = {"env": environment(), "timeout": 3 * WAIT_SECONDS, "text": True, "capture_output": True}
    return subprocess.run([sys.executable, *map(str, arguments)], check=check, **(settings | options))
