"""The laws of every source: keys, batched reads, pickling, fingerprints, descriptions."""

import os
import pickle
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream
from millstream import sources
from millstream.errors import DataSourceError
from millstream.sources import (
    BagzDataSource,
    ConcatenatedDataSource,
    CsvDataSource,
    FileCache,
    MegatronDataSource,
    ParquetDataSource,
    TextLineDataSource,
    TfdsDataSource,
    TFRecordDataSource,
)
from support.files.small_sources import NUM_RECORDS, SOURCES, at_urls
from support.processes.forked import text_after_fork
from support.stores.object_server import ObjectServer

OF_SPANS = ["Bagz", "CSV", "JSONL", "Megatron", "TFRecord", "WebDataset", "text"]
"""Those that can be objects of a store."""

CACHED = ["ArrayRecord", "CSV", "Parquet", "TFRecord"]
REMOTE = [
    pytest.param(name, marks=pytest.mark.third_party)
    for name in (*(f"remote {name}" for name in [*OF_SPANS, "Parquet"]), *(f"cached {name}" for name in CACHED))
]

OF_FILES = ["ArrayRecord", "HDF5", "MDS", "Parquet", "TFDS", "tokens", *OF_SPANS, *REMOTE]
"""Those that can be closed."""


def remote(name: str, folder: Path, store: ObjectServer, **options: Any) -> Any:
    """The same source of objects of a store, which are those files."""
    (folder / "files").mkdir()
    local = SOURCES[name](folder / "files")
    local.close()
    for path in (folder / "files").iterdir():
        store.objects[f"bucket/{path.name}"] = path.read_bytes()
    return at_urls(local, f"{store.url}/bucket", **options)


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
    with pytest.raises(TypeError, match=r"MapDataset\.source\(source\)\[start:stop\]"):
        source[:10]
    for several in ([0, 1], (0, 1), np.arange(2)):
        with pytest.raises(TypeError, match=r"Pass one key; source\.__getitems__\(keys\) reads several"):
            source[several]
        if not isinstance(source, millstream.ConcatenatedDataSource) and hasattr(source, "locate"):
            with pytest.raises(TypeError, match=r"Pass one key"):
                source.locate(several)
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
    """It is read from every other folder, also by a copy; files in another folder have the same fingerprint."""
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    elsewhere = SOURCES[name](tmp_path / "there")
    monkeypatch.chdir(tmp_path / "here")
    source = SOURCES[name](Path())
    monkeypatch.chdir("/")
    copy = pickle.loads(pickle.dumps(source))
    if name != "files":  # Their records have the path.
        assert words(elsewhere.__getitems__(range(37))) == words(source.__getitems__(range(37)))
    assert words(copy.__getitems__(range(37))) == words(source.__getitems__(range(37)))
    assert copy.fingerprint() == source.fingerprint() == elsewhere.fingerprint()
    for each in (source, copy, elsewhere):
        if hasattr(each, "close"):
            each.close()


@pytest.mark.third_party
def test_workers_and_threads_read_the_same(tmp_path: Path, store: ObjectServer) -> None:
    """The stream over all public sources is the same inline, in threads and in workers."""
    folders = {name: tmp_path / str(number) for number, name in enumerate([*SOURCES, "remote JSONL"])}
    for folder in folders.values():
        folder.mkdir()
    built = {name: SOURCES[name](folders[name]) for name in SOURCES}
    public = {getattr(sources, name) for name in sources.__all__ if hasattr(getattr(sources, name), "fingerprint")}
    assert {kind for kind in public if not getattr(kind, "_is_protocol", False)} == set(map(type, built.values()))
    built["remote JSONL"] = remote("JSONL", folders["remote JSONL"], store)
    everything = ConcatenatedDataSource(built)

    def stream(**options: Any) -> list[str]:
        with millstream.load(
            everything, transformations=[repr], shuffle=True, seed=3, num_epochs=1, batch_size=32, **options
        ) as loader:
            return [text for batch in loader for text in batch.tolist()]

    expected = stream(read_options=millstream.ReadOptions(num_threads=0))
    assert sorted(expected) == sorted(words(everything.__getitems__(range(len(everything)))))
    assert stream(read_options=millstream.ReadOptions(num_threads=4)) == expected
    assert stream(worker_count=1) == expected
    for source in built.values():
        if hasattr(source, "close"):
            source.close()


# The library of ArrayRecord does not survive a fork once it was used (see test_array_record.py), nor do those below.
@pytest.mark.parametrize("source", sorted(SOURCES.keys() - {"ArrayRecord", "Lance", "Zarr"}), indirect=True)
def test_a_forked_process_reads_the_same(source: Any) -> None:
    """A process forked after a read has the same records, and waits for no lock of its parent."""
    expected = words(source.__getitems__(range(37)))
    assert text_after_fork(lambda: words([*source.__getitems__(range(37)), source[5]])) == str([*expected, expected[5]])
    assert words(source.__getitems__(range(37))) == expected


