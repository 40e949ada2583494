"""The iterator of a DataLoader: a position in the stream, and an executor that works from there.

Guarantees:
    * A signal handler may raise an exception at any line: the position is then that before the batch or the one after
      it, and the stream resumes there. Values that belong together are therefore assigned in one statement.
    * An executor that was interrupted is not used again, because it may have passed on outputs that were lost.
    * `next`, `seek`, `set_state` and `start_prefetch` raise ValueError while one of them fetches outputs for this
      iterator, in another thread or in the code that a signal handler interrupted. An output that was fetched is
      delivered without this check, which would cost too much. That is safe, because CPython switches threads and runs
      handlers only at calls and backward jumps, and the delivery has none.
    * `close`, `get_state` and `step` are safe in any thread and any handler at any time. They take no lock.
"""

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, Protocol, Self, final

from millstream.core.checks import as_integer
from millstream.core.trace_annotations import WAIT, annotation_if_tracing
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.checkpointable import ResumableIterator
from millstream.loader.checkpoints.state import (
    LoaderState,
    Run,
    Stream,
    combined,
    epoch_of,
    stream_of,
)
from millstream.loader.engine.engine import Engine, GivenUp
from millstream.loader.execution import Execution
from millstream.loader.measuring import ExecutorStatus
from millstream.loader.pipeline.calls import Blocks, Cursor, Outputs, Position
from millstream.loader.pipeline.elements import END, Elements, End, FailedRecord, Lack, Origins, SourceEnded
from millstream.loader.pipeline.steps import writable_copies
from millstream.loader.run_changes import Beginning, RunningIterator, state_of
from millstream.loader.threads.waiting import Watch, watch
from millstream.loader.views import Insight, Inspectable
from millstream.sharding import ShardOptions

if TYPE_CHECKING:
    from millstream.loader.replicas.executor import SharedExecutor


class Iterated(Protocol):
    """A `DataLoader`, which knows where its iterators begin."""

    def _beginning(self) -> Beginning: ...


