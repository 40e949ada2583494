"""What holds for every source: keys, batched reads, pickling, fingerprints, words."""

import functools
import json
import os
import pickle
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import h5py
import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millstream
from millstream import sources
from millstream.sources import (
    ArrayRecordDataSource,
    BagzDataSource,
    ConcatenatedDataSource,
    CsvDataSource,
    FileCache,
    FileDataSource,
    Hdf5DataSource,
    HuggingFaceDataSource,
    ImageFolderDataSource,
    InMemoryDataSource,
    JsonLinesDataSource,
    LanceDataSource,
    MdsDataSource,
    MegatronDataSource,
    ParquetDataSource,
    RangeDataSource,
    TextLineDataSource,
    TfdsDataSource,
    TFRecordDataSource,
    TokenDataSource,
    WebDatasetDataSource,
    ZarrDataSource,
)
from millstream.transforms import encode_example
from support.files.record_files import (
    write_array_record,
    write_bagz,
    write_mds,
    write_megatron,
    write_tar,
    write_tfrecord,
    write_zarr,
)
from support.stores.object_server import ObjectServer

NUM_RECORDS = 37


def array_record(folder: Path) -> ArrayRecordDataSource:
    """A source of three files and a part of one."""
    for name, numbers in {"a": range(20), "b": range(20, 25), "c": range(25, 40)}.items():
        write_array_record(folder / name, [b"record %d" % number for number in numbers])
    return ArrayRecordDataSource([folder / "a", folder / "b", f"{folder}/c[0:12]"])


def tfrecord(folder: Path) -> TFRecordDataSource:
    """The same as TFRecord files."""
    for name, numbers in {"a": range(20), "b": range(20, 25), "c": range(25, 40)}.items():
        write_tfrecord(folder / name, [b"record %d" % number for number in numbers])
    return TFRecordDataSource([folder / "a", folder / "b", f"{folder}/c[0:12]"])


def of_lines(kind: Callable[[Any], Any], folder: Path) -> Any:
    """The same as files of lines."""
    for name, numbers in {"a": range(20), "b": range(20, 25), "c": range(25, 40)}.items():
        (folder / name).write_text("".join(f'{{"record": {number}}}\n' for number in numbers))
    return kind([folder / "a", folder / "b", f"{folder}/c[0:12]"])


def csv_rows(folder: Path) -> CsvDataSource:
    """The same as rows, with newlines in them."""
    for name, numbers in {"a": range(20), "b": range(20, 25), "c": range(25, 40)}.items():
        (folder / name).write_text("n,text\n" + "".join(f'{number},"record\n{number}"\n' for number in numbers))
    return CsvDataSource([folder / "a", folder / "b", f"{folder}/c[0:12]"])


def webdataset(folder: Path) -> WebDatasetDataSource:
    """The same as archives, two files a sample."""
    for name, numbers in {"a": range(20), "b": range(20, 25), "c": range(25, 40)}.items():
        files = [(f"{number}.{kind}", b"record %d" % number) for number in numbers for kind in ("txt", "cls")]
        write_tar(folder / name, files)
    return WebDatasetDataSource([folder / "a", folder / "b", f"{folder}/c[0:12]"])


def bagz(folder: Path) -> BagzDataSource:
    """The same as Bagz files, one of which is compressed."""
    for name, numbers in {"a.bag": range(20), "b.bagz": range(20, 25), "c.bag": range(25, 40)}.items():
        write_bagz(folder / name, [b"record %d" % number for number in numbers])
    return BagzDataSource([folder / "a.bag", folder / "b.bagz", f"{folder}/c.bag[0:12]"])


def megatron(folder: Path) -> MegatronDataSource:
    """Sequences of two datasets, each of another length."""
    for name, numbers in {"a": range(20), "b": range(20, 37)}.items():
        write_megatron(folder / name, [np.arange(number, dtype=np.uint16) for number in numbers])
    return MegatronDataSource([folder / "a", folder / "b"])


