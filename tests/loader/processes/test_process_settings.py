"""Settings that a program makes in its process reach its operations wherever they run: the bytes are the same."""

import asyncio
import concurrent.futures
import contextlib
import importlib
import os
import random
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.loader.workers.module_variables import variables_read
from millstream.loader.workers.process_settings import ProcessSettings
from support.documents.document_tables import RowTests, rows
from support.processes import settings_flags, settings_seen
from support.processes.program_settings import SETTINGS, called
from support.processes.worker_pools import python

pytestmark = pytest.mark.third_party

PLACES: list[dict[str, Any]] = [
    {"read_options": millstream.ReadOptions(0)},
    {"read_options": millstream.ReadOptions(4)},
    {"worker_count": 1},
]


def test_workers_that_were_kept_have_the_settings_of_the_next_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass after a change has workers with the new settings; one after none has the same workers."""

    def seen(_: int) -> tuple[Any, ...]:
        return os.environ.get("OF_THE_TRAINER"), sys.getrecursionlimit(), os.getpid()

    with millstream.load(range(3), transformations=[seen], num_epochs=1, worker_count=1) as loader:
        first, second = set(loader), set(loader)
        monkeypatch.setenv("OF_THE_TRAINER", "set")
        third = set(loader)
        with called(sys.setrecursionlimit, 4321, sys.getrecursionlimit()):
            fourth = set(loader)
    assert first == second
    assert [seen[:2] for passed in (first, third, fourth) for seen in passed] == [
        (None, sys.getrecursionlimit()),
        ("set", sys.getrecursionlimit()),
        ("set", 4321),
    ]


def test_settings_are_a_value(monkeypatch: pytest.MonkeyPatch) -> None:
    """Taking them is repeatable; each setting makes a difference, and is seen by the operation that shows them."""
    monkeypatch.setattr(settings_seen, "SHOWN", sorted(SETTINGS))
    pipelines = [millstream.load(range(1), seed=0, transformations=[settings_seen.Seen()])._pipeline]

    def told() -> tuple[ProcessSettings, str]:
        with concurrent.futures.ThreadPoolExecutor(1) as new_thread:
            return ProcessSettings.taken(pipelines), new_thread.submit(settings_seen.seen, 0).result()

    taken, seen = told()
    assert told() == (taken, seen)
    for name, setting in SETTINGS.items():
        with pytest.MonkeyPatch.context() as patch, setting(patch) or contextlib.nullcontext():
            others = told()
        assert others[0] != taken, name
        assert others[1] != seen, name


CONFIG = """
size, nested, cache, calls = 128, {"a": 1}, None, 0
derived = size * 2

def configure(value):
    global size
    size = value
"""
OPERATIONS_OF_MODULE = """
import functools
import config
from config import size

loaded = None

def once():
    global loaded
    loaded = loaded or 5
    return loaded

def read(value, scale=1):
    return value + scale * config.size + size + config.derived + len(config.nested) + once()

class Read:
    factor = 2

    def __init__(self):
        self.parts = [functools.partial(read, scale=self.factor)]

    def __call__(self, value):
        return self.parts[0](value)
"""
PROGRAM = """
import os, sys
sys.path.insert(0, os.path.dirname(__file__))
import config, of_module, millstream
from millstream.experimental import InterleaveIterDataset

def in_script(value):
    return value + config.size

operations = [of_module.Read(), in_script]
places = [{}, {"read_options": millstream.ReadOptions(0)}, {"worker_count": 1}]
loaders = [millstream.load(range(4), transformations=operations, num_epochs=1, **place) for place in places]

def chain_of():
    return millstream.MapDataset.range(4).map(of_module.read).to_iter_dataset()

for size in (224, 7):
    config.configure(size)
    config.nested = dict.fromkeys(range(size))
    here, *others = (list(map(int, loader)) for loader in loaders)
    assert others == [here, here], (here, others)
    joined = InterleaveIterDataset([chain_of(), chain_of()], cycle_length=1)
    assert list(map(int, joined.mp_prefetch(1))) == list(map(int, joined))
    print(here[0])
"""


def test_workers_have_the_variables_that_code_reads(tmp_path: Any) -> None:
    """Variables of modules that a program has set are those of workers: none is that of the import, or of a cache."""
    for name, text in (("config", CONFIG), ("of_module", OPERATIONS_OF_MODULE), ("script", PROGRAM)):
        (tmp_path / f"{name}.py").write_text(text)
    done = python(tmp_path / "script.py", cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout.split() == [str(2 * size + 128 + 256 + size + 5 + size) for size in (224, 7)]


HOLDERS = """
import collections, dataclasses, enum, os, types
from typing import NamedTuple
import numpy as np
class Mode(enum.Enum):
    OFF, ON = 0, 1
class Config:
    size = named = 1
    pid = os.getpid()
class Base:
    scale = 1
@dataclasses.dataclass
class Options:
    rate: int = 1
@dataclasses.dataclass(slots=True)
class Slots:
    width: int = 1
@dataclasses.dataclass(frozen=True)
class Frozen:
    height: int = 1
