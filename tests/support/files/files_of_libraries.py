"""Small files written by the libraries of their formats, which tests/sources/files_of_libraries holds.

    python -P tests/support/files/files_of_libraries.py [NAME …]

writes those of the given names again, or all. Each needs the library that is named beside it, in any environment:

    tensorflow     tfrecord, tfds    pip install tensorflow tensorflow-datasets
    bagz           bagz              pip install bagz
    webdataset     webdataset        pip install webdataset
    streaming      mds               pip install mosaicml-streaming
    megatron.core  megatron          pip install megatron-core torch
    h5py           hdf5              pip install h5py
    lance          lance             pip install pylance
    zarr           zarr              pip install zarr
"""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[2] / "sources" / "files_of_libraries"
COUNT = 7
RECORDS = [b"", b"\0", "é\n".encode(), *(bytes([n]) * 20 * n for n in range(3, COUNT))]
TEXTS = [f"text {n} é" * (n % 3) for n in range(COUNT)]
ROWS = np.arange(COUNT * 6, dtype=np.int16).reshape(COUNT, 2, 3) - 20
TOKENS = [np.arange(n, 3 * n, dtype=np.uint16) * 1000 for n in range(1, COUNT + 1)]
SCORES = [n / 3 for n in range(COUNT)]


def write_tfrecord(path: Path) -> None:
    import tensorflow as tf

    with tf.io.TFRecordWriter(f"{path}.tfrecord") as writer:
        for record in RECORDS:
            writer.write(record)
    with tf.io.TFRecordWriter(f"{path}.examples.tfrecord") as writer:
        for n in range(COUNT):
            features = {
                "tokens": tf.train.Feature(int64_list=tf.train.Int64List(value=TOKENS[n].tolist())),
                "score": tf.train.Feature(float_list=tf.train.FloatList(value=[SCORES[n]])),
                "text": tf.train.Feature(bytes_list=tf.train.BytesList(value=[TEXTS[n].encode()])),
            }
            example = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(example.SerializeToString(deterministic=True))


def write_tfds(path: Path) -> None:
    import tensorflow as tf
    import tensorflow_datasets as tfds

    features = tfds.features.FeaturesDict(
        {
            "text": tfds.features.Text(),
            "rows": tfds.features.Tensor(shape=(2, 3), dtype=np.int16),
            "tokens": tfds.features.Sequence(np.int64),
            "label": tfds.features.ClassLabel(names=["no", "yes"]),
        }
    )
    columns = {
        "text": TEXTS,
        "rows": ROWS,
        "tokens": tf.ragged.constant([each.tolist() for each in TOKENS], dtype=tf.int64),
        "label": [n % 2 for n in range(COUNT)],
    }
    examples = tf.data.Dataset.from_tensor_slices(columns).map(
        lambda example: example | {"tokens": tf.ensure_shape(example["tokens"], [None])}
    )
    tfds.dataset_builders.store_as_tfds_dataset(
        "small", version="1.0.0", features=features, split_datasets={"train": examples}, data_dir=path
    )


def write_bagz(path: Path) -> None:
    import bagz

    for suffix in (".bag", ".bagz"):
        with bagz.Writer(f"{path}{suffix}") as writer:
            for record in RECORDS:
                writer.write(record)


def write_webdataset(path: Path) -> None:
    import webdataset

    with webdataset.TarWriter(f"{path}.tar", mtime=0) as writer:
        for n in range(COUNT):
            members = {"txt": TEXTS[n], "bin": RECORDS[n], "json": {"n": n, "text": TEXTS[n]}, "npy": ROWS[n]}
            writer.write({"__key__": f"folder/{n:03d}", **members})


def write_mds(path: Path) -> None:
    from streaming import MDSWriter

    columns = {
        "text": "str",
        "bytes": "bytes",
        "n": "int",
        "score": "float64",
        "small": "uint8",
        "json": "json",
        "rows": "ndarray:int16:2,3",
        "tokens": "ndarray:uint16",
    }
    with MDSWriter(out=str(path), columns=columns, size_limit=800) as writer:
        for n in range(COUNT):
            record = {"text": TEXTS[n], "bytes": RECORDS[n], "n": n, "score": SCORES[n], "small": np.uint8(n)}
            writer.write(record | {"json": {"n": n}, "rows": ROWS[n], "tokens": TOKENS[n]})


def write_megatron(path: Path) -> None:
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{path}.bin", dtype=np.uint16)
    for tokens in TOKENS:
        builder.add_item(torch.from_numpy(tokens.astype(np.int64)))
        builder.end_document()
    builder.finalize(f"{path}.idx")


def write_hdf5(path: Path) -> None:
    import h5py

    with h5py.File(f"{path}.h5", "w", userblock_size=512) as file:
        file["rows"] = ROWS
        file.create_dataset("chunks", data=ROWS, chunks=(3, 2, 3))
        file.create_dataset("gzip", data=ROWS, chunks=(3, 2, 3), compression="gzip", shuffle=True)
        file.create_dataset("lzf", data=ROWS, chunks=(2, 2, 3), compression="lzf")
        file["text"] = TEXTS
        images = file.create_dataset("images", (COUNT,), h5py.vlen_dtype(np.uint8))
        for n, record in enumerate(RECORDS):
            images[n] = np.frombuffer(record, np.uint8)
        poses = file.create_dataset("poses", (COUNT,), np.dtype(("<f4", 3)))
        poses[...] = np.outer(SCORES, [1, 2, 3])


def write_lance(path: Path) -> None:
    import lance
    import pyarrow as pa

    table = pa.table(
        {
            "text": TEXTS,
            "rows": pa.array(ROWS.reshape(COUNT, 6).tolist(), pa.list_(pa.int16(), 6)),
            "tokens": pa.array([each.tolist() for each in TOKENS], pa.list_(pa.uint16())),
            "score": SCORES,
        }
    )
    lance.write_dataset(table, path)


def write_zarr(path: Path) -> None:
    import zarr

    for version in (2, 3):
        group = zarr.open_group(f"{path}{version}.zarr", mode="w", zarr_format=version)
        group.create_array("rows", data=ROWS, chunks=(3, 2, 3))
        group.create_array("score", data=np.array(SCORES), chunks=(COUNT,), compressors=None)
        group.create_array("deep/n", data=np.arange(COUNT, dtype=">i4"), chunks=(2,))


WRITERS: dict[str, Callable[[Path], None]] = {
    name.removeprefix("write_"): write for name, write in list(globals().items()) if name.startswith("write_")
}


def main(*names: str) -> None:
    for name in names or WRITERS:
        for old in FOLDER.glob(f"{name}*"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        WRITERS[name](FOLDER / name)


if __name__ == "__main__":
    main(*sys.argv[1:])
