"""Several pipelines share one set of workers: the order of their calls, and the demand of each."""

from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream.loader.engine.substreams import Substream, Substreams
from millstream.loader.measuring import Profiler
from millstream.loader.pipeline.calls import BlockCall
from millstream.loader.scheduling.schedule import Schedule
from millstream.transforms import Filter

if TYPE_CHECKING:
    from millstream.loader.pipeline.calls import Call
    from millstream.loader.pipeline.plan import Plan

MAX_CALLS = 4


def substream_of(first: int, count: int) -> Substream:
    """Returns a substream that makes the numbers of a range of which a filter keeps two thirds."""
    loader = millstream.DataLoader(
        data_source=range(first, first + count),
        sampler=millstream.SequentialSampler(count),
        operations=[Filter(lambda number: number % 3 > 0)],
    )
    plan: Plan = loader._plan
    return Substream.in_workers(plan, Schedule(plan, plan.beginning), Profiler(plan.pipeline.labels))


def kept(first: int, count: int) -> list[int]:
    return [number for number in range(first, first + count) if number % 3]


@given(st.randoms(use_true_random=False), st.lists(st.integers(1, 40), max_size=4))
@settings(deadline=None, max_examples=25)
def test_each_substream_gets_what_is_its_own(random: Random, counts: list[int]) -> None:
    """However calls of all substreams are ordered and split, each stream equals that of its substream alone."""
    own = substream_of(0, 30)
    substreams = Substreams()
    substreams.add(own, is_last=True)
    others = [substream_of(1000 * number, count) for number, count in enumerate(counts, 1)]
    for other in others:
        substreams.add(other)
    given_out: list[Call] = []
    made: dict[int, list[Any]] = {substream.number: [] for substream in (own, *others)}
    while not all(substream.schedule.exhausted for substream in (own, *others)):
        substream = random.choice([own, *others])
        if substream.schedule.next_stage is not None and random.random() < 0.5:
            substream.size.blocks = random.randint(1, 6)
            if (call := substream.take(0)) is not None:
                substream.in_flight += 1
                given_out.append(call)
        elif given_out:
            call = given_out.pop(random.randrange(len(given_out)))
            assert substreams.wants(call)
            owner = substreams.find(call)
            assert owner is not None
            calls: list[Call] = []
            if isinstance(call, BlockCall) and call.num_blocks > 1 and random.random() < 0.3:
                calls += substreams.split(call)
            for single in calls or [call]:
                substreams.complete(single, owner.plan.make(single.request, np.empty))
        for one in (own, *others):
            while (outputs := one.schedule.pop()) is not None:
                made[one.number] += outputs.values[outputs.first :]
    assert made[own.number] == kept(0, 30)
    assert [made[other.number] for other in others] == [
        kept(1000 * number, count) for number, count in enumerate(counts, 1)
    ]
    assert all(substream.in_flight == 0 for substream in (own, *others))


def test_what_was_dismissed_is_wanted_by_nobody() -> None:
    """The calls of a dismissed substream are dropped, also when they are answered."""
    substreams, other = Substreams(), substream_of(100, 9)
    substreams.add(substream_of(0, 9), is_last=True)
    substreams.add(other)
    call = other.take(0)
    assert call is not None
    assert substreams.wants(call)
    substreams.remove(other)
    substreams.remove(other)
    assert not substreams.wants(call)
    assert isinstance(call, BlockCall)
    assert substreams.split(call) == []
    substreams.complete(call, other.plan.make(call.request, np.empty))
    assert other.schedule.pop() is None
    assert substreams.describe(call) == "outputs that are no longer wanted"


def test_who_is_waited_for_comes_first_and_all_once() -> None:
    """The substream that is waited for comes first, then the consumer's own, then those that have delivered."""
    own, first, second = substream_of(0, 9), substream_of(100, 9), substream_of(200, 9)
    substreams = Substreams()
    substreams.add(own, is_last=True)
    substreams.add(first)
    substreams.add(second)
    assert list(substreams.by_urgency(second)) == [second, own, first, second]
    assert list(substreams.by_urgency()) == [own]
    substreams.record_drawn(first, 3)
    assert list(substreams.by_urgency()) == [own, first]


def test_nobody_works_too_far_ahead() -> None:
    """The others together are as far ahead as the first substream needs: each by its share, at least one call."""
    own, often, seldom = substream_of(0, 90), substream_of(1000, 900), substream_of(2000, 900)
    substreams = Substreams()
    substreams.add(own, is_last=True)
    substreams.add(often)
    substreams.add(seldom)
    substreams.record_drawn(often, 298)
    own.size.blocks = 10
    taken = {}
    for substream in (often, seldom):
        count = 0
        while substreams.may_begin(substream, MAX_CALLS, MAX_CALLS):
            assert substream.take(0) is not None
            count += 1
        taken[substream.number] = count
    # 299 of 300 of four calls of ten records; and one.
    assert taken == {often.number: 40, seldom.number: 1}
