"""The choice of worker_count="auto": how many worker processes a loader has, from measurements of its trainer.

Workers take work off this process. They help if the trainer waits, if this process computes meanwhile, and if a batch
takes longer than its hand-over. So their number doubles while that shortens the waits, beginning with two, or with as
many as cores that this process uses: its threads may use all of them, and still wait for each other. A step that did
not help is undone, and not tried again. Workers that have little to do end.

If this process waits, too, for a disk or a network, no workers start. More of its threads read, instead.

Guarantees:
    * The choice changes no batch: it only decides who computes them.
    * It settles. Each number is tried once from below, and left downwards once. Only a loader whose first workers did
      not help tries again, after a pause that grows.
"""

import dataclasses
import math
from typing import NamedTuple, final

from millstream.loader.measuring import Scheduling
from millstream.loader.threads.options import ReadOptions

STARVING = 0.1
"""The trainer waits too much if it does so for more than this share of its time."""

COMPUTING = 0.5
"""This process computes if it uses more than this number of cores while the trainer waits, or would if it got them."""

FULL = 0.9
"""Threads use all cores if they use this share of them while the trainer waits."""

MAX_LOCKED_CORES = 4
"""Threads that use more cores than this hardly wait for each other. If there is no other core, workers cannot help."""

FULL_SECONDS = 1.0
"""The time for which such threads are left alone: there may be too many, and the search for fewer takes this long."""

BATCH_SECONDS = 75e-6
"""The processor time of a batch that may be worth its hand-over. If many batches are sent together, that takes 20 µs in
the trainer: two workers deliver tiny batches of 100 µs 1.25 times as fast.
"""

ELEMENT_SECONDS = 1e-4
"""The same for a single element, which takes less than a batch, but some do not even take 1 µs."""

WIDENING = 4
"""The threads of this process become as many as those of this number of workers, if it waits and no other number was
given. What waits needs no cores.
"""

BETTER = 0.9
"""A step was worthwhile if the waits per batch are at most this share of those before."""

STEADY = 1.25
"""Waits per batch are compared with later ones once two windows in a row have nearly the same: no more than this factor
more than before, and not fewer by what would make workers worthwhile. The first batches of a loader are ready, so that
the trainer waits less for them; or they take longer, because nothing is in the caches of the processor.
"""

TRIAL_SECONDS = 0.5
TRIAL_BATCHES = 4
"""A step is judged after at least this time, and after this number of batches."""

NUM_TRIALS = 3
"""The number of such times in a row in which a step that is undone has not helped: workers begin slowly, and other
programs disturb.
"""

FIRST_WORKERS = 2

PAUSE_SECONDS = 15.0
PAUSE_GROWTH = 4.0
"""After workers that did not help, none start for this time; after the next ones, for a multiple of it."""

REST_SECONDS = 10.0
"""Workers that have little to do for this time end."""

RESTING = 0.02
"""They may have little to do if the trainer waits for less than this share of its time."""

IDLE = 0.4
"""They have little to do if they use less than this share of a core each: half of them would do."""


WINDOW_SECONDS = 0.1
MAX_WINDOW_SECONDS = 0.5
"""The choice is considered at most this often: first soon, and less and less often while nothing changes."""

COSTLY_SECONDS = 2e-4
"""Measuring a request takes some 5 µs, a noticeable part of shorter ones."""

PAUSE_OF_WINDOWS = 1.0
"""So these are not measured for this time between two windows."""

MIN_SLICE_SECONDS = 1e-4
"""Threads that compute have a core for longer than this when they get one, on average: 115 to 360 µs while they also
wait for each other, on a machine whose cores each had some eight processes ready. Threads that sleep had 18 to 76 µs.
"""


def number_of_ms(seconds: float) -> str:
    """Returns a time in milliseconds, with a decimal, or with two significant digits if it is short."""
    return f"{seconds * 1e3:.1f}" if seconds >= 1e-3 else f"{seconds * 1e3:.2g}"


def widened(reading: ReadOptions) -> ReadOptions | None:
    """Returns the options for as many threads as several workers would have; None if a number was given."""
    if reading.num_threads != ReadOptions.num_threads:
        return None
    ahead = WIDENING * reading.prefetch_buffer_size
    return dataclasses.replace(reading, num_threads=WIDENING * reading.num_threads, prefetch_buffer_size=ahead)


