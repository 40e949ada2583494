"""The process that owns the workers: however it ends, forks, or was started, they fit in and do not outlive it."""

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from faults import Pipe
from worker_pools import EXPECTED, at_most, environment, in_background, loader_of, pids_of, python, still_there

TRAINER = """
import os, signal, sys
from pathlib import Path
import faults, worker_pools

signal.signal(signal.SIGINT, signal.default_int_handler)
there, ready, fault = Path(sys.argv[1]), Path(sys.argv[2]), getattr(faults, sys.argv[3])
iterator = iter(worker_pools.loader_of(
    faults.At(worker_pools.EXPECTED[5][2], faults.ReportThen(there, fault, children=2))
))
next(iterator)
faults.report(ready, worker_pools.zygote_of(iterator), *worker_pools.pids_of(iterator))
{then}
"""
WAITS = "list(iterator)"
TRAINS = "[next(iterator) for _ in range(4)]; faults.hang()"
HAS_FORKED = "child = os.fork(); faults.report(ready, child) if child else faults.hang()\nlist(iterator)"


@contextlib.contextmanager
def trainer(folder: Path, fault: str, then: str) -> "Iterator[tuple[subprocess.Popen[str], Pipe, list[int]]]":
    """Yields a process that trains, the pipe that it reports to, and all that it has started, a worker in a fault."""
    with Pipe(folder / "there") as there, Pipe(folder / "ready") as ready:
        code = TRAINER.format(then=then)
        process = subprocess.Popen(
            [sys.executable, "-c", code, there.path, ready.path, fault],
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with process:
            try:
                yield process, ready, [*ready.take_numbers(), *there.take_numbers()]
            finally:
                process.kill()


@pytest.mark.parametrize("fault", ["hang", "hang_in_c", "work_for_ever", "stop", "do_nothing"])
@pytest.mark.parametrize("then", [WAITS, TRAINS], ids=["waiting", "training"])
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_a_trainer_killed_leaves_nothing(sent: signal.Signals, then: str, fault: str, tmp_path: Path) -> None:
    """Rows 9, 10, 27: a second later all its processes are gone, also those inside user code, and their children."""
    if (then, fault) == (WAITS, "do_nothing"):
        then = "next(iterator); signal.pause()"
    with trainer(tmp_path, fault, then) as (process, _, started):
        assert len(set(started)) == 5 + (fault == "")
        os.kill(process.pid, sent)
        assert still_there(started, 1.0) == []
        assert process.wait(1.0) == -sent
        assert process.stderr is not None
        assert process.stderr.read() == ""
