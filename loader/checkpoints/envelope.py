"""The envelope of a state of a stream that is made of others: kind, version and CRC around its own numbers.

States of what it draws from lie beside the numbers: each in an envelope of its own, or what a user's iterator saves.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from millstream.errors import CheckpointError
from millstream.loader.checkpoints.state import FORMAT, VERSION

MAX_NUMBER = 1 << 63

Check: TypeAlias = Callable[[Any], bool]
"""Returns whether a value is one that a field can have."""


def is_number(value: Any) -> bool:
    """Returns whether a value is a whole number from 0 on."""
    return type(value) is int and 0 <= value <= MAX_NUMBER


def is_flag(value: Any) -> bool:
    """Returns whether a value is a bool."""
    return type(value) is bool


def is_list(value: Any) -> bool:
    """Returns whether a value is a list."""
    return isinstance(value, list | tuple)


def is_dict(value: Any) -> bool:
    """Returns whether a value is a dict."""
    return isinstance(value, Mapping)


def is_anything(value: Any) -> bool:
    """Returns True: another iterator checks the value."""
    del value
    return True


def sealed(kind: str, own: Mapping[str, Any], below: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a state.

    Args:
        kind: the kind of stream.
        own: its own numbers and texts.
        below: the states of what it draws from. The CRC covers texts in them, which have none of their own.
    """
    crc = _crc_of(kind, own, _texts(below))
    return {**own, **below, "format": FORMAT, "kind": kind, "version": VERSION, "crc32": crc}


def unsealed(state: Any, kind: str, own: Mapping[str, Check], below: Mapping[str, Check]) -> dict[str, Any]:
    """Returns the fields of a state that `sealed` made, or that an earlier release saved without an envelope.

    Args:
        state: the state.
        kind: the kind of stream that it must be of.
        own: the fields that the CRC covers, with a check of each.
        below: the other fields.

    Raises:
        CheckpointError: it is anything else.
    """
    if not isinstance(state, Mapping):
        raise CheckpointError(f"A state of {kind} must be a dict, got {type(state).__name__}.")
    checks = {**own, **below}
    fields = {name: state[name] for name in checks if name in state}
    envelope = {str(name): state[name] for name in state if name not in checks}
    if envelope and envelope.get("kind") != kind:
        raise CheckpointError(
            f"The state must be one of {kind}, got one of {envelope.get('kind', 'something else')!r:.80}: give what "
            "get_state() of the same chain returned."
        )
    if envelope and envelope.get("version") != VERSION:
        raise CheckpointError(
            f"The state has version {envelope.get('version')!r:.40}, and this millstream reads version {VERSION}: it "
            "was written by another one."
        )
    wrong = [name for name, check in checks.items() if name not in fields or not check(fields[name])]
    if envelope and envelope.get("format") != FORMAT:
        wrong.append("format")
    if wrong or envelope.keys() - {"format", "kind", "version", "crc32"}:
        named = ", ".join(wrong or sorted(envelope))
        raise CheckpointError(
            f"The state of {kind} cannot be read: {named}. Give what get_state() returned, unchanged."
        )
    texts = _texts({name: fields[name] for name in below})
    if envelope and envelope.get("crc32") != _crc_of(kind, {name: fields[name] for name in own}, texts):
        raise CheckpointError(
            f"The state of {kind} cannot be read: its crc32 does not match, so it was damaged or edited."
        )
    return fields


def _texts(below: Any) -> list[str]:
    """Returns the texts among states, in order, but for those within an envelope."""
    if isinstance(below, str):
        return [below]
    if isinstance(below, Mapping):
        below = () if "crc32" in below else [below[name] for name in sorted(below, key=str)]
    return [text for part in below for text in _texts(part)] if is_list(below) else []


def _crc_of(kind: str, own: Mapping[str, Any], texts: list[str]) -> int:
    try:
        return zlib.crc32(json.dumps([kind, own, texts], sort_keys=True, separators=(",", ":")).encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"The state of {kind} cannot be read: {error}.") from error
