"""The views of iterators that only combine streams, on a clock that only the user's code moves on."""

import gc
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream import IterDataset, MapDataset, ReadOptions, experimental
from support.clocks.owned_clock import CLOCK, Spend

SECONDS = 0.125
ROWS = 8
BATCH = 2
spend = Spend(SECONDS)


@pytest.fixture(autouse=True)
def owned_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives this process a clock of the test's own; workers get theirs with what spends."""
    monkeypatch.setattr(time, "perf_counter", CLOCK.perf_counter)


def batches(threads: int = 0, function: Callable[[Any], Any] = spend, rows: int = ROWS) -> IterDataset[Any]:
    """Returns batches whose rows take SECONDS each."""
    return MapDataset.range(rows).map(function).to_iter_dataset(ReadOptions(threads, 8)).batch(BATCH)


def is_any(element: Any) -> bool:
    """Keeps all elements, which is not known in advance."""
    return element is not None


JOINS: dict[str, tuple[Callable[[int], IterDataset[Any]], int, int]] = {
    "mix": (lambda threads: IterDataset.mix([batches(threads), batches(threads)]), 8, 16),
    "interleave": (
        lambda threads: experimental.InterleaveIterDataset([batches(threads) for _ in range(3)], cycle_length=2),
        *(12, 24),
    ),
    "zip": (lambda threads: experimental.ZipIterDataset([batches(threads), batches(threads)]), 4, 16),
    "limit": (lambda threads: experimental.LimitIterDataset(batches(threads), 4), 4, 8),
    "repeat": (lambda threads: experimental.RepeatIterDataset(batches(threads), num_epochs=2), 8, 16),
    "cache": (lambda threads: experimental.CacheIterDataset(batches(threads)), 4, 8),
    "join of joins": (
        lambda threads: experimental.RepeatIterDataset(IterDataset.mix([batches(threads), batches(threads)]), 2),
        *(16, 32),
    ),
}
"""Each join with the number of its elements, and of the rows computed for them."""

each_join = pytest.mark.parametrize("name", JOINS)


def train(iterator: Any) -> int:
    """Reads all elements, computes for SECONDS with each, and returns their number."""
    count = 0
    for _ in iterator:
        CLOCK.spend(SECONDS)
        count += 1
    return count


def stages_of(iterator: Any) -> dict[str, float]:
    """Returns the stages that took time, without the trainer's."""
    profile = iterator.profile()
    return {stage: seconds for stage, seconds in profile.items() if seconds and stage not in {"next", "consumer"}}


@each_join
def test_a_join_measures_the_waits_for_it_and_the_work_below(name: str) -> None:
    """Inline, the time in `next` is that of the streams' operations, and the time between calls is the trainer's."""
    begin, count, rows = JOINS[name]
    with iter(begin(0)) as iterator:
        assert train(iterator) == count
        profile, metrics = iterator.profile(), iterator.metrics()
        stages = stages_of(iterator)
        assert all(stage.endswith("operations[0], Map(spend)") for stage in stages)
        assert sum(stages.values()) == profile["next"] == rows * SECONDS
        assert profile["consumer"] == metrics["loader/trainer_seconds"] == count * SECONDS
        assert metrics["loader/batches"] == metrics["loader/step"] == count
        first = metrics["loader/first_wait_seconds"]
        assert first == rows / count * SECONDS
        assert metrics["loader/wait_seconds"] == rows * SECONDS - first
        assert metrics["loader/batches_per_second"] == count / ((rows + count) * SECONDS)
        assert metrics["loader/wait_share"] == (rows * SECONDS - first) / ((rows + count) * SECONDS - first)
        assert f"{count} batches" in str(iterator.summary())
        assert str(iterator.summary()).startswith(f"{iterator.join.name}, in order\n")


