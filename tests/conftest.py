"""Fixtures of all tests: the guard against leaks, a folder outside the checkout, and a store."""

import contextlib
import gc
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import psutil
import pytest

# `python -m pytest` puts the checkout on the path, but the tests are of the installed package.
with contextlib.suppress(ValueError):
    sys.path.remove(str(Path(__file__).parents[1]))

from millstream.loader.engine import policy
from millstream.sources.files import spans
from support.processes.process_tree import is_named, open_descriptors, our_threads, processes_below, settled_descriptors
from support.stores.object_server import ObjectServer, serving
from support.stores.store_clients import clients_of

# Keras and JAX read them when they are first imported. JAX compiles quickly what need not be quick, and everything
# once for all tests of a process and for the programs that they start.
COMPILED = tempfile.mkdtemp(prefix="compiled-")
os.environ |= {
    "KERAS_BACKEND": "jax",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_COMPILATION_CACHE_DIR": COMPILED,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}

# The same examples in every run, a part of those that a law asks for; `make explore` draws new ones, and all. How long
# drawing takes depends on the machine.
PATIENT: Any = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("repeat", derandomize=True, **PATIENT)
hypothesis.settings.register_profile("explore", **PATIENT)
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "repeat")
hypothesis.settings.load_profile(PROFILE)

# A shell that starts the tests in the background has Ctrl-C ignored in them, and in all that they start; so has `nohup`
# the signal of a terminal that is closed.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, handler)

# Tests are compiled with pytest's own assertions. Where no bytecode may be written, each run would take seconds for it.
NO_BYTECODE = sys.dont_write_bytecode
sys.dont_write_bytecode = False

CLOCK_REALTIME_COARSE = 5
"""Linux's clock of the times of files, which Python has no name for."""
LEAK_SECONDS = 60.0
"""Time limit for threads and processes that end by themselves, on a busy machine."""
SHARE_OF_EXAMPLES, FEW_EXAMPLES = 0.4, 6
"""The part of its examples that a law draws in `make test`; those with few draw all."""
HAS_FAILED = pytest.StashKey[bool]()
EXCUSED: set[int] = set()
"""Identifiers of threads and processes that the traceback of a failed test keeps alive."""


@pytest.fixture(autouse=True, scope="session")
def outside_the_checkout(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Runs the tests in an empty folder, so that processes that they start import the installed package, too.

    Indices are cached beside it instead of in the user's cache. A file that has just been written is not indexed before
    its time can change again: here, that is a little more than the tick of the kernel's clock.
    """
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":
            tick = time.clock_getres(CLOCK_REALTIME_COARSE)
            patch.setattr(spans, "_CLOCK_TICK_SECONDS", min(spans._CLOCK_TICK_SECONDS, 1.25 * tick))
        patch.setenv("MILLSTREAM_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.chdir(tmp_path_factory.mktemp("empty"))
        yield


def pytest_unconfigure() -> None:
    """Removes what JAX has compiled."""
    shutil.rmtree(COMPILED, ignore_errors=True)


def pytest_collection_finish() -> None:
    """Writes bytecode no more if the environment says so, since all tests have been imported."""
    sys.dont_write_bytecode = NO_BYTECODE


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts slow tests first, so that none begins when another worker of pytest has nothing left to do.

    Tests that draw examples draw fewer of them, unless `make explore` runs.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if PROFILE == "repeat":
        for law in {item.obj for item in items if isinstance(item, pytest.Function)}:
            draw_fewer_examples(law)


def draw_fewer_examples(law: Any) -> None:
    """Reduces the examples of a law to its share, if it draws any."""
    if (asked := getattr(law, "_hypothesis_internal_use_settings", None)) is not None:
        number = min(asked.max_examples, max(FEW_EXAMPLES, round(SHARE_OF_EXAMPLES * asked.max_examples)))
        law._hypothesis_internal_use_settings = hypothesis.settings(asked, max_examples=number)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call() -> None:
    """Lets tests have the same environment, so that their loaders share a fork server."""
    os.environ.pop("PYTEST_CURRENT_TEST", None)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Records which tests failed, for `no_leaks`."""
    report = yield
    if call.when == "call":
        item.stash[HAS_FAILED] = report.failed
    return report


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves threads, processes, descriptors or shared memory of the library behind.

    An idle fork server is not left behind: it serves the next test.

    A test that failed is not checked: its traceback may hold an iterator that is still open. A test that is marked as
    one on a Ray cluster has the cluster's processes below this one, and its fixture ends them. Of these, only actors of
    the library must not be left.
    """
    keeps_own = request.node.get_closest_marker("third_party") is not None
    has_cluster = request.node.get_closest_marker("ray_cluster") is not None
    descriptors, segments = open_descriptors(), shared_segments()
    yield
    gc.collect()
    if request.node.stash.get(HAS_FAILED, True):
        EXCUSED.update(id(thread) for thread in our_threads())
        EXCUSED.update(process.pid for process in processes_below())
        return
    deadline = time.monotonic() + LEAK_SECONDS
    while (threads := unexcused_threads()) and time.monotonic() < deadline:
        for thread in threads:
            # One that another thread is just about to start cannot be joined yet.
            with contextlib.suppress(RuntimeError):
                thread.join(LEAK_SECONDS)
    assert unexcused_threads() == []
    if has_cluster:
        # Ray says that an actor has ended a moment before its process has, which on a busy machine may be long.
        deadline = time.monotonic() + 2 * LEAK_SECONDS
        while our_actors() and time.monotonic() < deadline:
            psutil.wait_procs(our_actors(), timeout=0.1)
    processes = our_actors() if has_cluster else processes_below()
    assert [process for process in processes if process.pid not in EXCUSED] == []
    assert shared_segments() - segments == set()
    if not keeps_own and len(open_descriptors()) > len(descriptors):
        left = settled_descriptors(len(descriptors))
        assert len(left) <= len(descriptors), sorted(left - descriptors)
    # What is left, JAX and its like above all, need not be collected after the next test: it would take half of the
    # time of all tests.
    gc.freeze()


@pytest.fixture
def one_batch_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers compute a batch in each call, as they do if it takes long: what comes before a fault is then known."""
    monkeypatch.setattr(policy, "MAX_BATCHES_BYTES", 1)


def unexcused_threads() -> list[threading.Thread]:
    """Returns the threads of the library that still run, without those that a failed test keeps alive."""
    return [thread for thread in our_threads() if id(thread) not in EXCUSED]


def our_actors() -> list[psutil.Process]:
    """Returns the processes of the library's actors in Ray clusters that tests have started."""
    return [process for process in psutil.Process().children(recursive=True) if is_named(process, "PipelineActor")]


def shared_segments() -> set[str]:
    """Returns the names of the shared memory of the library that this process has created."""
    return {name for name in os.listdir("/dev/shm") if f"millstream-units-{os.getpid()}-" in name}  # noqa: PTH208


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectServer]:
    """A store for HTTP, `gs://bucket` and `s3://bucket` whose clients retry without a pause."""
    with serving() as server, clients_of(server.url, tmp_path / "cache"):
        yield server
