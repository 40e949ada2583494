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
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from millstream.core.warn import log_warning
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.compatibility import check_allow, resumption
from millstream.loader.checkpoints.state import LoaderState, SavedCursor, Stream

_BRIEF = re.compile(r"(\d+) (\d+) (\d+(?:,\d+)*) ([01]) (\d+|-) ([0-9a-f]{8}) ([0-9a-f]{8})", re.ASCII)
_ALL = ("global_batch", "on_error", "operations", "sampler", "source")
_ON_ERROR = ("on_error",)


class Accepted(NamedTuple):
    """The differences that a state may have: the arguments of `set_state`."""

    allow: frozenset[str] = frozenset()
    strict: bool = False


_NOTHING = Accepted()
_accepted: contextvars.ContextVar[Accepted] = contextvars.ContextVar("millstream_accepted", default=_NOTHING)
"""The differences that are accepted while a state is restored, in datasets below others, too."""


@contextlib.contextmanager
def accepting(allow: Collection[str], *, strict: bool) -> Iterator[Accepted]:
    """Applies both to the iterators below that are moved inside the block. Yields them with those of outer blocks."""
    check_allow(allow)
    outer = _accepted.get()
    token = _accepted.set(Accepted(outer.allow.union(allow), strict or outer.strict))
    try:
        yield _accepted.get()
    finally:
        _accepted.reset(token)


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
    allow, strict = _accepted.get()
    # A hash does not tell what differs, except for a difference that is tried.
    on_error = {"on_error": "skip"} if "on_error" not in here.stream.fingerprint.identity else {}
    others = {name: text for name, text in here.stream.fingerprint.identity.items() if name != "on_error"}
    is_of_other_errors = identity == _hash_of([others | on_error, here.stream.global_batch])
    advised = _ON_ERROR if is_of_other_errors else _ALL
    is_allowed = allow.issuperset(_ALL)
    if identity != own_identity and not allow.issuperset(advised):
        raise CheckpointError(
            f"The state of a dataset below others, {text!r}, belongs to another one: here its identity is "
            f"{own_identity}. Build the dataset from the same source and operations as when the state was saved, or "
            f"resume with these differences on purpose: set_state(state, allow={_written(advised)})."
        )
    skip = tuple(map(int, skips.split(",")))
    stream = dataclasses.replace(here.stream, length=None if length == "-" else int(length))
    saved = LoaderState(int(step), (SavedCursor(int(position), skip, is_final == "1"),), stream)
    resumption(saved, here)
    if content != own_content and strict and not is_allowed:
        raise CheckpointError(
            "The code or content of a dataset below others differs from that which saved the state: "
            f"{', '.join(sorted(here.stream.fingerprint.identity.values()))}. Resume without strict=True, or with "
            f"allow={_written(_ALL)}, to accept it."
        )
    if content != own_content and not is_allowed:
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


def _written(names: Collection[str]) -> str:
    return "{" + ", ".join(f'"{name}"' for name in names) + "}"


def _hash_of(value: Any) -> str:
    return f"{zlib.crc32(json.dumps(value, sort_keys=True).encode()):08x}"
