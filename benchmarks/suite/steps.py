"""The functions that the pipelines call with a record.

A module of its own, as a training script's would be: a worker process imports where a function comes from, and should
measure the loader, not the import of this suite.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np

TOKEN_BYTES = 1024
CROP = 224
TEXT_TOKENS = 128


def identity(value: Any) -> Any:
    return value


def add_fraction(value: int, rng: "np.random.Generator") -> float:
    return value + rng.random()


def add_fraction_in_graph(value: Any) -> Any:
    """Returns the same in TensorFlow's operations, for one value or many."""
    import tensorflow as tf  # noqa: PLC0415  (only where it is a contender)

    return tf.cast(value, tf.float64) + tf.random.uniform(tf.shape(value), dtype=tf.float64)


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


def decode(record: bytes) -> dict[str, Any]:
    """Returns the image, uint8 of shape (375, 500, 3), and its label."""
    import simplejpeg  # noqa: PLC0415  (only the images need it)

    return {"image": simplejpeg.decode_jpeg(record[8:]), "label": int.from_bytes(record[:8], "little")}


def crop_and_flip(element: dict[str, Any], rng: "np.random.Generator") -> dict[str, Any]:
    """Returns a random part of the image, shape (224, 224, 3), flipped every other time."""
    height, width, _ = element["image"].shape
    top, left = int(rng.integers(height - CROP + 1)), int(rng.integers(width - CROP + 1))
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


class Tokenize:
    """The first 128 tokens of a text, uint16 of shape (128,): a byte-pair encoding that a file describes."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    @functools.cached_property
    def _tokenizer(self) -> Any:
        import tokenizers  # noqa: PLC0415  (only the texts need it)

        tokenizer = tokenizers.Tokenizer.from_file(self.path)
        tokenizer.enable_truncation(TEXT_TOKENS)
        tokenizer.enable_padding(length=TEXT_TOKENS)
        return tokenizer

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path}

    def __call__(self, record: dict[str, Any]) -> Any:
        return np.array(self._tokenizer.encode(record["text"]).ids, np.uint16)

    def of_list(self, records: list[dict[str, Any]]) -> list[Any]:
        """Returns the tokens of many texts, encoded in one call."""
        found = self._tokenizer.encode_batch_fast([record["text"] for record in records])
        return [np.array(encoding.ids, np.uint16) for encoding in found]
