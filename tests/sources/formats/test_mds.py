"""Shards of MosaicML Streaming: every encoding, and what is damaged or refused."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import zstandard

from millstream.errors import DataSourceError
from millstream.sources import FileCache, MdsDataSource
from support.files.record_files import write_mds
from support.stores.object_server import ObjectServer

IMAGE = PIL.Image.fromarray(np.arange(60, dtype=np.uint8).reshape(5, 4, 3))
SAMPLES = [{"text": f"text é {number}".encode(), "label": struct.pack("<q", number - 3)} for number in range(10)]
COLUMNS = {"text": "str", "label": "int"}


def raw_image(image: PIL.Image.Image) -> bytes:
    content: bytes = struct.pack("<3I", *image.size, len(image.mode)) + image.mode.encode() + image.tobytes()
    return content


def members(*values: bytes) -> bytes:
    return struct.pack(f"<{len(values) + 1}I", len(values), *map(len, values)) + b"".join(values)


ENCODED: list[tuple[str, bytes, Any]] = [
    ("bytes", b"\x00\xff", b"\x00\xff"),
    ("str", "é".encode(), "é"),
    ("int", struct.pack("<q", -5), -5),
    ("uint8", b"\xff", np.uint8(255)),
    ("float16", np.float16(0.5).tobytes(), np.float16(0.5)),
    ("int64", struct.pack("<q", -5), np.int64(-5)),
    ("str_int", b"1000000000000000000000", 10**21),
    ("str_float", b"0.5", 0.5),
    ("str_decimal", b"1.50", Decimal("1.50")),
    ("json", b'{"a": [1, null]}', {"a": [1, None]}),
    ("jpeg", b"\xff\xd8", b"\xff\xd8"),
    ("png", b"\x89PNG", b"\x89PNG"),
    ("jpeg_array", members(b"one", b""), [b"one", b""]),
    ("list[jpeg]", bytes(4) + members(b"one", b"two"), [b"one", b"two"]),
    ("ndarray:uint16:2,3", np.arange(6, dtype="<u2").tobytes(), np.arange(6, dtype=np.uint16).reshape(2, 3)),
    ("ndarray:uint16", b"\x08\x01\x06" + np.arange(6, dtype="<u2").tobytes(), np.arange(6, dtype=np.uint16)[None]),
    ("ndarray", b"\x22\x05\x2c\x01" + np.ones(300, "<f4").tobytes(), np.ones(300, np.float32)),
]


@pytest.mark.parametrize(("encoding", "content", "expected"), ENCODED, ids=[encoding for encoding, _, _ in ENCODED])
def test_every_encoding_has_its_value(tmp_path: Path, encoding: str, content: bytes, expected: Any) -> None:
    """Types and dtypes too; a batch of several records is the records one by one, and arrays may be written to."""
    write_mds(tmp_path, {"x": encoding, "after": "int"}, [{"x": content, "after": struct.pack("<q", 7)}] * 3, 2)
    source = MdsDataSource(tmp_path)
    records = source.__getitems__([2, 0])

    assert [list(record) for record in records] == [["after", "x"]] * 2
    for record in [*records, source[1]]:
        assert record["after"] == 7
        assert type(record["x"]) is type(expected)
        np.testing.assert_equal(record["x"], expected)
        if isinstance(expected, np.ndarray):
            assert (record["x"].dtype, record["x"].flags.writeable) == (expected.dtype, True)


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "I", "F"])
def test_raw_images_are_their_pixels(tmp_path: Path, mode: str) -> None:
    """A `pil` column is the array that NumPy makes of the image; one of single bits is refused."""
    image = IMAGE.convert(mode)
    columns = {"x": "pil", "y": "list[pil]"}
    write_mds(tmp_path, columns, [{"x": raw_image(image), "y": bytes(4) + members(raw_image(image))}], 1)
    record = MdsDataSource(tmp_path)[0]

    for found in (record["x"], *record["y"]):
        assert found.dtype == np.asarray(image).dtype
        np.testing.assert_array_equal(found, np.asarray(image))
    write_mds(tmp_path / "bits", {"x": "pil"}, [{"x": raw_image(IMAGE.convert("1"))}], 1)
    source = MdsDataSource(tmp_path / "bits")
    with pytest.raises(DataSourceError, match="column 'x' cannot be decoded: images of one bit per pixel"):
        source[0]


def test_pickled_columns_are_refused_unless_asked_for(tmp_path: Path) -> None:
    """Unpickling runs any code in the file."""
    write_mds(tmp_path, {"x": "pkl"}, [{"x": pickle.dumps({1: 2})}], 1)

    with pytest.raises(ValueError, match="pass allow_pickle=True"):
        MdsDataSource(tmp_path)
    assert MdsDataSource(tmp_path, allow_pickle=True)[0] == {"x": {1: 2}}


def test_a_flipped_byte_of_a_sample_is_an_error_or_another_value(tmp_path: Path) -> None:
    """The error names the file and the record; the other records are read."""
    write_mds(tmp_path, COLUMNS, SAMPLES, 5)
    expected = list(MdsDataSource(tmp_path).__getitems__(range(10)))
    shard = tmp_path / "shard.00001.mds"
    content = shard.read_bytes()
    start = struct.unpack_from("<7I", content)[1]
    for offset in range(start, len(content)):
        shard.write_bytes(content[:offset] + bytes([content[offset] ^ 0xC1]) + content[offset + 1 :])
        source, changed = MdsDataSource(tmp_path), 0
        for key in range(10):
            try:
                changed += source[key] != expected[key]
            except DataSourceError as error:
                changed += f"Cannot read record {key - 5} of '{shard}' (record key {key}): its column" in str(error)
        assert changed == 1, offset


def edit_index(folder: Path, shard: int = 0, **changes: Any) -> None:
    """Changes the description of a shard in the index."""
    index = json.loads((folder / "index.json").read_text())
    index["shards"][shard].update(changes)
    (folder / "index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "error", "message"),
    [
        (lambda folder: (folder / "index.json").unlink(), FileNotFoundError, "No such MDS index"),
        (lambda folder: (folder / "index.json").write_text("{"), DataSourceError, "it does not list shards"),
        (lambda folder: (folder / "index.json").write_text("[]"), DataSourceError, "it does not list shards"),
        (lambda folder: (folder / "shard.00001.mds").unlink(), FileNotFoundError, "No such MDS file"),
        (lambda folder: (folder / "shard.00001.mds").write_bytes(b"\xff" * 9), DataSourceError, "ends before the off"),
        (lambda folder: os.truncate(folder / "shard.00001.mds", 150), DataSourceError, "samples are not in order"),
        (partial(edit_index, samples=7), DataSourceError, "index.json lists 7"),
        (partial(edit_index, version=3), DataSourceError, "MDS version 2"),
        (partial(edit_index, samples=None), DataSourceError, "does not list shards"),
        (partial(edit_index, raw_data={"basename": "../a"}), DataSourceError, "'../a', which is not in its folder"),
        (partial(edit_index, column_encodings=["int", "magic"]), ValueError, "unknown encoding, got 'magic'"),
        (
            partial(edit_index, raw_data={"basename": "x.mds"}, zip_data={"basename": "x.mds.zstd"}),
            DataSourceError,
            r"x.mds.zstd': it is compressed by None, not by Zstandard",
        ),
    ],
)
def test_what_is_not_a_dataset_is_refused(
    tmp_path: Path, damage: Callable[[Path], Any], error: type[Exception], message: str
) -> None:
    """A missing or damaged index or shard is an error at construction that names the file."""
    write_mds(tmp_path, COLUMNS, SAMPLES, 5)
    damage(tmp_path)

    with pytest.raises(error, match=message):
        MdsDataSource(tmp_path)


def compress(folder: Path) -> None:
    """Compresses the shards of a folder as MosaicML's writer does, and removes the shards themselves."""
    index = json.loads((folder / "index.json").read_text())
    for shard in index["shards"]:
        path = folder / shard["raw_data"]["basename"]
        content = zstandard.ZstdCompressor().compress(path.read_bytes())
        path.with_name(f"{path.name}.zstd").write_bytes(content)
        path.unlink()
        shard["zip_data"] = {"basename": f"{path.name}.zstd", "bytes": len(content)}
        shard["compression"] = "zstd:3"
    (folder / "index.json").write_text(json.dumps(index))


