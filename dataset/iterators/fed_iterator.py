"""The iterator of operations after a stream: they run in threads and processes, but the stream runs in one thread."""

import dataclasses
import functools
import json
import sys
from collections.abc import Collection
from typing import Any, final

import numpy as np

from millstream.dataset.fixed_chain import FixedChain
from millstream.dataset.iterators.brief_states import accepting
from millstream.dataset.iterators.chain_iterator import decoded
from millstream.dataset.iterators.dataset_iterator import (
    DatasetIterator,
    UsersIterator,
    drawn_from,
    move_to,
    state_below,
)
from millstream.dataset.iterators.engine_iterator import EngineIterator
from millstream.dataset.iterators.recovering_iterator import insights_below
from millstream.dataset.iterators.running import Running
from millstream.dataset.nodes.lowering import InOrder
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.state import (
    LoaderState,
    Sealed,
    canonical,
    is_anything,
    is_dict,
    is_number,
    plain,
    sealed,
    state_at,
    stream_of,
    unsealed,
)
from millstream.loader.execution import Execution
from millstream.loader.iterator import DataLoaderIterator
from millstream.loader.measuring import FED_CHAIN
from millstream.loader.pipeline.calls import Position
from millstream.loader.pipeline.elements import Elements, Origins
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

    def __init__(
        self,
        stream: DatasetIterator[Any],
        chain: FixedChain,
        running: Running,
    ) -> None:
        super().__init__(stream)
        operations = chain.operations
        order = InOrder(None, None)
        pipeline = Pipeline(Fed(), order, order, operations, NoSharding(), running.limits, running.tolerance)
        # The same with `on_error="skip"` and without, so that a run that failed may resume with it.
        fingerprint = chain.fingerprint(pipeline)
        if running.tolerance is not None:
            # No other record can be read instead: an element that fails is dropped.
            pipeline = dataclasses.replace(pipeline, operations=(KeepAll(), *operations))
        self.block = Plan(pipeline).partition.global_block
        self._feed = Feed(_Drawing(stream, running.workers.stall_timeout), self.block)
        self._reads_ahead = bool(running.workers.num_workers) or running.reading.reads_ahead
        self._execution = running.execution("fed", pipeline, FED_CHAIN, self._feed)
        self._execution.insight.streams = functools.partial(insights_below, stream)
        self.description = stream_of(self._execution.plan, fingerprint)
        self._inner = DataLoaderIterator.of(self._execution, self.description)
        # The saved state of the stream that the last state contains, and its canonical JSON.
        self._saved: tuple[Any, str] = None, ""

    @property
    def engine(self) -> tuple[Execution, DataLoaderIterator]:
        return self._execution, self._inner

    def get_state(self) -> dict[str, Any]:
        """Returns an earlier position of the stream, and the progress of the operations since then."""
        state: dict[str, Any] = plain(self._state_below())
        return state

    def _state_below(self) -> Sealed:
        # Before the position, which another thread may move on: the states before an earlier one may then be gone.
        states = self._feed.kept()
        made = self._inner.loader_state()
        block = made.cursors[0].position // self.block
        # One saved at the block may not be known yet.
        first, kept = next((state for state in reversed(states) if state[0] < block), states[0])
        saved = self._saved
        if saved[0] is not kept:
            self._saved = saved = kept, canonical(kept)
        return _sealed(first, made, *saved)

    def state_of(self, position: Position, step: int, block: int, state: Sealed) -> Sealed:
        """Returns the state at a position of the operations, after `step` elements.

        The state of the stream is that at the beginning of a block at or before the position.
        """
        return _sealed(block, state_at(position, step, self._execution.plan, self.description), state, state.text)

    def set_state(self, state: dict[str, Any], *, allow: Collection[str] = (), strict: bool = False) -> None:
        """Moves to the position in a state of any iterator over the same chain, with any threads and workers.

        Args:
            state: a result of `get_state`.
            allow: intended differences to accept: "operations", "stream", or paths within, as in
                `DataLoaderIterator.set_state`. They hold for the stream, too.
            strict: True to refuse the state also if their content, or that of the stream, has changed.
        """
        self._check_open()
        state = unsealed(state, _KIND, {"block": is_number, "made": is_dict, "stream": is_anything})
        before, saved = self._inner.get_state(), decoded(state["made"])
        with accepting(allow, strict=strict) as accepted:
            self._inner.set_state(saved.encode(), allow=accepted.allow, strict=accepted.strict)
            try:
                self._check_block(state["block"], saved)
                self._feed.restore(state["block"], state["stream"])
            except BaseException:
                self._inner.set_state(before)
                raise

    def _check_block(self, block: int, saved: LoaderState) -> None:
        if block > saved.cursors[0].position // self.block:
            raise CheckpointError("The state cannot be read: its stream is ahead of it. Give an unchanged one.")

    def start_prefetch(self) -> None:
        """Starts prefetching here, or in the streams below if nothing prefetches here.

        The stream runs in this thread, so this waits for its first elements.
        """
        self._check_open()
        if self._reads_ahead:
            self._inner.start_prefetch()
        else:
            self._parent.start_prefetch()


def _sealed(block: int, made: LoaderState, stream: Any, stream_text: str) -> Sealed:
    """Returns a state, given the states of the operations and of the stream, and the canonical JSON of the latter."""
    text = made.encode().decode()
    return sealed(
        _KIND, {"block": block, "made": json.loads(text), "stream": stream}, {"made": text, "stream": stream_text}
    )


@final
class _Drawing:
    """Draws elements from an iterator, and finds out their origins."""

    def __init__(self, stream: DatasetIterator[Any], stall_timeout: float) -> None:
        self._stream = stream
        self._stall_timeout = stall_timeout

    def get_state(self) -> Any:
        return state_below(self._stream)

    def set_state(self, state: Any) -> None:
        move_to(self._stream, state)

    def draw(self, count: int, number: int) -> Elements:
        """Returns the next elements: fewer than `count` if they end, or if an error follows."""
        if isinstance(self._stream, EngineIterator):
            # Random draws depend on the origins of these.
            made = self._stream.draw(count)
            return Elements(made.values, made.origins.without_sizes(), made.error)
        named = self._stream
        name = named._class_name  # noqa: SLF001  (of the library's base class)
        draw = functools.partial(drawn_from, self._stream, count)
        if getattr(named.iterator if isinstance(named, UsersIterator) else named, "_parents", ()):
            # Calls of the iterators below are watched themselves.
            values, error = draw()
        else:
            values, error = watched(draw, lambda: f"{name}, at element {number} or later", self._stall_timeout)
        if error is not None:
            error = annotated(error, f"{name}, at element {number + len(values)}")
        numbers = np.arange(number, number + len(values))
        table = np.stack([numbers, numbers, numbers, numbers, np.zeros_like(numbers)])
        return Elements(values, Origins(table), error)
