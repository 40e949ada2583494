"""Encodings of records as bytes: unchanged, as JSON text, as a `tf.train.Example`, or as tokens."""

import dataclasses
import datetime as dt
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.array_likes import find_loss
from millstream.errors import DataSourceError
from millstream.sources.files.megatron_index import DTYPES
from millstream.transforms import encode_example

AUTO = "auto"
TOKENS = "tokens"

_TOKEN_DTYPES = {np.dtype(name).name: name for name in DTYPES.values() if np.dtype(name).kind != "f"}
"""The dtypes of tokens in a file, by their names in NumPy."""


def raw_bytes(record: Any) -> bytes:
    """Returns bytes unchanged, text as UTF-8, and an array as its bytes, little-endian."""
    if isinstance(record, bytes):
        return record
    if isinstance(record, str):
        return record.encode()
    if isinstance(record, np.ndarray) and not record.dtype.hasobject and not find_loss([record]):
        return record.astype(record.dtype.newbyteorder("<"), copy=False).tobytes()
    raise TypeError(f"it is of type {type(record).__name__}, and only bytes, str and arrays are written unchanged")


def json_text(record: Any) -> bytes:
    """Returns a value as compact JSON in UTF-8, with arrays as lists and times in ISO 8601."""
    return json.dumps(record, ensure_ascii=False, separators=(",", ":"), default=_plain).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        # `tolist` turns times finer than microseconds into numbers.
        return (value.astype(str) if value.dtype.kind == "M" else value).tolist()
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    raise TypeError(f"it holds a value of type {type(value).__name__}, which JSON lacks")


def example_bytes(record: Any) -> bytes:
    if not isinstance(record, Mapping):
        raise TypeError(f"it is of type {type(record).__name__}, and an Example is built from a dict")
    return encode_example(record)


_ENCODERS: dict[str, Callable[[Any], bytes]] = {"raw": raw_bytes, "json": json_text, "example": example_bytes}
ENCODINGS = tuple(_ENCODERS)


@final
@dataclasses.dataclass(frozen=True)
class Encoding:
    """The conversion of a record to bytes.

    Attributes:
        name: one of `ENCODINGS`, or `TOKENS`.
        feature: for tokens, the entry of a dict that holds them; None if a record is the tokens themselves.
        dtype: for tokens, their dtype, little-endian.
    """

    name: str
    feature: str | None = None
    dtype: str | None = None

    def encode(self, record: Any) -> bytes:
        if self.name != TOKENS:
            return _ENCODERS[self.name](record)
        tokens = _tokens_of(record, self.feature)
        if tokens.ndim != 1 or (tokens.dtype.kind not in "iu" and tokens.size):
            raise TypeError(
                f"tokens are integers in one dimension, and it has {tokens.dtype} of shape {tokens.shape}. Tokenize "
                "the text in a Map first"
            )
        written: NDArray[Any] = tokens.astype(self.dtype)
        if (written != tokens).any():
            raise ValueError(f"token {int(tokens[written != tokens][0])} exceeds the range of {np.dtype(self.dtype)}")
        return written.tobytes()


def choose_encoding(record: Any) -> Encoding:
    """Returns the encoding for records such as this one.

    Bytes, text and arrays stay unchanged, dicts that hold bytes or arrays become Examples, all else becomes JSON.
    """
    if isinstance(record, bytes | str | np.ndarray):
        return Encoding("raw")
    if isinstance(record, Mapping) and any(isinstance(value, bytes | np.ndarray) for value in record.values()):
        return Encoding("example")
    return Encoding("json")


def token_encoding(record: Any, feature: str | None, dtype: Any) -> Encoding:
    """Returns the encoding of tokens such as those of this record.

    `feature` may be None if there is one entry, or records are the tokens; `dtype`, if the tokens are an array.
    """
    if feature is None and isinstance(record, Mapping):
        if len(record) != 1:
            raise ValueError(f"feature must be one of {', '.join(map(repr, record))}, the entry that holds the tokens.")
        (feature,) = record
    if dtype is None and isinstance(tokens := record if feature is None else record[feature], np.ndarray):
        dtype = tokens.dtype
    try:
        name = "None" if dtype is None else np.dtype(dtype).name
    except TypeError:
        name = str(dtype)
    if name not in _TOKEN_DTYPES:
        raise ValueError(
            f"dtype must be the dtype of the tokens in the file, one of {', '.join(_TOKEN_DTYPES)}, got {name}. Use "
            "uint16 for a vocabulary of up to 65,536 tokens, else int32."
        )
    return Encoding(TOKENS, feature, _TOKEN_DTYPES[name])


def encode_records(
    encoding: Encoding, records: Sequence[Any], keys: Sequence[int], *, skips_none: bool = False
) -> list[bytes]:
    """Returns records as bytes; raises a DataSourceError with the key of one that cannot be encoded."""
    encoded: list[bytes] = []
    for key, record in zip(keys, records, strict=True):
        if record is None and skips_none:
            continue
        try:
            encoded.append(encoding.encode(record))
        except (TypeError, ValueError, RecursionError) as error:
            remedy = "" if encoding.name == TOKENS else f" Choose another of {', '.join(ENCODINGS)}."
            raise DataSourceError(
                f"Cannot write record {key} with encode={encoding.name!r}: {str(error).rstrip('.')}.{remedy}"
            ) from error
    return encoded


def _tokens_of(record: Any, feature: str | None) -> NDArray[Any]:
    if feature is not None and (not isinstance(record, Mapping) or feature not in record):
        raise TypeError(f"it is not a dict with an entry {feature!r}")
    tokens = record if feature is None else record[feature]
    if found := find_loss([tokens]):
        raise TypeError(found[1])
    return np.asarray(tokens)
