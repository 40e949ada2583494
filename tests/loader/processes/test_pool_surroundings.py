"""Workers run in the interpreter that the trainer had when it built the loader: flags, path, folder, shared memory."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.faults.user_faults import Pipe
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
