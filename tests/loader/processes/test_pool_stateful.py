"""Whatever a consumer does with an iterator, and whatever happens to its processes: the stream is the oracle's."""

import dataclasses
import logging
import os
import signal
import sys
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

import millstream
from millstream.loader.processes import pool_executor
from millstream.loader.processes.pool_processes import Worker
from millstream.loader.workers import workers_executor
from millstream.sharding import ShardOptions
from millstream.transforms import Batch, Map
from support.draw import random_pipelines
from support.draw.random_pipelines import UNEVEN_ENDS, AddIndex, DropMultiples, Jitter, Pipeline, Scale, Split
from support.laws import loader_of
from support.oracle.stream import oracle
from support.processes.worker_pools import blameless_workers, executor_of, fork_server_of, pool_of, send
from support.streams import comparable

# Workers need not import hypothesis to have the operations of these modules.
for module in (random_pipelines, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)

SAMPLER = millstream.IndexSampler(150, shuffle=True, num_epochs=2, seed=11)


def spread(number: Any) -> Any:
    """Returns an array of 8 KB, so that a batch has a chunk of its own."""
    return np.full(1024, number, dtype=np.int64)


PIPELINES = {
    "batches": Pipeline(range(150), SAMPLER, (Jitter(), Map(spread), Batch(5)), ShardOptions(1, 2)),
    "regrouped": Pipeline(
        range(150), SAMPLER, (DropMultiples(3), Jitter(), Split(2), Map(spread), Batch(4), Scale(2)), ShardOptions(0, 1)
    ),
    "elements": Pipeline(
        range(150), SAMPLER, (Split(3), AddIndex(), Jitter()), ShardOptions(0, 2, drop_remainder=True)
    ),
}


@dataclasses.dataclass
class Course:
    """A pipeline, its loaders by the number of workers, and the oracle's stream. The loaders keep their pools warm."""

    pipeline: Pipeline
    loaders: dict[int, millstream.DataLoader]
    expected: list[Any]

    @classmethod
    def of(cls, pipeline: Pipeline) -> "Course":
        """Returns the course of a pipeline."""
        loaders = {
            count: loader_of(pipeline, worker_count=count, read_options=millstream.ReadOptions(2))
            for count in (0, 1, 2, 3)
        }
        plain = loaders[0].operations
        stream = oracle(pipeline.source, pipeline.sampler, plain, pipeline.shard)
        return cls(pipeline, loaders, [comparable(element) for element in stream])