class Pair(NamedTuple):
    first: int = 1
class Table:
    __slots__ = ("rows",)
    def __getattr__(self, name):
        return {"column": 1}[name]
class Records(list):
    def __iter__(self):
        raise AssertionError("reads all records")
options, space = Options(), types.SimpleNamespace(depth=1, inner=Options())
slots, frozen, pair, columns, records, hook = Slots(), Frozen(), Pair(), Table(), Records([1]), lambda: 1
mode, table, queue = Mode.OFF, np.ones(2), collections.deque([1])
class Operation(Base):
    filled = None
    def __call__(self, _):
        self.filled = self.filled or Config.pid
        seen = [self.scale, Config.size, options.rate, space.depth, mode.value, int(table[0]), queue[0], read.offset]
        seen += [slots.width, frozen.height, pair.first, columns.column, len(records), hook is None]
        seen += [space.inner.rate, getattr(Config, "named")]
        return np.array([*seen, self.filled == os.getpid()])
def read(_):
    pass
read.offset = 1
"""


def test_workers_have_the_attributes_that_code_reads(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values that a program has set in classes, objects and functions of modules are in workers; identities are not.

    Code of classes is neither needed nor run to find them: slots, frozen objects, `__getattr__`, iterators.
    """
    (tmp_path / "holders.py").write_text(HOLDERS)
    monkeypatch.syspath_prepend(tmp_path)
    module: Any = importlib.import_module("holders")
    for number in (5, 7):
        module.Base.scale = module.Config.size = module.options.rate = module.space.depth = module.slots.width = number
        module.space.inner.rate = module.Config.named = number
        module.frozen, module.pair, module.hook = module.Frozen(number), module.Pair(number), None
        module.mode, module.table, module.queue[0], module.read.offset = (
            module.Mode.ON,
            module.np.full(2, number),
            number,
            9,
        )
        for place in PLACES:
            (seen,) = millstream.load([0], transformations=[module.Operation()], num_epochs=1, **place)
            changed = [number, number, number, number, 1, number, number, 9, number, number, number, 1, 1, True]
            assert seen.tolist() == [*changed, number, number, True], place


IDENTITIES = """
import os, threading
from multiprocessing import current_process as who
import multiprocessing as mp
plain = 1
name = mp.current_process().name
is_main = name == "MainProcess"
if is_main:
    role = "main"
else:
    role = "worker"
pid: int = os.getpid()
def read(_):
    return plain, name, is_main, role, pid
"""


