"""Batches on the device before the training step asks for them: a thread draws them, and puts them there.

Guarantees:
    * The iterator beneath is used by one thread only, a `ReaderThreads(1)`: a draw, `set_state` and `seek` are jobs
      which it does in order. `close()` alone is called from elsewhere, which that iterator allows.
    * A job draws one batch, and there are as many jobs as batches may be ahead: a new one when a batch is delivered.
    * The position travels with the batch. What is staged does not count until it is delivered.
    * The thread and the consumer share a staging, which begins at one position. It ends with an error, at the end of
      the stream, or when the consumer moves or is interrupted; the next one begins at the consumer's position.
    * An exception may come at any line, from a signal's handler. So a staging knows for which position its
      next batch is, and for none while that may be lost: one that is not at the consumer's position is not used again.
    * Two at once, in two threads or beneath a signal's handler, get a ValueError; `close`, `get_state` and `step` take
      no lock, and may be used in any thread and any handler.
    * No job refers to the `DeviceIterator`: when that is let go of, the thread ends.
"""

import dataclasses
import functools
import math
import queue
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, final

from millstream.checks import as_integer
from millstream.errors import WorkerStalledError
from millstream.loader.checkpoints.checkpointable import Checkpointable
from millstream.loader.checkpoints.resumable import ResumableIterator
from millstream.loader.placement import Device, Placement
from millstream.loader.threads.profiler import Profiler
from millstream.loader.threads.reader_threads import CLOSE_SECONDS, ReaderThreads
from millstream.loader.threads.waiting import LOOK_SECONDS, Wait

if TYPE_CHECKING:
    from millstream.loader.profile import Profile
    from millstream.loader.reporting.summary import Summary


