"""Which settings of a loader are tried, in which order and how often, and which of them are advised.

They take turns, so that what disturbs the machine for a while does not disturb one of them alone. Of the runs of each,
the fastest counts, since what disturbs only makes slower; and what costs more must have been faster round by round.

Nothing is measured here, and no clock is read: both are given, so that what is decided can be tried out on machines
that nobody has built.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple, final

from millstream.loader.reporting.tuned import Measurement, Settings, Tuning
from millstream.loader.threads.options import ReadOptions

ENOUGH = 0.93
"""Settings that reach this part of the best rate are as good: what is measured again differs by as much."""

MANY_THREADS = 64
"""How many threads are tried beside the default: as many as a store far away may want."""

SIDES = 0.4
"""The part of the time that is left for the neighbours of what was best in the first rounds."""

FEWEST_ROUNDS, CLEARLY = 3, 0.6
"""In fewer rounds than this, what is cheaper is as good if it reaches this part: chance may have done the rest.

What does not reach it is in no further round, so that nothing is advised which was given up.
"""

ROUNDS = 4
"""How often each of the settings has its turn, at least, where there is time."""

RUNNING = 0.8
"""The part of the time in which batches are drawn: in the rest, workers start."""

WORKER_BYTES = 15_000_000
"""What a worker process takes at least: the interpreter and NumPy."""

LEAST_SECONDS = 0.05
"""How long a run is at least."""


class Run(NamedTuple):
    """What one run came to.

    Attributes:
        batches_per_second: how many batches.
        records_per_second: how many records were used up for them.
        worker_bytes: how much memory of its own the largest worker process had; 0 without any.
    """

    batches_per_second: float
    records_per_second: float
    worker_bytes: int = 0


@final
class SettingsSearch:
    """Has settings measured in turns, until the time is over.

    Args:
        current: what the loader has.
        cores: how many cores the work may use.
        limit: how many bytes settings may take.
        batch_bytes: how large a batch is.
        batch_records: how many records it takes.
        measure: measures settings for about some seconds.
        spent: says how many seconds of those that there are have passed.
    """

    def __init__(
        self,
        current: Settings,
        *,
        cores: int,
        limit: int,
        batch_bytes: int,
        batch_records: int,
        measure: Callable[[Settings, float], Run],
        spent: Callable[[], float],
    ) -> None:
        self._current = current
        self._cores = cores
        self._limit = limit
        self._batch_bytes = batch_bytes
        self._batch_records = batch_records
        self._measure = measure
        self._spent = spent
        self._round = 0
        self._runs: dict[Settings, dict[int, Run]] = {}
        self._too_large: set[Settings] = set()
        self._worker_bytes = WORKER_BYTES

    def tuned(self, seconds: float) -> Tuning:
        """Returns what was found when this many seconds have passed.

        Raises:
            ValueError: none of the settings takes little enough memory.
        """
        first = list(dict.fromkeys(self._first_candidates()))
        self._take_turns(first, seconds * (1 - SIDES))
        sides = [one for one in self._neighbours(self._best()) if one not in first]
        self._take_turns([*self._contenders(), *sides], seconds)
        tried = [*first, *sides]
        return Tuning(
            chosen=self._best(),
            current=self._current,
            measurements=tuple(self._measurement(settings) for settings in sorted(self._runs)),
            memory_limit=self._limit,
            too_large=tuple(sorted(self._too_large)),
            untried=tuple(sorted({*tried} - {*self._runs} - self._too_large)),
            num_cores=self._cores,
        )

    def _first_candidates(self) -> Iterator[Settings]:
        """Yields what is tried first: what the loader has, threads alone, then more and more workers."""
        plain = ReadOptions()
        yield self._current
        yield Settings(0, plain.num_threads, 1, plain.prefetch_buffer_size)
        yield self._threads(MANY_THREADS)
        for count in sorted({self._cores, *(1 << power for power in range(self._cores.bit_length()))}):
            yield Settings(count, plain.num_threads, 1, plain.prefetch_buffer_size)

    def _threads(self, depth: int) -> Settings:
        """Returns settings without workers, in which this many batches are in work, and as many ready."""
        return Settings(0, depth, 1, max(ReadOptions().prefetch_buffer_size, 2 * depth * self._batch_records))

    def _neighbours(self, best: Settings) -> Iterator[Settings]:
        """Yields what is tried around the best of the first."""
        if not best.worker_count:
            yield self._threads(MANY_THREADS // 2)
            if best.num_threads >= MANY_THREADS:
                yield self._threads(MANY_THREADS // 4)
                yield self._threads(2 * best.num_threads)
            return
        yield dataclasses.replace(best, worker_buffer_size=2 * best.worker_buffer_size)
        yield dataclasses.replace(best, num_threads=MANY_THREADS)
        if best.worker_count > 3:
            yield dataclasses.replace(best, worker_count=best.worker_count * 3 // 4)

    def _take_turns(self, candidates: Iterable[Settings], until: float) -> None:
        """Gives each of the settings its turn, again and again, until the time is over."""
        candidates = list(candidates)
        left = until - self._spent()
        seconds = max(LEAST_SECONDS, RUNNING * left / (ROUNDS * max(1, len(candidates))))
        # Something has to be measured, however little time there is.
        while candidates and (self._spent() < until or not self._fitting()):
            self._round += 1
            for settings in candidates:
                if self._needed(settings) > self._limit:
                    self._too_large.add(settings)
                elif self._spent() < until or not self._fitting():
                    run = self._measure(settings, seconds)
                    self._worker_bytes = max(self._worker_bytes, run.worker_bytes)
                    self._runs.setdefault(settings, {})[self._round] = run
            candidates = [settings for settings in self._contenders() if settings in candidates]

    def _contenders(self) -> list[Settings]:
        """Returns the settings that may yet be the best ones."""
        fitting = self._fitting()
        best = max((self._rate(settings) for settings in fitting), default=0.0)
        return [settings for settings in fitting if self._rate(settings) >= CLEARLY * best]

    def _fitting(self) -> list[Settings]:
        """Returns what was measured and is small enough, the cheapest first."""
        return sorted(settings for settings in self._runs if self._needed(settings) <= self._limit)

    def _needed(self, settings: Settings) -> int:
        """Returns how much memory settings take: batches as the first one, and workers as those that were seen."""
        if settings.worker_count:
            ahead = settings.worker_count * (1 + settings.worker_buffer_size)
            return ahead * self._batch_bytes + settings.worker_count * self._worker_bytes
        # A call is a batch, and there are two in any case.
        return max(2, -(-settings.prefetch_buffer_size // self._batch_records)) * self._batch_bytes

    def _best(self) -> Settings:
        """Returns the cheapest settings that are nearly as fast as the fastest."""
        # Others may be as fast for a trainer that only waits, but do nothing while one works.
        fitting = [one for one in self._fitting() if one.worker_count or one.read_options.reads_ahead]
        if not fitting:
            raise ValueError(
                f"None of the settings takes less than memory={self._limit:,} bytes: a batch takes "
                f"{self._batch_bytes:,}, a worker process {self._worker_bytes:,}. Allow more, or make batches smaller."
            )
        return cheapest_of({one: self._runs[one] for one in fitting})

    def _rate(self, settings: Settings) -> float:
        return max(run.batches_per_second for run in self._runs[settings].values())

    def _measurement(self, settings: Settings) -> Measurement:
        best = max(self._runs[settings].values())
        return Measurement(
            settings,
            best.batches_per_second,
            best.records_per_second,
            memory_bytes=self._needed(settings),
            runs=len(self._runs[settings]),
        )


def cheapest_of(runs: Mapping[Settings, Mapping[int, Run]]) -> Settings:
    """Returns the cheapest settings that are nearly as fast as the fastest.

    Args:
        runs: what the settings came to, by round; the cheaper come first.
    """
    chosen, *others = runs
    for settings in others:
        if _is_faster(runs[settings], runs[chosen]):
            chosen = settings
    return chosen


def _is_faster(own: Mapping[int, Run], cheaper: Mapping[int, Run]) -> bool:
    """Returns whether settings are worth their price: at their best, and in most rounds that both were in."""
    rounds = own.keys() & cheaper.keys()
    enough = ENOUGH if len(rounds) >= FEWEST_ROUNDS else CLEARLY
    if max(own.values()).batches_per_second * enough < max(cheaper.values()).batches_per_second:
        return False
    wins = [own[one].batches_per_second * enough > cheaper[one].batches_per_second for one in rounds]
    return sum(wins) * 4 >= len(wins) * 3
