"""The rules that decide who runs a call, how long it is, and how many are in flight: counted, without a clock."""

import heapq
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.errors import WorkerDiedError
from millstream.loader.engine.engine import LocalAhead
from millstream.loader.engine.policy import (
    CALL_SECONDS,
    HAND_OVER_SECONDS,
    MAX_BATCHES_BYTES,
    MAX_CALL_BYTES,
    MAX_CALL_SECONDS,
    RETRY_CALLS,
    SOLO_CALLS,
    SOLO_SECONDS,
    CallSize,
    Costs,
    cautious_estimate,
)
from millstream.loader.engine.workers import IDLE_CALLS, IDLE_SECONDS, MAX_DEATHS_AT_START, DeathsAtStart, ReadsInFlight
from millstream.loader.pipeline.calls import BlockCall
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.plan import Plan
from millstream.loader.threads.shared_threads import SharedThreads

LENGTH = 1 << 20


def plan_of(*operations: Any, logical_shards: int | None = None) -> Plan:
    return millstream.DataLoader(
        data_source=range(LENGTH),
        sampler=millstream.SequentialSampler(LENGTH),
        operations=operations,
        shard_options=millstream.ShardOptions(0, 1, logical_shards=logical_shards),
    )._plan


def call_of(plan: Plan, blocks: int, num_bytes: int = 8) -> BlockCall:
    """Returns a completed call of some blocks, whose outputs take this number of bytes."""
    call = BlockCall(plan.shards[0], 0, blocks, 0)
    call.complete(Elements([np.empty(num_bytes, np.uint8)], plan.make(call.request, np.empty).origins.take(slice(1))))
    return call


def sizes(size: CallSize, plan: Plan, seconds: Callable[[int], float], num_calls: int = 40) -> list[int]:
    """Returns the sizes that calls go through if a call of so many blocks takes the seconds of a function."""
    found = [size.blocks]
    for _ in range(num_calls):
        size.record(call_of(plan, size.blocks), seconds(size.blocks))
        if size.blocks != found[-1]:
            found.append(size.blocks)
    return found


@pytest.mark.parametrize(
    ("seconds", "largest"),
    [
        (lambda _: 0.0, 256),
        (lambda blocks: CALL_SECONDS / 12 * blocks, 8),
        (lambda _: MAX_CALL_SECONDS / 3, 256),
        (lambda _: MAX_CALL_SECONDS * 0.6, 1),
        (lambda blocks: CALL_SECONDS * blocks, 2),
    ],
    ids=["quick", "proportional", "latency", "long latency", "slow"],
)
def test_calls_grow_while_that_is_cheaper(seconds: Callable[[int], float], largest: int) -> None:
    """Up to some milliseconds, or while the time per block falls, or up to 256 records: whichever lasts longest."""
    plan = plan_of()
    assert max(sizes(CallSize(plan), plan, seconds)) == largest


def test_a_size_that_was_not_cheaper_is_left_and_tried_again_later() -> None:
    """A call that is no cheaper per block goes back to half the size, and stays there for RETRY_CALLS calls."""
    plan = plan_of()
    size = CallSize(plan)
    assert sizes(size, plan, lambda blocks: CALL_SECONDS * blocks, 8) == [1, 2, 1]
    assert sizes(size, plan, lambda blocks: CALL_SECONDS * blocks, RETRY_CALLS - 10) == [1]
    assert sizes(size, plan, lambda blocks: CALL_SECONDS * blocks, 10) == [1, 2, 1]


def test_a_call_that_becomes_too_long_shrinks() -> None:
    """One of more than MAX_CALL_SECONDS is halved, however cheap each of its blocks is."""
    plan = plan_of()
    size = CallSize(plan)
    sizes(size, plan, lambda _: 0.0)
    assert sizes(size, plan, lambda _: 1.01 * MAX_CALL_SECONDS, 1) == [256, 128]


def test_the_time_to_draw_elements_counts() -> None:
    """Whoever asks for one element waits until those of the whole call are drawn."""
    plan = plan_of()
    size = CallSize(plan)
    for _ in range(9):
        call = call_of(plan, size.blocks)
        call.seconds_before = CALL_SECONDS * size.blocks
        size.record(call, 0.0)
        assert size.blocks <= 2


@pytest.mark.parametrize(
    ("max_bytes", "num_sharing", "most"), [(1 << 40, 1, MAX_CALL_BYTES), (1 << 20, 1, 1 << 19), (1 << 20, 4, 1 << 17)]
)
def test_a_call_takes_a_part_of_the_bytes(max_bytes: int, num_sharing: int, most: int) -> None:
    """At most 8 MB, and half of the budget, which streams below a join share."""
    plan = plan_of()
    size = CallSize(plan, 1 << 14, max_bytes)
    size.sharers = range(num_sharing)
    for _ in range(20):
        size.record(call_of(plan, size.blocks, 4096 * size.blocks), 0.0)
    assert size.blocks * 4096 == most


def test_sizes_follow_the_largest_block() -> None:
    """A large block counts at once, and is forgotten slowly."""
    assert cautious_estimate(100.0, 1000.0) == 1000.0
    assert 700.0 < cautious_estimate(1000.0, 100.0) < 1000.0


@pytest.mark.parametrize(("logical_shards", "largest"), [(1, 256), (2, 128), (64, 64)])
def test_logical_shards_have_their_share_of_the_records_of_a_call(logical_shards: int, largest: int) -> None:
    """The buffers of all add up, but a call of each is worth its overhead."""
    plan = plan_of(millstream.Filter(bool), millstream.Batch(64), logical_shards=logical_shards)
    assert max(sizes(CallSize(plan), plan, lambda _: 0.0)) * plan.partition.block == largest