def device_put(
    iterator: Checkpointable,
    device: Device = None,
    buffer_size: int = 2,
) -> "DeviceIterator":
    """Returns an iterator over the same batches as `jax.Array`s, on the device before they are asked for.

    Args:
        iterator: what `iter(loader)` or `iter(chain)` returns. It belongs to the new iterator from now on, which also
            closes it.
        device: where to put the batches: a `jax.Device`, or a `jax.sharding.Sharding`. Where the sharding spans several
            processes, each gives its rows and gets the global batch, which the sharding may cut along other dimensions,
            too; the loader's shards must then be those of `ShardBySharding`. None for the default device.
        buffer_size: how many batches may be drawn ahead of the training step, at least 1. Counts every batch
            taken from `iterator` but not yet returned, wherever it is. Batches that the training step still holds are
            on the device too.

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
            "device_put moves the batches of the iterator of a loader or a chain, got "
            f"{type(iterator).__name__}: write device_put(iter(loader))."
        )
    return DeviceIterator(
        iterator, Placement(device, getattr(iterator, "shard_options", None)), as_integer(buffer_size, "buffer_size", 1)
    )


@final
class DeviceIterator(ResumableIterator):
    """Yields the batches of a loader's or chain's iterator on the device, and knows its position among them.

    Made by `device_put`. Each batch has the structure that the loader gives it, with `jax.Array`s as leaves, of the
    dtypes that JAX gives them (64 bits become 32, unless JAX is told to keep them). Nothing is drawn before the first
    `next` or `start_prefetch`.

    Its position is just after the last batch delivered: batches that are already on the device do not count. An
    exception comes at its turn and leaves the position as it was: `next` tries the same batch again and, where the
    pipeline is 1:1, `seek(step + 1)` skips it.

    One thread at a time may use it, except that any may `close` it. Where two meet, one gets a ValueError.

    Examples:
        >>> import jax
        >>> loader = millstream.load([{"x": 1.0}] * 8, batch_size=4)
        >>> with millstream.device_put(iter(loader)) as batches:
        ...     batch = next(batches)
        ...     print(batch["x"], isinstance(batch["x"], jax.Array), batches.step)
        [1. 1. 1. 1.] True 1
    """

    def __init__(self, iterator: Any, placement: Placement, buffer_size: int) -> None:
        self._iterator = iterator
        self.states_are_bytes = iterator.states_are_bytes
        # The waits that a trainer has are those for this iterator: the one beneath measures none of its own.
        measured = getattr(iterator, "measured_outside", None)
        self._profiler_of: Callable[[], Profiler] = functools.partial(Profiler, ()) if measured is None else measured()
        self._stall_timeout: float = getattr(iterator, "stall_timeout", math.inf)
        self._left_at: float | None = None
        self._placement = placement
        self._buffer_size = buffer_size
        self._position = _Position.of(iterator)
        self._staging: _Staging | None = None
        self._is_closed = False
        self._readers = ReaderThreads(1)
        self._readers.end_with(self)
        # A thread that waits for a batch ends only when the wait does.
        weakref.finalize(self, iterator.close)

    @property
    def step(self) -> int:
        """The number of batches delivered since the beginning of the stream.

        TypeError if the iterator beneath does not know it: that of a stream which is read in order.
        """
        if self._position.step is None:
            raise TypeError(f"A {type(self._iterator).__name__} does not know its step: use get_state.")
        return self._position.step

    @property
    def epoch(self) -> int | None:
        """The epoch that the next batch begins in, as `DataLoaderIterator.epoch` says."""
        return self._position.epoch

    def __len__(self) -> int:
        """Returns how many batches are left to be delivered.

        Raises:
            TypeError: it is not known: the sampler is endless, or an operation decides while reading.
        """
        if not hasattr(self._iterator, "batches_after"):
            raise TypeError(f"A {type(self._iterator).__name__} does not know how many batches are left.")
        count: int = self._iterator.batches_after(self.step)
        return count

    def __next__(self) -> Any:
        """Returns the next batch, on the device; its transfer may still be under way, which JAX waits for.

        Raises:
            StopIteration: the stream has ended.
            ValueError: the iterator is closed.
            TypeError: JAX has no array of a leaf of the batch.
            Exception: whatever an operation or the source raised, with notes of where, or JAX in putting the batch.
        """
        start, is_first = time.perf_counter(), self._staging is None
        self._profiler_of().returned(self._left_at, start)
        try:
            batch = self._alone(self._take)
        finally:
            self._left_at = time.perf_counter()
            self._profiler_of().waited(start, self._left_at, is_first=is_first)
        self._profiler_of().delivered(1)
        return batch

    def start_prefetch(self) -> None:
        """Begins to put batches on the device and returns at once, for instance while a model is restored.

        Raises:
            ValueError: the iterator is closed.
        """
        self._alone(self._begin)

    def get_state(self) -> Any:
        """Returns the position, bytes or a dict as in the iterator beneath. No thread is asked."""
        return self._position.state

    def set_state(self, state: Any, *, allow: Collection[str] = (), strict: bool = False) -> None:
        """Moves to the position recorded in a state, that of any iterator over the same stream, on a device or not.

        Waits for the batch that is being made.

        Args:
            state: what `get_state` returned, here or on a `DataLoaderIterator`.
            allow: differences to accept on purpose, as in `DataLoaderIterator.set_state`; of a chain, where its
                iterator takes them.
            strict: whether to refuse the state, too, if the code of the pipeline has changed.

        Raises:
            CheckpointError, ValueError: as `DataLoaderIterator.set_state`.
        """
        options = {"allow": allow, "strict": strict} if self.states_are_bytes or allow or strict else {}
        self._go(functools.partial(self._iterator.set_state, state, **options))

    def set_states(self, states: Iterable[bytes], *, allow: Collection[str] = (), strict: bool = False) -> None:
        """Moves to the position recorded in the states of all shards that saved together.

        Waits for the batch that is being made.

        Args:
            states: what `get_state` returned on each of the shards, at the same step, in any order.
            allow: as in `set_state`.
            strict: as in `set_state`.

        Raises:
            CheckpointError, ValueError: as `DataLoaderIterator.set_states`.
        """
        if not hasattr(self._iterator, "set_states"):
            raise TypeError("A chain has one state for each process: use set_state.")
        self._go(functools.partial(self._iterator.set_states, list(states), allow=allow, strict=strict))

    def seek(self, step: int) -> None:
        """Moves to the position after the first `step` batches.

        Waits for the batch that is being made. The cost is that of `DataLoaderIterator.seek`.

        Args:
            step: 0 … the number of batches in the stream.

        Raises:
            IndexError: there are fewer batches.
            ValueError: the iterator is closed.
        """
        self._go(functools.partial(self._iterator.seek, step))

    def profile(self) -> "Profile":
        """Returns where the time has gone so far, as that of the iterator beneath; the waits are those for this one."""
        profile: Profile = self._iterator.profile()
        return profile

    def summary(self) -> "Summary":
        """Returns a table of where the time has gone so far, and advice; the waits are those for this iterator."""
        summary: Summary = self._iterator.summary()
        return summary

    def metrics(self) -> dict[str, float]:
        """Returns the measurements so far by stable names; the waits are those for this iterator."""
        metrics: dict[str, float] = self._iterator.metrics()
        return metrics

    def close(self) -> None:
        """Ends the thread, closes the iterator beneath and frees what is staged. Takes two seconds at most. Idempotent.

        May be called while another thread waits in `next`, which is a ValueError then.
        """
        deadline = time.monotonic() + CLOSE_SECONDS
        self._is_closed = True
        if (current := self._staging) is not None:
            current.outcomes.put(_closed_error())
        self._end_round()
        self._readers.stop()
        self._iterator.close()
        self._readers.join(deadline - time.monotonic())

    def __repr__(self) -> str:
        step = "" if self._position.step is None else f" at step {self._position.step},"
        return f"<DeviceIterator{step} up to {self._buffer_size} batches ahead on {self._placement}>"

    def _take(self) -> Any:
        try:
            current = self._running_round()
            staged = self._taken_from(current)
            self._readers.submit(current.stage)
            self._position = staged.position
        except BaseException:
            self._end_round()
            raise
        return staged.batch

    def _taken_from(self, current: "_Staging") -> "_Staged":
        # Somewhat longer than the iterator beneath waits: its error says more.
        wait = Wait(self._stall_timeout + LOOK_SECONDS)
        return current.take(wait, self._readers)

    def _begin(self) -> None:
        try:
            self._running_round()
        except BaseException:
            self._end_round()
            raise

    def _running_round(self) -> "_Staging":
        """Returns the staging at hand, or a new one from the consumer's position on."""
        self._check_open()
        current = self._staging
        if current is not None and current.next_position is self._position:
            return current
        self._end_round()
        current = self._begin_round()
        for _ in range(self._buffer_size):
            self._readers.submit(current.stage)
        # Not before: a staging with fewer jobs would have the consumer wait for a batch that is never staged.
        current.next_position = self._position
        return current

    def _go(self, move: Callable[[], None]) -> None:
        """Has the thread go to another position, and takes it for the consumer's if that succeeds."""
        self._check_open()
        self._alone(functools.partial(self._move, move))

    def _move(self, move: Callable[[], None]) -> None:
        self._end_round()
        try:
            current = self._begin_round()
            self._readers.submit(functools.partial(current.report, move))
            self._position = self._taken_from(current).position
        finally:
            self._end_round()

    def _begin_round(self) -> "_Staging":
        current = self._staging = _Staging(self._iterator, self._placement, self._position.state)
        # Another thread that closes this either finds the staging, and ends the wait for it, or is found out here.
        self._check_open()
        return current

    def _end_round(self) -> None:
        """Has the thread do nothing more of the staging, and lets go of what it staged."""
        if (current := self._staging) is not None:
            current.next_position = None
            current.is_over = True
            if current.is_awaited:
                # The consumer was interrupted: perhaps because the thread waits for what never comes.
                getattr(self._iterator, "interrupt", _do_nothing)()
        self._staging = None

    def _check_open(self) -> None:
        if self._is_closed:
            raise _closed_error()
        self._readers.check_process()


