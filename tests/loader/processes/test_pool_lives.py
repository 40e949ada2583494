"""The life of a pool: a warm one serves again, a closed or forgotten one ends, whatever still refers to it."""

import concurrent.futures
import copy
import functools
import gc
import itertools
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

import millstream
from millstream.loader.processes import fork_server, pool
from millstream.loader.processes.channel import Channel
from millstream.loader.processes.process_report import create_crash_log
from millstream.loader.threads.thread_settings import in_fresh_thread
from millstream.loader.transport.pipeline_file import write_chunks
from millstream.loader.workers import retirement
from millstream.loader.workers.pools import AnyWorker
from support.faults import user_faults
from support.faults.interrupted import interrupt_at
from support.faults.user_faults import WAIT_SECONDS, At, Pipe, Raise, ReportThen
from support.processes.process_tree import open_descriptors, processes_below, settled_descriptors
from support.processes.worker_pools import (
    BAD,
    BATCH,
    EXPECTED,
    STEP,
    assert_exits,
    at_most,
    batches,
    in_background,
    loader_of,
    patient_pools,
    pool_of,
    processes_of,
    still_there,
    wait_inside,
    workers_of,
)


def idle_pools(loader: millstream.DataLoader) -> list[pool.Pool]:
    """Returns the pools of a loader that no iterator uses."""
    assert loader._execution.pools is not None
    idle: list[pool.Pool] = loader._execution.pools.idle
    return idle


def test_iterators_at_the_same_time_have_pools_of_their_own() -> None:
    """Two iterators over one loader do not share workers; one pool stays when both have ended."""
    loader = loader_of()
    pairs = zip(iter(loader), iter(loader), strict=True)
    assert [(one.tolist(), two.tolist()) for one, two in pairs] == [(batch, batch) for batch in EXPECTED]
    (idle,) = idle_pools(loader)
    assert len(processes_below(recursive=False)) == 1
    assert len(idle.workers) == 2


@pytest.mark.parametrize("taken", [0, 3, len(EXPECTED)])
def test_closing_ends_the_workers(taken: int) -> None:
    """`close`, before, during and after the stream, ends all processes of the iterator, and idle ones of its loader.

    Workers exit by themselves, without being killed.
    """
    with patient_pools():
        loader = loader_of()
        list(loader)
        iterator = iter(loader)
        iterator.start_prefetch()
        processes = processes_of(iterator)
        for _ in range(taken):
            next(iterator)
        assert_exits(iterator, processes)
    assert idle_pools(loader) == []
    with pytest.raises(ValueError, match="is closed"):
        next(iterator)


def test_an_iterator_that_is_forgotten_ends_its_workers() -> None:
    """Dropping iterator and loader ends the workers without the garbage collector: no cycle holds them."""
    loader = loader_of()
    iterator = iter(loader)
    next(iterator)
    processes = processes_of(iterator)
    gc.disable()
    try:
        del iterator, loader
        assert still_there(processes) == []
    finally:
        gc.enable()


def test_a_loop_that_is_left_leaves_its_workers_warm() -> None:
    """`break` costs no process: the next loop has the same workers, whatever they were doing, and the whole stream.

    So has the next epoch, after a stream that has ended.
    """
    loader = loader_of(worker_buffer_size=2)
    for _ in loader:
        break
    (idle,) = idle_pools(loader)
    workers = list(idle.workers)
    del idle
    for _ in range(3):
        iterator = iter(loader)
        assert next(iterator).tolist() == EXPECTED[0]
        processes = processes_of(iterator)
        assert workers_of(iterator) == workers
        del iterator
    assert batches(loader) == EXPECTED
    iterator = iter(loader)
    assert [batch.tolist() for batch in iterator] == EXPECTED
    (idle,) = idle_pools(loader)
    assert idle.workers == workers
    assert still_there(processes, 0.0) == processes
    iterator.close()
    assert still_there(processes) == []


