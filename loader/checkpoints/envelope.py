r"""The envelope of every state, of loaders and of chains: version, kind, step, position, stream, and one CRC.

A position is a nested tuple: that of an iterator, and within it those of the iterators below. It is saved as JSON text,
so that a state of many streams is made of texts that are known already, and cannot be changed by its owner. A user's
iterator has a state of its own, any value: its place in the text is `{}`, and the values are listed in `states`.

    {"crc32": 1234, "format": "millstream", "kind": "chain", "position": "[\"zip\",3,false,[[77,3,3],{}]]",
     "states": [{"next": 3}], "step": 3, "stream": null, "version": 7}

Guarantees:
    * The CRC covers all other fields as canonical JSON: any damage, and any edit, is a CheckpointError.
    * White space, escapes and the order of keys do not matter.
"""

import copy
import functools
import itertools
import json
import json.encoder
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple, TypeAlias, final

from millstream.errors import CheckpointError

FORMAT = "millstream"
VERSION = 7
LOADER = "loader"
CHAIN = "chain"
"""The kinds of states: the bytes of a loader's iterator, and the dict of a chain's."""
STRAIGHT = "a chain over a MapDataset"
"""The description of a position that has no name, because there may be thousands of them in a state."""

MAX_NUMBER = 1 << 63
"""The largest position, step or number to skip."""

_FIELDS = frozenset({"crc32", "format", "kind", "position", "states", "step", "stream", "version"})
_RUN = "run"
"""The field of the history of a run, which a state has if there is any."""
_HOLE = "{}"
_DAMAGED = "its crc32 does not match, so it was damaged or edited"


@final
class UsersState:
    """The state of a user's iterator, within a position. It is a copy that does not change."""

    __slots__ = ("states",)
    text = _HOLE

    def __init__(self, value: Any) -> None:
        self.states = (value,)

    @property
    def value(self) -> Any:
        return self.states[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UsersState) and bool(self.value == other.value)

    __hash__ = None  # type: ignore[assignment]  # a state may be a dict


class SavedPosition(tuple[Any, ...]):  # noqa: SLOT001  (it keeps its text)
    """The position of an iterator: its description, its step and further values, and positions of iterators below.

    Values are numbers, texts, None, tuples, positions and `UsersState`s. The description may be left out.
    """

    @functools.cached_property
    def text(self) -> str:
        """The position as JSON, with `{}` for each user's state."""
        return _text_of_all(self)

    @functools.cached_property
    def states(self) -> tuple[Any, ...]:
        """The users' states in it, in the order of their places in the text."""
        return tuple(_states_in(self)) if _HOLE in self.text else ()


def _text_of_all(items: tuple[Any, ...]) -> str:
    # Joins have many positions, whose texts are known.
    texts = [item.text if type(item) is SavedPosition else _text_of(item) for item in items]
    return f"[{','.join(texts)}]"


def _text_of(item: Any) -> str:
    kind = type(item)
    if kind is int:
        return str(item)
    if kind is UsersState:
        text: str = item.text
        return text
    if kind is tuple:
        return _text_of_all(item)
    # As `json.dumps`, at a tenth of its cost.
    return _CONSTANTS[item] if kind in _OF_CONSTANTS else _quoted(item) if kind is str else json.dumps(item)


_CONSTANTS = {None: "null", True: "true", False: "false"}
_OF_CONSTANTS = (bool, NoneType)
_quoted = json.encoder.encode_basestring_ascii


def _quoted_json(text: str) -> str:
    """Returns JSON in ASCII as a JSON string. It has no control characters, so that two need an escape."""
    backslash, quote = "\\", '"'
    return f'"{text.replace(backslash, 2 * backslash).replace(quote, backslash + quote)}"'


def _states_in(items: Iterable[Any]) -> Iterable[Any]:
    return itertools.chain.from_iterable(
        _states_in(item) if type(item) is tuple else item.states
        for item in items
        if type(item) in (tuple, SavedPosition, UsersState)
    )