@pytest.mark.third_party
@pytest.mark.parametrize("source", ["Lance", "Zarr", "remote TFRecord"], indirect=True)
def test_a_forked_process_without_the_threads_of_a_library_gets_an_error(source: Any) -> None:
    """It neither waits nor is aborted, also if it opens the files itself; the parent reads on."""
    expected, copy = repr(source[3]), pickle.loads(pickle.dumps(source))
    for read in (lambda: source[3], lambda: copy[3]):
        assert re.search(
            "fork.* Use worker_count, or start processes by 'spawn' or 'forkserver'", text_after_fork(read)
        )
    assert repr(source[3]) == expected


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


@pytest.mark.parametrize("source", ["ArrayRecord", "HDF5", "MDS", "Parquet", "tokens", *OF_SPANS], indirect=True)
def test_pipes_that_replace_the_files_are_not_waited_for(source: Any) -> None:
    """Reading is an error, and so is not the digest of the files' content, which has nothing of them."""
    for path in source.files:
        Path(path).unlink()
        os.mkfifo(path)
    with pytest.raises(DataSourceError, match=r"\(record key 3\): .* a pipe, a socket or a device"):
        source[3]
    assert len(source.content_marks()) == 1


@pytest.mark.parametrize("source", ["ArrayRecord", *OF_SPANS], indirect=True)
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


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        (CsvDataSource, {"columns": "ab"}, TypeError, "must be a sequence of names"),
        (CsvDataSource, {"columns": [1]}, TypeError, "must be a sequence of names"),
        (CsvDataSource, {"columns": []}, ValueError, "different names, at least one"),
        (CsvDataSource, {"columns": ["a", "a"]}, ValueError, "different names"),
        (CsvDataSource, {"delimiter": ""}, ValueError, "must be one character"),
        (CsvDataSource, {"delimiter": '"'}, ValueError, "not a quote"),
        (CsvDataSource, {"quotechar": "'"}, ValueError, "quotechar must be '\"', or None"),
        (CsvDataSource, {"encoding": "utf-16"}, ValueError, "newline as the byte 10"),
        (ParquetDataSource, {"columns": "ab"}, TypeError, "must be a sequence of names"),
        (BagzDataSource, {"max_record_bytes": 0}, ValueError, "max_record_bytes must be at least 1, got 0"),
        (TFRecordDataSource, {"check_crc": "no"}, TypeError, "check_crc must be True or False, got 'no'"),
        (TFRecordDataSource, {"cache": 1000}, TypeError, "cache must be a FileCache"),
        (TextLineDataSource, {"encoding": "utf-16"}, ValueError, "newline as the byte 10, got 'utf-16'"),
        (TextLineDataSource, {"encoding": "utf-32-le"}, ValueError, "Convert the files to UTF-8"),
        (TextLineDataSource, {"encoding": "cp037"}, ValueError, "newline as the byte 10"),
        (TextLineDataSource, {"encoding": "klingon"}, ValueError, "name of a text encoding, got 'klingon'"),
        (TextLineDataSource, {"encoding": "hex"}, ValueError, "must be the name of a text encoding"),
        (TextLineDataSource, {"encoding": None}, TypeError, "must be a str"),
        (TfdsDataSource, {"split": 5}, TypeError, "split must be a str"),
    ],
)
def test_wrong_options_are_errors(kind: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    """A wrong option is an error that says the rule, before any file is looked at."""
    with pytest.raises(error, match=message):
        kind("absent", **options)


@pytest.mark.parametrize(
    ("kind", "content", "same", "other"),
    [
        (TextLineDataSource, b"a\n", {"encoding": "UTF8"}, {"encoding": "latin-1"}),
        (CsvDataSource, b"a,b\n1,2\n", {"columns": ["a", "b"]}, {"columns": ["a"]}),
        (CsvDataSource, b"a\n1\n", {"delimiter": ","}, {"delimiter": ";"}),
        (CsvDataSource, b"a\n1\n", {"quotechar": '"'}, {"quotechar": None}),
        (CsvDataSource, b"a\n1\n", {"encoding": "UTF8"}, {"encoding": "latin-1"}),
    ],
)
def test_options_are_part_of_the_fingerprint(kind: Any, content: bytes, same: Any, other: Any, tmp_path: Path) -> None:
    """The same bytes are other records with other options."""
    (tmp_path / "a").write_bytes(content)
    default = kind(tmp_path / "a").fingerprint()
    equal, different = (kind(tmp_path / "a", **options).fingerprint() for options in (same, other))
    assert default == equal != different


@pytest.mark.parametrize("paths", [{"a"}, 3, b"data", [3]])
def test_what_are_no_paths_is_a_type_error(paths: Any) -> None:
    """A path of another type is a TypeError, also if the source changes the names of files."""
    with pytest.raises(TypeError, match="path"):
        MegatronDataSource(paths)
