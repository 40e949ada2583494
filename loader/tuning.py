"""Finding out how many workers and threads, and how large buffers, make a loader fast enough on this machine.

What is tried is a loader's equal with other settings, one at a time, from the position on where the last one stopped:
so each reads records that nobody has read before, as a trainer does.
"""

import time
from typing import final

from millstream.checks import as_integer, as_seconds
from millstream.loader.data_loader import DataLoader
from millstream.loader.pipeline.arguments import check_kind
from millstream.loader.reporting.tuned import Settings, Tuning
from millstream.loader.settings_search import Run, SettingsSearch
from millstream.loader.threads.options import available_cores
from millstream.loader.timed_passes import TimedPasses

MOST_TIMES = 3
"""How many times as long as meant a run may be where batches take long."""

FEW = 4
"""Of threads that work at once, this many are waited for."""

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
        seconds: how many seconds to measure, about: where a batch takes long, the last one is waited for.
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
    begin = time.monotonic()
    equals = _Equals(loader)
    batch_bytes, batch_records = equals.batch_size()
    search = SettingsSearch(
        _settings_of(loader),
        cores=available_cores(),
        limit=limit,
        batch_bytes=batch_bytes,
        batch_records=batch_records,
        measure=equals.run,
        spent=lambda: time.monotonic() - begin,
    )
    return search.tuned(seconds)


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


def _settings_of(loader: DataLoader) -> Settings:
    workers, reading = loader.multiprocessing_options, loader.read_options
    return Settings(
        workers.num_workers,
        reading.num_threads,
        workers.per_worker_buffer_size,
        reading.prefetch_buffer_size,
    )


@final
class _Equals:
    """Draws batches from a loader's equals, each from the position on where the last one stopped.

    Args:
        loader: whose equals are measured.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._loader = loader
        self._state: bytes | None = None

    def batch_size(self) -> tuple[int, int]:
        """Returns how many bytes a batch has, and how many records it takes.

        Raises:
            ValueError: there is none.
        """
        with self._equal_with(Settings(0, 0, 1, 0)) as equal, iter(equal) as batches:
            if next(batches, None) is None:
                raise ValueError("This loader yields no batch: there is nothing to measure.")
            return int(equal.metrics()["loader/batch_bytes"]), max(1, batches.look().records)

    def run(self, settings: Settings, seconds: float) -> Run:
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
            self._state = passes.state
            return Run(drawn / took, (passes.records - records) / took, passes.worker_bytes())

    def _equal_with(self, settings: Settings) -> DataLoader:
        return self._loader._equal_with(  # noqa: SLF001  (nobody else is to make one)
            settings.worker_count, settings.worker_buffer_size, settings.read_options
        )
