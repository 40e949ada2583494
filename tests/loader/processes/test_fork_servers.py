"""One fork server serves all pools of a process, and none of them notices the others."""

import contextlib
import itertools
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.loader.processes.channel import End
from millstream.loader.processes.fork_servers import FORK_SERVERS, ForkServers, Launch
from millstream.loader.processes.pool import Pool
from millstream.loader.threads.thread_settings import in_fresh_thread
from millstream.loader.transport.importable_modules import launch_context
from millstream.loader.workers import retirement
from support.faults import user_faults
from support.faults.interrupted import before_instructions, interrupt_at
from support.faults.memory_limits import limited
from support.faults.user_faults import WAIT_SECONDS, At, Pipe, ReportThen
from support.processes.process_tree import open_descriptors, processes_below
from support.processes.worker_pools import (
    BAD,
    EXPECTED,
    at_most,
    batches,
    fork_server_of,
    has_ended,
    loader_of,
    pids_of,
    pool_of,
    processes_of,
    python,
    still_there,
)


@pytest.fixture(autouse=True)
def own_fork_servers() -> Iterator[None]:
    """Ends the fork server of other tests before, and that of this test after it."""
    FORK_SERVERS.end_idle()
    yield
    FORK_SERVERS.end_idle()


def test_building_a_loader_starts_the_fork_server_of_all() -> None:
    """It is there before the first `next`, serves loaders at the same time and one after another, and never leaves."""
    loaders = [loader_of() for _ in range(3)]
    (server,) = FORK_SERVERS.idle
    with iter(loaders[0]) as one, iter(loaders[1]) as two:
        assert next(one).tolist() == next(two).tolist() == EXPECTED[0]
        assert {fork_server_of(one), fork_server_of(two)} == {server.process.pid}
        assert FORK_SERVERS.idle == []
    assert batches(loaders[2]) == EXPECTED
    loaders[2].close()
    assert FORK_SERVERS.idle == [server]


CHANGES: dict[str, Callable[[pytest.MonkeyPatch, contextlib.ExitStack, Path], object]] = {
    "environment": lambda patch, *_: patch.setenv("ANOTHER", "variable"),
    "path": lambda patch, *_: patch.setattr(sys, "path", [*sys.path, "/nowhere"]),
    "folder": lambda patch, _, folder: patch.chdir(folder),
    "flags": lambda patch, *_: patch.setattr(sys, "warnoptions", [*sys.warnoptions, "ignore"]),
    "umask": lambda _, ends, __: ends.callback(os.umask, os.umask(0o031)),
    "limit": lambda _, ends, __: ends.enter_context(
        limited(resource.RLIMIT_NOFILE, resource.getrlimit(resource.RLIMIT_NOFILE)[0] - 1)
    ),
}
"""Changes of a program that a new process would have."""


def surroundings(_: int) -> str:
    mask = os.umask(0)
    os.umask(mask)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    return str((os.environ.get("ANOTHER"), sys.path[-1], sys.argv, Path.cwd(), sys.warnoptions, mask, limit))


@pytest.mark.parametrize("change", CHANGES)
def test_workers_have_what_a_new_process_would_have(change: str, tmp_path: Path) -> None:
    """After a change, a loader gets another fork server, and the idle one ends: its workers see the change."""

    def seen(worker_count: int) -> Any:
        with millstream.load([0], transformations=[surroundings], worker_count=worker_count) as loader:
            return next(iter(loader))

    assert seen(1) == seen(0)
    (before,) = FORK_SERVERS.idle
    with contextlib.ExitStack() as ends:
        CHANGES[change](ends.enter_context(pytest.MonkeyPatch.context()), ends, tmp_path)
        assert seen(1) == seen(0)
        (server,) = FORK_SERVERS.idle
        assert server is not before
        assert before.process.returncode is not None


