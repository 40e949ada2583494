"""The operations that decode `tf.train.Example`: batches of them into columns, or one into its values."""

from collections.abc import Mapping
from typing import Any, final

import numpy as np

from millstream.tf_example.columns import decode_columns, decode_record
from millstream.tf_example.features import FixedLengthFeature, VariableLengthFeature
from millstream.transforms.base import Map


def decode_examples(features: "Mapping[str, FixedLengthFeature | VariableLengthFeature]") -> "Map[Any, Any]":
    """Returns an operation that decodes a batch of serialised `tf.train.Example`s into columns, without TensorFlow.

    Put it after `Batch`. If operations before that need the values, such as those that crop images, put
    `decode_example` there instead. It returns a dict with an
    array of shape (n, *shape) for each fixed-length feature, and a `RaggedColumn` for each variable-length feature.
    Other features of the Examples are skipped. If an Example has a feature twice, the last one counts.

    Args:
        features: the features to decode, by name.

    Raises:
        TypeError: features is not a dict of these two classes.
        ValueError: features is empty.

    The operation raises ValueError, with the position in the batch, for an element that is not an Example, lacks a
    feature, or has a wrong number or type of values.

    Examples:
        >>> records = [millstream.encode_example({"label": label, "tokens": [label] * label}) for label in (1, 2)]
        >>> features = {
        ...     "label": millstream.FixedLengthFeature((), np.int64),
        ...     "tokens": millstream.VariableLengthFeature(np.int64),
        ... }
        >>> operations = [millstream.Batch(2), millstream.decode_examples(features)]
        >>> next(iter(millstream.load(records, transformations=operations)))
        {'label': array([1, 2]), 'tokens': RaggedColumn(values=array([1, 2, 2]), lengths=array([1, 2]))}
    """
    return _DecodeExamples(features)


def decode_example(features: "Mapping[str, FixedLengthFeature | VariableLengthFeature]") -> "Map[Any, Any]":
    """Returns an operation that decodes one serialised `tf.train.Example` into a dict of its values.

    Put it before the operations that need the values of a record, such as a decoder of images. A feature of shape ()
    is a NumPy scalar, or `bytes`; another fixed-length feature an array of its shape; a variable-length feature an
    array of shape (n,), of objects if its values are bytes. Other features are skipped.

    Args:
        features: the features to decode, by name.

    Raises:
        TypeError: features is not a dict of these two classes.
        ValueError: features is empty.

    The operation raises ValueError for bytes that are not an Example, that lack a feature, or have a wrong number or
    type of values.

    Examples:
        >>> record = millstream.encode_example({"image": b"JPEG", "label": 3, "tokens": [5, 6]})
        >>> decode = millstream.decode_example(
        ...     {
        ...         "image": millstream.FixedLengthFeature((), bytes),
        ...         "label": millstream.FixedLengthFeature((), np.int64),
        ...         "tokens": millstream.VariableLengthFeature(np.int64),
        ...     }
        ... )
        >>> decode.map(record)
        {'image': b'JPEG', 'label': np.int64(3), 'tokens': array([5, 6])}
    """
    return _DecodeExample(features)


def _checked(features: Any) -> "dict[str, FixedLengthFeature | VariableLengthFeature]":
    if not isinstance(features, Mapping):
        raise TypeError(f"features must be a dict from names to features, got {type(features).__name__}.")
    for name, feature in features.items():
        if not isinstance(name, str) or not isinstance(feature, FixedLengthFeature | VariableLengthFeature):
            raise TypeError(
                f"features must map names to FixedLengthFeature or VariableLengthFeature, got {feature!r} for {name!r}."
            )
    if not features:
        raise ValueError("features must name at least one feature, got none.")
    return dict(features)


@final
class _DecodeExample(Map[Any, Any]):
    """The operation that `decode_example` returns."""

    def __init__(self, features: "Mapping[str, FixedLengthFeature | VariableLengthFeature]") -> None:
        self.features = _checked(features)

    def __repr__(self) -> str:
        return f"decode_example({', '.join(self.features)})"

    def map(self, element: Any, /) -> dict[str, Any]:
        if not isinstance(element, bytes):
            raise TypeError(
                f"decode_example needs a record of bytes, got {type(element).__name__}. Use decode_examples after "
                "Batch."
            )
        return decode_record(self.features, element)


@final
class _DecodeExamples(Map[Any, Any]):
    """The operation that `decode_examples` returns."""

    def __init__(self, features: "Mapping[str, FixedLengthFeature | VariableLengthFeature]") -> None:
        self.features = _checked(features)

    def __repr__(self) -> str:
        return f"decode_examples({', '.join(self.features)})"

    def map(self, batch: Any, /) -> dict[str, Any]:
        return decode_columns(self.features, _examples(batch))


def _examples(batch: Any) -> list[bytes]:
    examples = batch.tolist() if isinstance(batch, np.ndarray) else batch
    if not isinstance(examples, list | tuple) or not all(isinstance(example, bytes) for example in examples):
        raise TypeError(
            f"decode_examples needs batches of bytes, got {type(batch).__name__}. Put it directly after Batch, or use "
            "decode_example for single records."
        )
    return list(examples)
