"""Measures millstream's sources beside the library of each format, in its batched mode and with its cache.

    python benchmarks/formats.py

Both read the same rows, by the same keys, in batches of 256: at random over the whole file, and, for files that are
read a unit at a time, in windows of units, which is the order of `load(shuffle=True)`. Warm: the file lies in the page
cache. Cold: it was dropped from there before each turn, so a turn reads from the disk what it needs. Writes
`results/formats.json` and prints a table.
"""

import dataclasses
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from absl import app, flags
from numpy.typing import NDArray

import millstream
from suite.data import FOLDER
from suite.machine import describe_machine
from suite.report import number, ratio_text
from suite.work import SEED

ROWS = 16_384
SHAPE = (64, 64, 3)
"""12 KB of bytes."""

UNIT = 16
"""Rows in a chunk of Zarr and HDF5."""

WINDOW = 64 * UNIT
BATCH = 256
CACHE_BYTES = 1 << 28

BATCHES = flags.DEFINE_integer("batches", 24, "The batches of a turn.", 1)
TURNS = flags.DEFINE_integer("turns", 5, "How often each is measured.", 1)
NAMES = flags.DEFINE_list("formats", [], "Only these.")
OUTPUT = flags.DEFINE_string("output", str(Path(__file__).parent / "results" / "formats.json"), "The results.")

Read = Callable[[NDArray[np.int64]], Any]


@dataclasses.dataclass(frozen=True)
class Format:
    """A format: how its file is written, and how millstream and its library read rows by their keys.

    Attributes:
        name: of the format, and how it is stored.
        library: the function of the library.
        write: writes rows to a path.
        ours: returns what reads rows.
        theirs: the same by the library.
        orders: of keys: "random", and "windows" where rows are read a unit at a time.
    """

    name: str
    library: str
    write: Callable[[Path, NDArray[np.uint8]], None]
    ours: Callable[[str], Read]
    theirs: Callable[[str], Read]
    orders: tuple[str, ...] = ("random",)


def write_zarr(codecs: list[Any]) -> Callable[[Path, NDArray[np.uint8]], None]:
    def write(path: Path, rows: NDArray[np.uint8]) -> None:
        import tensorstore as ts  # noqa: PLC0415  (optional, like all libraries of formats)

        metadata = {
            "shape": list(rows.shape),
            "data_type": "uint8",
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [UNIT, *rows.shape[1:]]}},
            "codecs": codecs,
        }
        store = {"driver": "file", "path": str(path)}
        ts.open({"driver": "zarr3", "kvstore": store, "metadata": metadata}, create=True).result().write(rows).result()

    return write


def zarr_ours(path: str) -> Read:
    source = millstream.ZarrDataSource({"x": path}, cache_bytes=CACHE_BYTES)
    return lambda keys: source.__getitems__(keys.tolist())


def zarr_theirs(path: str) -> Read:
    import tensorstore as ts  # noqa: PLC0415

    context = ts.Context({"cache_pool": {"total_bytes_limit": CACHE_BYTES}})
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}, "recheck_cached_data": False}
    array = ts.open(spec, context=context).result()
    return lambda keys: array[keys].read().result()


def write_hdf5(**options: Any) -> Callable[[Path, NDArray[np.uint8]], None]:
    def write(path: Path, rows: NDArray[np.uint8]) -> None:
        import h5py  # noqa: PLC0415

        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=rows, **options)

    return write


def hdf5_ours(path: str) -> Read:
    source = millstream.Hdf5DataSource({"x": f"{path}/x"}, cache_bytes=CACHE_BYTES)
    return lambda keys: source.__getitems__(keys.tolist())


def hdf5_theirs(path: str) -> Read:
    import h5py  # noqa: PLC0415

    dataset = h5py.File(path, rdcc_nbytes=CACHE_BYTES, rdcc_nslots=100_003)["x"]

    def read(keys: NDArray[np.int64]) -> Any:
        order = np.argsort(keys)
        rows = np.empty((len(keys), *dataset.shape[1:]), dataset.dtype)
        rows[order] = dataset[keys[order]]
        return rows

    return read


def write_lance(path: Path, rows: NDArray[np.uint8]) -> None:
    import lance  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415

    flat = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), int(np.prod(rows.shape[1:])))
    lance.write_dataset(pa.table({"x": flat}), str(path))