@dataclasses.dataclass(frozen=True, slots=True)
class _Position:
    """A position between two batches: the state that records it, the step, and the epoch."""

    state: Any
    step: int | None
    epoch: int | None

    @classmethod
    def of(cls, iterator: Any) -> "_Position":
        return cls(iterator.get_state(), getattr(iterator, "step", None), getattr(iterator, "epoch", None))


@dataclasses.dataclass(frozen=True, slots=True)
class _Staged:
    """A batch on the device, and the position after it."""

    batch: Any
    position: _Position


@final
class _Staging:
    """What is staged from one position on. Jobs run in the thread; the consumer takes what came of them, in order.

    Attributes:
        outcomes: what came of each job.
        next_position: the position before the batch that `take` returns next; None where it may be another one.
        is_awaited: whether the consumer waits for an outcome, or did when it was interrupted.
        is_over: whether jobs are to do nothing any more; set by either side.
    """

    def __init__(self, iterator: Any, placement: Placement, start: Any) -> None:
        self._iterator = iterator
        self._placement = placement
        self._start = start
        self._has_begun = False
        self.outcomes: queue.SimpleQueue[_Staged | BaseException] = queue.SimpleQueue()
        self.next_position: _Position | None = None
        self.is_awaited = False
        self.is_over = False

    def stage(self) -> None:
        """A job: puts the next batch on the device."""
        self.report(self._next_on_device)

    def report(self, work: Callable[[], Any]) -> None:
        """A job: does some work, and puts what it returned, with the position that it led to, or what it raised."""
        if self.is_over:
            return
        try:
            outcome: _Staged | BaseException = _Staged(work(), _Position.of(self._iterator))
        except BaseException as error:  # noqa: BLE001  (a thread has no one to raise to: the consumer gets it)
            self.is_over = True
            outcome = error
        self.outcomes.put(outcome)

    def take(self, wait: Wait, readers: ReaderThreads) -> _Staged:
        """Returns the outcome of the next job, after a bounded wait, or raises what it raised."""
        self.next_position = None
        self.is_awaited = True
        outcome: _Staged | BaseException | None = None
        while outcome is None:
            try:
                outcome = self.outcomes.get(timeout=wait.seconds)
            except queue.Empty:
                describe = getattr(self._iterator, "describe_next", None)
                text = "a batch on its way to the device" if describe is None else describe()
                outcome = wait.was_in_vain(text, readers.busy_threads)
        self.is_awaited = isinstance(outcome, WorkerStalledError)
        if isinstance(outcome, BaseException):
            raise outcome
        self.next_position = outcome.position
        return outcome

    def _next_on_device(self) -> Any:
        if not self._has_begun:
            # The last staging may have drawn more than it delivered.
            if self._iterator.get_state() != self._start:
                self._iterator.set_state(self._start)
            self._has_begun = True
        return self._placement.put(next(self._iterator))


def _do_nothing() -> None:
    """Interrupts nothing: a stream is waited for by the thread alone."""


def _closed_error() -> ValueError:
    return ValueError("The iterator is closed: call millstream.device_put(iter(loader)) for a new one.")