class SavedState(NamedTuple):
    """The content of an envelope.

    Attributes:
        kind: `LOADER` or `CHAIN`.
        position: nested `SavedPosition`s, with a `UsersState` at the place of each user's state.
        stream: the description of the stream as JSON has it; None if only the parts of a chain are described.
        run: the history of the run as JSON has it; None if there is none.
    """

    kind: str
    step: int
    position: Any
    stream: Any
    run: Any = None


def sealed_bytes(step: int, position: str, ending: bytes, run: str = "") -> bytes:
    """Returns the state of a loader, of whose stream `ending` is the result of `ending_of`.

    `position` is JSON of numbers, which needs no escapes, and `run` canonical JSON, or "" without a history.
    """
    # Sorted by key.
    run_field = f',"{_RUN}":{run}' if run else ""
    text = (
        f'{{"format":"{FORMAT}","kind":"{LOADER}","position":"{position}"{run_field},"states":[],"step":{step}'.encode()
    )
    return b'{"crc32":%d,%b%b' % (zlib.crc32(ending, zlib.crc32(text)), text[1:], ending)


def ending_of(stream: Any) -> bytes:
    """Returns the last bytes of all states of a stream, which are encoded once."""
    return b',"stream":%b,"version":%d}' % (_canonical(stream).encode(), VERSION)


def sealed_dict(position: SavedPosition, stream: Any, ending: bytes) -> dict[str, Any]:
    """Returns the state of a chain. Its owner may change it: `stream` and the users' states are copied.

    The position begins with its description and its step.
    """
    step, states = position[1], position.states
    beginning = f'{{"format":"{FORMAT}","kind":"{CHAIN}","position":{_quoted_json(position.text)}'
    # A user's states can be written as JSON only if they are saved.
    text = f'{beginning},"states":{_canonical(states) if states else "[]"},"step":{step}'
    return {
        "crc32": zlib.crc32(ending, zlib.crc32(text.encode())),
        "format": FORMAT,
        "kind": CHAIN,
        "position": position.text,
        "states": copy.deepcopy(list(states)) if states else [],
        "step": step,
        "stream": copied(stream),
        "version": VERSION,
    }


def copied(value: Any) -> Any:
    """Returns a copy of what JSON can hold."""
    if type(value) is dict:
        return {name: copied(item) if type(item) is dict else item for name, item in value.items()}
    return value


def opened_bytes(raw: bytes | bytearray | memoryview) -> SavedState:
    """Returns the content of a loader's state, from its bytes or from the same JSON written differently.

    Raises:
        CheckpointError: it is anything else.
    """
    # The annotation is the contract, but callers read states from anywhere.
    if not isinstance(raw, (bytes, bytearray, memoryview)):
        raise unreadable(f"it must be bytes, got {type(raw).__name__}")
    try:
        fields = json.loads(bytes(raw).decode())
    except (ValueError, RecursionError) as error:
        raise unreadable(f"it is not valid JSON in UTF-8 ({error})") from error
    return _content(fields, LOADER)


def opened_dict(fields: Any) -> SavedState:
    """Returns the content of a chain's state, also after JSON.

    Raises:
        CheckpointError: it is anything else.
    """
    if not isinstance(fields, Mapping):
        raise unreadable(f"a state of a dataset's iterator is a dict, got {type(fields).__name__}")
    return _content(dict(fields), CHAIN)


