"""Deaths of worker processes, and faults outside of them: the stream is unchanged, or an error."""

import contextlib
import logging
import os
import select
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import millstream
from millstream.errors import WorkerDiedError, WorkerStalledError
from millstream.loader.processes import fork_servers, pool
from millstream.loader.processes.channel import Result
from millstream.loader.processes.pool import Died
from support.faults import user_faults
from support.faults.memory_limits import memory_limit
from support.faults.user_faults import WAIT_SECONDS, At, ReportThen
from support.processes.worker_pools import (
    BAD,
    BATCH,
    EXPECTED,
    STEP,
    at_most,
    batches,
    expect_stalls,
    fork_server_of,
    in_background,
    loader_of,
    made_all,
    pids_of,
    pool_of,
    python,
    sooner_than,
    still_there,
    workers_of,
)

FAULTS = {
    user_faults.be_killed: "was killed by SIGKILL: by the system, if memory ran out, or by another process",
    user_faults.be_hung_up: "was killed by SIGHUP",
    user_faults.crash: "was killed by SIGSEGV",
    user_faults.exit_at_once: "exited with status 0: an operation or the source called exit()",
    user_faults.leave: "exited with status 0: an operation or the source called exit()",
    user_faults.leave_with_status: "exited with status 3: an operation or the source called exit()",
    user_faults.leave_with_large_status: "exited with status 3: an operation or the source called exit()",
}
"""Ways for a worker to die, and how each is reported."""


def warnings_in(log: pytest.LogCaptureFixture) -> list[str]:
    """Returns what the library has logged."""
    assert {record.levelno for record in log.records} <= {logging.WARNING}
    assert {record.name for record in log.records} <= {"millstream"}
    return [record.getMessage() for record in log.records]


