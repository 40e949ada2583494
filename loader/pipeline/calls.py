"""The calls of a plan: a request each, which can be sent to any thread or process, and the outputs that follow.

A position in the stream of a shard has one cursor for each of its logical shards. Each output has a position after it.
"""

import abc
import dataclasses
import sys
from collections.abc import Sequence
from types import NoneType
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from millstream.core import tree
from millstream.loader.pipeline.elements import Elements, Location
from millstream.loader.pipeline.stages import LogicalShard, Stage
from millstream.transforms.packing.rows import Rows

_OF_PYTHON = frozenset({int, float, complex, bool, str, bytes, NoneType})


def num_bytes(values: Sequence[Any]) -> int:
    """Returns the estimated number of bytes of elements, or of the items of a list. Its time is bounded."""
    if len(values) == 1:
        return _bytes_of(values[0])
    sample = tree.sampled(values)
    size_of = sys.getsizeof if _OF_PYTHON.issuperset(map(type, sample)) else _bytes_of
    return sum(map(size_of, sample)) * len(values) // max(1, len(sample))


def _bytes_of(value: Any) -> int:
    # Without calls for numbers and texts, and for the usual batches: arrays, and dicts of them.
    if type(value) in _OF_PYTHON:
        return sys.getsizeof(value)
    if type(value) is dict:
        total = 0
        for leaf in value.values():
            if type(leaf) is np.ndarray and not leaf.dtype.hasobject:
                total += leaf.nbytes
            elif _is_flat(leaf):
                total += _shallow_bytes(leaf)
            else:
                return _bytes_of_levels(value)
        return total
    if type(value) is list and value and _OF_PYTHON.issuperset(map(type, sample := tree.sampled(value))):
        return sum(map(sys.getsizeof, sample)) * len(value) // len(sample)
    return _shallow_bytes(value) if _is_flat(value) else _bytes_of_levels(value)


def _is_flat(value: Any) -> bool:
    return not value.dtype.hasobject if isinstance(value, np.ndarray) else type(value) in tree.FLAT


def _bytes_of_levels(value: Any) -> int:
    """Returns the size of a structure, level by level, each child counted once per level: it may contain itself.

    An array of objects is a structure of them, such as the texts of a batch.
    """
    total = 0.0
    level: dict[int, tuple[Any, float]] = {id(value): (value, 1.0)}
    for _ in range(tree.MAX_DEPTH):
        inner: dict[int, tuple[Any, float]] = {}
        for node, weight in level.values():
            items: Any = node.reshape(-1) if isinstance(node, np.ndarray) else tree.children_if_any(node)
            if len(items) == 0:
                total += weight * _shallow_bytes(node)
                continue
            sample = tree.sampled(items)
            share = weight * len(items) / len(sample)
            for child in sample:
                if _is_flat(child):
                    total += share * _shallow_bytes(child)
                else:
                    _, known = inner.get(id(child), (None, 0.0))
                    inner[id(child)] = child, max(share, known)
        if not inner:
            break
        level = inner
    return int(total)


def _shallow_bytes(value: Any) -> int:
    size = getattr(value, "nbytes", None)
    return size if type(size) is int else sys.getsizeof(value, 0)


class Cursor(NamedTuple):
    """A position between two outputs of a logical shard.

    Attributes:
        block: the first block that is not consumed completely.
        skip: the consumed part of it, one number per stage: skip[0] elements of stage 0, then skip[1] outputs of the
            group that begins there, and so on. If an element may be in two groups, consumed size (tokens, for instance)
            counts instead of outputs. A stage that divides units has two numbers: the consumed size, then the outputs
            of the next unit. All zero between the outputs of a 1:1 pipeline.
        is_final: True if an output before this position depends on the end of the order, because it was made from a
            short group, or from a tail that is divided differently from complete blocks. Not set in 1:1 pipelines,
            where the block determines it.
    """

    block: int
    skip: tuple[int, ...]
    is_final: bool = False


Position: TypeAlias = tuple[Cursor, ...]
"""A position between two outputs of a shard: the cursors of its logical shards, in order."""


class FormedGroup(NamedTuple):
    """A group of elements.

    Attributes:
        elements: its elements, whose origins contain the group's decisions about each.
        start, end: the positions before its first output and after its last.
        other_ends: the positions after it in the other logical shards, if it has elements of several.
        following: the largest number of groups that may follow it; None if it is not known.
    """

    elements: Elements
    start: Cursor
    end: Cursor
    other_ends: tuple[Cursor, ...] = ()
    following: int | None = None

    @classmethod
    def failed(cls, error: BaseException, following: int | None = None) -> Self:
        """Returns an error in place of a group."""
        nowhere = Cursor(0, (0,))
        return cls(Elements.failed(error), nowhere, nowhere, following=following)


