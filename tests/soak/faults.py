"""The faults while a stream of the soak is read: each is a context, and acts before each batch.

The clock is not among them: `CLOCK` is a `sitecustomize.py` that makes the wall clock jump in every Python process of a
trial.
"""

import contextlib
import dataclasses
import os
import random
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar, Self

import psutil

import millstream
from millstream.loader.engine.crew import WorkerSlots
from millstream.loader.engine.engine import Engine
from support.faults.memory_limits import memory_limit
from support.processes.worker_pools import blameless_workers, fork_server_of, place_of, pool_of, send

CLOCK = """
import random, time

# What somebody who sets the clock, or a daemon that corrects it, does to a program: `time.time` and `time.time_ns`
# jump by up to a year, forth and back, every 50 ms. `time.monotonic` does not; nor do clocks that C code reads.
_time, _time_ns = time.time, time.time_ns


def _offset():
    return random.Random(int(time.monotonic() * 20)).randrange(-31_536_000, 31_536_000)


time.time = lambda: _time() + _offset()
time.time_ns = lambda: _time_ns() + _offset() * 10**9
"""

TOLD = (OSError, MemoryError, millstream.WorkerDiedError, millstream.WorkerError)
"""The errors that a lack of memory, descriptors or disk may end in."""


@dataclasses.dataclass
class Fault:
    """Nothing goes wrong.

    Attributes:
        chance: decides.
        folder: where the states are.
        count: how often something went wrong.
    """

    name: ClassVar[str] = "nothing"
    needs_workers: ClassVar[bool] = False
    told: ClassVar[tuple[type[BaseException], ...]] = ()
    """The errors that it may end in."""

    chance: random.Random
    folder: Path
    count: int = 0
    ends: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    """The actions that lift the fault."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.ends.close()

    def begin(self, iterator: millstream.DataLoaderIterator) -> None:
        """Is called once, when there is an iterator."""

    def act(self, iterator: millstream.DataLoaderIterator) -> None:
        """Is called before each batch."""


class KilledWorkers(Fault):
    """Workers are killed; not those whose call has killed another, and not many in a row while they start."""

    name = "killed worker"
    needs_workers = True

    def act(self, iterator: millstream.DataLoaderIterator) -> None:
        if self.chance.random() > 0.1 or not is_working(iterator):
            return
        may_start = place_of(iterator)._deaths_at_start.count < 3
        candidates = [worker for worker in blameless_workers(iterator) if worker.is_ready or may_start]
        if candidates and send(self.chance.choice(candidates), signal.SIGKILL):
            self.count += 1


class StoppedWorkers(Fault):
    """Workers stop, for up to a third of a second."""

    name = "stopped worker"
    needs_workers = True

    def act(self, iterator: millstream.DataLoaderIterator) -> None:
        if self.chance.random() > 0.05 or not is_working(iterator):
            return
        candidates = [worker for worker in pool_of(iterator).workers if worker.handle is not None]
        if not candidates:
            return
        worker = self.chance.choice(candidates)
        handle = os.dup(worker.handle or 0)
        if send(worker, signal.SIGSTOP):
            self.count += 1
        timer = threading.Timer(self.chance.uniform(0.001, 0.3), proceed, [handle])
        timer.start()
        self.ends.callback(os.close, handle)
        self.ends.callback(timer.join)


class KilledForkServer(Fault):
    """The process that forks the workers is killed, once, and they die with it."""

    name = "killed fork server"
    needs_workers = True

    def act(self, iterator: millstream.DataLoaderIterator) -> None:
        if self.chance.random() < 0.1 and not self.count and is_working(iterator):
            os.kill(fork_server_of(iterator), signal.SIGKILL)
            self.count += 1


class LittleMemory(Fault):
    """The fork server and its workers get a limit of memory, as a container has one; where that is permitted."""

    name = "little memory"
    needs_workers = True
    told = TOLD

    def begin(self, iterator: millstream.DataLoaderIterator) -> None:
        if not is_working(iterator):
            return
        server = psutil.Process(fork_server_of(iterator))
        limit = self.ends.enter_context(memory_limit(self.chance.randrange(1 << 20, 40 << 20)))
        for process in [server, *server.children(recursive=True)]:
            with contextlib.suppress(OSError):  # It has ended.
                limit.apply(process.pid)
        self.count += limit.group is not None


class FewDescriptors(Fault):
    """Only a few more files can be opened."""

    name = "few descriptors"
    told = TOLD

    def __enter__(self) -> Self:
        usual = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(map(int, os.listdir("/proc/self/fd")))  # noqa: PTH208  (no paths are wanted)
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + self.chance.randrange(24), usual[1]))
        self.ends.callback(resource.setrlimit, resource.RLIMIT_NOFILE, usual)
        self.count += 1
        return self


class FullDisk(Fault):
    """The disk that the data, the cache and the states are on is full, or nearly.

    Where no small disk could be mounted, files of this process cannot grow: that is another error of the same call.
    """

    name = "full disk"
    told = TOLD

    def __enter__(self) -> Self:
        filler = self.folder / "filler"
        self.ends.callback(filler.unlink, missing_ok=True)
        if self.folder.is_mount():
            left = self.chance.choice([0, 0, 4096, 8192])
            with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
            with contextlib.suppress(OSError):
                os.truncate(filler, max(0, filler.stat().st_size - left))
        self.count += 1
        return self

    @contextlib.contextmanager
    def while_saving(self) -> Iterator[None]:
        usual = resource.getrlimit(resource.RLIMIT_FSIZE)
        if not self.folder.is_mount():
            resource.setrlimit(resource.RLIMIT_FSIZE, (self.chance.randrange(64), usual[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, usual)


class ControlC(Fault):
    """Ctrl-C comes to this process and its group, at any moment within `next`."""

    name = "Ctrl-C"

    def act(self, iterator: millstream.DataLoaderIterator) -> None:
        del iterator
        if self.chance.random() < 0.1:
            timer = threading.Timer(self.chance.uniform(0, 0.02), os.killpg, [os.getpgrp(), signal.SIGINT])
            timer.start()
            self.ends.callback(timer.join)
            self.count += 1


FAULTS: list[type[Fault]] = [
    Fault,
    KilledWorkers,
    KilledWorkers,
    StoppedWorkers,
    KilledForkServer,
    LittleMemory,
    FewDescriptors,
    FullDisk,
    ControlC,
]


def is_working(iterator: millstream.DataLoaderIterator) -> bool:
    """Has the workers begun, and says whether there are any: not where nothing is left to be read."""
    iterator.start_prefetch()
    # Those of datasets below a join are not known.
    executor = getattr(getattr(iterator, "_inner", iterator), "_executor", None)
    has_workers = isinstance(executor, Engine) and isinstance(executor.budget, WorkerSlots)
    return has_workers and pool_of(iterator)._state.fork_server is not None


def proceed(handle: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(handle, signal.SIGCONT)
