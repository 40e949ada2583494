"""Which settings are tried and advised, on machines that are made up: a number is the clock, and formulas the rates."""

import random
from collections.abc import Callable

import hypothesis
import pytest
from hypothesis import strategies

from millstream.loader.reporting.tuned import Measurement, Settings, Tuning
from millstream.loader.settings_search import (
    CLEARLY,
    ENOUGH,
    FEWEST_ROUNDS,
    ROUNDS,
    WORKER_BYTES,
    Run,
    SettingsSearch,
    cheapest_of,
)

PLAIN = Settings(0, 16, 1, 500)
RECORDS = 100
"""How many records a batch takes."""


class Machine:
    """A machine on which a run takes as long as it is meant to, and workers some time more to start.

    Args:
        rate: how many batches a second some settings make.
        slower: how many times as long everything takes.
        worker_bytes: how much memory a worker takes.
    """

    def __init__(
        self, rate: Callable[[Settings], float], slower: float = 1.0, worker_bytes: int = WORKER_BYTES
    ) -> None:
        self.rate = rate
        self.slower = slower
        self.worker_bytes = worker_bytes
        self.now = 0.0
        self.runs: list[Settings] = []

    def measure(self, settings: Settings, seconds: float) -> Run:
        """Returns what a run comes to."""
        self.now += self.slower * (seconds + (0.1 if settings.worker_count else 0.0))
        self.runs.append(settings)
        rate = self.rate(settings) / self.slower
        return Run(rate, rate * RECORDS, self.worker_bytes if settings.worker_count else 0)

    def tuned(
        self,
        current: Settings = PLAIN,
        *,
        cores: int = 8,
        limit: int = 10**10,
        batch_bytes: int = 1000,
        seconds: float = 20,
    ) -> Tuning:
        """Returns what is found on it."""
        search = SettingsSearch(
            current,
            cores=cores,
            limit=limit,
            batch_bytes=batch_bytes,
            batch_records=RECORDS,
            measure=self.measure,
            spent=lambda: self.now,
        )
        return search.tuned(seconds)


