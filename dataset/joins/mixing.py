"""Streams mixed in exact proportions. If all are straight chains, one plan reads them like one dataset.

If every position of every chain has an element, the chain and the element at each position of the mixture are computed.
A batch is then read from all chains in one call, in the threads and worker processes of the plan: one set for all.

It yields the same elements as a `FedIterator` over the mixed stream, with the same states. If the stream is resumed in
another mixture, each chain may be ahead of or behind the new proportions. If an element turns out to be missing, the
stream takes over at that position.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.closing import open_each
from millstream.dataset.chain import Chain, fixed_chain, joint_reading
from millstream.dataset.iterators.chain_iterator import EngineIterator
from millstream.dataset.iterators.dataset_iterator import DatasetIterator
from millstream.dataset.iterators.fed_iterator import FedIterator
from millstream.dataset.iterators.inputs import JoinedInput
from millstream.dataset.iterators.running import FixedChain, Running, Shared, WarmWorkers, checked_maps, sources_below
from millstream.dataset.joins.drawn_mixture import ExhaustingMixture, MixedInputs
from millstream.dataset.node_source import NodeSource
from millstream.dataset.nodes.element_nodes import Batched, Mapped, MappedAtRandom, MappedWithIndex
from millstream.dataset.nodes.joining_nodes import Mixed
from millstream.dataset.nodes.lowering import InOrder
from millstream.dataset.nodes.node import ENDLESS, Node, Positions
from millstream.dataset.stream_steps import Join, OpenBelow, StreamStep, options_of
from millstream.loader.checkpoints.envelope import SavedPosition
from millstream.loader.checkpoints.state import Stream
from millstream.loader.execution import Execution
from millstream.loader.iterator import DataLoaderIterator
from millstream.loader.measuring import MIXED_CHAIN
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.threads.options import ReadOptions
from millstream.samplers.mixtures.mixing import FIRST_EXHAUSTED, Mixing
from millstream.sharding import NoSharding
from millstream.transforms import Batch, Map, MapWithIndex, Transformation
from millstream.transforms.of_chains import AbsentElement, SeededRandomMap


@final
@dataclasses.dataclass(frozen=True, eq=False)
class Mix(Join):
    """The elements of several streams, in the proportions of weights.

    Attributes:
        mixing: the names, the weights and the end.
        is_named: True if states refer to streams by name.
    """

    mixing: Mixing
    is_named: bool

    def opened(self, open_below: OpenBelow) -> JoinedInput:
        inputs = open_each(open_below, self.above)
        if self.mixing.stop != FIRST_EXHAUSTED:
            return ExhaustingMixture(inputs, self.mixing)
        return MixedInputs(inputs, self.mixing, is_named=self.is_named)

    def followed_by(
        self, chain: FixedChain, running: Running, reading: ReadOptions | None, draw: Callable[[Shared], Any]
    ) -> DatasetIterator[Any] | None:
        if not chain.operations or not self.mixing.is_plain:
            return None
        if any(options_of(parent, running.shared.options).tolerance is not None for parent in self.above):
            return None
        nodes = [straight_node(parent) for parent in self.above]
        lowered = tuple(node for node in nodes if node is not None)
        if len(lowered) < len(nodes):
            return None
        shared = running.shared.combined()
        runs_here = not running.workers.are_wanted and shared.crew is None
        inputs_have_workers = runs_here and any(Chain.of(parent).workers.are_wanted for parent in self.above)
        stream: MixedInputs = draw(dataclasses.replace(shared, raises_absent=inputs_have_workers))
        return MixtureIterator(
            FedIterator(stream, chain, running),
            stream,
            Mixed(lowered, self.mixing),
            chain.operations,
            dataclasses.replace(running, reading=joint_reading(self.above, reading)),
            inputs_have_workers=inputs_have_workers,
        )

    @property
    def text(self) -> str:
        return f"mix(weights={dict(zip(self.mixing.names, self.mixing.weights, strict=True))}{self.mixing.rest})"

    @property
    def shares(self) -> Sequence[tuple[str, float]]:
        return self.mixing.shares


def straight_node(step: StreamStep) -> Node | None:
    """Returns the node that reads a stream with random access; None if that is impossible."""
    chain = Chain.of(step)
    if chain.read is None or chain.read.allow_nones:
        return None
    fixed = fixed_chain(step, chain)
    node = fixed.node
    if node is None or node.is_sparse:
        return None
    for operation in fixed.operations:
        following = _following(node, operation)
        if following is None:
            return None
        node = following
    # No position of an empty node can be located, even if it is never read.
    return node if node.length else None


def shared_maps(parents: tuple[Node, ...]) -> tuple[tuple[Node, ...], list[Transformation]]:
    """Returns the parents without their common last maps, and these maps, which then run after the mixing.

    A batch is then read from all parents together, and each map's loop runs once instead of once per parent.
    """
    maps: list[Transformation] = []
    while all(type(node) is Mapped for node in parents):
        nodes = [node for node in parents if isinstance(node, Mapped)]
        first = nodes[0].operation
        if not all(_are_same(first, node.operation) for node in nodes):
            break
        maps.insert(0, first)
        parents = tuple(node.parent for node in nodes)
    return parents, maps


def _are_same(first: Map[Any, Any], other: Map[Any, Any]) -> bool:
    """Returns True if two maps are the same object, or use the same function."""
    return first is other or (type(first) is Map is type(other) and first.map is other.map)


def _following(node: Node, operation: Transformation) -> Node | None:
    """Returns the node of a stream's operation; None if it is not 1:1, or counts other positions."""
    if isinstance(operation, Map):
        return Mapped(node, operation)
    if any(isinstance(one, _WholeBatches) for one in node.line()):
        # The index of a batch in a stream is that of its first element.
        return None
    if isinstance(operation, SeededRandomMap):
        return MappedAtRandom(node, operation.operation, operation.seed, operation.number)
    if isinstance(operation, MapWithIndex):
        return MappedWithIndex(node, operation)
    return _WholeBatches(node, operation) if isinstance(operation, Batch) else None


