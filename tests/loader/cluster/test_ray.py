"""Actors of a Ray cluster: the stream is the oracle's, to the byte; faults end in it going on, or in a clear error."""

import contextlib
import dataclasses
import importlib
import itertools
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest
import ray
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.cluster_utils import Cluster

import millstream
from millstream.errors import WorkerDiedError, WorkerStalledError
from millstream.loader.cluster.actor import Actor
from millstream.loader.cluster.actor_pool import ActorPool
from millstream.loader.engine.actors import Actors
from millstream.loader.engine.engine import Engine
from millstream.loader.threads import waiting
from millstream.transforms import Map
from support.draw import elements_of_all_kinds, random_pipelines
from support.draw.elements_of_all_kinds import elements
from support.draw.random_pipelines import UNEVEN_ENDS, Pipeline, pipelines
from support.faults import user_faults
from support.faults.user_faults import At
from support.laws import assert_is_the_oracle_and_resumes
from support.processes.process_tree import processes_below
from support.processes.program_settings import A_PIPELINE, SETTINGS, assert_is_the_oracle_with_settings
from support.processes.worker_pools import BAD, BATCH, EXPECTED, SIZE, STEP, batches, loader_of, python
from support.streams import drain

# Actors need not import hypothesis to have the operations and classes of these modules.
for module in (random_pipelines, elements_of_all_kinds, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.ray_cluster,
    pytest.mark.third_party,
    pytest.mark.usefixtures("nodes"),
    # Ray forks to start its daemons. JAX warns of that, where a test before these has imported it.
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"),
]

STORE_BYTES = 80 << 20
"""The object store of each node: the least that Ray accepts, about."""


