"""One life of a trainer in the soak: it resumes where the last one saved, and reads to the end, or is killed before.

    python life.py '{"seed": 7, "life": 0, "folder": "…", "url": "…", "is_last": true, "broken": ""}'

It reads the stream in legs. Each has other workers, threads and, where the stream can be dealt to others, another
shard, and its fault. Every batch is compared with the oracle's. After each leg nothing may be left of it. A failed
assertion, and any error that its fault does not excuse, ends it with a traceback; else it prints what it saw, as JSON.
"""

import collections
import contextlib
import ctypes
import dataclasses
import faulthandler
import gc
import json
import os
import random
import signal
import sys
import threading
import time
import warnings
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest

import millstream
from millstream.loader.checkpoints.checkpointable import encoded_state
from millstream.transforms import Map
from soak.courses import Course, mark
from soak.faults import FAULTS, Fault, FewDescriptors, FullDisk
from support.faults.user_faults import hang
from support.processes.moves import move_at_random
from support.processes.process_tree import open_descriptors, our_threads, processes_below

_LEFT_SECONDS = 10.0
"""The seconds within which processes and files of a leg must be gone, on a busy machine."""

_GROWTH_BYTES = 96 << 20
"""The memory by which a life may grow between its second leg and its last one."""


@dataclasses.dataclass(frozen=True)
class Orders:
    """The task of a life."""

    seed: int
    life: int
    folder: str
    url: str
    is_last: bool
    broken: str
    fault: str = ""


BREAKS = {"stream": Map(lambda element: element + (int(element) % 5 == 0)), "hang": Map(lambda _: hang())}
"""Operations that make some elements wrong, or never return."""