def tokens(folder: Path) -> TokenDataSource:
    """Windows of two files, which overlap."""
    for name, first, count in (("a", 0, 85), ("b", 85, 73)):
        np.arange(first, first + count, dtype=np.uint16).tofile(folder / name)
    return TokenDataSource([folder / "a", folder / "b"], 9, 4, "uint16")


def parquet(folder: Path) -> ParquetDataSource:
    """The same as rows, in row groups of seven."""
    for name, numbers in {"a": range(20), "b": range(20, 25), "c": range(25, 40)}.items():
        rows = {"n": [*numbers], "text": [f"record {n}" for n in numbers], "list": [[n] * (n % 3) for n in numbers]}
        pq.write_table(pa.table(rows), folder / name, row_group_size=7)
    return ParquetDataSource([folder / "a", folder / "b", f"{folder}/c[0:12]"])


def image_folder(folder: Path) -> ImageFolderDataSource:
    """Files of two classes."""
    for number in range(NUM_RECORDS):
        path = folder / "images" / str(number % 2) / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"record %d" % number)
    return ImageFolderDataSource(folder / "images")


def mds(folder: Path) -> MdsDataSource:
    samples = [{"n": n.to_bytes(8, "little"), "text": b"record %d" % n} for n in range(NUM_RECORDS)]
    return MdsDataSource(write_mds(folder, {"n": "int", "text": "str"}, samples, 20))


def hdf5(folder: Path) -> Hdf5DataSource:
    """The same as rows of datasets of three files' layouts: read by `pread`, and decoded."""
    for name, numbers in {"a": np.arange(20), "b": np.arange(20, 37)}.items():
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["plain/n"] = numbers
            rows = np.repeat(numbers, 6).reshape(-1, 2, 3).astype(np.float32)
            file.create_dataset("plain/chunks", data=rows, chunks=(6, 2, 3))
            file.create_dataset("decoded/gzip", data=rows, chunks=(6, 2, 2), compression="gzip", shuffle=True)
            file.create_dataset("decoded/lzf", data=numbers, chunks=(1,), compression="lzf")
    names = ("plain/n", "plain/chunks", "decoded/gzip", "decoded/lzf")
    return Hdf5DataSource({name: f"{folder}/*.h5/{name}" for name in names})


def of_lance(folder: Path) -> LanceDataSource:
    """The same as rows of two fragments, of which some were deleted, and some do not fulfil the filter."""
    numbers = np.arange(50)
    rows = pa.table({"n": numbers, "text": [f"record {number}" for number in numbers]})
    lance.write_dataset(rows, folder / "rows.lance", max_rows_per_file=20).delete("n in (3, 30)")
    return LanceDataSource(folder / "rows.lance", filter="n < 39")


def zarr(folder: Path) -> ZarrDataSource:
    """The same as rows of three arrays."""
    numbers = np.arange(NUM_RECORDS)
    write_zarr(folder / "n", numbers, 5)
    write_zarr(folder / "rows", np.repeat(numbers, 6).reshape(-1, 2, 3).astype(np.float32), 8, "zarr")
    write_zarr(folder / "ones", np.ones((NUM_RECORDS, 2)), 1)
    return ZarrDataSource({name: folder / name for name in ("n", "rows", "ones")})


def whole_files(folder: Path) -> FileDataSource:
    """Files that are a record each."""
    for number in range(NUM_RECORDS):
        (folder / f"{number:02}.bin").write_bytes(b"record %d" % number)
    return FileDataSource(f"{folder}/*.bin")


def tfds(folder: Path) -> TfdsDataSource:
    """A dataset as TensorFlow Datasets prepares it, of two files."""
    label = {"classLabel": {"numClasses": "40"}}
    features = {"featuresDict": {"features": {"label": label, "text": {"text": {}}}}}
    splits = [{"name": "train", "shardLengths": ["20", "17"]}]
    (folder / "features.json").write_text(json.dumps(features))
    (folder / "dataset_info.json").write_text(json.dumps({"name": "toy", "splits": splits}))
    for number, numbers in enumerate((range(20), range(20, 37))):
        examples = [encode_example({"label": n, "text": f"record {n}"}) for n in numbers]
        write_tfrecord(folder / f"toy-train.tfrecord-0000{number}-of-00002", examples)
    return TfdsDataSource(folder, "train")


