"""A checkpoint: which stream, and where in it, as some hundred bytes of JSON.

The text is canonical (sorted keys, no white space) and carries a CRC of itself. It may come back with other white space
or another order of keys, because users keep it inside JSON of their own; whatever says anything else than what was
saved is refused. Nothing here depends on workers, threads or buffers: a state speaks of batches that were delivered.
"""

import dataclasses
import functools
import json
import zlib
from typing import Any, NamedTuple, Self, final

from millstream.errors import CheckpointError
from millstream.loader.checkpoints.fingerprint import Fingerprint

FORMAT = "millstream"
VERSION = 3

_ENCODER = json.JSONEncoder(allow_nan=False, sort_keys=True, separators=(",", ":"))
_ENDING = b',"version":%d}' % VERSION


@final
@dataclasses.dataclass(frozen=True)
class Stream:
    """Which stream a state belongs to, and which part of it: what stays the same from its first batch to its last.

    Attributes:
        shard_index: which shard, 0 … shard_count - 1.
        shard_count: how many shards share each step.
        logical_shards: to how many parts the positions are dealt. A shard runs logical_shards / shard_count of them,
            the first one those from 0 on, and so on. A 1:1 pipeline is dealt to its shards.
        drop_remainder: `ShardOptions.drop_remainder`, which decides about the last global batch.
        global_batch: records per step over all shards.
        one_to_one: whether every record becomes exactly one element before it is batched.
        length: how many positions the sampler's order has, over all epochs; None where it is endless.
        fingerprint: source, sampler and operations.
    """

    shard_index: int
    shard_count: int
    logical_shards: int
    drop_remainder: bool
    global_batch: int
    one_to_one: bool
    length: int | None
    fingerprint: Fingerprint

    @functools.cached_property
    def encoded(self) -> str:
        """The stream as canonical JSON."""
        return _ENCODER.encode(vars(self) | {"fingerprint": vars(self.fingerprint)})

    @functools.cached_property
    def ending(self) -> bytes:
        """How every state of this stream ends."""
        return b',"stream":%b%b' % (self.encoded.encode(), _ENDING)

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Self:
        """Returns the stream with the fields that `encoded` wrote."""
        return cls(**{**fields, "fingerprint": Fingerprint(**fields["fingerprint"])})


class Place(NamedTuple):
    """Where one logical shard stands, between two batches.

    Attributes:
        position: the first position, over all shards, that no delivered batch has used. It is that of a global block,
            or the end of the order. A 1:1 pipeline is at the same position in all of them.
        skip: what a pipeline that is not 1:1 must skip at `position`, one number per stage; zeros where it is 1:1.
        is_final: whether the last batch delivered is what it is because the order ends: short, or padded. A longer
            order has another batch there.
    """

    position: int
    skip: tuple[int, ...]
    is_final: bool

    @property
    def encoded(self) -> str:
        """The place as canonical JSON: numbers only, which takes a third of the time that an encoder does."""
        is_final = "true" if self.is_final else "false"
        return f'{{"is_final":{is_final},"position":{self.position},"skip":[{",".join(map(str, self.skip))}]}}'


@final
class LoaderState(NamedTuple):
    """Where a stream stands for one shard, between two batches.

    Attributes:
        step: the number of batches that this shard has delivered.
        places: where each of the logical shards stands that the shard runs, in their order; one where the pipeline is
            1:1.
        stream: which stream this is.
    """

    step: int
    places: tuple[Place, ...]
    stream: Stream

    def encode(self) -> bytes:
        """Returns the state as canonical JSON, some hundred bytes."""
        # In the order of the alphabet. The stream is encoded once, however many states are taken of it.
        places = ",".join([place.encoded for place in self.places])
        text = f'{{"format":"{FORMAT}","places":[{places}],"step":{self.step}'.encode() + self.stream.ending
        return b'{"crc32":%d,%b' % (zlib.crc32(text), text[1:])

    @staticmethod
    def decode(raw: bytes | bytearray | memoryview, here: Stream | None = None) -> "LoaderState":
        """Returns the state that `encode` wrote, from its bytes or from the same JSON written differently.

        Args:
            raw: the state.
            here: the stream that it is likely to be of: what says the same, letter by letter, need not be parsed.

        Raises:
            CheckpointError: whatever else `raw` is.
        """
        try:
            fields = _checked_fields(raw, here)
            stream = fields.pop("stream")
            places = [Place(**{**place, "skip": tuple(place["skip"])}) for place in fields.pop("places")]
            return LoaderState(
                **fields,
                places=tuple(places),
                stream=here if here is not None and stream is here else Stream.from_fields(stream),
            )
        except CheckpointError:
            raise
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"The state cannot be read: {error or type(error).__name__}. Give what get_state() returned, unchanged."
            ) from error


def _checked_fields(raw: bytes | bytearray | memoryview, here: Stream | None) -> dict[str, Any]:
    """Returns the fields of the state itself, once format, version and CRC are found right and taken off.

    The stream is `here` itself where the text says so.
    """
    # The annotation is the contract, but callers read states from anywhere.
    if not isinstance(raw, (bytes, bytearray, memoryview)):
        raise TypeError(f"it must be bytes, got {type(raw).__name__}")
    text = bytes(raw)
    is_of_here = here is not None and text.endswith(here.ending) and _is_as_written(text)
    try:
        # All that a state of this stream says of its own comes before the ending.
        own = text[: -len(here.ending)] + _ENDING if here is not None and is_of_here else text
        fields = json.loads(own.decode())
    except ValueError as error:
        raise ValueError(f"it is not valid JSON in UTF-8 ({error})") from error
    if not isinstance(fields, dict) or fields.get("format") != FORMAT:
        raise ValueError(f'it has no "format": "{FORMAT}"')
    version = fields.get("version")
    if not isinstance(version, int):
        raise TypeError("it has no version")
    if version != VERSION:
        is_older = version < VERSION
        advice = "Seek to the step instead: seek(step)." if is_older else "Upgrade millstream to read it."
        raise CheckpointError(
            f"The state has version {version}, and this millstream reads version {VERSION} only: it was written by "
            f"{'an earlier' if is_older else 'a newer'} millstream. {advice}"
        )
    crc = fields.pop("crc32", None)
    # As it was written, which it mostly is, the text need not be made again.
    is_whole = is_of_here or _is_as_written(text) or zlib.crc32(_ENCODER.encode(fields).encode()) == crc
    if not isinstance(crc, int) or not is_whole:
        raise ValueError("its crc32 does not match, so it was damaged or edited")
    del fields["format"], fields["version"]
    return fields | {"stream": here} if is_of_here else fields


def _is_as_written(text: bytes) -> bool:
    """Returns whether a text begins as `encode` writes it, with the CRC of the rest."""
    crc, _, rest = text.removeprefix(b'{"crc32":').partition(b",")
    return crc == b"%d" % zlib.crc32(rest, zlib.crc32(b"{"))
