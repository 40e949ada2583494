"""The files that the examples in docstrings read."""

from pathlib import Path

import h5py
import lance
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

import millstream
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

WORDS = [b"one", b"two", b"three"]


def write_docstring_files(folder: Path) -> None:
    """Writes them into a folder: small, the same in each run."""
    write_array_record(folder / "train-0.array_record", WORDS)
    (folder / "people.csv").write_text("name,age\nAda,36\nAlan,41\n")
    (folder / "poem.txt").write_text("first line\nsecond line\n")
    (folder / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    (folder / "damaged.jsonl").write_text('{"text": "one"}\n{"text": "tw\n')
    write_bagz(folder / "train.bagz", WORDS)
    write_tfrecord(folder / "train.tfrecord", [millstream.encode_example({"label": label}) for label in range(8)])
    write_tar(folder / "train-0.tar", [("000/17.txt", b"a cat"), ("000/17.cls", b"0"), ("000/18.txt", b"a dog")])
    samples = [{"label": bytes([n, *bytes(7)]), "text": text} for n, text in enumerate((b"one", b"two", b"three"))]
    write_mds(folder / "mds", {"label": "int", "text": "str"}, samples, 2)
    write_megatron(folder / "corpus_text_document", [np.arange(length, dtype=np.uint16) for length in (3, 4)])
    with h5py.File(folder / "demos.hdf5", "w") as file:
        for name in ("demo_0", "demo_1"):
            file[f"data/{name}/image"] = np.zeros((3, 8, 8, 3), np.uint8)
            file[f"data/{name}/grip"] = np.arange(3, 6, dtype=np.float32)
    people = {"name": ["Ada", "Grace", "Alan"], "age": [36, 39, 41]}
    lance.write_dataset(pa.table(people), folder / "people.lance")
    write_zarr(folder / "digits.zarr" / "image", np.zeros((10, 8, 8), np.uint8), 4)
    write_zarr(folder / "digits.zarr" / "label", np.arange(10, dtype=np.int32), 4)
    rows = {"tokens": [[number] * 8 for number in range(1000)], "label": [number % 10 for number in range(1000)]}
    pq.write_table(pa.table(rows), folder / "train-0.parquet", row_group_size=100)
    for name in ("cat/1.png", "cat/2.png", "dog/1.png"):
        path = folder / "images" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.zeros((8, 8, 3), np.uint8)).save(path)
    label = {"pythonClassName": "tensorflow_datasets.ClassLabel", "classLabel": {"numClasses": "10"}}
    features = {"featuresDict": {"features": {"label": label}}}
    records = [{"label": number} for number in range(10)]
    write_tfds(folder / "tensorflow_datasets" / "digits" / "1.0.0", features, {"train": [records]}, "tfrecord")
