"""Sources are accepted, everything else is refused with the call to write instead; each format has one class."""

import glob
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import millstream
from millstream.sources.file_formats import all_formats
from millstream.sources.source_checks import advice_for
from support.processes.commands import run_here


def of_library(name: str, **members: Any) -> type:
    """Returns a class that another library might define, with a length and records under any key."""
    return type(
        "Table",
        (),
        {"__module__": f"{name}.core.frame", "__len__": lambda _: 3, "__getitem__": lambda *_: np.ones(3), **members},
    )


FRAME = of_library("pandas", columns=["a"], iloc=None)

NOT_SOURCES: dict[str, tuple[Callable[[], Any], str]] = {
    "text": (lambda: "x.array_record", r"got str: .*ArrayRecordDataSource\('x\.array_record'\)"),
    "path": (
        lambda: Path("a/x"),
        r"got .*Path: .*ImageFolderDataSource\('a/x'\) for a folder .* millstream\.FileDataSource\('a/x'\) if each",
    ),
    "HDF5": (lambda: "a.h5", r"Hdf5DataSource\(\{'x': 'a\.h5/NAME'\}\)"),
    "Zarr": (lambda: "era.zarr/", r"ZarrDataSource\(\{'x': 'era\.zarr/"),
    "Lance": (lambda: Path("a.lance"), r"LanceDataSource\('a\.lance'\)"),
    "Arrow file": (lambda: "a.arrow", r"HuggingFaceDataSource\(datasets\.Dataset\.from_file\('a\.arrow'\)\)"),
    "npz": (lambda: "x.npz", r"InMemoryDataSource\(dict\(numpy\.load\('x\.npz'\)\)\)"),
    "TSV": (lambda: "a.tsv", r"CsvDataSource\('a\.tsv', delimiter='\\t'\)"),
    "audio": (lambda: "audio/*.WAV", r"FileDataSource\('audio/\*\.WAV'\)"),
    "images": (lambda: "s3://bucket/**/*.jpg", r"FileDataSource\('s3://bucket/\*\*/\*\.jpg'\)"),
    "tuple of columns": (lambda: (np.zeros((9, 2)), np.arange(9)), r"got tuple: .*InMemoryDataSource\(\{'x': x"),
    "alike columns": (lambda: (np.zeros((9, 2)), np.ones((9, 2))), r"got tuple: arrays of one length are columns"),
    "list of columns": (lambda: [np.zeros((9, 2)), np.zeros((9, 2))], r"got list: .*InMemoryDataSource\(\[x, y\]\)"),
    "three columns": (lambda: [np.zeros(9), np.zeros((9, 2)), np.zeros(9, int)], r"got list: arrays of one length"),
    "h5py": (lambda: h5py.File.in_memory().create_dataset("a/b", data=[1]), r"Hdf5DataSource\(\{'x': '.*/a/b'\}\)"),
    "h5py group": (h5py.File.in_memory, r"got File: .*Hdf5DataSource\(\{'x': '.*/NAME'\}\)"),
    "zarr array": (
        of_library("zarr", store=None, shape=(3,), store_path="file:///era.zarr/t"),
        r"ZarrDataSource\(\{'x': '/era\.zarr/t'\}\)",
    ),
    "zarr group": (
        of_library("zarr", store=None, store_path="file:///era.zarr", __iter__=lambda _: iter(["t"])),
        r"ZarrDataSource\(\{'x': '/era\.zarr/t'\}\)",
    ),
    "xarray": (of_library("xarray", dims=("time",)), r"ZarrDataSource\(\{'x': 'FILE\.zarr/NAME'\}\), .*NetCDF"),
    "TFRecord": (lambda: "a.tfrecord", r"TFRecordDataSource\('a\.tfrecord'\)"),
    "JSON Lines": (lambda: Path("a.jsonl"), r"JsonLinesDataSource\('a\.jsonl'\)"),
    "archive": (lambda: "a.tar", r"WebDatasetDataSource\('a\.tar'\)"),
    "columns": (lambda: {"a": np.zeros(3)}, r"got dict: its keys are names.*millstream\.InMemoryDataSource\(dict\("),
    "proxy": (lambda: types.MappingProxyType({"a": 1}), r"InMemoryDataSource\("),
    "class": (lambda: millstream.RangeDataSource, r"Pass an instance of it: RangeDataSource\(\.\.\.\)"),
    "iterator": (lambda: iter([1]), r"Pass list\(iterator\)"),
    "DataFrame": (FRAME, r"got Table: .*\{name: table\[name\]\.to_numpy\(\) for name in table\.columns\}"),
    "its subclass": (type("Own", (FRAME,), {}), r"got Own: .*table\.columns"),
    "polars": (of_library("polars", columns=["a"]), r"table\.columns"),
    "Series": (of_library("pandas", iloc=None), r"its keys are labels\. Pass series\.to_numpy\(\)"),
    "Arrow": (of_library("pyarrow", column_names=["a"]), r"for name in table\.column_names"),
}


@pytest.mark.parametrize("name", NOT_SOURCES)
def test_what_is_not_a_source_is_refused_with_the_right_way(name: str) -> None:
    """DataLoader and load refuse what is not a source, with its kind and the code to write."""
    make, message = NOT_SOURCES[name]
    # `load` reads paths of formats that need nothing else.
    is_opened = name in {"text", "TFRecord", "JSON Lines", "archive"}
    with pytest.raises(
        FileNotFoundError if is_opened else TypeError,
        match="No such" if is_opened else f"^data_source must be a source of records, {message}|{message}",
    ):
        millstream.load(make())
    with pytest.raises(TypeError, match=message):
        millstream.DataLoader(data_source=make(), sampler=millstream.IndexSampler(1))


