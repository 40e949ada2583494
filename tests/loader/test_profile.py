"""The profile tells where the time goes, whoever does the work."""

import sys
import time
from typing import Any

import cloudpickle
import pytest

import millstream

# Workers cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SECONDS = 0.002
RECORDS = 24
BATCH = 4
PASSES = 5

EXECUTORS = pytest.mark.parametrize(
    ("workers", "threads"), [(0, 0), (0, 4), (2, 0), (2, 4)], ids=["inline", "threads", "workers", "both"]
)


def spend(value: Any) -> Any:
    """Returns the value after SECONDS of work."""
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        pass
    return value


class SlowSource:
    """Numbers that take SECONDS each to read."""

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, key: int) -> int:
        return int(spend(key))


def loader_of(source: Any, *operations: Any, workers: int, threads: int) -> millstream.DataLoader:
    """Returns a loader of one shuffled epoch."""
    return millstream.DataLoader(
        data_source=source,
        sampler=millstream.IndexSampler(RECORDS, shuffle=True, num_epochs=1, seed=0),
        operations=operations,
        worker_count=workers,
        read_options=millstream.ReadOptions(num_threads=threads),
    )


def slowest_stage(source: Any, operations: Any, slow: str, workers: int, threads: int) -> str:
    """Returns the stage in which one pass took longest, having checked that it took as long as it must."""
    loader = loader_of(source, *operations, workers=workers, threads=threads)
    with iter(loader) as batches:
        assert sum(1 for _ in batches) > 0
    profile = loader.profile()
    assert profile[slow] >= RECORDS * SECONDS
    stages = profile.keys() - {"next", "consumer", "hand-over"}
    return max(stages, key=lambda stage: profile[stage])


@EXECUTORS
def test_time_is_told_of_the_stage_that_took_it(workers: int, threads: int) -> None:
    """A slow source shows as read, a slow operation as itself, and neither as anything else.

    On a busy machine a pass may be suspended for longer than all that is slow in it, wherever it is: hence several.
    """
    for source, operations, slow in (
        (SlowSource(), [abs, millstream.Batch(BATCH)], "read"),
        (range(RECORDS), [spend, millstream.Batch(BATCH)], "operations[0], Map(spend)"),
        (range(RECORDS), [millstream.Batch(1), spend], "operations[1], Map(spend)"),
        (range(RECORDS), [millstream.FilterTransform(spend), millstream.Batch(BATCH)], "operations[0], Filter(spend)"),
    ):
        passes = (slowest_stage(source, operations, slow, workers, threads) for _ in range(PASSES))
        assert slow in passes


def test_stages_are_named_in_the_order_of_the_pipeline() -> None:
    """Each stage is there from the beginning, at zero."""
    loader = loader_of(range(RECORDS), abs, millstream.Batch(BATCH), workers=0, threads=0)
    operations = ["operations[0], Map(abs)", f"operations[1], {millstream.Batch(BATCH)!r}"]
    stages = ["keys", "read", *operations, "hand-over", "next", "consumer"]
    assert list(loader.profile().items()) == [(stage, 0.0) for stage in stages]


def test_without_threads_and_workers_all_stages_are_inside_next() -> None:
    """What `next` takes is at least what the pipeline takes; what the consumer does in between is its own."""
    loader = loader_of(range(RECORDS), spend, millstream.Batch(BATCH), workers=0, threads=0)
    for _ in loader:
        spend(None)
    profile = loader.profile()
    inside, outside, handed_over = (profile.pop(stage) for stage in ("next", "consumer", "hand-over"))
    assert inside >= sum(profile.values()) >= RECORDS * SECONDS
    assert outside >= RECORDS // BATCH * SECONDS
    assert handed_over == 0.0


def test_workers_tell_what_the_hand_over_takes() -> None:
    """Pickling in the workers and unpickling here are a stage of their own."""
    loader = loader_of(range(RECORDS), millstream.Batch(BATCH), workers=1, threads=0)
    assert len(list(loader)) == RECORDS // BATCH
    assert loader.profile()["hand-over"] > 0.0
