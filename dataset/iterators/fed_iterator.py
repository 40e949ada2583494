"""The iterator of operations after a stream: they run in threads and processes, but the stream runs in one thread."""

import dataclasses
import functools
import itertools
import sys
from typing import Any, final

import numpy as np

from millstream.core.signals import interrupts
from millstream.dataset.iterators.chain_iterator import EngineIterator
from millstream.dataset.iterators.chain_positions import check_resumable, fingerprint_number
from millstream.dataset.iterators.inputs import Input, insights_below
from millstream.dataset.iterators.running import FixedChain, Running
from millstream.dataset.nodes.lowering import InOrder
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.envelope import (
    SavedPosition,
    is_anything,
    is_fingerprint,
    is_list,
    is_number,
    unreadable,
    values_of,
)
from millstream.loader.checkpoints.state import LoaderState, SavedCursor, Stream, saved_cursor, stream_of
from millstream.loader.execution import Execution
from millstream.loader.iterator import DataLoaderIterator
from millstream.loader.measuring import FED_CHAIN
from millstream.loader.pipeline.calls import Position
from millstream.loader.pipeline.elements import END, Awaited, Elements, Origins
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.steps import annotated
from millstream.loader.scheduling.feed import Feed
from millstream.loader.threads.waiting import watched
from millstream.sharding import NoSharding
from millstream.transforms.of_chains import KeepAll


@final
class Fed:
    """The source of a pipeline whose elements come from a stream, without record keys."""

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, number: int) -> Any:
        raise LookupError(f"Element {number} of a stream cannot be read at random.")

    def fingerprint(self) -> str:
        """Returns a constant, because the state of the stream identifies it."""
        return "a stream"


_KIND = "a chain after a stream"


@final
class FedIterator(EngineIterator):
    """Yields the results of operations on the elements of a stream, of which each block has `block`."""

    def __init__(self, stream: Input, chain: FixedChain, running: Running) -> None:
        super().__init__(stream)
        stream.for_operations()
        operations = chain.operations
        order = InOrder(None, None)
        pipeline = Pipeline(Fed(), order, order, operations, NoSharding(), running.limits, running.tolerance)
        # The same with `on_error="skip"` and without, so that a run that failed may resume with it.
        fingerprint = chain.fingerprint(pipeline)
        if running.tolerance is not None:
            # No other record can be read instead: an element that fails is dropped.
            pipeline = dataclasses.replace(pipeline, operations=(KeepAll(), *operations))
        self.block = Plan(pipeline).partition.global_block
        self._feed = Feed(Drawing(stream, running.workers.stall_timeout), self.block)
        self._reads_ahead = bool(running.workers.num_workers) or running.reading.reads_ahead
        self._execution = running.execution("fed", pipeline, FED_CHAIN, self._feed)
        self._execution.insight.streams = functools.partial(insights_below, stream)
        self._described = self.description = stream_of(self._execution.plan, fingerprint)
        self._inner = DataLoaderIterator.of(self._execution, self.description)
        self._number = fingerprint_number(self.description)

    @property
    def engine(self) -> tuple[Execution, DataLoaderIterator]:
        return self._execution, self._inner

    def position(self, back: int = 0) -> SavedPosition:
        """Returns an earlier position of the stream, and the progress of the operations since then."""
        # Before the position, which another thread may move on: those before an earlier one may then be gone.
        kept = self._feed.kept()
        position, step = self._inner.position_and_step(back)
        # One kept at the block may not be known yet.
        first, below = next((each for each in reversed(kept) if each[0] < position[0].block), kept[0])
        return self.position_of(position, step, first, below)

    def position_of(self, position: Position, step: int, block: int, below: Any) -> SavedPosition:
        """Returns the saved position at one of the operations, after `step` elements.

        That of the stream is `below`, at the beginning of a block at or before the position.
        """
        (cursor,) = position
        numbers = saved_cursor(cursor, self._execution.plan).numbers
        return SavedPosition((_KIND, step, self._number, block, numbers, below))

    def _move_to(self, position: Any, stream: Stream | None = None) -> None:
        self.restore(position, stream)

    def restore(self, position: Any, stream: Stream | None = None) -> int:
        """Moves to a saved position. Returns the block at which the stream was saved."""
        self._check_open_to("move")
        values = values_of(position, _KIND, is_number, is_fingerprint, is_number, is_list, is_anything)
        step, number, block, numbers, below = values
        try:
            saved = LoaderState(step, (SavedCursor.of(numbers),), self.description)
        except (ValueError, TypeError) as error:
            raise unreadable(str(error)) from error
        before = self._inner.loader_state()
        resumable = check_resumable(number, saved, before, stream)
        if block > saved.cursors[0].position // self.block:
            raise CheckpointError(
                "Cannot read the state: its stream is ahead of it. Pass a result of get_state(), unchanged."
            )
        self._inner.resume(resumable)
        try:
            self._feed.restore(block, below)
        except BaseException:
            self._inner.resume(before)
            raise
        return int(block)

    def start_prefetch(self) -> None:
        """Starts prefetching here, or in the streams below if nothing prefetches here."""
        self._check_open_to("prefetch from")
        if self._reads_ahead:
            self._inner.start_prefetch()
        else:
            self._parent.start_prefetch()


