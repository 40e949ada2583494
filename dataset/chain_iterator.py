"""The iterator of a straight chain: a loader's iterator over the plan that the chain is compiled to.

A chain has two plans. In the dense one, every position has an element: a block is a batch, as in a 1:1 pipeline. The
sparse one drops absent elements first, and so regroups. Both yield the same where nothing is absent, so that an
iterator may begin with the first and change to the second at any position; a state is the same for both.
"""

import dataclasses
import functools
import json
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, final

from millstream.dataset.absence import DropAbsent, KeepAll
from millstream.dataset.brief_states import brief_state, ending_of, restored
from millstream.dataset.dataset_iterator import CLOSED
from millstream.dataset.map_dataset import node_of
from millstream.dataset.nodes.lowering import lower, order_of
from millstream.dataset.running import Running
from millstream.dataset.shown_chain import ShownIterator, shown_names
from millstream.dataset.stream_nodes import ReadIterDataset
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.compatibility import resumption, warn_of_changes
from millstream.loader.checkpoints.envelope import STRAIGHT, wrong_kind
from millstream.loader.checkpoints.state import LoaderState, Stream
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.outputs import Cursor, Position
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.state_of_plan import place_at, stream_of
from millstream.loader.threads.front import CHAIN
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.sharding import NoSharding
from millstream.transforms import Transformation
from millstream.transforms.absence_check import AbsentElement, Present

if TYPE_CHECKING:
    from millstream.loader.reporting.preview import Preview
    from millstream.loader.tracing import Trace


class EngineIterator(ShownIterator):
    """An iterator whose elements a loader's iterator makes.

    Args:
        parents: the iterators that this one draws from.
    """

    _options: tuple[MultiprocessingOptions, ReadOptions]

    def __next__(self) -> Any:
        """Returns the next element.

        Raises:
            StopIteration: the stream has ended.
            ValueError: the iterator is closed.
            Exception: whatever an operation or the source raised, with notes of where.
        """
        if self._closed:
            raise ValueError(CLOSED)
        try:
            return next(self._inner)
        except AbsentElement as hole:
            self._change_plan(hole)
        return next(self._inner)

    def take(self, most: int) -> Elements:
        """Returns the next elements with their origins, at least one and `most` at most; raises what `next` does."""
        self._check_open()
        try:
            return self._inner.take(most)
        except AbsentElement as hole:
            self._change_plan(hole)
        return self._inner.take(most)

    def start_prefetch(self) -> None:
        """Begins to read ahead in the background, where threads or processes do, and returns at once."""
        self._check_open()
        self._inner.start_prefetch()

    def close(self) -> None:
        """Ends the threads and processes of this iterator and those below, and frees what was read. Idempotent."""
        self._closed = True
        self._inner.close()
        super().close()

    def noted_state(self) -> Callable[[], dict[str, Any]]:
        """Returns what gives the state that `get_state` would return now: that takes longer than to note it."""
        state = self.get_state()
        return lambda: state

    def __repr__(self) -> str:
        workers, reading = self._options
        hands = "in this thread"
        if workers.num_workers:
            hands = f"{workers.num_workers} worker{'s'[: workers.num_workers != 1]}"
        elif reading.reads_ahead:
            hands = f"up to {reading.num_threads} thread{'s'[: reading.num_threads != 1]}"
        look = self._inner.look()
        names = shown_names(self._execution.pipeline)
        made = f": {', '.join(names)}" if names else ""
        return f"<{type(self).__name__} at step {look.step}, {look.lifecycle}, {hands}{self._drawn_from()}{made}>"

    def _repr_html_(self) -> str:
        from millstream.loader.reporting.html_rendering import render_iterator  # noqa: PLC0415  (for notebooks)

        return render_iterator(repr(self), self.insight.snapshot())

    def place(self) -> tuple[Position, int]:
        """Returns the position of the plan, and how many elements have come."""
        return self._inner._position(), self._inner.step  # noqa: SLF001  (of the same engine)

    def go(self, position: Position, step: int) -> None:
        """Moves to a position of the plan, before which this many elements come."""
        self._inner._go(position, step)  # noqa: SLF001  (as above)

    def _change_plan(self, hole: AbsentElement) -> None:
        raise hole


_NOTHING_NOTED: tuple[int, Callable[[], str]] = (-1, str)
"""No state, at no step."""


