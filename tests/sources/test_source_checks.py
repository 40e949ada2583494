"""Sources are accepted, everything else is refused with the call to write instead; each format has one class."""

import shutil
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
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
    "HDF5": (lambda: "a.h5", r"Hdf5DataSource\('a\.h5'\)"),
    "Zarr": (lambda: "era.zarr/", r"ZarrDataSource\('era\.zarr/'\)"),
    "Lance": (lambda: Path("a.lance"), r"LanceDataSource\('a\.lance'\)"),
    "Arrow file": (lambda: "a.arrow", r"HuggingFaceDataSource\('a\.arrow'\)"),
    "npz": (lambda: "x.npz", r"InMemoryDataSource\('x\.npz'\)"),
    "TSV": (lambda: "a.tsv", r"CsvDataSource\('a\.tsv'\)"),
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
    """DataLoader and load refuse what is not a source, with its kind and the code to write; load opens paths."""
    make, message = NOT_SOURCES[name]
    with pytest.raises(TypeError, match=message):
        millstream.DataLoader(data_source=make(), sampler=millstream.IndexSampler(1))
    if name in {"path", "images"} or not isinstance(make(), str | Path):
        with pytest.raises(TypeError, match=f"^data_source must be a source of records, {message}|{message}"):
            millstream.load(make()) if name != "images" else millstream.MapDataset.source(make())
    elif name != "Lance":  # Its library keeps descriptors.
        with pytest.raises((FileNotFoundError, ValueError), match=r"No |not found"):
            millstream.load(make())


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


LIBRARIES = Path(__file__).with_name("files_of_libraries")


def write_paths(folder: Path) -> None:
    """Writes data of the formats that `files_of_libraries` lacks."""
    for name in ("dog/1.JPG", "cat/2.jpg", "cat/3.jpg"):
        (folder / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "photos" / name).write_bytes(b"JPEG")
    datasets.Dataset.from_dict({"a": [1, 2]}).save_to_disk(folder / "saved")
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"a": [1, 2]})}).save_to_disk(folder / "splits")
    for number in range(2):
        for table in ("tables/{}.parquet", "hive/year={}/0.parquet", "lines/{}.jsonl", "audio [2]/{}.wav"):
            path = folder / table.format(number)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text('{"a": 1}\n')
            if path.suffix == ".parquet":
                pq.write_table(pa.table({"a": [number]}), path)
    (folder / "hive" / "_SUCCESS").touch()
    (folder / "a.tsv").write_text("a\tb\n1\t2\n3\t4\n")
    np.savez(folder / "x.npz", x=np.arange(6).reshape(2, 3), y=np.arange(2))
    np.save(folder / "x.npy", np.arange(2))
    for name, original in {"array.h5": "hdf5.h5", "unnamed": "hdf5.h5"}.items():
        shutil.copy(LIBRARIES / original, folder / name)
    shutil.copytree(LIBRARIES / "zarr3.zarr", folder / "group")
    shutil.copytree(LIBRARIES / "lance", folder / "rows")
    shutil.copy(next((folder / "saved").glob("*.arrow")), folder / "no extension")


