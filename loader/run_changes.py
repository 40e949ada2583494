"""The run of an iterator: states, skipped batches, weights set at run time, the sizes and the lineage of its steps."""

import dataclasses
import functools
import json
from collections.abc import Collection
from typing import Any, NamedTuple, final

from millstream.core.checks import as_integer
from millstream.core.warn import log_warning
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.checkpointable import Exclusive
from millstream.loader.checkpoints.fingerprint import Declared
from millstream.loader.checkpoints.state import (
    LoaderState,
    Run,
    Stream,
    count_outputs,
    fingerprint_of_pipeline,
    state_at,
    stream_of,
)
from millstream.loader.execution import Execution
from millstream.loader.lineage import Lineage, RunLineage
from millstream.loader.pipeline.calls import Cursor, Position
from millstream.loader.pipeline.elements import seed_of
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.views import Measured
from millstream.samplers.mixtures.mixing import Weights
from millstream.samplers.mixtures.mixture import MixtureSampler
from millstream.transforms import Batch, RandomMap


@final
class RepeatedPasses:
    """Detects that a loader which was read to its end is read from its beginning again."""

    def __init__(self, pipeline: Pipeline) -> None:
        shuffles = seed_of(pipeline.order) is not None and getattr(pipeline.sampler, "shuffle", True)
        draws = pipeline.view.differs_by_epoch
        self._is_random = (
            shuffles or draws or any(isinstance(operation, RandomMap) for operation in pipeline.operations)
        )
        self._has_ended = False

    def begin(self) -> None:
        if self._has_ended and self._is_random:
            self._is_random = False
            log_warning(
                "this loader was read to its end, and is read from its beginning again, with the "
                "same order and the same random draws. For new ones in each epoch, write: "
                "for epoch, batches in loader.epochs(10): ..."
            )

    def end(self) -> None:
        self._has_ended = True


class Beginning(NamedTuple):
    """The beginning of a stream.

    Attributes:
        passes: warns of repeated passes; None if they are intended.
        declared: the description of source and operations, made at construction; None to describe them when needed.
    """

    execution: Execution
    stream: Stream
    passes: RepeatedPasses | None = None
    declared: Declared | None = None


