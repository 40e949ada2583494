"""The iterator that a training loop holds: a position in the stream, and an executor that works from there on.

Guarantees:
    * An exception may come at any line, from a signal's handler: the position is then that before the batch or the one
      after it, and the stream resumes there. What belongs together is therefore assigned in one statement.
    * An executor that was interrupted, and may have given out what nobody got, is not used again.
    * `next`, `seek`, `set_state` and `start_prefetch` raise a ValueError while one of them works ahead or fetches
      outputs for this iterator, in another thread or in the code that a signal's handler interrupted. An element that
      is there already is delivered without a look at who asks, which would cost too much: CPython changes threads and
      runs handlers at calls and jumps back only, and there is none in between.
    * `close`, `get_state` and `step` may be used in any thread and any handler, at any time: they take no lock.
"""

import contextlib
import enum
import functools
import math
import time
import weakref
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Protocol, final

from millstream.checks import as_integer
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.resumable import ResumableIterator
from millstream.loader.checkpoints.state import LoaderState, Stream
from millstream.loader.insight import Insight
from millstream.loader.inspectable import Inspectable
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.executor import Executor
from millstream.loader.pipeline.outputs import Cursor, Outputs, Position
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.progress import count_outputs, epoch_of, records_before
from millstream.loader.pipeline.requests import Blocks
from millstream.loader.pipeline.source_end import SourceEnded
from millstream.loader.repeated_passes import RepeatedPasses
from millstream.loader.state_of_plan import state_at
from millstream.loader.threads.profiler import Profiler
from millstream.sharding import ShardOptions

if TYPE_CHECKING:
    from millstream.loader.pipeline.load import IteratorLook


class Lifecycle(enum.Enum):
    """What an iterator is doing."""

    IDLE = enum.auto()
    """No executor: nothing is read ahead. The next call of `next` makes one."""
    RUNNING = enum.auto()
    """An executor works from the iterator's position on."""
    CLOSED = enum.auto()
    """Closed by the user: `next` is an error, the state can still be taken."""


class MeasuringConsumer(Protocol):
    """An iterator around this one that the trainer calls, and that measures the trainer's waits."""

    asked_at: float | None

    @property
    def step(self) -> int:
        """The number of batches delivered to the trainer."""

    @property
    def epoch(self) -> int | None:
        """The epoch that the next of these begins in."""


