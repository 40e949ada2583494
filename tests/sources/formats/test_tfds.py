"""Datasets of TensorFlow Datasets: splits, features, and files, without its library."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from millstream.core.columnar import ColumnarRecords
from millstream.errors import DataSourceError
from millstream.sources import TfdsDataSource
from millstream.sources.formats.tfds import Split, ranges_of
from millstream.transforms.batching.stack import stack
from support.faults.memory_limits import measured_peak
from support.files.record_files import write_tfds, write_tfrecord
from support.streams import same


def feature(kind: str, name: str, **described: Any) -> dict[str, Any]:
    """Returns a feature as `features.json` describes it."""
    return {"pythonClassName": f"tensorflow_datasets.core.features.{kind}", name: described}


def tensor(dtype: str, *shape: int, encoding: str = "none") -> dict[str, Any]:
    dimensions = {"dimensions": list(map(str, shape))} if shape else {}
    return feature("tensor_feature.Tensor", "tensor", dtype=dtype, encoding=encoding, shape=dimensions)


def features_dict(**members: Any) -> dict[str, Any]:
    return feature("features_dict.FeaturesDict", "featuresDict", features=members)


def sequence(member: dict[str, Any], length: int = -1) -> dict[str, Any]:
    return feature("sequence_feature.Sequence", "sequence", feature=member, length=str(length))


TEXT = feature("text_feature.Text", "text")
LABEL = feature("class_label_feature.ClassLabel", "classLabel", numClasses="3")
IMAGE = feature("image_feature.Image", "image", dtype="uint8", shape={"dimensions": ["-1", "-1", "3"]})
AUDIO = feature("audio_feature.Audio", "audio", dtype="int64")


def numbers(start: int, stop: int) -> list[dict[str, Any]]:
    return [{"n": number, "text": f"text {number}"} for number in range(start, stop)]


NUMBERS = features_dict(n=tensor("int32"), text=TEXT)
SPLITS = {"train": [numbers(0, 10), numbers(10, 10), numbers(10, 25)], "test": [numbers(100, 105)]}


def ids(source: TfdsDataSource) -> list[int]:
    return [int(record["n"]) for record in source.__getitems__(range(len(source)))]


@pytest.mark.parametrize("file_format", ["array_record", "tfrecord"])
def test_a_split_is_the_records_of_its_files(tmp_path: Path, file_format: str) -> None:
    """A split, from a folder or a builder, in both formats, has the records with the features' dtypes."""
    folder = write_tfds(tmp_path / "toy" / "1.0.0", NUMBERS, SPLITS, file_format)
    for dataset in (folder, str(folder), SimpleNamespace(data_dir=str(folder)), SimpleNamespace(data_dir=folder)):
        with TfdsDataSource(dataset, "train") as source:
            assert ids(source) == list(range(25))
            record = source[24]
            assert (record, record["n"].dtype) == ({"n": 24, "text": b"text 24"}, np.int32)
            # One of its files is empty.
            assert set(source.files) < set(map(str, folder.glob("*-train.*")))


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("train", range(25)),
        ("train[:10]", range(10)),
        ("train[8:12]", range(8, 12)),
        ("train[-3:]", range(22, 25)),
        ("train[:-20]", range(5)),
        ("train[1_0:]", range(10, 25)),
        ("train[:50%]", range(12)),
        ("train[50%:]", range(12, 25)),
        ("train[-10%:]", range(23, 25)),
        ("train[33.3%:66.6%]", range(8, 17)),
        ("test+train[:2]", [*range(100, 105), 0, 1]),
        ("train[:1] + train[:1]", [0, 0]),
        ("all", [*range(25), *range(100, 105)]),
    ],
)
def test_slices_of_splits_are_those_of_tfds(tmp_path: Path, split: str, expected: Any) -> None:
    """Numbers, percents rounded to the closest, from the end, and sums."""
    folder = write_tfds(tmp_path / "toy", NUMBERS, SPLITS)
    with TfdsDataSource(folder, split) as source:
        assert ids(source) == list(expected)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ("dev", "one of 'train', 'test', or 'all'"),
        ("train[:26]", "has 25 records, too few"),
        ("train[:110%]", "has 25 records, too few"),
        ("train[3:3]", "at least one record"),
        ("train[5:2]", "at least one record"),
        ("train[a:]", "record numbers or percents"),
        ("train[1.5:]", "record numbers or percents"),
        ("train[:3shard]", "record numbers or percents"),
        ("train[3]", "split must be a name"),
        ("", "split must be a name"),
    ],
)
def test_wrong_splits_are_errors(split: str, message: str) -> None:
    """A wrong split is an error with the rule and the splits or records that exist."""
    splits = {"train": Split("train", ["a", "b"], [10, 15]), "test": Split("test", ["c"], [5])}
    with pytest.raises(ValueError, match=message):
        ranges_of(split, splits)