SOURCES: dict[str, Callable[[Path], Any]] = {
    "ArrayRecord": array_record,
    "CSV": csv_rows,
    "Hugging Face": lambda _: HuggingFaceDataSource(
        datasets.Dataset.from_dict({"n": range(NUM_RECORDS), "list": [[n] * (n % 3) for n in range(NUM_RECORDS)]})
    ),
    "files": whole_files,
    "HDF5": hdf5,
    "images": image_folder,
    "JSONL": functools.partial(of_lines, JsonLinesDataSource),
    "Bagz": bagz,
    "MDS": mds,
    "Lance": of_lance,
    "Megatron": megatron,
    "Parquet": parquet,
    "TFDS": tfds,
    "tokens": tokens,
    "TFRecord": tfrecord,
    "WebDataset": webdataset,
    "Zarr": zarr,
    "text": functools.partial(of_lines, TextLineDataSource),
    "columns": lambda _: InMemoryDataSource({"x": np.arange(NUM_RECORDS), "y": np.ones((NUM_RECORDS, 2))}),
    "concatenated": lambda _: ConcatenatedDataSource(
        {"a": list(range(20)), "b": RangeDataSource(20, 30), "c": InMemoryDataSource(list(range(30, NUM_RECORDS)))}
    ),
    "list": lambda _: InMemoryDataSource([{"number": n} for n in range(NUM_RECORDS)]),
    "nested list": lambda _: InMemoryDataSource([{"number": [n, {"n": [n]}]} for n in range(NUM_RECORDS)]),
    "numbers": lambda _: InMemoryDataSource(list(range(NUM_RECORDS))),
    "range": lambda _: RangeDataSource(5, 5 + 3 * NUM_RECORDS, 3),
    "rows": lambda _: InMemoryDataSource(np.arange(NUM_RECORDS * 2).reshape(NUM_RECORDS, 2)),
}


@pytest.mark.third_party
def test_every_public_source_is_in_the_list(tmp_path: Path) -> None:
    """A source of `millstream.sources` that SOURCES lacks is found: nothing would be tested of it."""
    listed = set()
    for number, build in enumerate(SOURCES.values()):
        folder = tmp_path / str(number)
        folder.mkdir()
        listed.add(type(build(folder)))
    public = {getattr(sources, name) for name in sources.__all__}

    assert {
        each for each in public if hasattr(each, "fingerprint") and not getattr(each, "_is_protocol", False)
    } == listed


OF_SPANS = ["Bagz", "CSV", "JSONL", "Megatron", "TFRecord", "WebDataset", "text"]
"""Those that can be objects of a store."""

REMOTE = [
    pytest.param(name, marks=pytest.mark.third_party)
    for name in (*(f"remote {name}" for name in OF_SPANS), "cached ArrayRecord", "cached CSV", "cached TFRecord")
]

OF_FILES = ["ArrayRecord", "HDF5", "MDS", "Parquet", "TFDS", "tokens", *OF_SPANS, *REMOTE]
"""Those that can be closed."""


def remote(name: str, folder: Path, store: ObjectServer, **options: Any) -> Any:
    """The same source of objects of a store, which are those files."""
    (folder / "files").mkdir()
    with SOURCES[name](folder / "files") as local:
        files = local._ranges
    for path in (folder / "files").iterdir():
        store.objects[f"bucket/{path.name}"] = path.read_bytes()
    urls = [f"{store.url}/bucket/{Path(file.path).name}" for file in files]
    ranges = [f"[{file.start}:{file.stop}]" if file.stop == 12 else "" for file in files]
    return type(local)([url + words for url, words in zip(urls, ranges, strict=True)], **options)


NAMES = [
    *sorted(SOURCES.keys() - {"Lance", "Zarr"}),
    *(pytest.param(name, marks=pytest.mark.third_party) for name in ("Lance", "Zarr")),
]


