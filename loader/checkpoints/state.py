"""The state of a loader: a stream and a position in it, as about a kilobyte of JSON; combined of several shards.

The text is canonical (sorted keys, no white space) and includes its CRC. It may come back with other white space or
another order of keys, because users store it inside their own JSON. Any other difference is refused. A state describes
delivered batches, so it does not depend on workers, threads or buffers.
"""

import bisect
import dataclasses
import functools
import json
import operator
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Self, final

from millstream.errors import CheckpointError
from millstream.loader.checkpoints.fingerprint import Fingerprint

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