@each_join
@pytest.mark.parametrize("way", ["threads", "workers", "device_put"])
def test_a_join_measures_whoever_does_the_work(name: str, way: str) -> None:
    """With threads, workers or `device_put`, all rows' time is below, and only the trainer's own time is its own."""
    begin, count, rows = JOINS[name]
    dataset: Any = begin(2 if way == "threads" else 0)
    dataset = dataset.mp_prefetch(1) if way == "workers" else dataset
    dataset = experimental.device_put(dataset, None) if way == "device_put" else dataset
    with iter(dataset) as iterator:
        assert train(iterator) == count
        stages, metrics, summary = stages_of(iterator), iterator.metrics(), str(iterator.summary())
        assert sum(seconds for stage, seconds in stages.items() if stage != "hand-over") == rows * SECONDS
        assert metrics["loader/trainer_seconds"] == count * SECONDS
        assert metrics["loader/batches"] == metrics["loader/step"] == count
        assert metrics["loader/workers"] == (way == "workers")
        assert (" workers " in summary) == (way == "workers")


@pytest.mark.parametrize("way", ["here", "threads", "workers below", "workers above", "device_put"])
def test_operations_after_a_join_have_the_views_of_all_below(way: str) -> None:
    """The work of the streams, their workers and their trouble are in the views of the operations after them."""
    rows = MapDataset.range(ROWS).to_iter_dataset(ReadOptions(2 if way == "threads" else 0, 8))
    below = rows.map(spend).filter(is_any)
    below = below.mp_prefetch(1) if way == "workers below" else below
    dataset: Any = IterDataset.mix([below, below]).map(spend)
    dataset = dataset.mp_prefetch(1) if way == "workers above" else dataset
    dataset = experimental.device_put(dataset, None) if way == "device_put" else dataset
    with iter(dataset) as iterator:
        count = train(iterator)
        stages, metrics, summary = stages_of(iterator), iterator.metrics(), iterator.summary()
        for name in "01":
            assert stages[f"{name}: operations[0], Map(spend)"] == ROWS * SECONDS
        assert stages["operations[0], Map(spend)"] == count * SECONDS
        assert str(summary).startswith("mix(weights={0: 1, 1: 1}), in order\n")
        assert metrics["loader/workers"] == {"workers below": 2, "workers above": 1}.get(way, 0)
        assert "a stream of your own" not in str(summary)


def test_a_join_is_seen_to_wait_inside_next() -> None:
    """A trainer that is stuck in `next` of a join waits while it does, and not only afterwards."""
    go_on = threading.Event()
    streams = [MapDataset.range(ROWS).map(lambda _: go_on.wait()).to_iter_dataset(ReadOptions(0)) for _ in "ab"]
    with iter(IterDataset.mix(streams)) as iterator:
        assert iterator.insight.status().waits_for is None
        first = threading.Thread(target=next, args=(iterator,))
        first.start()
        while iterator.insight.status().waits_for is None:
            assert first.is_alive()
        go_on.set()
        first.join()
        assert iterator.insight.status().waits_for is None