@pytest.fixture(params=[*NAMES, *REMOTE])
def source(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Each kind of source, with 37 records."""
    where, _, name = request.param.partition(" ")
    if where == "remote":
        made = remote(name, tmp_path, request.getfixturevalue("store"))
    elif where == "cached":
        # No room for two of them.
        made = remote(name, tmp_path, request.getfixturevalue("store"), cache=FileCache(200_000, tmp_path / "copies"))
    else:
        made = SOURCES[request.param](tmp_path)
    yield made
    if hasattr(made, "close"):
        made.close()


def words(records: Any) -> list[str]:
    return [repr(record) for record in records]


def test_batched_read_is_the_records_one_by_one(source: Any) -> None:
    """A batched read equals single reads, and iteration: for lists, ranges and arrays of keys, repeated and none."""
    assert len(source) == NUM_RECORDS
    everything = words(source[key] for key in range(NUM_RECORDS))
    assert len(set(everything)) >= NUM_RECORDS - 1
    assert words(source) == everything
    shuffled = np.random.default_rng(0).integers(0, NUM_RECORDS, 200)
    for keys in (shuffled.tolist(), tuple(shuffled), shuffled.astype(np.uint8), shuffled.astype(np.int64), range(37)):
        assert words(source.__getitems__(keys)) == [everything[key] for key in keys]
    assert [len(source.__getitems__([])), len(source.__getitems__(np.array([], dtype=np.int64)))] == [0, 0]


def test_keys_that_no_record_has_are_errors(source: Any) -> None:
    """Keys neither count from the end nor wrap around, and are not rounded or parsed; the message has rule and key."""
    for key in (-1, NUM_RECORDS, 10**6, -(10**6), 2**70):
        message = rf"between 0 and len\(source\) - 1 = 36, got {key}\."
        with pytest.raises(IndexError, match=message):
            source[key]
        with pytest.raises(IndexError, match=message):
            source.__getitems__([0, key, 1])
    for wrong in (1.0, "1", None):
        with pytest.raises(TypeError, match="integer"):
            source[wrong]
        with pytest.raises(TypeError, match="integer"):
            source.__getitems__([0, wrong])
    with pytest.raises(ValueError, match=r"one-dimensional, got the shape \(2, 2\)"):
        source.__getitems__(np.zeros((2, 2), dtype=np.int64))


def test_keys_are_left_as_they_are(source: Any) -> None:
    """The array of keys is the caller's: it may be read-only, and is not kept for later."""
    for dtype in (np.int64, np.int32, np.uint64, np.uint8):
        keys = np.array([30, 2, 2, 17], dtype=dtype)
        expected = [repr(source[int(key)]) for key in keys]
        keys.flags.writeable = False
        assert words(source.__getitems__(keys)) == expected
        assert keys.tolist() == [30, 2, 2, 17]
        assert words(source.__getitems__(keys[::-1])) == expected[::-1]


@pytest.mark.parametrize("name", NAMES)
def test_a_relative_path_is_that_of_the_construction(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source built with relative paths is read and described, itself and a pickled copy, from every other folder."""
    monkeypatch.chdir(tmp_path)
    source = SOURCES[name](Path())
    monkeypatch.chdir("/")
    copy = pickle.loads(pickle.dumps(source))
    assert words(copy.__getitems__(range(37))) == words(source.__getitems__(range(37)))
    assert copy.fingerprint() == source.fingerprint()
    for each in (source, copy):
        if hasattr(each, "close"):
            each.close()


@pytest.mark.third_party
def test_workers_and_threads_read_the_same(tmp_path: Path, store: ObjectServer) -> None:
    """The stream over sources of all kinds, remote ones too, is the same inline, in threads and in workers."""
    folders = {name: tmp_path / str(number) for number, name in enumerate([*SOURCES, "remote JSONL"])}
    for folder in folders.values():
        folder.mkdir()
    sources = {name: SOURCES[name](folders[name]) for name in SOURCES}
    sources["remote JSONL"] = remote("JSONL", folders["remote JSONL"], store)
    everything = ConcatenatedDataSource(sources)

    def stream(**options: Any) -> list[str]:
        with millstream.load(
            everything, transformations=[repr], shuffle=True, seed=3, num_epochs=1, batch_size=32, **options
        ) as loader:
            return [text for batch in loader for text in batch.tolist()]

    expected = stream(read_options=millstream.ReadOptions(num_threads=0))
    assert sorted(expected) == sorted(words(everything.__getitems__(range(len(everything)))))
    assert stream(read_options=millstream.ReadOptions(num_threads=4)) == expected
    assert stream(worker_count=2) == expected
    for source in sources.values():
        if hasattr(source, "close"):
            source.close()


# The library of ArrayRecord does not survive a fork once it was used (see test_array_record_faults.py), nor do
# TensorStore and Lance (see test_zarr_arrays.py and test_lance_rows.py) and the clients of stores (see test_remote.py).
@pytest.mark.parametrize("source", sorted(SOURCES.keys() - {"ArrayRecord", "Lance", "Zarr"}), indirect=True)
def test_a_forked_process_reads_the_same(source: Any) -> None:
    """A process forked after a read has the same records, and waits for no lock of its parent."""
    expected = words(source.__getitems__(range(37)))
    answer, asked = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 and later warn where there are threads.
        warnings.simplefilter("ignore", RuntimeWarning)  # JAX, where another test has imported it.
        child = os.fork()
    if child == 0:
        same = words(source.__getitems__(range(37))) == expected and repr(source[5]) == expected[5]
        os.write(asked, b"same" if same else b"other")
        os._exit(0)
    os.close(asked)
    with os.fdopen(answer, "rb") as end:
        assert end.read() == b"same"
    assert os.waitpid(child, 0)[1] == 0
    assert words(source.__getitems__(range(37))) == expected


@pytest.mark.parametrize("source", OF_FILES, indirect=True)
def test_closing_ends_reading_where_there_is_something_to_close(source: Any) -> None:
    """A closed source, or a pickled copy of one, raises ValueError on reads; length, `repr` and fingerprint stay."""
    before = (len(source), repr(source), source.fingerprint())
    source.close()
    source.close()
    for closed in (source, pickle.loads(pickle.dumps(source))):
        with pytest.raises(ValueError, match="closed"):
            closed[0]
        with pytest.raises(ValueError, match="closed"):
            closed.__getitems__([0])
        assert (len(closed), repr(closed), closed.fingerprint()) == before


@pytest.mark.parametrize("source", ["ArrayRecord", *OF_SPANS, *REMOTE], indirect=True)
def test_the_sizes_of_units_are_those_of_files(source: Any) -> None:
    """The sizes of units are those of the files, or of their ranges, in their order."""
    assert source.unit_sizes.dtype == np.int64
    assert source.unit_sizes.tolist() == ([20, 17] if len(source.unit_sizes) == 2 else [20, 5, 12])


def test_pickled_copy_reads_the_same(source: Any) -> None:
    """Before and after a first read, a copy has the same records, length, words and fingerprint."""
    unread = pickle.dumps(source)
    everything = words(source.__getitems__(range(37)))
    for pickled in (unread, pickle.dumps(source)):
        copy = pickle.loads(pickled)
        assert words(copy.__getitems__(range(37))) == everything
        assert (len(copy), repr(copy), copy.fingerprint()) == (len(source), repr(source), source.fingerprint())


def test_threads_read_the_same(source: Any) -> None:
    """Many threads at once get what one gets."""
    everything = words(source.__getitems__(range(37)))
    keys = np.random.default_rng(1).integers(0, NUM_RECORDS, (30, 20))
    with ThreadPoolExecutor(8) as threads:
        batches = list(threads.map(source.__getitems__, keys))
    assert [words(batch) for batch in batches] == [[everything[key] for key in row] for row in keys]


def test_words_are_short(source: Any) -> None:
    """A representation and a fingerprint are one line each, short enough for a log or an error."""
    assert len(repr(source)) < 250
    assert len(source.fingerprint()) < 250
    assert "\n" not in repr(source) + source.fingerprint()