def _content(fields: Any, kind: str) -> SavedState:
    """Returns the content of an envelope, which is checked."""
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise unreadable(f'it has no "format": "{FORMAT}"')
    version = fields.get("version")
    if not isinstance(version, int):
        raise unreadable("it has no version")
    if version != VERSION:
        advice = "Seek to the step instead: seek(step)." if version < VERSION else "Upgrade millstream to read it."
        raise CheckpointError(
            f"The state has version {version}, and this millstream reads version {VERSION}: it was written by "
            f"{'an earlier' if version < VERSION else 'a newer'} one. {advice}"
        )
    if wrong := sorted(map(str, (fields.keys() ^ _FIELDS) - ({_RUN} if kind == LOADER else set()))):
        raise unreadable(f"the fields {', '.join(wrong):.80} are missing or unknown")
    crc = fields.pop("crc32")
    try:
        is_intact = zlib.crc32(_canonical(fields).encode()) == crc
    except (TypeError, ValueError, RecursionError) as error:
        raise unreadable(str(error)) from error
    if type(crc) is not int or not is_intact:
        raise unreadable(_DAMAGED)
    if fields["kind"] != kind:
        raise CheckpointError(
            f"The state is of a {fields['kind']!s:.20}, and this is the iterator of a {kind}. Pass a result of "
            "get_state() of the same pipeline."
        )
    if not is_number(fields["step"]):
        raise unreadable(f"step is {fields['step']!r:.40}")
    return SavedState(kind, fields["step"], _position(fields), fields["stream"], fields.get(_RUN))


def _position(fields: dict[str, Any]) -> Any:
    text, states = fields["position"], fields["states"]
    if type(text) is not str or type(states) is not list:
        raise unreadable(f"its position is a {type(text).__name__}, and its states are a {type(states).__name__}")
    pending_states = list(map(UsersState, reversed(states)))
    try:
        position = _with_texts(json.loads(text, object_hook=lambda _: pending_states.pop()))
    except (ValueError, IndexError, RecursionError) as error:
        raise unreadable(f"its position is not valid ({error})") from error
    if pending_states:
        raise unreadable(f"its position has no place for {len(pending_states)} of its states")
    return position


def _with_texts(value: Any) -> Any:
    return SavedPosition(map(_with_texts, value)) if type(value) is list else value


def unreadable(cause: str) -> CheckpointError:
    return CheckpointError(f"Cannot read the state: {cause}. Pass a result of get_state(), unchanged.")


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=lambda value: type(value).__name__)
"""Encodes values as JSON. Values that JSON cannot hold, in states that never leave memory, become names of types."""


def _canonical(value: Any) -> str:
    """Returns a value as JSON with sorted keys and without white space.

    JSON turns keys into strings, and tuples into lists. So a value is encoded twice, and has then the order that it has
    if it was read from a file.
    """
    return _ENCODER.encode(json.loads(json.dumps(value, default=_ENCODER.default)))


Check: TypeAlias = Callable[[Any], bool]
"""A predicate: True if a value of a position is possible."""


def is_number(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_NUMBER


def is_fingerprint(value: Any) -> bool:
    return type(value) is int


def is_flag(value: Any) -> bool:
    return type(value) is bool


def is_list(value: Any) -> bool:
    return isinstance(value, tuple)


def is_anything(value: Any) -> bool:
    """Returns True, because another iterator checks the value."""
    del value
    return True


def values_of(position: Any, kind: str, *checks: Check) -> Sequence[Any]:
    """Returns the values of a position after its description, which has to be `kind`; else a CheckpointError."""
    if not is_list(position) or not len(position) or position[0] != kind:
        raise wrong_kind(kind, position)
    values: Sequence[Any] = position[1:]
    if len(values) != len(checks) or not all(check(value) for check, value in zip(checks, values, strict=True)):
        raise CheckpointError(f"Cannot read the position of {kind}. Pass a result of get_state(), unchanged.")
    return values


def wrong_kind(kind: str, position: Any) -> CheckpointError:
    got = "something else"
    if isinstance(position, UsersState):
        got = "a user's iterator"
    elif is_list(position) and len(position):
        got = f"{position[0]:.80}" if isinstance(position[0], str) else STRAIGHT
    return CheckpointError(
        f"The state must be one of {kind}, got one of {got}. Pass a result of get_state() of the same chain."
    )