def test_idle_workers_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that no iterator has used for a while end, and so do their arenas; new ones start silently."""
    monkeypatch.setattr(retirement, "IDLE_SECONDS", 0.05)
    loader = loader_of()
    for _ in range(2):
        iterator = iter(loader)
        assert next(iterator).tolist() == EXPECTED[0]
        processes = processes_of(iterator)
        arena = weakref.ref(workers_of(iterator)[0].arena)
        # One that is in use stays, however long it is not asked for anything.
        assert [thread.name for thread in threading.enumerate() if "millstream-idle" in thread.name] == []
        assert [batch.tolist() for batch in iterator] == EXPECTED[1:]
        assert still_there(processes) == []
        for thread in threading.enumerate():
            if thread.name == "millstream-idle":
                thread.join(WAIT_SECONDS)
        deadline = time.monotonic() + WAIT_SECONDS
        while processes_below() and time.monotonic() < deadline:
            pass  # The fork server has ended, and is a zombie for a moment.
        assert processes_below() == []
        assert idle_pools(loader) == []
        assert arena() is None


def test_an_interrupt_of_a_return_to_work() -> None:
    """Wherever Ctrl-C interrupts what keeps an idle pool, no thread waits for its minute once the pool has ended."""
    for moment in itertools.count():
        idle = loader_of()
        waiting = retirement.Retirement(idle.close, idle, "waits")  # type: ignore[arg-type]  # never called
        waiting.begin()
        was_interrupted = interrupt_at(moment, waiting.cancel)
        del idle
        gc.collect()
        waiting.thread.join(retirement.IDLE_SECONDS / 4)
        assert not waiting.thread.is_alive()
        if not was_interrupted:
            break
    assert moment > 1


def test_a_loader_that_is_closed() -> None:
    """Closing a loader ends all of its workers; it and its iterators raise with the remedy, also without workers."""
    with loader_of() as loader:
        assert batches(loader) == EXPECTED
        one, two = iter(loader), iter(loader)
        assert [next(iterator).tolist() for iterator in (one, two)] == EXPECTED[:1] * 2
        processes = [*processes_of(one), *processes_of(two)]
        with at_most(2.0):
            loader.close()
        assert still_there(processes) == []
        for iterator in (one, two):
            with pytest.raises(ValueError, match="iterator is closed: its DataLoader was closed; build a new one"):
                next(iterator)
        loader.close()
        with pytest.raises(ValueError, match="This DataLoader is closed: build a new one"):
            iter(loader)
    with iter(loader_of()) as iterator:
        iterator.set_state(one.get_state())
        assert next(iterator).tolist() == EXPECTED[1]
    assert len(loader) == len(EXPECTED)
    with loader_of(worker_count=0) as loader:
        iterator = iter(loader)
    with pytest.raises(ValueError, match="its DataLoader was closed"):
        next(iterator)


@pytest.mark.parametrize("copied", [copy.copy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_loader_with_workers_can_be_copied(copied: Callable[[millstream.DataLoader], millstream.DataLoader]) -> None:
    """A copy of a loader, taken before, during or after an epoch, has the same stream and its own workers."""
    loader = loader_of()
    assert batches(copied(loader)) == EXPECTED
    iterator = iter(loader)
    next(iterator)
    other = copied(loader)
    assert batches(other) == EXPECTED
    (idle,) = idle_pools(other)
    assert idle.workers[0].pid not in processes_of(iterator)
    loader.close()
    assert batches(copied(loader)) == EXPECTED


def test_threads_that_take_a_warm_pool_at_once_get_different_ones() -> None:
    """Iterators of one loader in several threads use different pools: each epoch is complete."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with loader_of(worker_count=1) as loader, concurrent.futures.ThreadPoolExecutor(3) as threads:
            epochs = [threads.submit(batches, loader) for _ in range(60)]
            assert [epoch.result(WAIT_SECONDS) for epoch in epochs] == [EXPECTED] * 60
    finally:
        sys.setswitchinterval(interval)


