"""A recording of the most recent work, for timelines. It is off unless requested.

Guarantees:
    * Memory is bounded: new entries replace the oldest ones.
    * Any thread may record. Each record is one append to a deque, so there is no lock.
    * Elements are never inspected.
"""

import contextlib
import os
import threading
from collections import deque
from typing import Any, NamedTuple, final

from millstream.loader.pipeline.elements import Elements, Origins

MAX_SPANS = 20_000
"""The number of spans kept, a few megabytes."""

SAMPLE_SECONDS = 0.25
MAX_SAMPLES = 4_000
TRAINER = "trainer"
"""The name of the thread that calls `next`."""

STARTS = "starts"
"""The trainer's wait for the first batch of a pass, while threads and workers start."""

WAITS = "waits"
"""The trainer's wait in `next` for any other batch, unless it works there itself."""

TRAINS = "trains"
"""The trainer's time outside `next`."""


class Span(NamedTuple):
    """An interval of work, on the clock of `time.perf_counter`."""

    who: str  # The trainer, the name of a thread, or a worker.
    process: int | None  # The process ID of a worker, or the number of an actor; None in the trainer's process.
    what: str  # The label of a stage; for a worker, its complete call.
    start: float
    stop: float
    blocks: tuple[int, int] | None = None  # The first and the last block; None without blocks.
    stages: tuple[tuple[str, float], ...] = ()  # The seconds of each stage of a worker's call.


class Sample(NamedTuple):
    """The memory of a process at one time, in bytes."""

    at: float
    who: str
    num_bytes: int


@final
class Recorder:
    """Keeps the most recent spans and samples."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=MAX_SPANS)
        self.memory: deque[Sample] = deque(maxlen=MAX_SAMPLES)
        self._trainer: int | None = None
        self._workers: dict[int, float] = {}
        self._sampled_at = -SAMPLE_SECONDS

    def record_stage(self, stage: str, start: float, stop: float, arguments: tuple[Any, ...]) -> None:
        """Records work of a thread of this process.

        Its first argument is elements or origins, or the first block, before the block after the last.
        """
        is_trainer = threading.get_ident() == self._trainer
        who = TRAINER if is_trainer else threading.current_thread().name
        self.spans.append(Span(who, None, stage, start, stop, _blocks_of(arguments)))

    def record_call(
        self,
        process: int,
        start: float,
        seconds: float,
        blocks: tuple[int, int] | None,
        stages: tuple[tuple[str, float], ...],
        *,
        actor: str | None = None,
    ) -> None:
        """Records the call of a worker. Memory is sampled only for processes of this machine."""
        if actor is None:
            self._workers[process] = start
        spent = tuple((stage, spent) for stage, spent in stages if spent)
        who = f"worker {process}" if actor is None else actor
        self.spans.append(Span(who, process, "call", start, start + seconds, blocks, spent))

    def record_trainer(self, what: str, start: float, stop: float) -> None:
        """Records a span of the trainer (STARTS, WAITS or TRAINS), and samples memory if it is time."""
        self._trainer = threading.get_ident()
        self.spans.append(Span(TRAINER, None, what, start, stop))
        if stop - self._sampled_at >= SAMPLE_SECONDS:
            self._sampled_at = stop
            self._sample(stop)

    def will_work(self) -> None:
        self._trainer = threading.get_ident()

    def _sample(self, now: float) -> None:
        for who, process in [(TRAINER, os.getpid()), *((f"worker {number}", number) for number in list(self._workers))]:
            with contextlib.suppress(OSError, ValueError, IndexError):
                # Without pathlib, which a worker would have to import before its first batch.
                with open(f"/proc/{process}/statm", encoding="ascii") as file:  # noqa: PTH123
                    pages = int(file.read().split()[1])
                self.memory.append(Sample(now, who, pages * os.sysconf("SC_PAGE_SIZE")))
                continue
            self._workers.pop(process, None)


def _blocks_of(arguments: tuple[Any, ...]) -> tuple[int, int] | None:
    first = arguments[0]
    if isinstance(first, Elements):
        first = first.origins
    if isinstance(first, Origins):
        return (int(first.block[0]), int(first.block[-1])) if len(first) else None
    return (first, arguments[1] - 1) if isinstance(first, int) else None
