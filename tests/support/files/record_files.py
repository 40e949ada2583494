"""Writes files of records, with other code than the one that reads them."""

import io
import itertools
import json
import re
import struct
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import tensorstore
import zstandard
from array_record.python.array_record_module import ArrayRecordWriter
from numpy.typing import NDArray

from millstream.transforms import encode_example


def masked_crc(data: bytes) -> bytes:
    """Returns the checksum as a TFRecord file stores it."""
    crc = google_crc32c.value(data)
    return struct.pack("<I", (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF)


def tfrecord_bytes(records: Iterable[bytes]) -> bytes:
    """Returns the content of a TFRecord file."""
    parts = []
    for record in records:
        length = struct.pack("<Q", len(record))
        parts += [length, masked_crc(length), record, masked_crc(record)]
    return b"".join(parts)


def write_tfrecord(path: Path, records: Iterable[bytes]) -> Path:
    """Writes a TFRecord file, and returns its path."""
    path.write_bytes(tfrecord_bytes(records))
    return path


def write_tar(path: Path, files: Iterable[tuple[str, bytes]], tar_format: int = tarfile.PAX_FORMAT) -> Path:
    """Writes an archive of files by name, in their order, and returns its path."""
    with tarfile.open(path, "w", format=tar_format) as archive:
        for name, content in files:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def write_bagz(path: Path, records: Iterable[bytes]) -> Path:
    """Writes a Bagz file, compressed if its name ends in `.bagz`, and returns its path."""
    compress = zstandard.ZstdCompressor().compress if path.suffix == ".bagz" else bytes
    stored = [compress(record) if record else b"" for record in records]
    ends = itertools.accumulate(map(len, stored))
    path.write_bytes(b"".join([*stored, *(struct.pack("<Q", end) for end in ends)]))
    return path


MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "float64": 6, "float32": 7, "uint16": 8}


def write_megatron(prefix: Path, sequences: Sequence[NDArray[Any]]) -> Path:
    """Writes a dataset of sequences of one dtype, each a document, and returns its prefix."""
    sizes = [sequence.nbytes for sequence in sequences]
    header = b"MMIDIDX\x00\x00" + struct.pack("<QB", 1, MEGATRON_CODES[sequences[0].dtype.name])
    prefix.with_name(f"{prefix.name}.idx").write_bytes(
        header
        + struct.pack("<QQ", len(sequences), len(sequences) + 1)
        + np.array([len(sequence) for sequence in sequences], "<i4").tobytes()
        + np.array([0, *itertools.accumulate(sizes)][:-1], "<i8").tobytes()
        + np.arange(len(sequences) + 1, dtype="<i8").tobytes()
    )
    prefix.with_name(f"{prefix.name}.bin").write_bytes(b"".join(sequence.tobytes() for sequence in sequences))
    return prefix


def write_array_record(path: Path, records: Iterable[bytes], options: str = "group_size:1") -> Path:
    """Writes an ArrayRecord file, and returns its path."""
    writer = ArrayRecordWriter(str(path), options)
    for record in records:
        writer.write(record)
    writer.close()
    return path


def emptied(folder: Path) -> Path:
    """Removes the files of a folder, indices too, and returns it."""
    for path in [*folder.iterdir()]:
        path.unlink()
    return folder


def write_alone(folder: Path, content: bytes) -> Path:
    """Writes a file with this content into a folder that has no other, and returns its path."""
    path = emptied(folder) / "file"
    path.write_bytes(content)
    return path


def assert_records(source: Any, expected: Sequence[Any]) -> None:
    """Asserts that a source has these records, read in order and in any other order."""
    assert every_record(source) == list(expected)
    order = np.random.default_rng(0).permutation(len(expected))
    assert source.__getitems__(order) == [expected[key] for key in order]


def records_of(source: Any) -> list[Any]:
    """Returns all records of a source, and closes it."""
    with source:
        return every_record(source)


def every_record(source: Any) -> list[Any]:
    """Returns all records of a source, by one batched read."""
    return list(source.__getitems__(range(len(source))))


def write_mds(folder: Path, columns: dict[str, str], samples: Sequence[dict[str, bytes]], per_shard: int) -> Path:
    """Writes encoded values as MDS shards with their index, and returns the folder.

    Args:
        folder: it is made.
        columns: the encoding of each column; numbers and `int` have a fixed size.
        samples: the encoded values of each sample.
        per_shard: the number of samples per shard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    names = sorted(columns)
    sizes = [len(samples[0][name]) if re.fullmatch(r"int|(u?int|float)\d+", columns[name]) else None for name in names]
    described = {
        "column_names": names,
        "column_encodings": [columns[name] for name in names],
        "column_sizes": sizes,
        "format": "mds",
        "version": 2,
        "zip_data": None,
    }
    config = json.dumps(described).encode()
    shards = []
    for number, start in enumerate(range(0, len(samples), per_shard)):
        encoded = []
        for sample in samples[start : start + per_shard]:
            own = [len(sample[name]) for name, size in zip(names, sizes, strict=True) if size is None]
            encoded.append(np.array(own, "<u4").tobytes() + b"".join(sample[name] for name in names))
        head = 4 * (len(encoded) + 2) + len(config)
        offsets = head + np.cumsum([0, *map(len, encoded)])
        content = np.array([len(encoded), *offsets], "<u4").tobytes() + config + b"".join(encoded)
        name = f"shard.{number:05}.mds"
        (folder / name).write_bytes(content)
        shards.append(described | {"samples": len(encoded), "raw_data": {"basename": name, "bytes": len(content)}})
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    return folder


def write_zarr(path: Path, rows: NDArray[Any], rows_per_chunk: int, driver: str = "zarr3") -> None:
    """Writes an array of chunks that have all of some rows.

    Args:
        path: the folder of the array.
        rows: the array.
        rows_per_chunk: the number of rows per chunk.
        driver: the format: `zarr`, `zarr3` or `n5`, whose axes are in the opposite order.
    """
    shape, chunk = rows.shape, (rows_per_chunk, *rows.shape[1:])
    array = tensorstore.open(
        {"driver": driver, "kvstore": {"driver": "file", "path": f"{path.absolute()}/"}},
        create=True,
        dtype=rows.dtype,
        shape=shape[::-1] if driver == "n5" else shape,
        chunk_layout=tensorstore.ChunkLayout(read_chunk_shape=chunk[::-1] if driver == "n5" else chunk),
    ).result()
    (array.T if driver == "n5" else array).write(rows).result()


def write_tfds(
    folder: Path, features: dict[str, Any], splits: dict[str, list[list[dict[str, Any]]]], kind: str = "array_record"
) -> Path:
    """Writes a dataset as TensorFlow Datasets prepares it, and returns its folder.

    Args:
        folder: it is made.
        features: the content of `features.json`.
        splits: the records of each file of each split, which are written as Examples.
        kind: the format of the files, `array_record` or `tfrecord`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write, entries = {"array_record": write_array_record, "tfrecord": write_tfrecord}[kind], []
    for name, files in splits.items():
        for number, records in enumerate(files):
            path = folder / f"toy-{name}.{kind}-{number:05d}-of-{len(files):05d}"
            write(path, [encode_example(record) for record in records])
        template = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"
        lengths = [str(len(records)) for records in files]
        entries.append({"name": name, "filepathTemplate": template, "shardLengths": lengths})
    info = {"name": "toy", "version": "1.0.0", "fileFormat": kind, "splits": entries}
    (folder / "dataset_info.json").write_text(json.dumps(info))
    (folder / "features.json").write_text(json.dumps(features))
    return folder
