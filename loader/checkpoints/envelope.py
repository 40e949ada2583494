"""The envelope of a chain's state: format, kind, version and CRC around the chain's own fields and the states below.

The states below belong to the iterators that the chain draws from: envelopes of their own, texts, or the states of a
user's iterator. The CRC covers all of them, so that no iterator ever gets a damaged state.
"""

import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from millstream.errors import CheckpointError
from millstream.loader.checkpoints.state import FORMAT, VERSION

MAX_NUMBER = 1 << 63
_NO_TEXTS: Mapping[str, str] = {}
STRAIGHT = "a chain over a MapDataset"
"""The kind of a chain whose state is a `LoaderState`, without an envelope of its own."""

Check: TypeAlias = Callable[[Any], bool]
"""A predicate: True if a field can have a value."""


def is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_NUMBER


def is_flag(value: Any) -> bool:
    return type(value) is bool


def is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


def is_dict(value: Any) -> bool:
    return isinstance(value, Mapping)


def is_anything(value: Any) -> bool:
    """Returns True, because another iterator checks the value."""
    del value
    return True


def sealed(kind: str, fields: Mapping[str, Any], texts: Mapping[str, str] = _NO_TEXTS) -> dict[str, Any]:
    """Returns a state: a chain's own fields and the states of the iterators below, in an envelope.

    `texts` are the results of `canonical` for some of the fields, if they are known.
    """
    return {**fields, "format": FORMAT, "kind": kind, "version": VERSION, "crc32": _crc_of(kind, fields, texts)}


def text_of(state: Mapping[str, Any], texts: Mapping[str, str]) -> str:
    """Returns the result of `canonical` for a state that `sealed` returned, given those for some of its fields."""
    return f"{{{_members(state, texts)}}}"


def unsealed(state: Any, kind: str, checks: Mapping[str, Check]) -> dict[str, Any]:
    """Returns the fields of a state that `sealed` returned, also after JSON. Anything else is a CheckpointError."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"A state of {kind} must be a dict, got {type(state).__name__}.")
    if state.get("kind") != kind or state.get("format") != FORMAT:
        raise wrong_kind(kind, state)
    if state.get("version") != VERSION:
        raise CheckpointError(
            f"The state has version {state.get('version')!r:.40}, and this millstream reads version {VERSION}: another "
            "release wrote it. Resume with that release."
        )
    fields = {name: state[name] for name in checks if name in state}
    wrong = [name for name, check in checks.items() if name not in fields or not check(fields[name])]
    wrong += [repr(name) for name in state if name not in {*checks, "format", "kind", "version", "crc32"}]
    if wrong:
        raise CheckpointError(
            f"Cannot read the state of {kind}: {', '.join(wrong):.80}. Pass a result of get_state(), unchanged."
        )
    if repr(state.get("crc32")) != repr(_crc_of(kind, fields)):
        raise CheckpointError(
            f"Cannot read the state of {kind}: its crc32 does not match, so it was damaged or edited. Pass a result of "
            "get_state(), unchanged."
        )
    return fields


def wrong_kind(kind: str, state: Mapping[Any, Any]) -> CheckpointError:
    got = f"{state['kind']!s:.80}" if "kind" in state else STRAIGHT if "places" in state else "something else"
    return CheckpointError(
        f"The state must be one of {kind}, got one of {got}. Pass a result of get_state() of the same chain. Earlier "
        "releases saved another kind if mp_prefetch was between two operations, or directly after a combination."
    )


def canonical(value: Any) -> str:
    """Returns a part of a state as JSON with sorted keys and without white space, or raises an error of `json`."""
    if type(value) is int:
        return str(value)
    if type(value) is str:
        return json.dumps(value)
    # Twice, because JSON turns keys into strings: only then they have the order that a state read from a file has.
    read = json.loads(json.dumps(value, default=_type_name))
    return json.dumps(read, sort_keys=True, separators=(",", ":"))


def _crc_of(kind: str, fields: Mapping[str, Any], texts: Mapping[str, str] = _NO_TEXTS) -> int:
    try:
        return zlib.crc32(f'["{kind}","{FORMAT}",{VERSION},{{{_members(fields, texts)}}}]'.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(f"Cannot read the state of {kind}: {error}.") from error


def _members(fields: Mapping[str, Any], texts: Mapping[str, str]) -> str:
    return ",".join([f'"{name}":{texts.get(name) or canonical(fields[name])}' for name in sorted(fields)])


def _type_name(value: object) -> Any:
    """Returns the substitute for a value that JSON cannot hold, in a state that never leaves memory."""
    return dict(value) if isinstance(value, Mapping) else type(value).__name__
