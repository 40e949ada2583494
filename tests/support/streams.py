"""Comparing streams: elements to the last byte, and the error at their end."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from millstream import PaddedBatch


def drain(stream: Iterator[Any], limit: int = 100_000) -> tuple[list[Any], type[BaseException] | None]:
    """Returns the elements of a stream, as comparable values, and the type of the error that ends it, if one does."""
    elements: list[Any] = []
    try:
        for element in stream:
            elements.append(comparable(element))
            if len(elements) == limit:
                break
    except Exception as error:  # noqa: BLE001  (any error may end a stream)
        return elements, type(error)
    return elements, None


def same(left: Any, right: Any) -> bool:
    return bool(comparable(left) == comparable(right))


def comparable(element: Any) -> Any:
    """Returns a value that is equal to another's exactly if the elements agree in structure, dtype, shape and bytes."""
    if isinstance(element, np.ndarray):
        has_objects = element.dtype.hasobject
        content = [comparable(value) for value in element.ravel().tolist()] if has_objects else element.tobytes()
        # By repr: the short code of a dtype leaves out the names of fields, and takes bfloat16 for raw bytes.
        return ("array", repr(element.dtype), element.shape, content)
    if isinstance(element, (np.generic, float, complex)):
        return ("number", repr(np.asarray(element).dtype), type(element).__name__, np.asarray(element).tobytes())
    if isinstance(element, dict):
        # JAX sorts the keys of what it makes.
        return ("dict", {key: comparable(value) for key, value in element.items()})
    if isinstance(element, (list, tuple)):
        return (type(element).__name__, [comparable(value) for value in element])
    if dataclasses.is_dataclass(element) and not isinstance(element, type):
        fields = {field.name: comparable(getattr(element, field.name)) for field in dataclasses.fields(element)}
        return (type(element).__name__, fields)
    return (type(element).__name__, element)


def equal_streams(expected: Sequence[Any], actual: Sequence[Any]) -> bool:
    """Says whether two lists of elements are the same to the last byte."""
    return [comparable(element) for element in expected] == [comparable(element) for element in actual]


def end_to_end(batches: Sequence[Any]) -> Any:
    """Returns the batches of several shards at one step as one, leaf by leaf."""
    first = batches[0]
    if isinstance(first, dict):
        return {name: end_to_end([batch[name] for batch in batches]) for name in first}
    if isinstance(first, PaddedBatch):
        return PaddedBatch(*map(end_to_end, zip(*batches, strict=True)))
    if isinstance(first, list):
        return [*itertools.chain(*batches)]
    return None if first is None else np.concatenate(batches)
