"""The iterator of a straight chain: a loader's iterator over the plan that the chain is compiled to.

A chain has two plans. In the dense plan, every position has an element, and a block is a batch, as in a 1:1 pipeline.
The sparse plan drops missing elements first, and therefore regroups. Both yield the same if no element is missing, so
an iterator may begin with the dense plan and change to the sparse one at any position. States are the same for both.
"""

import dataclasses
import functools
import json
import math
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, final

from millstream.dataset.fixed_chain import FixedChain
from millstream.dataset.iterators.brief_states import brief_state, cursor_at_end, ending_of, restored
from millstream.dataset.iterators.engine_iterator import EngineIterator
from millstream.dataset.iterators.running import Running
from millstream.dataset.nodes.element_nodes import Batched
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.compatibility import resumption, warn_of_changes
from millstream.loader.checkpoints.state import STRAIGHT, LoaderState, Stream, saved_cursor, stream_of, wrong_kind
from millstream.loader.iterator import DataLoaderIterator
from millstream.loader.measuring import CHAIN
from millstream.loader.pipeline.plan import Plan
from millstream.transforms.of_chains import AbsentElement

if TYPE_CHECKING:
    from millstream.loader.tracing import Trace


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
        # The last brief state and its step: a join saves those of all streams below, of which few have moved.
        self._brief = -1, ""
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
    def _dense_length(self) -> int | None:
        return self._stream.length if self._has_dense else None

    @property
    def _num_stages(self) -> int:
        return len(self._sparse_plan.stages)

    def get_state(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(self._state().encode())
        return state

    def set_state(self, state: dict[str, Any], *, allow: Collection[str] = (), strict: bool = False) -> None:
        """Moves to the position in a state of any iterator over the same chain, with any threads and workers.

        Args:
            state: a result of `get_state`.
            allow: intended differences to accept, as in `DataLoaderIterator.set_state`.
            strict: True to refuse the state also if the code of the chain has changed.
        """
        self._check_open()
        saved = decoded(state)
        found = resumption(saved, self._state(), allow, strict=strict)
        self._move(saved._replace(stream=self._stream))
        if found.changes:
            warn_of_changes(found.changes)

    def _state_below(self) -> str:
        """Returns the state for iterators that draw from this one: without the fingerprint."""
        step, (known_step, text) = self._inner.step, self._brief
        if known_step == step:
            return text
        if self.next_index is not None:
            text = self.brief_state_after(step)
        else:
            (cursor,) = self._inner.position_in_plan()
            saved = cursor_at_end(saved_cursor(cursor, self._execution.plan), self._dense_length)
            text = brief_state(step, saved, self._ending)
        self._brief = step, text
        return text

    def _move_below(self, state: Any) -> None:
        if not isinstance(state, str):
            super()._move_below(state)
            return
        self._check_open()
        self._move(restored(state, self._state()))

    def brief_state_after(self, step: int) -> str:
        """Returns that state after the first `step` elements if each position has one. The iterator does not move."""
        block, whole_blocks, between, at_end = self._blocks
        return f"{step} {step * block} {between}" if step <= whole_blocks else f"{step} {at_end}"

    @functools.cached_property
    def _blocks(self) -> tuple[int, float, str, str]:
        """The size and number of whole blocks of the dense plan, and the ends of states before and after the last."""
        partition, skip = self._execution.plan.partition, ",".join("0" * self._num_stages)
        between, at_end = f"{skip} 0 {self._ending}", f"{partition.length} {skip} 1 {self._ending}"
        whole_blocks = math.inf if partition.whole_blocks is None else partition.whole_blocks
        return partition.global_block, whole_blocks, between, at_end

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
    def _ending(self) -> str:
        return ending_of(self._stream)

    def _move(self, saved: LoaderState) -> None:
        """Moves to a position of this stream."""
        self._brief = -1, ""
        if self._is_dense and not self._fits_dense(saved):
            self._use_sparse(saved)
        else:
            self._inner.set_state(self._with_skip(saved, self._own_stream, len(self._execution.plan.stages)).encode())
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
        moved = cursor_at_end(cursor, self._dense_length)
        moved = cursor._replace(skip=(0,) * num_stages) if self._is_dense else moved
        return state._replace(cursors=(moved,), stream=stream)

    def _use_sparse(self, saved: LoaderState) -> None:
        """Changes to the sparse plan at a position of this stream. This iterator changes only when that succeeds."""
        execution = self._running.execution("sparse", self._sparse, CHAIN)
        stream = self._sparse_stream
        inner = DataLoaderIterator.of(execution, stream)
        inner.set_state(saved._replace(stream=stream).encode())
        dense = self._execution, self._inner
        self._execution, self._own_stream, self._is_dense, self._inner = execution, stream, False, inner
        self._take_over(*dense)

    def _change_plan(self, missing: AbsentElement) -> None:
        """Continues with the sparse plan at the current position."""
        if self.raises_absent:
            raise missing
        self._check_not_sought(missing)
        self._use_sparse(self._state())


def decoded(state: Any) -> LoaderState:
    """Returns the state in a dict. Raises CheckpointError for anything else."""
    if not isinstance(state, dict):
        raise CheckpointError(f"A state of a dataset's iterator is a dict, got {type(state).__name__}.")
    if "kind" in state:
        raise wrong_kind(STRAIGHT, state)
    try:
        text = json.dumps(state)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"The state cannot be read: {error}.") from error
    return LoaderState.decode(text.encode())
