"""Worker processes that make no progress, and ones that will not end: every wait has a bound."""

import logging
import os
import queue
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.errors import WorkerStalledError
from millstream.loader.processes import pool, process_report
from millstream.loader.processes.channel import Exited
from millstream.loader.processes.process_report import describe_exit, describe_process
from millstream.loader.threads import waiting
from support.faults import user_faults
from support.faults.user_faults import At, Numbers, Pipe, ReportThen
from support.processes.worker_pools import (
    BAD,
    EXPECTED,
    SIZE,
    STEP,
    assert_exits,
    at_most,
    expect_stalls,
    fork_server_of,
    in_background,
    loader_of,
    made_all,
    patient_pools,
    pids_of,
    pool_of,
    processes_of,
    sooner_than,
    still_there,
    wait_until,
    workers_of,
)

pytestmark = pytest.mark.usefixtures("one_batch_a_call")

STALL_SECONDS = 0.4


@pytest.mark.parametrize(
    ("fault", "threads", "told"),
    [
        (user_faults.hang, 16, ("waiting, with ", "in hang")),
        (user_faults.hang_in_c, 16, ("waiting, with ", "in hang_in_c")),
        (user_faults.work_for_ever, 0, ("running, with ", "in work_for_ever")),
        (user_faults.stop, 0, ("stopped by a signal (SIGSTOP), with ", "(no response: the process is stopped")),
    ],
)
def test_a_stall_is_a_warning_and_then_an_error(
    fault: Callable[[], None],
    told: tuple[str, str],
    threads: int,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The warning and the error of a stall name process, state and records; the error has the stack."""
    monkeypatch.setattr(
        process_report, "STACKS_SECONDS", 0.01 if fault is user_faults.stop else user_faults.WAIT_SECONDS
    )
    monkeypatch.setattr(process_report, "STEADY_SLICES", 8)
    reading = millstream.ReadOptions(threads)
    with (
        Pipe(tmp_path / "there") as there,
        iter(loader_of(At(BAD, ReportThen(there.path, fault)), read_options=reading)) as iterator,
    ):
        assert [next(iterator).tolist() for _ in range(STEP)] == EXPECTED[:STEP]
        (stalled,) = there.take_numbers()
        wait_until(stalled, told[0])
        made_all(iterator, but=stalled)
        monkeypatch.setattr(waiting, "STALL_WARNING_SECONDS", 0.1)
        expect_stalls(iterator, STALL_SECONDS)
        with pytest.raises(WorkerStalledError) as caught, at_most(STALL_SECONDS + 1.0):
            next(iterator)
        assert iterator.step == STEP
        iterator.seek(STEP + 1)
        assert [batch.tolist() for batch in iterator] == EXPECTED[STEP + 1 :]
    records = f"the records {', '.join(map(str, EXPECTED[STEP]))} "
    logged = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    (warning,) = [text for text in logged if "has been busy for" in text and records in text]
    assert f"worker process {stalled} " in warning
    # In C code that keeps the interpreter's lock: threads that wait for it wake up again and again, to look for it.
    state = "(waiting|running), with " if fault is user_faults.hang_in_c else re.escape(told[0])
    assert re.search(f"[Ii]t is {state}", warning)
    assert re.search(f"[Ii]t is {state}", str(caught.value))
    assert told[1] in str(caught.value)
    assert "After 0.4 s this becomes an error (stall_timeout)." in warning
    assert re.search(r"has made no progress for \d\.\d s \(stall_timeout\), with " + records, str(caught.value))


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        (1e9, "After 1e+09 s this becomes an error (stall_timeout)."),
        (float("inf"), "No timeout is set: waiting indefinitely."),
    ],
)
def test_a_stall_that_ends_is_a_warning_only(
    limit: float, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that is stopped and continued in time loses nothing; the log says how long there is.

    It may be longer than the system can wait at once.
    """
    logged: queue.SimpleQueue[str] = queue.SimpleQueue()
    monkeypatch.setattr(caplog.handler, "emit", lambda record: logged.put(record.getMessage()))
    with (
        Pipe(tmp_path / "there") as there,
        iter(loader_of(At(BAD, ReportThen(there.path, user_faults.stop)), stall_timeout=limit)) as iterator,
    ):
        assert [next(iterator).tolist() for _ in range(STEP)] == EXPECTED[:STEP]
        (pid,) = there.take_numbers()
        wait_until(pid, "stopped")
        workers_of(iterator)

        def let_it_go_on() -> None:
            # Another worker that is late is warned of, too.
            while f"worker process {pid} " not in (text := logged.get(timeout=user_faults.WAIT_SECONDS)):
                pass
            assert "it is stopped by a signal" in text
            assert text.endswith(told)
            monkeypatch.setattr(waiting, "STALL_WARNING_SECONDS", user_faults.WAIT_SECONDS)
            os.kill(pid, signal.SIGCONT)

        monkeypatch.setattr(waiting, "STALL_WARNING_SECONDS", 0.1)
        with in_background(let_it_go_on):
            assert [batch.tolist() for batch in iterator] == EXPECTED[STEP:]
    assert not any(f"worker process {pid} " in logged.get() for _ in range(logged.qsize()))


def test_workers_that_do_not_answer_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stacks of any number of stopped workers come after the time of one, so that `millstream top` gets them."""
    monkeypatch.setattr(process_report, "STACKS_SECONDS", 1.0)
    with iter(loader_of(worker_count=8)) as iterator:
        iterator.start_prefetch()
        pids = pids_of(iterator)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            wait_until(pid, "stopped")
        with sooner_than(len(pids) * 1.0):
            stacks = iterator.worker_stacks()
    assert stacks == dict.fromkeys(pids, process_report.NO_RESPONSE)


def test_a_stalled_start_is_an_error() -> None:
    """A source that hangs while it is unpickled is a stall without a call to blame."""
    loader = loader_of(data_source=Numbers(SIZE, on_arrival=user_faults.hang), stall_timeout=STALL_SECONDS)
    with iter(loader) as iterator, pytest.raises(WorkerStalledError, match="still starting"), at_most(2.0):
        next(iterator)


@pytest.mark.parametrize("arena_bytes", [1 << 30, 1 << 14], ids=["shared", "private"])
def test_a_consumer_that_was_away_sees_no_stall(
    arena_bytes: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Workers that have long finished, or wait to be heard, are not stalled when the consumer comes back."""
    monkeypatch.setattr(pool, "memory_budget", lambda: arena_bytes)
    actual = []
    with iter(loader_of(lambda number: np.full(1 << 15, number), stall_timeout=1000.0)) as iterator:
        for batch in iterator:
            actual.append(batch[:, 0].tolist())
            for worker in pool_of(iterator).workers if len(actual) < len(EXPECTED) else ():
                assert not worker.calls or select.select([worker.channel], [], [], user_faults.WAIT_SECONDS)[0]
                worker.clock.waited = 10_000.0
    assert actual == EXPECTED
    assert caplog.records == []


@pytest.mark.usefixtures("one_batch_a_call")
def test_a_wait_for_workers_ends_with_a_sign_of_life(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request polls the workers once without waiting, and once per event that it waits for: two polls per batch."""
    waits: list[float] = []
    wait = pool.Pool.wait

    def counted(self: pool.Pool, seconds: float) -> Any:
        waits.append(seconds)
        return wait(self, seconds)

    monkeypatch.setattr(pool.Pool, "wait", counted)
    with iter(millstream.load(range(1200), batch_size=4, num_epochs=1, worker_count=1)) as iterator:
        next(iterator)  # A worker that starts sends several messages.
        waits.clear()
        rest = list(iterator)
    assert len(rest) == 299
    assert len(rest) <= len(waits) <= 2 * len(rest) + 10


@pytest.mark.parametrize(
    ("fault", "threads"),
    [(user_faults.hang, 0), (user_faults.hang_in_c, 16), (user_faults.work_for_ever, 0), (user_faults.stop, 16)],
)
def test_closing_does_not_wait_for_user_code(fault: Callable[[], None], threads: int, tmp_path: Path) -> None:
    """`close` takes at most 2 s if a worker never returns, and ends the worker's children as well."""
    with Pipe(tmp_path / "there") as there:
        operation = At(BAD, ReportThen(there.path, fault, children=2))
        iterator = iter(loader_of(operation, read_options=millstream.ReadOptions(threads)))
        assert next(iterator).tolist() == EXPECTED[0]
        processes = processes_of(iterator)
        assert [next(iterator).tolist() for _ in range(STEP - 1)] == EXPECTED[1:STEP]
        processes += there.take_numbers()
        with at_most(2.0):
            iterator.close()
        with at_most(0.1):
            iterator.close()
    assert still_there(processes) == []


@pytest.mark.parametrize(
    "fault", [user_faults.hang, user_faults.hang_in_c, user_faults.be_killed, user_faults.leave_with_status]
)
def test_closing_does_not_wait_for_the_source(fault: Callable[[], None], tmp_path: Path) -> None:
    """Each worker closes its copy of the source when it ends; one that hangs or dies there delays nothing."""
    with Pipe(tmp_path / "there") as there:
        source = Numbers(SIZE, on_close=ReportThen(there.path, fault))
        iterator = iter(loader_of(data_source=source))
        assert next(iterator).tolist() == EXPECTED[0]
        processes = processes_of(iterator)
        with at_most(2.0):
            iterator.close()
        assert {*there.take_numbers(), *there.take_numbers()} == set(processes[1:])
    assert still_there(processes) == []


def test_threads_of_user_code_do_not_keep_a_worker() -> None:
    """A thread that an operation has started, and that never ends, does not keep its worker from ending."""
    with patient_pools():
        iterator = iter(loader_of(At(EXPECTED[0][0], user_faults.start_thread)))
        assert next(iterator).tolist() == EXPECTED[0]
        assert_exits(iterator, made_all(iterator))


def test_closing_while_workers_start() -> None:
    """A pool may be closed before its workers have started."""
    for source in (Numbers(SIZE), Numbers(SIZE, on_arrival=user_faults.hang)):
        iterator = iter(loader_of(data_source=source))
        iterator.start_prefetch()
        fork_server = fork_server_of(iterator)
        with at_most(2.0):
            iterator.close()
        assert still_there([fork_server]) == []


BUSY_BESIDE_ITS_MAIN_THREAD = """
import sys, threading

def work():
    print("working", flush=True)
    while True:
        pass

threading.Thread(target=work, daemon=True).start()
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("code", "state"),
    [
        (BUSY_BESIDE_ITS_MAIN_THREAD, "running, with "),
        ("import sys; print('working', flush=True); sys.stdin.read()", "waiting, with "),
    ],
    ids=["busy", "sleeps"],
)
def test_a_process_runs_while_any_of_its_threads_does(code: str, state: str) -> None:
    """A process whose main thread waits runs if reader threads do the work; one that sleeps, and nothing else, waits.

    For a moment, each of its threads may be seen waiting for the interpreter's lock, which the other one has.
    """
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"working\n"
        while not describe_process(process.pid).startswith(state):
            assert process.poll() is None
        process.kill()


def test_stacks_that_were_requested_earlier_are_no_cause_of_a_death() -> None:
    """A worker that was stopped may write them late. Only after a fatal signal are they its last words."""
    for status, is_cause in ((-signal.SIGSEGV, True), (-signal.SIGKILL, False), (3, False)):
        assert ("stacks" in describe_exit(Exited(1, status, 0), "stacks")) is is_cause


def test_a_process_that_is_gone_or_not_there_yet_is_said_to_be() -> None:
    """A process that has ended, or does not exist yet, is reported as such."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert describe_process(process.pid) == "in an unknown state"
    assert describe_process(None) == "still starting"