@pytest.mark.parametrize("are_messages", [False, True])
def test_several_batches_are_a_call_for_workers_only(are_messages: bool) -> None:
    """A message costs more than a small batch; calls of threads have one. Such calls take 1 MB, and stay short."""
    plan = plan_of(millstream.Batch(4))
    size = CallSize(plan, 2048, are_messages=are_messages)
    assert max(sizes(size, plan, lambda _: 0.0)) == (512 if are_messages else 1)
    size.record(call_of(plan, size.blocks, 2 * MAX_BATCHES_BYTES), 0.0)
    assert size.blocks == (256 if are_messages else 1)
    slow = CallSize(plan, 2048, are_messages=are_messages)
    assert max(sizes(slow, plan, lambda _: CALL_SECONDS)) == 1


def test_the_first_calls_are_measured_alone() -> None:
    """A few, or one that certainly takes long; none if another stream has measured the same kind."""
    plan, shared = plan_of(), SharedThreads()
    costs = Costs(plan, shared)
    for number in range(SOLO_CALLS):
        assert not costs.are_known, number
        costs.record(call_of(plan, 1), SOLO_SECONDS / 2, is_here=True)
    assert costs.are_known
    assert Costs(plan, shared).are_known
    slow = Costs(plan, SharedThreads())
    slow.record(call_of(plan, 1), 2 * SOLO_SECONDS, is_here=False)
    assert slow.are_known


def test_one_late_call_does_not_change_who_works() -> None:
    """Calls are quick by their blocks, and by an estimate: short times weigh more in it, and long ones are cut."""
    plan = plan_of()
    costs = Costs(plan, SharedThreads())
    assert not costs.is_quick(0, 1)
    for _ in range(SOLO_CALLS):
        costs.record(call_of(plan, 1), HAND_OVER_SECONDS / 4, is_here=True)
    assert costs.is_quick(0, 3)
    assert not costs.is_quick(0, 4)
    for is_here in (True, False):
        costs.record(call_of(plan, 1), 1000.0, is_here=is_here)
    assert costs.is_quick(0, 2)
    late = early = 0
    while costs.is_quick(0, 1):
        costs.record(call_of(plan, 1), 1.0, is_here=False)
        late += 1
    while not costs.is_quick(0, 1):
        costs.record(call_of(plan, 1), 0.0, is_here=False)
        early += 1
    assert (late > 10, early) == (True, 1)


def test_workers_read_several_only_after_calls_that_wait() -> None:
    """Four in a row that wait for most of their time, and for some milliseconds: a wait for a core is shorter."""
    for idle, seconds, number in ((0.9, 1.0, 16), (0.4, 1.0, 1), (0.9 * IDLE_SECONDS, IDLE_SECONDS, 1)):
        reads = ReadsInFlight(16)
        for count in range(IDLE_CALLS):
            assert reads.number == 1, count
            reads.record(1, seconds, idle)
        assert reads.number == number
    reads = ReadsInFlight(16)
    for _ in range(3 * IDLE_CALLS):
        for idle in (*[0.9] * (IDLE_CALLS - 1), 0.0):
            reads.record(1, 1.0, idle)
    assert reads.number == 1


@pytest.mark.parametrize("num_blocks", [1, 32])
@pytest.mark.parametrize("num_workers", [1, 8])
@pytest.mark.parametrize("latency", [0.02, 0.2, 1.0])
def test_reads_in_flight_are_compared_by_the_calls_that_they_begin(
    latency: float, num_workers: int, num_blocks: int
) -> None:
    """If only latency counts, all reads are used, though calls of a former number are still in flight for a while."""
    reads, rng, now, share_of_all = ReadsInFlight(16), random.Random(0), 0.0, 0.0
    for _ in range(IDLE_CALLS):
        reads.record(num_blocks, latency, latency)
    in_flight: list[float] = []
    while now < 60.0:
        while len(in_flight) < num_workers * reads.number:
            heapq.heappush(in_flight, now + latency * rng.uniform(0.8, 1.2))
        before, number, now = now, reads.number, heapq.heappop(in_flight)
        share_of_all += (now - before) / 60.0 * (number == 16)
        reads.waited += now - before
        reads.record(num_blocks, latency, latency)
        reads.delivered(now, num_workers)
    assert share_of_all > 0.8


def test_deaths_of_new_workers_are_an_error_unless_one_lives() -> None:
    """As many as there are workers, and eight more; a result counts only of a worker that is younger than the dead."""
    deaths = DeathsAtStart(2)
    for number in range(MAX_DEATHS_AT_START + 1):
        deaths.record_death(number, "all die")
        deaths.record_life(0)
    with pytest.raises(WorkerDiedError, match="all die"):
        deaths.record_death(99, "all die")
    deaths.record_life(100)
    deaths.record_death(101, "one died")


def test_local_calls_are_bounded_in_records_and_bytes() -> None:
    """One call whatever its size, two whatever their records, more as far as the buffer has room."""
    plan = plan_of()
    for options, num_bytes, most in (
        (millstream.ReadOptions(4, 8), 8, 4),
        (millstream.ReadOptions(4, 1), 8, 2),
        (millstream.ReadOptions(4, 8, max_buffer_bytes=500), 300, 1),
        (None, 8, 0),
    ):
        local = LocalAhead(options)
        local._record_bytes = num_bytes / 2
        in_flight = 0
        while local.allows(in_flight) and in_flight < 9:
            local.begun(call_of(plan, 2))
            in_flight += 1
        assert in_flight == most
