"""The choice of worker_count="auto": workers for what computes, and as many as shorten the waits; then it settles."""

from collections.abc import Callable

import pytest

from millstream.loader.engine.worker_choice import (
    BATCH_SECONDS,
    FULL_SECONDS,
    PAUSE_SECONDS,
    REST_SECONDS,
    TRIAL_BATCHES,
    TRIAL_SECONDS,
    Window,
    Windows,
    WorkerChoice,
    widened,
)
from millstream.loader.measuring import Scheduling
from millstream.loader.threads.options import ReadOptions

CORES = 16
SECONDS = 0.6 * TRIAL_SECONDS


def window(seconds_of_wait: float, *, trainer: float = 0.0, cores: float = 1.0, busy: float = 1.0) -> Window:
    """Returns measurements of a trainer that waits for each batch, works, and waits for the next one.

    This process uses some cores during the waits, and each of the workers a share of one.
    """
    batches = max(1, round(SECONDS / (seconds_of_wait + trainer)))
    waited = batches * seconds_of_wait
    return Window(batches * (seconds_of_wait + trainer), batches, waited, cores * waited, busy * SECONDS)


STARVED = window(0.02)


def starting(limit: int) -> WorkerChoice:
    """Returns a choice after two equal measurements, whose first workers are about to start."""
    choice = WorkerChoice(limit)
    choice.record(STARVED)
    choice.record(STARVED)
    assert choice.num_workers == min(2, limit)
    return choice


def settled(choice: WorkerChoice, measure: Callable[[int], Window], num_windows: int = 60) -> list[int]:
    """Returns the numbers of workers that a choice goes through, given the measurements with each number."""
    numbers = [choice.num_workers]
    for _ in range(num_windows):
        choice.record(measure(choice.num_workers))
        if choice.num_workers != numbers[-1]:
            numbers.append(choice.num_workers)
    return numbers


def ends(windows: Windows, begin: float, step: float, count: int = 1, *, rests: bool = False) -> list[float]:
    """Returns the lengths of the windows of a minute with a request in each step of it."""
    windows.begin(begin, rests=rests)
    lengths = []
    for number in range(1, round(60 / step)):
        now = begin + number * step
        if windows.are_due(now - step) and (window := windows.add(now, Window(0.0, count, step / 2))) is not None:
            assert window.waited == pytest.approx(window.batches * step / 2)
            assert window.batches * step <= window.seconds + step
            lengths.append(window.seconds)
            windows.begin(now, rests=rests)
    return lengths


def test_windows_become_longer_while_nothing_changes() -> None:
    """The first one ends after 0.1 s, and each takes twice as long as the one before, up to half a second."""
    windows = Windows()
    has_begun = [windows.have_begun]
    assert windows.are_due(0.0)
    lengths = ends(windows, 100.0, 1 / 64)
    has_begun.append(windows.have_begun)
    assert has_begun == [False, True]
    assert lengths[:5] == pytest.approx([0.1, 0.2, 0.4, 0.5, 0.5], abs=1 / 64)
    assert set(lengths[3:]) == {0.5}


def test_a_window_has_a_request_that_delivered_something() -> None:
    """A slow batch makes it longer, and it never ends without one."""
    assert ends(Windows(), 0.0, 3.0)[0] == 3.0
    assert ends(Windows(), 0.0, 0.5, count=0) == []


def test_windows_of_quick_requests_are_short_and_rare() -> None:
    """They are 0.1 s long, and there is a second between them."""
    lengths = ends(Windows(), 0.0, 1 / 64, rests=True)
    assert set(lengths) == {7 / 64}
    assert len(lengths) in range(52, 56)