class Life:
    """A trainer from its start to its end."""

    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.chance = random.Random(f"life {orders.seed} {orders.life}")
        self.course = Course.of(orders.seed)
        self.folder = Path(orders.folder)
        self.seen: collections.Counter[str] = collections.Counter()
        self.most: collections.Counter[str] = collections.Counter()
        self.expected: dict[tuple[int, int], list[bytes]] = {}
        self.is_interruptible = False
        self.fault = ""
        self.leaked: list[int] = []
        self.hoarded: list[bytes] = []
        signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, _number: int, _frame: FrameType | None) -> None:
        if self.is_interruptible:
            self.is_interruptible = False
            raise KeyboardInterrupt

    def run(self) -> None:
        # With a chance of its own: how often it is asked is a matter of time.
        move_at_random(pytest.MonkeyPatch(), random.Random(self.orders.seed))
        if not self.orders.is_last:
            delay = self.chance.uniform(0.1, 4.0)
            killed = threading.Timer(
                delay, os.kill, [os.getpid(), self.chance.choice([signal.SIGKILL, signal.SIGTERM])]
            )
            killed.daemon = True
            killed.start()
        # One that was killed may have left the disk full.
        for name in ("filler", "state.new"):
            (self.folder / name).unlink(missing_ok=True)
        memory: list[int] = []
        is_over = False
        descriptors = self._descriptors()
        while not is_over:
            is_over = self._leg()
            self._check_nothing_is_left(descriptors)
            memory.append(memory_in_use())
            if len(memory) > 2:
                assert memory[-1] - memory[1] < _GROWTH_BYTES, f"memory grows: {memory}"
        print(json.dumps({"seen": self.seen, "most": self.most}))  # noqa: T201  (this is its answer)

    def _leg(self) -> bool:
        """Reads some batches with one loader, and says whether the stream is over."""
        index, count = self._shard()
        self._stream(index, count)  # Before anything goes wrong: a loader may have to read it.
        workers = self.chance.choice([1, 2, 3] if self.orders.fault else [0, 1, 2, 2, 3])
        fault = self.chance.choice(self._faults(workers))(self.chance, self.folder)
        self.seen["legs"] += 1
        self.fault = fault.name
        limit = self.chance.choice([5, 30, 100, 1 << 40])
        told: BaseException | None = None
        is_over = False
        with fault:
            try:
                source = self.course.source(self.folder, self.orders.url)
                loader = self._loader(source, index, count, workers)
                is_over = self._read(loader, (index, count), fault, limit)
            except fault.told as error:
                told = error
        if told is not None:
            assert str(told), f"an error without a message: {told!r}"
            self.seen["errors"] += 1
        self.seen[fault.name] += fault.count
        return is_over

    def _faults(self, workers: int) -> list[type[Fault]]:
        faults = [kind for kind in FAULTS if workers or not kind.needs_workers]
        if self.orders.fault:
            return [kind for kind in faults if kind.name == self.orders.fault]
        # A store needs descriptors for its connections, and more of them than there may be.
        return [kind for kind in faults if kind is not FewDescriptors or self.course.place != "store"]

    def _saved(self) -> dict[str, Any] | None:
        file = self.folder / "state"
        return json.loads(file.read_bytes()) if file.exists() else None

    def _shard(self) -> tuple[int, int]:
        """Returns which host to be now: any one whose stream can be resumed from what was saved."""
        if saved := self._saved():
            if saved["host"] is not None:
                return saved["host"][0], saved["host"][1]
        elif len(self.course.shard_counts) == 1:
            return self.orders.seed % self.course.shard_counts[0], self.course.shard_counts[0]
        count = self.chance.choice(self.course.shard_counts)
        return self.chance.randrange(count), count

    def _stream(self, index: int, count: int) -> list[bytes]:
        if (index, count) not in self.expected:
            self.expected[index, count] = self.course.expected(index, count)
        return self.expected[index, count]

    def _loader(self, source: Any, index: int, count: int, workers: int) -> Any:
        return self.course.loader(
            source,
            index,
            count,
            breaks=(BREAKS[self.orders.broken],) if self.orders.broken in BREAKS else (),
            workers=millstream.MultiprocessingOptions(workers, self.chance.choice([1, 2, 5]), stall_timeout=60.0),
            reading=millstream.ReadOptions(self.chance.choice([0, 1, 2, 16])),
            chooses_workers=self.chance.random() < 0.5,
        )

    def _read(self, loader: Any, host: tuple[int, int], fault: Fault, limit: int) -> bool:
        stream = self._stream(*host)
        with iter(loader) as iterator:
            self._restore(iterator)
            first = step = iterator.step
            fault.begin(iterator)
            for _ in range(limit):
                fault.act(iterator)
                if self.chance.random() < 0.05:
                    self._save(iterator, loader, host, fault)
                if self.chance.random() < 0.02:
                    iterator.set_state(iterator.get_state())  # Drops what is in work.
                    self.seen["moves"] += 1
                try:
                    batch = self._next(iterator)
                except KeyboardInterrupt:
                    assert step <= iterator.step <= step + 1
                    step = iterator.step
                    continue
                if batch is None:
                    # Where all hosts' states are of a later step, this one's stream was over before.
                    assert step == max(first, len(stream)), f"the stream ends at step {step} of {len(stream)}"
                    return True
                assert step < len(stream), f"step {step} comes after the end of the stream"
                assert mark(batch) == stream[step], f"another batch at step {step}"
                step += 1
                assert iterator.step == step
                self.seen["batches"] += 1
                if step % 16 == 0:
                    self._watch()
            self._save(iterator, loader, host, fault)
        return False

    def _next(self, iterator: millstream.DataLoaderIterator) -> Any:
        """Returns the next batch, or None at the end. Ctrl-C may come now, and at no other time."""
        try:
            self.is_interruptible = True
            return next(iterator, None)
        finally:
            self.is_interruptible = False

    def _restore(self, iterator: millstream.DataLoaderIterator) -> None:
        if saved := self._saved():
            states = [state.encode() if iterator.states_are_bytes else json.loads(state) for state in saved["states"]]
            iterator.set_state(*states) if len(states) == 1 else iterator.set_states(states)
            assert iterator.step == saved["step"], f"saved at step {saved['step']}, resumed at {iterator.step}"

    def _states(self, iterator: Any, loader: Any, host: tuple[int, int]) -> dict[str, Any]:
        """Returns the states that hosts have saved at this step, and which host it was if it was one alone.

        The state of one says it all where each record becomes one element. Where logical shards are dealt to several
        hosts, these resume from the states of all of them: the others are brought to this step here.
        """
        states = [encoded_state(iterator).decode()]
        if self.course.is_one_to_one:
            return {"host": None, "states": states}
        if self.course.logical_shards is not None and self.chance.random() < 0.3:
            # At its end, a stream that drops elements may be over on some hosts, and not on others.
            with contextlib.suppress(IndexError):
                others = sorted(set(range(host[1])) - {host[0]})
                more = [self._state_of(loader, index, host[1], iterator.step) for index in others]
                return {"host": None, "states": states + more}
        return {"host": host, "states": states}

    def _state_of(self, loader: millstream.DataLoader, index: int, count: int, step: int) -> str:
        with iter(self._loader(loader.data_source, index, count, 0)) as iterator:
            iterator.seek(step)
            return encoded_state(iterator).decode()

    def _save(self, iterator: Any, loader: Any, host: tuple[int, int], fault: Fault) -> None:
        content = json.dumps({"step": iterator.step, **self._states(iterator, loader, host)}).encode()
        unfinished = self.folder / "state.new"
        try:
            with fault.while_saving() if isinstance(fault, FullDisk) else contextlib.nullcontext():
                unfinished.write_bytes(content)
                unfinished.replace(self.folder / "state")
        except OSError:
            if not fault.told:
                raise
            unfinished.unlink(missing_ok=True)
            self.seen["states not saved"] += 1

    def _watch(self) -> None:
        process = psutil.Process()
        now = {
            "MB": process.memory_info().rss >> 20,
            "descriptors": process.num_fds(),
            "threads": threading.active_count(),
            "processes": 1 + len(process.children(recursive=True)),
        }
        self.most = collections.Counter(dict(collections.Counter(now) | self.most))

    def _check_nothing_is_left(self, descriptors: int) -> None:
        """Fails where a leg has left threads, processes, descriptors or memory that is shared."""
        if self.orders.broken == "leak":
            self.leaked.append(os.open("/dev/null", os.O_RDONLY))
        if self.orders.broken == "memory":
            self.hoarded.append(b"x" * (2 * _GROWTH_BYTES))
        # A planted leak is one for good.
        deadline = time.monotonic() + (1.0 if self.leaked else _LEFT_SECONDS)
        while left := self._left(descriptors):
            assert time.monotonic() < deadline, f"a leg with {self.fault} has left behind: {', '.join(left)}"

    def _left(self, descriptors: int) -> list[str]:
        gc.collect()
        threads = [thread.name for thread in our_threads()]
        processes = [described(process) for process in processes_below()]
        more = self._descriptors() - descriptors
        mapped = Path("/proc/self/maps").read_text().count("memfd:millstream")
        return [*threads, *processes, *[f"{more} descriptors"] * (more > 0), *[f"{mapped} arenas"] * (mapped > 0)]

    def _descriptors(self) -> int:
        """Returns how many files are open; connections to a store are kept."""
        names = [descriptor.split(" -> ")[1] for descriptor in open_descriptors()]
        return sum(self.course.place != "store" or name.startswith("/") for name in names)


def memory_in_use() -> int:
    """Returns how many bytes this process holds, without those of its heap that are free."""
    # The C library keeps what threads have freed: after a leg of large elements, a hundred megabytes that are no leak.
    ctypes.CDLL(None).malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


def described(process: psutil.Process) -> str:
    """Returns which process it is, what it is doing, and since when."""
    try:
        words = " ".join(process.cmdline())[-100:]
        return f"process {process.pid}, {process.status()}, {time.time() - process.create_time():.0f} s old, {words!r}"
    except psutil.ZombieProcess:
        return f"process {process.pid}, which has ended and was not waited for"
    except psutil.Error:
        return f"process {process.pid}, gone by now"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    faulthandler.dump_traceback_later(float(os.environ["SOAK_LIMIT_SECONDS"]) * 0.9)
    Life(Orders(**json.loads(sys.argv[1]))).run()