def test_a_pool_that_does_not_end_delays_no_other(tmp_path: Path) -> None:
    """While one pool waits for workers that hang, others lose and get workers, begin and end."""
    with Pipe(tmp_path / "there") as there:
        hanging = iter(loader_of(At(EXPECTED[0][0], ReportThen(there.path, user_faults.hang_in_c, children=2))))
        hanging.start_prefetch()
        processes = there.take_numbers()
        other = iter(loader_of())
        assert next(other).tolist() == EXPECTED[0]
        pids = pids_of(other)
        closing = threading.Thread(target=hanging.close)
        closing.start()
        os.kill(pids[0], signal.SIGKILL)
        assert next(other).tolist() == EXPECTED[1]
        assert pids[1] in pids_of(other)
        assert [batch.tolist() for batch in other] == EXPECTED[2:]
        assert batches(loader_of()) == EXPECTED
        closing.join(WAIT_SECONDS)
        assert still_there(processes) == []
        other.close()


@pytest.mark.parametrize("fault", ["killed", "stopped"])
def test_pools_outlive_their_fork_server(fault: str) -> None:
    """It may be killed, or be killed because it does not answer to a pool that ends: the others start new ones."""
    one, two, three = (iter(loader_of()) for _ in range(3))
    for iterator in (one, two, three):
        assert next(iterator).tolist() == EXPECTED[0]
    processes = processes_of(one)
    os.kill(processes[0], signal.SIGKILL if fault == "killed" else signal.SIGSTOP)
    with at_most(2.0):
        one.close()
    assert still_there(processes) == []
    for iterator in (two, three):
        assert [batch.tolist() for batch in iterator] == EXPECTED[1:]
        iterator.close()
    assert processes_below() == []


def test_a_pipeline_that_kills_its_fork_server_harms_no_other() -> None:
    """The second time, it is the fork server of this pool alone."""
    with iter(loader_of()) as other:
        assert next(other).tolist() == EXPECTED[0]
        with pytest.raises(millstream.errors.WorkerDiedError, match="The fork server died 2 times"):
            batches(loader_of(At(BAD, user_faults.end_parent), worker_count=1, worker_buffer_size=1))
        assert [batch.tolist() for batch in other] == EXPECTED[1:]


