"""`device_put`: a thread draws batches and puts them on the device before the training step requests them.

Guarantees:
    * Only one thread, a `ReaderThreads(1)`, uses the iterator: drawing, `set_state` and `seek` are jobs that it runs in
      order. It closes the iterator after the last one, because a user's `close()` must not run beside `next`. Other
      threads only call `interrupt()`, and `close()` of the library's iterators if the thread does not end in time.
    * A job draws one batch. There are as many jobs as batches may be prefetched; each delivery adds one.
    * The position travels with the batch. A staged batch does not count until it is delivered.
    * The thread and the consumer share a staging that begins at one position. An error, the end of the stream and a
      move end it; the next staging begins at the consumer's position.
    * A signal handler may raise an exception at any line. A staging therefore knows the position of its next batch,
      or None while that batch may be lost. One that is not at the consumer's position is ended by the next call.
    * Concurrent use by two threads, or by a signal handler, raises ValueError. `close`, `get_state` and `step` take no
      lock, and are safe in any thread and any handler.
    * No job refers to the `DeviceIterator`: the thread ends when the iterator is collected.
"""

import collections
import contextlib
import dataclasses
import functools
import math
import queue
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, final

from millstream.core.checks import as_integer
from millstream.core.trace_annotations import WAIT, annotation
from millstream.errors import WorkerStalledError
from millstream.loader.agreed_ends import AGREE, AgreedEnds, Pending
from millstream.loader.checkpoints.checkpointable import Checkpointable, ResumableIterator
from millstream.loader.device_placement import Agreement, Device, Placement, leaves_of
from millstream.loader.lineage import Lineage, RunLineage
from millstream.loader.measuring import Profiler
from millstream.loader.threads.reader_threads import CLOSE_SECONDS, ReaderThreads
from millstream.loader.threads.waiting import SLICE_SECONDS, StallClock, TimedQueue
from millstream.loader.views import Consumer, Insight, Inspectable
from millstream.samplers.mixtures.mixing import Weights


@dataclasses.dataclass(frozen=True, slots=True)
class DevicePosition:
    """A position between two batches: its state, which is sealed when it is saved, its step and its epoch."""

    unsealed: Any
    step: int | None
    epoch: int | None

    @classmethod
    def of(cls, iterator: Any) -> "DevicePosition":
        unsealed = iterator._unsealed_state()  # noqa: SLF001  (of every Checkpointable)
        return cls(unsealed, getattr(iterator, "step", None), getattr(iterator, "epoch", None))


def return_to(iterator: Any, unsealed: Any) -> None:
    """Moves an iterator to a position that it had, unless it is there."""
    if iterator._unsealed_state() != unsealed:  # noqa: SLF001  (of every Checkpointable)
        iterator._return_to(unsealed)  # noqa: SLF001


@dataclasses.dataclass(frozen=True, slots=True)
class StagedBatch:
    """A batch on the device, and the position after it."""

    batch: Any
    position: DevicePosition


@final
class DeviceStaging:
    """The batches staged from one position on. The thread runs jobs; the consumer takes their outcomes in order.

    Args:
        put: puts a batch of the iterator on the device.
        start: the position of the first one.

    Attributes:
        outcomes: the outcome of each job: a batch, or an exception.
        next_position: the position before the batch that `take` returns next; None if it may be another one.
        has_delivered: True once the consumer has got a batch.
        is_awaited: True if the consumer waits for an outcome, or was interrupted while it did.
        is_over: True if jobs must do nothing more. Either side may set it.
    """

    def __init__(self, iterator: Any, put: Callable[[Any], Any], start: Any) -> None:
        self._iterator = iterator
        self._put = put
        # The batches that other hosts know of, if they agree at each step.
        self.pending: collections.deque[Pending] = collections.deque()
        self.last_outcome: Any = ()
        self._start = start
        self._has_begun = False
        self.outcomes: TimedQueue[StagedBatch | BaseException] = TimedQueue()
        self.next_position: DevicePosition | None = None
        self.has_delivered = False
        self.is_awaited = False
        self.is_over = False

    def stage(self) -> None:
        self.run(self._next_on_device)

    def run(self, work: Callable[[], Any]) -> None:
        """Adds the outcome of a function: its result with the position after it, or its exception. Also a job."""
        if self.is_over:
            return
        try:
            outcome: StagedBatch | BaseException = StagedBatch(work(), DevicePosition.of(self._iterator))
        except BaseException as error:  # noqa: BLE001  (the consumer raises it)
            self.is_over = True
            outcome = error
        self.outcomes.put(outcome)

    def take(self, clock: StallClock, readers: ReaderThreads) -> StagedBatch:
        """Waits for the outcome of the next job; returns its batch, or raises its exception or a WorkerStalledError."""
        self.next_position = None
        self.is_awaited = True
        outcome: StagedBatch | BaseException | None = None
        while outcome is None:
            try:
                outcome = self.outcomes.take(clock)
            except queue.Empty:
                describe = getattr(self._iterator, "describe_next", None)
                text = "a batch in flight to the device" if describe is None else describe()
                outcome = clock.stall_of(text, readers.busy_threads)
        self.is_awaited = isinstance(outcome, WorkerStalledError)
        if isinstance(outcome, BaseException):
            raise outcome
        self.next_position = outcome.position
        return outcome

    def _next_on_device(self) -> Any:
        if not self._has_begun:
            # The previous staging may have drawn more than was delivered.
            return_to(self._iterator, self._start)
            self._has_begun = True
        return self._put(next(self._iterator))


