"""Iterators of chains that run a loader's iterator: the base class, and the iterator of a straight chain.

A chain has two plans. In the dense plan, every position has an element, and a block is a batch, as in a 1:1 pipeline.
The sparse plan drops missing elements first, and therefore regroups. Both yield the same if no element is missing, so
an iterator may begin with the dense plan and change to the sparse one at any position. States are the same for both.
"""

import abc
import dataclasses
import functools
import operator
from typing import TYPE_CHECKING, Any, final

from millstream.dataset.iterators.chain_positions import check_resumable, fingerprint_number
from millstream.dataset.iterators.dataset_iterator import SavingIterator
from millstream.dataset.iterators.inputs import Input
from millstream.dataset.iterators.running import FixedChain, Running
from millstream.dataset.nodes.element_nodes import Batched
from millstream.loader import reporting
from millstream.loader.checkpoints.envelope import STRAIGHT, SavedPosition, is_list, unreadable, wrong_kind
from millstream.loader.checkpoints.state import LoaderState, SavedCursor, Stream, saved_cursor
from millstream.loader.execution import Execution
from millstream.loader.iterator import DataLoaderIterator
from millstream.loader.measuring import CHAIN
from millstream.loader.pipeline.elements import Lack
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.stages import used_records
from millstream.loader.views import Insight
from millstream.transforms.of_chains import AbsentElement

if TYPE_CHECKING:
    from millstream.loader.reporting.preview import Trace


def _of_inner(name: str) -> Any:
    """Returns a property that is the member of this name of the loader's iterator, which changes with the plan."""
    return property(operator.attrgetter(f"_inner.{name}"), doc=getattr(DataLoaderIterator, name).__doc__)


class EngineIterator(SavingIterator[Any], Input):
    """An iterator whose elements come from a loader's iterator, and which joins and operations take them from."""

    _execution: Execution
    _inner: DataLoaderIterator
    _is_for_operations = False
    """True if operations get the elements, which do not change them."""
    _was_sought = False
    """True if elements may be missing before its position, because `seek` has counted positions."""

    @property
    def step(self) -> int:  # type: ignore[override]  # it is read only
        """The number of elements yielded since the beginning of the stream."""
        return self._inner.step

    @property
    def epoch(self) -> int | None:  # type: ignore[override]  # Nobody sets it here.
        """The epoch that the next element begins in, from 0; None if the elements have no epochs."""
        return self._inner.epoch

    @property
    def insight(self) -> Insight:
        return self._execution.insight

    # Without a frame of Python in each call: a join takes elements one by one.
    stall_timeout, let_measure, interrupt = map(_of_inner, ("stall_timeout", "let_measure", "interrupt"))
    texts_for_hosts, rows_agree = map(_of_inner, ("texts_for_hosts", "rows_agree"))
    records_between, batches_after = map(_of_inner, ("records_between", "batches_after"))
    num_ready, take, take_elements = map(_of_inner, ("num_ready", "take", "take_elements"))

    def __len__(self) -> int:
        return self._inner.batches_after(self._inner.step)

    def __next__(self) -> Any:
        if self._closed:
            self._check_open_to("advance")
        try:
            return next(self._inner)
        except AbsentElement as missing:
            self._change_plan(missing)
        return next(self._inner)

    _watches_itself = True

    def for_operations(self) -> None:
        """Is called once if operations get the elements, which do not change them."""
        self._is_for_operations = True

    def fetch(self, limit: int) -> Lack | None:  # noqa: ARG002  (the engine knows better)
        """Fetches elements if all were taken, and waits for none. Returns the reason if there are none."""
        self._check_open_to("advance")
        try:
            return self._inner.fetch(shares=self._is_for_operations)
        except AbsentElement as missing:
            self._change_plan(missing)
        return self._inner.fetch(shares=self._is_for_operations)

    def _position_here(self) -> SavedPosition:
        return self.position()

    @abc.abstractmethod
    def position(self, back: int = 0) -> SavedPosition: ...

    def move(self, position: Any) -> None:
        self._move_to(position)

    def insights(self) -> list[Insight]:
        return [self.insight]

    def start_prefetch(self) -> None:
        self._check_open_to("prefetch from")
        self._inner.start_prefetch()

    def close(self) -> None:
        self._closed = True
        # Otherwise, the streams of a closed combination would be reported as pipelines of their own.
        self._execution.insight.is_closed = True
        self._inner.close()
        super().close()

    def __repr__(self) -> str:
        workers, reading = self._execution.workers, self._execution.reading
        execution = "in this thread"
        if workers.num_workers:
            execution = f"{workers.num_workers} worker{'s'[: workers.num_workers != 1]}"
        elif reading.reads_ahead:
            execution = f"up to {reading.num_threads} thread{'s'[: reading.num_threads != 1]}"
        pipeline = self._execution.pipeline
        pairs = zip(pipeline.names, pipeline.operations, strict=True)
        names = [name for name, operation in pairs if not operation.is_between]
        step, _ = self._inner.delivered_position()
        made = f": {', '.join(names)}" if names else ""
        return f"<{type(self).__name__} at step {step}, {self._inner.lifecycle}, {execution}{self._drawn_from()}{made}>"

    def _repr_html_(self) -> str:
        return reporting.summary.render_loader(self.insight.snapshot(), iterator=repr(self))

    def _change_plan(self, missing: AbsentElement) -> None:
        """Continues, at the same position, with a plan that skips missing elements."""
        raise missing

    def _check_not_sought(self, missing: AbsentElement) -> None:
        if self._was_sought:
            raise ValueError(
                f"{missing} So seek has moved to a position with fewer elements before it than requested. Drop "
                "elements with a filter instead of a map that returns None, because seek then skips missing ones."
            ) from missing

    def _take_over(self, execution: Execution, inner: DataLoaderIterator) -> None:
        """Closes the plan before the current one, which takes over its consumer and the number of its batches."""
        if inner is self._inner:
            return
        if inner.consumer is not None:
            self._inner.let_measure(inner.consumer)
        inner.close()
        self._execution.profiler.delivered(execution.profiler.outputs, execution.profiler.records)


