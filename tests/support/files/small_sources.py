"""A source of each kind, of 37 records, which are almost all different."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import h5py
import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from millstream import sources
from millstream.sources import InMemoryDataSource, RangeDataSource
from support.files.record_files import (
    write_array_record,
    write_bagz,
    write_mds,
    write_megatron,
    write_tar,
    write_tfds,
    write_tfrecord,
    write_zarr,
)

NUM_RECORDS = 37


def of_three_files(kind: type[Any], write: Callable[[Path, range], Any], names: str = "a b c") -> Callable[[Path], Any]:
    """Returns the function that builds a source of two files and of the first twelve records of a third one.

    Args:
        kind: the class of the source.
        write: writes a file of the records with the given numbers.
        names: the names of the files.
    """

    def build(folder: Path) -> Any:
        first, second, third = (folder / name for name in names.split())
        write(first, range(20))
        write(second, range(20, 25))
        write(third, range(25, 40))
        return kind([first, second, f"{third}[0:12]"])

    return build


def of_records(kind: type[Any], write: Callable[[Path, Sequence[bytes]], Any], names: str = "a b c") -> Any:
    """Returns the same for records of bytes."""
    return of_three_files(kind, lambda path, numbers: write(path, [b"record %d" % n for n in numbers]), names)


def write_lines(path: Path, numbers: range) -> None:
    """Writes JSON values, which are lines of text as well."""
    path.write_text("".join(f'{{"record": {number}}}\n' for number in numbers))


def write_csv(path: Path, numbers: range) -> None:
    """Writes rows with newlines in them."""
    path.write_text("n,text\n" + "".join(f'{number},"record\n{number}"\n' for number in numbers))


def write_samples(path: Path, numbers: range) -> None:
    """Writes an archive, two files a sample."""
    write_tar(path, [(f"{number}.{kind}", b"record %d" % number) for number in numbers for kind in ("txt", "cls")])


def write_rows(path: Path, numbers: range) -> None:
    """Writes row groups of seven."""
    rows = {"n": [*numbers], "text": [f"record {n}" for n in numbers], "list": [[n] * (n % 3) for n in numbers]}
    pq.write_table(pa.table(rows), path, row_group_size=7)


def megatron(folder: Path) -> Any:
    """Sequences of two datasets, each of another length."""
    for name, numbers in {"a": range(20), "b": range(20, 37)}.items():
        write_megatron(folder / name, [np.arange(number, dtype=np.uint16) for number in numbers])
    return sources.MegatronDataSource([folder / "a", folder / "b"])


def tokens(folder: Path) -> Any:
    """Windows of two files, which overlap."""
    for name, first, count in (("a", 0, 85), ("b", 85, 73)):
        np.arange(first, first + count, dtype=np.uint16).tofile(folder / name)
    return sources.TokenDataSource([folder / "a", folder / "b"], 9, 4, "uint16")


def image_folder(folder: Path) -> Any:
    """Files of two classes."""
    for number in range(NUM_RECORDS):
        path = folder / "images" / str(number % 2) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"record %d" % number)
    return sources.ImageFolderDataSource(folder / "images")


def mds(folder: Path) -> Any:
    """Samples of two shards."""
    samples = [{"n": n.to_bytes(8, "little"), "text": b"record %d" % n} for n in range(NUM_RECORDS)]
    return sources.MdsDataSource(write_mds(folder, {"n": "int", "text": "str"}, samples, 20))


def hdf5(folder: Path) -> Any:
    """Rows of datasets of three files' layouts: read by `pread`, and decoded."""
    for name, numbers in {"a": np.arange(20), "b": np.arange(20, 37)}.items():
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["plain/n"] = numbers
            rows = np.repeat(numbers, 6).reshape(-1, 2, 3).astype(np.float32)
            file.create_dataset("plain/chunks", data=rows, chunks=(6, 2, 3))
            file.create_dataset("decoded/gzip", data=rows, chunks=(6, 2, 2), compression="gzip", shuffle=True)
            file.create_dataset("decoded/lzf", data=numbers, chunks=(1,), compression="lzf")
    names = ("plain/n", "plain/chunks", "decoded/gzip", "decoded/lzf")
    return sources.Hdf5DataSource({name: f"{folder}/*.h5/{name}" for name in names})


def of_lance(folder: Path) -> Any:
    """Rows of two fragments, of which some were deleted, and some do not fulfil the filter."""
    numbers = np.arange(50)
    rows = pa.table({"n": numbers, "text": [f"record {number}" for number in numbers]})
    lance.write_dataset(rows, folder / "rows.lance", max_rows_per_file=20).delete("n in (3, 30)")
    return sources.LanceDataSource(folder / "rows.lance", filter="n < 39")