def device_put(
    iterator: Checkpointable,
    device: Device = None,
    buffer_size: int = 2,
    ends: str = "known",
) -> "DeviceIterator":
    """Returns an iterator over the same batches as `jax.Array`s, which are on the device before they are requested.

    Args:
        iterator: the iterator of a loader or a chain. The new iterator takes it over, and closes it.
        device: the destination of the batches: a `jax.Device`, or a `jax.sharding.Sharding`. If the sharding spans
            several processes, each contributes its rows and gets the global batch, which the sharding may cut along
            other dimensions, too; the loader's shards must then be those of `ShardBySharding`. Before the first batch,
            all processes compare what they read; a difference is a ValueError on all. None for the default device.
        buffer_size: the largest number of batches drawn before the training step requests them, at least 1. It counts
            each batch taken from `iterator` but not returned yet, on the host or on the device. Batches that the
            training step still holds take memory of the device, too.
        ends: "known" if all hosts have as many batches of as many rows; others are an error. "agree" for streams,
            filters and packers, whose hosts differ: they agree at each step, in advance. Batches, which must be dicts,
            get a leaf `valid` (bool per row). It is False for the rows, all zeros, that fill batches until the last
            host has ended. Use the same on all hosts.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind or out of range.

    Examples:
        >>> import jax
        >>> with millstream.device_put(iter(millstream.load(range(8), batch_size=4)), jax.devices()[0]) as batches:
        ...     print(next(batches))
        [0 1 2 3]
    """
    if not isinstance(iterator, Checkpointable) or isinstance(iterator, DeviceIterator):
        raise TypeError(
            f"iterator must be the iterator of a loader or a chain, got {type(iterator).__name__}. Write "
            "device_put(iter(loader))."
        )
    if ends not in ("known", AGREE):
        raise ValueError(f"ends must be 'known' or {AGREE!r}, got {ends!r}.")
    return DeviceIterator(
        getattr(iterator, "_with_own_states", lambda: iterator)(),
        Placement(device, getattr(iterator, "shard_options", None)),
        as_integer(buffer_size, "buffer_size", 1, 1 << 16),
        agrees=ends == AGREE,
    )