@final
class ReadIterator(EngineIterator):
    """Yields the results of a chain over the elements of a MapDataset."""

    def __init__(self, chain: FixedChain, running: Running, *, allows_none: bool = False) -> None:
        super().__init__()
        self._node = chain.node
        self._running = running
        # True to raise AbsentElement for a missing element instead of skipping it.
        self.raises_absent = running.shared.raises_absent
        self._pipelines = pipelines = chain.pipelines(running.limits, running.tolerance, allows_none=allows_none)
        # The last saved position, and its step; -1 if there is none.
        self._known = -1, SavedPosition()
        self._is_dense = pipelines.dense is not None
        kind, pipeline = "sparse", pipelines.sparse
        if self._is_dense and self.raises_absent and pipelines.checked is not None:
            kind, pipeline = "checked", pipelines.checked
            # Each operation has a check after it.
            running = dataclasses.replace(running, num_local=2 * running.num_local)
        elif self._is_dense and pipelines.dense is not None:
            kind, pipeline = "dense", pipelines.dense
        self._chain = chain
        self._execution = running.execution(kind, pipeline, CHAIN, chain=chain)
        if not self._is_dense:
            self._sparse_plan = self._execution.plan
        self._own_stream = chain.stream_of(self._execution.plan, pipelines.described)
        self._inner = DataLoaderIterator.of(self._execution, self._own_stream)

    @functools.cached_property
    def _sparse_plan(self) -> Plan:
        """The sparse plan, compiled on request: most streams of an interleave end before it is needed."""
        return self._chain.compiled(self._pipelines.sparse, 0)

    @functools.cached_property
    def _sparse_stream(self) -> Stream:
        return self._chain.stream_of(self._sparse_plan, self._pipelines.described)

    @functools.cached_property
    def _described(self) -> Stream:  # type: ignore[override]  # it is computed on request
        return dataclasses.replace(self._sparse_stream, one_to_one=False)

    @functools.cached_property
    def _dense_end(self) -> tuple[int, int] | None:
        """The number of positions, and of those that elements are made of if none is missing; None if some may be."""
        length = self._described.length
        if self._pipelines.dense is None or length is None:
            return None
        return length, used_records(self._chain.operations, length)

    @property
    def _num_skips(self) -> int:
        return len(self._sparse_plan.beginning[0].skip)

    def position(self, back: int = 0) -> SavedPosition:
        known_step, known = self._known
        if known_step == self._inner.num_outputs - back:
            # A join saves the positions of all streams below, of which few have moved.
            return known
        (cursor,), step = self._inner.position_and_step(back)
        if self._execution.plan.one_to_one:
            position = self.position_after(step)
        else:
            position = self._saved(step, self._at_end(saved_cursor(cursor, self._execution.plan)))
        self._known = step, position
        return position

    def position_after(self, step: int) -> SavedPosition:
        """Returns the position after the first `step` elements if each position of the MapDataset has one."""
        values, text = self.values_after(step)
        position = SavedPosition(values)
        position.text = text
        return position

    def values_after(self, step: int) -> tuple[tuple[Any, ...], str]:
        """Returns the values of `position_after`, and their text, both of which a mixture needs of all its streams."""
        number, numbered, block, complete_blocks = self._blocks
        if complete_blocks is None or step <= complete_blocks:
            # The beginning of a block, as most positions are.
            start = step * block
            return (number, step, start), f"{numbered}{step},{start}]"
        length = self._execution.plan.partition.length or 0
        saved = self._saved(step, SavedCursor(length, (0,) * self._num_skips, is_final=True))
        return saved, saved.text

    @functools.cached_property
    def _blocks(self) -> tuple[int, str, int, int | None]:
        """The number of the fingerprint, its text, the size of a block of the plan, and the number of complete ones."""
        partition = self._execution.plan.partition
        return self._number, f"[{self._number},", partition.global_block, partition.complete_blocks

    def _saved(self, step: int, cursor: SavedCursor) -> SavedPosition:
        # Most positions are at the beginning of a block.
        rest = (cursor.is_final, self._described.length, *cursor.skip) if cursor.is_final or any(cursor.skip) else ()
        return SavedPosition((self._number, step, cursor.position, *rest))

    def _move_to(self, position: Any, stream: Stream | None = None) -> None:
        self._check_open_to("move")
        number, saved = self._read(position)
        self._move(check_resumable(number, saved, self._state(), stream))

    def _read(self, position: Any) -> tuple[int, LoaderState]:
        """Returns the number of the fingerprint in a position, and the state. Anything else is a CheckpointError."""
        if not is_list(position) or not position or type(position[0]) is not int:
            raise wrong_kind(STRAIGHT, position)
        try:
            number, step, start, *rest = position
            is_final, length, *skip = rest or (False, self._described.length, *(0,) * self._num_skips)
            stream = dataclasses.replace(self._described, length=length)
            return number, LoaderState(step, (SavedCursor.of((start, is_final, *skip)),), stream)
        except (ValueError, TypeError) as error:
            raise unreadable(str(error)) from error

    def seek(self, step: int) -> None:
        """Moves to the position after the first `step` elements.

        Costs nothing if each element of the MapDataset becomes one. Otherwise the elements before are computed again.
        """
        self._check_open_to("move")
        try:
            self._inner.seek(step)
        except AbsentElement as missing:
            self._change_plan(missing)
            self._inner.seek(step)
        self._was_sought = self._is_dense and step > 0

    @property
    def next_index(self) -> int | None:
        """The number of elements yielded if each position has one, so that `seek` costs nothing; otherwise None."""
        return self._inner.step if self._execution.plan.one_to_one else None

    def trace(self) -> "Trace":
        try:
            return self.insight.trace(self._pipelines.shown)
        except AbsentElement:
            return self.insight.trace(self._pipelines.sparse)

    def _preview_options(self) -> dict[str, Any]:
        *nodes, first = self._node.line()
        (source, *_) = first.sources or (None,)
        is_batched = any(isinstance(node, Batched) for node in nodes)
        return {"is_batched": is_batched, "pipeline": self._pipelines.sparse, "source": source}

    @functools.cached_property
    def _number(self) -> int:
        return fingerprint_number(self._described)

    def _move(self, saved: LoaderState) -> None:
        self._known = -1, SavedPosition()
        if self._is_dense and not self._fits_dense(saved):
            self._use_sparse(saved)
        else:
            self._inner.resume(self._with_skip(saved, self._own_stream, len(self._execution.plan.beginning[0].skip)))
        self._was_sought = False

    def _state(self) -> LoaderState:
        return self._with_skip(self._inner.loader_state(), self._described, self._num_skips)

    def _fits_dense(self, saved: LoaderState) -> bool:
        """Returns True if a position is between two blocks of the dense plan, with no missing element before it."""
        block = self._execution.plan.partition.global_block
        (cursor,) = saved.cursors
        is_between = cursor.position % block == 0 or cursor.position == saved.stream.length
        return not any(cursor.skip) and is_between and saved.step == -(-cursor.position // block)

    def _with_skip(self, state: LoaderState, stream: Stream, num_skips: int) -> LoaderState:
        """Returns a state as one of another stream. Between blocks of the dense plan, nothing is skipped."""
        (cursor,) = state.cursors
        moved = cursor._replace(skip=(0,) * num_skips) if self._is_dense else self._at_end(cursor)
        return state._replace(cursors=(moved,), stream=stream)

    def _at_end(self, cursor: SavedCursor) -> SavedCursor:
        """Returns a cursor of a sparse plan; after a short last batch that of a dense plan, with nothing to skip."""
        if not cursor.is_final or any(cursor.skip[1:]) or self._dense_end is None:
            return cursor
        length, num_used = self._dense_end
        is_at_end = cursor.position + cursor.skip[0] == num_used
        return SavedCursor(length, (0,) * len(cursor.skip), is_final=True) if is_at_end else cursor

    def _use_sparse(self, saved: LoaderState) -> None:
        """Changes to the sparse plan at a position of this stream. This iterator changes only when that succeeds."""
        execution = self._running.execution("sparse", self._pipelines.sparse, CHAIN, chain=self._chain)
        stream = self._sparse_stream
        inner = DataLoaderIterator.of(execution, stream)
        inner.resume(saved._replace(stream=stream))
        dense = self._execution, self._inner
        self._execution, self._own_stream, self._is_dense, self._inner = execution, stream, False, inner
        vars(self).pop("_blocks", None)
        self._take_over(*dense)

    def _change_plan(self, missing: AbsentElement) -> None:
        """Continues with the sparse plan at the current position."""
        if self.raises_absent:
            raise missing
        self._check_not_sought(missing)
        self._use_sparse(self._state())