def lance_ours(path: str) -> Read:
    source = millstream.LanceDataSource(path)
    return lambda keys: source.__getitems__(keys.tolist())


def lance_theirs(path: str) -> Read:
    import lance  # noqa: PLC0415

    dataset = lance.dataset(path)
    return lambda keys: dataset.take(keys.tolist()).column("x").combine_chunks().flatten().to_numpy()


def write_bagz(path: Path, rows: NDArray[np.uint8]) -> None:
    records = [row.tobytes() for row in rows]
    limits = np.cumsum([len(record) for record in records]).astype("<u8")
    path.write_bytes(b"".join(records) + limits.tobytes())


def bagz_ours(path: str) -> Read:
    source = millstream.BagzDataSource(path)
    return lambda keys: source.__getitems__(keys.tolist())


def bagz_theirs(path: str) -> Read:
    import bagz  # noqa: PLC0415

    reader = bagz.Reader(path)
    return lambda keys: [reader[key] for key in keys.tolist()]


def write_array_record(path: Path, rows: NDArray[np.uint8]) -> None:
    from array_record.python.array_record_module import ArrayRecordWriter  # noqa: PLC0415

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for row in rows:
        writer.write(row.tobytes())
    writer.close()


def array_record_ours(path: str) -> Read:
    source = millstream.ArrayRecordDataSource(path)
    return lambda keys: source.__getitems__(keys.tolist())


def array_record_theirs(path: str) -> Read:
    from array_record.python.array_record_module import ArrayRecordReader  # noqa: PLC0415

    reader = ArrayRecordReader(path, options="readahead_buffer_size:0")
    return lambda keys: reader.read(keys.tolist())


def write_parquet(path: Path, rows: NDArray[np.uint8]) -> None:
    import pyarrow as pa  # noqa: PLC0415
    import pyarrow.parquet as pq  # noqa: PLC0415

    lists = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), int(np.prod(rows.shape[1:])))
    pq.write_table(pa.table({"x": lists}), path, row_group_size=256)


def parquet_ours(path: str) -> Read:
    source = millstream.ParquetDataSource(path, cache_bytes=CACHE_BYTES)
    return lambda keys: source.__getitems__(keys.tolist())


def parquet_theirs(path: str) -> Read:
    """Returns the rows in order, whatever the keys: the library has no other way that decodes each group once."""
    import pyarrow.parquet as pq  # noqa: PLC0415

    def batches() -> Iterator[Any]:
        while True:
            yield from pq.ParquetFile(path).iter_batches(BATCH, use_threads=False)

    found = batches()
    return lambda keys: next(found).column("x").flatten().to_numpy()[: len(keys)]


_BYTES = {"name": "bytes", "configuration": {"endian": "little"}}
BOTH = ("random", "windows")
_ZSTD = {"name": "zstd", "configuration": {"level": 1}}
FORMATS = (
    Format("Zarr, uncompressed", "TensorStore `array[keys]`", write_zarr([_BYTES]), zarr_ours, zarr_theirs, BOTH),
    Format("Zarr, zstd", "TensorStore `array[keys]`", write_zarr([_BYTES, _ZSTD]), zarr_ours, zarr_theirs, BOTH),
    Format("HDF5, contiguous", "h5py, sorted keys", write_hdf5(), hdf5_ours, hdf5_theirs),
    Format(
        "HDF5, gzip chunks",
        "h5py, sorted keys",
        write_hdf5(chunks=(UNIT, *SHAPE), compression="gzip", compression_opts=1),
        hdf5_ours,
        hdf5_theirs,
        BOTH,
    ),
    Format("Lance", "`take`", write_lance, lance_ours, lance_theirs),
    Format("Bagz", "`reader[k]`", write_bagz, bagz_ours, bagz_theirs),
    Format("ArrayRecord", "`reader.read(keys)`", write_array_record, array_record_ours, array_record_theirs),
    Format("Parquet", "pyarrow, in order", write_parquet, parquet_ours, parquet_theirs, ("windows",)),
)