@pytest.mark.parametrize(
    ("fault", "threads"), [*((fault, 0) for fault in FAULTS), (user_faults.be_killed, 16), (user_faults.leave, 16)]
)
def test_a_death_changes_nothing(
    fault: Callable[[], None], threads: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The worker is replaced, the stream is the same, and one warning says which process and why."""
    loader = loader_of(At(BAD, fault, once=tmp_path / "once"), read_options=millstream.ReadOptions(threads))
    with at_most(2.0):
        assert batches(loader) == EXPECTED
    (warning,) = warnings_in(caplog)
    assert FAULTS[fault] in warning
    assert "Starting a replacement" in warning


@pytest.mark.parametrize("fault", FAULTS)
def test_a_record_that_kills_is_named(fault: Callable[[], None]) -> None:
    """A batch that kills twice is an error at its turn, with records, cause and, of a crash, the stack; others come."""
    with iter(loader_of(At(BAD, fault), worker_buffer_size=3)) as iterator:
        assert [next(iterator).tolist() for _ in range(STEP)] == EXPECTED[:STEP]
        with pytest.raises(WorkerDiedError) as caught, at_most(2.0):
            next(iterator)
        assert iterator.step == STEP
        iterator.seek(STEP + 1)
        assert [batch.tolist() for batch in iterator] == EXPECTED[STEP + 1 :]
    keys = ", ".join(map(str, EXPECTED[STEP]))
    positions = f"positions {STEP * BATCH} to {STEP * BATCH + BATCH - 1}"
    assert f"2 worker processes died while computing the same outputs, from the records {keys} ({positions})." in str(
        caught.value
    )
    assert FAULTS[fault] in str(caught.value)
    assert ("in crash" in str(caught.value)) == (fault is user_faults.crash)


def test_only_the_call_in_work_is_blamed(tmp_path: Path) -> None:
    """Calls that wait in the queue of a worker that dies are not blamed, however often it happens."""
    deadly = [At(EXPECTED[step][0], user_faults.be_killed, once=tmp_path / str(step)) for step in range(6)]
    loader = loader_of(*deadly, worker_count=1, worker_buffer_size=8)

    assert batches(loader) == EXPECTED


def test_a_worker_killed_within_user_code(tmp_path: Path) -> None:
    """A call interrupted by `kill -9` is made again, unless killed again; children die as well."""
    with user_faults.Pipe(tmp_path / "there") as there:
        killed: list[list[int]] = []

        def kill() -> None:
            for _ in range(2):
                killed.append(there.take_numbers())
                os.kill(killed[-1][0], signal.SIGKILL)

        with (
            in_background(kill),
            iter(loader_of(At(BAD, ReportThen(there.path, user_faults.hang_in_c, children=2)))) as iterator,
        ):
            assert [next(iterator).tolist() for _ in range(STEP)] == EXPECTED[:STEP]
            with pytest.raises(WorkerDiedError, match="SIGKILL"):
                next(iterator)
            assert still_there([pid for family in killed for pid in family]) == []
    assert [len(family) for family in killed] == [3, 3]


def test_results_that_a_dead_worker_had_sent_count(tmp_path: Path) -> None:
    """A result that was on its way when its worker died arrives before the death, so its call is not made again."""
    with user_faults.Pipe(tmp_path / "go on") as go_on:
        operation = At(0, user_faults.WaitAt(go_on.path))
        sampler = millstream.SequentialSampler(BATCH)
        with iter(loader_of(operation, sampler=sampler, worker_count=1)) as iterator:
            iterator.start_prefetch()
            (worker,) = workers_of(iterator)
            go_on.put()
            assert select.select([worker.channel], [], [], user_faults.WAIT_SECONDS)[0]
            os.kill(worker.pid or 0, signal.SIGKILL)
            assert still_there([worker.pid or 0]) == []
            assert [type(event) for _, event in pool_of(iterator).wait(1.0)] == [Result, Died]


def test_workers_killed_at_every_step_blame_nobody() -> None:
    """A call that a dead worker had not begun is not blamed, however often that happens to it."""
    with iter(loader_of(worker_count=3, worker_buffer_size=2)) as iterator:
        for step, expected in enumerate(EXPECTED):
            assert next(iterator).tolist() == expected
            for pid in made_all(iterator) if step + 1 < len(EXPECTED) else ():
                # It may have been killed at the step before, and nobody has noticed yet.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def test_workers_killed_after_a_move_blame_nobody() -> None:
    """The pool of an iterator that has moved has calls that nobody wants any more. Their deaths lose nothing."""
    with iter(loader_of(worker_buffer_size=3)) as iterator:
        for step in (3, 0, 7, 2, 5):
            iterator.seek(step)
            iterator.start_prefetch()
            pids = pids_of(iterator)
            iterator.seek(step + 1)
            for pid in pids:
                # It may end by itself, because nobody wants its calls.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            assert next(iterator).tolist() == EXPECTED[step + 1]
        assert [batch.tolist() for batch in iterator] == EXPECTED[7:]


@pytest.mark.usefixtures("one_batch_a_call")
def test_the_fork_server_killed_is_nobodys_fault(caplog: pytest.LogCaptureFixture) -> None:
    """All processes are started again, as often as it happens, and no record is blamed."""
    with iter(loader_of()) as iterator:
        for step in range(6):
            assert next(iterator).tolist() == EXPECTED[step]
            pids = made_all(iterator)
            os.kill(fork_server_of(iterator), signal.SIGKILL)
            assert still_there(pids) == []
        assert [batch.tolist() for batch in iterator] == EXPECTED[6:]
    assert len(warnings_in(caplog)) <= 6
    assert all("the fork server died" in text for text in warnings_in(caplog))


def test_a_fork_server_that_dies_each_time_is_an_error() -> None:
    """A fork server that is killed again and again before any result is an error, not restarted forever."""
    iterator = iter(loader_of(At(EXPECTED[0][0], user_faults.end_parent), worker_count=1))
    with pytest.raises(WorkerDiedError, match="The fork server died 2 times"), at_most(4.0):
        next(iterator)


@pytest.mark.usefixtures("one_batch_a_call")
def test_a_stopped_fork_server_delays_only_replacements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers carry on while the fork server is stopped; one that dies then is an error in time."""
    monkeypatch.setattr(pool, "EXIT_SECONDS", 0.01)
    monkeypatch.setattr(fork_servers, "CLOSE_SECONDS", 0.4)
    iterator = iter(loader_of(worker_count=1))
    assert next(iterator).tolist() == EXPECTED[0]
    processes = [*pids_of(iterator), fork_server_of(iterator)]
    os.kill(processes[1], signal.SIGSTOP)
    assert [next(iterator).tolist() for _ in range(3)] == EXPECTED[1:4]
    expect_stalls(iterator, 1.0)
    os.kill(processes[0], signal.SIGKILL)
    with sooner_than(WAIT_SECONDS), pytest.raises(WorkerStalledError, match="still starting"):
        list(iterator)
    with at_most(2.0):
        iterator.close()
    assert still_there(processes) == []


def test_the_fork_server_takes_the_children_of_its_workers_with_it(tmp_path: Path) -> None:
    """Processes that workers have started also die if the fork server is killed, or stopped and then closed."""
    for number, sent in enumerate((signal.SIGKILL, signal.SIGSTOP)):
        with user_faults.Pipe(tmp_path / f"there{number}") as there:
            start = ReportThen(there.path, action=os.getpid, children=2)
            iterator = iter(loader_of(At(EXPECTED[0][0], start)))
            assert next(iterator).tolist() == EXPECTED[0]
            processes = [*there.take_numbers(), *pids_of(iterator)]
            os.kill(fork_server_of(iterator), sent)
            with at_most(2.0):
                iterator.close()
            assert still_there(processes) == []


def test_a_worker_that_runs_out_of_memory() -> None:
    """A worker killed for lack of memory is replaced; the second time, the error says how much it had."""
    with memory_limit(96 << 20) as limit, iter(loader_of(At(BAD, user_faults.eat_memory))) as iterator:
        iterator.start_prefetch()
        limit.apply(fork_server_of(iterator))
        assert [next(iterator).tolist() for _ in range(STEP)] == EXPECTED[:STEP]
        with pytest.raises(WorkerDiedError, match=r"SIGKILL: by the system, if memory ran out.* used up to \d\d"):
            next(iterator)
        # The system may take other processes of the group, too, while the first is still leaving.
        assert limit.num_kills() != 0


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    """If a file cannot grow, saving is an error, and the checkpoint before it is complete and restores."""
    code = """
import resource, sys
import orbax.checkpoint as ocp
from support.processes import worker_pools
from millstream.checkpoint import CheckpointRestore, CheckpointSave

def open_manager():
    return ocp.CheckpointManager(sys.argv[1], item_names=("data",))

def save(step):
    manager.save(step, args=ocp.args.Composite(data=CheckpointSave(iterator)))
    manager.wait_until_finished()

manager, iterator = open_manager(), iter(worker_pools.loader_of())
next(iterator)
saved = iterator.get_state()
save(1)
next(iterator)
usual = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (16, usual[1]))
try:
    save(2)
except OSError as error:
    print(error)
resource.setrlimit(resource.RLIMIT_FSIZE, usual)
with open_manager() as manager:
    assert manager.all_steps() == [1]
    manager.restore(1, args=ocp.args.Composite(data=CheckpointRestore(iterator)))
assert iterator.get_state() == saved
assert [batch.tolist() for batch in iterator] == worker_pools.EXPECTED[1:]
"""
    done = python("-c", code, str(tmp_path / "checkpoints"))

    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stdout
