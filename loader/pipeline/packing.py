"""Rows of several documents: how the positions of a packed order become documents, and documents become rows.

A position is a row. Where records are located, each row becomes the documents in it, all of its position and block; so
reading, and the operations before Pack, work on documents, and may cut a run between any two of them. Pack puts those
of one position together again. Until then, four more rows of the table of origins say what part of a document goes
into the row, how many documents of the row come after it, and how many tokens the document has.

In a mixture, a row has documents of one component, and its position is that in the component's own order.
"""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from millstream.columnar import Allocate
from millstream.descriptions import described
from millstream.loader.pipeline.elements import Elements, Origins, describe_origin
from millstream.loader.pipeline.grouping import outputs_of, prepared
from millstream.loader.pipeline.partition import Partition
from millstream.loader.pipeline.steps import Step, annotated
from millstream.samplers.base import AdaptedSampler, VectorisedSampler
from millstream.samplers.protocols import PackedSampler, is_mixed_and_packed, is_packed
from millstream.transforms import Pack, Transformation
from millstream.transforms.grouping import Segments
from millstream.transforms.packing.rows import TOKENS_TOGETHER

_BEGIN, _END, _LEFT, _TOKENS = 5, 6, 7, 8
"""The rows of the table that documents have and rows do not."""

_LARGEST = np.iinfo(np.int64).max


def locate_pieces(order: PackedSampler, partition: Partition, positions: NDArray[np.int64]) -> Origins:
    """Returns the origins of the documents in the rows at some positions.

    Document j of a row has the index position * row_length + j.

    Raises:
        OverflowError: an index does not fit 63 bits.
    """
    names: tuple[Any, ...] = ()
    if is_mixed_and_packed(order):
        names = order.names
        components, indices, (starts, keys, begins, ends) = order.located_pieces(positions)
        _check_indices(indices, order.row_length)
    else:
        components, indices = np.zeros(len(positions), dtype=np.int64), positions
        _check_indices(indices, order.row_length)
        starts, keys, begins, ends = order.pieces_at(positions)
    rows = np.repeat(np.arange(len(positions)), np.diff(starts))
    documents = np.arange(len(keys))
    table = np.empty((9, len(keys)), dtype=np.int64)
    table[0] = positions[rows]
    table[1] = keys
    table[2] = indices[rows] * order.row_length + documents - starts[rows]
    table[3] = partition.blocks_of(table[0])
    table[4] = components[rows]
    table[_TOKENS] = order.lengths_at(keys)
    table[_BEGIN], table[_END], table[_LEFT] = begins, ends, starts[1:][rows] - documents - 1
    table.flags.writeable = False
    return Origins(table, names)


def _check_indices(rows: NDArray[np.int64], row_length: int) -> None:
    if len(rows) and int(rows.max()) > _LARGEST // row_length - 1:
        raise OverflowError(f"The documents of the row at position {rows.max()} would have indices above 2**63.")


def pack_step(operation: Pack, order: VectorisedSampler | AdaptedSampler, where: str) -> Step:
    """Returns the step that makes rows of the documents of each position."""
    # `check_packing` has seen to it that they are a PackedSampler's.
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
        # A row that an error cuts short is not one: the error comes instead of it.
        bounds = np.append(0, np.flatnonzero(table[_LEFT] == 0) + 1)
        used = slice(bounds[-1])
        pieces = Segments(bounds, np.arange(bounds[-1]), table[_BEGIN, used], table[_END, used])
        made_of = Origins(_rows_of(table, bounds[:-1], row_length), located.names)
        rows = outputs_of(lambda which: operation.make(run.values, which, allocate), pieces, located, made_of, where)
        return Elements(rows.values, rows.origins, run.error if rows.error is None else rows.error)

    return step


def _as_planned(run: Elements, planned: NDArray[np.integer[Any]], names: Sequence[str], where: str) -> Elements:
    """Returns the documents up to the first that has more or fewer tokens than planned, which is an error."""
    is_other = run.origins.sizes != planned
    if not is_other.any():
        return run
    row = int(np.argmax(is_other.any(axis=0)))
    feature = int(np.argmax(is_other[:, row]))
    error = ValueError(
        f"The document of record key {run.origins.record_key[row]} has {run.origins.sizes[feature, row]} "
        f"{names[feature]!r}, but the sampler's lengths say that it has {planned[row]}: measure the lengths again, "
        "on what the operations before Pack return."
    )
    where = f"{where}, at {describe_origin(run.origins, row)}"
    return Elements(run.values[:row], run.origins.take(slice(row)), annotated(error, where))


def most_batches(operations: Sequence[Transformation], batch_size: int) -> int:
    """Returns how many batches are worth a call, however quick they are.

    One is. But rows are laid out together, as many batches of them as are small.

    Args:
        operations: those of stage 0.
        batch_size: how many positions a batch has.
    """
    lengths = [max(operation.length_struct.values()) for operation in operations if isinstance(operation, Pack)]
    return max(1, TOKENS_TOGETHER // (lengths[0] * batch_size)) if lengths else 1


def check_packing(
    operations: Sequence[Transformation], sampler: VectorisedSampler | AdaptedSampler, num_records: int
) -> None:
    """Refuses rows that are not laid out, a Pack without rows, and what does not go before it."""
    packs = [number for number, operation in enumerate(operations) if isinstance(operation, Pack)]
    if not is_packed(sampler):
        if packs:
            raise ValueError(
                f"operations[{packs[0]}] lays out rows, but the sampler makes none: it must be a PackingSampler."
            )
        return
    if sampler.num_source_records != num_records:
        raise ValueError(
            f"The sampler's lengths are of {sampler.num_source_records} documents, but data_source has {num_records} "
            "records."
        )
    if len(packs) != 1:
        raise ValueError(
            f"The sampler makes rows of several documents, which exactly one Pack must lay out; got {len(packs)}: "
            f"write operations=[..., Pack({{'tokens': {sampler.row_length}}}), ...]."
        )
    (number,) = packs
    for earlier, operation in enumerate(operations[:number]):
        if operation.gathers or not operation.keeps_count:
            raise ValueError(
                f"operations[{earlier}], {described(operation)}, comes before the Pack and changes which documents "
                "there are, but the sampler has planned the rows: filter ahead, and leave the documents out of lengths."
            )
    pack = operations[number]
    for name, length in pack.length_struct.items() if isinstance(pack, Pack) else ():
        if length < sampler.row_length:
            raise ValueError(
                f"operations[{number}] makes {name!r} {length} long, but the sampler plans rows of "
                f"{sampler.row_length}: they must be at least as long."
            )


def _rows_of(table: NDArray[np.int64], firsts: NDArray[np.intp], row_length: int) -> NDArray[np.int64]:
    """Returns the table of rows: that of their first documents, with the position as the index."""
    rows = table[:5, firsts]
    rows[2] //= row_length
    return rows