class Window(NamedTuple):
    """Measurements of some time of the trainer's.

    Attributes:
        seconds: its length.
        batches: the number of batches, or elements, that were delivered.
        waited: the seconds that the trainer was inside `next`.
        computed: the processor time of this process meanwhile, in seconds.
        worked: the processor time of the workers, in seconds.
        delayed: the seconds in which threads of this process that compute had no core; 0 if that is not known.
    """

    seconds: float = 0.0
    batches: int = 0
    waited: float = 0.0
    computed: float = 0.0
    worked: float = 0.0
    delayed: float = 0.0

    def __add__(self, other: "Window") -> "Window":  # type: ignore[override]  # Not a sequence.
        return Window(
            self.seconds + other.seconds,
            self.batches + other.batches,
            self.waited + other.waited,
            self.computed + other.computed,
            self.worked + other.worked,
            self.delayed + other.delayed,
        )

    @property
    def wait_share(self) -> float:
        return self.waited / self.seconds

    @property
    def cores(self) -> float:
        """The number of cores that this process used while the trainer waited."""
        return self.computed / max(self.waited, 1e-9)

    @property
    def wanted_cores(self) -> float:
        """The number of cores that it would have used if other programs had left them."""
        return self.cores + self.delayed / self.seconds

    @property
    def seems_to_wait(self) -> bool:
        """True if the trainer waits too much, and this process, too, unless it lacks cores."""
        return self.wait_share > STARVING and self.cores <= COMPUTING

    @property
    def wait_per_batch(self) -> float:
        return self.waited / self.batches

    def with_scheduling(self, before: Scheduling, after: Scheduling) -> "Window":
        """Returns it with the time in which threads of this process had no core, if they compute.

        Threads that wait for something else have one for moments only, and may be late at each of them.
        """
        computed, delayed, slices = (now - then for now, then in zip(after, before, strict=True))
        # The time of a thread that has ended is no longer reported.
        return self._replace(delayed=max(0.0, delayed)) if computed > MIN_SLICE_SECONDS * slices else self


@final
class Windows:
    """Divides the time of a trainer into windows in which its requests are measured. It knows no clock.

    Attributes:
        window: the requests that ended in the window so far.
    """

    def __init__(self) -> None:
        self.window = Window()
        self._since: float | None = None
        self._length = 0.0

    @property
    def have_begun(self) -> bool:
        return self._since is not None

    def are_due(self, now: float) -> bool:
        """Returns True if a request that begins now is to be measured."""
        return self._since is None or now >= self._since

    def begin(self, now: float, *, rests: bool = False) -> None:
        """Begins the next window, longer than the last one. Or, if it `rests`, a short one after a pause."""
        is_short = rests or self._since is None
        self._length = min(WINDOW_SECONDS if is_short else 2 * self._length, MAX_WINDOW_SECONDS)
        self.window, self._since = Window(), now + PAUSE_OF_WINDOWS if rests else now

    def add(self, now: float, request: Window) -> Window | None:
        """Adds a request that has ended now. Returns the window if it is complete, else None."""
        if self._since is None:
            raise AssertionError("a window has begun")
        self.window += request
        seconds = now - self._since
        is_complete = seconds >= self._length and self.window.batches
        return self.window._replace(seconds=seconds) if is_complete else None