class Outputs(abc.ABC):
    """The outputs of one call, in order.

    Attributes:
        values: the outputs. Rows that were built together stay together, so consecutive ones form a batch already.
        origins: the origin of each output.
        error: the error in place of the next output, if any.
        error_at: the record that the error belongs to; None if it belongs to no single record.
        first: the number of outputs at the start that were consumed before the schedule began.
        num_records: the number of records, or of elements of the stage before, that they were made from.
        failures: the records among them that failed, and were skipped or replaced.
        num_bytes: their estimated size in memory.
    """

    def __init__(self, elements: Elements, first: int, num_records: int) -> None:
        values = elements.values
        self.values = values if type(values) is Rows else list(values)
        self.origins = elements.origins
        self.error = elements.error
        self.error_at = elements.at
        self._is_error_of_stream = False
        self.failures = elements.failures
        self.first = min(first, len(elements.values))
        self.num_records = num_records
        self.num_bytes = num_bytes(values)

    def end_with(self, error: BaseException, row: int, at: Location, *, is_of_stream: bool = False) -> None:
        """Replaces the outputs from a row on by an error.

        One that is of the stream, not of a record, is raised even if a Batch drops the last elements.
        """
        self._is_error_of_stream = is_of_stream
        self.values, self.origins = self.values[:row], self.origins.take(slice(row))
        self.first, self.error, self.error_at = min(self.first, row), error, at

    @abc.abstractmethod
    def num_after(self, row: int) -> int | None:
        """Returns the largest number of outputs of the logical shard after output `row`; None if it is not known.

        It depends on what is before them only, not on which of them are computed.
        """

    @abc.abstractmethod
    def num_lost(self) -> int | None:
        """Returns the largest number of outputs in place of the error and after it; None if it is not known."""

    @abc.abstractmethod
    def after(self, row: int) -> Cursor:
        """Returns the position after output `row` in its logical shard; after the last one, the next block or group."""

    def position_after(self, row: int) -> Position:
        """Returns the position after output `row` in the stream of the shard."""
        return (self.after(row),)


class BlockOutputs(Outputs):
    """Outputs of stage 0."""

    def __init__(self, elements: Elements, first: int, num_records: int, shard: LogicalShard, stop: int) -> None:
        super().__init__(elements, first, num_records)
        self._shard = shard
        self._stop = stop

    def num_after(self, row: int) -> int | None:
        count = self._shard.outputs_from(int(self.origins.block[row]), int(self.origins.position[row]))
        return None if count is None else count - 1

    def num_lost(self) -> int | None:
        if self.error_at is None or self._is_error_of_stream:
            return None
        return self._shard.outputs_from(self.error_at.block, self.error_at.position)

    def after(self, row: int) -> Cursor:
        if self._shard.one_to_one and row + 1 == len(self.values) and self.error is None:
            return Cursor(self._stop, (0,))
        blocks = self.origins.block
        block = int(blocks[row])
        is_last = row + 1 == len(blocks) or blocks[row + 1] != block
        # If an error follows in the same block, leaving the block would skip the error.
        error_may_follow = row + 1 == len(blocks) and self._error_may_follow(block)
        is_tail = block == self._shard.partition.complete_blocks
        # The tail of a single shard grows with the order. Leaving it would skip the records added there.
        grows = is_tail and self._shard.tail_grows
        is_final = is_tail and not grows
        if is_last and not error_may_follow and not grows:
            return Cursor(block + 1, (0,), is_final)
        return Cursor(block, (row - int(np.searchsorted(blocks, block)) + 1,), is_final)

    def _error_may_follow(self, block: int) -> bool:
        """Returns True if the error may be in a block that has an output before it."""
        is_later = self.error_at is not None and self.error_at.block > block
        return self.error is not None and not is_later and not self._shard.one_to_one


class GroupOutputs(Outputs):
    """Outputs of a later stage, made of one group.

    `span` has the positions before the first output, consumed ones included, and after the last; then the positions
    after the last in other logical shards, if the group has elements of several; then the largest number of groups that
    may follow.
    """

    def __init__(
        self,
        elements: Elements,
        first: int,
        num_records: int,
        span: tuple[Cursor, Cursor, tuple[Cursor, ...], int | None],
        stage: Stage,
    ) -> None:
        super().__init__(elements, first, num_records)
        self._start, self._end, self._other_ends, following = span
        self._following = None if stage.splits else following
        self._unit = stage.unit
        self._units: NDArray[np.int64] | None = None
        if stage.divides_units:
            self._units, self.origins = self.origins.without_unit_numbers()

    def num_after(self, row: int) -> int | None:
        return None if self._following is None else self._following + len(self.values) - 1 - row

    def num_lost(self) -> int | None:
        return None if self._following is None else self._following + 1

    def after(self, row: int) -> Cursor:
        if row + 1 == len(self.values) and self.error is None:
            return self._end
        if self._units is not None:
            return self._within_units(self._units, row)
        *outer, used = self._start.skip
        # Of a group that is cut into units, all but the last are complete wherever the order ends.
        is_final = self._end.is_final if self._unit is None else self._start.is_final
        return Cursor(self._start.block, (*outer, used + (row + 1) * (self._unit or 1)), is_final)

    def position_after(self, row: int) -> Position:
        return (self.after(row), *self._other_ends)

    def _within_units(self, units: NDArray[np.int64], row: int) -> Cursor:
        *outer, used, _ = self._start.skip
        unit, is_last = int(units[row]), row + 1 == len(units)
        if not is_last and units[row + 1] != unit:
            count = 0
            unit += 1
        else:  # An error that follows may be in the same unit. Leaving the unit would skip the error.
            count = row - int(np.searchsorted(units, unit)) + 1
        is_final = self._end.is_final if count and unit == units[-1] else self._start.is_final
        return Cursor(self._start.block, (*outer, used + unit * (self._unit or 1), count), is_final)


