"""Calls have the size that storage and memory ask for, whatever they cost."""

from collections.abc import Callable

import numpy as np
import pytest

import millstream
from millstream.loader.pipeline.calls import BlockCall
from millstream.loader.pipeline.elements import Elements, Origins
from millstream.loader.pipeline.plan import Plan
from millstream.loader.threads.call_size import (
    CALL_SECONDS,
    MAX_CALL_BYTES,
    MAX_CALL_SECONDS,
    RECORDS_PER_CALL,
    CallSize,
)


def plan_of(*operations: millstream.transforms.Transformation) -> Plan:
    """Returns a plan over 1,000,000 records."""
    return millstream.DataLoader(
        data_source=range(1_000_000), sampler=millstream.SequentialSampler(1_000_000), operations=operations
    )._plan


def sizes_of(size: CallSize, plan: Plan, cost: Callable[[int], float], count: int, record_bytes: int = 8) -> list[int]:
    """Returns the sizes of calls, made one after another, that take `cost(size)` seconds."""
    sizes = []
    for _ in range(count):
        call = BlockCall(plan.shards[0], 0, size.blocks)
        sizes.append(size.blocks)
        table = np.zeros((5, size.blocks), np.int64)
        call.complete(Elements([np.empty(record_bytes, np.uint8)] * size.blocks, Origins(table)))
        size.record(call, cost(size.blocks))
    return sizes


@pytest.mark.parametrize("latency", [1e-5, 0.02, 0.05, 0.2])
def test_calls_grow_while_larger_ones_are_cheaper_per_block(latency: float) -> None:
    """A request that takes as long for one record as for many gets the maximum, however long it takes."""
    plan = plan_of()
    sizes = sizes_of(CallSize(plan), plan, lambda _: latency, 12)
    assert sizes == sorted(sizes)
    assert sizes[-1] == RECORDS_PER_CALL


@pytest.mark.parametrize("seconds", [1e-4, 0.002, 0.02, 0.3])
def test_calls_stay_short_where_each_record_has_its_own_cost(seconds: float) -> None:
    """Where a record takes as long in a large call, calls are short, and no larger size is tried more than rarely."""
    plan = plan_of()
    sizes = sizes_of(CallSize(plan), plan, lambda size: seconds * size, 400)
    too_long = [size for size in sizes if size > 1 and size * seconds > CALL_SECONDS]
    assert len(too_long) <= len(sizes) // 32


def test_calls_shrink_when_a_block_is_no_longer_cheaper() -> None:
    """Where the latency was shared and then each record costs, a call soon takes less than the maximum again."""
    plan = plan_of()
    size = CallSize(plan)
    assert sizes_of(size, plan, lambda _: 0.02, 12)[-1] == RECORDS_PER_CALL
    sizes = sizes_of(size, plan, lambda count: 0.01 * count, 40)
    assert 0.01 * max(sizes[20:]) <= MAX_CALL_SECONDS
    assert sizes[-1] <= 8


@pytest.mark.parametrize("record_bytes", [8, 100_000, MAX_CALL_BYTES])
def test_calls_have_a_maximum_of_bytes(record_bytes: int) -> None:
    """However much latency they share, calls that make several blocks stay below the maximum of bytes."""
    plan = plan_of()
    sizes = sizes_of(CallSize(plan), plan, lambda _: 0.02, 12, record_bytes)
    assert all(size == 1 or size * record_bytes <= MAX_CALL_BYTES for size in sizes)
    assert sizes[-1] * 4 * record_bytes > MAX_CALL_BYTES or sizes[-1] == RECORDS_PER_CALL


def test_a_call_has_one_batch_where_a_block_is_a_large_one() -> None:
    """A batch has its latency to itself: other batches come in other calls, which overlap."""
    plan = plan_of(millstream.Batch(256))
    assert set(sizes_of(CallSize(plan), plan, lambda _: 0.02, 12)) == {1}