def rows_of_noise() -> NDArray[np.uint8]:
    """Returns rows that a codec makes about half as large: bytes of four bits."""
    return np.random.default_rng(SEED).integers(0, 16, (ROWS, *SHAPE), np.uint8)


def keys_of(order: str, turn: int) -> list[NDArray[np.int64]]:
    """Returns the keys of the batches of a turn: other ones each turn, the same for both readers."""
    rng = np.random.default_rng((SEED, turn))
    if order == "random":
        return [rng.permutation(ROWS)[:BATCH] for _ in range(BATCHES.value)]
    start = turn * BATCHES.value * BATCH % (ROWS // WINDOW * WINDOW)
    windows = -(-BATCHES.value * BATCH // WINDOW)
    keys = np.concatenate([(start + window * WINDOW + rng.permutation(WINDOW)) % ROWS for window in range(windows)])
    return list(keys.reshape(-1, BATCH)[: BATCHES.value])


def check(form: Format, path: Path, rows: NDArray[np.uint8]) -> None:
    """Raises an error if the two do not read the same, and what was written."""
    keys = np.random.default_rng(SEED).permutation(ROWS)[:BATCH]
    for make in (form.ours, form.theirs):
        if content(make(str(path))(keys)) != rows[keys].tobytes():
            raise ValueError(f"{form.name}: {make.__name__} reads other rows than were written")


def content(found: Any) -> bytes:
    """Returns the bytes of rows in whatever form they were read."""
    if isinstance(found, dict):
        return content(found["x"])
    if isinstance(found, bytes | np.ndarray):
        return found if isinstance(found, bytes) else np.ascontiguousarray(found).tobytes()
    return b"".join(map(content, found))


def rate(read: Read, batches: list[NDArray[np.int64]]) -> float:
    start = time.perf_counter()
    for keys in batches:
        read(keys)
    return len(batches) * BATCH / (time.perf_counter() - start)


def drop_from_cache(path: Path) -> None:
    """Drops a file, or those of a folder, from the page cache."""
    for part in path.rglob("*") if path.is_dir() else [path]:
        if part.is_file():
            descriptor = os.open(part, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def measure(form: Format, path: Path, order: str, *, cold: bool) -> dict[str, list[float]]:
    """Returns the rows per second of both, a value a turn; new readers each turn, so that their caches are empty."""
    values: dict[str, list[float]] = {"ours": [], "theirs": []}
    for turn in range(TURNS.value):
        for side, make in (("ours", form.ours), ("theirs", form.theirs)):
            if cold:
                drop_from_cache(path)
            read = make(str(path))
            values[side].append(rate(read, keys_of(order, turn)))
    return values


def main(_: list[str]) -> None:
    rows = rows_of_noise()
    FOLDER.mkdir(parents=True, exist_ok=True)
    found = []
    for form in FORMATS:
        if NAMES.value and form.name not in NAMES.value:
            continue
        path = FOLDER / f"format-{'-'.join(form.name.lower().replace(',', '').split())}"
        if not path.exists():
            partial = path.with_name(f"{path.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            form.write(partial, rows)
            partial.rename(path)
        if form.name != "Parquet":
            check(form, path, rows)
        for order in form.orders:
            for cold in (False, True):
                values = measure(form, path, order, cold=cold)
                found.append({"format": form.name, "library": form.library, "order": order, "cold": cold, **values})
    machine = describe_machine()
    lines = ",\n".join(json.dumps(row) for row in found)
    Path(OUTPUT.value).write_text(f'{{"machine": {json.dumps(machine)},\n"rows": [\n{lines}\n]}}\n')
    print(table(found))


def table(found: list[dict[str, Any]]) -> str:
    """Returns the rows as Markdown: rows per second, and how many times the library's."""
    lines = [
        "| format | read | millstream, rows/s | its library | times as fast as the library |",
        "|---|---|--:|---|---|",
    ]
    for row in found:
        ratios = [ours / theirs for ours, theirs in zip(row["ours"], row["theirs"], strict=True)]
        how = f"{'at random' if row['order'] == 'random' else 'in windows'}, {'cold' if row['cold'] else 'warm'}"
        ours = number(median(row["ours"]))
        lines.append(f"| {row['format']} | {how} | {ours} | {row['library']} | {ratio_text(ratios)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    app.run(main)