@dataclasses.dataclass(frozen=True)
class Nodes:
    """The nodes of a cluster."""

    cluster: Any

    @contextlib.contextmanager
    def extra(self, resource: str, amount: int) -> Iterator[Any]:
        """Adds a node that alone has some amount of a resource, and removes it if it is still there."""
        node = self.cluster.add_node(num_cpus=0, resources={resource: amount}, object_store_memory=STORE_BYTES)
        try:
            yield node
        finally:
            if node in self.cluster.worker_nodes:
                self.lose(node)

    def lose(self, node: Any) -> None:
        self.cluster.remove_node(node, allow_graceful=False)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    """A cluster whose head, where the trainer runs, has room for eight actors; nothing of it is left afterwards."""
    settings = {"num_cpus": 8, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    # A node that refuses connections is lost after 1.5 s instead of 15; a slow one has the usual 10 s for an answer.
    checks = {"health_check_period_ms": 300, "health_check_failure_threshold": 5}
    cluster = Cluster(initialize_head=True, head_node_args=settings | {"_system_config": checks})
    try:
        ray.init(address=cluster.address, logging_level="ERROR", log_to_driver=False)
        yield Nodes(cluster)
    finally:
        ray.shutdown()
        cluster.shutdown()
    deadline = time.monotonic() + user_faults.WAIT_SECONDS
    while (left := processes_below()) and time.monotonic() < deadline:
        # Those that were killed are gone in a moment.
        psutil.wait_procs(left, timeout=0.1)
    assert left == []


def on_ray(num_workers: int = 2, **options: Any) -> dict[str, Any]:
    """Returns the arguments that make a loader work with actors, each of which is an interpreter that has to start."""
    workers = millstream.RayWorkers(num_workers, **options)
    return {"worker_count": 0, "workers": workers, "stall_timeout": 5 * user_faults.WAIT_SECONDS}


def pool_of(iterator: millstream.DataLoaderIterator) -> ActorPool:
    """Returns the actors that work for an iterator."""
    return place_of(iterator)._pool


def place_of(iterator: millstream.DataLoaderIterator) -> Actors:
    engine = iterator._executor
    assert isinstance(engine, Engine)
    assert isinstance(engine.budget.place, Actors)
    return engine.budget.place


@UNEVEN_ENDS
@given(pipeline=pipelines(), buffer_size=st.sampled_from([1, 3]), threads=st.sampled_from([0, 16]), data=st.data())
@settings(deadline=None, max_examples=2)
def test_actors_equal_the_oracle(pipeline: Pipeline, buffer_size: int, threads: int, data: st.DataObject) -> None:
    """Any pipeline, any options: the same elements, then the same type of error; states go both ways."""
    reading = millstream.ReadOptions(threads)
    assert_is_the_oracle_and_resumes(pipeline, data, **on_ray(), worker_buffer_size=buffer_size, read_options=reading)


def test_actors_equal_the_oracle_of_a_program_that_has_changed_its_process() -> None:
    """Actors give the same bytes, whatever the program has set in its process; their environment is Ray's."""
    assert_is_the_oracle_with_settings(A_PIPELINE, SETTINGS.keys() - {"environment"}, on_ray(1))


def test_actors_have_the_settings_and_the_code_of_the_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings reach actors, worker_init_fn runs in each, and a module that was edited is an error that names it."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "of_the_trainer.py").write_text("SIZE = 1\ndef told(x): return x * SIZE\n")
    module = importlib.import_module("of_the_trainer")

    def seen(_: int) -> tuple[Any, ...]:
        main = multiprocessing.current_process().name, multiprocessing.parent_process() is None
        return sys.getrecursionlimit(), logging.getLogger("of.actors").level, main, vars(sys).get("index_of_actor")

    def init(index: int, count: int) -> None:
        vars(sys)["index_of_actor"] = index, count

    logger, limit = logging.getLogger("of.actors"), sys.getrecursionlimit()
    logger.setLevel(logging.DEBUG)
    sys.setrecursionlimit(4321)
    try:
        loader = millstream.load(
            range(4), transformations=[module.told, seen], num_epochs=1, worker_init_fn=init, **on_ray(1)
        )
        assert set(loader) == {(4321, logging.DEBUG, ("millstream-a0", False), (0, 1))}
        loader.close()
    finally:
        logger.setLevel(logging.NOTSET)
        sys.setrecursionlimit(limit)
    (tmp_path / "of_the_trainer.py").write_text("SIZE = 2\ndef told(x): return x * SIZE\n")
    with pytest.raises(RuntimeError, match="Cannot import of_the_trainer in a worker"):
        next(iter(millstream.load(range(4), transformations=[module.told], **on_ray(1))))
    del sys.modules["of_the_trainer"]


@given(records=st.lists(elements, min_size=30, max_size=30))
@settings(deadline=None, max_examples=1)
def test_elements_of_all_kinds_come_back_as_they_are(records: list[Any]) -> None:
    """Structures, dtypes, layouts and the classes of a script are what they were, and arrays can be written to."""
    order = millstream.IndexSampler(len(records), num_epochs=1)
    expected = drain(iter(millstream.DataLoader(data_source=records, sampler=order)))
    loader = millstream.DataLoader(data_source=records, sampler=order, **on_ray(1))
    with iter(loader) as actors:
        assert drain(actors) == expected


def test_a_conversion_by_actors_writes_the_files_of_one_by_processes(tmp_path: Path, nodes: Any) -> None:
    """Actors read and encode, and the trainer's process writes, from Python and from the command line."""
    (tmp_path / "a.txt").write_text("".join(f"line {number}\n" for number in range(5000)))
    texts = millstream.TextLineDataSource(tmp_path / "a.txt")
    wanted = millstream.convert(texts, tmp_path / "none.bag", num_shards=3, worker_count=0)
    workers = millstream.RayWorkers(2)
    found = [millstream.convert(texts, tmp_path / "ray.bag", num_shards=3, workers=workers)]
    command = ("a.txt", "line.bag", "--shards=3", "--jobs=2", f"--ray={nodes.cluster.address}")
    ended = python("-m", "millstream", "convert", *command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    found.append([str(tmp_path / f"line-{number:05}-of-00003.bag") for number in range(3)])
    for paths in found:
        assert [Path(path).read_bytes() for path in paths] == [Path(path).read_bytes() for path in wanted]


def test_batches_and_scratch_memory_can_be_written_to() -> None:
    """All batches can be changed in place and kept, whatever the size of the object store.

    An operation may write into an array that it has brought along, as it may elsewhere.
    """
    scratch = np.zeros(1 << 17)

    def image(number: int) -> dict[str, Any]:
        # Not read again: another thread may write meanwhile.
        scratch[:] = number
        return {"image": np.full((256, 256), number, np.uint8), "label": number}

    with iter(loader_of(image, **on_ray(1))) as iterator:
        kept = []
        for batch in iterator:
            batch["image"] += 1
            kept.append(batch["image"])

    expected = [batch["image"] + 1 for batch in loader_of(image, worker_count=0)]
    assert all(np.array_equal(array, numbers) for array, numbers in zip(kept, expected, strict=True))


def test_actors_stay_for_the_next_iterator_and_end_with_the_loader() -> None:
    """A loop that is left by `break` leaves warm actors; `close` leaves none, and iterating again is an error.

    The profile adds up what the actors have measured.
    """
    loader = loader_of(abs, **on_ray())
    iterator = iter(loader)
    assert next(iterator).tolist() == EXPECTED[0]
    actors = list(pool_of(iterator).workers)
    del iterator
    again = iter(loader)
    assert [batch.tolist() for batch in itertools.islice(again, 3)] == EXPECTED[:3]
    assert pool_of(again).workers == actors
    profile = loader.profile()
    assert all(profile[stage] > 0 for stage in ("read", "operations[0], Map(abs)", "hand-over", "next"))
    loader.close()
    assert pool_of_closed(loader) == []
    with pytest.raises(ValueError, match="its DataLoader was closed"):
        next(again)


def test_actors_stay_over_epochs() -> None:
    """The same actors serve all epochs, each with its own order, also after one that was left; none remains."""
    records: list[int] = list(range(SIZE))
    with millstream.load(records, shuffle=True, seed=5, batch_size=BATCH) as plain:
        expected = [[batch.tolist() for batch in batches] for _, batches in plain.epochs(3)]
    with millstream.load(records, shuffle=True, seed=5, batch_size=BATCH, **on_ray()) as loader:
        actors = []
        for number, batches in loader.epochs(3):
            found = [next(batches).tolist()]
            actors.append(list(pool_of(batches).workers))
            # The second is left early.
            found += [batch.tolist() for batch in itertools.islice(batches, 2 if number == 1 else None)]
            assert found == expected[number][: len(found)]
            assert number == 1 or len(found) == len(expected[number])
        assert actors == [actors[0]] * 3
        assert pool_of_closed(loader) == []


def pool_of_closed(loader: millstream.DataLoader) -> list[Any]:
    assert loader._execution.pools is not None
    return loader._execution.pools.idle


ORDER = millstream.IndexSampler(SIZE, shuffle=True, num_epochs=12, seed=5)
"""Enough batches for actors to be killed meanwhile."""

KILLS = 3


def ready_actors(iterator: millstream.DataLoaderIterator) -> list[Actor]:
    return [actor for actor in pool_of(iterator).workers if actor.pid is not None]


def fail(number: int) -> int:
    """Raises at one number."""
    if number == BAD:
        raise LookupError("nothing there", number)
    return number


def slowly(number: int) -> int:
    """Returns the number after some work: actors are in the middle of it when they are killed."""
    return sum(range(20_000)) * 0 + number


def test_an_error_has_its_type_its_traceback_and_its_record() -> None:
    """An error of an operation comes at its turn; the next batch is to be had by `seek`."""
    with iter(loader_of(fail, **on_ray(1))) as iterator:
        assert [next(iterator).tolist() for _ in range(STEP)] == EXPECTED[:STEP]
        with pytest.raises(LookupError) as caught:
            next(iterator)
        iterator.seek(STEP + 1)
        assert [batch.tolist() for batch in iterator] == EXPECTED[STEP + 1 :]
    assert caught.value.args == ("nothing there", BAD)
    assert f"record key {BAD} " in " ".join(caught.value.__notes__)
    assert "in fail\n" in str(caught.value.__cause__)


def test_a_pipeline_that_cannot_cross_is_an_error() -> None:
    """An attribute that cannot be pickled is named; the error of unpickling says what a node must have."""
    with (
        iter(loader_of(At(BAD, threading.Lock().acquire), **on_ray(1))) as iterator,
        pytest.raises(TypeError, match=r"^workers: operations\[0\]"),
    ):
        next(iterator)
    source = user_faults.Numbers(SIZE, on_arrival=is_not_there)
    with iter(loader_of(data_source=source, **on_ray(1))) as iterator, pytest.raises(ModuleNotFoundError) as caught:
        next(iterator)
    assert "must be available on each node" in " ".join(caught.value.__notes__)


def is_not_there() -> None:
    raise ModuleNotFoundError("No module named 'of_the_trainer_alone'")


def test_a_call_that_kills_twice_is_an_error_that_names_its_records(caplog: pytest.LogCaptureFixture) -> None:
    """No other call is blamed, however many the actor had; the log says so; the next batch is to be had by `seek`."""
    loader = loader_of(At(BAD, user_faults.exit_at_once), worker_buffer_size=3, **on_ray())
    with iter(loader) as iterator:
        assert [next(iterator).tolist() for _ in range(STEP)] == EXPECTED[:STEP]
        with pytest.raises(WorkerDiedError) as caught:
            next(iterator)
        iterator.seek(STEP + 1)
        assert [batch.tolist() for batch in iterator] == EXPECTED[STEP + 1 :]
    assert f"the records {', '.join(map(str, EXPECTED[STEP]))} (" in str(caught.value)
    assert "2 times" in str(caught.value)
    assert any("died. Starting a replacement" in record.getMessage() for record in caplog.records)


def test_actors_killed_at_random_change_nothing() -> None:
    """Under load, again and again: the stream is the same."""
    chance = random.Random(7)
    loader = loader_of(Map(slowly), sampler=ORDER, **on_ray())
    expected = batches(loader_of(Map(slowly), sampler=ORDER, worker_count=0))
    actual, kills = [], 0
    with iter(loader) as iterator:
        for step, batch in enumerate(iterator):
            actual.append(batch.tolist())
            if step % 20 == 10 and kills < KILLS and (ready := ready_actors(iterator)):
                os.kill(chance.choice(ready).pid or 0, signal.SIGKILL)
                kills += 1
    assert kills == KILLS
    assert actual == expected


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_nodes_come_and_go(nodes: Any) -> None:
    """Actors wait for a node that has room; with a node that vanishes, no batch is lost; a new node is used."""
    loader = loader_of(Map(slowly), sampler=ORDER, **on_ray(1, resources_per_worker={"spot": 1}))
    expected = batches(loader_of(Map(slowly), sampler=ORDER, worker_count=0))
    with iter(loader) as iterator:
        iterator.start_prefetch()
        assert ready_actors(iterator) == []
        with nodes.extra("spot", 1) as first:
            actual = [next(iterator).tolist() for _ in range(20)]
            nodes.lose(first)
            with nodes.extra("spot", 1):
                actual += [batch.tolist() for batch in iterator]
    assert actual == expected


@pytest.mark.usefixtures("one_batch_a_call")
def test_a_stall_is_an_error(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """An actor that is at one call for too long is reported, and given up; where none can start, that is an error."""
    monkeypatch.setattr(waiting, "STALL_WARNING_SECONDS", 0.1)
    with iter(loader_of(At(BAD, user_faults.hang), **on_ray())) as iterator:
        assert [next(iterator).tolist() for _ in range(STEP)] == EXPECTED[:STEP]
        place = place_of(iterator)
        for actor in pool_of(iterator).workers:
            # While another one made what came before, perhaps.
            actor.clock.restart()
            actor.clock.timeout = 0.5
        place._options = dataclasses.replace(place._options, stall_timeout=0.5)
        with pytest.raises(WorkerStalledError, match=r"has made no progress for \d\.\d s"):
            next(iterator)
    assert any("has been busy for" in record.getMessage() for record in caplog.records)

    loader = loader_of(**on_ray(1, resources_per_worker={"of no node": 1}) | {"stall_timeout": 0.5})
    with iter(loader) as iterator, pytest.raises(WorkerStalledError, match=r"for \{'of no node': 1\}"):
        next(iterator)


LOST_CLUSTER = """
import itertools, sys
import psutil, ray
import millstream
from millstream.loader.cluster import actor_pool

actor_pool.LOST_SECONDS, actor_pool.CHECK_SECONDS = 0.3, 0.01
offset, victims = 3, sys.argv[1:]

class Shifted(millstream.RandomMap):
    def random_map(self, element, rng):
        return element + offset + int(rng.integers(10))

def loader(**options):
    order = millstream.IndexSampler(64_000, shuffle=True, seed=1, num_epochs=1)
    operations = [Shifted(), lambda element: 2 * element, millstream.Batch(4)]
    return millstream.DataLoader(data_source=range(64_000), sampler=order, operations=operations, **options)

iterator = iter(loader(workers=millstream.RayWorkers(1, address="local")))
actual = [next(iterator).tolist() for _ in range(5)]
processes = {process.name(): process for process in psutil.Process().children(recursive=True)}
for victim in victims:
    processes[victim].kill()
    processes[victim].wait()
try:
    for batch in iterator:
        actual.append(batch.tolist())
    print("nothing was lost")
except millstream.WorkerDiedError as error:
    print(error)
iterator.close()
inline = iter(loader())
inline.set_state(iterator.get_state())
actual += [batch.tolist() for batch in itertools.islice(inline, 20)]
expected = [batch.tolist() for batch in itertools.islice(loader(), len(actual))]
print(actual == expected, ray.is_initialized())
"""


@pytest.mark.parametrize(
    ("victims", "said"),
    [(["gcs_server", "raylet"], "cannot be reached for "), (["raylet"], "has lost its raylet")],
    ids=["all", "raylet"],
)
def test_a_lost_cluster_is_an_error_and_the_state_is_good(victims: list[str], said: str, tmp_path: Path) -> None:
    """From a script without a main guard, whose classes and lambdas have crossed; the rest comes without a cluster.

    A lost node of the trainer is an error before Ray ends the trainer for it.
    """
    done = python("-", *victims, input=LOST_CLUSTER, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
    assert done.stdout.endswith("True False\n")