def test_a_join_builds_its_views_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a request, `next` leaves them out: once they are attributes of an iterator, all others are slower."""
    monkeypatch.delenv("MILLSTREAM_TOP", raising=False)
    monkeypatch.delenv("MILLSTREAM_METRICS_PORT", raising=False)
    with iter(IterDataset.mix([batches(), batches()])) as iterator:
        assert len(list(iterator)) == ROWS
        assert "insight" not in vars(iterator)


def test_a_join_that_is_gone_has_nothing_below() -> None:
    """The thread that serves it may be the first to see that; it goes on with the others."""
    iterator: Any = iter(IterDataset.mix([batches(), batches()]))
    next(iterator)
    insight, iterator = iterator.insight, iterator.close()
    gc.collect()
    assert insight.is_closed
    assert list(insight.everything_below()) == []


def test_trouble_of_streams_is_in_all_views(tmp_path: Path) -> None:
    """Deaths below a join, and below operations after one, are counted, advised and reported, in their order."""
    mixture = IterDataset.mix([batches().filter(is_any), batches().filter(is_any)])
    for dataset in (mixture, mixture.batch(2)):
        with iter(dataset) as iterator:
            train(iterator)
            for number, insight in enumerate(iterator.insight.everything_below()):
                insight.profiler.died(f"Worker process {number} was killed.")
                CLOCK.spend(SECONDS)
            deaths = iterator.metrics()["loader/worker_deaths"]
            page = iterator.report(tmp_path / "report.html").read_text()
            assert deaths == number + 1 >= 2
            assert f"{number + 1} worker processes died" in str(iterator.summary())
            found = re.findall(r"Worker process (\d) was killed", page)
            assert found == sorted(found)
            assert len(found) == deaths


def test_streams_have_names() -> None:
    """Reading and operations of a few streams are listed by name; those of many are sums, and so are the metrics."""
    slow = Spend(2 * SECONDS)
    with iter(IterDataset.mix({"web": batches(), "code": batches(function=slow)})) as iterator:
        train(iterator)
        own = {"web: operations[0], Map(spend)": ROWS * SECONDS, "code: operations[0], Map(spend)": 2 * ROWS * SECONDS}
        assert stages_of(iterator) == own
        assert [label for label in iterator.profile() if label.endswith("read")] == ["web: read", "code: read"]
        metrics = iterator.metrics()
        assert metrics["loader/seconds/operation_0"] == ROWS * SECONDS
        assert metrics["loader/seconds/operation_2"] == 2 * ROWS * SECONDS
        samples = [line.rpartition(" ")[0] for line in millstream.prometheus_text(iterator).splitlines()]
        assert len(set(samples)) == len(samples)
    with iter(IterDataset.mix([batches() for _ in range(9)])) as iterator:
        train(iterator)
        assert stages_of(iterator) == {"operations[0], Map(spend)": 9 * ROWS * SECONDS}


class Slow(list[int]):
    """A source whose reads take SECONDS."""

    def __getitem__(self, key: Any) -> Any:
        return spend(super().__getitem__(key))


def test_labels_that_occur_twice_stay_apart() -> None:
    """Operations below others are those of the stream; `loader/seconds/read` is the sum over all streams."""
    inline = ReadOptions(0)
    stream = experimental.LimitIterDataset(MapDataset.range(ROWS).map(spend).to_iter_dataset(inline), ROWS)
    zipped = experimental.ZipIterDataset([MapDataset.source(Slow(range(ROWS))).to_iter_dataset(inline)] * 2)
    own = ROWS * SECONDS
    with iter(stream.map(spend).map(spend)) as iterator, iter(zipped) as reading:
        train(iterator), train(reading)
        assert stages_of(iterator) == {
            "stream: operations[0], Map(spend)": own,
            "operations[0], Map(spend)": own,
            "operations[1], Map(spend)": own,
        }
        assert stages_of(reading) == {"0: read": own, "1: read": own}
        assert reading.metrics()["loader/seconds/read"] == 2 * own


def test_many_waits_are_recorded_together_and_none_is_lost() -> None:
    """The sums are exact at any time, also after a thousand elements, a move, and the end of the stream."""
    numbers = MapDataset.range(3000).map(spend).to_iter_dataset(ReadOptions(0))
    with iter(experimental.LimitIterDataset(numbers, 3000)) as iterator:
        for count in range(1, 2501):
            next(iterator)
            CLOCK.spend(2 * SECONDS)
            if count % 700 == 0:
                assert iterator.profile()["next"] == count * SECONDS
            if count == 700:
                # The time after the last one is not known before the next one is requested.
                rate = iterator.metrics()["loader/batches_per_second"]
                assert rate == pytest.approx(699 / (700 * SECONDS + 699 * 2 * SECONDS))
        iterator.seek(1000)
        assert sum(1 for _ in iterator) == 2000
        profile, metrics = iterator.profile(), iterator.metrics()
        assert (profile["next"], profile["consumer"]) == (4500 * SECONDS, 5000 * SECONDS)
        assert (metrics["loader/batches"], metrics["loader/step"]) == (4500, 3000)
        assert metrics["loader/first_wait_seconds"] == 2 * SECONDS


def test_no_wait_is_lost_to_a_thread_that_asks_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whenever another thread reads the measurements, here at each look at the clock, all waits are counted once."""
    iterator: Any = iter(experimental.LimitIterDataset(batches(), 4))

    def perf_counter() -> float:
        iterator.count_delivered()
        return CLOCK.perf_counter()

    monkeypatch.setattr(time, "perf_counter", perf_counter)
    with iterator:
        assert train(iterator) == 4
        assert iterator.profile()["next"] == ROWS * SECONDS
        assert iterator.metrics()["loader/batches"] == 4