def test_only_requests_that_measuring_would_slow_down_are_left_out() -> None:
    """The trainer waits for them, they are short, and no step is on trial: what is measured then is urgent."""
    choice, quick = WorkerChoice(CORES), window(1e-4)
    assert choice.rests_after(quick)
    assert not choice.rests_after(window(3e-4))
    assert not choice.rests_after(window(1e-4, trainer=0.01))
    # It is measured once more, and then a step is on trial.
    for is_settled in (True, False):
        choice.record(quick)
        assert choice.is_settled == is_settled
        assert not choice.rests_after(quick)


@pytest.mark.parametrize(("slices", "delayed"), [(1_000, 0.3), (10_000, 0.0)], ids=["compute", "wait"])
def test_threads_lack_cores_if_they_keep_those_that_they_get(slices: int, delayed: float) -> None:
    """Threads that wait are late at each of many moments, which is no lack of cores."""
    before = Scheduling(1.0, 2.0, 500)
    measured = STARVED.with_scheduling(before, Scheduling(1.4, 2.3, 500 + slices))
    assert measured.delayed == pytest.approx(delayed)
    assert measured._replace(delayed=0.0) == STARVED._replace(delayed=0.0)
    # A thread with a delay of 2 s has ended.
    assert STARVED.with_scheduling(before, Scheduling(1.4, 0.1, 600)).delayed == 0


@pytest.mark.parametrize(
    ("measured", "word"),
    [
        (window(0.02, cores=0.2), "waits, too"),
        (window(0.001, trainer=0.02), "of its time"),
        (window(0.9 * BATCH_SECONDS), "hand-over"),
        (window(2 * BATCH_SECONDS, cores=0.51), None),
        (window(1.2 * BATCH_SECONDS, cores=0.8), "hand-over"),
        (window(0.02, trainer=0.08, cores=0.51), None),
        (window(0.02, cores=0.91 * CORES), "none left"),
    ],
    ids=["sleeping", "hidden by the trainer", "tiny", "worth it", "waits too", "most by the trainer", "all cores"],
)
def test_work_that_workers_cannot_shorten_stays(measured: Window, word: str | None) -> None:
    """No worker starts for what sleeps, costs no more than a hand-over, is hidden, or uses many cores and all."""
    choice = WorkerChoice(CORES)

    assert settled(choice, lambda _: measured, 2) == ([0] if word else [0, 2])
    assert word is None or (settled(choice, lambda _: measured) == [0] and word in choice.reason)


@pytest.mark.parametrize(("measured", "seems"), [(STARVED, False), (window(0.02, cores=0.5), True)])
def test_a_process_seems_to_wait_if_its_trainer_waits_and_it_hardly_computes(measured: Window, seems: bool) -> None:
    """Only then do delays matter, which take long to find out."""
    assert measured.seems_to_wait == seems
    assert not (measured + window(0.02, trainer=5.0, cores=0.5)).seems_to_wait


def test_threads_that_use_all_cores_are_compared_once_they_are_as_few_as_needed() -> None:
    """The first second is slower than the next ones, and workers must shorten the waits of these."""
    for with_workers, number in ((window(0.012), 0), (window(0.008), 2)):
        choice, start, later = WorkerChoice(2), window(0.02, cores=2.02), window(0.01, cores=2.02)
        seconds = 0.0
        while not choice.num_workers:
            choice.record(start if seconds < FULL_SECONDS else later)
            seconds += start.seconds
        assert seconds > FULL_SECONDS
        measured = {0: later, 2: with_workers}
        assert settled(choice, measured.__getitem__, 12)[-1] == number


@pytest.mark.parametrize(("cores", "first"), [(0.9, 2), (5.2, 6), (13.0, 13)])
def test_the_first_workers_are_at_least_as_many_as_the_cores_that_threads_use(cores: float, first: int) -> None:
    """Fewer could not do the work of the threads."""
    choice = WorkerChoice(CORES)
    numbers = settled(choice, lambda number: window(0.02 / (1 + number), cores=cores), 4)

    assert numbers[1] == first