def batches_at_once(settings: Settings) -> int:
    """Returns how many batches are in work at once."""
    return settings.worker_count or max(1, min(settings.num_threads, settings.prefetch_buffer_size // RECORDS))


def waits(settings: Settings) -> float:
    """The rate of work that waits 20 ms for something far away."""
    return batches_at_once(settings) / 0.02


def computes(settings: Settings) -> float:
    """The rate of work that takes Python 20 ms, on as many cores as are wanted."""
    return max(1, settings.worker_count) / 0.02


def reads_one_disk(settings: Settings) -> float:
    """The rate of the same work, where the disk gives 190 batches a second."""
    return min(computes(settings), 190.0)


@pytest.mark.parametrize("slower", [1.0, 10.0], ids=["quick", "slow"])
def test_work_that_waits_gets_threads(slower: float) -> None:
    """Many more batches at once than there are cores, and no worker: also on a machine that is slow all the time."""
    tuning = Machine(waits, slower).tuned(cores=2)
    assert tuning.chosen.worker_count == 0
    assert tuning.chosen.num_threads >= 64
    rates = {one.settings: one.batches_per_second for one in tuning.measurements}
    assert rates[tuning.chosen] == max(rates.values()) > 10 * rates[tuning.current]


@pytest.mark.parametrize(("rate", "workers"), [(computes, 8), (reads_one_disk, 4)], ids=["computes", "one disk"])
def test_work_that_computes_gets_workers(rate: Callable[[Settings], float], workers: int) -> None:
    """As many as make it faster, on as many cores as there are."""
    assert Machine(rate).tuned(seconds=40).chosen == Settings(workers, 16, 1, 500)


def test_what_makes_nothing_faster_is_not_advised() -> None:
    """Where all are as fast, the cheapest that read ahead are: also for a loader that has workers, or no threads."""
    for current in (PLAIN, Settings(4, 16, 2, 500), Settings(0, 0, 1, 500)):
        assert Machine(lambda _: 100.0).tuned(current).chosen == PLAIN


def any_rates(seed: int) -> Callable[[Settings], float]:
    """Returns rates that are as they happen to be."""
    return lambda settings: random.Random(f"{seed} {settings}").choice([1.0, 1.1, 1.3, 1.5, 1.8, 3.0])


@hypothesis.given(
    strategies.floats(0.001, 100),
    strategies.floats(0.01, 1000),
    strategies.integers(1, 64),
    strategies.sampled_from([waits, computes, reads_one_disk, *map(any_rates, range(20))]),
)
def test_nothing_is_left_unsaid(seconds: float, slower: float, cores: int, rate: Callable[[Settings], float]) -> None:
    """However little time there is: what was tried has been measured, or is named; and the last run begins in time.

    What is advised is nearly as fast as the fastest that reads ahead, where that was seen in more than a round or two.
    """
    machine = Machine(rate, slower)
    tuning = machine.tuned(cores=cores, seconds=seconds)
    measured = {one.settings: one for one in tuning.measurements}
    assert PLAIN in measured
    assert measured.keys() == {*machine.runs}
    assert not measured.keys() & {*tuning.untried}
    assert not tuning.too_large
    assert len(machine.runs) == 1 or machine.now <= seconds + slower * (max(0.05, seconds) + 0.1)
    best = max(one.batches_per_second for one in measured.values())
    enough = ENOUGH if min(one.runs for one in measured.values() if is_near(one, best)) >= FEWEST_ROUNDS else CLEARLY
    assert measured[tuning.chosen].batches_per_second >= enough * best


def is_near(one: Measurement, best: float) -> bool:
    """Returns whether a rate is near enough to the best one to be measured again."""
    return one.batches_per_second >= CLEARLY * best


@hypothesis.given(strategies.integers(1, 10**9), strategies.integers(1, 10**11))
def test_memory_is_a_limit(batch_bytes: int, limit: int) -> None:
    """What takes more is not tried and is named; where that is everything, it is an error that says so."""
    machine = Machine(computes)
    # Those without workers have as many batches ahead as PLAIN has, or more.
    if limit < PLAIN.prefetch_buffer_size // RECORDS * batch_bytes and limit < WORKER_BYTES + 2 * batch_bytes:
        with pytest.raises(ValueError, match="None of the settings takes less than memory="):
            machine.tuned(limit=limit, batch_bytes=batch_bytes)
        assert machine.runs == []
        return
    tuning = machine.tuned(limit=limit, batch_bytes=batch_bytes)
    assert all(one.memory_bytes <= limit for one in tuning.measurements)
    assert not {*tuning.too_large} & {*machine.runs}
    assert {PLAIN} <= {*tuning.too_large, *machine.runs}


def test_what_is_hopeless_is_measured_once() -> None:
    """The others have their turns: a few rounds for each, where there is time."""
    machine = Machine(computes)
    tuning = machine.tuned(seconds=40)
    assert machine.runs.count(PLAIN) == 1
    assert machine.runs.count(tuning.chosen) >= ROUNDS


def test_memory_is_that_of_the_workers_that_were_seen() -> None:
    """Workers that turn out to be large are not tried again, nor advised, and are named."""
    machine = Machine(computes, worker_bytes=400 * 10**6)
    tuning = machine.tuned(limit=10**9, seconds=40)
    assert tuning.chosen == Settings(2, 16, 1, 500)
    assert {settings.worker_count for settings in tuning.too_large} >= {4, 8}
    assert 4 not in {settings.worker_count for settings in machine.runs}


@pytest.mark.parametrize(
    ("rates", "chosen"),
    [
        ({0: [100, 100, 100, 100], 1: [105, 104, 105, 104]}, 0),
        ({0: [100, 100, 100, 100], 1: [150, 150, 150, 150], 2: [152, 151, 153, 150]}, 1),
        ({0: [100, 100, 100, 100], 1: [80, 300, 80, 80]}, 0),
        ({0: [100, 40, 100, 100], 1: [150, 50, 160, 150]}, 1),
        ({0: [100, 100], 1: [150, 150]}, 0),
        ({0: [100, 100], 1: [190, 180]}, 1),
    ],
    ids=["as good", "little more", "chance", "busy for a while", "few rounds", "few rounds, clearly"],
)
def test_of_what_is_nearly_as_fast_the_cheapest_is_chosen(rates: dict[int, list[float]], chosen: int) -> None:
    """More workers must be faster round by round, and by much where there were few rounds."""
    runs = {
        Settings(workers, 16, 1, 500): {number: Run(rate, rate) for number, rate in enumerate(of_rounds)}
        for workers, of_rounds in rates.items()
    }
    assert cheapest_of(runs).worker_count == chosen