@final
class WorkerChoice:
    """The number of workers, and the reason for it.

    Args:
        limit: the largest number of workers.
        min_seconds: the processor time above which a batch, or an element, is worth its hand-over.
        more_reads: the options for more threads of this process, used if it waits; None for no more.

    Attributes:
        limit: the largest number of workers.
        reading: the options for more threads once they are needed, else None.
        num_workers: the number of workers that there should be now.
        reason: why, as a part of a sentence.
    """

    def __init__(self, limit: int, min_seconds: float = BATCH_SECONDS, more_reads: ReadOptions | None = None) -> None:
        self.num_workers = 0
        self.reason = "nothing was measured yet"
        self.limit = self._max_workers = limit
        self._min_workers = 1
        self._has_rested = False
        self._min_seconds = min_seconds
        self._more_reads = more_reads
        self.reading: ReadOptions | None = None
        self._logged = ""
        # The number before the step that is on trial, and the waits per batch then; None after the trial.
        self._tried: tuple[int, float] | None = None
        # The waits per batch in the last window without workers, and True if they change, so that one more is needed.
        self._waited_before = 0.0
        self._is_changing = False
        self._skips = False
        self._num_trials = 0
        self._trial = Window()
        self._pause, self._next_pause = 0.0, PAUSE_SECONDS
        self._full_seconds = 0.0

    @property
    def text(self) -> str:
        """The choice and its reason."""
        noun = "worker process" if self.num_workers == 1 else "worker processes"
        return f"{self.num_workers or 'no'} {noun}: {self.reason}"

    def take_news(self) -> str:
        """Returns `text` if it is another than at the last call, else nothing: a pass begins with a known choice."""
        before, self._logged = self._logged, self.text
        return "" if before == self.text else self.text

    @property
    def is_final(self) -> bool:
        """True if there will never be workers."""
        return self._max_workers == 0

    @property
    def is_settled(self) -> bool:
        """True if no step is on trial."""
        return self._tried is None

    def rests_after(self, window: Window) -> bool:
        """Returns True if the next window is not urgent, and the trainer would notice what measuring it takes."""
        is_urgent = self._is_changing or not self.is_settled
        return not is_urgent and window.wait_share > STARVING and window.wait_per_batch < COSTLY_SECONDS

    def stay(self, reason: str) -> None:
        """Ends the choice: all work stays in this process."""
        self._go(0, reason)
        self._max_workers = 0

    def keep(self, num_workers: int, reason: str) -> None:
        """Ends the growth: there are this many workers, and no more."""
        self._tried, self._max_workers = None, num_workers
        self._go(num_workers, reason)

    def record(self, window: Window) -> None:
        """Decides by the measurements since the last time. While workers start, there are none."""
        if self.is_final:
            return
        if not self.num_workers:
            self._consider_workers(window)
            return
        if self._skips:
            # Its batches were begun by the previous number of workers.
            self._skips = False
            return
        self._trial += window
        if self._tried is not None:
            if self._trial.seconds >= TRIAL_SECONDS and self._trial.batches >= TRIAL_BATCHES:
                self._judge(*self._tried)
        elif window.wait_share > STARVING:
            self._grow(window)
        elif self._trial.seconds >= REST_SECONDS:
            self._rest()

    def _consider_workers(self, window: Window) -> None:
        waited_before, self._waited_before = self._waited_before, window.wait_per_batch
        self._is_changing = False
        self._pause -= window.seconds
        if self._pause > 0:
            return
        waits = f"the trainer waits {window.wait_share:.0%} of its time"
        each = window.computed / window.batches
        computes = f"{waits}, in which this process uses {window.cores:.1f} cores"
        if window.wait_share <= STARVING:
            self.reason = waits
        elif window.wanted_cores <= COMPUTING:
            self.reading = self._more_reads
            threads = "" if self.reading is None else f", so up to {self.reading.num_threads} threads read"
            self.reason = f"{computes}: it waits, too{threads}"
        elif each <= self._min_seconds:
            self.reason = (
                f"{waits}, but computes a batch in {number_of_ms(each)} ms, little more than a hand-over takes"
            )
        elif window.cores >= FULL * self.limit and (
            window.cores > MAX_LOCKED_CORES or self._full_seconds < FULL_SECONDS
        ):
            self._full_seconds += window.seconds
            self.reason = f"{computes} of {self.limit}: there is none left"
        elif not BETTER * waited_before < window.wait_per_batch <= STEADY * waited_before:
            self._is_changing = True
            self.reason = f"{computes}: that is measured once more"
        else:
            self._tried = 0, window.wait_per_batch
            first = max(FIRST_WORKERS, math.ceil(window.cores))
            self._go(min(first, self._max_workers), f"without, {computes}, {number_of_ms(each)} ms for a batch")

    def _judge(self, before: int, waited_before: float) -> None:
        """Keeps the number on trial, or goes back to the one before."""
        trial, number = self._trial, self.num_workers
        self._trial = Window()
        self._num_trials += 1
        if trial.wait_share <= STARVING or trial.wait_per_batch <= BETTER * waited_before:
            self._tried = None
            share = trial.wait_per_batch / max(waited_before, 1e-9)
            earlier = f"of that with {before}" if before else "of that without"
            self.reason += f"; the wait for a batch is {share:.0%} {earlier}"
            if trial.wait_share > STARVING:
                self._grow(trial)
            return
        if self._num_trials < NUM_TRIALS:
            return
        self._tried = None
        then, now = number_of_ms(waited_before), number_of_ms(trial.wait_per_batch)
        change = f"the wait for a batch was {then} ms, and {now} ms with"
        if before:
            self._max_workers = before
            self._go(before, f"{change} {number} of them")
        else:
            self._pause, self._next_pause = self._next_pause, PAUSE_GROWTH * self._next_pause
            self._go(0, f"{change} {number} of them")

    def _grow(self, window: Window) -> None:
        if self.num_workers < self._max_workers:
            self._tried = self.num_workers, window.wait_per_batch
            more = min(2 * self.num_workers, self._max_workers)
            if self._has_rested:
                # Fewer were not enough.
                self._min_workers = more
            self._go(more, f"with {self.num_workers}, the trainer waits {window.wait_share:.0%} of its time")

    def _rest(self) -> None:
        trial, number = self._trial, self.num_workers
        self._trial = Window()
        fewer = max(self._min_workers, math.ceil(number / 2))
        if fewer < number and trial.wait_share < RESTING and trial.worked < IDLE * number * trial.seconds:
            self._has_rested = True
            self._go(fewer, f"{number} used {trial.worked / trial.seconds:.1f} cores")

    def _go(self, num_workers: int, reason: str) -> None:
        self.num_workers, self.reason = num_workers, reason
        self._trial, self._num_trials, self._skips = Window(), 0, True
