"""A limit that forbids workers is an error with its name and a remedy; one that leaves room changes nothing."""

import os
import shutil
import subprocess
import sys

import pytest

from support.faults.user_faults import WAIT_SECONDS
from support.processes.worker_pools import environment, python

PROGRAM = """
import resource, sys
import millstream.loader.processes.pool_executor
from support.processes import worker_pools
name, limit, worker_count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
loader = worker_pools.loader_of(worker_count=worker_count)
resource.setrlimit(getattr(resource, name), (limit, limit))
try:
    assert worker_pools.batches(loader) == worker_pools.EXPECTED
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
        [*become, sys.executable, "-c", PROGRAM, name, str(limit), "2"],
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
    [("RLIMIT_FSIZE", 10 << 20, 2), ("RLIMIT_AS", 2 << 30, 0), ("RLIMIT_AS", 2 << 30, 2)],
)
def test_limits_that_leave_room_change_nothing(name: str, limit: int, worker_count: int) -> None:
    """Arenas are no larger than the limits of files and address space, and no more threads start than these allow."""
    done = python("-c", PROGRAM, name, str(limit), str(worker_count))

    assert (done.returncode, done.stdout, done.stderr) == (0, "the stream\n", "")


def test_address_space_is_left_for_arrays() -> None:
    """Sixteen threads, whose stacks and arenas exceed the limit: the batches come all the same."""
    code = """
import resource, threading
import numpy as np
import millstream

resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))  # NumPy alone maps up to 1 GiB of it.
loader = millstream.load(
    range(256), num_epochs=1, batch_size=16, transformations=[lambda number: np.full((512, 512), number)]
)
assert sum(len(batch) for batch in loader) == 256
"""
    done = python("-c", code)

    assert (done.returncode, done.stderr) == (0, "")


def test_a_worker_that_may_not_map_its_arena_says_so() -> None:
    """The trainer gets an error with the limit's name, instead of the death of one worker after another."""
    code = """
import resource
from pathlib import Path
import millstream.loader.processes.pool_executor
from support.processes import worker_pools
from millstream.loader.processes import pool

pool.arena_size = lambda budget, num_workers: 1 << 38
iterator = iter(worker_pools.loader_of())
start = pool.PoolProcesses.start_fork_server

def start_limited(processes):
    start(processes)
    resource.prlimit(processes.fork_server.pid, resource.RLIMIT_AS, (1 << 36, 1 << 36))
    resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40))

pool.PoolProcesses.start_fork_server = start_limited
try:
    next(iterator)
except OSError as error:
    print(error, *error.__notes__)
"""
    done = python("-c", code)

    assert (done.returncode, done.stderr) == (0, "")
    assert "Cannot allocate memory" in done.stdout
    assert "(`ulimit -v`)" in done.stdout
