"""States: the position of one shard in a stream as JSON, that of a chain in an envelope, and those of a plan."""

import bisect
import dataclasses
import functools
import json
import operator
import zlib
from collections.abc import Callable, Mapping, Sequence
from types import NoneType
from typing import Any, NamedTuple, Self, TypeAlias, final

from millstream.errors import CheckpointError
from millstream.loader.checkpoints.fingerprint import Declared, Fingerprint
from millstream.loader.pipeline.calls import Cursor, Position
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan
from millstream.loader.pipeline.shards import first_dynamic, joining_batch

FORMAT = "millstream"
VERSION = 6

_ENCODER = json.JSONEncoder(allow_nan=False, sort_keys=True, separators=(",", ":"))
_ENDING = b',"version":%d}' % VERSION
_MAX_NUMBER = 1 << 63
"""The largest position, step or number to skip."""


@final
@dataclasses.dataclass(frozen=True)
class Stream:
    """The stream of a state, and the shard of it: the part of a state that never changes between batches.

    Attributes:
        logical_shards: the number of logical shards, to which positions are dealt in turn. Each shard runs
            logical_shards / shard_count consecutive ones. In a 1:1 pipeline, they are the shards.
        drop_remainder: `ShardOptions.drop_remainder`, which affects the last global batch.
        global_batch: the number of records per step over all shards.
        one_to_one: True if every record becomes exactly one element before it is batched.
        length: the number of positions in the sampler's order, over all epochs; None if it is endless.
    """

    shard_index: int
    shard_count: int
    logical_shards: int
    drop_remainder: bool
    global_batch: int
    one_to_one: bool
    length: int | None
    fingerprint: Fingerprint

    def before(self, position: int) -> "Stream":
        """Returns the stream as a state at a position describes it."""
        if not self.fingerprint.changes:
            return self
        count = bisect.bisect_left(self.fingerprint.changes, position, key=operator.itemgetter(0))
        if count not in self._earlier:
            self._earlier[count] = dataclasses.replace(self, fingerprint=self.fingerprint.before(position))
        return self._earlier[count]

    @functools.cached_property
    def _earlier(self) -> "dict[int, Stream]":
        return {}

    @functools.cached_property
    def ending(self) -> bytes:
        """The last bytes of every state of this stream: the stream as canonical JSON, without `changes`."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        named = {name: getattr(self.fingerprint, name) for name in ("content", "identity", "python")}
        return b',"stream":%b%b' % (_ENCODER.encode(fields | {"fingerprint": named}).encode(), _ENDING)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Raises TypeError, ValueError or KeyError if the fields do not describe a stream."""
        named = fields["fingerprint"]
        fingerprint = Fingerprint(named["identity"], named["content"], named["python"])
        stream = cls(**{**fields, "fingerprint": fingerprint})
        for name in ("drop_remainder", "one_to_one"):
            _check_is(getattr(stream, name), bool, name)
        for name in ("shard_index", "shard_count", "logical_shards", "global_batch"):
            _check_number(getattr(stream, name), name, minimum=name != "shard_index")
        if stream.length is not None and (type(stream.length) is not int or stream.length < 0):
            # It may exceed 2**63: the product of records and epochs. Positions may not.
            raise ValueError(f"length is {stream.length!r:.40}")
        if stream.shard_index >= stream.shard_count or stream.logical_shards % stream.shard_count:
            raise ValueError(f"shard {stream.shard_index} of {stream.shard_count} has no logical shards")
        _check_is(stream.fingerprint.python, str, "python")
        for texts in (stream.fingerprint.identity, stream.fingerprint.content):
            _check_is(texts, dict, "a fingerprint")
            for text in texts.values():
                _check_is(text, str, "a text of the fingerprint")
        return stream