class Blocks(NamedTuple):
    """Requests the outputs of blocks `start … stop - 1` of stage 0 of a logical shard."""

    start: int
    stop: int
    shard: int = 0


class Group(NamedTuple):
    """Requests the outputs of a later stage, made from the elements of one group."""

    stage: int
    elements: Elements


class Fed(NamedTuple):
    """Requests the outputs of stage 0, made from elements that were not read from the source."""

    elements: Elements


class Rest(NamedTuple):
    """Requests the local operations of a stage, given the results of the operations before them."""

    stage: int
    elements: Elements


Request: TypeAlias = Blocks | Group | Fed | Rest


@dataclasses.dataclass(eq=False, slots=True)
class Call(abc.ABC):
    """A call of a plan.

    Attributes:
        shard: the number of the logical shard; 0 for a call of all of them.
        num_records: the number of records to read, or of elements of the stage before.
        num_blocks: the number of blocks to read; 0 for later stages.
        first_request: the request for all operations but the local ones.
        local_input: the elements that its local operations have to process; None before they exist.
        is_local: True once its local operations are requested.
        num_bytes: the estimated size of its elements in memory; None before they exist.
        substream: the number of the substream if the workers have several, otherwise 0.
        seconds_before: the seconds that drawing its elements took, and its operations before the local ones.
    """

    shard: int
    stage: int
    num_records: int
    num_blocks: int
    first_request: Request
    outputs: Outputs | None = dataclasses.field(default=None, init=False)
    local_input: Elements | None = dataclasses.field(default=None, init=False)
    is_local: bool = dataclasses.field(default=False, init=False)
    num_bytes: int | None = dataclasses.field(default=None, init=False)
    substream: int = dataclasses.field(default=0, init=False)
    seconds_before: float = dataclasses.field(default=0.0, init=False)

    @property
    def request(self) -> Request:
        if self.is_local and self.local_input is not None:
            return Rest(self.stage, self.local_input)
        return self.first_request

    def receive(self, elements: Elements) -> None:
        """Stores the input of its local operations, which are not requested yet."""
        self.local_input, self.num_bytes = elements, num_bytes(elements.values)

    def begin_local(self) -> None:
        request = self.first_request
        if self.local_input is None and isinstance(request, Fed | Group):
            self.local_input = request.elements
        self.is_local = True

    def complete(self, elements: Elements) -> None:
        self.outputs = outputs = self._outputs_of(elements)
        self.local_input, self.num_bytes = None, outputs.num_bytes

    @abc.abstractmethod
    def _outputs_of(self, elements: Elements) -> Outputs: ...


class BlockCall(Call):
    """A call of stage 0 for blocks `start … stop - 1`. The first `skip` outputs are consumed already."""

    __slots__ = ("_of", "skip", "start", "stop")

    def __init__(self, of: LogicalShard, start: int, stop: int, skip: int = 0) -> None:
        request = Blocks(start, stop, of.number)
        super().__init__(of.number, 0, (stop - start) * of.partition.block, stop - start, request)
        self._of = of
        self.start = start
        self.stop = stop
        self.skip = skip

    def _outputs_of(self, elements: Elements) -> Outputs:
        return BlockOutputs(elements, self.skip, self.num_records, self._of, self.stop)

    def split(self) -> "list[BlockCall]":
        return [
            BlockCall(self._of, block, block + 1, self.skip if block == self.start else 0)
            for block in range(self.start, self.stop)
        ]


class GroupCall(Call):
    """A call of a later stage for the outputs of one group."""

    __slots__ = ("_skip", "_span", "_stage")

    def __init__(self, shard: int, stage: int, group: FormedGroup, compiled: Stage, skip: int) -> None:
        super().__init__(shard, stage, len(group.elements.values), 0, Group(stage, group.elements))
        self._span = group[1:]
        self._skip = skip
        self._stage = compiled

    def _outputs_of(self, elements: Elements) -> Outputs:
        return GroupOutputs(elements, self._skip, self.num_records, self._span, self._stage)
