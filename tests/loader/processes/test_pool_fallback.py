"""The pool on a system without anonymous memory files, process handles and `waitid`, which processes here imitate."""

import os
import signal
from pathlib import Path

import pytest

from support.processes.trainers import trainer
from support.processes.worker_pools import environment, python, still_there

CUSTOMS = {
    "missing": """
import os, signal
del os.memfd_create, os.pidfd_open, os.waitid, signal.pidfd_send_signal
""",
    "refused": """
import os
def refuse(*_):
    raise PermissionError(1, "Operation not permitted")
os.memfd_create = os.pidfd_open = refuse
""",
}
"""Python runs this first, in every interpreter that is started with its folder on the path: in the fork server too.

Python on macOS has no such system calls, `waitid` since 3.13; a sandbox may know and not allow them.
"""


def folder_of(customs: str, tmp_path: Path) -> Path:
    """Returns a folder that, on the path, hides memory files and process handles from interpreters."""
    folder = tmp_path / "customs"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(CUSTOMS[customs])
    return folder


@pytest.fixture
def poor_system(tmp_path: Path) -> Path:
    return folder_of("missing", tmp_path)


@pytest.mark.parametrize("customs", CUSTOMS)
def test_the_stream_is_the_same(customs: str, tmp_path: Path) -> None:
    """Small and large batches, regrouped ones, and bare elements come as they do without workers."""
    code = """
import os, sys
import numpy as np
from support import streams
from support.processes import worker_pools
from millstream.transforms import Batch, Filter, FlatMap

def streams_of(*operations):
    return [list(worker_pools.loader_of(operations=operations, worker_count=count)) for count in (0, 2)]

pipelines = [
    [lambda number: {"large": np.full(1 << 17, number), "small": number, "text": "a" * number}, Batch(3)],
    [FlatMap(lambda number: [number] * (number % 3), max_fan_out=2), Batch(5), np.sum, Batch(2)],
]
for operations in pipelines[: 1 + (sys.argv[1] == "missing")]:
    inline, others = streams_of(*operations)
    assert inline
    assert streams.equal_streams(inline, others)
is_rich = lambda _: sys.argv[1] == "missing" and (hasattr(os, "memfd_create") or hasattr(os, "pidfd_open"))
assert not any(any(stream) for stream in streams_of(is_rich))
"""
    done = python("-c", code, customs, env=environment(folder_of(customs, tmp_path)))

    assert (done.returncode, done.stderr) == (0, "")


def test_deaths_change_nothing(poor_system: Path, tmp_path: Path) -> None:
    """A worker that dies, one killed while it waits, and the fork server killed: the same stream, nothing left open."""
    code = """
import os, signal, sys
from pathlib import Path
from support.faults import user_faults
from support.processes import worker_pools
from support.processes.worker_pools import EXPECTED

before = os.listdir("/proc/self/fd")
operation = user_faults.At(EXPECTED[5][2], user_faults.crash, Path(sys.argv[1]))
with iter(worker_pools.loader_of(operation)) as iterator:
    assert [next(iterator).tolist() for _ in range(8)] == EXPECTED[:8]
    os.kill(worker_pools.made_all(iterator)[0], signal.SIGKILL)
    assert next(iterator).tolist() == EXPECTED[8]
    worker_pools.made_all(iterator)
    os.kill(worker_pools.fork_server_of(iterator), signal.SIGKILL)
    assert [batch.tolist() for batch in iterator] == EXPECTED[9:]
del iterator
assert len(os.listdir("/proc/self/fd")) == len(before)
"""
    done = python("-c", code, str(tmp_path / "once"), env=environment(poor_system))

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("then", "fault"), [("trains", "do_nothing"), ("has forked", "hang_in_c")])
def test_a_trainer_killed_leaves_nothing(then: str, fault: str, poor_system: Path, tmp_path: Path) -> None:
    """The fork server notices, within a second, by its channel's end or its own parent's number."""
    with trainer(tmp_path, fault, then, poor_system) as (process, ready, started):
        child = ready.take_numbers() if then == "has forked" else []
        try:
            process.kill()
            assert still_there(started, 1.0) == []
        finally:
            for pid in child:
                os.kill(pid, signal.SIGKILL)