def compressed(folder: Path) -> tuple[list[Any], FileCache]:
    """Writes compressed shards, and returns their samples and a cache with room for one and a half of them."""
    write_mds(folder, COLUMNS, SAMPLES, 4)
    samples = [*MdsDataSource(folder).__getitems__(range(10))]
    size = (folder / "shard.00000.mds").stat().st_size
    compress(folder)
    return samples, FileCache(size * 3 // 2, folder.parent / "copies")


def test_compressed_shards_are_read_from_copies_of_their_content(tmp_path: Path) -> None:
    """One by one, in batches, by a pickled copy, and by another source; no shard is unpacked before it is read."""
    samples, cache = compressed(tmp_path / "mds")
    with MdsDataSource(tmp_path / "mds", cache=cache) as source:
        assert not Path(cache.folder).exists()
        assert len(source) == 10
        assert source.unit_sizes.tolist() == [4, 4, 2]
        assert [source[key] for key in range(10)] == samples
        assert [*source.__getitems__([9, 0, 5, 0])] == [samples[9], samples[0], samples[5], samples[0]]
        with pickle.loads(pickle.dumps(source)) as copy:
            assert [*copy.__getitems__(range(10))] == samples
        assert sum(path.stat().st_size for path in Path(cache.folder).iterdir()) <= cache.max_bytes
    with MdsDataSource(tmp_path / "mds", cache=cache) as again:
        assert [*again.__getitems__(range(10))] == samples
        assert again.fingerprint() == source.fingerprint()


@pytest.mark.third_party
@pytest.mark.parametrize("is_compressed", [False, True])
def test_shards_may_be_in_a_bucket(tmp_path: Path, store: ObjectServer, is_compressed: bool) -> None:
    """The records and the fingerprint are those of the same folder on a disk."""
    folder = tmp_path / "mds"
    _, cache = compressed(folder) if is_compressed else (write_mds(folder, COLUMNS, SAMPLES, 4), None)
    for path in folder.glob("*"):
        store.objects[f"bucket/mds/{path.name}"] = path.read_bytes()
    with MdsDataSource("gs://bucket/mds/", cache=cache) as source, MdsDataSource(folder, cache=cache) as local:
        assert list(source.__getitems__(range(10))) == list(local.__getitems__(range(10)))
        assert source.fingerprint() == local.fingerprint()


def test_damage_of_a_compressed_shard_is_an_error_with_file_and_record(tmp_path: Path) -> None:
    """Cut, of another format, size or number of samples, written to, or removed: other shards stay readable."""
    samples, cache = compressed(tmp_path / "mds")
    shard = tmp_path / "mds" / "shard.00001.mds.zstd"
    whole = shard.read_bytes()
    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    other = zstandard.ZstdCompressor().compress(b"other content")
    for content in (whole[:-5], whole[:20], b"%PDF" + whole[4:], other, bomb, b""):
        shard.write_bytes(content)
        with MdsDataSource(tmp_path / "mds", cache=cache) as source:
            for key in (4, 7):
                with pytest.raises(DataSourceError, match=rf"record {key - 4} of .*shard.00001.mds.zstd.*key {key}\)"):
                    source[key]
            assert [source[key] for key in (0, 9)] == [samples[0], samples[9]]
            with pytest.raises(DataSourceError, match=r"shard\.00001\.mds\.zstd"):
                source.span_sizes()
    shard.write_bytes(whole)
    with MdsDataSource(tmp_path / "mds", cache=cache) as source:
        for change in (lambda path: os.utime(path, (1, 1)), Path.unlink):
            change(shard)
            with pytest.raises(DataSourceError, match=r"record key 5\)"):
                source[5]
    shard.write_bytes(whole)
    edit_index(tmp_path / "mds", 1, samples=3)
    with MdsDataSource(tmp_path / "mds", cache=cache) as source, pytest.raises(DataSourceError, match="has 4 records"):
        source[4]


def test_compressed_shards_need_a_cache_with_room_for_one(tmp_path: Path) -> None:
    """The error says how large it must be."""
    _, cache = compressed(tmp_path / "mds")
    with pytest.raises(ValueError, match=r"cache must be .*, because .*00000.mds.zstd' is compressed.*least \d+"):
        MdsDataSource(tmp_path / "mds")
    with pytest.raises(ValueError, match="at least the size of the largest shard"):
        MdsDataSource(tmp_path / "mds", cache=FileCache(cache.max_bytes // 2))
