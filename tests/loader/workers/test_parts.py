"""What several pipelines with one set of workers have in common: who wants a call, and whose calls come next."""

from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream.loader.pipeline.calls import BlockCall
from millstream.loader.pipeline.outputs import Cursor
from millstream.loader.pipeline.schedule import Schedule
from millstream.loader.threads.profiler import Profiler
from millstream.loader.workers.parts import Part, Parts
from millstream.transforms import Filter

if TYPE_CHECKING:
    from millstream.loader.pipeline.calls import Call
    from millstream.loader.pipeline.plan import Plan

MOST_CALLS = 4


def part_of(first: int, count: int) -> Part:
    """Returns a part that makes the numbers of a range of which a filter keeps two thirds."""
    loader = millstream.DataLoader(
        data_source=range(first, first + count),
        sampler=millstream.SequentialSampler(count),
        operations=[Filter(lambda number: number % 3 > 0)],
    )
    plan: Plan = loader._plan
    return Part(plan, Schedule(plan, Cursor(0, (0,))), Profiler(plan.pipeline.labels))


def kept(first: int, count: int) -> list[int]:
    """Returns what it makes."""
    return [number for number in range(first, first + count) if number % 3]


@given(st.randoms(use_true_random=False), st.lists(st.integers(1, 40), max_size=4))
@settings(deadline=None, max_examples=50)
def test_each_part_gets_what_is_its_own(random: Random, counts: list[int]) -> None:
    """Calls of all parts are made in any order, some after they were split: each stream is that of its part alone."""
    own = part_of(0, 30)
    parts = Parts(own)
    others = [part_of(1000 * number, count) for number, count in enumerate(counts, 1)]
    for other in others:
        parts.admit(other)
    given_out: list[Call] = []
    made: dict[int, list[Any]] = {part.number: [] for part in (own, *others)}
    while not all(part.schedule.exhausted for part in (own, *others)):
        part = random.choice([own, *others])
        if part.schedule.next_stage is not None and random.random() < 0.5:
            part.size.blocks = random.randint(1, 6)
            call = part.take(0)
            given_out += [] if call is None else [call]
        elif given_out:
            call = given_out.pop(random.randrange(len(given_out)))
            assert parts.wants(call)
            owner = parts.of(call)
            assert owner is not None
            pieces: list[Call] = []
            if isinstance(call, BlockCall) and call.num_blocks > 1 and random.random() < 0.3:
                pieces += parts.split(call)
            for piece in pieces or [call]:
                parts.complete(piece, owner.plan.make(piece.request, np.empty))
        for one in (own, *others):
            while (outputs := one.schedule.pop()) is not None:
                made[one.number] += outputs.values[outputs.first :]
    assert made[own.number] == kept(0, 30)
    assert [made[other.number] for other in others] == [
        kept(1000 * number, count) for number, count in enumerate(counts, 1)
    ]
    assert all(part.in_work == 0 for part in (own, *others))


def test_what_was_dismissed_is_wanted_by_nobody() -> None:
    """Its calls are dropped, also when they are answered."""
    parts, other = Parts(part_of(0, 9)), part_of(100, 9)
    parts.admit(other)
    call = other.take(0)
    assert call is not None
    assert parts.wants(call)
    parts.dismiss(other)
    parts.dismiss(other)
    assert not parts.wants(call)
    assert isinstance(call, BlockCall)
    assert parts.split(call) == []
    parts.complete(call, other.plan.make(call.request, np.empty))
    assert other.schedule.pop() is None
    assert parts.describe(call) == "outputs that are no longer wanted"


def test_who_is_waited_for_comes_first_and_all_once() -> None:
    """Then the first part, and then those of which something has come."""
    own, first, second = part_of(0, 9), part_of(100, 9), part_of(200, 9)
    parts = Parts(own)
    parts.admit(first)
    parts.admit(second)
    with parts.waiting_for(second):
        assert list(parts.in_turn()) == [second, own, first, second]
    assert list(parts.in_turn()) == [own]
    parts.give(first, 3)
    assert list(parts.in_turn()) == [own, first]


def test_nobody_works_too_far_ahead() -> None:
    """The others together are as far ahead as the first part needs, each by its share, and by one call at least."""
    own, often, seldom = part_of(0, 90), part_of(1000, 900), part_of(2000, 900)
    parts = Parts(own)
    parts.admit(often)
    parts.admit(seldom)
    parts.give(often, 298)
    own.size.blocks = 10
    taken = {}
    for part in (often, seldom):
        count = 0
        while parts.may_begin(part, MOST_CALLS):
            assert part.take(0) is not None
            count += 1
        taken[part.number] = count
    # 299 of 300 of four calls of ten records; and one.
    assert taken == {often.number: 40, seldom.number: 1}
    # Nothing of theirs is made: what is fed with it would wait, unless it has nothing else to do.
    assert parts.may_begin(own, MOST_CALLS)
    own.take(0)
    assert not parts.may_begin(own, MOST_CALLS)