def test_measurements_stay_when_other_streams_replace_one() -> None:
    """An interleave closes the datasets that have ended, or that a state replaces, and keeps their sums."""
    dataset = experimental.InterleaveIterDataset([batches(rows=4) for _ in range(5)], cycle_length=2)
    with iter(dataset) as iterator:
        state = iterator.get_state()
        before = 0.0
        for number in range(1, 11):
            next(iterator)
            seconds = stages_of(iterator)["operations[0], Map(spend)"]
            assert seconds == number * BATCH * SECONDS > before
            before = seconds
        iterator.set_state(state)
        assert stages_of(iterator) == {"operations[0], Map(spend)": before}
        assert train(iterator) == 10
        assert stages_of(iterator) == {"operations[0], Map(spend)": 2 * before}


@each_join
def test_a_preview_shows_the_first_elements(name: str) -> None:
    """It draws them once more, so that the position does not change, and neither do the measurements."""
    begin, count, _ = JOINS[name]
    dataset = begin(0)
    with iter(dataset) as iterator, iter(dataset) as other:
        state, first = iterator.get_state(), next(iterator)
        profile = iterator.profile()
        page = iterator.preview(2)
        assert str(page.batches[0]) == str(first)
        assert str(page.batches) == str([next(other), next(other)])
        assert len(iterator.preview(100).batches) == count
        assert "2 of 2 elements" in page._repr_html_()
        assert (iterator.step, iterator.profile()) == (1, profile)
        iterator.set_state(state)


class Held(IterDataset[Any]):
    """The elements of a stream that it keeps in an attribute, and not as its parent."""

    def __init__(self, held: Any) -> None:
        super().__init__()
        self.held = held

    def __iter__(self) -> Any:
        return iter(self.held if isinstance(self.held, IterDataset) else self.held["streams"][0])


@pytest.mark.parametrize("kept", [lambda one: one, lambda one: {"streams": [one]}, Held])
def test_a_preview_computes_in_its_own_thread(kept: Callable[[Any], Any]) -> None:
    """It starts no thread and no process, wherever a user's dataset keeps the streams that it draws from."""
    places: set[tuple[int, threading.Thread]] = set()

    def place(element: int) -> int:
        places.add((os.getpid(), threading.current_thread()))
        return element

    streams = MapDataset.range(8).map(place).to_iter_dataset(ReadOptions(2, 8)).mp_prefetch(2)
    with iter(IterDataset.mix([Held(kept(streams)), batches()])) as iterator:
        assert iterator.preview(4).batches[::2] == [0, 1]
    assert places == {(os.getpid(), threading.current_thread())}


def test_advice_names_streams_that_measure_nothing() -> None:
    """If only the user's own stream is slow, the advice says so, and no stage is blamed."""

    class Own(IterDataset[int]):
        def __iter__(self) -> Any:
            return iter(map(spend, range(ROWS)))

    own: IterDataset[int] = Own()
    with iter(experimental.LimitIterDataset(own, ROWS)) as iterator:
        train(iterator)
        profile = iterator.profile()
        assert profile["next"] == ROWS * SECONDS
        assert stages_of(iterator) == {}
        assert "a stream of your own is slow" in str(iterator.summary())
