"""A preview of a record: a few lines with its type, its entries, and the beginning of each value."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from millstream.tf_example.features import KINDS
from millstream.tf_example.wire import WireData, WireError, fields_of
from millstream.transforms import VariableLengthFeature, decode_examples

_MAX_ROWS = 32
_MAX_CHARACTERS = 60
_MAX_ITEMS = 200
"""The number of bytes, characters or items of a value that are formatted."""


def preview_lines(record: Any) -> Iterator[str]:
    """Yields the type of a record, and a line per entry: its name, its type, and the beginning of its value."""
    title, entries = _entries_of(record)
    yield title
    if entries is None:
        return
    rows = [
        (escaped(str(name)), type_of(value), beginning_of(value)) for name, value in list(entries.items())[:_MAX_ROWS]
    ]
    names, types = (min(40, max((len(row[column]) for row in rows), default=0)) for column in (0, 1))
    for name, kind, beginning in rows:
        yield f"  {name:<{names}}  {kind:<{types}}  {beginning}".rstrip()
    if len(entries) > _MAX_ROWS:
        yield f"  … and {len(entries) - _MAX_ROWS:,} more"


def escaped(name: str) -> str:
    """Returns a name from a file with its control characters escaped, because they could control the terminal."""
    return name if name.isprintable() else repr(name)[1:-1]


def type_of(value: Any) -> str:
    """Returns the type of a value, with its size."""
    if isinstance(value, np.ndarray):
        return f"{value.dtype} {value.shape}"
    if isinstance(value, np.generic):
        return str(value.dtype)
    if isinstance(value, bytes):
        return f"bytes, {len(value):,}"
    if isinstance(value, str):
        return f"str, {len(value):,}"
    if isinstance(value, list | tuple | Mapping):
        return f"{type(value).__name__} of {len(value):,}"
    return "null" if value is None else type(value).__name__


def beginning_of(value: Any) -> str:
    """Returns the beginning of the Python literal of a value, on one line."""
    if isinstance(value, np.ndarray):
        text = " ".join(map(str, value.reshape(-1)[:_MAX_ITEMS].tolist()))
    elif isinstance(value, Mapping):
        text = repr({key: value[key] for key in list(value)[:_MAX_ITEMS]})
    elif isinstance(value, bytes | str | list | tuple):
        text = repr(value[:_MAX_ITEMS])
    else:
        text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= _MAX_CHARACTERS else f"{text[: _MAX_CHARACTERS - 1]}…"


def _entries_of(record: Any) -> tuple[str, Mapping[Any, Any] | None]:
    """Returns the title of a record, and its entries by name if it has any."""
    if isinstance(record, Mapping):
        return type_of(record), record
    if isinstance(record, bytes):
        if (features := _features_of(record)) is not None:
            return f"{type_of(record)}: a tf.train.Example", features
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(record)
            if isinstance(value, dict):
                return f"{type_of(record)}: JSON", value
    return f"{type_of(record)}: {beginning_of(record)}", None


def _features_of(record: bytes) -> dict[str, Any] | None:
    """Returns the values of a serialised `tf.train.Example` by name, or None if it is not one."""
    data = WireData([record])
    try:
        top = fields_of(data, data.starts, data.stops)
        entries = fields_of(data, top.of(1).starts, top.of(1).stops)
        members = fields_of(data, entries.of(1).starts, entries.of(1).stops)
        names, values = members.of(1), members.of(2)
        lists = fields_of(data, values.starts, values.stops)
    except WireError:
        return None
    is_example = (top.number == 1).all() and (entries.number == 1).all() and (members.number <= 2).all()
    kinds = {number: kind for kind, (number, _) in KINDS.items()}
    count = len(entries.message)
    if not (is_example and count == len(names.message) == len(values.message) == len(lists.message)):
        return None
    try:
        texts = [name.decode() for name in data.slices(names.starts, names.stops)]
        features = {
            name: VariableLengthFeature(kinds[number])
            for name, number in zip(texts, lists.number.tolist(), strict=True)
        }
        columns = decode_examples(features).map([record])
    except (ValueError, KeyError):  # ValueError: a name is not text, or a feature is empty.
        return None
    return {name: _single_or_all(columns[name].values) for name in features}


def _single_or_all(values: Any) -> Any:
    """Returns the only value of an array, or the array, with objects as a list."""
    if len(values) == 1:
        return values[0]
    return values.tolist() if values.dtype == np.object_ else values