@pytest.mark.parametrize("end", ["time", "death", "interpreter"])
def test_an_idle_fork_server_ends(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves no process, zombie or thread: after a while, when it has died, and at the end of the interpreter."""
    if end == "interpreter":
        code = """
from millstream.loader.processes.fork_servers import FORK_SERVERS
from support.processes import worker_pools
loader = worker_pools.loader_of()
print(FORK_SERVERS.idle[0].process.pid)
"""
        done = python("-X", "dev", "-c", code)
        assert (done.returncode, done.stderr) == (0, "")
        assert has_ended(int(done.stdout), iter([]))
        return
    loader = loader_of()
    (server,) = FORK_SERVERS.idle
    if end == "time":
        monkeypatch.setattr(retirement, "IDLE_SECONDS", 0.01)
        FORK_SERVERS._begin_idleness(server)
        assert server.retirement is not None
        server.retirement.thread.join(WAIT_SECONDS)
        assert server.process.returncode is not None
        monkeypatch.undo()
    else:
        server.process.kill()
    assert batches(loader) == EXPECTED
    assert server.process.returncode is not None


def test_threads_share_a_fork_server() -> None:
    """Loaders that begin and end in several threads at once get their own streams, and none loses its workers."""
    loaders = [loader_of(worker_count=1) for _ in range(6)]
    results: list[Any] = []
    threads = [threading.Thread(target=lambda loader=loader: results.append(batches(loader))) for loader in loaders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert results == [EXPECTED] * 6
    for loader in loaders:
        loader.close()
    assert len(FORK_SERVERS.idle) == 1


def test_a_fork_server_starts_while_another_thread_ends_idle_ones() -> None:
    """At whatever moment of its start, it is never taken for an idle one, and the pool gets it."""
    launch = Launch.now(launch_context(), os.environ)
    left = 0

    def check(code: CodeType, _: int) -> None:
        nonlocal left
        if code in (ForkServers.connect.__code__, ForkServers._joined.__code__):
            left -= 1
            if left == -1:
                in_fresh_thread(FORK_SERVERS.end_idle)

    for moment in itertools.count(0, 11):
        FORK_SERVERS.end_idle()
        left = moment
        with before_instructions(check):
            connection = FORK_SERVERS.connect(launch, [])
        connection.close([])
        if left >= 0:
            break
    assert moment > 0


def test_a_time_limit_while_a_loader_is_built_is_raised() -> None:
    """An exception of a signal handler that looks like one of the system is not taken for a failed start."""

    def check(code: CodeType, _: int) -> None:
        if code is in_fresh_thread.__code__:
            raise TimeoutError

    with pytest.raises(TimeoutError), before_instructions(check):
        FORK_SERVERS.prepare(launch_context())


def test_an_interrupt_loses_no_report_of_a_fork_server() -> None:
    """Wherever Ctrl-C interrupts the receipt of a process handle, that is closed with its pool."""
    before = len(open_descriptors())
    for moment in itertools.count():
        iterator = iter(loader_of(worker_count=1))
        iterator.start_prefetch()
        pool = pool_of(iterator)
        poll = select.poll()
        poll.register(pool._control.fileno(), select.POLLIN)
        assert poll.poll(WAIT_SECONDS * 1000)
        was_interrupted = interrupt_at(moment, pool._serve_fork_server)
        iterator.close()
        assert len(open_descriptors()) <= before
        if not was_interrupted:
            break
    assert moment > 0


def test_a_handler_may_draw_a_batch_while_workers_are_inspected() -> None:
    """At whatever moment of `status()` a signal handler calls `next`, which waits for a report: neither hangs."""

    def draw(moment: int, drawn: list[Any]) -> None:
        iterator = iter(loader_of(worker_count=1))
        iterator.start_prefetch()
        pool = pool_of(iterator)
        poll = select.poll()
        poll.register(pool._control.fileno(), select.POLLIN)
        poll.poll(WAIT_SECONDS * 1000)
        left = moment

        def check(code: CodeType, _: int) -> None:
            nonlocal left
            if code.co_filename == Pool.wait.__code__.co_filename:
                left -= 1
                if left == -1:
                    drawn.append(next(iterator).tolist())

        engine = iterator._executor
        assert engine is not None
        with before_instructions(check):
            engine.status()
        iterator.close()

    for moment in itertools.count(0, 3):
        drawn: list[Any] = []
        thread = threading.Thread(target=draw, args=(moment, drawn), daemon=True)
        thread.start()
        thread.join(WAIT_SECONDS)
        assert not thread.is_alive()
        if not drawn:
            break
        assert drawn == EXPECTED[:1]
    assert moment > 0


def test_a_program_that_sigpipe_would_end_outlives_its_processes() -> None:
    """Workers and fork servers that have died are replaced, although the program has given SIGPIPE its default."""
    code = """
import os, signal
from millstream.loader.processes.fork_servers import FORK_SERVERS
from support.processes import worker_pools
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
with iter(worker_pools.loader_of(worker_count=1)) as iterator:
    next(iterator)
    os.kill(worker_pools.pids_of(iterator)[0], signal.SIGKILL)
    assert [batch.tolist() for batch in iterator] == worker_pools.EXPECTED[1:]
loader = worker_pools.loader_of()
server = FORK_SERVERS.idle[0].process
server.kill()
os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)
assert worker_pools.batches(loader) == worker_pools.EXPECTED
print("done")
"""
    assert python("-c", code).stdout == "done\n"


def test_workers_start_with_the_modules_that_their_pipeline_names() -> None:
    """The fork server imports them, so that no worker does: those of the source come last here, and are there."""
    code = """
