"""Files of arrays, datasets and tokens: how they are written, and read by the library of their format alone."""

import dataclasses
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

ROWS_PER_CHUNK = 16
TOKENS = 1024
ROW_SHAPE = (64, 64, 3)

Read = Callable[[list[int]], list[dict[str, Any]]]
"""Returns the records of some keys."""


@dataclasses.dataclass(frozen=True)
class ArrayFormat:
    """A format of arrays.

    Attributes:
        write: writes rows to a path.
        open: returns what reads records, as the documentation of the format's library does.
        first_byte: returns the offset of the first row in the file, if rows follow each other as they are.
    """

    write: Callable[[Path, NDArray[Any]], object]
    open: Callable[[str], Read]
    first_byte: Callable[[str], int] | None = None


@final
class Rows:
    """The records of a file, as a map-style dataset that each process opens for itself."""

    def __init__(self, path: str, form: str, count: int) -> None:
        self._path = path
        self._form = form
        self._count = count
        self._read: Read | None = None

    def __len__(self) -> int:
        return self._count

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_read": None}

    def __getitem__(self, key: int) -> dict[str, Any]:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: list[int]) -> list[dict[str, Any]]:
        if self._read is None:
            self._read = ARRAY_FORMATS[self._form].open(self._path)
        return self._read(keys)


def _write_hdf5(path: Path, rows: NDArray[Any], **options: Any) -> None:
    import h5py  # noqa: PLC0415  (only where it is a contender)

    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=rows, **options)


def _write_hdf5_gzip(path: Path, rows: NDArray[Any]) -> None:
    # Bytes that shrink, as those of simulated images do.
    _write_hdf5(path, rows >> 5, chunks=(ROWS_PER_CHUNK, *rows.shape[1:]), compression="gzip", compression_opts=1)


def _open_hdf5(path: str) -> Read:
    import h5py  # noqa: PLC0415

    dataset = h5py.File(path, "r")["x"]
    return lambda keys: [{"x": dataset[key]} for key in keys]


def _first_byte(path: str) -> int:
    import h5py  # noqa: PLC0415

    with h5py.File(path, "r") as file:
        return int(file["x"].id.get_offset())


def _write_zarr(path: Path, rows: NDArray[Any]) -> None:
    import tensorstore  # noqa: PLC0415

    chunks = tensorstore.ChunkLayout(read_chunk_shape=(ROWS_PER_CHUNK, *rows.shape[1:]))
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    tensorstore.open(spec, create=True, dtype=rows.dtype, shape=rows.shape, chunk_layout=chunks).result()[...] = rows


def _open_zarr(path: str) -> Read:
    import tensorstore  # noqa: PLC0415

    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": f"{path}/"}}
    array = tensorstore.open(spec, recheck_cached_data=False).result()
    return lambda keys: [{"x": array[key].read().result()} for key in keys]


def _write_lance(path: Path, rows: NDArray[Any]) -> None:
    import lance  # noqa: PLC0415
    import pyarrow as pa  # noqa: PLC0415

    tokens = pa.FixedSizeListArray.from_arrays(pa.array(rows.reshape(-1)), rows.shape[1])
    lance.write_dataset(pa.table({"tokens": tokens}), path)


def _open_lance(path: str) -> Read:
    import lance  # noqa: PLC0415

    dataset = lance.dataset(path)

    def read(keys: list[int]) -> list[dict[str, Any]]:
        values = dataset.take(keys).column("tokens").combine_chunks().flatten().to_numpy()
        return [{"tokens": row} for row in values.reshape(len(keys), -1)]

    return read


def _write_mds(path: Path, rows: NDArray[Any]) -> None:
    """Writes shards of 4,096 samples, compressed by Zstandard."""
    import zstandard  # noqa: PLC0415

    path.mkdir()
    described = {
        "column_names": ["tokens"], "column_encodings": [f"ndarray:uint16:{TOKENS}"], "column_sizes": [2 * TOKENS],
        "compression": "zstd",
        "format": "mds", "hashes": [], "size_limit": None, "version": 2,
    }  # fmt: skip
    shards = []
    for number, start in enumerate(range(0, len(rows), 4096)):
        samples = [row.tobytes() for row in rows[start : start + 4096]]
        config = json.dumps(described).encode()
        offsets = 4 * (len(samples) + 2) + len(config) + np.cumsum([0, *map(len, samples)])
        content = np.array([len(samples), *offsets], "<u4").tobytes() + config + b"".join(samples)
        raw, packed = f"shard.{number:05}.mds", zstandard.compress(content)
        (path / f"{raw}.zstd").write_bytes(packed)
        sizes = {"raw_data": (raw, content), "zip_data": (f"{raw}.zstd", packed)}
        files = {name: {"basename": file, "bytes": len(data), "hashes": {}} for name, (file, data) in sizes.items()}
        shards.append(described | files | {"samples": len(samples)})
    (path / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))


def _open_mds(path: str) -> Read:
    """Returns what looks samples up in shards that are all in memory, decompressed."""
    import zstandard  # noqa: PLC0415

    samples: list[NDArray[np.uint16]] = []
    for shard in sorted(Path(path).glob("*.zstd")):
        content = zstandard.decompress(shard.read_bytes())
        count = int.from_bytes(content[:4], "little")
        offsets = np.frombuffer(content, "<u4", count + 1, 4).tolist()
        samples += [np.frombuffer(content[start:stop], np.uint16) for start, stop in itertools.pairwise(offsets)]
    return lambda keys: [{"tokens": samples[key]} for key in keys]


def _open_tokens(path: str) -> Read:
    """Returns nanoGPT's `get_batch` for given windows: a new memory map for each batch, and int64."""

    def read(keys: list[int]) -> list[dict[str, Any]]:
        tokens = np.memmap(path, np.uint16, mode="r")
        return [{"tokens": tokens[key * TOKENS : (key + 1) * TOKENS].astype(np.int64)} for key in keys]

    return read


ARRAY_FORMATS = {
    "hdf5": ArrayFormat(_write_hdf5, _open_hdf5, _first_byte),
    "hdf5_gzip": ArrayFormat(_write_hdf5_gzip, _open_hdf5),
    "zarr": ArrayFormat(_write_zarr, _open_zarr),
    "lance": ArrayFormat(_write_lance, _open_lance),
    "mds": ArrayFormat(_write_mds, _open_mds),
    "token_windows": ArrayFormat(lambda path, rows: rows.tofile(path), _open_tokens, lambda _: 0),
}
"""By name."""
