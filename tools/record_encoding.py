"""What a record becomes when it is written to a file of bytes: itself, JSON text, or a `tf.train.Example`."""

import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from millstream.errors import DataSourceError
from millstream.transforms import encode_example


def raw_bytes(record: Any) -> bytes:
    """Returns bytes as they are, text in UTF-8, and the bytes of arrays, little-endian.

    Raises:
        TypeError: the record is something else.
    """
    if isinstance(record, bytes):
        return record
    if isinstance(record, str):
        return record.encode()
    if isinstance(record, np.ndarray) and not record.dtype.hasobject:
        return record.astype(record.dtype.newbyteorder("<"), copy=False).tobytes()
    raise TypeError(f"it is of type {type(record).__name__}, and only bytes, str and arrays are written as they are")


def json_text(record: Any) -> bytes:
    """Returns a value as JSON in UTF-8, without blanks: arrays as lists, times as ISO 8601 has them.

    Raises:
        TypeError: it holds what JSON does not have, such as bytes.
        ValueError: it holds text that is not Unicode, or itself.
    """
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        # Times that are finer than those of `datetime` would come out as numbers.
        return (value.astype(str) if value.dtype.kind == "M" else value).tolist()
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    raise TypeError(f"it holds a value of type {type(value).__name__}, which JSON does not have")


def example_bytes(record: Any) -> bytes:
    """Returns a dict as a serialised `tf.train.Example`.

    Raises:
        TypeError, ValueError: it is not a dict, or holds what an Example cannot.
    """
    if not isinstance(record, Mapping):
        raise TypeError(f"it is of type {type(record).__name__}, and an Example is made of a dict")
    return encode_example(record)


ENCODINGS: dict[str, Callable[[Any], bytes]] = {"raw": raw_bytes, "json": json_text, "example": example_bytes}
"""By name, what turns a record into bytes."""


def encoding_for(record: Any) -> str:
    """Returns the name of the encoding that suits records like this one.

    Bytes, text and arrays stay; dicts that hold bytes or arrays are Examples; all else is JSON.
    """
    if isinstance(record, bytes | str | np.ndarray):
        return "raw"
    if isinstance(record, Mapping) and any(isinstance(value, bytes | np.ndarray) for value in record.values()):
        return "example"
    return "json"


def encoded(records: Sequence[Any], keys: Sequence[int], encoding: str) -> list[bytes]:
    """Returns the bytes of some records.

    Raises:
        DataSourceError: one of them cannot be encoded; its key is named.
    """
    done: list[bytes] = []
    try:
        done.extend(map(ENCODINGS[encoding], records))
    except (TypeError, ValueError, RecursionError) as error:
        raise DataSourceError(
            f"Record {keys[len(done)]} cannot be written with --encode={encoding}: {str(error).rstrip('.')}. Choose "
            f"another of {', '.join(ENCODINGS)}."
        ) from error
    return done