def test_tiny_batches_have_workers_if_these_are_faster() -> None:
    """A batch of 100 µs is worth a trial, and keeps its workers only if the waits become shorter."""
    for with_workers, number in ((window(0.8e-4), 2), (window(0.95e-4), 0)):
        measured = {0: window(1e-4), 2: with_workers}
        assert settled(WorkerChoice(2), measured.__getitem__, 12)[-1] == number


def test_what_waits_has_more_threads_instead_of_workers() -> None:
    """As many as four workers would have; none if the program has chosen their number."""
    more = widened(ReadOptions())
    assert more is not None
    assert (more.num_threads, more.prefetch_buffer_size) == (64, 4 * ReadOptions().prefetch_buffer_size)
    assert widened(ReadOptions(num_threads=8)) is None

    for measured, reading in ((window(0.02, cores=0.2), more), (STARVED, None)):
        choice = WorkerChoice(2, more_reads=more)
        choice.record(measured)
        assert choice.reading == reading


def test_threads_that_lack_cores_compute() -> None:
    """If other programs take the cores, a process that would compute counts as computing."""
    computing, sleeping = (window(0.02, cores=0.2)._replace(delayed=delayed) for delayed in (0.6 * SECONDS, 0.0))
    choices = WorkerChoice(CORES), WorkerChoice(CORES)
    for choice, measured in zip(choices, (computing, sleeping), strict=True):
        choice.record(measured)
        choice.record(measured)

    assert [choice.num_workers for choice in choices] == [2, 0]


def test_workers_double_while_that_helps() -> None:
    """The number that hides the work is found in steps, and stays."""
    choice = WorkerChoice(CORES)

    # The trainer takes 5 ms, and a batch 35.
    assert settled(choice, lambda number: window(max(0.0003, 0.035 / (number or 1) - 0.005), trainer=0.005)) == [
        0,
        2,
        4,
        8,
    ]
    assert choice.text.startswith("8 worker processes: with 4, the trainer waits")
    assert choice.text.endswith("of that with 4")
    assert settled(WorkerChoice(5), lambda number: window(0.04 / (number or 1))) == [0, 2, 4, 5]


def test_a_step_is_judged_by_its_own_measurements() -> None:
    """By none from before it, however quiet that was."""
    choice = starting(CORES)
    for measured in (STARVED, window(0.02), window(0.02), *[window(0.001, trainer=0.05)] * 20):
        choice.record(measured)
    assert (choice.num_workers, choice.is_settled) == (2, True)
    choice.record(STARVED)
    assert settled(choice, lambda _: STARVED, 12) == [4, 2]


def test_each_step_has_three_trials() -> None:
    """Bad ones of an earlier step do not count."""
    choice, bad, better = starting(CORES), [window(0.02)] * 2, [window(0.01)] * 2
    for measured in (STARVED, *bad, *bad, *better):
        choice.record(measured)
    assert choice.num_workers == 4
    for measured in (STARVED, *bad, *bad, *[window(0.001)] * 2):
        choice.record(measured)
    assert choice.num_workers == 8


def test_a_step_that_does_not_help_is_undone_for_good() -> None:
    """If 8 are no faster than 4, for instance because the storage is busy, there are 4 from then on."""
    choice = WorkerChoice(CORES)

    assert settled(choice, lambda number: window(0.04 / min(number or 1, 4))) == [0, 2, 4, 8, 4]
    assert "8 of them" in choice.reason


def test_workers_that_do_not_help_end_and_are_tried_again_more_and_more_rarely() -> None:
    """If two workers are no faster than none, the work goes back; the pauses before the next trials grow."""
    choice = WorkerChoice(CORES)

    assert settled(choice, lambda _: STARVED, int(4 * PAUSE_SECONDS / SECONDS)) == [0, 2, 0, 2, 0]
    assert settled(choice, lambda _: STARVED, int(2 * PAUSE_SECONDS / SECONDS)) == [0, 2, 0]


