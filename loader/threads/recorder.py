"""What happened in the last seconds, and who did it: for timelines. It is off unless asked for.

Guarantees:
    * Memory is bounded: what is too old goes when something new comes.
    * Any thread may note what it did: each note is one append to a deque, so there is no lock.
    * Nothing here looks into an element.
"""

import contextlib
import os
import threading
from collections import deque
from typing import Any, NamedTuple, final

from millstream.loader.pipeline.elements import Elements, Origins

MOST_SPANS = 20_000
"""How many pieces of work are kept: some megabytes."""

SAMPLE_SECONDS = 0.25
"""How often memory is looked at, at most."""

MOST_SAMPLES = 4_000
"""How many looks at the memory of a process are kept."""

TRAINER = "trainer"
"""Who calls `next`."""

STARTS = "starts"
"""The trainer's wait for the first batch of a pass: threads and workers start."""

WAITS = "waits"
"""Its wait inside `next` for any other batch, unless it works there."""

TRAINS = "trains"
"""What it does outside."""


class Span(NamedTuple):
    """A piece of work.

    Attributes:
        who: the trainer, a thread by its name, or a worker.
        process: the number of a worker's process, or of an actor; None in the trainer's process.
        what: a stage by its label; of a worker, all that it did for a call.
        start: when it began, on the clock of `time.perf_counter`.
        stop: when it ended.
        blocks: the first of its blocks and the last one; None where there are none.
        stages: of a worker's call, the seconds of each stage.
    """

    who: str
    process: int | None
    what: str
    start: float
    stop: float
    blocks: tuple[int, int] | None = None
    stages: tuple[tuple[str, float], ...] = ()


class Sample(NamedTuple):
    """The memory of a process at a moment, in bytes."""

    at: float
    who: str
    num_bytes: int


@final
class Recorder:
    """Keeps what happened last."""

    def __init__(self) -> None:
        self.spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self.memory: deque[Sample] = deque(maxlen=MOST_SAMPLES)
        self._trainer: int | None = None
        self._workers: dict[int, float] = {}
        self._sampled_at = -SAMPLE_SECONDS

    def note_stage(self, stage: str, start: float, stop: float, arguments: tuple[Any, ...]) -> None:
        """Notes what a thread of this process did.

        Args:
            stage: which part of the work.
            start: when it began.
            stop: when it ended.
            arguments: what it was given: elements or origins, or the first block and the one after the last.
        """
        is_trainer = threading.get_ident() == self._trainer
        who = TRAINER if is_trainer else threading.current_thread().name
        self.spans.append(Span(who, None, stage, start, stop, _blocks_of(arguments)))

    def note_call(
        self,
        process: int,
        start: float,
        seconds: float,
        blocks: tuple[int, int] | None,
        stages: tuple[tuple[str, float], ...],
        *,
        actor: str | None = None,
    ) -> None:
        """Notes what a worker did for a call; only of a process of this machine is the memory looked at."""
        if actor is None:
            self._workers[process] = start
        spent = tuple((stage, spent) for stage, spent in stages if spent)
        who = f"worker {process}" if actor is None else actor
        self.spans.append(Span(who, process, "call", start, start + seconds, blocks, spent))

    def note_wait(self, start: float, stop: float, *, is_first: bool) -> None:
        """Records a wait of the trainer, for the first batch of a pass or for another one."""
        self._note_trainer(STARTS if is_first else WAITS, start, stop)

    def note_training(self, start: float, stop: float) -> None:
        """Notes that the trainer did something else."""
        self._note_trainer(TRAINS, start, stop)

    def _note_trainer(self, what: str, start: float, stop: float) -> None:
        """Notes what the trainer did; a good moment to look at the memory."""
        self._trainer = threading.get_ident()
        self.spans.append(Span(TRAINER, None, what, start, stop))
        if stop - self._sampled_at >= SAMPLE_SECONDS:
            self._sampled_at = stop
            self._sample(stop)

    def will_work(self) -> None:
        """Notes which thread is the trainer's, before it does anything."""
        self._trainer = threading.get_ident()

    def _sample(self, now: float) -> None:
        """Looks at the memory of this process and of the workers, where the system tells."""
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