import sys
import millstream

class Early:
    def __init__(self, modules):
        self.modules = modules
    def __reduce__(self):
        return Early.there, ()
    @staticmethod
    def there():
        return Early([name for name in sys.modules if name.startswith("millstream.transforms.")])
    def __len__(self):
        return 1
    def __getitem__(self, key):
        return self.modules

packs = millstream.FirstFitPack({"tokens": 8}, num_packing_bins=1)
skips = millstream.Filter(lambda element: print(*element) is None and False)
loader = millstream.load(Early([]), transformations=[skips, packs], worker_count=1, num_epochs=1)
assert list(loader) == []
print(type(packs).__module__)
"""
    *_, there, needed = python("-c", code).stdout.splitlines()
    assert needed in there.split()


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="nothing counts threads here")
@pytest.mark.parametrize("starts_thread", [False, True])
def test_workers_start_with_pyarrow_if_it_starts_no_thread(
    starts_thread: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The fork server imports it for readers of Parquet, when their loader is built, and has one thread.

    Otherwise it ends, and no later one imports it.

    The variables of the program reach the workers, and none of the fork server's.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"key": range(48)}), tmp_path / "a.parquet")
    monkeypatch.setattr(FORK_SERVERS, "import_libraries", True)
    variable = "JE_ARROW_MALLOC_CONF"
    monkeypatch.delenv(variable, raising=False)
    if starts_thread:
        monkeypatch.setenv(variable, "background_thread:true")

    def seen(row: Any) -> np.ndarray:
        fork_server = Path(f"/proc/{os.getppid()}")
        has_pyarrow = "libarrow" in (fork_server / "maps").read_text()
        return np.array([row["key"], has_pyarrow, len([*(fork_server / "task").iterdir()]), variable in os.environ])

    source = millstream.ParquetDataSource(str(tmp_path / "a.parquet"))
    if not starts_thread:
        with loader_of(data_source=source, worker_count=1):
            launch = Launch.now(launch_context(), os.environ)
            connection = in_fresh_thread(lambda: FORK_SERVERS.connect(launch, []))
            # The fork server answers to the end of the pool, after its imports.
            assert connection.channel is not None
            connection.channel.send(End())
            poll = select.poll()
            poll.register(connection.channel, select.POLLIN)
            assert poll.poll(1000 * WAIT_SECONDS)
            assert "libarrow" in Path(f"/proc/{connection.server.process.pid}/maps").read_text()
            in_fresh_thread(lambda: connection.close([]))
    for _ in range(2):
        with loader_of(seen, data_source=source, worker_count=1) as loader:
            rows = np.concatenate([*loader])
        assert rows[:, 0].reshape(-1, 4).tolist() == EXPECTED
        assert (rows[:, 1:] == [not starts_thread, 1, starts_thread]).all()
    assert FORK_SERVERS.import_libraries != starts_thread
    # The first one may end before a pool has used it.
    assert len(caplog.records) <= starts_thread


def test_a_fork_server_imports_what_workers_need_and_no_more() -> None:
    """The first batch waits for these imports: parts of the standard library that take milliseconds are not among them.

    Nor are formats and chains that the pipeline does not have, and libraries, some of which start threads.
    """
    code = """
import sys
import millstream
millstream.JsonLinesDataSource, millstream.MapDataset
asked = [lambda _: sorted(sys.modules)]
loader = millstream.load([0], shuffle=True, seed=0, transformations=asked, worker_count=1, num_epochs=1)
print(*next(iter(loader)))
"""
    found = set(python("-c", code).stdout.split())

    slow = {"fractions", "hashlib", "importlib.abc", "numpy.ma", "pathlib", "shutil", "tempfile", "subprocess"}
    assert found & {*slow, "orjson", "pyarrow"} == set()
    assert not [name for name in found if name.startswith(("millstream.sources.formats.", "millstream.dataset"))]