FEATURES: dict[str, tuple[dict[str, Any], Callable[[int], Any], Callable[[int], Any]]] = {
    "label": (LABEL, lambda n: n % 3, lambda n: np.int64(n % 3)),
    "text": (TEXT, lambda n: f"é{n}", lambda n: f"é{n}".encode()),
    "image": (IMAGE, lambda n: b"png\0" * n, lambda n: b"png\0" * n),
    "uint8": (tensor("uint8"), lambda n: n, np.uint8),
    "bool": (tensor("bool"), lambda n: n % 2, lambda n: np.bool_(n % 2)),
    "uint64": (tensor("uint64"), lambda n: -1 - n, lambda n: np.uint64(2**64 - 1 - n)),
    "float64": (tensor("float64"), lambda n: n / 4, lambda n: np.float64(n / 4)),
    "float16": (tensor("float16"), lambda n: n / 4, lambda n: np.float16(n / 4)),
    "array": (
        tensor("float32", 2, 3),
        lambda n: np.arange(6.0) + n,
        lambda n: (np.arange(6, dtype=np.float32) + np.float32(n)).reshape(2, 3),
    ),
    "strings": (tensor("string", 2), lambda n: [b"a", b"%d" % n], lambda n: np.array([b"a", b"%d" % n], object)),
    "box": (
        {"boundingBox": {"dtype": "float32", "shape": {"dimensions": ["4"]}, "bboxFormat": "REL_YXYX"}},
        lambda n: [0.0, 0.25, 0.5, n],
        lambda n: np.array([0, 0.25, 0.5, n], np.float32),
    ),
    "sequence": (sequence(tensor("int32")), lambda n: list(range(n % 4)), lambda n: np.arange(n % 4, dtype=np.int32)),
    "fixed sequence": (sequence(tensor("int16"), 2), lambda n: [n, n], lambda n: np.array([n, n], np.int16)),
    "sequence of arrays": (
        sequence(tensor("int8", 2)),
        lambda n: [n] * (2 * (n % 3)),
        lambda n: np.full((n % 3, 2), n, np.int8),
    ),
    "sequence of texts": (
        sequence(TEXT),
        lambda n: ["w"] * (n % 3) or None,
        lambda n: np.array([b"w"] * (n % 3), object),
    ),
    "any length": (tensor("int64", -1, 2), lambda n: [n] * 4, lambda n: np.full((2, 2), n)),
    "bytes": (
        tensor("int16", 2, encoding="bytes"),
        lambda n: np.full(2, n, np.int16).tobytes(),
        lambda n: np.full(2, n, np.int16),
    ),
    "zlib": (
        tensor("int16", 2, encoding="zlib"),
        lambda n: zlib.compress(np.full(2, n, np.int16).tobytes()),
        lambda n: np.full(2, n, np.int16),
    ),
}


@pytest.mark.parametrize("name", FEATURES)
def test_each_feature_has_its_meaning(tmp_path: Path, name: str) -> None:
    """Each feature has its value and dtype alone and in batches, which equal their records stacked."""
    described, stored, expected = FEATURES[name]
    examples = [{"x": stored(number)} for number in range(7)]
    folder = write_tfds(tmp_path / "toy", features_dict(x=described), {"train": [examples]})
    with TfdsDataSource(folder, "train") as source:
        records = source.__getitems__([5, 0, 3])
        assert all(same(source[key], {"x": expected(key)}) for key in range(7))
        assert all(same(record, {"x": expected(key)}) for record, key in zip(records, [5, 0, 3], strict=True))
        if isinstance(records, ColumnarRecords):
            assert same(stack(records), stack([source[key] for key in (5, 0, 3)]))
            assert same(stack(records[1:]), stack([source[key] for key in (0, 3)]))
            assert same(records[1], source[0])


def test_features_within_features_keep_their_structure(tmp_path: Path) -> None:
    """Dicts in dicts, sequences of dicts as dicts of sequences, translations by language."""
    translation = {"pythonClassName": "…Translation", "translation": {"languages": ["en", "fr"]}}
    features = features_dict(
        a=features_dict(b=features_dict(c=LABEL), d=TEXT), s=sequence(features_dict(n=LABEL, t=TEXT)), t=translation
    )
    example = {"a/b/c": 2, "a/d": "d", "s/n": [1, 2], "s/t": ["x", "y"], "t/en": "yes", "t/fr": "oui"}
    folder = write_tfds(tmp_path / "toy", features, {"train": [[example]]})
    with TfdsDataSource(folder, "train") as source:
        expected = {
            "a": {"b": {"c": np.int64(2)}, "d": b"d"},
            "s": {"n": np.array([1, 2]), "t": np.array([b"x", b"y"], object)},
            "t": {"en": b"yes", "fr": b"oui"},
        }
        assert same(source[0], expected)
        assert same(stack(source.__getitems__([0, 0])), stack([source[0], source[0]]))


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (AUDIO, "Feature 'x' is Audio"),
        (sequence(sequence(LABEL)), "a sequence within a sequence"),
        (tensor("int64", -1, -1), "more than one unknown size"),
        (sequence(tensor("int8", 2, encoding="zlib")), "encoding 'zlib' in a sequence"),
        (tensor("bfloat17"), "dtype bfloat17"),
    ],
)
def test_features_that_are_not_supported_are_errors(tmp_path: Path, described: dict[str, Any], message: str) -> None:
    """An unsupported feature is an error at construction with its name and an alternative."""
    folder = write_tfds(tmp_path / "toy", features_dict(x=described), {"train": [[{"x": 1}]]})
    with pytest.raises(ValueError, match=message) as caught:
        TfdsDataSource(folder, "train")
    assert "tfds.data_source" in str(caught.value)