def zarr(folder: Path) -> Any:
    """Rows of three arrays."""
    numbers = np.arange(NUM_RECORDS)
    write_zarr(folder / "n", numbers, 5)
    write_zarr(folder / "rows", np.repeat(numbers, 6).reshape(-1, 2, 3).astype(np.float32), 8, "zarr")
    write_zarr(folder / "ones", np.ones((NUM_RECORDS, 2)), 1)
    return sources.ZarrDataSource({name: folder / name for name in ("n", "rows", "ones")})


def whole_files(folder: Path) -> Any:
    """Files that are a record each."""
    for number in range(NUM_RECORDS):
        (folder / f"{number:02}.bin").write_bytes(b"record %d" % number)
    return sources.FileDataSource(f"{folder}/*.bin")


def tfds(folder: Path) -> Any:
    """A dataset as TensorFlow Datasets prepares it, of two files."""
    label = {"classLabel": {"numClasses": "40"}}
    features = {"featuresDict": {"features": {"label": label, "text": {"text": {}}}}}
    files = [[{"label": n, "text": f"record {n}"} for n in numbers] for numbers in (range(20), range(20, 37))]
    return sources.TfdsDataSource(write_tfds(folder, features, {"train": files}, "tfrecord"), "train")


SOURCES: dict[str, Callable[[Path], Any]] = {
    "ArrayRecord": of_records(sources.ArrayRecordDataSource, write_array_record),
    "CSV": of_three_files(sources.CsvDataSource, write_csv),
    "Hugging Face": lambda _: sources.HuggingFaceDataSource(
        datasets.Dataset.from_dict({"n": range(NUM_RECORDS), "list": [[n] * (n % 3) for n in range(NUM_RECORDS)]})
    ),
    "files": whole_files,
    "HDF5": hdf5,
    "images": image_folder,
    "JSONL": of_three_files(sources.JsonLinesDataSource, write_lines),
    "Bagz": of_records(sources.BagzDataSource, write_bagz, "a.bag b.bagz c.bag"),
    "MDS": mds,
    "Lance": of_lance,
    "Megatron": megatron,
    "Parquet": of_three_files(sources.ParquetDataSource, write_rows),
    "TFDS": tfds,
    "tokens": tokens,
    "TFRecord": of_records(sources.TFRecordDataSource, write_tfrecord),
    "WebDataset": of_three_files(sources.WebDatasetDataSource, write_samples),
    "Zarr": zarr,
    "text": of_three_files(sources.TextLineDataSource, write_lines),
    "columns": lambda _: InMemoryDataSource({"x": np.arange(NUM_RECORDS), "y": np.ones((NUM_RECORDS, 2))}),
    "concatenated": lambda _: sources.ConcatenatedDataSource(
        {"a": list(range(20)), "b": RangeDataSource(20, 30), "c": InMemoryDataSource(list(range(30, NUM_RECORDS)))}
    ),
    "list": lambda _: InMemoryDataSource([{"number": n} for n in range(NUM_RECORDS)]),
    "nested list": lambda _: InMemoryDataSource([{"number": [n, {"n": [n]}]} for n in range(NUM_RECORDS)]),
    "numbers": lambda _: InMemoryDataSource(list(range(NUM_RECORDS))),
    "range": lambda _: RangeDataSource(5, 5 + 3 * NUM_RECORDS, 3),
    "rows": lambda _: InMemoryDataSource(np.arange(NUM_RECORDS * 2).reshape(NUM_RECORDS, 2)),
    "windows": lambda _: sources.WindowDataSource([{"number": n} for n in range(NUM_RECORDS + 3)], 4),
    "windows within": lambda _: sources.WindowDataSource(
        [{"x": np.arange(100 * n, 101 * n), "name": "a"} for n in (10, 12, 30)], 6, lengths=[10, 12, 30]
    ),
}
"""The function that builds each kind, given an empty folder."""


def at_urls(local: Any, base: str, **options: Any) -> Any:
    """Returns the same source of objects whose URLs are those of a folder and the names of the files."""
    ranges = [f"[{file.start}:{file.stop}]" if file.stop == 12 else "" for file in local._ranges]
    names = [Path(file.path).name for file in local._ranges]
    return type(local)([f"{base}/{name}{part}" for name, part in zip(names, ranges, strict=True)], **options)