PATHS = {
    "photos": ("ImageFolderDataSource", 3),
    "saved": ("HuggingFaceDataSource", 2),
    "splits": ("HuggingFaceDataSource", 2),
    "saved/*.arrow": ("HuggingFaceDataSource", 2),
    "tables": ("ParquetDataSource", 2),
    "hive": ("ParquetDataSource", 2),
    "lines": ("JsonLinesDataSource", 2),
    "audio [2]": ("FileDataSource", 2),
    "photos/*/*.jpg": ("FileDataSource", 2),
    "a.tsv": ("CsvDataSource", 2),
    "x.npz": ("InMemoryDataSource", 2),
    "x.npy": ("InMemoryDataSource", 2),
    "unnamed": ("Hdf5DataSource", None),
    "array.h5": ("Hdf5DataSource", None),
    "group": ("ZarrDataSource", None),
    f"{LIBRARIES}/zarr2.zarr": ("ZarrDataSource", None),
    f"{LIBRARIES}/zarr3.zarr/rows": ("ZarrDataSource", None),
    "rows": ("LanceDataSource", None),
    f"{LIBRARIES}/mds": ("MdsDataSource", None),
    f"{LIBRARIES}/tfds/small/1.0.0": ("TfdsDataSource", None),
}
"""The class that reads each path, and the number of records that are written here."""


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data of all formats."""
    folder = tmp_path_factory.mktemp("paths")
    write_paths(folder)
    return folder


@pytest.mark.parametrize("name", ["x.npz", "x.npy", "objects.npy", "objects.npz"])
def test_a_file_that_numpy_cannot_read_is_named(name: str, tmp_path: Path) -> None:
    """A damaged file, or one of pickled objects, is an error with its path, and without advice to unpickle it."""
    path = tmp_path / name
    objects = np.array([{}], dtype=object)
    if name == "objects.npz":
        np.savez(path, a=objects)
    elif name == "objects.npy":
        np.save(path, objects)
    else:
        path.write_bytes(b"abc")

    with pytest.raises(
        millstream.DataSourceError, match=rf"Cannot read the arrays of '.*{name}': it is damaged, "
    ) as caught:
        millstream.InMemoryDataSource(str(path))
    assert "allow_pickle" not in str(caught.value)


@pytest.mark.third_party
@pytest.mark.parametrize("path", PATHS)
def test_a_path_of_any_format_is_read(path: str, paths: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`load` and `inspect` know files and folders by name or content, and DataLoader names the class."""
    monkeypatch.chdir(paths)
    name, count = PATHS[path]
    records = list(millstream.load(path, num_epochs=1))
    assert len(records) == count if count is not None else records
    printed, _ = run_here("inspect", path, folder=paths)
    assert f"read by millstream.{name}" in printed
    assert f"records   {len(records)}" in printed
    with pytest.raises(TypeError, match=rf"Write millstream\.{name}\('"):
        millstream.DataLoader(data_source=path, sampler=millstream.IndexSampler(1))


def test_groups_of_arrays_are_columns_by_their_names(tmp_path: Path) -> None:
    """These are the arrays with the rows of the largest one, or the named ones; of patterns of files, of all."""
    for number in range(2):
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            file["x"], file["y"], file["scale"] = np.zeros((3, 4)), np.arange(3) + 3 * number, np.zeros(2)
            file["episodes/a/x"] = np.ones((5, 2))
    columns = millstream.Hdf5DataSource(f"{tmp_path}/*.h5")
    assert (len(columns), [*columns[4]], columns[4]["y"]) == (6, ["x", "y"], 4)
    files = [tmp_path / "1.h5", tmp_path / "0.h5"]
    assert [record["y"] for record in millstream.Hdf5DataSource(files, columns=["y"]).__getitems__([0, 3])] == [3, 0]
    assert millstream.Hdf5DataSource(tmp_path / "0.h5" / "episodes" / "a")[4]["x"].tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"no dataset directly in 'episodes' .* Hdf5DataSource\(\{'x': '.*/a/x'\}\)"):
        millstream.Hdf5DataSource(tmp_path / "0.h5/episodes")
    group = LIBRARIES / "zarr3.zarr"
    source = millstream.ZarrDataSource(group, columns=["score", "deep/n"])
    assert [*source[0]] == ["score", "deep/n"]
    assert "score" in millstream.ZarrDataSource(group)[0]
    with pytest.raises(ValueError, match=r"'gs://bucket/x' must|names of arrays in a store must be given.*columns="):
        millstream.ZarrDataSource("gs://bucket/x")
    for make, path in ((millstream.ZarrDataSource, group / "rows"), (millstream.Hdf5DataSource, tmp_path / "0.h5/x")):
        with pytest.raises(ValueError, match="columns are for the path of a group"):
            make({"x": path}, columns=["x"])


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
