"""The process that owns the workers: however it starts, forks or ends, they work and do not outlive it."""

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from support.faults.user_faults import WAIT_SECONDS, Pipe
from support.processes.trainers import trainer
from support.processes.worker_pools import (
    ATTEMPTS,
    EXPECTED,
    environment,
    loader_of,
    pids_of,
    python,
    still_there,
)


@pytest.mark.parametrize(
    ("sent", "then", "fault"),
    [
        (signal.SIGKILL, "waits", "work_for_ever"),
        (signal.SIGTERM, "waits", "stop"),
        (signal.SIGTERM, "trains", "hang_in_c"),
        (signal.SIGKILL, "trains", "do_nothing"),
        (signal.SIGKILL, "has forked", "hang_in_c"),
    ],
)
def test_a_trainer_killed_leaves_nothing(sent: signal.Signals, then: str, fault: str, tmp_path: Path) -> None:
    """A second later all its processes are gone, also those inside user code, and their children.

    So they are if a forked process has a copy of everything that the trainer had open.
    """
    with trainer(tmp_path, fault, then) as (process, ready, started):
        forked = ready.take_numbers() if then == "has forked" else []
        try:
            os.kill(process.pid, sent)
            assert still_there(started, 1.0) == []
        finally:
            for pid in forked:
                os.kill(pid, signal.SIGKILL)
        assert process.wait(WAIT_SECONDS) == -sent
        assert process.stderr is not None
        assert process.stderr.read() == ""


def test_workers_are_gone_half_a_second_after_their_trainer(tmp_path: Path) -> None:
    """Workers inside user code have half a second to end, and are killed then: the quickest attempt takes < 1 s."""
    folders = itertools.count()

    def seconds_until_gone() -> float:
        folder = tmp_path / str(next(folders))
        folder.mkdir()
        with trainer(folder, "hang_in_c", "waits") as (process, _, started):
            start = time.monotonic()
            process.kill()
            assert still_there(started, WAIT_SECONDS) == []
            return time.monotonic() - start

    assert any(seconds_until_gone() < 1.0 for _ in range(ATTEMPTS))


@pytest.mark.parametrize(("then", "fault"), [("waits", "hang_in_c"), ("trains", "do_nothing")])
def test_an_interrupted_trainer_leaves_nothing(then: str, fault: str, tmp_path: Path) -> None:
    """Ctrl-C ends it within a second with one traceback, its own, and the workers end silently."""
    with trainer(tmp_path, fault, then) as (process, _, started):
        os.killpg(process.pid, signal.SIGINT)
        assert still_there([process.pid, *started], 1.0) == []
        assert process.wait(WAIT_SECONDS) == -signal.SIGINT
        assert process.stderr is not None
        errors = process.stderr.read()
    assert errors.count("Traceback") == 1
    assert errors.endswith("\nKeyboardInterrupt\n")


def test_a_trainer_killed_while_its_workers_start(tmp_path: Path) -> None:
    """Workers that are still being started when the trainer dies end, too."""
    code = """
import os, sys
from pathlib import Path
from support.faults import user_faults
from support.processes import worker_pools
iterator = iter(worker_pools.loader_of())
iterator.start_prefetch()
user_faults.report(Path(sys.argv[1]), worker_pools.fork_server_of(iterator))
user_faults.hang()
"""
    with Pipe(tmp_path / "ready") as ready:
        command = [sys.executable, "-c", code, str(ready.path)]
        with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
            started = ready.take_numbers()
            process.kill()
            assert still_there(started, 1.0) == []
            assert process.stderr is not None
            assert process.stderr.read() == ""


def test_the_end_of_the_interpreter_ends_the_workers() -> None:
    """A script that just ends, with iterators open or hanging, ends at once and prints nothing."""
    code = """
from support.faults import user_faults
from support.processes import worker_pools
iterator = iter(worker_pools.loader_of(user_faults.At(worker_pools.EXPECTED[5][2], user_faults.hang_in_c)))
next(iterator)
print(worker_pools.fork_server_of(iterator), *worker_pools.pids_of(iterator))
other = worker_pools.loader_of()
list(other)
"""
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")
    assert still_there(map(int, done.stdout.split()), 1.0) == []


