"""HDF5 files: every layout and dtype, patterns, chunks that are kept, open files, damage, and files in stores."""

import pickle
import re
import struct
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.lib.recfunctions import repack_fields

import millstream
from millstream.core.columnar import ColumnarRecords
from millstream.errors import DataSourceError
from millstream.sources import Hdf5DataSource
from millstream.sources.formats.hdf5 import _is_read_alike
from support.faults.memory_limits import measured_peak
from support.stores.object_server import ObjectServer

LAYOUTS = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 30),
        "shape": st.lists(st.integers(1, 4), max_size=2),
        "dtype": st.sampled_from(
            ["<f4", ">i2", "?", "S5", "<u8", "<c8", "i1", [("a", "<i2"), ("b", ">f8", 2)], ("<i4", 3)]
        ),
        "chunk": st.one_of(st.none(), st.integers(1, 40)),
        "splits": st.booleans(),
        "options": st.sampled_from(
            [
                {},
                {"compression": "gzip"},
                {"compression": "gzip", "shuffle": True},
                {"compression": "gzip", "fletcher32": True},
                {"shuffle": True},
                {"compression": "lzf", "shuffle": True},
                {"fletcher32": True},
            ]
        ),
        "missing": st.booleans(),
    }
)


@settings(max_examples=80, deadline=None)
@given(LAYOUTS, st.sampled_from(["earliest", "latest"]), st.sampled_from([0, 1024]), st.sampled_from([0, 400, 1 << 20]))
def test_rows_are_those_of_h5py(
    folder: Path, layout: dict[str, Any], version: str, userblock: int, cache_bytes: int
) -> None:
    """In every layout, with every filter, dtype and size of the cache; rows that were never written included."""
    rng = np.random.default_rng(0)
    shape, dtype = (layout["rows"], *layout["shape"]), np.dtype(layout["dtype"])
    values = np.frombuffer(rng.integers(0, 2, (*shape, dtype.itemsize), np.uint8).tobytes(), dtype).reshape(
        *shape, *dtype.shape
    )
    options = dict(layout["options"])
    if layout["chunk"] is not None or options:
        options["chunks"] = (
            min(layout["chunk"] or 3, shape[0]),
            *(max(1, n // 2) if layout["splits"] else n for n in shape[1:]),
        )
    path = folder / "file.h5"
    with h5py.File(path, "w", libver=version, userblock_size=userblock) as file:
        dataset = file.create_dataset("group/x", shape, dtype, **options)
        if not layout["missing"]:
            dataset[...] = values
        elif "chunks" in options:
            dataset[: shape[0] // 2] = values[: shape[0] // 2]
        file["y"] = np.arange(shape[0])
    with h5py.File(path) as file:
        expected = [file["group/x"][row] for row in range(shape[0])]
    keys = rng.integers(0, shape[0], 20)
    with Hdf5DataSource({"x": f"{path}/group/x", "y": f"{path}/y"}, cache_bytes=cache_bytes) as source:
        records: Any = source.__getitems__(keys)
        for record, key in zip([*records, *map(source.__getitem__, keys)], [*keys, *keys], strict=True):
            assert record["y"] == key
            assert same(record["x"], expected[key])
        if isinstance(records, ColumnarRecords):
            some: Any = records[5:9]
            assert same(records.stack(np.empty)["x"], np.stack([expected[key] for key in keys]))
            assert some.stack(np.empty)["y"].tolist() == keys[5:9].tolist()


KINDS: dict[str, Any] = {
    **{name: name for name in ("<f2", ">f8", "<f16", ">c16", "<u4", ">i8", "?", "S1", "V5")},
    "array": (">f4", (2, 3)),
    "array of bool": ("?", 4),
    "array of text": ("S3", 2),
    "padded": np.dtype([("a", "i1"), ("b", "<f8"), ("c", "?")], align=True),
    "nested": [("a", "<i4"), ("b", [("c", "S3"), ("d", "<f4", (2, 2))])],
    "array of members": ([("a", "<i4"), ("b", ">i2")], 2),
    "enum": h5py.enum_dtype({"a": 0, "b": 1}, ">i2"),
    "dates": h5py.opaque_dtype("<M8[s]"),
    "fixed text": h5py.string_dtype("utf-8", 6),
    "text": h5py.string_dtype(),
    "bytes": h5py.string_dtype("ascii"),
    "images": h5py.vlen_dtype(np.uint8),
}
REFUSED: dict[str, tuple[Any, str]] = {
    "lists": (h5py.vlen_dtype(np.int32), "lists of variable length"),
    "lists of lists": (h5py.vlen_dtype(h5py.vlen_dtype(np.uint8)), "lists of variable length"),
    "lists of text": (h5py.vlen_dtype(h5py.string_dtype()), "lists of variable length"),
    "references": (h5py.ref_dtype, "references to other data"),
    "regions": (h5py.regionref_dtype, "references to other data"),
    "text among members": ([("a", "<i4"), ("b", h5py.string_dtype())], "members of variable length"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_every_type_are_those_of_h5py(tmp_path: Path, kind: str) -> None:
    """As they are, by gzip, of several axes, and never written; variable lengths as bytes; records and batches."""
    dtype = np.dtype(KINDS[kind])
    rng = np.random.default_rng(0)
    columns = {"plain": (12,), "rows": (12, 2), "gzip": (12,), "unwritten": (12,)}
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, shape in columns.items():
            options = {"chunks": (5, *shape[1:]), "compression": "gzip", "shuffle": True} if name == "gzip" else {}
            dataset = file.create_dataset(name, shape, dtype, **options)
            if name == "unwritten":
                continue
            texts = np.empty(shape, object)
            for index in np.ndindex(shape):
                texts[index] = bytes(rng.integers(1, 127, rng.integers(0, 9), np.uint8))
            if kind == "images":
                for index in np.ndindex(shape):
                    dataset[index] = np.frombuffer(texts[index] + b"\0", np.uint8)
            elif dtype.hasobject or kind == "fixed text":
                dataset[...] = texts.astype(dtype)
            else:
                count = int(np.prod(shape)) * dtype.itemsize
                values = np.frombuffer(rng.integers(0, 2, count, np.uint8).tobytes(), dtype)
                dataset[...] = values.reshape(*shape, *dtype.shape)
    with h5py.File(tmp_path / "a.h5") as file:
        expected = {name: [file[name][row] for row in range(12)] for name in columns}
    with Hdf5DataSource({name: f"{tmp_path}/a.h5/{name}" for name in columns}) as source:
        for number, record in enumerate(source.__getitems__(range(12))):
            for name in columns:
                assert same(record[name], expected[name][number]), (name, number)
        batch = next(iter(millstream.load(source, batch_size=12)))
        assert all(same(row, each) for name in columns for row, each in zip(batch[name], expected[name], strict=True))


@pytest.mark.parametrize("kind", [*REFUSED, "three bytes", "times"])
def test_rows_that_are_not_read_are_refused_by_name(tmp_path: Path, kind: str) -> None:
    """At construction, by a ValueError with the file, the dataset and what to do about its type."""
    dtype, message = REFUSED.get(kind, (None, "without a NumPy dtype"))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        if dtype is not None:
            file.create_dataset("data/x", (3,), dtype)
        else:
            stored = h5py.h5t.UNIX_D32LE
            if kind == "three bytes":
                stored = h5py.h5t.STD_I32LE.copy()
                stored.set_size(3)
            h5py.h5d.create(file.create_group("data").id, b"x", stored, h5py.h5s.create_simple((3,)))
    with pytest.raises(ValueError, match=rf"Cannot read '.*a.h5': 'data/x' has .*{message}") as refused:
        Hdf5DataSource({"x": f"{tmp_path}/a.h5/data/x"})
    assert type(refused.value) is ValueError


def same(found: Any, expected: Any) -> bool:
    """Returns True if a value is that of h5py, in native byte order; one of variable length, its bytes."""
    if isinstance(found, bytes):
        return found == bytes(expected)
    if found.dtype.hasobject:
        return found.shape == expected.shape and all(map(same, found.flat, expected.flat))
    native = expected.astype(expected.dtype.newbyteorder("="))
    # The bytes between members may be any.
    found_bytes, native_bytes = (repack_fields(np.asarray(value)).tobytes() for value in (found, native))
    return bool(found.dtype == native.dtype and found.shape == native.shape and found_bytes == native_bytes)


def write_demos(folder: Path) -> None:
    """Writes two files of three demonstrations."""
    start = 0
    for name, counts in {"a": [3, 0, 5], "b": [4, 2, 1]}.items():
        with h5py.File(folder / f"{name}.hdf5", "w") as file:
            for number, count in enumerate(counts):
                file[f"data/demo_{number}/obs/image"] = np.arange(start, start + count).repeat(4).reshape(-1, 2, 2)
                file[f"data/demo_{number}/actions"] = np.arange(start, start + count, dtype=np.float32)
                start += count
            file["data/other"] = [1]


def test_patterns_are_files_and_datasets_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Matches of files and of datasets are concatenated by name; a path may be relative, or begin with `~`."""
    write_demos(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    for root in (f"{tmp_path}/*.hdf5", "~/*.hdf5", "[ab].hdf5"):
        source = Hdf5DataSource({"image": f"{root}/data/*/obs/image", "action": f"{root}/data/*/actions"})
        assert len(source) == 15
        batch = next(iter(millstream.load(source, batch_size=15)))
        assert batch["action"].tolist() == batch["image"][:, 1, 1].tolist() == [*range(15)]
        assert source.locate(9) == (f"{tmp_path}/b.hdf5", 1)
        assert source.unit_sizes.tolist() == [3, 5, 4, 2, 1]
        assert source.window_units is None


def test_a_dataset_may_have_the_name_of_a_pattern(tmp_path: Path) -> None:
    """A name that exists is that name, also if it could be a pattern."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["group[1]/x[0]"], file["group1/x0"] = np.arange(3), np.arange(4)
    assert len(Hdf5DataSource({"x": f"{tmp_path}/a.h5/group[1]/x[0]"})) == 3
    assert len(Hdf5DataSource({"x": f"{tmp_path}/a.h5/group[12]/x?"})) == 4


def test_the_units_of_a_shuffle_are_chunks_that_fit(tmp_path: Path) -> None:
    """Of the column with the most bytes that is decoded. Two windows fit into the cache; each chunk is decoded once."""
    path = tmp_path / "a.h5"
    rows = np.arange(1000 * 64, dtype=np.int32).reshape(1000, 64)
    with h5py.File(path, "w") as file:
        file.create_dataset("large", data=rows, chunks=(16, 64), compression="gzip")
        file.create_dataset("small", data=rows[:, 0], chunks=(100,), compression="gzip")
        file["plain"] = rows
    paths = {name: f"{path}/{name}" for name in ("large", "small", "plain")}
    source = Hdf5DataSource(paths, cache_bytes=64 << 10)

    assert source.unit_sizes.tolist() == [16] * 62 + [8]
    assert source.window_units == (32 << 10) // (16 * (64 + 1) * 4)
    assert Hdf5DataSource(paths, cache_bytes=1 << 20).window_units is None
    assert Hdf5DataSource({"plain": paths["plain"]}, cache_bytes=0).window_units is None
    batches = list(millstream.load(source, shuffle=True, seed=0, batch_size=50, num_epochs=1))
    assert sorted(np.concatenate([batch["small"] for batch in batches]).tolist()) == rows[:, 0].tolist()
    for batch in batches:
        assert (batch["large"] == batch["plain"]).all()
        assert (batch["large"][:, 0] == batch["small"]).all()
        # A window is 7 chunks, so the rows of a batch are of two windows at most.
        assert len(np.unique(batch["small"] // 64 // 16)) <= 2 * source.window_units


def test_chunks_that_were_stored_without_their_filter_are_read(tmp_path: Path) -> None:
    """A writer may store single chunks of a gzip dataset as they are."""
    path = tmp_path / "a.h5"
    rows = np.arange(40, dtype=np.int32).reshape(10, 4)
    with h5py.File(path, "w") as file:
        dataset = file.create_dataset("x", data=rows, chunks=(2, 4), compression="gzip")
        dataset.id.write_direct_chunk((4, 0), (rows[4:6] + 100).tobytes(), filter_mask=1)
    source = Hdf5DataSource({"x": f"{path}/x"})
    rows[4:6] += 100
    assert [record["x"].tolist() for record in source.__getitems__(range(10))] == rows.tolist()


def test_a_chunk_that_is_listed_twice_does_not_hide_another(tmp_path: Path) -> None:
    """The rows are those of h5py, always, if two entries of a damaged index are for one chunk, and none for another."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(160, dtype=np.int32).reshape(40, 4), chunks=(1, 4))
    third, fourth = (struct.pack("<IIQQQ", 16, 0, row, 0, 0) for row in (3, 4))
    content = path.read_bytes()
    assert content.count(third) == 1
    path.write_bytes(content.replace(third, fourth))
    with h5py.File(path) as file:
        expected = [file["x"][row].tolist() for row in range(40)]
    for offset in range(0, 1600, 80):
        np.full(80, offset, np.int64)  # The memory that the next array of this size gets.
        with Hdf5DataSource({"x": f"{path}/x"}) as source:
            assert [record["x"].tolist() for record in source.__getitems__(range(40))] == expected


@pytest.mark.parametrize("options", [{}, {"chunks": (5, 4)}, {"chunks": (5, 4), "compression": "gzip"}])
def test_offsets_are_used_only_if_the_rows_there_are_those_of_h5py(tmp_path: Path, options: dict[str, Any]) -> None:
    """Some versions of HDF5 report offsets without the bytes before the file's first one. A damaged row does not count.

    If no row can be compared, h5py reads them.
    """
    path, rows = tmp_path / "a.h5", np.arange(160, dtype=np.int32).reshape(40, 4) + 1
    with h5py.File(path, "w", userblock_size=512) as file:
        file.create_dataset("x", data=rows, **options)
    with Hdf5DataSource({"x": f"{path}/x"}) as source, h5py.File(path) as file, path.open("rb", buffering=0) as raw:
        assert source[39]["x"].tolist() == rows[39].tolist()
        layout = source._segments[str(path)][0].layouts["x"]
        starts = layout.starts
        assert starts is not None
        last = np.r_[starts[:-1], starts[-1] - 512]
        is_checked = layout.sizes is None or len(starts) == 1
        for found, expected in ((starts, True), (starts - 512, False), (last, not is_checked)):
            assert _is_read_alike(file["x"], layout._replace(starts=found), raw) is expected


def test_a_chunk_that_inflates_beyond_its_size_is_an_error(tmp_path: Path) -> None:
    """A hostile chunk is not decompressed beyond the size of its rows; one that is too short is an error, too."""
    path = tmp_path / "a.h5"
    for content in (bytes(1 << 26), bytes(31)):
        with h5py.File(path, "w") as file:
            dataset = file.create_dataset("x", (4, 4), "i4", chunks=(2, 4), compression="gzip")
            dataset[...] = 1
            dataset.id.write_direct_chunk((2, 0), zlib.compress(content))
        source = Hdf5DataSource({"x": f"{path}/x"})
        assert source[1]["x"].tolist() == [1] * 4
        with measured_peak() as peak, pytest.raises(DataSourceError, match=r"record key 3\).*not inflate to 32 bytes"):
            source[3]
        assert peak() < 1 << 20
        source.close()


def test_a_file_that_the_process_has_open_is_read(tmp_path: Path) -> None:
    """Open for reading in h5py, before and after; open for writing, it is refused, since the file may lack rows."""
    path = tmp_path / "a.h5"
    with h5py.File(path, "w") as file:
        file.create_dataset("x", data=np.arange(20), chunks=(3,), compression="gzip")
        file["y"] = np.arange(20)
        with pytest.raises(ValueError, match="open for writing in this process"):
            Hdf5DataSource({"y": f"{path}/y"})
    with h5py.File(path, "r") as file, Hdf5DataSource({"x": f"{path}/x", "y": f"{path}/y"}) as source:
        assert [(record["x"], record["y"]) for record in map(source.__getitem__, range(20))] == [
            (n, n) for n in range(20)
        ]
        assert file["x"][7] == 7
    with h5py.File(path, "r+") as file:  # Nothing is left open, which HDF5 would refuse.
        assert file["x"][7] == 7


@pytest.mark.parametrize(
    ("path", "error", "message"),
    [
        ("a.h5/scalar", ValueError, "one row per record"),
        ("a.h5/empty", ValueError, "one row per record"),
        ("a.h5/group", ValueError, "no dataset matches 'group'"),
        ("a.h5/none", ValueError, "no dataset matches 'none'"),
        ("a.h5/link", DataSourceError, "a.h5': it is not"),
        ("a.h5/blosc", ValueError, r"'blosc' has the filter 32001 \(.*\), which h5py lacks"),
        ("a.h5/external", ValueError, "in other files"),
        ("a.h5/short", ValueError, "'short' has 2, 'y' has 4"),
        ("a.h5", ValueError, "'train.h5/images'"),
        ("none.h5/x", FileNotFoundError, "No HDF5 file is at the beginning"),
        ("no.h5/x", DataSourceError, "no.h5': it is not an HDF5 file"),
    ],
)
def test_what_cannot_be_read_is_an_error_at_construction(
    tmp_path: Path, path: str, error: type[Exception], message: str
) -> None:
    """With the file, the dataset and the reason."""
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file["y"], file["short"], file["scalar"] = np.arange(4), [1, 2], 3
        file["empty"], file["group/x"], file["link"] = h5py.Empty("f4"), 1, h5py.ExternalLink("b.h5", "z")
        file.create_dataset("external", (4,), "i4", external=[("values", 0, 16)])
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        properties.set_chunk((4,))
        properties.set_filter(32001, h5py.h5z.FLAG_OPTIONAL)
        h5py.h5d.create(file.id, b"blosc", h5py.h5t.STD_I8LE, h5py.h5s.create_simple((4,)), properties)
    (tmp_path / "no.h5").write_bytes(b"%PDF" * 100)
    with pytest.raises(error, match=message):
        Hdf5DataSource({"x": f"{tmp_path}/{path}", "y": f"{tmp_path}/{path.partition('/')[0]}/y"})


def test_columns_and_files_that_do_not_belong_together_are_errors(tmp_path: Path) -> None:
    """Other matches of a pattern, another dtype in another file, columns of different files, and no columns."""
    wrong: list[tuple[Any, type[Exception], str]] = [
        ({}, ValueError, "one column"),
        (["absent.h5"], FileNotFoundError, "No HDF5 file"),
    ]
    for columns, error, message in wrong:
        with pytest.raises(error, match=message):
            Hdf5DataSource(columns)
    write_demos(tmp_path)
    with h5py.File(tmp_path / "c.hdf5", "w") as file:
        file["data/demo_0/actions"] = np.arange(3)
    root = f"{tmp_path}/*.hdf5/data/*"
    with pytest.raises(ValueError, match=re.escape("of float32[] in")):
        Hdf5DataSource({"action": f"{root}/actions"})
    with pytest.raises(ValueError, match="no dataset matches"):
        Hdf5DataSource({"action": f"{root}/actions", "image": f"{root}/obs/image"})
    with h5py.File(tmp_path / "c.hdf5", "a") as file:
        file["data/demo_1/obs/image"] = np.arange(3)
    with pytest.raises(ValueError, match="nothing like 'data/\\*/obs/image' with the same names"):
        Hdf5DataSource({"action": f"{tmp_path}/c.hdf5/data/*/actions", "image": f"{tmp_path}/c.hdf5/data/*/obs/image"})
    with pytest.raises(ValueError, match="must be in the same files"):
        Hdf5DataSource({"action": f"{tmp_path}/a.hdf5/data/*/actions", "image": f"{tmp_path}/b.hdf5/data/*/obs/image"})


NAMES = ("plain", "chunks", "gzip", "rows", "lzf")


def content_of(folder: Path, first: int = 0) -> bytes:
    """Returns a file of three demonstrations of 20 rows, with columns that are read as they are and decoded."""
    with h5py.File(folder / "made", "w") as file:
        for demo in range(3):
            numbers = np.arange(20) + first + 20 * demo
            rows = np.repeat(numbers, 400).reshape(-1, 20, 20).astype(np.int32)
            group = file.create_group(f"data/{demo}")
            group["plain"] = numbers
            group.create_dataset("chunks", data=rows, chunks=(3, 20, 20))
            group.create_dataset("gzip", data=rows, chunks=(3, 20, 20), compression="gzip", shuffle=True)
            group.create_dataset("rows", data=rows, chunks=(1, 20, 20), compression="gzip")
            group.create_dataset("lzf", data=rows, chunks=(3, 20, 20), compression="lzf")
    return (folder / "made").read_bytes()


@pytest.mark.third_party
@pytest.mark.parametrize("scheme", ["gs", "http", "s3"])
def test_every_store_is_read_as_files_are(store: ObjectServer, tmp_path: Path, scheme: str) -> None:
    """The records and units are those of the files, in all layouts; in buckets, file names may be patterns."""
    for number in range(2):
        store.objects[f"bucket/{number}.h5"] = content_of(tmp_path, 60 * number)
        (tmp_path / f"{number}.h5").write_bytes(store.objects[f"bucket/{number}.h5"])
    root = f"{store.url}/bucket" if scheme == "http" else f"{scheme}://bucket"
    pattern = "0.h5" if scheme == "http" else "*.h5"
    files, source = (
        Hdf5DataSource({name: f"{folder}/{pattern}/data/*/{name}" for name in NAMES}) for folder in (tmp_path, root)
    )
    keys = np.random.default_rng(0).integers(0, len(files), 50)
    with files, source, pickle.loads(pickle.dumps(source)) as copy:
        assert len(source) == (60 if scheme == "http" else 120)
        assert source.fingerprint() == files.fingerprint()
        assert source.unit_sizes.tolist() == files.unit_sizes.tolist()
        for each in (source, copy):
            assert repr(list(each.__getitems__(keys))) == repr(list(files.__getitems__(keys)))
        assert repr(source[59]) == repr(files[59])


@pytest.mark.third_party
def test_rows_and_chunks_of_a_batch_are_requested_together(store: ObjectServer, tmp_path: Path) -> None:
    """Of all demonstrations and columns; a chunk is requested once, and metadata when the source is constructed."""
    store.objects["bucket/a.h5"] = content_of(tmp_path)
    columns = {name: f"{store.url}/bucket/a.h5/data/*/{name}" for name in ("chunks", "gzip")}
    with Hdf5DataSource(columns) as source:
        assert len(store.requests) < 20
        store.forget()
        store.gathering = 6
        assert [record["gzip"][0, 0] for record in source.__getitems__([0, 25, 45])] == [0, 25, 45]
        assert len(store.requests) == store.most_at_once == 6
        store.gathering = 0
        store.forget()
        source.__getitems__([1, 24, 44])
        assert len(store.requests) == 3  # The rows without filters.


@pytest.mark.third_party
def test_a_store_that_lost_or_changed_the_file_is_an_error(store: ObjectServer, tmp_path: Path) -> None:
    """With its URL and the record; before construction, an object of another format, or none, is refused."""
    url = f"{store.url}/bucket/a.h5"
    for name in NAMES:
        store.objects["bucket/a.h5"] = content_of(tmp_path)
        with Hdf5DataSource({name: f"{url}/data/*/{name}"}) as source:
            store.objects["bucket/a.h5"] = content_of(tmp_path, first=1)
            with pytest.raises(DataSourceError, match=r"\(record key 21\)") as changed:
                source[21]
            del store.objects["bucket/a.h5"]
            with pytest.raises(DataSourceError, match=r"\(record key 22\)") as removed:
                source[22]
            assert url in str(changed.value)
            assert f"{url!r} was removed" in str(removed.value)
    store.objects["bucket/a.h5"] = b"%PDF" * 1000
    with pytest.raises(DataSourceError, match=re.escape(url)):
        Hdf5DataSource({"x": f"{url}/x"})
    with pytest.raises(FileNotFoundError, match="No HDF5 file is at the beginning"):
        Hdf5DataSource({"x": f"{store.url}/bucket/b.h5/x"})