def test_what_is_not_a_prepared_dataset_is_an_error(tmp_path: Path) -> None:
    """A folder that is not a prepared dataset, of TFDS 4 and with files of a known format, is an error."""
    with pytest.raises(FileNotFoundError, match=r"Not a prepared dataset.*dataset_info\.json"):
        TfdsDataSource(tmp_path, "train")
    with pytest.raises(ValueError, match="read from local folders, got 's3://bucket/mnist"):
        TfdsDataSource("s3://bucket/mnist/3.0.1", "train")
    with pytest.raises(TypeError, match="folder of a prepared dataset, or a builder"):
        TfdsDataSource(3, "train")
    folder = write_tfds(tmp_path / "single", LABEL, SPLITS)
    with pytest.raises(ValueError, match=r"must be a FeaturesDict.*got ClassLabel"):
        TfdsDataSource(folder, "train")
    (folder / "dataset_info.json").write_text('{"fileFormat": "riegeli"}')
    with pytest.raises(DataSourceError, match="riegeli"):
        TfdsDataSource(folder, "train")


def one_file_named(template: str) -> dict[str, Any]:
    return {"name": "train", "shardLengths": ["3"], "filepathTemplate": template}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("dataset_info.json", None),
        ("dataset_info.json", [1]),
        ("dataset_info.json", {"fileFormat": ["tfrecord"]}),
        ("dataset_info.json", {"splits": [{"shardLengths": ["3"]}]}),
        ("dataset_info.json", {"splits": [{"name": "train", "shardLengths": ["three"]}]}),
        ("dataset_info.json", {"splits": "train"}),
        ("dataset_info.json", {"splits": [one_file_named("../toy/{SPLIT}")]}),
        ("dataset_info.json", {"splits": [one_file_named("/toy/{SPLIT}")]}),
        ("features.json", {"featuresDict": {"features": ["n"]}}),
        ("features.json", {"featuresDict": {"features": {"n": {"sequence": {}}}}}),
        ("features.json", {"featuresDict": {"features": {"n": {"tensor": {"shape": {}}}}}}),
    ],
)
def test_a_damaged_description_is_an_error_that_names_it(tmp_path: Path, name: str, content: Any) -> None:
    """A description of other types than expected is damaged, and so is one of files outside its folder."""
    folder = write_tfds(tmp_path / "toy", NUMBERS, SPLITS)
    (folder / name).write_text("{" if content is None else json.dumps(content))
    with pytest.raises(DataSourceError, match=f"{name}' is damaged: "):
        TfdsDataSource(folder, "train")


def test_a_damaged_record_is_an_error_with_file_and_record(tmp_path: Path) -> None:
    """One without a feature, one that is not an Example, one of another shape or size; all others can be read."""
    examples: list[dict[str, Any]] = [
        {"n": 1, "text": "a"},
        {"text": "b"},
        {"n": [1, 2], "text": "c"},
        {"n": 4, "text": "d"},
    ]
    folder = write_tfds(tmp_path / "toy", NUMBERS, {"train": [numbers(0, 2), examples]}, "tfrecord")
    with TfdsDataSource(folder, "train") as source:
        for key, message in ((3, "no feature 'n'"), (4, "2 values")):
            with pytest.raises(DataSourceError, match=rf"record {key - 2} of .*00001-of-00002.*key {key}\).*{message}"):
                source.__getitems__([0, key, 5])
        assert ids(TfdsDataSource(folder, "train[5:]+train[:3]")) == [4, 0, 1, 1]
    path = folder / "toy-train.tfrecord-00000-of-00002"
    write_tfrecord(path, [b"\xff\xff\xff", b"nonsense"])
    with (
        TfdsDataSource(folder, "train") as source,
        pytest.raises(DataSourceError, match=r"record 1 .*\(record key 1\)"),
    ):
        source.__getitems__([1])


def test_an_array_does_not_inflate_beyond_its_size(tmp_path: Path) -> None:
    """A hostile array is not decompressed beyond its shape; one that is too short or cut is an error, too."""
    whole = zlib.compress(bytes(4))
    stored = [whole, zlib.compress(bytes(1 << 26)), zlib.compress(bytes(3)), whole[:-1]]
    features = features_dict(x=tensor("int16", 2, encoding="zlib"))
    folder = write_tfds(tmp_path / "toy", features, {"train": [[{"x": array} for array in stored]]})
    with TfdsDataSource(folder, "train") as source:
        assert source[0]["x"].tolist() == [0, 0]
        for key, reason in enumerate(("inflate to 4 bytes", "inflate to 4 bytes", "cut short"), start=1):
            with measured_peak() as peak, pytest.raises(DataSourceError, match=rf"record key {key}\).*{reason}"):
                source[key]
            assert peak() < 1 << 20