class DeviceIterator(Lineage, Inspectable, ResumableIterator):
    """Yields the batches of a loader or chain on the device, and knows its position among them.

    `device_put` returns it. Each batch has the structure that the loader yields, with `jax.Array`s as leaves, of the
    dtypes that JAX chooses (64 bits become 32, unless JAX is configured to keep them; an integer that does not fit is
    an error). Nothing is drawn before the first `next` or `start_prefetch`.

    Its position is just after the last batch delivered: batches that are already on the device do not count. An
    exception is raised in its turn and leaves the position unchanged: `next` tries the same batch again and, if the
    pipeline is 1:1, `seek(step + 1)` skips it.

    It has the views of the iterator that it draws from, such as `summary()`, in which the trainer's waits are those
    for this iterator. Use it in one thread at a time; any thread may `close` it. Concurrent use raises ValueError.

    Examples:
        >>> import jax
        >>> loader = millstream.load([{"x": 1.0}] * 8, batch_size=4)
        >>> with millstream.device_put(iter(loader)) as batches:
        ...     batch = next(batches)
        ...     print(batch["x"], isinstance(batch["x"], jax.Array), batches.step)
        [1. 1. 1. 1.] True 1
    """

    _call_for_another = "millstream.device_put(iter(loader))"

    def __init__(self, iterator: Any, placement: Placement, buffer_size: int, *, agrees: bool = False) -> None:
        self._iterator = iterator
        self.states_are_bytes = iterator.states_are_bytes
        self._stall_timeout: float = getattr(iterator, "stall_timeout", math.inf)
        self._placement = placement
        self._agreement = Agreement(placement, iterator) if placement.is_global else None
        rows = getattr(iterator, "rows_per_batch", None)
        self._ends = AgreedEnds(placement, self._agreement, rows) if agrees else None
        self._put: Callable[[Any], Any] = (self._ends or self._agreement or placement).put
        self._counts_records = hasattr(iterator, "records_between")
        self._buffer_size = buffer_size
        self._position = DevicePosition.of(iterator)
        # The trainer's waits are those for this iterator, so the other one must measure none.
        self._consumer = Consumer(self._position.step or 0, self._position.epoch)
        self._unshown_profiler: Profiler | None = None
        if hasattr(iterator, "let_measure"):
            iterator.let_measure(self._consumer)
        else:
            self._unshown_profiler = Profiler(())
        self._staging: DeviceStaging | None = None
        self._is_closed = False
        self._failures: list[Exception] = []
        self._readers = ReaderThreads(1, functools.partial(_close, iterator, self._failures))
        self._readers.end_with(self)
        weakref.finalize(self, _stop, self._readers, iterator)

    @property
    def step(self) -> int:
        """The number of batches delivered since the beginning of the stream.

        TypeError if the iterator that it draws from has no step, because it reads a stream in order.
        """
        if self._position.step is None:
            raise TypeError(f"A {type(self._iterator).__name__} has no step. Use get_state.")
        return self._position.step

    @property
    def epoch(self) -> int | None:
        """The epoch that the next batch begins in, as `DataLoaderIterator.epoch`."""
        return self._position.epoch

    @property
    def insight(self) -> Insight:
        insight: Insight = self._iterator.insight
        return insight

    @property
    def lineage(self) -> RunLineage:
        lineage: RunLineage = self._method("lineage")
        return lineage

    def __len__(self) -> int:
        """Returns the number of batches left.

        Raises:
            TypeError: it is not known: the sampler is endless, or the pipeline is not 1:1.
        """
        if not hasattr(self._iterator, "batches_after"):
            raise TypeError(f"A {type(self._iterator).__name__} does not know the number of batches left.")
        # This host's stream may have ended some steps ago, see `ends`.
        count: int = max(0, self._iterator.batches_after(self.step))
        return count

    def __next__(self) -> Any:
        """Returns the next batch, on the device. Its transfer may still be in progress; JAX waits for it.

        Raises:
            StopIteration: the stream has ended.
            ValueError: the iterator is closed.
            TypeError: JAX has no array for a leaf of the batch.
            OverflowError: an integer of the batch needs more than the 32 bits that JAX keeps by default.
            ValueError: of a global batch: other processes read another stream, or may have other numbers of rows.
            Exception: an error of an operation or the source, with notes of where it occurred, or of JAX.
        """
        staging = self._staging
        # Also if `start_prefetch` has begun: the wait for workers that start is not an ordinary one.
        is_first = staging is None or not staging.has_delivered
        start = self._profiler.begin_wait(self._consumer)
        try:
            with annotation(WAIT):
                batch = self._alone(self._take)
        finally:
            # A chain may have changed its pipeline meanwhile, and its profiler with it.
            self._profiler.end_wait(self._consumer, start, is_first=is_first)
        step = self._position.step if self._counts_records else None
        self._profiler.delivered(1, 0 if step is None else self._iterator.records_between(step - 1, step))
        return batch

    def start_prefetch(self) -> None:
        """Begins to put batches on the device and returns immediately, for instance while a model is restored.

        Raises:
            ValueError: the iterator is closed.
        """
        self._alone(self._current_staging)

    def get_state(self) -> Any:
        """Returns the position, bytes or a dict as the iterator that it draws from. No thread is involved."""
        return self._iterator._sealed(self._position.unsealed)  # noqa: SLF001  (of every Checkpointable)

    def set_state(self, state: Any, *, allow: Collection[str] = (), strict: bool = False) -> None:
        """Moves to the position of a state, as `DataLoaderIterator.set_state`, once the current batch is drawn.

        The state is one of any iterator over the same stream, on a device or not.
        """
        # Not every iterator of a chain has both.
        options = {name: value for name, value in (("allow", allow), ("strict", strict)) if value}
        self._move(functools.partial(self._iterator.set_state, state, **options))

    def set_states(self, states: Iterable[bytes], *, allow: Collection[str] = (), strict: bool = False) -> None:
        """Moves to the position of the states of all shards, as `DataLoaderIterator.set_states`.

        Raises:
            TypeError: the batches are those of a chain.
        """
        if not hasattr(self._iterator, "set_states"):
            raise TypeError("A chain has one state per process. Use set_state.")
        self._move(functools.partial(self._iterator.set_states, list(states), allow=allow, strict=strict))

    def seek(self, step: int) -> None:
        """Moves to the position after the first `step` batches, as `DataLoaderIterator.seek`."""
        self._move(functools.partial(self._iterator.seek, step))

    def skip(self, count: int) -> None:
        """Moves on by `count` batches that are not trained on, as `DataLoaderIterator.skip`.

        `step` stays. The step of a chain counts them.

        Raises:
            NotImplementedError: the batches are those of a chain that is read in order.
        """
        self._move_from_here("skip", count)

    def reweight(self, weights: Weights) -> None:
        """Gives the mixture other weights from the next batch on, as `DataLoaderIterator.reweight`.

        Batches that are on the device in advance are computed again.

        Raises:
            TypeError: the batches are those of a chain.
        """
        self._move_from_here("reweight", weights)

    def close(self) -> None:
        """Ends the thread, closes the iterator that it draws from, and frees staged batches, within 2 s. Idempotent.

        Another thread that waits in `next` gets a ValueError.
        """
        deadline = time.monotonic() + CLOSE_SECONDS
        self._is_closed = True
        if (staging := self._staging) is not None:
            staging.outcomes.put(self._closed_error())
        self._end_staging()
        if hasattr(self._iterator, "interrupt"):
            self._iterator.interrupt()
        self._readers.stop()
        self._readers.join(deadline - time.monotonic())
        if self._readers.busy_threads and _is_of_library(self._iterator):
            self._iterator.close()
        if self._failures:
            raise self._failures.pop()

    def __repr__(self) -> str:
        step = "" if self._position.step is None else f" at step {self._position.step},"
        return f"<DeviceIterator{step} prefetches up to {self._buffer_size} batches to {self._placement}>"

    @property
    def _profiler(self) -> Profiler:
        # A chain may change its pipeline, and its profiler with it.
        return self._unshown_profiler or self.insight.profiler

    def _take(self) -> Any:
        staging = self._current_staging()
        if self._ends is not None:
            return self._take_agreed(staging, self._ends)
        if self._agreement is None or self._agreement.is_compared:
            staged = self._next_of(staging)
        else:
            staged = self._first_from(staging, self._agreement)
        self._readers.submit(staging.stage)
        staging.has_delivered = True
        self._adopt(staged.position)
        return staged.batch

    def _take_agreed(self, staging: DeviceStaging, ends: AgreedEnds) -> Any:
        """Returns the next batch of all hosts, after it has told them about this host's batch after that."""
        while len(staging.pending) < 2:
            outcome = self._outcome_of(staging)
            if not ends.has_begun:
                error = outcome if isinstance(outcome, Exception) else None
                has_batch = outcome is not None and error is None
                with _differing(error):
                    step = ends.begin(error, self._position.step, has_batch=has_batch)
                self._adopt(dataclasses.replace(self._position, step=step))
            staging.pending.append(ends.announced(outcome))
        pending = staging.pending.popleft()
        # An error ends the staging of all hosts.
        staging.next_position = None
        batch = ends.batch_of(pending)
        if batch is None:
            staging.pending.appendleft(pending)
            staging.next_position = self._position
            raise StopIteration
        staging.has_delivered = True
        step = self._position.step
        ended = dataclasses.replace(self._position, step=None if step is None else step + 1)
        self._adopt(ended if pending.outcome is None else pending.outcome.position)
        staging.next_position = self._position
        return batch

    def _outcome_of(self, staging: DeviceStaging) -> Any:
        """Returns the next staged batch, None after the end of this host's stream, or an error."""
        outcome = staging.last_outcome
        if outcome is None or isinstance(outcome, Exception):
            return outcome
        try:
            outcome = self._next_of(staging)
            self._readers.submit(staging.stage)
        except StopIteration:
            outcome = None
        except Exception as error:  # noqa: BLE001  (all hosts have to know)
            outcome = error
        staging.last_outcome = outcome
        return outcome

    def _first_from(self, staging: DeviceStaging, agreement: Agreement) -> StagedBatch:
        """Returns the first global batch, once all hosts agree on it. Its error is raised after that."""
        step = self._position.step
        try:
            staged = self._next_of(staging)
        except StopIteration:
            agreement.compare("none, because the stream has ended", {}, step)
            raise
        except Exception as error:
            with _differing(error):
                agreement.compare(f"an error, {type(error).__name__}", {}, step)
            raise
        try:
            arrays = {f"batch{path}": f"{leaf.dtype} {leaf.shape}" for path, leaf in leaves_of(staged.batch)}
            agreement.compare("a batch", arrays, step)
        except BaseException:
            staging.next_position = None
            raise
        return staged

    def _adopt(self, position: DevicePosition) -> None:
        self._position = position
        self._consumer.step, self._consumer.epoch = position.step or 0, position.epoch

    def _next_of(self, staging: DeviceStaging) -> StagedBatch:
        # Longer than the iterator itself waits, because its error says more.
        return staging.take(StallClock(self._stall_timeout + SLICE_SECONDS), self._readers)

    def _current_staging(self) -> DeviceStaging:
        """Returns the current staging if it is at the consumer's position, or begins one there."""
        self._check_open()
        staging = self._staging
        if staging is not None and staging.next_position is self._position:
            return staging
        self._end_staging()
        staging = self._begin_staging()
        for _ in range(self._buffer_size):
            self._readers.submit(staging.stage)
        # Not earlier: with a job missing, the consumer would wait for a batch that is never staged.
        staging.next_position = self._position
        return staging

    def _move(self, move: Callable[[], None]) -> None:
        self._check_open()
        if (prepare := getattr(self._iterator, "prepare_to_move", None)) is not None:
            prepare()
        self._alone(functools.partial(self._move_in_thread, move))

    def _move_from_here(self, name: str, *arguments: Any) -> None:
        """Calls a method of the iterator that moves it from the consumer's position."""
        method, iterator, start = self._method(name), self._iterator, self._position.unsealed

        def move() -> None:
            return_to(iterator, start)
            method(*arguments)

        self._move(move)

    def _method(self, name: str) -> Any:
        if not hasattr(self._iterator, name):
            raise TypeError(f"A {type(self._iterator).__name__} has no {name}: only the iterators of loaders have it.")
        return getattr(self._iterator, name)

    def _move_in_thread(self, move: Callable[[], None]) -> None:
        """Runs a move in the thread, and adopts its position if it succeeds."""
        self._end_staging()
        try:
            staging = self._begin_staging()
            self._readers.submit(functools.partial(staging.run, move))
            position = self._next_of(staging).position
            # No batch is staged here: after an interruption from here on, the next call must not wait for one.
            staging.next_position = None
            self._adopt(position)
        finally:
            self._end_staging()

    def _begin_staging(self) -> DeviceStaging:
        staging = self._staging = DeviceStaging(self._iterator, self._put, self._position.unsealed)
        # A `close` in another thread either finds this staging, and ends the wait for it, or is detected here.
        self._check_open()
        return staging

    def _end_staging(self) -> None:
        """Drops the current staging: its jobs do nothing more."""
        if (staging := self._staging) is not None:
            staging.next_position = None
            staging.is_over = True
            if staging.is_awaited and hasattr(self._iterator, "interrupt"):
                # The consumer was interrupted, possibly because the thread waits for a batch that never comes.
                self._iterator.interrupt()
        self._staging = None

    def _closed_error(self) -> ValueError:
        return ValueError(f"The iterator is closed: call {self._call_for_another} for a new one.")

    def _check_open(self) -> None:
        if self._is_closed:
            raise self._closed_error()
        self._readers.check_process()


@contextlib.contextmanager
def _differing(error: Exception | None) -> Iterator[None]:
    """Raises this host's error, if it has one, instead of a ValueError that it makes hosts differ."""
    try:
        yield
    except ValueError as difference:
        if error is None:
            raise
        error.add_note(f"millstream: {difference}")
        raise error from None


def _is_of_library(iterator: Any) -> bool:
    module: str = type(iterator).close.__module__
    return module.startswith("millstream.")


def _stop(readers: ReaderThreads, iterator: Any) -> None:
    """Ends the thread after its job, and a wait in it for a batch that may never come."""
    if hasattr(iterator, "interrupt"):
        iterator.interrupt()
    elif _is_of_library(iterator):
        iterator.close()
    readers.stop()


def _close(iterator: Any, failures: list[Exception]) -> None:
    try:
        iterator.close()
    except Exception as error:  # noqa: BLE001  (`DeviceIterator.close` raises it)
        failures.append(error)