@final
class DataLoaderIterator(RunningIterator, Inspectable, ResumableIterator):
    """Yields the batches of a `DataLoader`, and knows its position among them.

    `iter(loader)` returns it. Its position is just after the last batch delivered. Prefetched batches do not count,
    so a state taken between two training steps resumes with exactly the batch that would have come next.

    An exception raised by the pipeline leaves the position unchanged: `next` tries the same batch again and, if the
    pipeline is 1:1, `seek(step + 1)` skips it.

    It has the views of its loader, such as `summary()`. Use it in one thread at a time; any thread may `close` it.
    Concurrent use raises ValueError.

    Args:
        data_loader: the loader.
        state: a state to begin at, a result of `get_state`; None for the beginning of the stream.

    Raises:
        CheckpointError: the state is unreadable or of another stream.
        ValueError: the loader is closed.

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

    def __init__(self, data_loader: Iterated | Beginning, state: bytes | None = None) -> None:
        beginning = data_loader if isinstance(data_loader, Beginning) else data_loader._beginning()  # noqa: SLF001
        self._beginning = beginning
        self._execution = execution = beginning.execution
        self._plan = execution.plan
        self._stream = beginning.stream
        self._profiler = execution.profiler
        # None once the iterator was moved: a moved iterator repeats no pass by mistake.
        self._passes = beginning.passes
        self._executor: Engine | SharedExecutor | None = None
        self._watch: Watch | None = None
        # Executors that are no longer used, until they are closed. If an interruption prevents that, it is retried.
        self._closing: set[Engine | SharedExecutor] = set()
        self._is_closed = False
        self._reason = "call iter(loader) for a new one"
        # The number of batches of the stream before the position, those that were skipped included.
        self._step = 0
        self._run = Run.beginning(self._plan.partition.global_block)
        # The step up to which the profiler has counted delivered batches.
        self._counted_step = 0
        # The position is `_start`, or that after output `_row - 1` of `_outputs` if any of these were delivered.
        self._start = self._plan.beginning
        self._outputs: Outputs | None = None
        # The values of `_outputs`, in a separate list: None after delivery.
        self._values: list[Any] = []
        self._row = self._stop = 0
        # True if the stream ends at that position. A source that has ended is not called again.
        self._has_ended = False
        # True if the executor, if any, is at the end of `_outputs`. False if it was interrupted.
        self._executor_is_current = True
        # True if outputs may contain memory of the source, which the trainer cannot write to.
        self._copies = self._plan.yields_held_memory
        self._at_end: Callable[[], object] | None = None
        if state is not None:
            self.set_state(state)
        execution.register(self)

    @classmethod
    def of(cls, execution: Execution, stream: Stream | None = None) -> Self:
        """Returns an iterator at the beginning of a stream, which is fingerprinted if `stream` is None."""
        # Before any user operation has run, because an operation may change itself, for instance by counting calls.
        return cls(Beginning(execution, stream_of(execution.plan) if stream is None else stream))

    @property
    def step(self) -> int:
        """The number of training steps: of batches delivered since the beginning of the stream, and not skipped."""
        return self._step - self._run.last.offset

    @property
    def num_outputs(self) -> int:
        """The number of outputs before the next one, of which `step` counts those that were not skipped."""
        return self._step

    @property
    def epoch(self) -> int | None:
        """The epoch that the next batch begins in, from 0; None if the sampler has no epochs.

        At the end of the stream it is the number of epochs. If the pipeline is not 1:1, it is the epoch of the first
        record that is not consumed.
        """
        return epoch_of(self._plan, self.position_in_plan())

    @property
    def shard_options(self) -> ShardOptions:
        """The shard of each global batch that this iterator yields."""
        return self._plan.pipeline.shard

    def texts_for_hosts(self, *, is_same_shard: bool) -> tuple[dict[str, str], dict[str, str]]:
        """Returns the texts of the stream, by path, that must be the same on all hosts, and those that should be.

        A loader without shards, or a chain, may read records of its own, unless all hosts need the same rows. What is
        known of its end should still be the same.
        """
        stream, pipeline = self._stream, self._plan.pipeline
        if pipeline.shard.shard_count == 1 and not is_same_shard:
            return {}, {} if (end := pipeline.end_alone) is None else {"end of the stream": end}
        found = stream.fingerprint
        numbers = {
            "shard_count": stream.shard_count,
            "logical_shards": stream.logical_shards,
            "drop_remainder": stream.drop_remainder,
            "global batch": stream.global_batch,
            "records": "endless" if stream.length is None else stream.length,
        }
        changes = {f"{path} from {start}": text for start, path, text in found.changes}
        return {**{name: str(value) for name, value in numbers.items()}, **found.identity, **changes}, {**found.content}

    def __len__(self) -> int:
        """Returns the number of batches left, for `tqdm(iterator)`, also after resuming.

        Raises:
            TypeError: it is not known: the sampler is endless, or the pipeline is not 1:1.
        """
        return self.batches_after(self.step)

    def __next__(self) -> Any:
        """Returns the next batch.

        Raises:
            StopIteration: the stream has ended.
            ValueError: the iterator is closed.
            Exception: an error of an operation or the source, with notes of where it occurred.
        """
        while self._row == self._stop:
            self._check_open()
            # As in `_alone`, whose frame would be in each traceback.
            is_in_use, self._is_in_use = self._is_in_use, True
            if is_in_use:
                raise ValueError(self._in_use)
            try:
                if self._fetch() is not None:
                    raise StopIteration
            finally:
                self._is_in_use = False
        # There is no call and no backward jump from here to the end, see above: no output is lost between two lines,
        # or delivered twice. Values read within the loop could be old, because it has backward jumps.
        values, row = self._values, self._row
        value = values[row]
        self._row, self._step = row + 1, self._step + 1
        # The consumer owns the batch now: keep no reference to it.
        values[row] = None
        return value

    def fetch(self, *, shares: bool = False) -> Lack | None:
        """Fetches outputs if all were taken, as `next`, but waits for none. Returns the reason if there are none.

        With `shares`, operations get them, which change none.
        """
        self._copies = self._copies and not shares
        while self._row == self._stop:
            self._check_open()
            if (lack := self._alone(functools.partial(self._fetch, waits=False))) is not None:
                return lack
        return None

    def wait(self) -> None:
        """Waits until `fetch` need not, for a bounded time. Raises no error of the stream."""
        self._check_open()
        self._alone(self._fetch)

    def take(self, count: int) -> list[Any]:
        """Returns the next outputs, which were fetched."""
        values, row, stop = self._values, self._row, self._row + count
        taken = values[row:stop]
        self._row, self._step = stop, self._step + count
        values[row:stop] = [None] * count
        return taken

    def take_elements(self, count: int) -> Elements:
        """Returns the same with their origins."""
        outputs, rows = self._outputs, slice(self._row, self._row + count)
        return Elements(self.take(count), Origins.none() if outputs is None else outputs.origins.take(rows))

    def count_delivered(self) -> None:
        # The swap is one statement without a call, so that no two threads count the same batches.
        step = self._step
        before, self._counted_step = self._counted_step, step
        if self.consumer is None:
            records = self._plan.shards[0].records_between(before, step) if self._plan.one_to_one else 0
            self._profiler.delivered(step - before, records)

    def __del__(self) -> None:
        # Without the names of any module, which may be gone at the end of the interpreter.
        if hasattr(self, "_counted_step") and (self._step or self._executor is not None):
            self.count_delivered()
            try:
                self._profiler.last_position = self.delivered_position()
                if self._executor is not None and self._executor.failures is not None:
                    self._executor.failures.deliver(self.position_in_plan())
            except Exception:  # noqa: BLE001, S110  (the epoch needs such names)
                pass

    def describe_next(self) -> str:
        """Returns the records of the next batch as text, for errors. Any thread may call it."""
        block = self.position_in_plan()[0].block
        return self._plan.describe(Blocks(block, block + 1, 0))

    @property
    def stall_timeout(self) -> float:
        """The number of seconds after which a wait for one batch is an error."""
        return self._execution.stall_timeout

    def num_ready(self) -> int:
        return max(0, self._stop - self._row)

    def executor_status(self) -> ExecutorStatus | None:
        executor = self._executor
        # The executor changes meanwhile. A status that fails now succeeds the next time.
        with contextlib.suppress(RuntimeError, LookupError, OSError):
            return None if executor is None else executor.status()
        return None

    @property
    def insight(self) -> Insight:
        return self._execution.insight

    def worker_stacks(self) -> dict[int, str]:
        executor = self._executor
        return {} if executor is None else executor.stacks()

    def start_prefetch(self) -> None:
        """Begins to prefetch in the background and returns immediately, for instance while a model is restored.

        It does nothing without threads that read ahead, and without workers.
        """
        self._alone(self._begin)

    def get_state(self) -> bytes:
        """Returns the position as about a kilobyte of JSON, in microseconds. No thread or process is involved."""
        return self.loader_state().encode()

    def _return_to(self, unsealed: tuple[Any, ...]) -> None:
        self._check_open()
        self._check_can_resume()
        self.resume(state_of(*unsealed))

    def set_state(self, state: bytes, *, allow: Collection[str] = (), strict: bool = False) -> None:
        """Moves to the position of a state.

        The state may come from any iterator over the same stream, with other threads and workers, another number of
        epochs, and, if the pipeline is 1:1, another number of shards with the same global batch. If it is not 1:1, the
        state must be that of this shard, or of a shard that ran all its logical shards: if the number of shards has
        changed, pass all states to `set_states`. Changed content (code, objects, attributes of a user's source) is
        logged as a warning that names it, because it may well lead to the same batches.

        Args:
            state: a result of `get_state`.
            allow: differences to accept: any of "operations", "sampler", "source", "global_batch", "on_error", and
                "stream" of a chain, or paths within them, such as "operations[0].size". Another global batch must
                divide the saved position, and begins a segment of the run: steps and lineage go on.
            strict: True to refuse the state if content has changed, too.

        Raises:
            CheckpointError: the state is unreadable or of another stream. The iterator is unchanged.
            ValueError: the iterator is closed, or `allow` has an unknown name.
        """
        self._check_open()
        self._check_can_resume()
        self.resume(LoaderState.decode(state), allow, strict=strict)

    def set_states(self, states: Iterable[bytes], *, allow: Collection[str] = (), strict: bool = False) -> None:
        """Moves to the position of the states that all shards saved together.

        Any number of shards that divides the number of logical shards can resume from them; if the pipeline is 1:1, any
        number with the same global batch. `CheckpointRestore` calls this if needed.

        Args:
            states: results of `get_state` of all shards, at the same step, in any order.
            allow: as in `set_state`.
            strict: as in `set_state`.

        Raises:
            CheckpointError: a state is missing, unreadable, of another step or of another stream, or two are of the
                same shard. The iterator is unchanged.
            ValueError: the iterator is closed, or `allow` has an unknown name.

        Examples:
            >>> def batches_of(index, count):
            ...     shard = millstream.ShardOptions(shard_index=index, shard_count=count)
            ...     size = shard.local_batch_size(4)
            ...     return iter(millstream.load(range(100), batch_size=size, shard_options=shard))
            >>> with batches_of(0, 2) as first, batches_of(1, 2) as second, batches_of(0, 1) as single:
            ...     print(next(first), next(second))
            ...     single.set_states([first.get_state(), second.get_state()])
            ...     print(next(single))
            [0 1] [2 3]
            [4 5 6 7]
        """
        self._check_open()
        self._check_can_resume()
        self.resume(combined([LoaderState.decode(state) for state in states]), allow, strict=strict)

    def seek(self, step: int) -> None:
        """Moves to the position after the first `step` batches.

        It costs nothing for a 1:1 pipeline. For others, the batches in between are computed to count them. What was
        skipped before that step stays so, and later segments of the run are forgotten.

        Args:
            step: 0 … the number of batches in the stream.

        Raises:
            IndexError: there are fewer batches.
            TypeError: the source is a stream that is read in order.
            ValueError: the iterator is closed, or the step had another global batch.

        Examples:
            >>> with iter(millstream.load(range(100), batch_size=4)) as batches:
            ...     batches.seek(20)
            ...     print(next(batches))
            [80 81 82 83]
        """
        self._check_open()
        if reason := self._plan.reads_in_order_only:
            raise TypeError(f"Cannot seek: {reason}")
        step, run = as_integer(step, "step"), self._run.until(step)
        last = self._plan.shards[0].block_limit - run.last.offset
        if step < 0 and not self._plan.one_to_one:
            raise IndexError(f"step must be at least 0, got {step}.")
        if self._plan.one_to_one and not 0 <= step <= last:
            what = (
                "the number of batches"
                if self._plan.shards[0].num_blocks == last + run.last.offset
                else "the last step with positions below 2**63"
            )
            raise IndexError(f"step must be between 0 and {last}, {what}, got {step}.")
        if run.last.global_batch != self._plan.partition.global_block:
            raise ValueError(
                f"Step {step} had a global batch of {run.last.global_batch}, and this loader has one of "
                f"{self._plan.partition.global_block}. Seek with a loader of that global batch, and resume here from "
                "its state."
            )
        batch = step + run.last.offset
        if self._plan.one_to_one:
            self._alone(functools.partial(self._move, (Cursor(batch, (0,)),), batch, run))
        else:
            found = self._alone(functools.partial(self._seek_by_counting, batch, run))
            if found < batch:
                raise IndexError(f"step must be at most {found - run.last.offset}, the number of batches, got {step}.")

    def call_at_end(self, function: Callable[[], object]) -> None:
        """Calls a function when the stream has ended, and when the iterator is closed."""
        self._at_end = function

    def interrupt(self) -> None:
        """Ends all prefetching and keeps the position. Another thread that waits in `next` gets a ValueError."""
        self._end()

    def close(self) -> None:
        """Ends all prefetching and frees its results, within 2 s. Idempotent.

        Another thread that waits in `next` gets a ValueError.
        """
        self._close()

    def _close(self, deadline: float | None = None) -> None:
        self._is_closed = True
        self._end(deadline)
        self._beginning.execution.stop_idle_workers()
        if self._at_end is not None:
            self._at_end()

    def close_epoch(self) -> None:
        """Closes the iterator, and leaves its workers to the iterator of the next epoch."""
        if self._executor_is_current:
            self._settle()
        self.close()

    def close_with_loader(self, deadline: float | None = None) -> None:
        """Closes the iterator because its loader is closed, with the deadline of `Engine.close`."""
        self._reason = "its DataLoader was closed; build a new one"
        self._close(deadline)

    def __repr__(self) -> str:
        shard = self._plan.pipeline.shard
        return (
            f"<DataLoaderIterator at step {self.step}, {self.lifecycle}, "
            f"shard {shard.shard_index} of {shard.shard_count}>"
        )

    @property
    def lifecycle(self) -> str:
        return "closed" if self._is_closed else "idle" if self._executor is None else "running"

    def _begin(self) -> None:
        # After the end, nothing would release the workers again.
        if self._outputs is None and not self._has_ended:
            executor = self._running_executor()
            self._executor_is_current = False
            executor.start()
            self._executor_is_current = True

    def undelivered_errors(self) -> list[FailedRecord]:
        """Returns the failed records that were delivered and not counted yet. Any thread may call it."""
        executor = self._executor
        if executor is None or executor.failures is None:
            return []
        return executor.failures.before(self.position_in_plan())

    def _take_outputs(self, *, waits: bool) -> Lack | None:
        """Takes the next outputs of the executor. Returns the reason if there are none."""
        if self._has_ended:
            return END
        if self._outputs is not None and self._outputs.error is not None:
            return self._end_with(self._outputs.error)
        executor = self._executor
        if executor is None or self._is_closed or not self._executor_is_current or executor.is_orphaned:
            executor = self._running_executor()
        start, _ = self.position_and_step()
        try:
            self._executor_is_current = False
            outputs = executor.next_outputs() if waits else executor.poll()
            if outputs is None:
                self._finish()
                return END
            if not isinstance(outputs, Outputs):
                self._executor_is_current = True
                return self if outputs is executor else outputs
            self._adopt_outputs(start, outputs)
        except BaseException as error:
            # The executor may be in any state: the next call creates another one at the same position.
            self._end()
            if isinstance(error, Exception):
                # If another thread closed the iterator, the error is a consequence.
                self._check_open()
            if not isinstance(error, GivenUp):
                raise
            # The next executor needs no workers.
        return None

    def _adopt_outputs(self, start: Position, outputs: Outputs) -> None:
        values = outputs.values
        if self._copies or type(values) is not list:
            outputs.values = values = writable_copies(values) if self._copies else list(values)
        first, stop = outputs.first, len(values)
        self._start, self._outputs, self._values, self._row, self._stop = start, outputs, values, first, stop
        self._executor_is_current = True
        if self._profiler.output_bytes is None and first < stop:
            self._profiler.record_first_size(values[first])

    def _end_with(self, error: BaseException) -> End:
        """Raises the error in place of the next output, or returns END if it is the end of the stream."""
        if isinstance(error, SourceEnded):
            self._finish()
            return END
        self._deliver_failures(error)
        self._settle()
        raise error

    def _fetch(self, *, waits: bool = True) -> Lack | None:
        """Takes the next outputs, which may contain no values. Returns the reason if there are none."""
        self.count_delivered()
        if (executor := self._executor) is not None and executor.failures is not None:
            executor.failures.deliver(self.position_in_plan())
        if self.consumer is not None:
            return self._take_outputs(waits=waits)
        # Also if `start_prefetch` has begun: the wait for workers that start is not an ordinary one.
        is_first, start = self._outputs is None, self._profiler.begin_wait(self)
        try:
            if (trace := annotation_if_tracing(WAIT)) is None:
                return self._take_outputs(waits=waits)
            with trace:
                return self._take_outputs(waits=waits)
        finally:
            self._profiler.end_wait(self, start, is_first=is_first)

    def _running_executor(self) -> "Engine | SharedExecutor":
        self._check_open()
        if not self._executor_is_current or (self._executor is not None and self._executor.is_orphaned):
            self._end()
        if self._executor is None:
            if self._passes is not None and self._step == 0:
                self._passes.begin()
            self._execution.serve_if_requested()
            self._executor = executor = self._new_executor(self.position_in_plan())
            if executor.runs_user_code_here:
                self._watch = watch(executor, self.stall_timeout)
            self._executor_is_current = True
            if self._is_closed:
                # Another thread closed the iterator before it could see this executor.
                self._end()
                self._check_open()
            return executor
        return self._executor

    def _new_executor(self, position: Position) -> "Engine | SharedExecutor":
        execution = self._execution
        if self._plan.pipeline.shard.share_on_host and not execution.is_debugging:
            from millstream.loader.replicas.executor import SharedExecutor  # noqa: PLC0415  (lazy: rarely needed)
            from millstream.loader.replicas.messages import may_share, name_of_group  # noqa: PLC0415

            if may_share(self._plan):
                name = name_of_group(self._plan, self._stream)
                make, timeout = execution.make_engine, execution.stall_timeout
                return SharedExecutor(make, self._plan, position, self._profiler, name=name, stall_timeout=timeout)
        return execution.make_engine(position)

    def position_in_plan(self) -> Position:
        """Returns the position of the next output. Any thread may call it."""
        return self.position_and_step()[0]

    def position_and_step(self, back: int = 0) -> tuple[Position, int]:
        """Returns the position of the next output, and its step. Any thread may call it.

        They are those of an earlier one, `back` outputs before it, if all of these were fetched together.
        """
        # One statement without a call, where no other thread can move on or close the iterator.
        outputs, row, position, step = self._outputs, self._row - back, self._start, self._step - back
        return (position if outputs is None or row <= outputs.first else outputs.position_after(row - 1)), step

    def _unsealed_state(self) -> tuple[Any, ...]:
        # As above, so that all of these are from before a move, or from after it.
        outputs, row, start, step = self._outputs, self._row, self._start, self._step
        run, plan, stream = self._run, self._plan, self._stream
        position = start if outputs is None or row <= outputs.first else outputs.position_after(row - 1)
        return position, step, run, plan, stream

    def _deliver_failures(self, error: BaseException | None) -> None:
        """Counts all failures before the end of the stream, or before the error of one too many."""
        failures = None if self._executor is None else self._executor.failures
        if failures is None:
            return
        if error is None:
            failures.end()
        elif error is failures.error and len(self._start) == 1:
            # Of several logical shards, others may have been read further than the error.
            failures.deliver(None)

    def _finish(self) -> None:
        self._has_ended = True
        self._deliver_failures(None)
        if self._at_end is not None:
            self._at_end()
        if self._passes is not None:
            self._passes.end()
        if self._plan.source_is_stream:
            # Workers that have read a stream to its end would find nothing in the next pass.
            self._end()
        else:
            self._settle()

    def _settle(self) -> None:
        """Saves the position and stops using the executor. Its workers stay ready for another one."""
        if (executor := self._leave()) is not None:
            # In this order, because workers that others may use must not be closed later.
            self._closing.discard(executor)
            executor.pause()

    def _end(self, deadline: float | None = None) -> None:
        self._leave()
        for executor in list(self._closing):
            executor.close(deadline)
            self._closing.discard(executor)

    def _leave(self) -> "Engine | SharedExecutor | None":
        self.count_delivered()
        # First, because after an exception from here on the executor has passed outputs that are dropped.
        self._executor_is_current = False
        self._start, self._outputs, self._values, self._row, self._stop = self.position_in_plan(), None, [], 0, 0
        if (executor := self._executor) is not None:
            if executor.failures is not None:
                executor.failures.deliver(self._start)
            self._closing.add(executor)
        self._executor = None
        if self._watch is not None:
            self._watch.end()
            self._watch = None
        return executor

    def go(self, position: Position, step: int) -> None:
        """Moves to a position in the plan, which `step` outputs precede."""
        self._alone(functools.partial(self._move, position, step))

    def _move(
        self, position: Position, step: int, run: Run | None = None, source: tuple[Execution, Stream] | None = None
    ) -> None:
        """Moves to a position, with a history of the run and an execution of its weights if these are others."""
        self._settle()
        run = self._run if run is None else run
        execution, stream = source or (self._execution, self._stream)
        is_changed, plan = execution is not self._execution, execution.plan
        # Without a call in between: a state that is taken after an interruption has all of these, or none.
        self._execution, self._plan, self._stream, self._run = execution, plan, stream, run
        self._start, self._has_ended, self._passes = position, False, None
        self._step, self._counted_step = step, step
        if is_changed:
            execution.insight.change_plan(self, plan)

    def _seek_by_counting(self, step: int, run: Run) -> int:
        """Moves on to a number of batches, or from the beginning, and adopts the run. Returns the number reached.

        If there are fewer batches, the position stays.
        """
        position, old_step = self.position_and_step()
        if step < self._step:
            self._move(self._plan.beginning, 0)
        try:
            while self._step < step:
                if self._row < self._stop:
                    self.__next__()
                    # Computed only to be counted: it is not delivered.
                    self._counted_step = self._step
                elif self._fetch() is not None:
                    length = self._step
                    self._move(position, old_step)
                    return length
        except BaseException:
            self._move(position, old_step)
            raise
        self._run = run
        return step

    def _check_open(self) -> None:
        if self._is_closed:
            raise ValueError(f"The iterator is closed: {self._reason}.")

    def _check_can_resume(self) -> None:
        if reason := self._plan.reads_in_order_only:
            raise CheckpointError(f"Cannot resume: {reason}")
