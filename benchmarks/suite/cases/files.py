"""Records from ArrayRecord files: tokens and images."""

import io
from typing import Any

import numpy as np

from suite import data
from suite.case import Case, Contender, Goal, Pick
from suite.contenders import rates
from suite.scale import Scale
from suite.work import Map, RandomMap, Work

CROP = 224


def tokens_of(record: bytes) -> Any:
    """Returns the record as uint16 tokens, shape (512,)."""
    return np.frombuffer(record, np.uint16)


def tokens_in_graph(record: Any) -> Any:
    """Returns the same in TensorFlow's operations, for one record or many."""
    import tensorflow as tf  # noqa: PLC0415  (only where it is a contender)

    return tf.io.decode_raw(record, tf.uint16, fixed_length=data.TOKEN_BYTES)


def token_work(scale: Scale) -> Work:
    """Returns the pipeline of the tokens."""
    files = data.token_files(scale.pick(tiny=1024, quick=65_536, full=262_144))
    return Work(files, (Map(tokens_of, tokens_in_graph, tokens_in_graph),), 256)


def decode(record: bytes) -> dict[str, Any]:
    """Returns the image, uint8 of shape (256, 256, 3), and its label."""
    from PIL import Image  # noqa: PLC0415  (only the images need it)

    return {"image": np.asarray(Image.open(io.BytesIO(record[8:]))), "label": int.from_bytes(record[:8], "little")}


def crop_and_flip(element: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Returns a random part of the image, shape (224, 224, 3), mirrored every other time."""
    top, left = rng.integers(0, data.IMAGE_SIDE - CROP + 1, 2)
    image = element["image"][top : top + CROP, left : left + CROP]
    return {**element, "image": image[:, ::-1] if rng.random() < 0.5 else image}


def decode_in_graph(record: Any) -> dict[str, Any]:
    """Returns the same as `decode`, in TensorFlow's operations."""
    import tensorflow as tf  # noqa: PLC0415  (only where it is a contender)

    label = tf.io.decode_raw(tf.strings.substr(record, 0, 8), tf.int64)[0]
    return {"image": tf.io.decode_jpeg(tf.strings.substr(record, 8, -1), 3), "label": label}


def crop_and_flip_in_graph(element: dict[str, Any]) -> dict[str, Any]:
    """Returns the same as `crop_and_flip`, in TensorFlow's operations."""
    import tensorflow as tf  # noqa: PLC0415  (only where it is a contender)

    image = tf.image.random_crop(element["image"], (CROP, CROP, 3))
    return {**element, "image": tf.image.random_flip_left_right(image)}


def image_work(scale: Scale) -> Work:
    """Returns the pipeline of the images."""
    files = data.image_files(scale.pick(tiny=128, quick=1024, full=4096))
    return Work(files, (Map(decode, decode_in_graph), RandomMap(crop_and_flip, crop_and_flip_in_graph)), 64)


def labels_and_shapes(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns what does not depend on randomness, nor on whose JPEG decoder it was."""
    image, label = np.asarray(batch["image"]), np.asarray(batch["label"])
    if image.dtype != np.uint8 or int(image.max()) - int(image.min()) < 64:
        raise ValueError(f"These are no images: {image.dtype}, from {image.min()} to {image.max()}.")
    return {"label": label, "shape": np.broadcast_to(image.shape[1:], (len(label), 3))}


SHARDS = (1, 2, 3, 4)

CASES = (
    Case(
        name="tokens",
        title="1 KB records from ArrayRecord files, as uint16, batch 256",
        make_work=token_work,
        contenders=(
            *rates("read", "read singly", from_files=True),
            Contender("bare", mode="read singly", copies=2),
            Contender("pytorch_our_source"),
            Contender("pytorch_our_source", workers=2, mode="forkserver"),
        ),
        goals=(
            Goal("50 times Grain's DataLoader", 50, Pick("grain", mode="DataLoader")),
            Goal("50 times Grain, its Dataset too", 50, Pick("grain")),
            Goal("twice PyTorch", 2, Pick("pytorch")),
            Goal("twice tf.data, which shuffles a buffer only", 2, Pick("tensorflow")),
            Goal("0.6 of one bare C++ reader, without workers", 0.6, Pick("bare", copies=1), Pick("millstream", 0)),
            Goal("0.6 of two bare C++ readers, with 2 workers", 0.6, Pick("bare", copies=2), Pick("millstream", 2)),
        ),
    ),
    Case(
        name="images",
        title="JPEG 256 x 256 from ArrayRecord files: decode, crop, flip, batch 64",
        make_work=image_work,
        contenders=(*rates("loop", from_files=True), Contender("bare", mode="loop", copies=2)),
        goals=(
            Goal(
                "0.9 of two bare loops, with 2 workers",
                0.9,
                Pick("bare", mode="loop", copies=2),
                Pick("millstream", 2),
            ),
        ),
        view=labels_and_shapes,
    ),
    Case(
        name="shards",
        title="1 to 4 shards of the tokens at once on this machine, records of all shards together",
        make_work=token_work,
        contenders=tuple(
            contender
            for copies in SHARDS
            for contender in (
                Contender("millstream", threads=None, copies=copies),
                Contender("grain", threads=None, mode="DataLoader", copies=copies),
                Contender("pytorch", copies=copies),
                Contender("bare", mode="read singly", copies=copies),
            )
        ),
        goals=(
            Goal(
                "4 shards together at least as fast as 1",
                1,
                Pick("millstream", copies=1),
                Pick("millstream", copies=4),
            ),
        ),
    ),
)