class RunningIterator(Measured, Lineage, Exclusive):
    """An iterator whose run may change: the part of `DataLoaderIterator` that knows its history."""

    _beginning: Beginning
    _execution: Execution
    _plan: Plan
    _stream: Stream
    _run: Run

    @property
    def step(self) -> int:
        raise NotImplementedError

    def _check_open(self) -> None:
        raise NotImplementedError

    def position_and_step(self, back: int = 0) -> tuple[Position, int]:
        """Returns the position of the next output, and its step."""
        raise NotImplementedError

    def _move(
        self, position: Position, step: int, run: Run | None = None, source: tuple[Execution, Stream] | None = None
    ) -> None:
        raise NotImplementedError

    def _seek_by_counting(self, step: int, run: Run) -> int:
        raise NotImplementedError

    def _unsealed_state(self) -> tuple[Any, ...]:
        raise NotImplementedError

    def _sealed(self, unsealed: tuple[Any, ...]) -> bytes:
        return state_of(*unsealed).encode()

    def loader_state(self) -> LoaderState:
        """Returns the state that `get_state` encodes."""
        return state_of(*self._unsealed_state())

    def resume(self, saved: LoaderState, allow: Collection[str] = (), *, strict: bool = False) -> None:
        """Moves to the position of a state that was read."""
        from millstream.loader.checkpoints import compatibility  # noqa: PLC0415  (lazy: only resuming needs it)

        run = self._completed(saved.run or Run.beginning(saved.stream.global_batch))
        source = self._changed(run.changes)
        here = self.loader_state()._replace(stream=source[1])
        found = compatibility.resumption(saved, here, allow, strict=strict)
        position, step = found.position, saved.step + run.last.offset
        if self._plan.one_to_one:
            step = min(position[0].block, self._plan.shards[0].block_limit)
        size = self._plan.partition.global_block
        if run.last.global_batch != size:
            run = run.moved(saved.step, step, size)
        self._alone(functools.partial(self._move, position, step, run, source))
        if found.changes:
            compatibility.warn_of_changes(found.changes)

    def skip(self, count: int) -> None:
        """Moves on by `count` batches that are not trained on, for instance those after which the loss has risen.

        `step` stays: the next step takes a later batch. States have this, and `record_keys`, `steps_of` and
        `composition` of the iterator count the batches that training has seen. Call it on all hosts, at the same step.

        It costs nothing for a 1:1 pipeline. For others, the batches are computed to count them.

        Args:
            count: the number of batches, from 0 on.

        Raises:
            IndexError: fewer batches are left.
            TypeError: the source is a stream that is read in order.
            ValueError: the iterator is closed, or count is negative.

        Examples:
            >>> with iter(millstream.load(range(100), batch_size=4)) as batches:
            ...     _ = next(batches)
            ...     batches.skip(20)
            ...     print(next(batches), batches.step, batches.record_keys(1))
            [84 85 86 87] 2 [84 85 86 87]
        """
        self._check_open()
        if reason := self._plan.reads_in_order_only:
            raise TypeError(f"Cannot skip: {reason}")
        self._alone(functools.partial(self._skip, as_integer(count, "count", minimum=0)))

    def _skip(self, count: int) -> None:
        step, size = self.step, self._plan.partition.global_block
        batch = step + self._run.last.offset + count
        run = self._run.moved(step, batch, size)
        is_one_to_one = self._plan.one_to_one
        found = self._plan.shards[0].block_limit if is_one_to_one else self._seek_by_counting(batch, run)
        if found < batch:
            left = found - batch + count
            raise IndexError(f"count must be at most {left}, the number of batches left, got {count}.")
        if is_one_to_one:
            self._move((Cursor(batch, (0,)),), batch, run)

    def reweight(self, weights: Weights) -> None:
        """Gives the mixture other weights from the next batch on, for instance by the losses of its corpora.

        No component starts over, and workers stay. States have the weights, so a program that resumes need not know
        them. Weights that the program has planned for later positions are dropped. Call it on all hosts, with the same
        weights at the same step.

        Args:
            weights: as for `MixtureSampler.reweighted`.

        Raises:
            TypeError: the sampler is not a `MixtureSampler`, or a weight is not a number.
            ValueError: the weights are not valid, the pipeline is not 1:1, or the iterator is closed or one of
                `loader.epochs`.

        Examples:
            >>> loader = millstream.load({"a": [1, 2], "b": [7, 8]}, weights={"a": 1, "b": 1}, batch_size=4)
            >>> with iter(loader) as batches:
            ...     _ = next(batches)
            ...     batches.reweight({"a": 3, "b": 1})
            ...     print(next(batches))
            [2 7 1 1]
        """
        self._check_open()
        pipeline = self._execution.pipeline
        if not isinstance(pipeline.sampler, MixtureSampler):
            raise TypeError(f"reweight needs a loader with a MixtureSampler, got {type(pipeline.sampler).__name__}.")
        if not self._plan.one_to_one:
            raise ValueError(
                f"reweight needs a 1:1 pipeline, in which the next batch has a position. The batches after "
                f"{self._plan.first_dynamic_label}, depend on the elements: build a loader with sampler.reweighted."
            )
        if pipeline.epoch is not None:
            raise ValueError(
                "reweight needs one iterator over all epochs, iter(loader), and this one ends with its epoch. Use "
                "sampler.reweighted, whose positions are counted over all epochs."
            )
        self._alone(functools.partial(self._reweight, pipeline.sampler, weights))

    def _reweight(self, sampler: MixtureSampler, weights: Weights) -> None:
        (cursor,), _ = self.position_and_step()
        position = cursor.block * self._plan.partition.global_block
        changed = sampler.reweighted(position, weights)
        if changed.changes == sampler.changes:
            return
        kept = tuple(change for change in self._run.changes if change[0] < position)
        # The same weights as before begin no new period, and drop later ones.
        now = next(weights_set for start, weights_set in reversed(changed.changes) if start <= position)
        run = dataclasses.replace(self._run, changes=(*kept, (position, now)))
        self._move(*self.position_and_step(), run, self._changed(run.changes))

    def _changed(self, changes: tuple[tuple[int, Any], ...]) -> tuple[Execution, Stream]:
        """Returns the execution and the stream with weights that were set at run time."""
        if changes == self._run.changes:
            return self._execution, self._stream
        beginning = self._beginning
        base = beginning.execution
        if not changes:
            return base, beginning.stream
        if not isinstance(base.pipeline.sampler, MixtureSampler):
            raise CheckpointError(
                f"The state has weights of a mixture that were set at run time, and the sampler here is a "
                f"{type(base.pipeline.sampler).__name__}. Build the loader as it was when the state was saved."
            )
        try:
            execution = base.with_changes(json.dumps(changes))
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"The state has weights of a mixture that were set at run time, and not of the one here: {error}"
            ) from error
        return execution, stream_of(execution.plan, fingerprint_of_pipeline(execution.pipeline, beginning.declared))

    def _completed(self, run: Run) -> Run:
        """Returns the history of a state with the weight 0 for components that the program has added since."""
        added = dict.fromkeys(getattr(self._beginning.execution.pipeline.sampler, "names", ()), 0)
        completed = [
            (start, added | weights if isinstance(weights, dict) else weights) for start, weights in run.changes
        ]
        return dataclasses.replace(run, changes=tuple(completed))

    def records_between(self, first: int, stop: int) -> int:
        """Returns the number of records in the batches of the steps [first, stop) of a 1:1 pipeline; 0 for any other.

        They are steps of the present segment of the run.
        """
        offset = self._run.last.offset
        return self._plan.shards[0].records_between(first + offset, stop + offset) if self._plan.one_to_one else 0

    @property
    def rows_per_batch(self) -> int | None:
        """The number of rows of complete batches; None if it is not known."""
        last = self._plan.pipeline.operations[-1:]
        return last[0].batch_size if last and isinstance(last[0], Batch) else None

    def rows_agree(self, step: int) -> bool | None:
        """Returns True if the batch after `step` others has as many rows on all shards; None if it is not known."""
        agree = self._plan.pipeline.ends_agree
        if agree is not False:
            return agree
        complete_blocks = self._plan.partition.complete_blocks
        return (
            step + self._run.last.offset < complete_blocks
            if self._plan.one_to_one and complete_blocks is not None
            else None
        )

    def batches_after(self, step: int) -> int:
        """Returns the number of batches after `step` steps, in the present segment of the run."""
        return count_outputs(self._plan, "iterator") - step - self._run.last.offset

    @property
    def lineage(self) -> RunLineage:
        return RunLineage(self._execution.pipeline, self._plan, self._run)

    def spans_before(self, step: int) -> list[tuple[int, int]]:
        """Returns the positions of the batches before a step, as ranges."""
        ranges = self._run.ranges(0, step)
        found = [(segment.global_batch, start, stop) for segment, start, stop in ranges if stop is not None]
        return [(size * start, size * stop) for size, start, stop in found]


def state_of(position: Position, step: int, run: Run, plan: Plan, stream: Stream) -> LoaderState:
    state = state_at(position, step - run.last.offset, plan, stream)
    return state if run.is_plain else state._replace(run=run)