def test_an_interrupt_of_closing() -> None:
    """Wherever Ctrl-C interrupts `close`, the next call finishes it: no process or descriptor is left."""
    before = len(open_descriptors())
    for moment in itertools.count(0, 47):
        iterator = iter(loader_of(worker_count=1))
        next(iterator)
        processes = processes_of(iterator)
        was_interrupted = interrupt_at(moment, iterator.close)
        iterator.close()
        assert still_there(processes) == []
        assert len(open_descriptors()) <= before
        if not was_interrupted:
            break
    assert moment > 0


def test_an_interrupt_of_the_start() -> None:
    """Ctrl-C cannot interrupt the creation of the folder that workers share, whose descriptor nothing would close."""
    with iter(loader_of(worker_count=1)) as iterator:
        assert not interrupt_at(0, functools.partial(next, iterator), "millstream.sources")


def test_idle_workers_whose_end_was_interrupted_serve_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """If Ctrl-C interrupts the end of an idle pool, the next iterator gets a new one, which stays warm in its place."""
    loader = loader_of()
    assert batches(loader) == EXPECTED
    shut_down = Channel.shut_down

    def be_interrupted(self: Channel) -> None:
        shut_down(self)
        raise KeyboardInterrupt

    iterator = iter(loader)
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "shut_down", be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            iterator.close()
    assert batches(loader) == EXPECTED
    assert [idle.is_usable for idle in idle_pools(loader)] == [False, True]


def test_idle_workers_that_end_serve_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """An iterator that begins while another one is closed gets new workers, not the idle ones that end with it."""
    loader = loader_of()
    assert batches(loader) == EXPECTED
    closed, begun, stop = iter(loader), iter(loader), pool.Pool.stop

    def stop_late(self: pool.Pool) -> None:
        monkeypatch.undo()
        assert next(begun).tolist() == EXPECTED[0]
        stop(self)

    monkeypatch.setattr(pool.Pool, "stop", stop_late)
    closed.close()
    assert [batch.tolist() for batch in begun] == EXPECTED[1:]