@final
class DataLoaderIterator(Inspectable, ResumableIterator):
    """Yields the batches of a `DataLoader`, and knows its position among them.

    Made by `iter(loader)`. Its position is just after the last batch delivered: batches read ahead do not count,
    so a state taken between two training steps resumes with exactly the batch that would have come next.

    An exception raised by the pipeline leaves the position as it was: `next` tries the same batch again and, where the
    pipeline is 1:1, `seek(step + 1)` skips it.

    One thread at a time may use it, except that any may `close` it. Where two meet, one gets a ValueError.

    Examples:
        >>> loader = millstream.load(range(100), shuffle=True, seed=0, batch_size=4)
        >>> with iter(loader) as batches:
        ...     _ = next(batches)
        ...     state = batches.get_state()
        ...     following = next(batches)
        >>> with iter(loader) as batches:
        ...     batches.set_state(state)
        ...     print(batches.step, (next(batches) == following).all())
        1 True
    """

    def __init__(
        self,
        plan: Plan,
        stream: Stream,
        profiler: Profiler,
        make_executor: Callable[[Position], Executor],
        stop_idle: Callable[[], None],
        *,
        passes: RepeatedPasses | None = None,
        stall_timeout: float = math.inf,
        insight: Insight,
    ) -> None:
        self._plan = plan
        self._stream = stream
        self._profiler = profiler
        self._make_executor = make_executor
        self._stop_idle = stop_idle
        self._stall_timeout = stall_timeout
        self._insight = insight
        # None once the iterator was moved: who does that knows where it is.
        self._passes = passes
        self._executor: Executor | None = None
        # Those that are left, until they are closed: what an interruption of that has left undone is done next time.
        self._left: set[Executor] = set()
        self._lifecycle = Lifecycle.IDLE
        self._reason = "call iter(loader) for a new one"
        self._step = 0
        # The step up to which the profiler has counted what was delivered.
        self._counted_step = 0
        # The consumer that measures its own waits, for instance device_put; None if the trainer calls this iterator.
        self._consumer: weakref.ref[MeasuringConsumer] | None = None
        # The position is `_start`, or that after output `_row - 1` of `_outputs` where any of those were delivered.
        self._start = plan.beginning
        self._outputs: Outputs | None = None
        # What these are, in a list of its own: None where they were delivered.
        self._values: list[Any] = []
        self._row = self._stop = 0
        # Whether nothing comes after that position: a source that says so is not asked again.
        self._has_ended = False
        # Whether the executor, if there is one, stands at the end of `_outputs`: not where it was interrupted.
        self._is_sound = True
        self._left_at: float | None = None
        # Since when the consumer is inside `next`, unless what it asks for was there already.
        self.asked_at: float | None = None

    @property
    def step(self) -> int:
        """The number of batches delivered since the beginning of the stream."""
        return self._step

    @property
    def epoch(self) -> int | None:
        """The epoch that the next batch begins in, from 0; None where the sampler has no epochs.

        At the end of the stream it is the number of epochs. Where the pipeline is not 1:1, it is the epoch of the first
        record that is not used up.
        """
        return epoch_of(self._plan, self._position())

    @property
    def shard_options(self) -> ShardOptions:
        """The shard of each global batch that the batches hold."""
        return self._plan.pipeline.shard

    def batches_after(self, step: int) -> int:
        """Returns how many batches follow the first `step` batches of the stream.

        Raises:
            TypeError: it is not known: the sampler is endless, or an operation decides while reading.
        """
        return count_outputs(self._plan, "iterator") - step

    def __len__(self) -> int:
        """Returns how many batches are left: what `tqdm(iterator)` counts to, after a resume too.

        Raises:
            TypeError: it is not known: the sampler is endless, or an operation decides while reading.
        """
        return self.batches_after(self._step)

    def __next__(self) -> Any:
        """Returns the next batch.

        Raises:
            StopIteration: the stream has ended.
            ValueError: the iterator is closed.
            Exception: whatever an operation or the source raised, with notes of where.
        """
        while self._row == self._stop:
            self._check_open()
            self._alone(self._fetch)
        # No call and no jump back from here to the end, see above: no element is lost between two lines, or delivered
        # twice. What was read within the loop would be old: since Python 3.14, it is left after a jump back only.
        values, row = self._values, self._row
        value = values[row]
        self._row, self._step = row + 1, self._step + 1
        # The batch is the consumer's now: hold on to nothing of it.
        values[row] = None
        return value

    def take(self, most: int) -> Elements:
        """Returns the next outputs, with their origins: as many as are there, at least one and `most` at most.

        Raises:
            StopIteration, ValueError, Exception: as `next`.
        """
        if self._row == self._stop:
            self._check_open()
            self._alone(self._fetch)
        outputs, values, row = self._outputs, self._values, self._row
        if outputs is None:
            raise AssertionError("fetched")
        stop = min(row + most, self._stop)
        taken = Elements(values[row:stop], outputs.origins.take(slice(row, stop)))
        self._row, self._step = stop, self._step + stop - row
        values[row:stop] = [None] * (stop - row)
        return taken

    def count_delivered(self) -> None:
        """Has the profiler count what was delivered since the last time. Any thread may ask."""
        # In one statement, without a call: nobody counts the same batches.
        before, self._counted_step = self._counted_step, self._step
        if self._consumer is None:
            self._profiler.delivered(self._counted_step - before)

    def describe_next(self) -> str:
        """Returns the records of the next batch as text, for errors. Any thread may ask."""
        block = self._position()[0].block
        return self._plan.describe(Blocks(block, block + 1, 0))

    @property
    def consumer(self) -> "MeasuringConsumer | None":
        """The consumer that measures its own waits; None if this iterator measures those of the trainer."""
        return None if self._consumer is None else self._consumer()

    def let_measure(self, consumer: "MeasuringConsumer") -> None:
        """Lets a consumer, which the trainer calls instead, measure the trainer's waits from now on."""
        self._consumer = weakref.ref(consumer)

    def delivered_position(self) -> tuple[int, int | None]:
        """Returns step and epoch as the trainer knows them. Any thread may call it."""
        consumer = self.consumer
        return (self._step, self.epoch) if consumer is None else (consumer.step, consumer.epoch)

    @property
    def stall_timeout(self) -> float:
        """The number of seconds after which a wait for one batch is an error."""
        return self._stall_timeout

    def look(self) -> "IteratorLook":
        """Returns what this iterator does now, for those who look from outside. Any thread may ask."""
        from millstream.loader.pipeline.load import IteratorLook  # noqa: PLC0415  (for those who look)

        now, executor, consumer = time.perf_counter(), self._executor, self.consumer
        asked_at = (self if consumer is None else consumer).asked_at
        step, epoch = self.delivered_position()
        load = None
        # The executor works on meanwhile: what cannot be said now can be said the next time.
        with contextlib.suppress(RuntimeError, LookupError, OSError):
            load = None if executor is None else executor.load()
        return IteratorLook(
            step=step,
            records=records_before(self._plan, self._position()),
            epoch=epoch,
            lifecycle=self._lifecycle.name.lower(),
            waits_for=None if asked_at is None else max(0.0, now - asked_at),
            at_hand=max(0, self._stop - self._row),
            load=load,
        )

    @property
    def insight(self) -> Insight:
        """The views of the pipeline, shared with its loader."""
        return self._insight

    def worker_stacks(self) -> dict[int, str]:
        """Returns the stacks of the worker processes that work for this iterator, by process. Any thread may ask."""
        executor = self._executor
        return {} if executor is None else executor.stacks()

    def start_prefetch(self) -> None:
        """Begins to read ahead in the background and returns at once, for instance while a model is restored.

        Does nothing where there are no threads to read ahead.
        """
        self._alone(self._begin)

    def get_state(self) -> bytes:
        """Returns the position as a few hundred bytes of JSON, at once: no thread or process is asked."""
        return self._state().encode()

    def set_state(self, state: bytes, *, allow: Collection[str] = (), strict: bool = False) -> None:
        """Moves to the position recorded in a state.

        The state may come from any iterator over the same stream, with other threads and workers, another number of
        epochs, and, where the pipeline is 1:1, another number of shards at the same global batch. In others, it is
        that of this shard, or of one that ran all its logical shards: where the number of shards has changed, give
        all states to `set_states`. Content that has changed since (code, objects, attributes of your own source) is a
        warning in the log of "millstream" that names it: it may well make the same batches.

        Args:
            state: what `get_state` returned.
            allow: differences to accept on purpose: any of "operations", "sampler", "source", "global_batch", or paths
                within them, such as "operations[0].size". Another global batch must divide the saved position.
            strict: whether to refuse the state, too, if content has changed.

        Raises:
            CheckpointError: the state is unreadable or of another stream. The iterator is as it was.
            ValueError: the iterator is closed, or `allow` has an unknown name.
        """
        self._check_open()
        self._check_can_resume()
        self._resume(LoaderState.decode(state, self._stream), allow, strict=strict)

    def set_states(self, states: Iterable[bytes], *, allow: Collection[str] = (), strict: bool = False) -> None:
        """Moves to the position recorded in the states of all shards that saved together.

        Any number of shards can resume from them that divides the number of logical shards; where the pipeline is 1:1,
        any at the same global batch. `CheckpointRestore` does this by itself.

        Args:
            states: what `get_state` returned on each of the shards, at the same step, in any order.
            allow: as in `set_state`.
            strict: as in `set_state`.

        Raises:
            CheckpointError: a state is missing, unreadable, of another step or of another stream, or two are of the
                same shard. The iterator is as it was.
            ValueError: the iterator is closed, or `allow` has an unknown name.

        Examples:
            >>> def part(index, count):
            ...     shard = millstream.ShardOptions(shard_index=index, shard_count=count)
            ...     size = shard.local_batch_size(4)
            ...     return iter(millstream.load(range(100), batch_size=size, shard_options=shard))
            >>> with part(0, 2) as first, part(1, 2) as second, part(0, 1) as whole:
            ...     print(next(first), next(second))
            ...     whole.set_states([first.get_state(), second.get_state()])
            ...     print(next(whole))
            [0 1] [2 3]
            [4 5 6 7]
        """
        self._check_open()
        self._check_can_resume()
        from millstream.loader.checkpoints.combination import combined  # noqa: PLC0415  (for those who resume)

        self._resume(combined([LoaderState.decode(state) for state in states]), allow, strict=strict)

    def seek(self, step: int) -> None:
        """Moves to the position after the first `step` batches.

        Costs nothing for a 1:1 pipeline. In others, the batches in between must be made to be counted.

        Args:
            step: 0 … the number of batches in the stream.

        Raises:
            IndexError: there are fewer batches.
            TypeError: the source is a stream that returns whatever comes next.
            ValueError: the iterator is closed.

        Examples:
            >>> with iter(millstream.load(range(100), batch_size=4)) as batches:
            ...     batches.seek(20)
            ...     print(next(batches))
            [80 81 82 83]
        """
        self._check_open()
        if reason := self._plan.reads_in_order_only:
            raise TypeError(f"Cannot seek: {reason}")
        step, last = as_integer(step, "step"), self._plan.shards[0].block_limit
        if step < 0 and not self._plan.one_to_one:
            raise IndexError(f"step must be at least 0, got {step}.")
        if self._plan.one_to_one and not 0 <= step <= last:
            what = "the number of batches" if self._plan.shards[0].num_blocks == last else "where positions reach 2**63"
            raise IndexError(f"step must be between 0 and {last}, {what}, got {step}.")
        if self._plan.one_to_one:
            self._go((Cursor(step, (0,)),), step)
        else:
            self._alone(functools.partial(self._seek_by_counting, step))

    def interrupt(self) -> None:
        """Ends all work ahead and keeps the position. Another thread that waits in `next` gets a ValueError."""
        self._end()

    def close(self) -> None:
        """Stops reading ahead and frees what was read. Takes at most two seconds. Idempotent.

        May be called while another thread waits in `next`, which is a ValueError then.
        """
        self._lifecycle = Lifecycle.CLOSED
        self._end()
        self._stop_idle()

    def close_with_loader(self) -> None:
        """Closes the iterator because its loader is closed."""
        self._reason = "its DataLoader was closed: build a new one"
        self.close()

    def __repr__(self) -> str:
        shard = self._plan.pipeline.shard
        return (
            f"<DataLoaderIterator at step {self._step}, {self._lifecycle.name.lower()}, "
            f"shard {shard.shard_index} of {shard.shard_count}>"
        )

    def _begin(self) -> None:
        if self._outputs is None:
            executor = self._running_executor()
            self._is_sound = False
            executor.start()
            self._is_sound = True

    def _advance(self) -> bool:
        """Moves on to the next outputs; returns False at the end of the stream."""
        self.count_delivered()
        if self._consumer is not None:
            return self._take_outputs()
        start, is_first = time.perf_counter(), self._executor is None
        self.asked_at = start
        self._profiler.returned(self._left_at, start)
        try:
            return self._take_outputs()
        finally:
            self.asked_at = None
            self._left_at = time.perf_counter()
            self._profiler.waited(start, self._left_at, is_first=is_first)

    def _take_outputs(self) -> bool:
        if self._has_ended:
            return False
        if self._outputs is not None and self._outputs.error is not None:
            error = self._outputs.error
            if isinstance(error, SourceEnded):
                self._finish()
                return False
            self._settle()
            raise error
        executor, start = self._running_executor(), self._position()
        try:
            self._is_sound = False
            if (outputs := executor.next_outputs()) is None:
                self._finish()
                return False
            outputs.values = values = list(outputs.values)
            first, stop = outputs.first, len(values)
            self._start, self._outputs, self._values, self._row, self._stop = start, outputs, values, first, stop
            self._is_sound = True
            if first < stop:
                self._profiler.came(values[first])
        except BaseException as error:
            # The executor may be in any state: the next call begins with a new one, from the same position.
            self._end()
            if isinstance(error, Exception):
                # Closed by another thread: whatever the executor met with is the consequence.
                self._check_open()
            raise
        return True

    def _fetch(self) -> None:
        """Has outputs at hand that were not delivered; StopIteration where there are no more."""
        while self._row == self._stop:
            if not self._advance():
                raise StopIteration

    def _running_executor(self) -> Executor:
        self._check_open()
        if not self._is_sound:
            self._end()
        if self._executor is None:
            if self._passes is not None and self._step == 0:
                self._passes.begin()
            self._executor = executor = self._make_executor(self._position())
            self._is_sound = True
            if self._lifecycle is Lifecycle.CLOSED:
                # By another thread, which did not see this executor.
                self._end()
                self._check_open()
            self._lifecycle = Lifecycle.RUNNING
            return executor
        return self._executor

    def _position(self) -> Position:
        outputs, row = self._outputs, self._row  # Another thread that closes the iterator may look here at any moment.
        if outputs is None or row <= outputs.first:
            return self._start
        return outputs.position_after(row - 1)

    def _finish(self) -> None:
        """Leaves the executor at the end of the stream."""
        self._has_ended = True
        if self._passes is not None:
            self._passes.end()
        if self._plan.source_is_stream:
            # Workers that have read it to its end would find nothing in the next pass.
            self._end()
        else:
            self._settle()

    def _settle(self) -> None:
        """Remembers the position and leaves the executor; what it has that can serve another one stays ready."""
        if (executor := self._leave()) is not None:
            # Not the other way round: what was given back to serve others must not be closed later.
            self._left.discard(executor)
            executor.pause()

    def _end(self) -> None:
        """Remembers the position and ends the executor."""
        self._leave()
        for executor in list(self._left):
            executor.close()
            self._left.discard(executor)

    def _leave(self) -> Executor | None:
        self.count_delivered()
        # First: an exception from here on leaves the executor after outputs that are dropped, so it is not used again.
        self._is_sound = False
        self._start, self._outputs, self._values, self._row, self._stop = self._position(), None, [], 0, 0
        if (executor := self._executor) is not None:
            self._left.add(executor)
        self._executor = None
        if self._lifecycle is Lifecycle.RUNNING:
            self._lifecycle = Lifecycle.IDLE
        return executor

    def _resume(self, saved: LoaderState, allow: Collection[str], *, strict: bool) -> None:
        """Goes to the position of a state."""
        from millstream.loader.checkpoints import compatibility  # noqa: PLC0415  (for those who resume)

        here = self._state()._replace(stream=self._stream)
        found = compatibility.resumption(saved, here, allow, strict=strict)
        position = tuple(Cursor(*place) for place in found.places)
        shard = self._plan.shards[0]
        self._go(position, min(position[0].block, shard.block_limit) if self._plan.one_to_one else saved.step)
        if found.changes:
            compatibility.warn_of_changes(found.changes)

    def _go(self, position: Position, step: int) -> None:
        self._alone(functools.partial(self._move, position, step))

    def _move(self, position: Position, step: int) -> None:
        """Goes to a position, while the iterator is marked as in use."""
        self._settle()
        self._start, self._has_ended, self._passes = position, False, None
        self._step = self._counted_step = step

    def _seek_by_counting(self, step: int) -> None:
        position, old_step = self._position(), self._step
        if step < self._step:
            self._move(self._plan.beginning, 0)
        try:
            while self._step < step:
                self._fetch()
                self.__next__()
                # It was made to be counted, and nobody gets it.
                self._counted_step = self._step
        except StopIteration:
            there = self._step
            self._move(position, old_step)
            raise IndexError(f"step must be at most {there}, the number of batches, got {step}.") from None
        except BaseException:
            self._move(position, old_step)
            raise

    def _check_open(self) -> None:
        if self._lifecycle is Lifecycle.CLOSED:
            raise ValueError(f"The iterator is closed: {self._reason}.")

    def _check_can_resume(self) -> None:
        if reason := self._plan.reads_in_order_only:
            raise CheckpointError(f"Cannot resume: {reason}")

    def _state(self) -> LoaderState:
        return state_at(self._position(), self._step, self._plan, self._stream)
