"""The summary of a loader after a real run: the table and the advice are about that run.

Where it is about seconds, the clock is the test's own, and only the user's code moves it on. Which numbers call for
which advice is proven in `test_advice.py`.
"""

import re
from typing import Any

import pytest

import millstream
from support.clocks.owned_clock import Spend
from support.faults.user_faults import Unread

SECONDS = 0.125
RECORDS = 64
BATCH = 4

spend = Spend(SECONDS)


def summary_of(source: Any, *operations: Any, trains: int = 0, workers: int = 0) -> Any:
    """Returns the summary after one pass, in which the trainer spends time `trains` times with each batch."""
    with millstream.load(
        source,
        num_epochs=1,
        transformations=operations,
        batch_size=BATCH,
        worker_count=workers,
        read_options=millstream.ReadOptions(num_threads=0),
    ) as loader:
        for _ in loader:
            for _ in range(trains):
                spend(None)
        return loader.summary()


def kinds(summary: Any) -> set[str]:
    return {advice.kind for advice in summary.advice}


def test_a_loader_that_has_not_run_says_so() -> None:
    """The table is there, all zero, and one sentence."""
    loader = millstream.load(range(8), transformations=[abs], batch_size=4)
    summary = loader.summary()
    assert kinds(summary) == {"unmeasured"}
    assert "operations[0], Map(abs)" in str(summary)
    assert "no batch yet" in str(summary)
    assert "seconds  per batch  share" in str(summary)


@pytest.mark.usefixtures("owned_clock")
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


@pytest.mark.usefixtures("owned_clock")
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
