"""The state of a chain below others: its position, and a hash of its fingerprint instead of the fingerprint.

A mixture of 64 chains would otherwise save 64 fingerprints. Like a fingerprint, a hash has two parts: a different
identity is an error, different content a warning.
    "12 340 0,3 0 1000 9ae1f2c4 03b1d87e"      step, position, skips, is_final, length, identity, content
"""

import contextlib
import contextvars
import dataclasses
import json
import re
import zlib
from collections.abc import Iterator
from typing import Any

from millstream.core.warn import log_warning
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.compatibility import resumption
from millstream.loader.checkpoints.state import LoaderState, SavedCursor, Stream

_BRIEF = re.compile(r"(\d+) (\d+) (\d+(?:,\d+)*) ([01]) (\d+|-) ([0-9a-f]{8}) ([0-9a-f]{8})", re.ASCII)

_is_strict: contextvars.ContextVar[bool] = contextvars.ContextVar("millstream_strict", default=False)
"""True while a state is restored that changed content refuses, in datasets below others, too."""


@contextlib.contextmanager
def strictly(*, strict: bool) -> Iterator[bool]:
    """Applies `strict` to the iterators below that are moved inside the block. Yields True if it or an outer one is."""
    strict = strict or _is_strict.get()
    token = _is_strict.set(strict)
    try:
        yield strict
    finally:
        _is_strict.reset(token)


def cursor_at_end(cursor: SavedCursor, length: int | None) -> SavedCursor:
    """Returns a cursor of a sparse plan; after a short last batch that of a dense plan, with nothing left to skip.

    `length` is the number of positions if each has an element, otherwise None.
    """
    is_at_end = cursor.is_final and cursor.position + cursor.skip[0] == length and not any(cursor.skip[1:])
    return SavedCursor(length, (0,) * len(cursor.skip), is_final=True) if is_at_end and length is not None else cursor


def ending_of(stream: Stream) -> str:
    """Returns the common end of all brief states of a stream."""
    length = "-" if stream.length is None else stream.length
    return f"{length} {_hashes_of(stream)}"


def brief_state(step: int, cursor: SavedCursor, ending: str) -> str:
    skip = ",".join(map(str, cursor.skip))
    return f"{step} {cursor.position} {skip} {cursor.is_final:d} {ending}"


def restored(text: str, here: LoaderState) -> LoaderState:
    """Returns the state in a text. Refuses one that is not of the chain whose state is `here`."""
    match = _BRIEF.fullmatch(text)
    if match is None:
        raise CheckpointError(f"The state of a dataset below others cannot be read: {text!r}.")
    step, position, skips, is_final, length, identity, content = match.groups()
    own_identity, own_content = _hashes_of(here.stream).split()
    if identity != own_identity:
        raise CheckpointError(
            f"The state of a dataset below others, {text!r}, belongs to another one: here its identity is "
            f"{own_identity}. Build the dataset from the same source and operations as when the state was saved."
        )
    skip = tuple(map(int, skips.split(",")))
    stream = dataclasses.replace(here.stream, length=None if length == "-" else int(length))
    saved = LoaderState(int(step), (SavedCursor(int(position), skip, is_final == "1"),), stream)
    resumption(saved, here)
    if content != own_content and _is_strict.get():
        raise CheckpointError(
            "The code or content of a dataset below others differs from that which saved the state: "
            f"{', '.join(sorted(here.stream.fingerprint.identity.values()))}. Resume without strict=True to accept it."
        )
    if content != own_content:
        log_warning(
            "a dataset below others resumes, although its code or content differs from what saved the state: "
            f"{', '.join(sorted(here.stream.fingerprint.identity.values()))}. Its elements are those that would have "
            "followed only if it computes the same."
        )
    return saved._replace(stream=here.stream)


def _hashes_of(stream: Stream) -> str:
    """Returns two hashes of a stream: one of its identity, one of its content, which may change."""
    fingerprint = vars(stream.fingerprint)
    content = {name: value for name, value in fingerprint.items() if name != "identity"}
    identity = [stream.fingerprint.identity, stream.global_batch]
    return f"{_hash_of(identity)} {_hash_of(content)}"


def _hash_of(value: Any) -> str:
    return f"{zlib.crc32(json.dumps(value, sort_keys=True).encode()):08x}"
