"""Packed rows: positions of a packed order become documents, and Pack builds rows from the documents.

A position is a row. Locating a row yields one origin per document, all with the position and block of the row. Reading
and the operations before Pack therefore work on documents, and a run may be divided between any two of them. Pack
combines the documents of one position. Until then, the table of origins has four more rows: the start and end of the
document's part in the row, the number of later documents in the row, and the document's length in tokens.

In a mixture, a row contains documents of one component, and its position is that in the component's own order.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from millstream.core.columnar import Allocate
from millstream.core.descriptions import described
from millstream.core.segments import Segments
from millstream.loader.operations.elements import Elements, Origins, describe_origin
from millstream.loader.operations.grouping import outputs_of, prepared
from millstream.loader.operations.steps import Step, annotated
from millstream.loader.pipeline.partition import Partition
from millstream.samplers.base import AdaptedSampler, VectorisedSampler
from millstream.samplers.protocols import PackedSampler, is_mixed_and_packed, is_packed
from millstream.transforms import Pack, Transformation
from millstream.transforms.packing.rows import TOKENS_TOGETHER

_BEGIN, _END, _LEFT, _TOKENS = 5, 6, 7, 8
"""The rows of the table that only documents have."""

_LARGEST = np.iinfo(np.int64).max


def locate_segments(partition: Partition, order: PackedSampler, start: int, stop: int) -> Origins:
    """Returns the origins of the documents in the rows of blocks `start … stop - 1`.

    Document j of a row has the index position * row_length + j.
    """
    positions = partition.positions(start, stop)
    # User code may see them, and batches share them.
    positions.flags.writeable = False
    names: tuple[Any, ...] = ()
    if is_mixed_and_packed(order):
        names = order.names
        components, indices, segments = order.located_segments(positions)
        _check_indices(indices, order.row_length)
    else:
        components, indices = np.zeros(len(positions), dtype=np.int64), positions
        _check_indices(indices, order.row_length)
        segments = order.segments_at(positions)
    starts, keys = segments.offsets, segments.elements
    rows = np.repeat(np.arange(len(positions)), np.diff(starts))
    documents = np.arange(len(keys))
    table = np.empty((9, len(keys)), dtype=np.int64)
    table[0] = positions[rows]
    table[1] = keys
    table[2] = indices[rows] * order.row_length + documents - starts[rows]
    table[3] = partition.blocks_of(table[0])
    table[4] = components[rows]
    table[_TOKENS] = order.lengths_at(keys)
    table[_BEGIN] = segments.starts  # type: ignore[assignment]  # Rows that a sampler plans have starts and stops.
    table[_END] = table[_BEGIN] + segments.lengths
    table[_LEFT] = starts[1:][rows] - documents - 1
    table.flags.writeable = False
    return Origins(table, names)


def _check_indices(rows: NDArray[np.int64], row_length: int) -> None:
    if len(rows) and int(rows.max()) > _LARGEST // row_length - 1:
        raise OverflowError(f"The documents of the row at position {rows.max()} would have indices above 2**63.")


def pack_step(operation: Pack, order: VectorisedSampler | AdaptedSampler, where: str) -> Step:
    # `check_packing` has checked that the order is a PackedSampler.
    row_length = cast("PackedSampler", order).row_length

    def step(run: Elements, allocate: Allocate) -> Elements:
        located = run.origins
        if not len(located):
            return Elements([], located.without_sizes(), run.error)
        run = prepared(operation, Elements(run.values, located.without_sizes(), run.error), where)
        run = _as_planned(run, located.table[_TOKENS, : len(run.values)], list(operation.length_struct), where)
        if not run.values:
            return Elements([], run.origins.without_sizes(), run.error)
        table = located.table[:, : len(run.values)]
        # An incomplete row before an error is not built. The error takes its place.
        bounds = np.append(0, np.flatnonzero(table[_LEFT] == 0) + 1)
        used = slice(bounds[-1])
        segments = Segments(bounds, np.arange(bounds[-1]), table[_BEGIN, used], table[_END, used])
        made_of = Origins(_rows_of(table, bounds[:-1], row_length), located.names)
        rows = outputs_of(lambda group: operation.make(run.values, group, allocate), segments, located, made_of, where)
        return Elements(rows.values, rows.origins, run.error if rows.error is None else rows.error)

    return step


def _as_planned(run: Elements, planned: NDArray[np.integer[Any]], names: Sequence[str], where: str) -> Elements:
    """Returns the documents before the first one whose length differs from the plan, followed by an error."""
    is_other = run.origins.sizes != planned
    if not is_other.any():
        return run
    row = int(np.argmax(is_other.any(axis=0)))
    feature = int(np.argmax(is_other[:, row]))
    error = ValueError(
        f"The document of record key {run.origins.record_key[row]} has {run.origins.sizes[feature, row]} "
        f"{names[feature]!r}, but according to the sampler's lengths it has {planned[row]}. Measure the lengths again, "
        "on the results of the operations before Pack: lengths_of(source, operations, refresh=True)."
    )
    where = f"{where}, at {describe_origin(run.origins, row)}"
    return Elements(run.values[:row], run.origins.take(slice(row)), annotated(error, where))


def max_batches(operations: Sequence[Transformation], batch_size: int) -> int:
    """Returns the maximum number of batches per call.

    It is one, except for packed rows, of which small batches are built together.
    """
    lengths = [max(operation.length_struct.values()) for operation in operations if isinstance(operation, Pack)]
    return max(1, TOKENS_TOGETHER // (lengths[0] * batch_size)) if lengths else 1


def check_packing(
    operations: Sequence[Transformation], sampler: VectorisedSampler | AdaptedSampler, num_records: int
) -> None:
    packs = [number for number, operation in enumerate(operations) if isinstance(operation, Pack)]
    if not is_packed(sampler):
        if packs:
            raise ValueError(f"operations[{packs[0]}] builds packed rows, but the sampler is not a PackingSampler.")
        return
    if sampler.num_source_records != num_records:
        raise ValueError(
            f"The sampler's lengths are of {sampler.num_source_records} documents, but data_source has {num_records} "
            "records."
        )
    if len(packs) != 1:
        raise ValueError(
            "The sampler plans rows of several documents, so exactly one Pack is needed, got "
            f"{len(packs)}. Use operations=[..., Pack({{'tokens': {sampler.row_length}}}), ...]."
        )
    (number,) = packs
    for earlier, operation in enumerate(operations[:number]):
        if operation.gathers or not operation.keeps_count:
            raise ValueError(
                f"operations[{earlier}], {described(operation)}, comes before the Pack and changes the documents, but "
                "the sampler has planned the rows. Filter ahead, and omit the documents from lengths."
            )
    pack = operations[number]
    for name, length in pack.length_struct.items() if isinstance(pack, Pack) else ():
        if length < sampler.row_length:
            raise ValueError(
                f"operations[{number}] builds {name!r} of length {length}, but the sampler plans rows of length "
                f"{sampler.row_length}. It must be at least as long."
            )


def _rows_of(table: NDArray[np.int64], firsts: NDArray[np.intp], row_length: int) -> NDArray[np.int64]:
    """Returns the table of rows: the columns of their first documents, with the position as the index."""
    rows = table[:5, firsts]
    rows[2] //= row_length
    return rows
