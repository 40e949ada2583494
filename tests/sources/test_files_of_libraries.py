"""Files that the library of each format has written: the readers find the values that were given to it.

`support/files/files_of_libraries.py` wrote them.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.sources import (
    BagzDataSource,
    Hdf5DataSource,
    LanceDataSource,
    MdsDataSource,
    MegatronDataSource,
    TfdsDataSource,
    TFRecordDataSource,
    WebDatasetDataSource,
    ZarrDataSource,
)
from support.files.files_of_libraries import COUNT, FOLDER, RECORDS, ROWS, SCORES, TEXTS, TOKENS
from support.streams import same

pytestmark = pytest.mark.third_party

NUMBERS = range(COUNT)


def all_of(source: Any) -> list[Any]:
    return [source[key] for key in range(len(source))]


def examples(path: Path) -> Any:
    """Returns the Examples of a file of records, decoded."""
    features: Any = {
        "tokens": millstream.VariableLengthFeature(np.int64),
        "score": millstream.FixedLengthFeature((), np.float32),
        "text": millstream.FixedLengthFeature((), bytes),
    }
    batch = millstream.decode_examples(features).map(all_of(TFRecordDataSource(path)))
    tokens = np.split(batch["tokens"].values, np.cumsum(batch["tokens"].lengths)[:-1])
    columns = {**batch, "tokens": tokens}
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def by_number(path: Path) -> Any:
    """Returns the records of a dataset of tfds, which it shuffles, in their order."""
    return sorted(
        all_of(TfdsDataSource(path / "small" / "1.0.0", "train")), key=lambda record: int(record["rows"][0, 0])
    )


CASES: dict[str, tuple[Callable[[Path], Any], Callable[[int], Any]]] = {
    "tfrecord.tfrecord": (TFRecordDataSource, RECORDS.__getitem__),
    "tfrecord.examples.tfrecord": (
        examples,
        lambda n: {"tokens": TOKENS[n].astype(np.int64), "score": np.float32(SCORES[n]), "text": TEXTS[n].encode()},
    ),
    "tfds": (
        by_number,
        lambda n: {
            "text": TEXTS[n].encode(),
            "rows": ROWS[n],
            "tokens": TOKENS[n].astype(np.int64),
            "label": np.int64(n % 2),
        },
    ),
    "bagz.bag": (BagzDataSource, RECORDS.__getitem__),
    "bagz.bagz": (BagzDataSource, RECORDS.__getitem__),
    "webdataset.tar": (
        lambda path: [
            record | {"json": json.loads(record["json"]), "npy": record["npy"][-12:]}
            for record in all_of(WebDatasetDataSource(path))
        ],
        lambda n: {
            "__key__": f"folder/{n:03d}",
            "txt": TEXTS[n].encode(),
            "bin": RECORDS[n],
            "json": {"n": n, "text": TEXTS[n]},
            "npy": ROWS[n].tobytes(),
        },
    ),
    "mds": (
        MdsDataSource,
        lambda n: {
            "text": TEXTS[n],
            "bytes": RECORDS[n],
            "n": n,
            "score": np.float64(SCORES[n]),
            "small": np.uint8(n),
            "json": {"n": n},
            "rows": ROWS[n],
            "tokens": TOKENS[n],
        },
    ),
    "megatron": (MegatronDataSource, TOKENS.__getitem__),
    "hdf5.h5": (
        lambda path: Hdf5DataSource({name: f"{path}/{name}" for name in HDF5}),
        lambda n: {name: make(n) for name, make in HDF5.items()},
    ),
    "lance": (
        LanceDataSource,
        lambda n: {
            "text": TEXTS[n],
            "rows": ROWS[n].reshape(6),
            "tokens": TOKENS[n],
            "score": np.float64(SCORES[n]),
        },
    ),
    **dict.fromkeys(
        ("zarr2.zarr", "zarr3.zarr"),
        (
            lambda path: ZarrDataSource({"rows": path / "rows", "score": path / "score", "n": path / "deep" / "n"}),
            lambda n: {"rows": ROWS[n], "score": np.float64(SCORES[n]), "n": np.int32(n)},
        ),
    ),
}

HDF5: dict[str, Callable[[int], Any]] = {
    **dict.fromkeys(("rows", "chunks", "gzip", "lzf"), ROWS.__getitem__),
    "text": lambda n: TEXTS[n].encode(),
    "images": RECORDS.__getitem__,
    "poses": lambda n: np.array([SCORES[n] * factor for factor in (1, 2, 3)], np.float32),
}


@pytest.mark.parametrize("name", CASES)
def test_values_are_those_that_the_library_was_given(name: str) -> None:
    """All records, in their order, in dtype and shape."""
    read, expected = CASES[name]
    records = read(FOLDER / name)
    assert len(records) == COUNT
    for number in NUMBERS:
        assert same(records[number], expected(number)), (records[number], expected(number))
