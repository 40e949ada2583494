"""Rows of several documents: how the positions of a packed order become documents, and documents become rows.

A position is a row. Where records are located, each row becomes the documents in it, all of its position and block; so
reading, and the operations before Pack, work on documents, and may cut a run between any two of them. Pack puts those
of one position together again. Until then, three more rows of the table of origins say what part of a document goes
into the row, and how many documents of the row come after it.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from millstream.columnar import Allocate
from millstream.descriptions import described
from millstream.loader.pipeline.elements import Elements, Origins
from millstream.loader.pipeline.partition import Partition
from millstream.loader.pipeline.steps import Step, collect
from millstream.samplers.base import AdaptedSampler, PackedSampler, VectorisedSampler, is_packed
from millstream.transforms import Batch, Pack, Transformation
from millstream.transforms.pack import Document

_BEGIN, _END, _LEFT = 5, 6, 7
"""The rows of the table that documents have and rows do not."""

_LARGEST = np.iinfo(np.int64).max


def locate_pieces(order: PackedSampler, partition: Partition, positions: NDArray[np.int64]) -> Origins:
    """Returns the origins of the documents in the rows at some positions.

    Document j of a row has the index position * row_length + j.

    Raises:
        OverflowError: an index does not fit 63 bits.
    """
    if len(positions) and int(positions[-1]) > _LARGEST // order.row_length - 1:
        raise OverflowError(f"The documents of the row at position {positions[-1]} would have indices above 2**63.")
    starts, keys, begins, ends = order.pieces_at(positions)
    rows = np.repeat(np.arange(len(positions)), np.diff(starts))
    documents = np.arange(len(keys))
    table = np.empty((8, len(keys)), dtype=np.int64)
    table[0] = positions[rows]
    table[1] = keys
    table[2] = table[0] * order.row_length + documents - starts[rows]
    table[3] = partition.blocks_of(table[0])
    table[4] = 0
    table[_BEGIN], table[_END], table[_LEFT] = begins, ends, starts[1:][rows] - documents - 1
    table.flags.writeable = False
    return Origins(table)


def pack_step(operation: Pack, order: VectorisedSampler | AdaptedSampler, where: str) -> Step:
    """Returns the step that makes rows of the documents of each position."""
    # `check_packing` has seen to it that they are a PackedSampler's.
    lengths = np.asarray(cast("PackedSampler", order).lengths)

    def step(run: Elements, allocate: Allocate) -> Elements:
        del allocate
        if not len(run.origins):
            return run
        table = run.origins.table
        bounds = np.flatnonzero(np.diff(table[0], prepend=-1, append=-1))
        if len(bounds) > 1 and table[_LEFT, -1]:
            # A row that an error cuts short is not one: the error comes instead of it.
            bounds = bounds[:-1]
        keys = table[1]
        columns = (keys, lengths[keys], table[_BEGIN], table[_END])
        documents = list(map(Document, run.values, *(column.tolist() for column in columns)))
        num_rows = max(0, len(bounds) - 1)
        origins = _rows_of(table, bounds[:num_rows])
        rows, error = collect(_packed(operation, documents, bounds.tolist()), origins, where, num_rows)
        return Elements(rows, origins.take(slice(len(rows))), run.error if error is None else error)

    return step


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
    if len(sampler.lengths) != num_records:
        raise ValueError(
            f"The sampler's lengths are of {len(sampler.lengths)} documents, but data_source has {num_records} records."
        )
    if len(packs) != 1:
        raise ValueError(
            f"The sampler makes rows of several documents, which exactly one Pack must lay out; got {len(packs)}: "
            f"write operations=[..., Pack({{'tokens': {sampler.row_length}}}), ...]."
        )
    (number,) = packs
    for earlier, operation in enumerate(operations[:number]):
        if isinstance(operation, Batch) or not operation.keeps_count:
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


def _packed(operation: Pack, documents: Sequence[Document], bounds: Sequence[int]) -> Iterator[object]:
    return (operation.pack(documents[start:stop]) for start, stop in itertools.pairwise(bounds))


def _rows_of(table: NDArray[np.int64], firsts: NDArray[np.intp]) -> Origins:
    """Returns the origins of rows: those of their first documents, with the position as the index."""
    rows = table[:5, firsts]
    rows[2] = rows[0]
    return Origins(rows)