@pytest.mark.parametrize(
    "value",
    [
        [1],
        (1,),
        range(3),
        np.arange(3),
        [np.zeros(5)] * 3,
        (np.zeros(2), np.zeros(2)),
        [np.zeros(4), np.zeros(5)],
        {0: "a", 1: "b"},
        millstream.RangeDataSource(0, 3),
        of_library("datasets")(),
    ],
)
def test_sources_are_taken_as_they_are(value: Any) -> None:
    """Lists, arrays, tables of other libraries that have records, and dicts by number."""
    assert advice_for(value) is None
    assert len(list(millstream.load(value, num_epochs=1))) == len(value)


FOLDERS = {
    "photos": (["dog/1.JPG", "cat/2.jpg"], "millstream.ImageFolderDataSource('{}')"),
    "saved": (["state.json", "data-0.arrow"], "millstream.HuggingFaceDataSource(datasets.load_from_disk('{}'))"),
    "tfds": (["dataset_info.json", "features.json"], "millstream.TfdsDataSource('{}', 'train')"),
    "mds": (["index.json", "shard.00000.mds"], "millstream.MdsDataSource('{}')"),
    "group": ([".zgroup", "t/.zarray"], "millstream.ZarrDataSource({{'x': '{}/t'}})"),
    "array": (["zarr.json", "c/0"], "millstream.ZarrDataSource({{'x': '{}'}})"),
    "rows": (["_versions/1", "data/x"], "millstream.LanceDataSource('{}')"),
    "tables": (["0.parquet", "1.parquet"], "millstream.ParquetDataSource('{}/*.parquet')"),
    "audio [2]": (["0.wav", "1.wav"], "millstream.FileDataSource('{}/*.wav')"),
}
"""Files in a folder, and the call that reads it."""


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_is_refused_with_the_source_of_what_it_contains(name: str, tmp_path: Path) -> None:
    """Python and the command line name the class; what it contains tells the kind of a folder."""
    names, expected = FOLDERS[name]
    for file in names:
        (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / file).touch()
    call = expected.format(glob.escape(str(tmp_path / name)))
    with pytest.raises(TypeError, match=re.escape(f"Write {call} to read its records.")):
        millstream.load(tmp_path / name)
    if "*" not in call:
        assert f"write {call} to read it" in run_here("inspect", name, folder=tmp_path, status=1)[1]


def test_a_file_without_an_extension_is_read_by_its_content(tmp_path: Path) -> None:
    """Its first bytes tell; a command names the class for a format that commands do not read."""
    (tmp_path / "lines").write_text('{"a": 1}\n')
    assert list(millstream.load(tmp_path / "lines", num_epochs=1)) == [{"a": 1}]
    with pytest.raises(TypeError, match=r"JsonLinesDataSource\('.*/lines'\)"):
        millstream.MapDataset.source(tmp_path / "lines")  # type: ignore[arg-type]  # refused
    (tmp_path / "x.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    assert "write millstream.Hdf5DataSource({'x': '" in run_here("inspect", "x.h5", folder=tmp_path, status=1)[1]


def decoded(kind: Any, **members: Any) -> Any:
    """Returns a class that decodes in `__getitem__`; it has no `__getitems__` of its own unless `members` has it."""
    return type("Decoded", (kind,), {"__getitem__": lambda self, key: 100 + kind.__getitem__(self, key), **members})


class Forwarding:
    """A wrapper that decodes, and forwards every other attribute, `__getitems__` too."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, record_key: int) -> int:
        return 100 + int(self._source[record_key])

    def __getattr__(self, name: str) -> Any:
        if name == "_source":
            raise AttributeError(name)
        return getattr(self._source, name)


OVERRIDDEN: dict[str, tuple[Callable[[], Any], int]] = {
    "a source of millstream": (lambda: decoded(millstream.RangeDataSource)(0, 8), 100),
    "columns": (lambda: decoded(millstream.InMemoryDataSource)(np.arange(8)), 100),
    "a wrapper": (lambda: Forwarding(millstream.RangeDataSource(0, 8)), 100),
    "a list": (lambda: decoded(list)(range(8)), 100),
    "a batched read of its own": (
        lambda: decoded(millstream.RangeDataSource, __getitems__=lambda _, keys: [200 + int(key) for key in keys])(
            0, 8
        ),
        200,
    ),
}


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_the_more_derived_read_wins(name: str) -> None:
    """A `__getitem__` that overrides alone, or a wrapper's, is used by loaders, chains, and sources of sources."""
    make, offset = OVERRIDDEN[name]
    expected = [offset + key for key in range(8)]
    both = millstream.ConcatenatedDataSource({"a": make(), "b": make()})

    assert list(millstream.load(make(), num_epochs=1)) == expected
    assert next(iter(millstream.load(make(), num_epochs=1, batch_size=8))).tolist() == expected
    assert list(millstream.MapDataset.source(make()).to_iter_dataset()) == expected
    assert next(iter(millstream.MapDataset.source(make()).batch(8))).tolist() == expected
    assert list(millstream.load(both, num_epochs=1)) == expected * 2
    assert list(millstream.load(millstream.InMemoryDataSource(make()), num_epochs=1)) == expected


def test_each_format_is_listed_once() -> None:
    """No two formats have a name, an extension or a class in common, and the class is the public one of that name."""
    names, classes = ([getattr(kind, member) for kind in all_formats()] for member in ("name", "class_name"))
    for words in (names, classes, [ending for kind in all_formats() for ending in kind.extensions]):
        assert len(set(words)) == len(words)
    for name in classes:
        assert name == f"millstream.{getattr(millstream, name.removeprefix('millstream.')).__name__}"
