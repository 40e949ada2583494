"""The steps that the pipelines apply to a record.

A module of its own, as a training script's transforms would be: a worker process imports where a function comes from,
and should measure the loader, not the import of this suite. For the same reason `numpy.random` is in quotes here: NumPy
imports it when it is first named.
"""

from typing import Any

import numpy as np

TOKEN_BYTES = 1024
IMAGE_SIDE = 256
CROP = 224


def identity(value: Any) -> Any:
    return value


def add_fraction(value: int, rng: "np.random.Generator") -> float:
    return value + rng.random()


def add_fraction_in_graph(value: Any) -> Any:
    """Returns the same in TensorFlow's operations, for one value or many."""
    import tensorflow as tf  # noqa: PLC0415  (only where it is a contender)

    return tf.cast(value, tf.float64) + tf.random.uniform(tf.shape(value), dtype=tf.float64)


def is_even(value: Any) -> Any:
    return value % 2 == 0


def is_chosen(value: int) -> bool:
    """Says whether to keep a value, after some 30 µs of Python: about half of them are."""
    for _ in range(400):
        value = (value * 1_103_515_245 + 12_345) & 0x7FFFFFFF
    return value & 0x10000 > 0


def tokens_of(record: bytes) -> Any:
    """Returns the record as uint16 tokens, shape (512,)."""
    return np.frombuffer(record, np.uint16)


def tokens_in_graph(record: Any) -> Any:
    """Returns the same in TensorFlow's operations, for one record or many."""
    import tensorflow as tf  # noqa: PLC0415  (only where it is a contender)

    return tf.io.decode_raw(record, tf.uint16, fixed_length=TOKEN_BYTES)


def fields_of_json(record: dict[str, Any]) -> dict[str, Any]:
    """Returns the number and the tokens, uint16 of shape (100,)."""
    return {"id": record["id"], "tokens": np.array(record["tokens"], np.uint16)}


def fields_of_row(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the number and the features, float32 of shape (8,)."""
    return {"id": int(row["id"]), "features": np.array([float(row[f"x{column}"]) for column in range(8)], np.float32)}


def fields_of_row_in_graph(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the same in TensorFlow's operations, for one row or many."""
    import tensorflow as tf  # noqa: PLC0415  (only where it is a contender)

    features = [tf.strings.to_number(row[f"x{column}"]) for column in range(8)]
    return {"id": tf.strings.to_number(row["id"], tf.int64), "features": tf.stack(features, axis=-1)}


def fields_of_sample(sample: dict[str, Any]) -> dict[str, Any]:
    """Returns the label and the tokens, uint16 of shape (512,)."""
    return {"label": int(sample["cls"]), "tokens": tokens_of(sample["bin"])}


def decode(record: bytes) -> dict[str, Any]:
    """Returns the image, uint8 of shape (256, 256, 3), and its label."""
    import simplejpeg  # noqa: PLC0415  (only the images need it)

    return {"image": simplejpeg.decode_jpeg(record[8:]), "label": int.from_bytes(record[:8], "little")}


def crop_and_flip(element: dict[str, Any], rng: "np.random.Generator") -> dict[str, Any]:
    """Returns a random part of the image, shape (224, 224, 3), flipped every other time."""
    top, left = rng.integers(0, IMAGE_SIDE - CROP + 1, 2)
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
