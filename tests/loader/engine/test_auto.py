"""Loaders with worker_count="auto": the stream of any other, from processes that come and go while it is read."""

import collections
import contextlib
import functools
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.errors import WorkerDiedError
from millstream.loader.engine import worker_choice
from millstream.loader.engine.auto import AutoCrew, MovingEngine
from millstream.loader.engine.engine import ReadAhead
from millstream.loader.engine.processes import Processes
from millstream.loader.engine.worker_choice import Window, WorkerChoice
from millstream.loader.processes.pool import Pool
from millstream.loader.workers import process_settings
from support.faults.interrupted import interrupt_at
from support.faults.user_faults import WAIT_SECONDS
from support.processes.moves import move_as, move_at_random
from support.processes.process_tree import processes_below, settled_workers, worker_pids
from support.processes.worker_pools import EXPECTED, batches, loader_of, still_there

TRAINER = os.getpid()


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Lets a test choose the numbers of workers after each output; the last one stays."""

    def numbers(*chosen: int) -> None:
        left = list(chosen)

        def record(choice: WorkerChoice, _: Window) -> None:
            if not choice.is_final:
                choice.num_workers = left.pop(0) if len(left) > 1 else left[0]

        move_as(monkeypatch, record)

    return numbers


def executor_of(iterator: millstream.DataLoaderIterator) -> MovingEngine:
    executor = iterator._executor
    assert isinstance(executor, MovingEngine)
    return executor


def pids_of(iterator: millstream.DataLoaderIterator) -> set[int | None]:
    workers: Any = executor_of(iterator)._crew.current
    return set() if workers is None else {worker.pid for worker in workers._pool.workers}


MANY: dict[str, Any] = {"data_source": range(1_600), "sampler": millstream.IndexSampler(1_600, num_epochs=1)}
"""Arguments of a loader of so many batches that this process cannot have them all ready before it moves."""
EXPECTED_MANY = [list(range(first, first + 4)) for first in range(0, 1_600, 4)]


def is_trainer(_: Any) -> int:
    return int(os.getpid() == TRAINER)


def auto(*operations: Any, **options: Any) -> millstream.DataLoader:
    return loader_of(*operations, **{"worker_count": "auto", "read_options": millstream.ReadOptions(2), **options})


def test_no_process_starts_before_the_first_batch(choose: Callable[..., None]) -> None:
    """The first batches come from this process, whatever is chosen; the workers' come later."""
    choose(2)
    with auto(is_trainer, **MANY) as loader, iter(loader) as iterator:
        first = next(iterator)
        assert (first == 1).all()
        assert not processes_below()
        rest = list(iterator)

    assert (rest[-1] == 0).all()
    assert len(rest) + 1 == len(EXPECTED_MANY)


def test_no_process_ever_starts_for_what_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operation that waits, and uses no processor time, stays in this process by the rule that is in use."""
    monkeypatch.setattr("millstream.loader.engine.worker_choice.MAX_WINDOW_SECONDS", 0.0)
    moment = threading.Event()

    def wait(element: int) -> int:
        moment.wait(0.002)
        return element

    with auto(wait, read_options=millstream.ReadOptions(0)) as loader, iter(loader) as iterator:
        for expected in EXPECTED:
            assert next(iterator).tolist() == expected
            assert not processes_below()
        assert "no worker processes" in str(loader.summary())


def test_the_stream_is_the_same_while_workers_come_die_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random numbers of workers, some of which are killed: every pass is the stream."""
    chance = random.Random(3)
    move_at_random(monkeypatch, chance)
    with auto() as loader:
        for _ in range(3):
            with iter(loader) as iterator:
                for expected in EXPECTED:
                    assert next(iterator).tolist() == expected
                    pids = [pid for pid in pids_of(iterator) if pid in worker_pids()]
                    if pids and chance.random() < 0.3:
                        os.kill(chance.choice(pids), signal.SIGKILL)