class SavedCursor(NamedTuple):
    """The position of one logical shard, between two batches.

    Attributes:
        position: the first position, over all shards, that no delivered batch has used: the start of a global block,
            or the end of the order. In a 1:1 pipeline, all shards have the same.
        skip: the numbers of elements to skip at `position`, one per stage; zeros in a 1:1 pipeline.
        is_final: True if the last delivered batch is short or padded because the order ends. A longer order has another
            batch there.
    """

    position: int
    skip: tuple[int, ...]
    is_final: bool

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Raises TypeError or ValueError if the fields do not describe a cursor."""
        _check_is(fields["skip"], list, "skip")
        cursor = cls(**{**fields, "skip": tuple(fields["skip"])})
        for number in (cursor.position, *cursor.skip):
            _check_number(number, "a position")
        _check_is(cursor.is_final, bool, "is_final")
        return cursor

    @property
    def encoded(self) -> str:
        """The cursor as canonical JSON, formatted in a third of the time of an encoder."""
        is_final = "true" if self.is_final else "false"
        return f'{{"is_final":{is_final},"position":{self.position},"skip":[{",".join(map(str, self.skip))}]}}'


@final
class LoaderState(NamedTuple):
    """The position of one shard in a stream, between two batches.

    Attributes:
        step: the number of batches that this shard has delivered.
        cursors: the positions of the logical shards that the shard runs, in their order; one in a 1:1 pipeline.
    """

    step: int
    cursors: tuple[SavedCursor, ...]
    stream: Stream

    def encode(self) -> bytes:
        # Sorted by key. The stream is encoded once for all its states.
        cursors = ",".join([cursor.encoded for cursor in self.cursors])
        text = f'{{"format":"{FORMAT}","places":[{cursors}],"step":{self.step}'.encode() + self.stream.ending
        return b'{"crc32":%d,%b' % (zlib.crc32(text), text[1:])

    @staticmethod
    def decode(raw: bytes | bytearray | memoryview, here: Stream | None = None) -> "LoaderState":
        """Returns the state that `encode` wrote, from its bytes or from the same JSON written differently.

        The stream of a state of `here` that is byte for byte the same is not parsed. Other bytes are a CheckpointError.
        """
        try:
            fields = _checked_fields(raw, here)
            stream = fields.pop("stream")
            if here is None or stream is not here:
                stream = Stream.from_fields(stream)
            _check_is(fields["places"], list, "places")
            cursors = tuple(map(SavedCursor.from_fields, fields.pop("places")))
            own = 1 if stream.one_to_one else stream.logical_shards // stream.shard_count
            if len(cursors) != own or len({len(cursor.skip) for cursor in cursors}) > 1:
                raise ValueError(f"it must have {own} places, got {len(cursors)}")  # noqa: TRY301  (as of a missing field)
            _check_number(fields["step"], "step")
            return LoaderState(**fields, cursors=cursors, stream=stream)
        except CheckpointError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"Cannot read the state: {error or type(error).__name__}. Pass a result of get_state(), unchanged."
            ) from error


def _checked_fields(raw: bytes | bytearray | memoryview, here: Stream | None) -> dict[str, Any]:
    """Returns the fields of a state without format, version and CRC, which are checked.

    The stream is `here` itself if the text ends like its states.
    """
    # The annotation is the contract, but callers read states from anywhere.
    if not isinstance(raw, (bytes, bytearray, memoryview)):
        raise TypeError(f"it must be bytes, got {type(raw).__name__}")
    text, ending = bytes(raw), b"" if here is None else here.ending
    is_as_written = _is_as_written(text)
    # All states of a stream have the same ending, which need not be parsed.
    is_of_here = is_as_written and ending != b"" and text.endswith(ending)
    try:
        fields = json.loads((text.removesuffix(ending) + _ENDING if is_of_here else text).decode())
    except ValueError as error:
        raise ValueError(f"it is not valid JSON in UTF-8 ({error})") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ValueError(f'it has no "format": "{FORMAT}"')
    version = fields.pop("version", None)
    if not isinstance(version, int):
        raise TypeError("it has no version")
    if version != VERSION:
        advice = "Seek to the step instead: seek(step)." if version < VERSION else "Upgrade millstream to read it."
        raise CheckpointError(
            f"The state has version {version}, and this millstream reads version {VERSION}: it was written by "
            f"{'an earlier' if version < VERSION else 'a newer'} one. {advice}"
        )
    crc = fields.pop("crc32", None)
    # Encoding again is only necessary if the text was rewritten.
    is_whole = is_as_written or zlib.crc32(_ENCODER.encode({**fields, "version": VERSION}).encode()) == crc
    if not isinstance(crc, int) or not is_whole:
        raise ValueError("its crc32 does not match, so it was damaged or edited")
    del fields["format"]
    return fields | {"stream": here} if is_of_here else fields


def _check_is(value: object, kind: type, name: str) -> None:
    if type(value) is not kind:
        raise TypeError(f"{name} is a {type(value).__name__}, not a {kind.__name__}")


def _check_number(value: object, name: str, *, minimum: int = 0) -> None:
    if type(value) is not int or not minimum <= value <= _MAX_NUMBER:
        raise ValueError(f"{name} is {value!r:.40}")


def _is_as_written(text: bytes) -> bool:
    """Returns True if a text begins as `encode` writes it, with the CRC of the rest."""
    crc, _, rest = text.removeprefix(b'{"crc32":').partition(b",")
    return crc == b"%d" % zlib.crc32(rest, zlib.crc32(b"{"))


def combined(states: Sequence[LoaderState]) -> LoaderState:
    """Returns the combined state of all shards that saved together. Any other states are a CheckpointError."""
    if not states:
        raise CheckpointError("set_states needs the states of all shards that saved together, got none.")
    counts = sorted({state.stream.shard_count for state in states})
    if len(counts) > 1:
        raise CheckpointError(
            f"The states are of {' and of '.join(map(str, counts))} shards. Pass the states that were saved together."
        )
    by_shard: dict[int, LoaderState] = {}
    for state in states:
        if state.stream.shard_index in by_shard:
            raise CheckpointError(
                f"Two of the {len(states)} states are of shard {state.stream.shard_index} of {counts[0]}. Pass the "
                "state of each shard once."
            )
        by_shard[state.stream.shard_index] = state
    if missing := sorted(set(range(counts[0])) - by_shard.keys()):
        raise CheckpointError(
            f"The states are of {len(states)} of {counts[0]} shards: "
            f"{_listed('shard', missing)} {'is' if len(missing) == 1 else 'are'} missing. Pass all of them, because "
            "each shard knows only its own position."
        )
    ordered = [by_shard[index] for index in range(counts[0])]
    _check_together(ordered)
    first = ordered[0]
    all_cursors = tuple(cursor for state in ordered for cursor in state.cursors)
    cursors = first.cursors if first.stream.one_to_one else all_cursors
    # The furthest logical shard has passed the most changes of a mixture.
    furthest = max(ordered, key=lambda state: max(cursor.position for cursor in state.cursors)).stream
    # The logical shards of a 1:1 pipeline are its shards, and their number does not affect the following batches.
    alone = dataclasses.replace(furthest, shard_index=0, shard_count=1)
    return LoaderState(first.step, cursors, first.stream if first.stream.one_to_one else alone)


def _check_together(ordered: Sequence[LoaderState]) -> None:
    first = ordered[0]
    for index, state in enumerate(ordered):
        if not _is_same_stream(state.stream, first.stream):
            raise CheckpointError(
                f"The states of shard 0 and of shard {index} are of different streams. Pass the states that were saved "
                "together."
            )
    is_one_to_one = first.stream.one_to_one
    positions = [(state.step, state.cursors if is_one_to_one else None) for state in ordered]
    if len(set(positions)) > 1:
        listed = ", ".join(
            f"shard {index} at step {state.step}" + f", position {state.cursors[0].position}" * is_one_to_one
            for index, state in enumerate(ordered)
        )
        raise CheckpointError(
            f"The states are of different steps: {listed}. Save when all shards have taken the same number of "
            "batches, or resume with the same number of shards, each from its own state."
        )


def _is_same_stream(one: Stream, other: Stream) -> bool:
    """Returns True if two streams differ at most by their shard, and by the number of changes of a mixture so far."""
    texts = [stream.fingerprint.identity for stream in (one, other)]
    common = {path for path in texts[0].keys() & texts[1].keys() if path != "sampler.changes"}
    identities = [{path: text[path] for path in common} for text in texts]
    fingerprint = other.fingerprint
    return identities[0] == identities[1] and (
        dataclasses.replace(one, shard_index=other.shard_index, fingerprint=fingerprint) == other
    )


def _listed(what: str, numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}"


MAX_NUMBER = 1 << 63
_NO_TEXTS: Mapping[str, str] = {}
_PLAIN = frozenset({bool, int, float, str, NoneType})
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


class Sealed(dict[str, Any]):
    """A state that knows its canonical JSON. Nothing changes it; `plain` returns a copy for others."""

    __slots__ = ("_text", "_texts")

    def __init__(self, fields: Mapping[str, Any], texts: Mapping[str, str] = _NO_TEXTS) -> None:
        super().__init__(fields)
        self._texts = texts
        self._text = ""

    @property
    def text(self) -> str:
        """The state as canonical JSON."""
        self._text = self._text or f"{{{_members(self, self._texts)}}}"
        return self._text

    def __reduce__(self) -> Any:
        return dict, (dict(self),)


def sealed(kind: str, fields: Mapping[str, Any], texts: Mapping[str, str] = _NO_TEXTS) -> Sealed:
    """Returns a state: a chain's own fields and the states of the iterators below, in an envelope.

    `texts` are the results of `canonical` for some of the fields, if they are known.
    """
    crc = _crc_of(kind, fields, texts)
    return Sealed({**fields, "format": FORMAT, "kind": kind, "version": VERSION, "crc32": crc}, texts)


def plain(state: Any) -> Any:
    """Returns a state with dicts and lists of its own, which its owner may change."""
    if isinstance(state, dict):
        return {name: plain(value) for name, value in state.items()}
    if isinstance(state, list):
        return list(state) if _PLAIN.issuperset(map(type, state)) else list(map(plain, state))
    return state


def _with_texts(value: Any) -> Any:
    """Returns a state, or a part of one, whose envelopes know their canonical JSON."""
    if type(value) is dict:
        items = {name: _with_texts(item) for name, item in value.items()}
        if "crc32" in items and items.get("format") == FORMAT:
            return Sealed(items)
        return items if any(items[name] is not item for name, item in value.items()) else value
    if type(value) is list and not _PLAIN.issuperset(map(type, value)):
        return list(map(_with_texts, value))
    return value


def unsealed(state: Any, kind: str, checks: Mapping[str, Check]) -> dict[str, Any]:
    """Returns the fields of a state that `sealed` returned, also after JSON. Anything else is a CheckpointError."""
    if not isinstance(state, Mapping):
        raise CheckpointError(f"A state of {kind} must be a dict, got {type(state).__name__}.")
    if state.get("kind") != kind or state.get("format") != FORMAT:
        raise wrong_kind(kind, state)
    try:
        state = _with_texts(state)
    except RecursionError as error:
        raise CheckpointError(f"Cannot read the state of {kind}: {error}.") from error
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
    if type(value) is Sealed:
        return value.text
    if _holds_envelopes(value):
        if not isinstance(value, dict):
            return f"[{','.join(map(canonical, value))}]"
        members = {_key_of(name): canonical(item) for name, item in value.items()}
        return f"{{{','.join(f'{json.dumps(name)}:{members[name]}' for name in sorted(members))}}}"
    # Twice, because JSON turns keys into strings: only then they have the order that a state read from a file has.
    read = json.loads(json.dumps(value, default=_type_name))
    return json.dumps(read, sort_keys=True, separators=(",", ":"))


def _holds_envelopes(value: Any) -> bool:
    if type(value) is dict:
        return any(map(_holds_envelopes, value.values()))
    if type(value) is list:
        return not _PLAIN.issuperset(map(type, value)) and any(map(_holds_envelopes, value))
    return type(value) is Sealed


def _key_of(name: Any) -> str:
    """Returns the string that JSON makes of a key."""
    (key,) = json.loads(json.dumps({name: 0}))
    return str(key)


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


def stream_of(plan: Plan, fingerprint: Fingerprint | None = None) -> Stream:
    """Returns the stream of a plan, with the current fingerprint of its source, sampler and operations if not given."""
    partition, shard = plan.partition, plan.pipeline.shard
    return Stream(
        shard_index=shard.shard_index,
        shard_count=shard.shard_count,
        logical_shards=partition.shard.shard_count,
        drop_remainder=shard.drop_remainder,
        global_batch=partition.global_block,
        one_to_one=plan.one_to_one,
        length=partition.length,
        fingerprint=fingerprint or fingerprint_of_pipeline(plan.pipeline),
    )


def declared_by(pipeline: Pipeline) -> Declared:
    """Returns the description of the source and the operations of a pipeline."""
    sizes: dict[int, str] | None = None if first_dynamic(pipeline.operations) is None else {}
    if sizes is not None and (joining := joining_batch(pipeline.operations)) is not None:
        # Each shard has a part of the batch, whose size depends on the number of shards.
        number, batch = joining
        sizes[number] = f"{batch.batch_size * pipeline.shard.shard_count} over all shards"
    return Declared(pipeline.source, pipeline.operations, sizes)


def fingerprint_of_pipeline(pipeline: Pipeline, declared: Declared | None = None) -> Fingerprint:
    """Returns the fingerprint of a pipeline. Only the sampler is described if the rest is given."""
    found = (declared or declared_by(pipeline)).with_sampler(pipeline.sampler)
    # The number of errors is not part of it, because it decides where the stream stops, not its content.
    own = {} if pipeline.tolerance is None else {"on_error": "skip"}
    return dataclasses.replace(found, identity={**found.identity, **own})


def state_at(position: Position, step: int, plan: Plan, stream: Stream) -> LoaderState:
    cursors = tuple(saved_cursor(cursor, plan) for cursor in position)
    return LoaderState(step, cursors, stream.before(max(cursor.position for cursor in cursors)))


def saved_cursor(cursor: Cursor, plan: Plan) -> SavedCursor:
    """Returns the cursor of a logical shard of a plan as a state has it."""
    partition = plan.partition
    position, whole_blocks = cursor.block * partition.global_block, partition.whole_blocks
    return SavedCursor(
        # After a short or padded batch, the end of the order: the remainder of its block has no records.
        position=position if partition.length is None else min(position, partition.length),
        skip=cursor.skip,
        is_final=whole_blocks is not None and cursor.block > whole_blocks if plan.one_to_one else cursor.is_final,
    )


def count_outputs(plan: Plan, owner: str) -> int:
    """Returns the number of outputs of a stream. If it is unknown, a TypeError says why `owner` has no `len()`."""
    if not plan.one_to_one:
        raise TypeError(f"This {owner} has no len(): the number of outputs depends on {plan.deciding}.")
    num_blocks = plan.shards[0].num_blocks
    if num_blocks is None:
        raise TypeError(f"This {owner} has no len(): its sampler is endless. Pass num_epochs to the sampler.")
    return num_blocks


def epoch_of(plan: Plan, position: Position) -> int | None:
    """Returns the epoch of the first record that is not consumed, from 0; None if the order has no epochs."""
    num_records, length = plan.pipeline.order.num_records, plan.pipeline.order.length
    epoch = plan.pipeline.epoch
    if not num_records:
        return epoch if num_records is None else num_records
    first_epoch: int = getattr(plan.pipeline.sampler, "first_epoch", epoch or 0)
    first = min(cursor.block for cursor in position) * plan.partition.global_block
    return first_epoch + (first if length is None else min(first, length)) // num_records