@final
class Drawing:
    """Draws elements from an input, and finds out their origins."""

    def __init__(self, stream: Input, stall_timeout: float) -> None:
        self._stream = stream
        self._stall_timeout = stall_timeout
        # The elements that were drawn for a call that lacks further ones.
        self._runs: list[Any] = []
        self.num_drawn = 0
        self._chain = stream if isinstance(stream, EngineIterator) else None
        # Random draws depend on the origins of the elements of a chain.
        self._take = stream.take if self._chain is None else self._chain.take_elements

    def get_state(self) -> Any:
        return self._stream.position()

    def set_state(self, state: Any) -> None:
        self._runs, self.num_drawn = [], 0
        self._stream.move(state)

    def draw(self, count: int, number: int) -> Elements | Awaited:
        stream = self._stream
        if stream.watches_itself or self.num_drawn >= count:
            return self._draw(count, number)
        draw = functools.partial(self._draw, count, number)
        return watched(draw, lambda: f"{stream.class_name}, at element {number} or later", self._stall_timeout)

    def _draw(self, count: int, number: int) -> Elements | Awaited:
        stream, failure = self._stream, None
        while (missing := count - self.num_drawn) > 0:
            try:
                lack = None if stream.num_ready() else stream.fetch(missing)
            except BaseException as error:
                if interrupts(error):
                    raise
                failure = error
                break
            if lack is END:
                break
            if lack is not None:
                return lack
            taken = min(missing, stream.num_ready())
            self._runs.append(self._take(taken))
            self.num_drawn += taken
        drawn = self._joined(number, failure)
        self._runs, self.num_drawn = [], len(drawn.values) - min(count, len(drawn.values))
        if self.num_drawn:
            self._runs = [drawn.values[count:] if self._chain is None else drawn.between(count, None)]
            drawn = drawn.between(None, count)
        return drawn

    def _joined(self, number: int, failure: BaseException | None) -> Elements:
        """Returns the elements so far, from `number` on, and the error that follows them, if any."""
        if self._chain is not None:
            none = Elements([], Origins.none(), failure)
            drawn = Elements.concatenate(self._runs if self._runs and failure is None else [*self._runs, none])
            return Elements(drawn.values, drawn.origins.without_sizes(), failure)
        values = list(itertools.chain.from_iterable(self._runs))
        if failure is not None:
            failure = annotated(failure, f"{self._stream.class_name}, at element {number + len(values)}")
        # Only their numbers in the stream are known.
        numbers = np.arange(number, number + len(values))
        table = np.stack([numbers, numbers, numbers, numbers, np.zeros_like(numbers)])
        return Elements(values, Origins(table), failure)