def test_the_identity_of_a_process_is_its_own(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables that a module has computed from its process, directly or not, are not those of another process."""
    (tmp_path / "identities.py").write_text(IDENTITIES)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("identities")
    assert variables_read([module.read], lambda name: name != "identities") == {("identities", "plain"): 1}


def test_variables_that_functions_assign_are_their_own() -> None:
    """A cache that code fills, and values that are no plain ones, are left to each process."""
    found = variables_read([settings_seen.Seen(), fill], lambda name: not name.startswith(("support", __name__)))
    assert found["support.processes.settings_seen", "VARIABLE"] == {"set": "by the module"}
    assert not {name for _, name in found} & {"FILLED", "LOCK"}


FILLED: Any = None
LOCK = threading.Lock()


def fill() -> Any:
    global FILLED  # noqa: PLW0603  (as users do)
    with LOCK:
        FILLED = FILLED or 1
    return FILLED


IDENTITY = """
import multiprocessing, os, sys
sys.path.insert(0, os.path.dirname(__file__))
import guarded, millstream
told = set(millstream.load(range(4), transformations=[guarded.told], num_epochs=1, worker_count=2))
assert {name for name, *_ in told} <= {"millstream-w0", "millstream-w1"}, told
assert {row[1:] for row in told} == {(os.getpid(), True, False)}, told
print("guarded:", open("guarded").read())
"""


def test_a_worker_knows_that_it_is_one(tmp_path: Any) -> None:
    """`multiprocessing` names the worker and its parent before user code is imported; guarded code does not run."""
    (tmp_path / "guarded.py").write_text(
        "import multiprocessing\n"
        "is_main = multiprocessing.current_process().name == 'MainProcess'\n"
        "if is_main and multiprocessing.parent_process() is None: open('guarded', 'a').write('once')\n"
        "def told(_):\n"
        "    parent = multiprocessing.parent_process()\n"
        "    return multiprocessing.current_process().name, parent.pid, parent.is_alive(), is_main\n"
    )
    (tmp_path / "script.py").write_text(IDENTITY)
    done = python(tmp_path / "script.py", cwd=tmp_path)
    assert (done.stdout, done.stderr) == ("guarded: once\n", "")


PAGE = Path(__file__).parents[3] / "docs/guarantees.md"
SECTION = "What operations see of your process"
ALL = "every_place_is_the_oracle_of_a_program_that_has_changed_its_process"
LAWS = {
    "options of `jax.config`, set for all threads": ALL,
    "`jax.process_index()`, `jax.process_count()`": "operations_know_the_process_of_the_run",
    "absl flags, of the script and of modules": ALL,
    "levels of loggers": "the_trainer_handles_all_records",
    "filters of warnings, `logging.captureWarnings`": ALL,
    "Pillow's `MAX_IMAGE_PIXELS` and `LOAD_TRUNCATED_IMAGES`": ALL,
    "environment": ALL,
    "`sys.argv`, `sys.path`, working folder": "a_trainer_that_changes_its_folder",
    "code of your modules": "a_replaced_or_later_worker_refuses_another_code",
    "`multiprocessing.current_process()`": "a_worker_knows_that_it_is_one",
    "settings of other libraries: pandas, PyTorch's threads": "workers_import_what_programs_set_at_run_time",
    "plain values (numbers, text, paths, small arrays, containers of these) that operations name: variables of your "
    "modules, and attributes of their classes and objects: `config.model.size = 224`": (
        "workers_have_the_attributes_that_code_reads"
    ),
    "other variables set at run time: registries of functions, plugins; those that operations assign": (
        "workers_import_what_programs_set_at_run_time"
    ),
    "a running event loop, as in notebooks": "a_notebook_runs_no_loop_in_workers",
    "your own `threading.local`": "threads_and_processes_have_their_own",
    "`random`, `np.random`": "threads_and_processes_have_their_own",
    "`hash()` of texts and bytes, the order of sets of them": "hashes_of_texts_agree_if_the_environment_says_so",
    "`warnings.catch_warnings()` around `next`": "threads_and_processes_have_their_own",
}
ROWS = RowTests(PAGE, LAWS, [SECTION])
for cells in rows(PAGE, [SECTION]):
    if cells[0].startswith("recursion limit"):
        ROWS[cells[0]] = ROWS["environment"]
    elif cells[0].startswith("settings of one thread"):
        ROWS[cells[0]] = RowTests(PAGE, {"": "an_operation_sees_the_defaults"})[""]


def test_each_row_of_the_table_has_a_test() -> None:
    """The page has a row for each kind of state, and each row a law."""
    ROWS.assert_complete()
    for law in ROWS.values():
        law()


def test_workers_import_what_programs_set_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions in variables are yours in threads and as imported in workers, where worker_init_fn creates them."""

    def seen(_: int) -> int:
        return len(settings_flags.REGISTRY.names)

    def init(_: int, __: int) -> None:
        settings_flags.REGISTRY.names.extend("abc")

    monkeypatch.setattr(settings_flags.REGISTRY, "names", [len, abs])
    found = [set(millstream.load(range(2), transformations=[seen], num_epochs=1, **place)) for place in PLACES]
    loader = millstream.load(range(2), transformations=[seen], num_epochs=1, worker_count=1, worker_init_fn=init)
    assert [*found, set(loader)] == [{2}, {2}, {0}, {3}]


def test_threads_and_processes_have_their_own() -> None:
    """Thread-local values stay in their thread, and generators and filters that change during a pass in the process."""
    settings_flags.LOCAL.value = "of this thread"
    before = random.getstate()

    def seen(_: int) -> tuple[bool, bool, bool]:
        here = threading.get_ident() == int(os.environ["THREAD_OF_TEST"])
        is_ignored = any(
            action == "ignore" and category is ResourceWarning for action, _, category, *_ in warnings.filters
        )
        return hasattr(settings_flags.LOCAL, "value") == here, random.getstate() == before, is_ignored

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THREAD_OF_TEST", str(threading.get_ident()))
        for place in PLACES:
            loader = millstream.load(range(2), transformations=[seen], num_epochs=1, **place)
            with iter(loader) as batches, warnings.catch_warnings():
                next(batches)
                warnings.simplefilter("ignore", ResourceWarning)
                local, is_generator_shared, _ = next(batches)
            assert local
            assert is_generator_shared == ("worker_count" not in place)


HASHES = """
import millstream
loader = millstream.load(["a", "b"], transformations=[hash], num_epochs=1, worker_count=1)
print(list(loader) == [hash("a"), hash("b")])
"""


def test_hashes_of_texts_agree_if_the_environment_says_so() -> None:
    """Each process has hashes of its own, but for PYTHONHASHSEED, which workers inherit."""
    for seed, agrees in {"7": "True", "random": "False"}.items():
        assert python("-c", HASHES, env={**os.environ, "PYTHONHASHSEED": seed}).stdout.strip() == agrees


def test_a_notebook_runs_no_loop_in_workers() -> None:
    """Operations may run coroutines in workers, and in a thread of their own everywhere."""

    def run(number: int) -> int:
        return asyncio.run(asyncio.sleep(0, number))

    def run_in_thread(number: int) -> int:
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            return thread.submit(run, number).result()

    async def notebook() -> list[list[int]]:
        cases = [(run, PLACES[2]), *((run_in_thread, place) for place in PLACES)]
        return [list(millstream.load(range(2), transformations=[f], num_epochs=1, **place)) for f, place in cases]

    assert asyncio.run(notebook()) == [[0, 1]] * 4