@pytest.mark.parametrize("leave", ["move", "drop"])
def test_workers_of_an_interrupted_request_serve_no_other(leave: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """If Ctrl-C interrupts the sending of a call, its worker may have it or not: the next iterator gets new workers."""
    loader = loader_of()
    assert batches(loader) == EXPECTED
    (idle,) = idle_pools(loader)
    before, record_call = list(idle.workers), AnyWorker.record_call
    del idle

    def be_interrupted(self: AnyWorker, call: int) -> None:
        record_call(self, call)
        raise KeyboardInterrupt

    iterator = iter(loader)
    with monkeypatch.context() as patch:
        patch.setattr(AnyWorker, "record_call", be_interrupted)
        with pytest.raises(KeyboardInterrupt):
            iterator.start_prefetch()
    if leave == "move":
        iterator.seek(0)
    else:
        del iterator
        gc.collect()
        iterator = iter(loader)
    assert next(iterator).tolist() == EXPECTED[0]
    assert not set(before).intersection(workers_of(iterator))


@pytest.mark.parametrize("fault", [Raise(KeyError), user_faults.be_killed], ids=["raises", "dies"])
def test_an_exception_that_is_kept_keeps_no_more_than_it_must(fault: Callable[[], None]) -> None:
    """An exception holds the frames that it went through, and the iterator in them; once dropped, all ends."""

    def fail(loader: millstream.DataLoader) -> BaseException:
        with pytest.raises((KeyError, RuntimeError)) as caught:
            list(loader)
        return caught.value

    error = fail(loader_of(At(BAD, fault)))
    assert processes_below() != []
    error.__traceback__ = None
    gc.collect()
    assert processes_below() == []


@pytest.mark.usefixtures("one_batch_a_call")
def test_an_interrupt_while_waiting(tmp_path: Path) -> None:
    """Ctrl-C in `next` raises KeyboardInterrupt immediately, ends all processes, and a later `next` resumes."""
    with Pipe(tmp_path / "there") as there:
        operation = At(BAD, ReportThen(there.path, user_faults.hang_in_c, children=2), tmp_path / "once")
        processes: list[int] = []

        def interrupt() -> None:
            processes.extend(there.take_numbers())
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

        with iter(loader_of(operation)) as iterator:
            next(iterator)
            processes += processes_of(iterator)
            with in_background(interrupt), pytest.raises(KeyboardInterrupt):
                list(iterator)
            assert still_there(processes) == []
            step = iterator.step
            assert [batch.tolist() for batch in iterator] == EXPECTED[step:]


def test_an_interrupt_while_closing() -> None:
    """Another Ctrl-C while `close` waits for processes that do not end kills them at once."""
    iterator = iter(loader_of())
    next(iterator)
    processes = processes_of(iterator)
    os.kill(processes[0], signal.SIGSTOP)
    closing = threading.main_thread().ident or 0

    def interrupt() -> None:
        wait_inside(in_fresh_thread, closing)
        signal.pthread_kill(closing, signal.SIGINT)

    with in_background(interrupt), pytest.raises(KeyboardInterrupt):
        iterator.close()
    assert still_there(processes) == []


@pytest.mark.usefixtures("one_batch_a_call")
@pytest.mark.parametrize("closed", ["iterator", "loader"])
def test_closing_from_another_thread(tmp_path: Path, closed: str) -> None:
    """A `next` that waits in one thread raises as soon as another thread has closed the iterator or its loader."""
    with Pipe(tmp_path / "there") as there:
        loader = loader_of(At(BAD, ReportThen(there.path, user_faults.hang_in_c)))
        iterator = iter(loader)
        close = iterator.close if closed == "iterator" else loader.close
        assert [next(iterator).tolist() for _ in range(STEP)] == EXPECTED[:STEP]
        there.take_numbers()
        processes = processes_of(iterator)
        with at_most(2.0), in_background(close), pytest.raises(ValueError, match="closed"):
            next(iterator)
        assert still_there(processes) == []
        assert processes_below() == []
        with pytest.raises(ValueError, match="is closed"):
            next(iterator)


def test_closing_from_another_thread_while_a_worker_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Resources of a worker that is being started are released too, and the error is that of a closed iterator."""
    iterator = iter(loader_of())
    next(iterator)
    processes = processes_of(iterator)

    def create_late() -> int:
        with in_background(iterator.close):
            pass
        return create_crash_log()

    monkeypatch.setattr(pool, "create_crash_log", create_late)
    os.kill(processes[1], signal.SIGKILL)
    with pytest.raises(ValueError, match="is closed"):
        list(iterator)
    assert still_there(processes) == []


def test_closing_from_another_thread_while_a_pipeline_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file of the pipeline that the workers were about to get is not left open."""
    before = len(open_descriptors())
    iterator = iter(loader_of())
    next(iterator)
    os.kill(processes_of(iterator)[0], signal.SIGSTOP)  # Closing waits for the fork server, after the channels.
    closing = threading.Thread(target=iterator.close)

    def write_late(chunks: Sequence[memoryview]) -> int:
        closing.start()
        wait_inside(pool.PoolProcesses.shut_down, closing.ident or 0)
        return write_chunks(chunks)

    monkeypatch.setattr(pool, "write_chunks", write_late)
    pool_of(iterator).load("other", loader_of()._pipeline, set)
    closing.join(WAIT_SECONDS)
    assert len(settled_descriptors(before)) == before


class Unfinished:
    """Numbers of which one is being read until the source is closed, which opens two files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.is_closing = threading.Event()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.folder,)

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, key: int) -> int:
        if key == 4 * BATCH:
            user_faults.report(self.folder / "there", key)
            self.is_closing.wait()
        return key

    def close(self) -> None:
        """Waits for the end of the read, for at most as long as workers have to exit."""
        deadline = time.monotonic() + fork_server.GRACE_SECONDS / 2
        with (self.folder / "one").open("w") as one, (self.folder / "two").open("w") as two:
            self.is_closing.set()
            while time.monotonic() < deadline and not any(os.fstat(file.fileno()).st_size for file in (one, two)):
                continue


@pytest.mark.usefixtures("one_batch_a_call")
def test_a_read_that_outlasts_its_worker_writes_to_no_file_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads in advance wake their worker through a pipe, whose number no other file gets while they run."""
    monkeypatch.setattr("millstream.loader.engine.workers.IDLE_CALLS", 0)
    with Pipe(tmp_path / "there") as there:
        sampler = millstream.SequentialSampler(1000)
        iterator = iter(loader_of(data_source=Unfinished(tmp_path), sampler=sampler, worker_count=1))
        next(iterator)
        assert there.take_numbers() == [4 * BATCH]
        processes = processes_of(iterator)
        iterator.close()
        assert still_there(processes) == []
    assert [(tmp_path / name).read_text() for name in ("one", "two")] == ["", ""]


def test_processes_have_names_and_ignore_signals_to_the_job() -> None:
    """`ps` shows which is which; Ctrl-C and SIGTERM do nothing in workers and the fork server, however often."""
    with iter(loader_of()) as iterator:
        next(iterator)
        processes = processes_of(iterator)
        names = [psutil.Process(pid).name() for pid in processes]
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
            for pid in processes:
                os.kill(pid, number)
        assert [batch.tolist() for batch in iterator] == EXPECTED[1:]
        assert still_there(processes, 0.0) == processes
    assert names == ["millstream", "millstream-w0", "millstream-w1"]


def test_processes_that_operations_start_end_by_a_signal() -> None:
    """SIGTERM ends what an operation forks or starts, although workers ignore it."""

    def terminated(_: int) -> list[int]:
        if (forked := os.fork()) == 0:
            signal.pause()
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        os.kill(forked, signal.SIGTERM)
        return [program.wait(), os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])]

    assert list(millstream.load([0], transformations=[terminated], num_epochs=1, worker_count=1)) == [[-15, -15]]


