"""The iterator of a straight chain: a loader's iterator over the plan that the chain is compiled to.

A chain has two plans. In the dense plan, every position has an element, and a block is a batch, as in a 1:1 pipeline.
The sparse plan drops missing elements first, and therefore regroups. Both yield the same if no element is missing, so
an iterator may begin with the dense plan and change to the sparse one at any position. States are the same for both.
"""

import dataclasses
import functools
from typing import TYPE_CHECKING, Any, final

from millstream.dataset.iterators.chain_positions import check_resumable, fingerprint_number
from millstream.dataset.iterators.engine_iterator import EngineIterator
from millstream.dataset.iterators.running import FixedChain, Running
from millstream.dataset.nodes.element_nodes import Batched
from millstream.loader.checkpoints.envelope import STRAIGHT, SavedPosition, is_list, unreadable, wrong_kind
from millstream.loader.checkpoints.state import LoaderState, SavedCursor, Stream, saved_cursor, stream_of
from millstream.loader.iterator import DataLoaderIterator
from millstream.loader.measuring import CHAIN
from millstream.loader.pipeline.plan import Plan
from millstream.transforms.of_chains import AbsentElement

if TYPE_CHECKING:
    from millstream.loader.reporting.preview import Trace


@final
class ReadIterator(EngineIterator):
    """Yields the results of a chain over the elements of a MapDataset."""

    def __init__(self, chain: FixedChain, running: Running, *, allows_none: bool = False) -> None:
        super().__init__()
        self._node = chain.node
        self._running = running
        # True to raise AbsentElement for a missing element instead of skipping it.
        self.raises_absent = running.shared.raises_absent
        pipelines = chain.pipelines(running.limits, running.tolerance, allows_none=allows_none)
        self._sparse, self._whole = pipelines.sparse, pipelines.shown
        # The last saved position, and its step; -1 if there is none.
        self._known = -1, SavedPosition()
        self._has_dense = pipelines.dense is not None
        # Workers that several chains share have one plan per chain: the sparse one, which allows for missing elements.
        self._is_dense = self._has_dense and running.shared.shared_workers is None
        # The same with `on_error="skip"` and without, so that a run that failed may resume with it.
        self._fingerprint = chain.fingerprint(pipelines.described)
        kind, pipeline = "sparse", self._sparse
        if self._is_dense and self.raises_absent and pipelines.checked is not None:
            kind, pipeline = "checked", pipelines.checked
            # Each operation has a check after it.
            running = dataclasses.replace(running, num_local=2 * running.num_local)
        elif self._is_dense and pipelines.dense is not None:
            kind, pipeline = "dense", pipelines.dense
        self._execution = running.execution(kind, pipeline, CHAIN)
        if not self._is_dense:
            self._sparse_plan = self._execution.plan
        self._own_stream = stream_of(self._execution.plan, self._fingerprint)
        self._inner = DataLoaderIterator.of(self._execution, self._own_stream)

    @functools.cached_property
    def _sparse_plan(self) -> Plan:
        """The sparse plan, compiled on request: most streams of an interleave end before it is needed."""
        return Plan(self._sparse)

    @functools.cached_property
    def _sparse_stream(self) -> Stream:
        return stream_of(self._sparse_plan, self._fingerprint)

    @functools.cached_property
    def _stream(self) -> Stream:
        """The stream in states."""
        return dataclasses.replace(self._sparse_stream, one_to_one=False)

    @property
    def _described(self) -> Stream:  # type: ignore[override]  # it is read only
        return self._stream

    @property
    def _dense_length(self) -> int | None:
        return self._stream.length if self._has_dense else None

    @property
    def _num_stages(self) -> int:
        return len(self._sparse_plan.stages)

    def _position_here(self) -> SavedPosition:
        known_step, known = self._known
        if known_step == self._inner.num_outputs:
            # A join saves the positions of all streams below, of which few have moved.
            return known
        (cursor,), step = self._inner.position_and_step()
        if self._execution.plan.one_to_one:
            return self.position_after(step)
        position = self._saved(step, _cursor_at_end(saved_cursor(cursor, self._execution.plan), self._dense_length))
        self._known = step, position
        return position

    def position_after(self, step: int) -> SavedPosition:
        """Returns the position after the first `step` elements if each position of the MapDataset has one."""
        known_step, known = self._known
        if known_step == step:
            return known
        partition = self._execution.plan.partition
        cursor = SavedCursor(step * partition.global_block, (0,) * self._num_stages, is_final=False)
        if partition.whole_blocks is not None and step > partition.whole_blocks:
            cursor = cursor._replace(position=partition.length or 0, is_final=True)
        position = self._saved(step, cursor)
        self._known = step, position
        return position

    def _saved(self, step: int, cursor: SavedCursor) -> SavedPosition:
        # Most positions are at the beginning of a block.
        rest = (cursor.is_final, self._stream.length, *cursor.skip) if cursor.is_final or any(cursor.skip) else ()
        return SavedPosition((self._number, step, cursor.position, *rest))

    def _move_to(self, position: Any, stream: Stream | None = None) -> None:
        self._check_open()
        number, saved = self._read(position)
        self._move(check_resumable(number, saved, self._state(), stream))

    def _read(self, position: Any) -> tuple[int, LoaderState]:
        """Returns the number of the fingerprint in a position, and the state. Anything else is a CheckpointError."""
        if not is_list(position) or not position or type(position[0]) is not int:
            raise wrong_kind(STRAIGHT, position)
        try:
            number, step, start, *rest = position
            is_final, length, *skip = rest or (False, self._stream.length, *(0,) * self._num_stages)
            stream = dataclasses.replace(self._stream, length=length)
            return number, LoaderState(step, (SavedCursor.of((start, is_final, *skip)),), stream)
        except (ValueError, TypeError) as error:
            raise unreadable(str(error)) from error

    def seek(self, step: int) -> None:
        """Moves to the position after the first `step` elements.

        Costs nothing if each element of the MapDataset becomes one. Otherwise the elements before are computed again.
        """
        self._check_open()
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
            return self.insight.trace(self._whole)
        except AbsentElement:
            return self.insight.trace(self._sparse)

    def _preview_options(self) -> dict[str, Any]:
        *nodes, first = self._node.line()
        (source, *_) = first.sources or (None,)
        is_batched = any(isinstance(node, Batched) for node in nodes)
        return {"is_batched": is_batched, "pipeline": self._sparse, "source": source}

    @functools.cached_property
    def _number(self) -> int:
        return fingerprint_number(self._stream)

    def _move(self, saved: LoaderState) -> None:
        """Moves to a position of this stream."""
        self._known = -1, SavedPosition()
        if self._is_dense and not self._fits_dense(saved):
            self._use_sparse(saved)
        else:
            self._inner.resume(self._with_skip(saved, self._own_stream, len(self._execution.plan.stages)))
        self._was_sought = False

    def _state(self) -> LoaderState:
        return self._with_skip(self._inner.loader_state(), self._stream, self._num_stages)

    def _fits_dense(self, saved: LoaderState) -> bool:
        """Returns True if a position is between two blocks of the dense plan, with no missing element before it."""
        block = self._execution.plan.partition.global_block
        (cursor,) = saved.cursors
        is_between = cursor.position % block == 0 or cursor.position == saved.stream.length
        return not any(cursor.skip) and is_between and saved.step == -(-cursor.position // block)

    def _with_skip(self, state: LoaderState, stream: Stream, num_stages: int) -> LoaderState:
        """Returns a state as one of another stream. Between blocks of the dense plan, nothing is skipped."""
        (cursor,) = state.cursors
        moved = _cursor_at_end(cursor, self._dense_length)
        moved = cursor._replace(skip=(0,) * num_stages) if self._is_dense else moved
        return state._replace(cursors=(moved,), stream=stream)

    def _use_sparse(self, saved: LoaderState) -> None:
        """Changes to the sparse plan at a position of this stream. This iterator changes only when that succeeds."""
        execution = self._running.execution("sparse", self._sparse, CHAIN)
        stream = self._sparse_stream
        inner = DataLoaderIterator.of(execution, stream)
        inner.resume(saved._replace(stream=stream))
        dense = self._execution, self._inner
        self._execution, self._own_stream, self._is_dense, self._inner = execution, stream, False, inner
        self._take_over(*dense)

    def _change_plan(self, missing: AbsentElement) -> None:
        """Continues with the sparse plan at the current position."""
        if self.raises_absent:
            raise missing
        self._check_not_sought(missing)
        self._use_sparse(self._state())


def _cursor_at_end(cursor: SavedCursor, length: int | None) -> SavedCursor:
    """Returns a cursor of a sparse plan; after a short last batch that of a dense plan, with nothing left to skip.

    `length` is the number of positions if each has an element, otherwise None.
    """
    is_at_end = cursor.is_final and cursor.position + cursor.skip[0] == length and not any(cursor.skip[1:])
    return SavedCursor(length, (0,) * len(cursor.skip), is_final=True) if is_at_end and length is not None else cursor
