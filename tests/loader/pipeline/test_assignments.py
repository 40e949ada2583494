"""Calls are lost, split and blamed, without any process: no element is lost, doubled or out of order."""

import itertools
from random import Random
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream.loader.operations.elements import Elements
from millstream.loader.pipeline.calls import Blocks, Call, Fed
from millstream.loader.pipeline.plan import Plan
from millstream.loader.scheduling.assignments import MAX_DEATHS, Assignments
from millstream.loader.scheduling.schedule import Schedule
from millstream.transforms import Batch, Filter
from support.laws import inline_loader
from support.streams import comparable

SIZE = 40


class DeathError(Exception):
    """Stands for the death of too many workers."""


def loader_of(*operations: Any) -> millstream.DataLoader:
    return inline_loader(range(SIZE), millstream.SequentialSampler(SIZE), *operations)


class Workers:
    """Workers that some blocks kill every time, and that otherwise die at random.

    Args:
        plan: what they make.
        deadly: the blocks that kill whoever makes them.
        random: decides who dies.
    """

    def __init__(self, plan: Plan, deadly: set[int], random: Random) -> None:
        self._plan = plan
        self._deadly = deadly
        self._random = random
        self._schedule = Schedule(plan, plan.beginning)
        self._assignments = Assignments(self._schedule, itertools.count())
        self._given: list[tuple[int, Call]] = []
        self._accidents = 0

    def stream(self) -> tuple[list[Any], BaseException | None]:
        """Returns everything that comes out, and the error at the end, if any."""
        made: list[Any] = []
        while not self._schedule.exhausted:
            while (outputs := self._schedule.pop()) is not None:
                made += [comparable(value) for value in outputs.values[outputs.first :]]
                if outputs.error is not None:
                    return made, outputs.error
            self._do_something()
        return made, None

    def _do_something(self) -> None:
        lost = self._assignments.next_lost()
        if lost is None and len(self._given) < self._random.randint(1, 4):
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
            assert self._schedule.exhausted, "a call was lost"

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


@given(random=st.randoms(use_true_random=False), filtered=st.booleans(), batch=st.integers(1, 3))
@settings(deadline=None, max_examples=40)
def test_accidents_change_nothing(random: Random, filtered: bool, batch: int) -> None:
    """However often workers die where no call is at fault, the stream is the undisturbed one."""
    operations = [Filter(lambda number: number % 3), Batch(batch)] if filtered else []
    expected = [comparable(value) for value in loader_of(*operations)]

    assert Workers(loader_of(*operations)._plan, set(), random).stream() == (expected, None)


@given(random=st.randoms(use_true_random=False), deadly=st.sets(st.integers(0, SIZE - 1), min_size=1))
@settings(deadline=None)
def test_a_block_that_kills_is_an_error_at_its_turn(random: Random, deadly: set[int]) -> None:
    """Whichever blocks it was made with, all elements before it come, and then an error that names it alone."""
    made, error = Workers(loader_of()._plan, deadly, random).stream()

    assert made == [comparable(number) for number in range(min(deadly))]
    assert isinstance(error, DeathError)
    first = min(deadly)
    assert str(error).endswith(f"deaths: the record {first} (positions {first} to {first})")
    assert int(str(error).split()[0]) >= MAX_DEATHS


def test_answers_to_unknown_calls_are_dropped() -> None:
    """An answer to, or blame for, a call that was never given out or is answered already does nothing."""
    plan = loader_of()._plan
    schedule = Schedule(plan, plan.beginning)
    assignments = Assignments(schedule, itertools.count(7))
    call = schedule.take(0)
    assert call is not None
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


def test_a_call_without_elements_has_a_description() -> None:
    """An iterator that fails at its first element leaves a call without any, of which errors say so."""
    assert loader_of()._plan.describe(Fed(Elements.failed(DeathError()))) == "no record"
