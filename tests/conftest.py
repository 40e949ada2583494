"""What every test gets, a guard against leaks; and what any may ask for, a store far away."""

import contextlib
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import psutil
import pytest

from support.processes.process_tree import is_named, processes_below
from support.stores.object_server import ObjectServer, serving
from support.stores.store_clients import clients_of

# The same examples in every run; `HYPOTHESIS_PROFILE=explore` looks for new ones.
hypothesis.settings.register_profile("repeat", derandomize=True, deadline=None)
hypothesis.settings.register_profile("explore", deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeat"))

# A shell that starts the tests in the background has Ctrl-C ignored in them, and in all that they start.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

LEAK_SECONDS = 60.0
"""How long what ends by itself may take, on a machine that does much else."""


@pytest.fixture(autouse=True, scope="session")
def cache_of_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps the indices that tests make out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MILLSTREAM_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves one of our threads, processes, descriptors or pieces of shared memory behind.

    A test that is marked as one on a Ray cluster has the cluster's processes below this one, which its fixture ends. Of
    these, actors of ours are what must not be left.
    """
    keeps_own = request.node.get_closest_marker("third_party") is not None
    has_cluster = request.node.get_closest_marker("ray_cluster") is not None
    descriptors, segments = open_descriptors(), shared_segments()
    yield
    gc.collect()
    deadline = time.monotonic() + LEAK_SECONDS
    while (threads := our_threads()) and time.monotonic() < deadline:
        for thread in threads:
            # One that another thread is just about to start cannot be joined yet.
            with contextlib.suppress(RuntimeError):
                thread.join(LEAK_SECONDS)
    assert our_threads() == []
    if has_cluster:
        # Ray says that an actor has ended a moment before its process has, which on a busy machine may be long.
        deadline = time.monotonic() + 2 * LEAK_SECONDS
        while our_actors() and time.monotonic() < deadline:
            psutil.wait_procs(our_actors(), timeout=0.1)
    assert (our_actors() if has_cluster else processes_below()) == []
    assert shared_segments() - segments == set()
    assert keeps_own or len(open_descriptors()) <= len(descriptors), sorted(open_descriptors() - descriptors)
    # What is left, JAX and its like above all, need not be collected after the next test: it would take half of the
    # time of all tests.
    gc.freeze()


def our_threads() -> list[threading.Thread]:
    """Returns the threads that the library has started and that still run."""
    return [thread for thread in threading.enumerate() if thread.name.startswith("millstream")]


def our_actors() -> list[psutil.Process]:
    """Returns the processes of the library's actors in Ray clusters that tests have started."""
    return [process for process in psutil.Process().children(recursive=True) if is_named(process, "PipelineActor")]


def open_descriptors() -> set[str]:
    """Returns this process's open descriptors and what they point to; without that of Python's own tracker."""
    found = set()
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    of_tracker = None if tracker is None else str(tracker._resource_tracker._fd)
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208  (the names are wanted)
        if descriptor == of_tracker:
            continue
        try:
            found.add(f"{descriptor} -> {os.readlink(f'/proc/self/fd/{descriptor}')}")  # noqa: PTH115
        except FileNotFoundError:
            continue  # The descriptor of the listing itself.
    return found


def shared_segments() -> set[Path]:
    """Returns our named pieces of shared memory; other programs on the machine have theirs."""
    return set(Path("/dev/shm").glob("*millstream*"))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ObjectServer]:
    """A store that is reached by HTTP, as `gs://bucket` and as `s3://bucket`; what fails is repeated at once."""
    with serving() as server, clients_of(server.url, tmp_path / "cache"):
        yield server