@dataclasses.dataclass(frozen=True, eq=False)
class _WholeBatches(Batched):
    """Batches of a stream without missing elements."""

    def _batch(self, values: Sequence[Any], rows: Positions) -> Any:
        if type(values) in (list, tuple) and any(value is None for value in values):
            raise AbsentElement("An element of a mixture is absent.")
        return super()._batch(values, rows)


@dataclasses.dataclass(frozen=True, eq=False)
class _MixedFrom(Mixed):
    """A mixture that continues at a position where its parents are not where its proportions would place them.

    Attributes:
        begin: the position; earlier ones are not read.
        lead: the number of elements that each parent is ahead; negative if it is behind.
    """

    begin: int
    lead: tuple[int, ...]

    @functools.cached_property
    def length(self) -> int:
        """The first position, from `begin`, whose parent has no more elements."""
        (phase,) = self._schedule.phases
        lacks = [
            phase.position_of(number, max(parent.length - lead, drawn))
            for number, (parent, lead, drawn) in enumerate(
                zip(self.above, self.lead, phase.drawn_at(self.begin), strict=True)
            )
            if parent.length != ENDLESS
        ]
        return min([ENDLESS, *lacks])

    def parents_at(self, positions: Positions) -> tuple[NDArray[np.integer[Any]], Positions]:
        """Returns the parent at each position, and its element."""
        numbers, own = super().parents_at(positions)
        # Look-ahead may include positions before `begin`.
        return numbers, np.maximum(own + np.array(self.lead)[numbers], 0)


