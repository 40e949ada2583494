"""Finding out how many workers and threads, and how large buffers, make a loader fast enough on this machine.

What is tried is a loader's equal with other settings, one at a time, from the position on where the last one stopped:
so each reads records that nobody has read before, as a trainer does. They take turns, so that what disturbs the
machine for a while does not disturb one of them alone. Of the runs of each, the fastest counts, since what disturbs
only makes slower; and what costs more must have been faster round by round.
"""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple, final

from millstream.checks import as_integer, as_seconds
from millstream.loader.data_loader import DataLoader
from millstream.loader.pipeline.arguments import check_kind
from millstream.loader.showing.tuned import Measurement, Settings, Tuning
from millstream.loader.threads.options import ReadOptions, available_cores
from millstream.loader.timed_passes import TimedPasses

ENOUGH = 0.93
"""Settings that reach this part of the best rate are as good: what is measured again differs by as much."""

MANY_THREADS = 64
"""How many threads are tried beside the default: as many as a store far away may want."""

SIDES = 0.4
"""The part of the time that is left for the neighbours of what was best in the first rounds."""

FEWEST_ROUNDS, CLEARLY = 3, 0.6
"""In fewer rounds than this, what is cheaper is as good if it reaches this part: chance may have done the rest."""

HOPELESS = 0.7
"""Settings that reach less than this part of the best rate in one round are in no further one."""

MOST_TIMES = 3
"""How many times as long as meant a run may be where batches take long."""

FEW = 4
"""Of threads that work at once, this many are waited for."""

ROUNDS = 4
"""How often each of the settings has its turn, at least, where there is time."""

RUNNING = 0.8
"""The part of the time in which batches are drawn: in the rest, workers start."""

WORKER_BYTES = 15_000_000
"""What a worker process takes at least: the interpreter and NumPy."""

LEAST_SECONDS = 0.05
"""How long a run is at least."""

_UNITS = {"": 1, "b": 1, **{f"{unit}b": 1000**power for power, unit in enumerate("kmgt", 1)}}
_UNITS |= {f"{unit}ib": 1024**power for power, unit in enumerate("kmgt", 1)}


def tune(loader: DataLoader, seconds: float = 20, memory: int | str = "4GB") -> Tuning:
    """Returns which worker count, threads and buffers suit a loader on this machine: printed, what to write.

    Loaders that are its equals but for these settings read records for a while, and nothing is done with their
    batches. Of the settings that are nearly as fast as the fastest, the cheapest are advised: the fewest workers, then
    the fewest threads, then the smallest buffers. The batches are the same for all of them. What decides about the
    batches is never touched: source, sampler, operations and shard; nor are `stall_timeout` and `enable_profiling`.

    Args:
        loader: what `DataLoader(...)` or `load(...)` gave. It is left as it is, and may be in use.
        seconds: how long to measure, about: where a batch takes long, the last one is waited for.
        memory: how much memory the batches ahead and the worker processes may take: bytes, or a text such as "4GB"
            (10**9 bytes each) or "500MiB" (2**20 each).

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range; the loader yields no batch; it is in
            debug mode, or its workers are actors of a cluster; one batch takes more than the memory.
        Exception: what the pipeline raises.

    Examples:
        >>> loader = millstream.load(list(range(1000)), num_epochs=1, batch_size=100)
        >>> tuning = millstream.tune(loader, seconds=0.5)
        >>> tuning.arguments.keys() >= {"worker_count", "read_options"}
        True
    """
    check_kind(loader, "loader", DataLoader)
    seconds = as_seconds(seconds, "seconds")
    if seconds == float("inf"):
        raise ValueError("seconds must be finite, got inf.")
    limit = memory_bytes(memory)
    if loader._is_debugging:  # noqa: SLF001  (nobody else asks)
        raise ValueError("A loader in debug mode has no workers and threads to measure: build it without debug=True.")
    if loader.workers is not None:
        raise ValueError(
            f"tune measures worker processes of this machine, but workers={loader.workers} asks for actors of a "
            "cluster: leave workers out."
        )
    return _Tuner(loader, seconds, limit).tuned()


def memory_bytes(memory: int | str) -> int:
    """Returns a number of bytes that is given as one, or as text with a unit.

    Raises:
        TypeError: it is neither.
        ValueError: it is not above 0, or the text is not a number with a unit.
    """
    if not isinstance(memory, str):
        return as_integer(memory, "memory", 1)
    text = memory.strip().lower().replace(" ", "")
    number = text.rstrip("bkmgti")
    try:
        found = float(number) * _UNITS[text[len(number) :]]
    except (KeyError, ValueError):
        raise ValueError(
            f'memory must be a number of bytes, or a text such as "4GB" or "500MiB", got {memory!r}.'
        ) from None
    if not 1 <= found < 2**63:
        raise ValueError(f"memory must be at least 1 byte and less than 2**63, got {memory!r}.")
    return int(found)


class Run(NamedTuple):
    """What one run came to."""

    batches_per_second: float
    records_per_second: float