@pytest.mark.parametrize(
    ("then", "threads"), [(user_faults.do_nothing, 0), (Raise(KeyError), 3)], ids=["returns", "raises"]
)
def test_a_forked_process_does_not_answer_for_its_worker(
    then: Callable[[], None], threads: int, tmp_path: Path
) -> None:
    """A process that an operation has forked ends when the operation returns or raises there, unnoticed."""
    path = tmp_path / "forked"

    def fork() -> None:
        if (child := os.fork()) == 0:
            then()
        else:
            user_faults.report(path, child)

    reading = millstream.ReadOptions(threads)
    with Pipe(path) as forked, iter(loader_of(At(BAD, fork), read_options=reading)) as iterator:
        assert next(iterator).tolist() == EXPECTED[0]
        processes = processes_of(iterator)
        assert [batch.tolist() for batch in iterator] == EXPECTED[1:]
        assert still_there(forked.take_numbers()) == []
        assert still_there(processes, 0.0) == processes


def test_the_channel_is_not_inherited_by_children_of_user_code(tmp_path: Path) -> None:
    """A program that a worker has started has none of its descriptors, even where it may inherit all."""
    with Pipe(tmp_path / "there") as there, iter(loader_of(At(BAD, user_faults.ListInherited(there.path)))) as iterator:
        assert [batch.tolist() for batch in iterator] == EXPECTED
        inherited = there.take()
    assert "socket" not in inherited
    assert "memfd" not in inherited
    assert "pidfd" not in inherited


def test_many_workers() -> None:
    """Sixteen workers on few cores start and end within three seconds."""
    with at_most(3.0):
        assert batches(loader_of(worker_count=16)) == EXPECTED


NAMESPACE = """
from support.processes import worker_pools
from millstream.transforms import Map

class Same(Map):
    def map(self, element):
        return element if loader else None  # What refers to its module refers to the loader.

loader = worker_pools.loader_of(Same(), worker_count=1)
list(loader)
dropped = iter(loader)
next(dropped)
"""


def test_a_namespace_that_is_dropped_ends_what_it_has_started() -> None:
    """A loader, its iterator and the classes that it sent to workers refer to one another: they still end together."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    exec(NAMESPACE, namespace)
    loader = weakref.ref(namespace["loader"])
    del namespace
    gc.collect()

    assert loader() is None
    assert processes_below() == []