@final
class MixtureIterator(EngineIterator):
    """Yields the results of operations on the elements of a mixture of straight chains.

    Args:
        fed: an iterator of the same elements, drawn from the mixed stream. It defines the states, and takes over.
        stream: the mixed stream.
        mixed: the chains with random access, from the beginning.
        inputs_have_workers: True if the chains have worker processes of their own. They are then drawn from, and only
            the states are those of random access.
    """

    def __init__(
        self,
        fed: FedIterator,
        stream: MixedInputs,
        mixed: Mixed,
        operations: Sequence[Transformation],
        running: Running,
        *,
        inputs_have_workers: bool,
    ) -> None:
        super().__init__(fed)
        self._fed, self._described = fed, fed.description
        self._stream = stream
        parents, maps = shared_maps(mixed.above)
        self._mixed = Mixed(parents, mixed.mixing)
        self._operations = (*checked_maps(maps), *operations)
        self._running = running
        self._inputs_have_workers = inputs_have_workers
        # False once an element was missing: states are then those of the drawn stream.
        self._is_random = True
        # The latest position that was saved, and what it was made from.
        self._known: tuple[Any, SavedPosition] = None, SavedPosition()
        self._begin, self._lead, self._mixed_from = 0, (0,) * len(parents), self._mixed
        self._execution, self._inner = self._engine_of(self._mixed)

    def position(self, back: int = 0) -> SavedPosition:
        if not self._is_random:
            return self._fed.position(back)
        position, step = self._inner.position_and_step(back)
        if (position, step) == self._known[0]:
            return self._known[1]
        (cursor,) = position
        first = self._first_of(cursor.block, self._mixed_from)
        drawn: Sequence[int] = self._stream.drawn_at(first)
        if self._mixed_from is not self._mixed:
            drawn = [count + lead for count, lead in zip(drawn, self._lead, strict=True)]
        saved = self._fed.position_of(position, step, cursor.block, self._stream.position_after(first, drawn))
        self._known = (position, step), saved
        return saved

    def _move_to(self, position: Any, stream: Stream | None = None) -> None:
        self._check_open_to("move")
        self._known = None, SavedPosition()
        block = self._fed.restore(position, stream)
        if self._is_random and not self._follow(block):
            self._draw()
        self._was_sought = False

    def seek(self, step: int) -> None:
        """Moves to the position after the first `step` elements, at no cost, if each position has one."""
        self._check_open_to("move")
        if not self._reads:
            super().seek(step)
        if not self._execution.plan.one_to_one or any(self._lead):
            raise NotImplementedError(
                f"A {type(self).__name__} cannot seek step {step}: its position is unknown, because elements are "
                "filtered, split or packed after the mixture, or because the state was of other proportions. Draw the "
                "elements before, or use set_state with a state that was taken there."
            )
        self._inner.seek(step)
        self._was_sought = step > 0

    def start_prefetch(self) -> None:
        if self._reads:
            super().start_prefetch()
        else:
            self._fed.start_prefetch()

    @property
    def _reads(self) -> bool:
        """True if a plan of its own reads the chains, False if they are drawn from."""
        return self._is_random and not self._inputs_have_workers

    def _drawn_from(self) -> str:
        return f", {'reads' if self._reads else 'draws from'} a mixture of {len(self._mixed.above)}"

    def _first_of(self, block: int, mixed: Mixed) -> int:
        """Returns the position in a mixture at which a block begins, or would begin."""
        return min(block * self._fed.block, mixed.length)

    def _follow(self, kept: int) -> bool:
        """Moves to the position of the drawn stream. Returns False if random access cannot continue there.

        `kept` is the block at which the state of the stream was saved.
        """
        _, drawing = self._fed.engine
        position, step = drawing.position_and_step()
        (cursor,) = position
        begin, drawn = self._stream.step, self._stream.drawn
        # Elements may have been missing in the drawn stream, but not in one read with random access.
        if drawn is None or cursor.block != kept:
            return False
        lead = tuple(saved - here for saved, here in zip(drawn, self._stream.drawn_at(begin), strict=True))
        mixed, engine = self._mixed_from, (self._execution, self._inner)
        if is_other := lead != self._lead or (any(lead) and begin < self._begin):
            mixed = _MixedFrom(self._mixed.above, self._mixed.mixing, begin, lead) if any(lead) else self._mixed
        if begin != self._first_of(cursor.block, mixed):
            return False
        if is_other:
            engine = self._engine_of(mixed)
        engine[1].go(position, step)
        before = self._execution, self._inner
        self._begin, self._lead, self._mixed_from, (self._execution, self._inner) = begin, lead, mixed, engine
        self._take_over(*before)
        return True

    def _engine_of(self, mixed: Mixed) -> tuple[Execution, DataLoaderIterator]:
        """Returns an execution that reads a mixture, and its iterator; those of the drawn stream if it is drawn."""
        if self._inputs_have_workers:
            return self._fed.engine
        order = InOrder(None if mixed.length == ENDLESS else mixed.length, None)
        pipeline = Pipeline(NodeSource.of(mixed), order, order, self._operations, NoSharding(), self._running.limits)
        running, stage = self._running, "mixture"
        if isinstance(mixed, _MixedFrom):
            # A lead over the proportions occurs once, so workers for it are useless to other iterators.
            running = dataclasses.replace(running, warm=WarmWorkers())
            stage = f"mixture from {mixed.begin} with {mixed.lead}"
        execution = running.execution(stage, pipeline, MIXED_CHAIN)
        execution.keep_streams_here(functools.partial(sources_below, mixed))
        # Its states are those of the operations after the stream.
        return execution, DataLoaderIterator.of(execution, self._fed.description)

    def _draw(self) -> None:
        """Draws from the stream from now on."""
        before = self._execution, self._inner
        self._is_random, (self._execution, self._inner) = False, self._fed.engine
        self._stream.skip_absent()
        self._take_over(*before)

    def _change_plan(self, missing: AbsentElement) -> None:
        if not self._is_random:
            # It was interrupted before the stream could skip this element.
            self._stream.skip_absent()
            return
        self._check_not_sought(missing)
        self._fed.restore(self._position_here())
        self._draw()
