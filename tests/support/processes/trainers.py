"""A process that trains, with a fault in a worker, for tests that end it."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from support.faults.user_faults import Pipe
from support.processes.worker_pools import environment

TRAINER = """
import os, signal, sys
from pathlib import Path
from support.faults import user_faults
from support.processes import worker_pools

signal.signal(signal.SIGINT, signal.default_int_handler)
there, ready, fault = Path(sys.argv[1]), Path(sys.argv[2]), getattr(user_faults, sys.argv[3])
iterator = iter(worker_pools.loader_of(
    user_faults.At(worker_pools.EXPECTED[5][2], user_faults.ReportThen(there, fault, children=2))
))
next(iterator)
user_faults.report(ready, worker_pools.fork_server_of(iterator), *worker_pools.pids_of(iterator))
{then}
"""
THEN = {
    # Waits for the batch that the faulty worker is to make.
    "waits": "list(iterator)",
    # Is busy with a batch before.
    "trains": "[next(iterator) for _ in range(4)]; user_faults.hang()",
    # Waits, while a process that it has forked, and reports, waits too.
    "has forked": """
child = os.fork()
user_faults.report(ready, child) if child else user_faults.hang()
list(iterator)
""",
}
"""The actions of a trainer when it has its first batch."""


@contextlib.contextmanager
def trainer(
    folder: Path, fault: str, then: str, *modules: Path
) -> Iterator[tuple[subprocess.Popen[str], Pipe, list[int]]]:
    """Yields a process that trains, the pipe that it reports to, and all that it has started.

    Args:
        folder: an empty folder.
        fault: what happens in a worker, a function of `faults`.
        then: what the trainer does then, a key of `THEN`.
        modules: folders of more modules.
    """
    with Pipe(folder / "there") as there, Pipe(folder / "ready") as ready:
        code = TRAINER.format(then=THEN[then])
        process = subprocess.Popen(
            [sys.executable, "-c", code, there.path, ready.path, fault],
            env=environment(*modules),
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        with process:
            try:
                yield process, ready, [*ready.take_numbers(), *there.take_numbers()]
            finally:
                process.kill()
