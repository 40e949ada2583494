"""The iterator of operations after a stream: they run in threads and processes, and the stream in one place."""

import json
import sys
from collections.abc import Callable, Collection, Sequence
from typing import Any, final

import numpy as np

from millstream.dataset.absence import KeepAll
from millstream.dataset.chain_iterator import EngineIterator, decoded
from millstream.dataset.counted_iterator import CountedIterator
from millstream.dataset.dataset_iterator import DatasetIterator
from millstream.dataset.drawing import drawn_from, move_to, noted_state
from millstream.dataset.nodes.in_order import InOrder
from millstream.dataset.running import Running
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.envelope import is_anything, is_dict, is_number, sealed, unsealed
from millstream.loader.checkpoints.state import LoaderState
from millstream.loader.execution import Execution
from millstream.loader.iterator import DataLoaderIterator
from millstream.loader.pipeline.elements import Elements, Origins
from millstream.loader.pipeline.feed import Feed
from millstream.loader.pipeline.outputs import Position
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.steps import annotated
from millstream.loader.state_of_plan import state_at, stream_of
from millstream.loader.threads.front import FED_CHAIN
from millstream.sharding import NoSharding
from millstream.signal_exceptions import cannot_wait
from millstream.transforms import Transformation


@final
class Fed:
    """Stands where a pipeline has its source: what comes from a stream is not read by number."""

    def __len__(self) -> int:
        return sys.maxsize

    def __getitem__(self, number: int) -> Any:
        raise LookupError(f"Element {number} of a stream cannot be read at random.")

    def fingerprint(self) -> str:
        """Returns that it is a stream: its own state says which."""
        return "a stream"


_KIND = "a chain after a stream"


@final
class FedIterator(EngineIterator):
    """Yields what operations make of the elements of a stream.

    Args:
        stream: an iterator at its beginning.
        operations: what is done with each element.
        running: where, and how much filters may drop.
        epoch_length: how many positions have the same epoch, where the stream's elements have positions.

    Attributes:
        block: how many of its elements are a block.
        words: what the operations are, as states say it.
    """

    def __init__(
        self,
        stream: DatasetIterator[Any],
        operations: Sequence[Transformation],
        running: Running,
        epoch_length: int | None = None,
    ) -> None:
        super().__init__(stream)
        order = InOrder(None, epoch_length)
        if running.tolerance is not None:
            # There is no other key to read: an element that fails is dropped.
            operations = (KeepAll(), *operations)
        pipeline = Pipeline(Fed(), order, order, tuple(operations), NoSharding(), running.limits, running.tolerance)
        self.block = Plan(pipeline).partition.global_block
        self._feed = Feed(_Drawing(stream), self.block)
        self._reads_ahead = bool(running.workers.num_workers) or running.reading.reads_ahead
        self._options = running.options
        self._execution = running.execution("fed", pipeline, FED_CHAIN, self._feed)
        self.words = stream_of(self._execution.plan)
        self._inner = self._execution.begin(self.words)

    @property
    def engine(self) -> tuple[Execution, DataLoaderIterator]:
        """What makes the elements."""
        return self._execution, self._inner

    def get_state(self) -> dict[str, Any]:
        """Returns the position: that of the stream a little before, and what was made of what it has yielded since."""
        made = json.loads(self._inner.get_state())
        first, state = self._feed.kept_before(made["places"][0]["position"] // self.block)
        return sealed(_KIND, {"block": first, "made": made, "stream": state()})

    def state_of(self, position: Position, step: int, block: int, state: dict[str, Any]) -> dict[str, Any]:
        """Returns the state at a position.

        Args:
            position: where the operations are.
            step: how many elements they have yielded.
            block: a block at or before the position.
            state: that of the stream at its beginning.
        """
        made = json.loads(state_at(position, step, self._execution.plan, self.words).encode())
        return sealed(_KIND, {"block": block, "made": made, "stream": state})

    def set_state(self, state: dict[str, Any], *, allow: Collection[str] = (), strict: bool = False) -> None:
        """Moves to the position recorded in a state.

        Args:
            state: what `get_state` returned, here or on any iterator over the same chain, for any threads and workers.
            allow: differences of the operations after the stream to accept on purpose: "operations", or paths within.
            strict: whether to refuse the state, too, if their content has changed.

        Raises:
            CheckpointError: the state is unreadable or of another chain.
            ValueError: the iterator is closed.
        """
        self._check_open()
        state = unsealed(state, _KIND, {"block": is_number, "made": is_dict, "stream": is_anything})
        before, saved = self._inner.get_state(), decoded(state["made"])
        self._inner.set_state(saved.encode(), allow=allow, strict=strict)
        try:
            self._check_block(state["block"], saved)
            self._feed.restore(state["block"], lambda: state["stream"])
        except BaseException:
            self._inner.set_state(before)
            raise

    def _check_block(self, block: int, saved: LoaderState) -> None:
        if block > saved.places[0].position // self.block:
            raise CheckpointError("The state cannot be read: its stream is ahead of it. Give an unchanged one.")

    def start_prefetch(self) -> None:
        """Begins to work ahead, here or, where nothing does here, below.

        What is drawn from runs in this thread, so that this waits for the first elements of it.
        """
        self._check_open()
        if self._reads_ahead:
            self._inner.start_prefetch()
        else:
            self._parent.start_prefetch()


@final
class _Drawing:
    """Draws elements from an iterator, and finds out where they come from."""

    def __init__(self, stream: DatasetIterator[Any]) -> None:
        self._stream = stream

    def get_state(self) -> Callable[[], Any]:
        """Notes where the iterator is: what is returned gives its state."""
        return noted_state(self._stream)

    def set_state(self, noted: Callable[[], Any]) -> None:
        """Moves the iterator to where it was."""
        move_to(self._stream, noted())

    def draw(self, count: int, number: int) -> Elements:
        """Returns the next elements: fewer than `count` where they end, or where an error ends them."""
        if isinstance(self._stream, EngineIterator):
            return self._draw_made(self._stream, count)
        values, error = drawn_from(self._stream, count)
        if error is not None:
            named = self._stream
            name = named.name if isinstance(named, CountedIterator) else type(named).__name__
            error = annotated(error, f"{name}, at element {number + len(values)}")
        numbers = np.arange(number, number + len(values))
        table = np.stack([numbers, numbers, numbers, numbers, np.zeros_like(numbers)])
        return Elements(values, Origins(table), error)

    def _draw_made(self, stream: EngineIterator, count: int) -> Elements:
        """Returns elements that know where they come from: what is drawn at random does not depend on the place."""
        parts: list[Elements] = []
        error, left = None, count
        while left and error is None:
            try:
                part = stream.take(left)
            except StopIteration:
                break
            except BaseException as failure:
                if cannot_wait(failure):
                    raise
                error = failure
            else:
                parts.append(Elements(part.values, part.origins.without_sizes()))
                left -= len(part.values)
        whole = Elements.concatenate(parts) if parts else Elements([], Origins.none())
        return Elements(whole.values, whole.origins, error)


def with_states(dataset: Any) -> DatasetIterator[Any]:
    """Returns a new iterator of a dataset; one that has no states is told by how many elements it has yielded."""
    iterator: DatasetIterator[Any] = iter(dataset)
    if type(iterator).get_state is not DatasetIterator.get_state:
        return iterator
    return CountedIterator(dataset, lambda: iter(dataset), iterator)
