"""The profile tells where the time goes, whoever does the work, on a clock that only the user's code moves on."""

from typing import Any

import pytest

import millstream
from support.clocks.owned_clock import SlowSource, Spend

SECONDS = 0.125
RECORDS = 24
BATCH = 4

spend = Spend(SECONDS)

EXECUTORS = pytest.mark.parametrize(
    ("workers", "threads"), [(0, 0), (0, 4), (2, 0), (2, 4)], ids=["inline", "threads", "workers", "both"]
)


pytestmark = pytest.mark.usefixtures("owned_clock")


def loader_of(source: Any, *operations: Any, workers: int, threads: int) -> millstream.DataLoader:
    """Returns a loader of one shuffled epoch."""
    return millstream.DataLoader(
        data_source=source,
        sampler=millstream.IndexSampler(RECORDS, shuffle=True, num_epochs=1, seed=0),
        operations=operations,
        worker_count=workers,
        read_options=millstream.ReadOptions(num_threads=threads),
    )


@EXECUTORS
@pytest.mark.parametrize(
    ("source", "operations", "slow"),
    [
        (SlowSource(RECORDS, SECONDS), [abs, millstream.Batch(BATCH)], "read"),
        (range(RECORDS), [spend, millstream.Batch(BATCH)], "operations[0], Map(spend)"),
        (range(RECORDS), [millstream.Batch(1), spend], "operations[1], Map(spend)"),
        (range(RECORDS), [millstream.FilterTransform(spend), millstream.Batch(BATCH)], "operations[0], Filter(spend)"),
    ],
    ids=["source", "map", "map of batches", "filter"],
)
def test_time_is_told_of_the_stage_that_took_it(
    source: Any, operations: list[Any], slow: str, workers: int, threads: int
) -> None:
    """A slow source shows as read, a slow operation as itself, with all that it took, and other stages as nothing."""
    loader = loader_of(source, *operations, workers=workers, threads=threads)
    with iter(loader) as batches:
        assert sum(1 for _ in batches) > 0
    profile = loader.profile()
    stages = profile.keys() - {"next", "consumer"}
    assert {stage: profile[stage] for stage in stages if profile[stage]} == {slow: RECORDS * SECONDS}


def test_stages_are_named_in_the_order_of_the_pipeline() -> None:
    """Each stage is there from the beginning, at zero."""
    loader = loader_of(range(RECORDS), abs, millstream.Batch(BATCH), workers=0, threads=0)
    operations = ["operations[0], Map(abs)", f"operations[1], {millstream.Batch(BATCH)!r}"]
    stages = ["keys", "read", *operations, "hand-over", "next", "consumer"]
    assert list(loader.profile().items()) == [(stage, 0.0) for stage in stages]


def test_without_threads_and_workers_all_stages_are_inside_next() -> None:
    """Inline, the time in `next` is the pipeline's, and the time between calls is the consumer's."""
    loader = loader_of(range(RECORDS), spend, millstream.Batch(BATCH), workers=0, threads=0)
    for _ in loader:
        spend(None)
    profile = loader.profile()
    inside, outside, handed_over = (profile.pop(stage) for stage in ("next", "consumer", "hand-over"))
    assert inside == sum(profile.values()) == RECORDS * SECONDS
    assert outside == RECORDS // BATCH * SECONDS
    assert handed_over == 0.0


@pytest.mark.parametrize("on_device", [False, True], ids=["loader", "device_put"])
def test_the_wait_for_the_first_batch_is_one_after_start_prefetch_too(on_device: bool) -> None:
    """A pass that was begun in advance has a first batch, whose wait is no ordinary one; the next ones are."""
    loader = loader_of(range(RECORDS), spend, millstream.Batch(BATCH), workers=0, threads=0)
    with iter(loader) as own, millstream.device_put(own) if on_device else own as batches:
        batches.start_prefetch()
        for count in (1, 2):
            next(batches)
            assert len(batches.insight.profiler.waits) == count - 1
    # The thread of device_put has another clock.
    assert on_device or loader.metrics()["loader/first_wait_seconds"] == BATCH * SECONDS


def test_workers_tell_what_the_hand_over_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pickling in the workers and unpickling here are a stage of their own."""
    monkeypatch.undo()
    loader = loader_of(range(RECORDS), millstream.Batch(BATCH), workers=1, threads=0)
    assert len(list(loader)) == RECORDS // BATCH
    assert loader.profile()["hand-over"] > 0.0
