"""Tables: Parquet files, and Arrow files as HF datasets keeps them, written and read by pyarrow alone."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

COLUMNS = ("id", "tokens")
"""The columns that are read."""

ROWS_AT_ONCE = 1000
"""Rows in a row group of Parquet, and in a record batch of Arrow, as HF datasets writes them."""

TOKENS = 512


def write(path: Path, *, form: str, first: int, count: int, rng: np.random.Generator, is_wide: bool) -> None:
    """Writes a file of some rows, numbered from `first` on: "parquet", or "arrow"."""
    schema = pa.schema([("id", pa.int64()), ("tokens", pa.list_(pa.uint16()))])
    if is_wide:
        schema = schema.append(pa.field("text", pa.string())).append(pa.field("noise", pa.binary()))
    batches = (_batch(schema, start, min(ROWS_AT_ONCE, first + count - start), rng) for start in _starts(first, count))
    if form == "parquet":
        with pq.ParquetWriter(path, schema) as parquet:
            for batch in batches:
                parquet.write_batch(batch, row_group_size=ROWS_AT_ONCE)
    else:
        with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, schema) as stream:
            for batch in batches:
                stream.write_batch(batch)


def row_groups(paths: Sequence[str], columns: Sequence[str]) -> Iterator[dict[str, NDArray[Any]]]:
    """Yields some columns of each row group of Parquet files, one after the other, as arrays without a copy."""
    for path in paths:
        file = pq.ParquetFile(path)
        for group in range(file.num_row_groups):
            yield arrays_of_table(file.read_row_group(group, columns=list(columns), use_threads=False))


def whole(paths: Sequence[str], columns: Sequence[str]) -> dict[str, NDArray[Any]]:
    """Returns some columns of all rows of some files, in memory."""
    parts = [arrays_of_table(_table(path).select(list(columns))) for path in paths]
    return {name: np.concatenate([part[name] for part in parts]) for name in columns}


def arrays_of_table(table: Any) -> dict[str, NDArray[Any]]:
    """Returns the columns of an Arrow table as arrays; lists of one length as an array of two axes."""
    arrays = {}
    for name, column in zip(table.column_names, table.columns, strict=True):
        array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
        is_list = pa.types.is_list(array.type)
        arrays[name] = array.flatten().to_numpy().reshape(len(array), -1) if is_list else array.to_numpy()
    return arrays


def _table(path: str) -> Any:
    if path.endswith(".parquet"):
        return pq.read_table(path)
    with pa.OSFile(path) as file, pa.ipc.open_stream(file) as stream:
        return stream.read_all()


def _starts(first: int, count: int) -> range:
    return range(first, first + count, ROWS_AT_ONCE)


def _batch(schema: Any, first: int, count: int, rng: np.random.Generator) -> Any:
    tokens = pa.array(rng.integers(0, 50_000, count * TOKENS).astype(np.uint16))
    offsets = pa.array(np.arange(0, (count + 1) * TOKENS, TOKENS, dtype=np.int32))
    arrays = [pa.array(range(first, first + count), pa.int64()), pa.ListArray.from_arrays(offsets, tokens)]
    if len(schema) > len(arrays):
        arrays.append(pa.array([f"text of row {number} " * 20 for number in range(first, first + count)]))
        arrays.append(pa.array([rng.bytes(600) for _ in range(count)]))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
