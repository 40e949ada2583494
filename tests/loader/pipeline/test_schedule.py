"""Calls that finish in any order, are lost, split and blamed, give the stream; every position is where the rest begins.

No process is involved.
"""

import dataclasses
import itertools
from collections.abc import Iterator
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import millstream
from millstream.dataset.iterators.fed_iterator import Fed as FedSource
from millstream.dataset.nodes.lowering import InOrder
from millstream.loader.pipeline import pipeline as compiled
from millstream.loader.pipeline.calls import Blocks, Call, Fed, Position
from millstream.loader.pipeline.elements import Awaited, Elements, Origins
from millstream.loader.pipeline.plan import Plan
from millstream.loader.scheduling import feed as feeds
from millstream.loader.scheduling.assignments import MAX_DEATHS, Assignments
from millstream.loader.scheduling.feed import Feed
from millstream.loader.scheduling.schedule import Schedule
from millstream.sharding import NoSharding
from millstream.transforms import Batch, Filter, Map, RandomMap, Transformation
from millstream.transforms.of_chains import KeepAll
from support.draw.random_pipelines import (
    UNEVEN_ENDS,
    FailOn,
    Pipeline,
    dealt_pipelines,
    dropping_operations,
    one_to_one_operations,
    pipelines,
)
from support.laws import expected_of, inline_loader, loader_of
from support.oracle.stream import Failing, oracle
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
        feed: what the elements come from, if they are not read.
    """

    def __init__(
        self,
        plan: Plan,
        random: Random,
        deadly: set[int] = frozenset(),  # type: ignore[assignment]
        feed: Feed | None = None,
    ) -> None:
        self._plan = plan
        self._deadly = deadly
        self._random = random
        self._feed = feed
        self._accidents = 0
        self._begin(plan.beginning)

    def _begin(self, position: Position) -> None:
        if self._feed is not None:
            self._feed.go_to(position[0].block)
        self._schedule = Schedule(self._plan, position, self._feed)
        self._assignments = Assignments(self._schedule, itertools.count())
        self._given: list[tuple[int, Call]] = []

    def stream(self) -> Iterator[Any]:
        """Yields everything that comes out."""
        while not self._schedule.exhausted:
            while (outputs := self._schedule.pop()) is not None:
                if self._feed is not None:
                    self._feed.delivered(outputs)
                    check_kept(self._feed, self._plan.partition.global_block)
                yield from outputs.values[outputs.first :]
                if outputs.error is not None:
                    assert self._schedule.next_stage is None
                    raise outputs.error
                if self._feed is not None and outputs.values and self._random.random() < 0.1:
                    # Others go on from here.
                    position = outputs.position_after(len(outputs.values) - 1)
                    if self._schedule.failures is not None:
                        self._schedule.failures.deliver(position)
                    self._begin(position)
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
        elif self._feed is not None and self._feed.awaited is not None and self._random.random() < 0.5:
            self._feed.awaited = None
        elif self._given:
            self._finish(*self._given.pop(self._random.randrange(len(self._given))))
        else:
            # Without this, an endless loop would use up what Hypothesis draws, which discards the example.
            is_waiting = self._feed is not None and self._feed.awaited is not None
            assert is_waiting or self._schedule.exhausted or self._schedule.next_stage is not None, "a call was lost"

    def _finish(self, number: int, call: Call) -> None:
        request = call.request
        kills = isinstance(request, Blocks) and self._deadly & set(range(request.start, request.stop))
        if kills:
            self._assignments.blame(number, lambda deaths, records: DeathError(f"{deaths} deaths: {records}"))
        elif self._accidents < SIZE and self._random.random() < 0.3:
            # The worker dies of something else.
            self._accidents += 1
            if self._random.random() < 0.3:
                # Its call is suspected, so that its blocks go to others one by one.
                self._assignments.blame(number, lambda *_: DeathError(), guilt=0.0)
                return
            # The calls that it had not begun, this one among them, go to others.
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


class Slow:
    """Numbers up to a count, and then an error, if it is one. Any of them may have to be waited for."""

    def __init__(self, count: int, error: BaseException | None, random: Random) -> None:
        self._count = count
        self._error = error
        self._random = random
        self._next = self.num_drawn = 0

    def wait(self) -> None:
        raise AssertionError("it is asked again")

    def draw(self, count: int, number: int) -> Elements | Awaited:
        assert number == self._next
        while self.num_drawn < count and self._next + self.num_drawn < self._count:
            if self._random.random() < 0.3:
                return self
            self.num_drawn += 1
        drawn = np.arange(self._next, self._next + min(count, self.num_drawn))
        self._next += len(drawn)
        self.num_drawn -= len(drawn)
        table = np.stack([drawn] * 4 + [np.zeros_like(drawn)])
        return Elements(drawn.tolist(), Origins(table), self._error if len(drawn) < count else None)

    def get_state(self) -> int:
        assert not self.num_drawn
        return self._next

    def set_state(self, state: int) -> None:
        self._next, self.num_drawn = state, 0


def check_kept(feed: Feed, block: int) -> None:
    """Checks that each saved state is that at its block, and that they are in order."""
    kept = feed.kept()
    blocks = [number for number, _ in kept]
    assert blocks == sorted(set(blocks))
    assert [number * block for number in blocks] == [state for _, state in kept]


@dataclasses.dataclass(frozen=True)
class EndsWithError:
    """Numbers that end with an error, as a source of which the end is not known."""

    count: int

    def __getitem__(self, number: int) -> int:
        if number == self.count:
            raise OSError("the end")
        return number


@dataclasses.dataclass(frozen=True)
class FailOnMultiples(Map):
    """Fails on every so many."""

    of: int

    def map(self, number: int) -> int:
        if number % self.of == 0:
            raise KeyError(number)
        return number


plain_operations = st.one_of(one_to_one_operations, dropping_operations, st.builds(FailOn, st.integers(0, 22))).filter(
    lambda operation: not isinstance(operation, RandomMap)
)
"""Operations without seeds, which chains give to those that draw."""


@given(
    operations=st.lists(plain_operations, max_size=3),
    count=st.integers(1, 14),
    fails=st.booleans(),
    tolerance=st.none() | st.builds(compiled.Tolerance, st.none() | st.integers(0, 4)),
    seed=st.integers(0, 2**32),
)
@settings(deadline=None, max_examples=100)
def test_a_stream_that_is_fed_is_the_oracles(
    operations: list[Transformation], count: int, fails: bool, tolerance: compiled.Tolerance | None, seed: int
) -> None:
    """So are calls that are fed with elements that may have to be waited for, also from any position on.

    Elements that fail are counted in each call, also in the one that the stream ends in.
    """
    source: Any = range(count)
    if tolerance is not None:
        # It would skip the error of a source, and yield a batch that is not full at its end.
        assume(not (fails and any(isinstance(operation, Batch) for operation in operations)))
        operations = [KeepAll(), FailOnMultiples(2 + seed % 3), *operations]
    elif fails:
        source = EndsWithError(count)
    failing = None if tolerance is None else Failing(tolerance.max_errors)
    sampler = millstream.IndexSampler(count + 100 * isinstance(source, EndsWithError), num_epochs=1)
    expected, error = drain(oracle(source, sampler, operations, failing=failing))
    # The oracle of a finite source knows when all have failed, which the end of a stream does not.
    assume(failing is None or len(failing.keys) < count)
    order = InOrder(None, None)
    plan = Plan(compiled.Pipeline(FedSource(), order, order, tuple(operations), NoSharding(), tolerance=tolerance))
    for random in map(Random, range(seed, seed + 6)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(feeds, "KEPT_ELEMENTS", 8)
            plan.errors = plan.errors and plan.errors.emptied()
            slow = Slow(count, OSError("the end") if fails else None, random)
            found = drain(Workers(plan, random, feed=Feed(slow, plan.partition.global_block)).stream())
        assert found == (expected, error or (OSError if fails else None))


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