@pytest.mark.parametrize("first", [(0.005, 0.01, 0.015), (0.05, 0.04, 0.03)], ids=["ready", "slow"])
@pytest.mark.parametrize(("waits", "number"), [(0.0175, 2), (0.0185, 0)])
def test_the_first_workers_are_compared_with_steady_waits(first: tuple[float, ...], waits: float, number: int) -> None:
    """The first batches of a loader are ready, or take longer. So waits change at first, without workers, too."""
    choice, here = WorkerChoice(2), iter(first)

    measured = settled(choice, lambda number: window(waits if number else next(here, 0.02)), num_windows=20)
    assert measured[-1] == number
    assert measured[1] == 2


def test_workers_may_begin_slowly() -> None:
    """A step is not undone because its first measurements are bad: workers import modules, and other programs run."""
    choice = starting(2)
    for _ in range(4):
        choice.record(window(0.2))

    assert settled(choice, lambda _: window(0.01)) == [2]


def test_idle_workers_end_and_come_back_once() -> None:
    """If the trainer becomes slower, half of the workers end; if they were needed, they stay from then on."""
    choice = WorkerChoice(4)
    settled(choice, lambda number: window(0.04 / (number or 1)))
    assert choice.num_workers == 4

    windows = int(4 * REST_SECONDS / SECONDS)
    assert settled(choice, lambda _: window(0.0001, trainer=0.05, busy=0.5), windows // 5) == [4]
    slow = window(0.0001, trainer=0.05, busy=0.5)
    assert settled(choice, lambda _: slow, windows) == [4, 2, 1]
    assert choice.text == "1 worker process: 2 used 0.5 cores"
    numbers = settled(choice, lambda number: slow if number == 4 else window(0.01 / number), 3 * windows)
    assert numbers == [1, 2, 4]
    assert settled(choice, lambda _: slow, windows) == [4]
    assert "used" not in choice.reason

    odd = WorkerChoice(3)
    settled(odd, lambda number: window(0.04 / (number or 1)))
    assert settled(odd, lambda _: slow, windows) == [3, 2, 1]


def test_a_choice_to_stay_is_final() -> None:
    """After a reason to use no workers, no measurement starts any."""
    choice = WorkerChoice(CORES)
    choice.stay("they cannot start")

    assert settled(choice, lambda _: STARVED) == [0]
    assert choice.text == "no worker processes: they cannot start"


def test_a_number_that_is_kept_does_not_grow() -> None:
    """If the system allows no more workers, there are as many as before."""
    choice = starting(CORES)
    choice.keep(2, "no process is left")

    assert settled(choice, lambda number: window(0.02 / number)) == [2]
    choice = starting(CORES)
    choice.keep(1, "no process is left")
    assert settled(choice, lambda _: STARVED) == [1]


def test_a_step_is_judged_by_enough_batches_of_its_own() -> None:
    """The first measurements after it are of batches begun before; then some time must pass, and some batches come."""
    choice = WorkerChoice(CORES)
    choice.record(window(2.0))
    choice.record(window(2.0))
    seen = []
    for _ in range(TRIAL_BATCHES + 1):
        choice.record(window(TRIAL_SECONDS, trainer=10 * TRIAL_SECONDS))
        seen.append(choice.is_settled)
    assert seen == [*[False] * TRIAL_BATCHES, True]


def test_a_step_after_which_the_trainer_hardly_waits_is_kept() -> None:
    """Also if each batch waits as long as before, because the trainer takes longer, too."""
    choice = starting(CORES)
    assert settled(choice, lambda _: window(0.02, trainer=0.5)) == [2]


def test_workers_that_work_stay() -> None:
    """If the trainer never waits because four workers use almost two cores, two of them would not be enough."""
    choice = WorkerChoice(4)
    settled(choice, lambda number: window(0.04 / (number or 1)))
    busy = window(0.0001, trainer=0.05, busy=1.7)
    assert settled(choice, lambda _: busy, int(4 * REST_SECONDS / SECONDS)) == [4]