def test_a_trainer_that_is_process_1_gets_no_zombies(tmp_path: Path) -> None:
    """Workers killed in user code are reaped by the fork server, not left to a trainer that adopts orphans."""
    code = """
import ctypes, sys
from pathlib import Path
from support.faults import user_faults
from support.processes import process_tree, worker_pools
ADOPT_ORPHANS = 36
assert ctypes.CDLL(None).prctl(ADOPT_ORPHANS, 1) == 0
with user_faults.Pipe(Path(sys.argv[1])) as there:
    operation = user_faults.At(worker_pools.EXPECTED[1][2], user_faults.ReportThen(there.path, user_faults.hang_in_c))
    with iter(worker_pools.loader_of(operation)) as iterator:
        next(iterator)
        there.take()
print(process_tree.processes_below())
"""
    done = python("-c", code, str(tmp_path / "there"))

    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_a_trainer_that_is_suspended_with_its_workers_sees_no_stall(tmp_path: Path) -> None:
    """A job that is suspended for longer than `stall_timeout` continues as if nothing had happened."""
    code = """
import sys
from pathlib import Path
from support.faults import user_faults
from support.processes import worker_pools
from millstream.loader.threads import waiting
waiting.SLICE_SECONDS = 0.05
pause = user_faults.ReportThen(Path(sys.argv[1]), user_faults.WaitAt(Path(sys.argv[2])))
iterator = iter(worker_pools.loader_of(user_faults.At(worker_pools.EXPECTED[5][2], pause)))
iterator.start_prefetch()
worker_pools.expect_stalls(iterator, float(sys.argv[3]))
assert [batch.tolist() for batch in iterator] == worker_pools.EXPECTED
iterator.close()
"""
    stall_seconds = 1.0
    with Pipe(tmp_path / "there") as there, Pipe(tmp_path / "go on") as go_on:
        command = [sys.executable, "-c", code, str(there.path), str(go_on.path), str(stall_seconds)]
        with subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True) as process:
            there.take()
            job = [process.pid, *(child.pid for child in psutil.Process(process.pid).children(recursive=True))]
            for pid in job:
                os.kill(pid, signal.SIGSTOP)
            # The fault itself: the job stands still for this long.
            time.sleep(1.1 * stall_seconds)
            for pid in job:
                os.kill(pid, signal.SIGCONT)
            go_on.put()
            assert process.stderr is not None
            assert process.stderr.read() == ""
            assert process.wait(WAIT_SECONDS) == 0


FORKS = """
import gc, logging, os, sys
from support.processes import worker_pools
from support.processes.worker_pools import EXPECTED

logging.getLogger("millstream").setLevel(logging.ERROR)  # The same pass comes more than once, on purpose.

loader = worker_pools.loader_of()
iterator = iter(loader)
assert next(iterator).tolist() == EXPECTED[0]
assert worker_pools.batches(loader) == EXPECTED  # Leaves a second pool, idle.
idle = [worker.pid for worker in loader._execution.pools.idle[0].workers]
pids = worker_pools.pids_of(iterator)
child = os.fork()
if child == 0:
    try:
        next(iterator)
    except RuntimeError as error:
        assert "belong to the process that created them" in str(error), error
    else:
        sys.exit("used the parent's workers")
    assert iterator.step == 1
    assert worker_pools.batches(loader) == EXPECTED
    own = iter(loader)
    own.set_state(iterator.get_state())
    assert [batch.tolist() for batch in own] == EXPECTED[1:]
    iterator.close()
    del iterator, loader, own
    gc.collect()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
assert worker_pools.pids_of(iterator) == pids
assert [batch.tolist() for batch in iterator] == EXPECTED[1:]
again = iter(loader)
next(again)
assert worker_pools.pids_of(again) == idle
print("done")
"""


def test_a_forked_process_has_workers_of_its_own() -> None:
    """A forked process cannot use or close the parent's iterators; its own work, from any state."""
    # From 3.12 on Python warns of a fork beside threads, of which an idle pool has one.
    done = python("-W", "ignore:This process:DeprecationWarning", "-c", FORKS)
    assert (done.stderr, done.stdout) == ("", "done\n")


def test_closing_does_not_wait_for_a_forked_process() -> None:
    """Workers are told to end even if another process has a copy of the parent's end of their channels."""
    code = """
import os, signal
from support.faults import user_faults
from support.processes import worker_pools
with worker_pools.patient_pools():
    iterator = iter(worker_pools.loader_of())
    next(iterator)
    processes = worker_pools.made_all(iterator)
    child = os.fork()
    if child == 0:
        user_faults.hang()
    try:
        worker_pools.assert_exits(iterator, processes)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
"""
    done = python("-c", code)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_loader_outlives_the_thread_that_started_it() -> None:
    """Workers belong to the process: they outlive the thread that started them."""
    loader = loader_of()
    begun = []

    def begin() -> None:
        iterator = iter(loader)
        assert next(iterator).tolist() == EXPECTED[0]
        begun.append((iterator, pids_of(iterator)))

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    ((iterator, pids),) = begun
    with iterator:
        assert next(iterator).tolist() == EXPECTED[1]
        assert pids_of(iterator) == pids
        assert [batch.tolist() for batch in iterator] == EXPECTED[2:]


def test_jax_in_the_parent_is_not_disturbed() -> None:
    """With JAX running and warnings as errors, nothing is printed, and no worker imports JAX."""
    code = """
import sys, warnings
import jax, jax.numpy as jnp
jnp.zeros(1).block_until_ready()
warnings.simplefilter("error")
import millstream
from support.processes import worker_pools
loader = worker_pools.loader_of(lambda number: number + 1000 * ("jax" in sys.modules))
assert worker_pools.batches(loader) == worker_pools.EXPECTED
"""
    done = python("-W", "error::RuntimeWarning", "-c", code)
    assert (done.returncode, done.stderr) == (0, "")
