"""Calls that finish in any order, are lost, split and blamed, give the stream; every position is where the rest begins.

No process is involved.
"""

import itertools
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream.loader.pipeline.calls import Blocks, Call, Fed, Position
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.plan import Plan
from millstream.loader.scheduling.assignments import MAX_DEATHS, Assignments
from millstream.loader.scheduling.schedule import Schedule
from millstream.transforms import Batch, Filter, Map
from support.draw.random_pipelines import UNEVEN_ENDS, Pipeline, dealt_pipelines, pipelines
from support.laws import expected_of, inline_loader, loader_of
from support.streams import drain

SIZE = 40


class DeathError(Exception):
    """Stands for the death of too many workers."""


def plan_of(size: int, *operations: Any, **options: Any) -> Plan:
    return inline_loader(range(size), millstream.SequentialSampler(size), *operations, **options)._plan


def take(schedule: Schedule, most_blocks: int = 1) -> Call:
    """Returns a call that may run now, of the latest stage that has one."""
    stage = schedule.next_stage
    assert stage is not None
    call = schedule.take(stage, most_blocks)
    assert call is not None
    return call


def complete(schedule: Schedule, plan: Plan, call: Call) -> None:
    schedule.complete(call, plan.make(call.request, np.empty))


class Workers:
    """Workers that some blocks kill every time, and that otherwise die at random.

    Args:
        plan: what they make.
        random: decides which call is taken or finishes next, and who dies.
        deadly: the blocks that kill whoever makes them.
    """

    def __init__(self, plan: Plan, random: Random, deadly: set[int] = frozenset()) -> None:  # type: ignore[assignment]
        self._plan = plan
        self._deadly = deadly
        self._random = random
        self._schedule = Schedule(plan, plan.beginning)
        self._assignments = Assignments(self._schedule, itertools.count())
        self._given: list[tuple[int, Call]] = []
        self._accidents = 0

    def stream(self) -> Iterator[Any]:
        """Yields everything that comes out."""
        while not self._schedule.exhausted:
            while (outputs := self._schedule.pop()) is not None:
                yield from outputs.values[outputs.first :]
                if outputs.error is not None:
                    assert self._schedule.next_stage is None
                    raise outputs.error
            self._do_something()

    def _do_something(self) -> None:
        lost = self._assignments.next_lost()
        if lost is None and len(self._given) < self._random.randint(1, 6):
            stage = self._schedule.next_stage
            call = None if stage is None else self._schedule.take(stage, self._random.randint(1, 5))
            if call is not None:
                lost = self._assignments.assign(call), call
        if lost is not None:
            self._given.append(lost)
        elif self._given:
            self._finish(*self._given.pop(self._random.randrange(len(self._given))))
        else:
            # Without this, an endless loop would use up what Hypothesis draws, which discards the example.
            assert self._schedule.exhausted or self._schedule.next_stage is not None, "a call was lost"

    def _finish(self, number: int, call: Call) -> None:
        request = call.request
        kills = isinstance(request, Blocks) and self._deadly & set(range(request.start, request.stop))
        if kills:
            self._assignments.blame(number, lambda deaths, records: DeathError(f"{deaths} deaths: {records}"))
        elif self._accidents < SIZE and self._random.random() < 0.3:
            # The worker dies of something else: the calls that it had not begun, this one among them, go to others.
            self._accidents += 1
            others, self._given = self._given, []
            self._assignments.lose([number, *(other for other, _ in others)])
            # Late answers belong to no call.
            for other, _ in others:
                self._assignments.complete(other, Elements.failed(DeathError("late")))
        else:
            self._assignments.complete(number, self._plan.make(request, np.empty))


@UNEVEN_ENDS
@given(pipeline=pipelines() | dealt_pipelines(), random=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=100)
def test_the_stream_is_the_oracles_whatever_finishes_first_and_who_dies(pipeline: Pipeline, random: Random) -> None:
    """However many calls are under way, and however often workers die where no call is at fault."""
    assert drain(Workers(loader_of(pipeline)._plan, random).stream()) == expected_of(pipeline)


@given(random=st.randoms(use_true_random=False), deadly=st.sets(st.integers(0, SIZE - 1), min_size=1))
@settings(deadline=None)
def test_a_block_that_kills_is_an_error_at_its_turn(random: Random, deadly: set[int]) -> None:
    """Whichever blocks it was made with, all elements before it come, and then an error that names it alone."""
    made: list[int] = []
    with pytest.raises(DeathError) as caught:
        made.extend(Workers(plan_of(SIZE), random, deadly).stream())

    first = min(deadly)
    assert made == [*range(first)]
    assert str(caught.value).endswith(f"deaths: the record {first} (positions {first} to {first})")
    assert int(str(caught.value).split()[0]) >= MAX_DEATHS


def test_answers_to_unknown_calls_are_dropped() -> None:
    """An answer to, or blame for, a call that was never given out or is answered already does nothing."""
    plan = plan_of(SIZE)
    schedule = Schedule(plan, plan.beginning)
    assignments = Assignments(schedule, itertools.count(7))
    call = take(schedule)
    number = assignments.assign(call)
    assert (number, assignments.call(number)) == (7, call)
    assignments.complete(number, plan.make(call.request, np.empty))
    assignments.complete(number, Elements.failed(DeathError()))
    assignments.blame(number, lambda *_: DeathError())
    assignments.lose([number, 99])
    outputs = schedule.pop()

    assert assignments.call(number) is None
    assert assignments.next_lost() is None
    assert assignments.describe(number) == "outputs that are no longer wanted"
    assert outputs is not None
    assert outputs.error is None
    # An iterator that fails at its first element leaves a call without any.
    assert plan.describe(Fed(Elements.failed(DeathError()))) == "no record"


def positions_of(plan: Plan, sizes: Iterator[int]) -> list[Position]:
    """Returns the position after each output, up to an error, if calls have the given numbers of blocks."""
    schedule, positions = Schedule(plan, plan.beginning), []
    while not schedule.exhausted:
        while (run := schedule.pop()) is not None:
            positions += [run.position_after(row) for row in range(run.first, len(run.values))]
        if schedule.next_stage is not None:
            complete(schedule, plan, take(schedule, next(sizes)))
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
    plan = plan_of(3, Filter(lambda _: True), Batch(1, batch_fn=list), Map(lambda batch: batch / 0))
    schedule = Schedule(plan, plan.beginning)
    first, second = take(schedule), take(schedule)
    complete(schedule, plan, first)
    complete(schedule, plan, take(schedule))
    complete(schedule, plan, second)
    run = schedule.pop()

    assert run is not None
    assert isinstance(run.error, TypeError)
    assert schedule.exhausted
    assert schedule.next_stage is None


def test_a_position_after_a_batch_without_a_share_depends_on_the_end() -> None:
    """A batch that lacks the share of a logical shard that has ended would be another one in a longer order."""
    odd = Filter(lambda number: number % 2 == 1 or number < 4)
    plan = plan_of(8, odd, Batch(2), shard_options=millstream.ShardOptions(0, 1, logical_shards=2))
    finals = [tuple(cursor.is_final for cursor in position) for position in positions_of(plan, itertools.repeat(1))]

    # The batches are [0, 1], [2, 3], [5] and [7].
    assert finals == [(False, False), (False, False), (True, False), (True, False)]
