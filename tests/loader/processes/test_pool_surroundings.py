"""Workers run in the interpreter that the trainer had when it built the loader: flags, path, folder, shared memory.

The pool also works without anonymous memory files, process handles and `waitid`: processes here imitate such systems.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.faults.user_faults import Pipe
from support.processes.trainers import trainer
from support.processes.worker_pools import EXPECTED, environment, loader_of, pids_of, python, still_there

FLAGS = """
import locale, sys, warnings
import millstream
def seen(_):
    names = [name for name in dir(sys.flags) if not name.startswith(("_", "n_")) and name not in ("count", "index")]
    flags = {name: getattr(sys.flags, name) for name in names}
    # The folder of a program is on the path, or not, as the path says.
    flags["safe_path"] = None
    return str((flags, sys.warnoptions, locale.getpreferredencoding(False), __debug__, sys.path, sys.argv))
run = lambda count: next(iter(millstream.load([0], transformations=[seen], worker_count=count)))
inline, worker = run(0), run(1)
print("same" if inline == worker else f"{inline}\\n{worker}")
"""


@pytest.mark.parametrize(
    "flags",
    [("-OO", "-B"), ("-X", "utf8", "-W", "error"), ("-I",), ("-E", "-s"), ("-P",), ("-X", "dev", "-b")],
    ids=" ".join,
)
def test_workers_have_the_flags_of_the_trainer(flags: tuple[str, ...], tmp_path: Path) -> None:
    """An option of the interpreter means in workers what it means for the user's code, and nothing is printed."""
    script = tmp_path / "script.py"
    script.write_text(FLAGS)
    settings = {**environment(), "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
    if "-I" in flags:
        # Python itself would not start with it if it were not told to ignore the environment.
        settings["PYTHONHOME"] = str(tmp_path)
    done = python(*flags, str(script), "--an-argument", env=settings, cwd=tmp_path)

    assert (done.returncode, done.stdout, done.stderr) == (0, "same\n", "")


def test_the_import_path_may_be_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A path of a megabyte, as build systems make it, is no trouble: it does not pass through the command line."""
    monkeypatch.setattr(sys, "path", [*sys.path, *(f"/nowhere/{number:01000}" for number in range(1000))])
    loader = loader_of(lambda number: number + 1000 * (len(sys.path) < 1000))

    assert [batch.tolist() for batch in loader] == EXPECTED


MOVES = """
import os, sys
sys.path[0] = ""  # As in a notebook, a terminal, or `python -c`.
os.chdir("built")
import of_the_trainer, millstream
def seen(_):
    import only_when_needed
    return f"{os.getcwd()} {open('data').read()} {only_when_needed.__file__}"
loader = millstream.load(range(4), transformations=[of_the_trainer.same, seen], worker_count=1)
there = os.getcwd()
before = set(sys.modules)
os.chdir("../moved")
with iter(loader) as iterator:
    assert next(iterator) == f"{there} right {there}/only_when_needed.py"
print(sorted(name for name in sys.modules.keys() - before))
"""


def test_a_trainer_that_changes_its_folder(tmp_path: Path) -> None:
    """Workers use the files and modules of the folder at construction; the trainer imports nothing more afterwards."""
    (tmp_path / "built").mkdir()
    (tmp_path / "built/of_the_trainer.py").write_text("def same(x): return x")
    (tmp_path / "built/only_when_needed.py").touch()
    (tmp_path / "built/data").write_text("right")
    (tmp_path / "moved").mkdir()
    (tmp_path / "moved/data").write_text("wrong")
    for name in ("cloudpickle", "json", "marshal", "numpy", "of_the_trainer", "only_when_needed", "socket"):
        (tmp_path / f"moved/{name}.py").write_text("raise ImportError('of another folder')")
    done = python("-c", MOVES, cwd=tmp_path)

    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    """A trainer whose folder was removed has workers all the same, in the same folder."""
    gone = tmp_path / "gone"
    gone.mkdir()
    code = """
import os
from support.processes.trainers import trainer
from support.processes.worker_pools import EXPECTED, batches, loader_of
os.rmdir(os.getcwd())
assert batches(loader_of()) == EXPECTED
"""
    done = python("-c", code, cwd=gone)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("value", ["", None])
def test_an_interpreter_that_does_not_know_itself(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """In an embedded interpreter without sys.executable, the error names the remedy."""
    iterator = iter(loader_of())
    monkeypatch.setattr(sys, "executable", value)
    with pytest.raises(
        RuntimeError, match=r"sys.executable, which is .* Set it to the path .*, or use no worker processes"
    ):
        next(iterator)


SHARED_MEMORY = """
import os, sys
import numpy as np
from multiprocessing import resource_tracker, shared_memory
import millstream

class Shared:
    def __init__(self, name):
        self.name = name
        self.memory = None

    def __len__(self):
        return 100

    def __getitem__(self, key):
        if self.memory is None:
            self.memory = shared_memory.SharedMemory(name=self.name)
        return int(np.ndarray(100, np.int64, self.memory.buf)[key])

    def close(self):
        self.memory.close()

memory = shared_memory.SharedMemory(create=True, size=800)
np.ndarray(100, np.int64, memory.buf)[:] = np.arange(100)
for _ in range(2):
    with iter(millstream.load(Shared(memory.name), num_epochs=1, worker_count=2)) as iterator:
        assert list(iterator) == list(range(100))
shared_memory.SharedMemory(name=memory.name).close()
memory.close()
memory.unlink()
print("still there")
"""


def test_shared_memory_of_the_user_survives_the_workers() -> None:
    """Workers share the trainer's resource tracker: their end unlinks nothing that they have attached."""
    done = python("-c", SHARED_MEMORY)

    assert (done.returncode, done.stdout, done.stderr) == (0, "still there\n", "")


@pytest.mark.usefixtures("one_batch_a_call")
@pytest.mark.parametrize("fault", ["session", "daemon"])
def test_children_of_user_code_in_sessions_of_their_own(fault: str, tmp_path: Path) -> None:
    """Processes that a worker has started end with it, even in a session of their own or without a parent."""
    code = {
        "session": "import os, sys, time; open(sys.argv[1], 'w').write(f'{os.getpid()}\\n'); time.sleep(1000)",
        "daemon": """import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open(sys.argv[1], 'w').write(f'{os.getpid()}\\n'); time.sleep(1000)
    os._exit(0)
os.wait()
""",
    }[fault]

    with Pipe(tmp_path / "there") as there:
        path = there.path

        def begin(number: int) -> int:
            if number in {EXPECTED[1][0], EXPECTED[8][0]}:
                subprocess.Popen([sys.executable, "-c", code, path], start_new_session=True)
            return number

        with iter(loader_of(begin, worker_count=1)) as iterator:
            assert next(iterator).tolist() == EXPECTED[0]
            (first,) = there.take_numbers()
            os.kill(pids_of(iterator)[0], signal.SIGKILL)
            assert [batch.tolist() for batch in iterator] == EXPECTED[1:]
            assert still_there([first]) == []
            (last,) = there.take_numbers()
            assert still_there([last], 0.0) == [last]
        assert still_there([last]) == []


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


@pytest.mark.parametrize("customs", CUSTOMS)
def test_on_a_poor_system_the_stream_is_the_same(customs: str, tmp_path: Path) -> None:
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


def test_on_a_poor_system_deaths_change_nothing(tmp_path: Path) -> None:
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
    done = python("-c", code, str(tmp_path / "once"), env=environment(folder_of("missing", tmp_path)))

    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("then", "fault"), [("trains", "do_nothing"), ("has forked", "hang_in_c")])
def test_on_a_poor_system_a_trainer_killed_leaves_nothing(then: str, fault: str, tmp_path: Path) -> None:
    """The fork server notices, within a second, by its channel's end or its own parent's number."""
    with trainer(tmp_path, fault, then, folder_of("missing", tmp_path)) as (process, ready, started):
        child = ready.take_numbers() if then == "has forked" else []
        try:
            process.kill()
            assert still_there(started, 1.0) == []
        finally:
            for pid in child:
                os.kill(pid, signal.SIGKILL)
