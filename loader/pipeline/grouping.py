"""Operations that make an element of several, as steps: preparing elements before they are grouped, and making outputs.

Both work on a whole run at once. Where that fails, they go through it one by one: so what comes before an error is
passed on, and the error says which record it is about.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from millstream.columnar import Allocate
from millstream.errors import StackError
from millstream.loader.pipeline.elements import Elements, Origins, position_at
from millstream.loader.pipeline.steps import Step, collect
from millstream.signal_exceptions import cannot_wait
from millstream.transforms.grouping import MAX_FAN_OUT, GroupId, GroupingOperation, Prepared, Segments


class Preparing(Protocol):
    """What prepares elements."""

    def prepare(self, values: Sequence[Any], /) -> Prepared:
        """Returns what is left of some elements, and their sizes."""
        ...


def prepare_step(operation: GroupingOperation, where: str) -> Step:
    """Returns the step that prepares elements for an operation which groups them, as the last of the stage before."""

    def step(run: Elements, allocate: Allocate) -> Elements:
        del allocate
        return prepared(operation, run, where, splits=operation.splits)

    return step


def prepared(operation: Preparing, run: Elements, where: str, *, splits: bool = False) -> Elements:
    """Returns a run of prepared elements, whose origins know their sizes.

    Args:
        operation: what prepares them.
        run: the elements.
        where: what to call this in error texts.
        splits: whether an element may become several, which then get indices of their own.
    """
    values, error = list(run.values), None
    try:
        made, count = operation.prepare(values), len(values)
    except BaseException as failure:
        if cannot_wait(failure):
            raise
        each = (operation.prepare([value]) for value in values)
        parts, error = collect(each, run.origins, where, len(values))
        made, count = Prepared.concatenate([operation.prepare([]), *parts]), len(parts)
    origins = run.origins.take(slice(count))
    if splits or made.counts is not None:
        counts = [1] * count if made.counts is None else made.counts
        origins = origins.fan_out(counts, MAX_FAN_OUT if splits else 1)
    ends = (run.error, run.at) if error is None else (error, position_at(run.origins, count))
    return Elements(made.values, origins.with_sizes(made.sizes), *ends)


def group_step(operation: GroupingOperation, where: str, *, numbers_units: bool = False) -> Step:
    """Returns the step that makes the outputs of a group.

    Args:
        operation: the operation that groups.
        where: what to call it in error texts.
        numbers_units: whether the origins of the outputs get a row with the number of each output in the group.
    """

    def step(group: Elements, allocate: Allocate) -> Elements:
        origins = group.origins
        identity = GroupId(int(origins.position[0]), int(origins.index[0]))
        pieces = operation.arrange(origins.sizes, identity)
        firsts = pieces.offsets[:-1]
        made_of = origins.take(pieces.elements[firsts]).without_sizes()
        if pieces.starts is not None and operation.output_size is not None:
            made_of = made_of.numbered(pieces.starts[firsts] // operation.output_size, MAX_FAN_OUT)
        if numbers_units:
            made_of = made_of.with_sizes(np.arange(len(made_of))[np.newaxis])
        values = group.values
        return outputs_of(lambda which: operation.make(values, which, allocate), pieces, origins, made_of, where)

    return step


def outputs_of(
    make: Callable[[Segments], Sequence[Any]], pieces: Segments, origins: Origins, made_of: Origins, where: str
) -> Elements:
    """Returns the outputs that consist of some pieces.

    Args:
        make: makes them.
        pieces: what they consist of.
        origins: where the elements came from that these are pieces of.
        made_of: the origins of the outputs.
        where: what to call this in error texts.
    """
    error = None
    try:
        values = make(pieces)
    except BaseException as failure:
        if cannot_wait(failure):
            raise

        def make_one(output: int) -> Any:
            try:
                (value,) = make(pieces.of_output(output))
            except StackError as error:
                keys = ", ".join(str(origins.record_key[row]) for row in error.rows)
                error.add_note(f"millstream: the record keys of these elements: {keys}.")
                raise
            return value

        count = len(pieces.offsets) - 1
        values, error = collect(map(make_one, range(count)), made_of, where, count)
    return Elements(values, made_of.take(slice(len(values))), error)
