"""What a loader says of itself after a real run: the table and the advice are about that run."""

import re
import sys
import time
from collections.abc import Sequence
from typing import Any

import cloudpickle
import pytest

import millstream

# Workers cannot import a test module.
cloudpickle.register_pickle_by_value(sys.modules[__name__])

SECONDS = 0.002


def spend(value: Any) -> Any:
    """Returns the value after SECONDS of work."""
    end = time.perf_counter() + SECONDS
    while time.perf_counter() < end:
        pass
    return value


class SlowSource:
    """Numbers that take SECONDS each to read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, key: int) -> int:
        return int(spend(key))


class QuickSource(SlowSource):
    """The same, where many can be read at once."""

    def __getitems__(self, keys: Sequence[int]) -> list[int]:
        """Returns the records in the time that one takes."""
        return [spend(0) + key for key in keys]


def summary_of(source: Any, *operations: Any, trains: int = 0, workers: int = 0, threads: int = 0) -> Any:
    """Returns the summary after one pass, in which the trainer spends time `trains` times with each batch."""
    with millstream.load(
        source,
        num_epochs=1,
        transformations=operations,
        batch_size=4,
        worker_count=workers,
        read_options=millstream.ReadOptions(num_threads=threads),
    ) as loader:
        for _ in loader:
            for _ in range(trains):
                spend(None)
        return loader.summary()


def kinds(summary: Any) -> set[str]:
    """Returns which advice is given."""
    return {advice.kind for advice in summary.advice}


def test_a_loader_that_has_not_run_says_so() -> None:
    """The table is there, all zero, and one sentence."""
    loader = millstream.load(range(8), transformations=[abs], batch_size=4)
    summary = loader.summary()
    assert kinds(summary) == {"unmeasured"}
    assert "operations[0], Map(abs)" in str(summary)
    assert "no batch yet" in str(summary)


def test_what_is_slow_is_named() -> None:
    """A slow operation is the bottleneck of a trainer that waits, and is marked in the table."""
    summary = summary_of(range(64), spend, trains=1)
    assert {"waiting", "bottleneck"} <= kinds(summary)
    assert "operations[0], Map(spend), takes" in str(summary)
    assert next(line for line in str(summary).splitlines() if "<- slowest" in line).startswith("operations[0]")
    assert "16 batches of 32 bytes in" in str(summary)


def test_a_slow_trainer_does_not_wait() -> None:
    """What is quick beside the training needs no advice."""
    assert kinds(summary_of(range(64), trains=4)) == {"not_waiting"}


@pytest.mark.parametrize(("source", "is_missing"), [(SlowSource(), True), (QuickSource(), False)], ids=["one", "many"])
def test_missing_batched_reads_are_found(source: Any, is_missing: bool) -> None:
    """A slow source without `__getitems__` is named, one that has it is not."""
    assert ("batched_reads" in kinds(summary_of(source, trains=1))) is is_missing


def test_a_stacking_trainer_is_found() -> None:
    """Behind a Filter, the trainer's thread stacks what workers made: the table says where it is done."""
    text = str(summary_of(range(64), millstream.FilterTransform(bool), workers=1))
    assert re.search(r"^operations\[0\].* workers ", text, re.MULTILINE)
    assert re.search(r"^operations\[1\].* trainer ", text, re.MULTILINE)


def test_the_first_batch_does_not_count_as_waiting() -> None:
    """Starting workers takes long, once: it is shown by itself."""
    with millstream.load(range(64), num_epochs=1, batch_size=4, worker_count=1) as loader:
        for _ in loader:
            pass
        lines = str(loader.summary()).splitlines()
        first, waits = (
            float(re.findall(r"\d+\.\d{3}", line)[0])
            for line in lines
            if line.startswith(("the first batch", "the trainer waits"))
        )
        assert first > 0.0
        assert first + waits == pytest.approx(loader.profile()["next"], abs=0.002)


def test_asking_changes_nothing() -> None:
    """A summary in the middle of a pass leaves the batches as they are."""
    loader = millstream.load(range(64), transformations=[abs], batch_size=4, num_epochs=1)
    batches, seen = iter(loader), []
    for batch in batches:
        loader.summary()
        seen.append(batch.tolist())
    assert seen == [list(range(start, start + 4)) for start in range(0, 64, 4)]