class Consumer(RuleBasedStateMachine):
    """A consumer who does anything in any order, in a world where anything dies.

    The model is one number: how many elements were delivered up to the iterator's position.
    """

    courses: dict[str, Course]

    @initialize(name=st.sampled_from(sorted(PIPELINES)), worker_count=st.sampled_from([1, 2, 2, 3]))
    def begin(self, name: str, worker_count: int) -> None:
        """Makes an iterator."""
        self.course = self.courses[name]
        self.worker_count = worker_count
        self.iterator = iter(self.course.loaders[worker_count])
        self.step = 0
        self.states: list[tuple[int, bytes]] = []
        self.killed: list[Worker] = []
        self.killed_fork_server = 0
        self.alarm = Alarm(self)
        logging.getLogger("millstream").addHandler(self.alarm)

    @rule(count=st.integers(1, 12))
    def take(self, count: int) -> None:
        """Elements arrive as the oracle says, and the end where it says."""
        for _ in range(count):
            expected = self.course.expected[self.step : self.step + 1]
            actual = [comparable(element) for element in [next(self.iterator, None)] if element is not None]
            assert actual == expected
            self.step += len(expected)
        assert self.iterator.step == self.step

    @rule()
    def take_the_rest(self) -> None:
        """Everything that is left arrives."""
        assert [comparable(element) for element in self.iterator] == self.course.expected[self.step :]
        self.step = len(self.course.expected)

    @rule()
    def prefetch(self) -> None:
        """Reading ahead changes nothing."""
        self.iterator.start_prefetch()

    @rule()
    def get_state(self) -> None:
        """A state is a position."""
        self.states.append((self.step, self.iterator.get_state()))

    @precondition(lambda self: self.states)
    @rule(which=st.integers(0, 100))
    def set_state(self, which: int) -> None:
        """Any earlier state leads back to its position, or forward."""
        self.step, state = self.states[which % len(self.states)]
        self.iterator.set_state(state)

    @precondition(lambda self: self.states)
    @rule(which=st.integers(0, 100), worker_count=st.sampled_from([0, 1, 2, 3]))
    def restore_elsewhere(self, which: int, worker_count: int) -> None:
        """So it does in a fresh iterator, with any number of workers; the old one is closed, or just left."""
        self.leave()
        self.worker_count = worker_count
        self.iterator = iter(self.course.loaders[worker_count])
        self.step, state = self.states[which % len(self.states)]
        self.iterator.set_state(state)

    @rule(data=st.data())
    def seek(self, data: st.DataObject) -> None:
        """Seeking goes to the step asked for, or leaves the iterator where it is."""
        step = data.draw(st.integers(0, len(self.course.expected) + 1))
        if step > len(self.course.expected):
            with pytest.raises(IndexError):
                self.iterator.seek(step)
        else:
            self.iterator.seek(step)
            self.step = step

    @rule()
    def close_and_reopen(self) -> None:
        """A closed iterator yields nothing; its state is valid for another one."""
        state = self.iterator.get_state()
        self.iterator.close()
        with pytest.raises(ValueError, match="closed"):
            next(self.iterator)
        assert self.iterator.get_state() == state
        self.iterator = iter(self.course.loaders[self.worker_count])
        self.iterator.set_state(state)

    @rule(before=st.integers(0, 2), which=st.integers(0, 2), after=st.integers(0, 3))
    def kill_worker(self, before: int, which: int, after: int) -> None:
        """A worker dies, running or stopped, whatever it is doing, unless its call has killed one before."""
        self.take(before)
        for worker in self.living_workers()[which:][:1]:
            if worker in blameless_workers(self.iterator):
                send(worker, signal.SIGKILL)
                self.killed.append(worker)
        self.take(after)

    @rule(before=st.integers(0, 2), which=st.integers(0, 2), after=st.integers(0, 3), for_good=st.booleans())
    def stop_worker(self, before: int, which: int, after: int, for_good: bool) -> None:
        """A worker stops. It continues after some elements, or when the consumer waits for it and the pool warns."""
        self.take(before)
        for worker in self.living_workers()[which:][:1]:
            # The pool may have warned of it already, since it took long to start: it must be able to warn again.
            worker.warned = False
            send(worker, signal.SIGSTOP)
        self.take(after)
        if not for_good:
            self.continue_all()

    @rule(before=st.integers(0, 2), after=st.integers(0, 3))
    def kill_fork_server(self, before: int, after: int) -> None:
        """The process that forks the workers dies, and they die with it, unless it has only just been started."""
        self.take(before)
        if self.living_workers() and not executor_of(self.iterator)._deaths_of_fork_server:
            fork_server = fork_server_of(self.iterator)
            if fork_server != self.killed_fork_server:
                os.kill(fork_server, signal.SIGKILL)
                self.killed_fork_server = fork_server
        self.take(after)

    def living_workers(self) -> list[Worker]:
        """Returns the workers of the iterator that are ready and were not killed.

        Which these are depends on timing, which no rule may depend on: where there are none, a rule does nothing.
        """
        if not isinstance(self.iterator._executor, pool_executor.PoolExecutor):
            return []
        workers = pool_of(self.iterator).workers
        return [worker for worker in workers if worker.is_ready and worker.pid and worker not in self.killed]

    def continue_all(self) -> None:
        for worker in self.living_workers():
            send(worker, signal.SIGCONT)

    def leave(self) -> None:
        """Leaves the iterator: its pool, with all that was done to it, serves the next one."""
        self.iterator.seek(0)

    def teardown(self) -> None:
        if getattr(self, "iterator", None) is not None:
            self.leave()
            logging.getLogger("millstream").removeHandler(self.alarm)


class Alarm(logging.Handler):
    """Lets stopped workers continue when the pool warns of one that has been busy for long."""

    def __init__(self, consumer: Consumer) -> None:
        super().__init__()
        self._consumer = consumer

    def emit(self, record: logging.LogRecord) -> None:
        del record
        self._consumer.continue_all()


@UNEVEN_ENDS
@pytest.mark.slow
def test_a_consumer_may_do_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any sequence of what the iterator offers, of deaths, stops and changes of worker_count: the oracle's suffix."""
    monkeypatch.setattr(workers_executor, "STALL_WARNING_SECONDS", 0.02)
    monkeypatch.setattr(
        Consumer, "courses", {name: Course.of(pipeline) for name, pipeline in PIPELINES.items()}, raising=False
    )
    run_state_machine_as_test(Consumer, settings=settings(deadline=None, max_examples=6, stateful_step_count=30))
    for course in Consumer.courses.values():
        for loader in course.loaders.values():
            iter(loader).close()