def test_workers_are_added_and_ended(choose: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    """There are as many workers as were chosen last: others start, or end after their calls, and all after none.

    The log has a line for each of these numbers.
    """
    caplog.set_level("INFO", "millstream")
    choose(1, 1, 1, 3, 3, 3, *[1] * 9, 0)
    counts: list[int] = []
    seen: set[int | None] = set()
    with auto(**MANY) as loader, iter(loader) as iterator:
        for step, batch in enumerate(iterator):
            assert batch.tolist() == list(range(4 * step, 4 * step + 4))
            workers = executor_of(iterator)._crew.current
            if workers is not None:
                workers.accept()
            pids = pids_of(iterator)
            if len(pids) != (counts or [0])[-1]:
                counts.append(len(pids))
            seen |= pids
            engine = executor_of(iterator)
            assert {worker.pid for worker in engine.status().workers} == pids
            # Operations that stay here are measured for the place that works.
            assert engine.local.substream is engine.budget.substream
        assert not worker_pids()
    assert counts[:2] == [1, 3]
    # Which of them still have calls is a matter of time.
    assert counts[2:] in ([2, 1, 0], [1, 0], [2, 0])
    assert not still_there([pid for pid in seen if pid is not None])
    said = [text.removeprefix('millstream: "auto" chose ') for text in caplog.messages]
    assert [text.partition(":")[0] for text in said] == [
        *("1 worker process", "3 worker processes", "1 worker process", "no worker processes")
    ]


def test_epochs_keep_the_choice_and_the_workers(choose: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    """The second epoch begins with the workers of the first, which are warm. Only a change is logged."""
    caplog.set_level("INFO", "millstream")
    choose(2)
    seen = []
    with auto(is_trainer, **MANY) as loader:
        for _, iterator in loader.epochs(2):
            first = next(iterator)
            for _ in iterator:
                pids = pids_of(iterator)
            seen.append((bool(first.all()), pids))

    assert [is_here for is_here, _ in seen] == [True, False]
    assert seen[0][1] == seen[1][1]
    assert len(caplog.records) == 1


def test_what_cannot_be_pickled_stays_here(choose: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    """An operation with a lock is no error: its loader goes on without workers, and one line in the log says why."""
    choose(2)
    lock = threading.Lock()

    def locked(element: int) -> int:
        with lock:
            return element

    with auto(locked) as loader:
        assert batches(loader) == EXPECTED
        assert "lock" in str(loader.summary())
    (record,) = [record for record in caplog.records if "auto" in record.getMessage()]
    assert "Map(" in record.getMessage()


class Gated:
    """An operation that workers cannot read before the trainer opens a gate, which is a named pipe."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate

    def __call__(self, element: int) -> int:
        return is_trainer(element)

    def __setstate__(self, state: dict[str, Any]) -> None:
        state["gate"].read_bytes()


def test_this_process_works_until_the_workers_are_ready(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long they take to start. The waits meanwhile count for nothing."""
    recorded: list[Window] = []
    number = [1]

    def record(choice: WorkerChoice, window: Window) -> None:
        recorded.append(window)
        choice.keep(number[0], "a test")

    move_as(monkeypatch, record, waits=False)
    os.mkfifo(tmp_path / "gate")
    options: dict[str, Any] = {"data_source": range(1 << 20), "sampler": millstream.IndexSampler(1 << 20, num_epochs=1)}
    # Threads that read ahead would have some batches ready when the work moves.
    options["read_options"] = millstream.ReadOptions(0)
    operation = Gated(tmp_path / "gate")
    with auto(operation, stall_timeout=10.0, worker_buffer_size=1, **options) as loader, iter(loader) as iterator:
        assert next(iterator).all()
        while not pids_of(iterator):
            assert next(iterator).all()
        for _ in range(10):
            assert next(iterator).all()
        (tmp_path / "gate").write_bytes(b"")
        collections.deque(itertools.takewhile(np.all, iterator), maxlen=0)
        assert len(recorded) == 1

        # Another worker begins: the first one works, and is not measured meanwhile.
        number[0] = 2
        while len(pids_of(iterator)) < 2:
            assert not next(iterator).any()
        num_recorded = len(recorded)
        for _ in range(10):
            assert not next(iterator).any()
        assert len(recorded) == num_recorded
        (tmp_path / "gate").write_bytes(b"")
        while len(recorded) == num_recorded:
            assert not next(iterator).any()
        assert executor_of(iterator).stacks().keys() == pids_of(iterator)


def test_workers_that_are_not_ready_end_with_their_iterator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long they would have taken to start."""
    move_as(monkeypatch, lambda choice, _: choice.keep(1, "a test"), waits=False)
    os.mkfifo(tmp_path / "gate")
    with auto(Gated(tmp_path / "gate"), **MANY) as loader:
        iterator = iter(loader)
        next(iterator)
        engine = executor_of(iterator)
        while not pids_of(iterator):
            next(iterator)
        iterator.close()
        assert not worker_pids()
        assert engine.status().workers == ()


def test_the_work_of_workers_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each window has the processor time of its own, so that workers with little to do are noticed after any time."""
    recorded: list[Window] = []

    def record(choice: WorkerChoice, window: Window) -> None:
        recorded.append(window)
        choice.keep(1, "a test")

    move_as(monkeypatch, record)
    with auto(**MANY) as loader:
        assert batches(loader) == EXPECTED_MANY
        assert 0 < sum(window.worked for window in recorded) <= loader._execution.profiler.core_seconds


def test_sleepers_are_judged_once_their_delays_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that lacks cores looks as if it waited, so a window decides nothing if they were not read before it."""
    recorded: list[Window] = []
    judged: list[tuple[bool, bool]] = []
    with_delays = AutoCrew._with_delays

    def judge(self: AutoCrew, window: Window) -> Window | None:
        known = with_delays(self, window)
        judged.append((window.seems_to_wait, known is not None))
        return known

    def check(*, were_read: bool) -> None:
        """Fails unless each window that seems to wait, but for one after another that does not, decides."""
        for seems_to_wait, decides in judged:
            assert decides == (were_read or not seems_to_wait)
            # Reading the delays takes long: it is left out if they do not matter.
            were_read = seems_to_wait
        assert len(recorded) == sum(decides for _, decides in judged)

    move_as(monkeypatch, lambda _, window: recorded.append(window))
    moment = threading.Event()
    with auto(lambda _: moment.wait(0.002), read_options=millstream.ReadOptions(0)) as loader:
        monkeypatch.setattr(AutoCrew, "_with_delays", judge)
        assert len(batches(loader)) == len(EXPECTED)
        # The first outputs are late, and decide nothing either.
        assert len(judged) == len(EXPECTED) - 1
        check(were_read=True)
        with iter(loader) as iterator:
            next(iterator)
            crew, waiting, computing = executor_of(iterator)._crew, Window(1.0, 10, 0.9, 0.1), Window(1.0, 10, 0.9, 0.8)
            assert with_delays(crew, waiting) is not None
            assert with_delays(crew, computing) == computing
            assert crew._scheduling is None
            assert with_delays(crew, waiting) is None
            crew._scheduling = None
            recorded.clear()
            judged.clear()
            for _ in range(2):
                next(iterator)
            assert len(judged) == 2
            check(were_read=False)


def test_more_threads_read_if_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the moment of the choice on, and from the beginning of later passes."""
    more = worker_choice.widened(millstream.ReadOptions())
    assert more is not None
    move_as(monkeypatch, lambda choice, _: setattr(choice, "reading", more))
    numbers: list[list[int]] = []
    widened: list[millstream.ReadOptions] = []
    widen = ReadAhead.widen

    def count(self: ReadAhead, options: millstream.ReadOptions) -> None:
        widened.append(options)
        widen(self, options)

    monkeypatch.setattr(ReadAhead, "widen", count)
    with auto(read_options=millstream.ReadOptions()) as loader:
        for _ in range(2):
            with iter(loader) as iterator:
                numbers.append([executor_of(iterator).status().max_threads for _ in iterator][:-1])
    assert (numbers[0][0], numbers[0][-1], numbers[1][0]) == (16, 64, 64)
    assert widened == [more, more]


@pytest.mark.parametrize("number", [0, 1])
def test_an_end_leaves_no_thread_and_no_worker(number: int, choose: Callable[..., None]) -> None:
    """When the iterator closes, or the pass ends, only warm workers stay, whoever has worked."""
    choose(1, number)

    def threads() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("millstream-read")]

    with auto(**MANY) as loader:
        for closes in (True, False):
            iterator = iter(loader)
            for _ in range(20):
                next(iterator)
            if closes:
                iterator.close()
            else:
                list(iterator)
            assert not threads()
            assert len(settled_workers(0 if closes else number)) == (0 if closes else number)


def test_a_pass_without_idle_workers_starts_those_that_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """If they have ended since the last pass, others begin after the first outputs, and nothing is measured before."""
    recorded: list[int] = []
    move_as(monkeypatch, lambda choice, _: recorded.append(choice.num_workers))
    with auto(is_trainer, **MANY) as loader:
        assert loader._execution.choice is not None
        loader._execution.choice.keep(2, "of the pass before")
        iterator = iter(loader)
        assert next(iterator).all()
        while not pids_of(iterator):
            assert next(iterator).all()
        assert not recorded
        assert not list(iterator)[-1].any()
        assert loader._execution.choice.num_workers == 2
        # Those that are idle may be more than were chosen last.
        loader._execution.choice.keep(1, "of another pass")
        first, *_ = loader
        assert not first.any()
        assert len(settled_workers(1)) == 1


def test_workers_that_cannot_be_of_the_number_end(
    choose: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the system refuses while they start, the work stays here, and nobody would use those that have begun."""
    choose(1)

    def refuse(self: Pool, number: int) -> None:
        del self, number
        raise OSError

    monkeypatch.setattr(Pool, "resize", refuse)
    with auto(**MANY) as loader, iter(loader) as iterator:
        taken = [next(iterator).tolist() for _ in range(20)]
        assert not worker_pids()
        assert taken + [batch.tolist() for batch in iterator] == EXPECTED_MANY
    assert caplog.messages == ['millstream: "auto" chose no worker processes: OSError']


def test_workers_end_that_start_while_another_thread_closes_the_iterator(
    choose: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread cannot see them yet."""
    engines: list[MovingEngine] = []
    choose(1)
    with auto(**MANY) as loader:
        iterator = iter(loader)

        def close(self: Pool, number: int) -> None:
            del self, number
            engines.append(executor_of(iterator))
            thread = threading.Thread(target=iterator.close)
            thread.start()
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()

        monkeypatch.setattr(Pool, "resize", close)
        with contextlib.suppress(ValueError):
            for _ in iterator:
                pass
        assert not worker_pids()


def test_requests_that_are_quick_are_hardly_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two windows, the trainer has its time for itself; others are measured one after another."""
    recorded: list[Window] = []
    move_as(monkeypatch, lambda _, window: recorded.append(window))
    for costly, is_quick in ((1e9, True), (0.0, False)):
        recorded.clear()
        monkeypatch.setattr(worker_choice, "COSTLY_SECONDS", costly)
        monkeypatch.setattr(worker_choice, "PAUSE_OF_WINDOWS", 1e9)
        # Another program may take the core from this one between two requests.
        monkeypatch.setattr(worker_choice, "STARVING", 0.0)
        with auto(read_options=millstream.ReadOptions(0)) as loader:
            assert batches(loader) == EXPECTED
        # The first outputs are late. And it may have to be known first whether threads lack cores.
        assert (len(recorded) <= 1) == is_quick
        assert all(window.batches == 1 for window in recorded)


class OnlyHere:
    """An operation that only the trainer's process can build."""

    def __call__(self, element: int) -> int:
        return element

    def __setstate__(self, state: dict[str, Any]) -> None:
        if os.getpid() != state["pid"]:
            raise ValueError("not in a worker")

    def __getstate__(self) -> dict[str, Any]:
        return {"pid": os.getpid()}


def test_what_workers_cannot_read_stays_here(choose: Callable[..., None], caplog: pytest.LogCaptureFixture) -> None:
    """If the workers fail while they start, the stream goes on in this process, from the same position."""
    choose(2)
    with auto(OnlyHere()) as loader:
        assert batches(loader) == EXPECTED
        assert batches(loader) == EXPECTED
    assert len([record for record in caplog.records if "not in a worker" in record.getMessage()]) == 1


def test_workers_that_cannot_go_on_are_no_error(
    choose: Callable[..., None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If the machine keeps no worker alive, the work comes back, and no batch is lost or repeated."""
    choose(2)
    results, take = [], Processes._take_result

    def fail(self: Processes, *arguments: Any) -> None:
        results.append(arguments)
        if len(results) > 3:
            raise WorkerDiedError("Worker processes die while they start.")
        take(self, *arguments)

    monkeypatch.setattr(Processes, "_take_result", fail)
    with auto(**MANY) as loader:
        assert batches(loader) == EXPECTED_MANY
        assert len(results) == 4
        assert loader._execution.choice is not None
        assert loader._execution.choice.is_final
    assert "die while they start" in caplog.text


def test_a_machine_without_processes_keeps_the_workers_that_it_has(
    choose: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no more workers can start, those that run go on."""
    choose(1, 1, 2)
    resize = Pool.resize

    def refuse(self: Pool, number: int) -> None:
        if number == 2:
            raise OSError(11, "no process is left")
        resize(self, number)

    monkeypatch.setattr(Pool, "resize", refuse)
    with auto(**MANY) as loader:
        assert batches(loader) == EXPECTED_MANY
        assert "no process is left" in " ".join(str(loader.summary()).split())


def first_arguments(index: int, count: int) -> None:
    del index, count


class Stream:
    """A source that seems to be endless."""

    def __len__(self) -> int:
        return 2**62

    def __getitem__(self, key: int) -> int:
        return key


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"worker_init_fn": first_arguments}, "worker_init_fn"),
        ({"data_source": Stream(), "sampler": millstream.IndexSampler(48, num_epochs=1)}, "stream"),
    ],
    ids=["worker_init_fn", "stream"],
)
def test_differences_of_places_keep_the_work_here(
    options: dict[str, Any], word: str, choose: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """If a worker might compute other bytes than this process, none starts, and summary and log have the reason."""
    choose(2)
    with auto(is_trainer, **options) as loader:
        assert all(batch.all() for batch in loader)
        assert word in str(loader.summary())
    assert word in caplog.text


def test_operations_that_use_jax_stay_where_its_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Code that names JAX, or imports it when it runs, moves only if this process computes on the CPU, too."""

    def computes(element: int) -> Any:
        import jax.numpy

        return jax.numpy.sin(element)

    def plain(element: int) -> int:
        return element

    pipelines = [auto(operation)._pipeline for operation in (computes, plain)]
    monkeypatch.setattr(process_settings, "_platform_of_jax", lambda: "tpu")
    with pytest.raises(ValueError, match="computes on tpu in this process"):
        process_settings.check_places_agree(pipelines[:1])
    process_settings.check_places_agree(pipelines[1:])
    monkeypatch.setattr(process_settings, "_platform_of_jax", lambda: "cpu")
    process_settings.check_places_agree(pipelines)


THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def num_threads(_: int) -> int:
    return sum(name in os.environ for name in THREADS)


def test_libraries_have_as_many_threads_as_here(choose: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums of linear algebra depend on the number of threads: chosen workers get no other limit than this process."""
    for name in THREADS:
        monkeypatch.delenv(name, raising=False)
    choose(1)
    with auto(num_threads) as loader:
        assert all((batch == 0).all() for batch in loader)


def test_an_interrupted_move_loses_nothing(choose: Callable[..., None]) -> None:
    """Ctrl-C while workers start, or the work moves to them and back: the stream goes on from the iterator's step."""
    for number in range(0, 3_000, 991):
        choose(2, 2, 2, 0, 2)
        with auto(read_options=millstream.ReadOptions(0)) as loader, iter(loader) as iterator:
            interrupt_at(number, functools.partial(list, iterator), "millstream.loader.workers")
            step = iterator.step
            assert [batch.tolist() for batch in iterator] == EXPECTED[step:]


def test_another_thread_may_close_it_while_workers_start(choose: Callable[..., None]) -> None:
    """No process is left by an iterator that another thread closes between two batches."""
    choose(2)
    with auto() as loader:
        for steps in range(4):
            iterator = iter(loader)
            for _ in range(steps):
                next(iterator)
            thread = threading.Thread(target=iterator.close)
            thread.start()
            try:
                for _ in iterator:
                    pass
            except ValueError:
                pass
            thread.join(WAIT_SECONDS)
            assert not thread.is_alive()


def chain_of(*, before: Any = (), after: Any = (), num_threads: int = 2) -> Any:
    """Returns a chain of the numbers of every such loader, with operations before and after `mp_prefetch`."""
    reading = millstream.ReadOptions(num_threads)
    dataset = millstream.MapDataset.range(48).seed(3).shuffle().to_iter_dataset(reading)
    for operation in before:
        dataset = dataset.map(operation)
    dataset = dataset.batch(4).mp_prefetch("auto")
    for operation in after:
        dataset = dataset.map(operation)
    return dataset


def test_chains_choose_as_loaders_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """mp_prefetch("auto") moves between this process and workers, and its batches and states are those of any other."""
    expected = [batch.tolist() for batch in millstream.MapDataset.range(48).seed(3).shuffle().batch(4)]
    move_at_random(monkeypatch, random.Random(5))
    for _ in range(3):
        with contextlib.closing(iter(chain_of())) as iterator:
            assert [batch.tolist() for batch in iterator] == expected
            iterator.seek(5)
            assert next(iterator).tolist() == expected[5]
    assert 'mp_prefetch("auto")' in repr(chain_of())


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("prefetch", [None, millstream.ReadOptions(1, 4)])
def test_operations_after_it_stay_here(
    num_threads: int, prefetch: millstream.ReadOptions | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the operations before `mp_prefetch("auto")` run, this process runs those after it, in order."""
    expected = [batch.tolist() for batch in millstream.MapDataset.range(48).seed(3).shuffle().batch(4)]
    move_at_random(monkeypatch, random.Random(5))
    dataset = chain_of(after=[lambda batch: (os.getpid(), batch.tolist())], num_threads=num_threads)
    num_workers: set[int] = set()
    for _ in range(3):
        with contextlib.closing(iter(dataset if prefetch is None else dataset.prefetch(prefetch))) as iterator:
            for batch in expected:
                assert next(iterator) == (TRAINER, batch)
                num_workers.add(len(worker_pids()))
    assert len(num_workers) > 1


@pytest.mark.parametrize("batch", [0, 4])
@pytest.mark.parametrize(("below", "word"), [(Stream(), "stream"), (threading.Lock(), "lock")], ids=["stream", "lock"])
def test_joins_that_cannot_move_stay_here(
    below: Any, word: str, batch: int, choose: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """If workers cannot have one of the streams below, no stream moves, and one line in the log has the reason."""
    choose(2)

    def hold(element: int) -> int:
        assert below
        return element

    source = below if isinstance(below, Stream) else range(1_600)
    one = millstream.MapDataset.source(source).map(hold).to_iter_dataset().filter(lambda number: number % 3 > 0)
    dataset = millstream.IterDataset.mix([chain_of(), one], [0.5, 0.5])
    with contextlib.closing(
        iter((dataset.batch(batch, batch_fn=list) if batch else dataset).mp_prefetch("auto"))
    ) as iterator:
        assert len(list(iterator)) > 5
        assert not worker_pids()
        assert word in str(iterator.summary())
    (record,) = caplog.records
    assert word in record.getMessage()


def test_mixtures_that_are_read_by_position_have_workers(
    choose: Callable[..., None], caplog: pytest.LogCaptureFixture
) -> None:
    """Operations after a mixture of such chains move as those of other chains do, and no warning says otherwise."""
    choose(1)
    chains = [millstream.MapDataset.range(1_600).map(is_trainer).to_iter_dataset() for _ in range(2)]
    dataset = millstream.IterDataset.mix(chains, [0.5, 0.5]).batch(4).mp_prefetch("auto")
    with contextlib.closing(iter(dataset)) as iterator:
        assert len({bool(batch.any()) for batch in iterator}) == 2
    assert not caplog.records


def test_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another word is refused; one core, and debug=True, mean no workers."""
    with pytest.raises(ValueError, match=r'worker_count must be a number, None or "auto", got \'many\'.'):
        loader_of(worker_count="many")
    monkeypatch.setattr("millstream.loader.engine.staffing.available_cores", lambda: 1)
    with auto() as loader:
        assert "one core" in str(loader.summary())
    with auto(debug=True) as loader:
        assert batches(loader) == EXPECTED
        assert "auto" not in str(loader.summary())
