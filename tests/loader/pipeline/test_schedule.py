"""Calls that finish in any order give the stream, and every position between outputs is where the rest begins."""

import itertools
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream.loader.operations.elements import Elements
from millstream.loader.pipeline.calls import Call
from millstream.loader.pipeline.outputs import Position
from millstream.loader.pipeline.plan import Plan
from millstream.loader.scheduling.schedule import Schedule
from millstream.transforms import Batch, Filter, Map
from support.draw.random_pipelines import UNEVEN_ENDS, Pipeline, dealt_pipelines, pipelines
from support.laws import inline_loader, loader_of
from support.oracle.stream import oracle
from support.streams import drain


def work_of(plan: Plan) -> Callable[[Call], Elements]:
    """Returns a function that does with a call what an executor does."""
    return lambda call: plan.make(call.request, np.empty)


def take(schedule: Schedule, most_blocks: int = 1) -> Call | None:
    """Returns a call that may run now, of the latest stage that has one; None if there is none."""
    stage = schedule.next_stage
    return None if stage is None else schedule.take(stage, most_blocks)


def run_in_any_order(schedule: Schedule, work: Callable[[Call], Elements], random: Random) -> Iterator[Any]:
    """Yields a schedule's outputs, its calls being taken, and finished, in a random order, some at the same time."""
    taken: list[Call] = []
    while not schedule.exhausted:
        while (outputs := schedule.pop()) is not None:
            yield from outputs.values[outputs.first :]
            if outputs.error is not None:
                raise outputs.error
        call = take(schedule, random.randint(1, 4)) if len(taken) < random.randint(1, 6) else None
        if call is not None:
            taken.append(call)
        elif taken:
            call = taken.pop(random.randrange(len(taken)))
            schedule.complete(call, work(call))
        else:
            assert schedule.exhausted or schedule.next_stage is not None


@UNEVEN_ENDS
@given(pipeline=pipelines() | dealt_pipelines(), random=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=80)
def test_the_schedule_gives_the_stream_whatever_finishes_first(pipeline: Pipeline, random: Random) -> None:
    """However many calls are under way and in which order they finish, the outputs are those of the oracle."""
    plan = loader_of(pipeline)._plan
    schedule = Schedule(plan, plan.beginning)
    expected = drain(oracle(pipeline.source, pipeline.sampler, pipeline.operations, pipeline.shard))

    assert drain(run_in_any_order(schedule, work_of(plan), random)) == expected
    assert take(schedule) is None


def positions_of(plan: Plan, sizes: Iterator[int]) -> list[Position]:
    """Returns the position after each output, up to an error, if calls have the given numbers of blocks."""
    schedule, positions = Schedule(plan, plan.beginning), []
    while not schedule.exhausted:
        while (run := schedule.pop()) is not None:
            positions += [run.position_after(row) for row in range(run.first, len(run.values))]
        if (call := take(schedule, next(sizes))) is not None:
            schedule.complete(call, work_of(plan)(call))
    return positions


@UNEVEN_ENDS
@given(pipeline=pipelines() | dealt_pipelines(), random=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=100)
def test_positions_do_not_depend_on_the_sizes_of_calls(pipeline: Pipeline, random: Random) -> None:
    """They are those of calls of one block each, also before an error and after elements that were dropped."""
    plan = loader_of(pipeline)._plan
    sizes = (random.randint(1, 8) for _ in itertools.count())

    assert positions_of(plan, sizes) == positions_of(plan, itertools.repeat(1))


def test_nothing_is_begun_after_an_error() -> None:
    """Once an error has left the schedule there is nothing more to take, whatever was completed meanwhile."""
    fail = Map(lambda batch: batch / 0)
    operations = [Filter(lambda _: True), Batch(1, batch_fn=list), fail]
    sampler = millstream.SequentialSampler(3)
    plan = inline_loader(range(3), sampler, *operations)._plan
    schedule, work = Schedule(plan, plan.beginning), work_of(plan)
    first, second = take(schedule), take(schedule)
    assert first is not None
    assert second is not None
    schedule.complete(first, work(first))
    group = take(schedule)
    assert group is not None
    schedule.complete(group, work(group))
    schedule.complete(second, work(second))
    run = schedule.pop()

    assert run is not None
    assert isinstance(run.error, TypeError)
    assert schedule.exhausted
    assert take(schedule) is None


def test_a_position_after_a_batch_without_a_share_depends_on_the_end() -> None:
    """A batch that lacks the share of a logical shard that has ended would be another one in a longer order."""
    odd = Filter(lambda number: number % 2 == 1 or number < 4)
    shard = millstream.ShardOptions(0, 1, logical_shards=2)
    plan = inline_loader(range(8), millstream.SequentialSampler(8), odd, Batch(2), shard_options=shard)._plan
    schedule, finals = Schedule(plan, plan.beginning), []
    while not schedule.exhausted:
        if (run := schedule.pop()) is not None:
            finals.append((run.values[0].tolist(), [cursor.is_final for cursor in run.position_after(0)]))
        elif (call := take(schedule)) is not None:
            schedule.complete(call, work_of(plan)(call))

    kept = [([0, 1], [False, False]), ([2, 3], [False, False])]
    assert finals == [*kept, ([5], [True, False]), ([7], [True, False])]