@final
class _Tuner:
    """Measures settings in turns, until the time is over.

    Args:
        loader: whose equals are measured.
        seconds: how long, all together.
        limit: how many bytes one may take.
    """

    def __init__(self, loader: DataLoader, seconds: float, limit: int) -> None:
        self._loader = loader
        self._seconds = seconds
        self._limit = limit
        self._begin = time.monotonic()
        self._cores = available_cores()
        self._state: bytes | None = None
        self._round = 0
        self._runs: dict[Settings, dict[int, Run]] = {}
        self._too_large: set[Settings] = set()
        self._batch_bytes = 0
        self._batch_records = 1
        self._worker_bytes = WORKER_BYTES

    def tuned(self) -> Tuning:
        """Returns what was found."""
        current = self._current()
        self._measure_batch()
        first = list(dict.fromkeys(self._first_candidates(current)))
        self._take_turns(first, self._seconds * (1 - SIDES))
        sides = [one for one in self._neighbours(self._best()) if one not in first]
        self._take_turns([*self._contenders(), *sides], self._seconds)
        tried = [*first, *sides]
        return Tuning(
            chosen=self._best(),
            current=current,
            measurements=tuple(self._measurement(settings) for settings in sorted(self._runs)),
            memory_limit=self._limit,
            too_large=tuple(sorted(self._too_large)),
            untried=tuple(sorted({*tried} - {*self._runs} - self._too_large)),
            num_cores=self._cores,
        )

    def _current(self) -> Settings:
        workers, reading = self._loader.multiprocessing_options, self._loader.read_options
        return Settings(
            workers.num_workers,
            reading.num_threads,
            workers.per_worker_buffer_size,
            reading.prefetch_buffer_size,
        )

    def _first_candidates(self, current: Settings) -> Iterator[Settings]:
        """Yields what is tried first: what the loader has, threads alone, then more and more workers."""
        plain = ReadOptions()
        yield current
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

    def _measure_batch(self) -> None:
        """Finds out how large a batch is, and how many records it takes."""
        with self._equal_with(Settings(0, 0, 1, 0)) as sibling, iter(sibling) as batches:
            if next(batches, None) is None:
                raise ValueError("This loader yields no batch: there is nothing to measure.")
            self._batch_bytes = int(sibling.metrics()["loader/batch_bytes"])
            self._batch_records = max(1, batches.look().records)

    def _equal_with(self, settings: Settings) -> DataLoader:
        return self._loader._equal_with(  # noqa: SLF001  (nobody else is to make one)
            settings.worker_count, settings.worker_buffer_size, settings.read_options
        )

    def _take_turns(self, candidates: Iterable[Settings], until: float) -> None:
        """Gives each of the settings its turn, again and again, until the time is over."""
        candidates = list(candidates)
        left = until - self._spent()
        seconds = max(LEAST_SECONDS, RUNNING * left / (ROUNDS * max(1, len(candidates))))
        while candidates and self._spent() < until:
            self._round += 1
            for settings in candidates:
                if self._needed(settings) > self._limit:
                    self._too_large.add(settings)
                # Something has to be measured, however little time there is.
                elif self._spent() < until or not self._fitting():
                    self._runs.setdefault(settings, {})[self._round] = self._run(settings, seconds)
            candidates = [settings for settings in self._contenders() if settings in candidates]

    def _contenders(self) -> list[Settings]:
        """Returns the settings that may yet be the best ones."""
        fitting = self._fitting()
        best = max((self._rate(settings) for settings in fitting), default=0.0)
        return [settings for settings in fitting if self._rate(settings) >= HOPELESS * best]

    def _fitting(self) -> list[Settings]:
        """Returns what was measured and is small enough, the cheapest first."""
        return sorted(settings for settings in self._runs if self._needed(settings) <= self._limit)

    def _spent(self) -> float:
        return time.monotonic() - self._begin

    def _needed(self, settings: Settings) -> int:
        """Returns how much memory settings take: batches as the first one, and workers as those that were seen."""
        if settings.worker_count:
            ahead = settings.worker_count * (1 + settings.worker_buffer_size)
            return ahead * self._batch_bytes + settings.worker_count * self._worker_bytes
        # A call is a batch, and there are two in any case.
        return max(2, -(-settings.prefetch_buffer_size // self._batch_records)) * self._batch_bytes

    def _run(self, settings: Settings, seconds: float) -> Run:
        """Measures settings for some seconds, the start of workers left out.

        Everything begins with nothing ready: what is drawn was made in the time that is counted. At the end something
        is ready that does not count, so that a rate is too low rather than too high.
        """
        at_once = 2 * (settings.worker_count or min(settings.num_threads, FEW))
        with self._equal_with(settings) as equal:
            passes = TimedPasses(equal, self._state)
            if settings.worker_count:
                passes.draw_one()
                passes.let_go()
            begin, batches, records = time.perf_counter(), passes.batches, passes.records
            while True:
                passes.draw_one()
                took, drawn = time.perf_counter() - begin, passes.batches - batches
                # Those in work at once come together: to stop at the first one would not do them justice.
                if took >= seconds and (drawn >= at_once or took >= MOST_TIMES * seconds):
                    break
            self._worker_bytes = max(self._worker_bytes, passes.worker_bytes())
            self._state = passes.state
            return Run(drawn / took, (passes.records - records) / took)

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