@final
class ReadIterator(EngineIterator):
    """Yields what a chain makes of the elements of a MapDataset.

    Args:
        leaf: what is read.
        operations: what is done with each element.
        running: where, and how much filters may drop.
    """

    def __init__(self, leaf: ReadIterDataset, operations: Sequence[Transformation], running: Running) -> None:
        super().__init__()
        node = node_of(leaf.map_dataset)
        order = order_of(node)
        self._running, self._options = running, running.options
        limits, first = running.limits, () if leaf.allow_nones else (DropAbsent(),)
        if running.tolerance is not None:
            # Whatever a plan knows of absent elements, one that fails is dropped.
            first = (KeepAll(), *first)
        self._sparse = Pipeline(
            leaf.map_dataset, order, order, (*first, *operations), NoSharding(), limits, running.tolerance
        )
        self._was_sought = False
        self._noted = _NOTHING_NOTED
        self._after = -1, ""
        # What is shown, if anybody looks: the operations of the MapDataset one by one, where that can be.
        pipeline = self._whole = self._sparse
        if not node.is_sparse and not leaf.allow_nones and running.tolerance is None:
            source, own_order, maps = lower(leaf.map_dataset, node)
            dense = Pipeline(source, own_order, own_order, (*checked_maps(maps), *operations), NoSharding(), limits)
            # The sparse plan is of use for what is not 1:1 anyway: it costs no more.
            pipeline, self._whole = dense if Plan(dense).one_to_one else pipeline, dense
        plan = Plan(self._sparse)
        self._num_stages = len(plan.stages)
        sparse = stream_of(plan)
        best = sparse if pipeline is self._sparse else stream_of(Plan(pipeline))
        self._stream: Stream = dataclasses.replace(sparse, one_to_one=False, fingerprint=best.fingerprint)
        # Workers that several chains share have one plan of each: that which has room for all that may come.
        self._is_dense = pipeline is not self._sparse and running.shared_workers is None
        self._own_stream = best if self._is_dense else sparse
        kind, pipeline = ("dense", pipeline) if self._is_dense else ("sparse", self._sparse)
        self._execution = running.execution(kind, pipeline, CHAIN)
        self._inner = self._execution.begin(self._own_stream)

    def get_state(self) -> dict[str, Any]:
        """Returns the position as a small dict that JSON can hold."""
        return self.noted_state()()

    def noted_state(self) -> Callable[[], dict[str, Any]]:  # noqa: D102  (as for any)
        state = self._state()
        return lambda: json.loads(state.encode())

    def set_state(self, state: dict[str, Any], *, allow: Collection[str] = (), strict: bool = False) -> None:
        """Moves to the position recorded in a state.

        Args:
            state: what `get_state` returned, here or on any iterator over the same chain, for any threads and workers.
            allow: differences to accept on purpose: any of "operations" and "source".
            strict: whether to refuse the state, too, if the code of the chain has changed.

        Raises:
            CheckpointError: the state is unreadable or of another chain. The iterator is as it was.
            ValueError: the iterator is closed, or `allow` has an unknown name.
        """
        self._check_open()
        saved = decoded(state)
        found = resumption(saved, self._state(), allow, strict=strict)
        self._move(saved._replace(stream=self._stream))
        if found.changes:
            warn_of_changes(found.changes)

    def noted_brief_state(self) -> Callable[[], str]:
        """Returns what gives the state for those that draw from this iterator: without the fingerprint, in no time."""
        step = self._inner.step
        if self._noted[0] != step:
            ((cursor,), _), ending = self.place(), self._ending
            place, is_dense = place_at(cursor, self._execution.plan), self._is_dense
            if is_dense:
                place = place._replace(skip=(0,) * self._num_stages)
            self._noted = step, functools.cache(lambda: brief_state(step, place, ending))
        return self._noted[1]

    def set_brief_state(self, text: str) -> None:
        """Moves to the position of a state for those that draw from this iterator.

        Raises:
            CheckpointError: the state is unreadable or of another chain. The iterator is as it was.
            ValueError: the iterator is closed.
        """
        self._check_open()
        self._move(restored(text, self._state()))

    def brief_state_after(self, step: int) -> str:
        """Returns that state after the first `step` elements, if each position makes one; the iterator stays."""
        if self._after[0] != step:
            place = place_at(Cursor(step, (0,)), self._execution.plan)._replace(skip=(0,) * self._num_stages)
            self._after = step, brief_state(step, place, self._ending)
        return self._after[1]

    def seek(self, step: int) -> None:
        """Moves to the position after the first `step` elements.

        Costs nothing where each element of the MapDataset becomes one. Else what is in between is made to be counted.

        Raises:
            IndexError: there are fewer.
            ValueError: the iterator is closed.
        """
        self._check_open()
        try:
            self._inner.seek(step)
        except AbsentElement as hole:
            self._change_plan(hole)
            self._inner.seek(step)
        self._was_sought, self._noted = self._is_dense, _NOTHING_NOTED

    def trace(self) -> "Trace":  # noqa: D102  (as for any iterator)
        try:
            return self.insight.trace(self._whole)
        except AbsentElement:
            return self.insight.trace(self._sparse)

    def preview(  # noqa: D102  (as for any iterator)
        self, num_batches: int = 1, *, rows: int = 8, decode: Callable[[list[int]], str] | None = None
    ) -> "Preview":
        return self.insight.preview(num_batches, rows=rows, decode=decode, pipeline=self._sparse)

    @property
    def next_index(self) -> int | None:
        """How many elements have come, where each position makes one: `seek` then costs nothing. Else None."""
        return self._inner.step if self._execution.plan.one_to_one else None

    @functools.cached_property
    def _ending(self) -> str:
        return ending_of(self._stream)

    def _move(self, saved: LoaderState) -> None:
        """Goes to a position of this stream."""
        self._noted = _NOTHING_NOTED
        if self._is_dense and not self._fits_dense(saved):
            self._use_sparse(saved)
        else:
            self._inner.set_state(self._with_skip(saved, self._own_stream, self._num_own_stages).encode())
        self._was_sought = False

    def _state(self) -> LoaderState:
        # Noted often, below a stream: what a trainer gets to see of it is made when it is asked for.
        state = self._inner._state()  # noqa: SLF001  (of the same engine)
        return self._with_skip(state, self._stream, self._num_stages)

    def _fits_dense(self, saved: LoaderState) -> bool:
        """Whether a position lies between two blocks of the dense plan, and no element before it was absent."""
        block = self._execution.plan.partition.global_block
        (place,) = saved.places
        is_between = place.position % block == 0 or place.position == saved.stream.length
        return not any(place.skip) and is_between and saved.step == -(-place.position // block)

    @property
    def _num_own_stages(self) -> int:
        return len(self._execution.plan.stages)

    def _with_skip(self, state: LoaderState, stream: Stream, num_stages: int) -> LoaderState:
        """Returns a state as one of another stream; between blocks of the dense plan there is nothing to skip."""
        (place,) = state.places
        place = place._replace(skip=(0,) * num_stages) if self._is_dense else place
        return state._replace(places=(place,), stream=stream)

    def _use_sparse(self, saved: LoaderState) -> None:
        """Changes to the sparse plan, at a position of this stream. Until it is there, this iterator is as it was."""
        execution = self._running.execution("sparse", self._sparse, CHAIN)
        stream = stream_of(execution.plan)
        inner = execution.begin(stream)
        inner.set_state(saved._replace(stream=stream).encode())
        dense = self._inner
        if dense.consumer is not None:
            inner.let_measure(dense.consumer)
        self._execution, self._own_stream, self._is_dense, self._inner = execution, stream, False, inner
        dense.close()

    def _change_plan(self, hole: AbsentElement) -> None:
        """Continues with the plan that has room for absent elements, at the position reached."""
        if self._was_sought:
            raise ValueError(
                f"{hole} So seek has moved to a position with fewer elements before it than were asked for. Drop "
                "elements with a filter instead of a map that returns None: seek then counts those that are there."
            ) from hole
        self._use_sparse(self._state())


def checked_maps(maps: Sequence[Transformation]) -> list[Transformation]:
    """Returns the operations of a MapDataset, none of which sees an element that is absent."""
    return [Present(), *(step for operation in maps for step in (operation, Present()))]


def decoded(state: Any) -> LoaderState:
    """Returns the state that a dict says; CheckpointError for anything else."""
    if not isinstance(state, dict):
        raise CheckpointError(f"A state of a dataset's iterator is a dict, got {type(state).__name__}.")
    if "kind" in state:
        raise wrong_kind(STRAIGHT, state)
    try:
        text = json.dumps(state)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"The state cannot be read: {error}.") from error
    return LoaderState.decode(text.encode())
