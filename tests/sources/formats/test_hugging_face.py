"""Hugging Face datasets: as a source of columns, and as they are."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pyarrow as pa
import pytest

import millstream
from millstream.core.columnar import ColumnarRecords
from millstream.errors import DataSourceError, StackError
from millstream.sources import ConcatenatedDataSource, HuggingFaceDataSource, InMemoryDataSource
from millstream.transforms.batching.stack import stack
from support.streams import comparable

pytestmark = pytest.mark.third_party

ROWS = 50


def columns(start: int = 0) -> dict[str, Any]:
    """Returns columns of the usual kinds."""
    numbers = range(start, start + ROWS)
    return {
        "id": list(numbers),
        "text": [f"row {number} é" for number in numbers],
        "tokens": [[number] * 20 for number in numbers],
        "ragged": [[number] * (number % 4) for number in numbers],
        "flag": [number % 3 == 0 for number in numbers],
        "maybe": [None if number % 5 == 0 else number / 2 for number in numbers],
    }


@pytest.fixture
def dataset(tmp_path: Path) -> datasets.Dataset:
    """A dataset in files that are mapped, in record batches of seven rows."""
    made = datasets.Dataset.from_dict(columns())
    return made.map(lambda row: row, cache_file_name=str(tmp_path / "mapped.arrow"), writer_batch_size=7)


def plain(value: Any) -> Any:
    """Returns a record with Python's own numbers and lists."""
    if isinstance(value, dict):
        return {name: plain(member) for name, member in value.items()}
    if isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim):
        return [plain(member) for member in value]
    return value.item() if isinstance(value, np.generic | np.ndarray) else value


def every(source: Any) -> list[Any]:
    return [plain(record) for record in source.__getitems__(range(len(source)))]


