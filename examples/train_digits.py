"""Train on real images, get killed, resume: and get exactly the batches that would have come.

    python examples/train_digits.py

Three processes train the same small JAX model on the same handwritten digits:

    A   runs to the end, undisturbed.
    B   is killed with SIGKILL somewhere in the middle of an epoch.
    C   is a fresh process that goes on from B's newest checkpoint, which holds the model and the loader's place.

Every process tells, at every step, the loss, which records it trained on, and a checksum of their augmented pixels.
If B and C together differ from A in any of them, in a single bit, this script says so and fails.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import app, flags, logging
from array_record.python.array_record_module import ArrayRecordWriter
from tqdm import tqdm

import millstream
from millstream.checkpoint import CheckpointRestore, CheckpointSave

MODE = flags.DEFINE_enum("mode", "demo", ["demo", "train"], "demo: all three runs. train: one of them.")
OUTPUT = flags.DEFINE_string("output", str(Path(__file__).parent / "output"), "The folder for the records.")
CHECKPOINTS = flags.DEFINE_string("checkpoints", None, "The folder for the checkpoints of --mode=train.")
STEPS = flags.DEFINE_integer("steps", 600, "How many batches to train on.", lower_bound=1)
CHECKPOINT_EVERY = flags.DEFINE_integer("checkpoint_every", 40, "Steps between two checkpoints.", lower_bound=1)
KILL_AT = flags.DEFINE_integer("kill_at", 340, "The step at which B is killed.", lower_bound=1)
WORKER_COUNT = flags.DEFINE_integer("worker_count", 0, "Processes that load the batches.", lower_bound=0)
SEED = flags.DEFINE_integer("seed", 0, "Of the shuffle, the augmentation and the model.", lower_bound=0)

BATCH_SIZE = 64
SIDE = 8  # Images have 8 x 8 pixels, each from 0 to 16.

# ---- The records: one per image, 64 pixels and the label, a byte each --------------------------------------------


def write_digits(folder: Path) -> None:
    """Writes scikit-learn's 1,797 handwritten digits as ArrayRecord files, unless they are there."""
    from sklearn.datasets import load_digits  # noqa: PLC0415  (takes a second to import: only for the first run)

    folder.mkdir(parents=True, exist_ok=True)
    images, labels = load_digits(return_X_y=True)
    records = [bytes([*image, label]) for image, label in zip(images.astype(np.uint8), labels, strict=True)]
    train = [record for number, record in enumerate(records) if number % 6]
    for part in range(4):
        write_records(folder / f"train-{part}-of-4.array_record", train[part::4])
    write_records(folder / "held_out-0-of-1.array_record", records[::6])


def write_records(path: Path, records: Iterable[bytes]) -> None:
    """Writes a file that is either complete or not there: a killed run never leaves half of one."""
    partial = path.with_suffix(".partial")
    writer = ArrayRecordWriter(str(partial), "group_size:1")  # Each record can be read alone: a shuffle needs that.
    for record in records:
        writer.write(record)
    writer.close()
    partial.replace(path)


# ---- The pipeline ------------------------------------------------------------------------------------------------


def decode(record: bytes) -> dict[str, Any]:
    """Returns the image, float32 of shape (8, 8) from 0 to 1, and its label."""
    values = np.frombuffer(record, np.uint8)
    return {"image": values[:-1].reshape(SIDE, SIDE).astype(np.float32) / 16, "label": values[-1].astype(np.int32)}


class ShiftAndBlur(millstream.RandomMapTransform):
    """Moves the image by up to one pixel in each direction and adds a little noise."""

    def random_map(self, element: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Returns a new element: whatever is random comes from `rng`, so it comes again after a resume."""
        row, column = rng.integers(0, 3, size=2)
        moved = np.pad(element["image"], 1)[row : row + SIDE, column : column + SIDE]
        return {**element, "image": moved + rng.normal(0, 0.05, moved.shape).astype(np.float32)}


def training_loader() -> millstream.DataLoader:
    """Returns the loader of endless, shuffled, augmented batches."""
    source = millstream.ArrayRecordDataSource(f"{OUTPUT.value}/digits/train-*.array_record")
    return millstream.DataLoader(
        data_source=source,
        sampler=millstream.IndexSampler(len(source), shuffle=True, seed=SEED.value),
        operations=[decode, ShiftAndBlur(), millstream.Batch(BATCH_SIZE, drop_remainder=True)],
        worker_count=WORKER_COUNT.value,
    )


def evaluation_loader() -> millstream.DataLoader:
    """Returns the loader of the held-out images: each of them once, in order, the last batch a short one."""
    source = millstream.ArrayRecordDataSource(f"{OUTPUT.value}/digits/held_out-*.array_record")
    return millstream.load(source, num_epochs=1, transformations=[decode], batch_size=BATCH_SIZE)


# ---- The model: a small convolutional network, trained by gradient descent with momentum ------------------------
