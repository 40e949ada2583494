"""The profile and the summary of a loader after a real run are about that run.

Where it is about seconds, the clock is the test's own, and only the user's code moves it on. Which numbers call for
which advice is proven in `test_advice.py`.
"""

import re
from typing import Any

import pytest

import millstream
from support.clocks.owned_clock import SlowSource, Spend
from support.faults.user_faults import Unread

SECONDS = 0.125
RECORDS = 64
BATCH = 4

spend = Spend(SECONDS)
with_owned_clock = pytest.mark.usefixtures("owned_clock")


def loader_of(source: Any, *operations: Any, workers: int = 0, threads: int = 0) -> millstream.DataLoader:
    """Returns a loader of one epoch in batches."""
    return millstream.load(
        source,
        num_epochs=1,
        transformations=operations,
        batch_size=BATCH,
        worker_count=workers,
        read_options=millstream.ReadOptions(num_threads=threads),
    )


def summary_of(source: Any, *operations: Any, trains: int = 0) -> Any:
    """Returns the summary after one pass, in which the trainer spends time `trains` times with each batch."""
    with loader_of(source, *operations) as loader:
        for _ in loader:
            for _ in range(trains):
                spend(None)
        return loader.summary()


def kinds(summary: Any) -> set[str]:
    return {advice.kind for advice in summary.advice}


def test_a_loader_that_has_not_run_says_so() -> None:
    """The table is there, all zero, and one sentence."""
    summary = loader_of(range(8), abs).summary()
    assert kinds(summary) == {"unmeasured"}
    assert "operations[0], Map(abs)" in str(summary)
    assert "no batch yet" in str(summary)
    assert "seconds  per batch  share" in str(summary)


@with_owned_clock
def test_what_is_slow_is_named() -> None:
    """A slow operation is the bottleneck of a trainer that waits, with the seconds of both, and is marked."""
    summary = summary_of(range(RECORDS), spend, trains=1)
    # The first batch is counted apart: 15 took four times as long as the training with each.
    assert [advice.text for advice in summary.advice if advice.kind == "waiting"] == [
        "The trainer waited 79 % of the time."
    ]
    assert {"waiting", "bottleneck"} <= kinds(summary)
    assert "operations[0], Map(spend), takes 100 % of the pipeline's time" in str(summary)
    (slowest,) = [line for line in str(summary).splitlines() if "<- slowest" in line]
    assert slowest.startswith("operations[0]")
    assert slowest.split()[-6:] == ["8.000", "500", "ms", "100%", "<-", "slowest"]
    assert "16 batches of 32 bytes in 9.5 s, 79 % of it waiting" in str(summary)
    assert re.search(r"^p50, p99 of the last 1\d waits +trainer +500 ms, 500 ms *$", str(summary), re.MULTILINE)


@with_owned_clock
def test_a_slow_trainer_does_not_wait() -> None:
    """A pipeline that is quick beside the training needs no advice."""
    assert kinds(summary_of(range(RECORDS), trains=4)) == {"not_waiting"}


def test_the_order_of_a_chain_is_told_by_its_methods() -> None:
    """A chain is described by the steps that order its records, as its author wrote them."""
    orders = {"in order": millstream.MapDataset.range(9), ".shuffle(seed=0)": millstream.MapDataset.range(9).shuffle(0)}
    for order, dataset in orders.items():
        with iter(dataset.to_iter_dataset().batch(2)) as batches:
            assert str(batches.summary()).startswith(f"range(0, 9), {order}\n")


def test_calls_that_run_while_elements_are_read_are_named() -> None:
    """After a filter, the calls of a MapDataset are part of the reads, and so is their time."""
    dataset = millstream.MapDataset.range(9).map(abs).shuffle(seed=0).filter(bool)
    with iter(dataset.to_iter_dataset()) as elements:
        assert "\nread, .map(abs).filter(bool)  " in str(elements.summary())


def test_sources_without_batched_reads_are_named() -> None:
    """A source without `__getitems__` is named, also below one that reads many at once; one that has it is not."""
    sources: dict[str, Any] = {
        "Unread": Unread(),
        "the sources of ConcatenatedDataSource": millstream.ConcatenatedDataSource([Unread()]),
        "": millstream.InMemoryDataSource([1, 2]),
    }
    for name, source in sources.items():
        assert millstream.load(source).insight.snapshot().source.one_by_one == name


@with_owned_clock
@pytest.mark.parametrize(
    ("workers", "threads"), [(0, 0), (0, 4), (2, 0), (2, 4)], ids=["inline", "threads", "workers", "both"]
)
@pytest.mark.parametrize(
    ("source", "operations", "slow"),
    [
        (SlowSource(RECORDS, SECONDS), [abs], "read"),
        (range(RECORDS), [spend], "operations[0], Map(spend)"),
        (range(RECORDS), [millstream.Batch(1), spend], "operations[1], Map(spend)"),
        (range(RECORDS), [millstream.Filter(spend)], "operations[0], Filter(spend)"),
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
    loader = loader_of(range(RECORDS), abs)
    operations = ["operations[0], Map(abs)", f"operations[1], {millstream.Batch(BATCH)!r}"]
    stages = ["keys", "read", *operations, "hand-over", "next", "consumer"]
    assert list(loader.profile().items()) == [(stage, 0.0) for stage in stages]


@with_owned_clock
def test_without_threads_and_workers_all_stages_are_inside_next() -> None:
    """Inline, the time in `next` is the pipeline's, and the time between calls is the consumer's."""
    loader = loader_of(range(RECORDS), spend)
    for _ in loader:
        spend(None)
    profile = loader.profile()
    inside, outside, handed_over = (profile.pop(stage) for stage in ("next", "consumer", "hand-over"))
    assert inside == sum(profile.values()) == RECORDS * SECONDS
    assert outside == RECORDS // BATCH * SECONDS
    assert handed_over == 0.0


@with_owned_clock
@pytest.mark.parametrize("on_device", [False, True], ids=["loader", "device_put"])
def test_the_wait_for_the_first_batch_is_one_after_start_prefetch_too(on_device: bool) -> None:
    """A pass that was begun in advance has a first batch, whose wait is no ordinary one; the next ones are."""
    loader = loader_of(range(RECORDS), spend)
    with iter(loader) as own, millstream.device_put(own) if on_device else own as batches:
        batches.start_prefetch()
        for count in (1, 2):
            next(batches)
            assert len(batches.insight.profiler.waits) == count - 1
    # The thread of device_put has another clock.
    assert on_device or loader.metrics()["loader/first_wait_seconds"] == BATCH * SECONDS


def test_workers_tell_what_the_hand_over_takes() -> None:
    """Pickling in the workers and unpickling here are a stage of their own."""
    loader = loader_of(range(RECORDS), workers=1)
    assert len(list(loader)) == RECORDS // BATCH
    assert loader.profile()["hand-over"] > 0.0