CHANGES: dict[str, Callable[[Any], Any]] = {
    "plain": lambda dataset: dataset,
    "shuffled": lambda dataset: dataset.shuffle(seed=1),
    "selected": lambda dataset: dataset.shuffle(seed=1).select(range(3, 40, 2)),
    "repeated": lambda dataset: dataset.select([5, 3, 3, 0]),
    "range": lambda dataset: dataset.select(range(10, 20)),
    "filtered": lambda dataset: dataset.filter(lambda row: row["id"] % 2 == 0, keep_in_memory=True),
    "removed": lambda dataset: dataset.remove_columns(["text"]),
    "columns": lambda dataset: dataset.with_format("numpy", columns=["tokens", "id"]),
    "two": lambda dataset: datasets.concatenate_datasets([dataset, datasets.Dataset.from_dict(columns(100))]),
    "cast": lambda dataset: dataset.cast_column("id", datasets.Value("int16")),
    "memory": lambda dataset: datasets.Dataset.from_dict(dataset.to_dict()).select([9, 2]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_records_are_those_of_the_dataset(dataset: datasets.Dataset, name: str) -> None:
    """The records are the dataset's after any change, alone and in batches, which are what the records stack to."""
    changed = CHANGES[name](dataset)
    expected = [{name: row[name] for name in changed.format["columns"]} for row in changed.with_format(None).to_list()]
    source = HuggingFaceDataSource(changed)

    assert every(source) == expected
    assert [plain(source[key]) for key in range(len(source))] == expected
    assert len(source) == len(changed)
    copy = pickle.loads(pickle.dumps(source))
    assert (every(copy), copy.fingerprint()) == (expected, source.fingerprint())
    assert name in {"memory", "two"} or len(pickle.dumps(source)) < 10_000  # Of mapped files, their names.
    columnar = HuggingFaceDataSource(changed.select_columns(["id", "tokens"]))
    keys = np.random.default_rng(0).integers(0, len(changed), 40)
    records = columnar.__getitems__(keys)
    assert isinstance(records, ColumnarRecords)
    assert comparable(records.stack(np.empty)) == comparable(stack([columnar[key] for key in keys]))


def test_numbers_keep_the_width_of_their_column() -> None:
    """Numbers, booleans, times and arrays of a fixed shape have NumPy's dtype of the column."""
    image = np.arange(6, dtype=np.float32).reshape(2, 3)
    kinds: dict[str, tuple[Any, Any, str]] = {
        "small": (datasets.Value("uint8"), 7, "|u1"),
        "flag": (datasets.Value("bool"), True, "|b1"),
        "when": (datasets.Value("timestamp[s]"), 60, "<M8[s]"),
        "label": (datasets.ClassLabel(names=["no", "yes"]), 1, "<i8"),
        "image": (datasets.Array2D((2, 3), "float32"), image, "<f4"),
        "fixed": (datasets.Sequence(datasets.Value("int16"), length=2), [1, 2], "<i2"),
    }
    features = datasets.Features({name: feature for name, (feature, _, _) in kinds.items()})
    rows = {name: [value] for name, (_, value, _) in kinds.items()}
    record = HuggingFaceDataSource(datasets.Dataset.from_dict(rows, features=features))[0]

    for name, (_, _, dtype) in kinds.items():
        assert np.asarray(record[name]).dtype.str == dtype
    assert record["image"].tolist() == image.tolist()


def test_arrays_of_a_fixed_shape_keep_it_with_nulls() -> None:
    """They are then arrays of objects; a missing row of an array is a row of None, and a missing array None."""
    features = datasets.Features({"x": datasets.Array2D((2, 2), "int32")})
    rows = [[[1, 2], [3, 4]], [[1, None], [3, 4]], [None, [1, 2]], None]
    source = HuggingFaceDataSource(datasets.Dataset.from_dict({"x": rows}, features=features))
    whole, null, missing, none = (record["x"] for record in source.__getitems__(range(4)))
    assert (whole.dtype, whole.tolist()) == (np.int32, rows[0])
    assert (null.dtype, null.tolist()) == (object, rows[1])
    assert missing.tolist() == [[None, None], [1, 2]]
    assert none is None
    assert source[2]["x"].tolist() == missing.tolist()


def test_a_struct_may_have_no_members() -> None:
    """A struct without members is an empty dict, or None if it is null."""
    table = pa.table({"empty": pa.array([{}, None, {}], pa.struct([])), "id": [0, 1, 2]})
    source = HuggingFaceDataSource(datasets.Dataset(table))
    assert [record["empty"] for record in every(source)] == [{}, None, {}]
    assert source[2] == {"empty": {}, "id": 2}


def test_images_are_decoded_by_their_feature() -> None:
    """Images are decoded in columns, lists and dicts; a missing one is None; decode=False leaves bytes."""
    red = PIL.Image.new("RGB", (3, 2), "red")
    features = datasets.Features(
        {"image": datasets.Image(), "all": datasets.Sequence(datasets.Image()), "in": {"image": datasets.Image()}}
    )
    rows = {"image": [red, None], "all": [[red, red], []], "in": [{"image": red}, {"image": None}]}
    dataset = datasets.Dataset.from_dict(rows, features=features)
    first, second = HuggingFaceDataSource(dataset).__getitems__([0, 1])

    assert [first["image"].getpixel((2, 1)), first["in"]["image"].size] == [(255, 0, 0), (3, 2)]
    assert [image.size for image in first["all"]] == [(3, 2), (3, 2)]
    assert second == {"image": None, "all": [], "in": {"image": None}}
    stored = HuggingFaceDataSource(dataset.cast_column("image", datasets.Image(decode=False)))[0]["image"]
    assert stored["bytes"].startswith(b"\x89PNG")


def test_the_fingerprint_is_that_of_the_content(dataset: datasets.Dataset, tmp_path: Path) -> None:
    """A copy elsewhere has the same fingerprint; other rows, columns or orders have others."""
    dataset.save_to_disk(str(tmp_path / "saved"))
    saved = datasets.load_from_disk(str(tmp_path / "saved"))
    same = HuggingFaceDataSource(saved).fingerprint()
    others = [dataset.select(range(49)), dataset.remove_columns(["flag"]), dataset.shuffle(seed=0)]

    assert same == HuggingFaceDataSource(dataset).fingerprint()
    assert len({same, *(HuggingFaceDataSource(other).fingerprint() for other in others)}) == 4


@pytest.mark.parametrize("is_shuffled", [False, True])
def test_a_flipped_byte_is_an_error_with_file_and_record_or_another_value(tmp_path: Path, is_shuffled: bool) -> None:
    """Arrow files have no checksums; at many places, no record is lost, and no error is without its name."""
    rows = {
        "n": [*range(50)],
        "text": [f"text {n} " * (n % 5) for n in range(50)],
        "list": [[n] * (n % 4) for n in range(50)],
        "member": [{"x": n % 2 == 0, "y": [f"{n}"]} for n in range(50)],
    }
    folder = tmp_path / "dataset"
    datasets.Dataset.from_dict(rows).save_to_disk(folder)
    (path,) = folder.glob("*.arrow")
    whole = path.read_bytes()
    reader = pa.BufferReader(whole)
    pa.ipc.read_schema(reader)  # What describes the columns is for the library to check.
    rng = np.random.default_rng(0)
    count = 0
    num_places = 20 if is_shuffled else 60
    for place in rng.choice(np.arange(reader.tell(), len(whole)), num_places, replace=False).tolist():
        damaged = bytearray(whole)
        damaged[place] ^= int(rng.integers(1, 256))
        (tmp_path / "new").write_bytes(damaged)
        (tmp_path / "new").replace(path)  # The file that an earlier source has mapped stays as it is.
        try:
            dataset = datasets.load_from_disk(folder)
        except (ValueError, OSError, MemoryError):
            continue  # The library refuses it.
        source = HuggingFaceDataSource(dataset.shuffle(seed=1) if is_shuffled else dataset)
        assert len(source) == 50
        error_of(HuggingFaceDataSource.fingerprint, source)
        wrong = {f"(record key {key})" for key in range(50) if error_of(source.__getitem__, key)}
        for read in (every, lambda source: stack(source.__getitems__(range(50)))):
            text = error_of(read, source)
            assert (str(path) in text and any(key in text for key in wrong)) if wrong else not text
        count += bool(wrong)
    assert count > num_places // 12


def error_of(read: Callable[[Any], Any], argument: Any) -> str:
    """Returns the text of the error of damaged values; empty if they are read, or do not stack."""
    try:
        read(argument)
    except DataSourceError as error:
        return str(error)
    except StackError:
        return ""
    return ""


def test_what_is_not_a_dataset_is_refused_with_advice(dataset: datasets.Dataset) -> None:
    """Each lookalike gets the words for it."""
    for lookalike, message in (
        ([1], "got list"),
        (datasets.DatasetDict({"train": dataset}), "Choose one of its splits: 'train'"),
        (dataset.to_iterable_dataset(), "without streaming=True"),
        (dataset.with_transform(lambda batch: batch), "must not have a transform"),
    ):
        with pytest.raises(TypeError, match=message):
            HuggingFaceDataSource(lookalike)
    assert len(HuggingFaceDataSource(dataset.select([]))) == 0


def words(record: Any) -> Any:
    """Returns a record, or a table of one row, in a form that compares."""
    if isinstance(record, pa.Table):
        return record.to_pylist()
    return record.to_dict("list") if hasattr(record, "to_dict") else plain(record)


@pytest.mark.parametrize("kind", [None, "numpy", "arrow", "pandas"])
@pytest.mark.parametrize("place", ["alone", "held", "concatenated"])
def test_a_dataset_of_any_format_is_a_source_by_itself(dataset: datasets.Dataset, kind: str | None, place: str) -> None:
    """A record is what `dataset[key]` gives, also where many are read at once."""
    dataset = dataset.remove_columns(["maybe", "ragged", "tokens"]).with_format(kind)
    source: Any = dataset
    if place != "alone":
        source = InMemoryDataSource(dataset) if place == "held" else ConcatenatedDataSource([dataset])
    sampler = millstream.IndexSampler(ROWS, shuffle=True, seed=0, num_epochs=1)
    loader = millstream.DataLoader(
        data_source=source,
        sampler=sampler,
        operations=[lambda record: [record]],
        shard_options=millstream.NoSharding(),
    )
    keys = sampler.record_keys(0, ROWS).tolist()

    assert [words(record) for (record,) in loader] == [words(dataset[key]) for key in keys]
    assert words(dataset[keys[0]]) is not None


@pytest.mark.parametrize("worker_count", [0, 1])
@pytest.mark.parametrize("operations", [[], [lambda table: table]], ids=["batched", "mapped"])
def test_arrow_tables_batch_to_a_table(dataset: datasets.Dataset, worker_count: int, operations: list[Any]) -> None:
    """The batch of a dataset `with_format("arrow")` is the table of its rows, with or without an operation before."""
    loader = millstream.load(
        dataset.with_format("arrow"),
        num_epochs=1,
        shuffle=True,
        seed=0,
        transformations=operations,
        batch_size=20,
        worker_count=worker_count,
    )
    with iter(loader) as iterator:
        batches = list(iterator)

    for step, batch in enumerate(batches):
        rows = [dataset[key] for key in loader.record_keys(step).tolist()]
        assert batch.schema == dataset.data.schema
        assert batch.to_pylist() == rows
    assert len(batches) == 3
