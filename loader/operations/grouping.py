"""Steps for operations that build elements from several: preparing elements for a grouping, and building outputs.

Both handle a complete run in one call. If that fails, they go through it one by one, so that elements before an error
are passed on, and the error names its record.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from millstream.core.columnar import Allocate
from millstream.core.segments import Segments
from millstream.core.signals import cannot_wait
from millstream.errors import StackError
from millstream.loader.operations.elements import Elements, Location, Origins
from millstream.loader.operations.steps import Step, collect
from millstream.transforms import Pack
from millstream.transforms.grouping import MAX_FAN_OUT, GroupId, GroupingOperation, Prepared


def prepare_step(operation: GroupingOperation, where: str) -> Step:
    """Returns the step that prepares elements for a grouping operation. It is the last step of the stage before."""
    return lambda run, _: prepared(operation, run, where, splits=operation.splits)


def prepared(operation: GroupingOperation | Pack, run: Elements, where: str, *, splits: bool = False) -> Elements:
    """Returns a run of prepared elements, whose origins contain their sizes.

    If it `splits`, an element may become several, which get their own indices.
    """
    values, error = list(run.values), None
    try:
        made, count = operation.prepare(values), len(values)
    except BaseException as failure:
        if cannot_wait(failure):
            raise
        each = (operation.prepare([value]) for value in values)
        prepared, error = collect(each, run.origins, where, len(values))
        made, count = Prepared.concatenate([operation.prepare([]), *prepared]), len(prepared)
    origins = run.origins.take(slice(count))
    if splits or made.counts is not None:
        counts = [1] * count if made.counts is None else made.counts
        origins = origins.fan_out(counts, MAX_FAN_OUT if splits else 1)
    ends = (run.error, run.at) if error is None else (error, Location.of(run.origins, count))
    return Elements(made.values, origins.with_sizes(made.sizes), *ends)


def group_step(operation: GroupingOperation, where: str, *, numbers_units: bool = False) -> Step:
    """Returns the step that builds the outputs of a group.

    If it `numbers_units`, the origins of outputs get a row with the number of each output in the group.
    """

    def step(group: Elements, allocate: Allocate) -> Elements:
        origins = group.origins
        group_id = GroupId(int(origins.position[0]), int(origins.index[0]))
        segments = operation.arrange(origins.sizes, group_id)
        firsts = segments.offsets[:-1]
        made_of = origins.take(segments.elements[firsts]).without_sizes()
        if segments.starts is not None and operation.output_size is not None:
            made_of = made_of.numbered(segments.starts[firsts] // operation.output_size, MAX_FAN_OUT)
        if numbers_units:
            made_of = made_of.with_sizes(np.arange(len(made_of))[np.newaxis])
        values = group.values
        return outputs_of(lambda chosen: operation.make(values, chosen, allocate), segments, origins, made_of, where)

    return step


def outputs_of(
    make: Callable[[Segments], Sequence[Any]], segments: Segments, origins: Origins, made_of: Origins, where: str
) -> Elements:
    """Builds the outputs that consist of the given segments, all together or, after an error, one by one.

    `origins` are those of the elements that the segments are cut from, `made_of` those of the outputs.
    """
    error = None
    try:
        values = make(segments)
    except BaseException as failure:
        if cannot_wait(failure):
            raise

        def make_one(output: int) -> Any:
            try:
                (value,) = make(segments.of_output(output))
            except StackError as error:
                keys = ", ".join(str(origins.record_key[row]) for row in error.rows)
                error.add_note(f"millstream: the record keys of these elements: {keys}.")
                raise
            return value

        count = len(segments.offsets) - 1
        values, error = collect(map(make_one, range(count)), made_of, where, count)
    return Elements(values, made_of.take(slice(len(values))), error)
