"""A checkpoint: which stream, and where in it, as a few hundred bytes of JSON.

The text is canonical (sorted keys, no white space) and carries a CRC of itself. It may come back with other white space
or another order of keys, because users keep it inside JSON of their own; whatever says anything else than what was
saved is refused. Nothing here depends on workers, threads or buffers: a state speaks of batches that were delivered.
"""

import dataclasses
import itertools
import json
import re
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import NamedTuple, TypeVar, final

from millstream.errors import CheckpointError

FORMAT = "millstream"
VERSION = 1
SIZE_LIMIT = 1 << 20
"""The most bytes that are parsed at all."""
NUMBER_LIMIT = 1 << 63
"""No number of a state is larger: a position is at most one past the largest int64."""
PHASE_LIMIT = 64
"""The most numbers that `LoaderState.skip` holds."""
WORD_LIMIT = 256
"""The most characters of one description in a fingerprint."""
WORDS_LIMIT = 256
"""The most descriptions in one part of a fingerprint; with WORD_LIMIT it keeps every state below SIZE_LIMIT."""
FINGERPRINT_PARTS = ("operations", "sampler", "source")
ALLOWABLE = ("global_batch", *FINGERPRINT_PARTS)
"""The differences that `check_compatible` accepts when asked to."""

# Control characters and surrogates: JSON escapes them in more than one spelling, or UTF-8 cannot hold them.
_UNWRITABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")
_Kind = TypeVar("_Kind")
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))


@final
@dataclasses.dataclass(frozen=True)
class Fingerprint:
    """Which stream a state belongs to, in words that are compared and shown to people.

    Attributes:
        sampler: (name, description) of everything that decides the order, sorted by name; not the number of epochs.
        source: the description of the source.
        operations: the description of each operation, in order.
    """

    sampler: tuple[tuple[str, str], ...]
    source: str
    operations: tuple[str, ...]

    def __post_init__(self) -> None:
        _exactly("operations", self.operations, tuple)
        object.__setattr__(self, "sampler", tuple(sorted(self.sampler)))
        names = [name for name, _ in self.sampler]
        if len(set(names)) < len(names):
            raise ValueError(f"sampler must give each name once, got {names}.")
        for field, words in (
            ("sampler", [*itertools.chain.from_iterable(self.sampler)]),
            ("source", [self.source]),
            ("operations", self.operations),
        ):
            _check_words(field, words)


@final
@dataclasses.dataclass(frozen=True)
class LoaderState:
    """Where a stream stands for one shard, between two batches.

    Attributes:
        step: the number of batches that this shard has delivered.
        position: the first position, over all shards, that no delivered batch has used; a multiple of `global_batch`
            except at the end of the stream and where the pipeline is not 1:1.
        skip: what a pipeline that is not 1:1 must skip at `position`, one number per phase; zeros where it is 1:1.
        shard_index: which shard, 0 … shard_count - 1.
        shard_count: how many shards share each step.
        drop_remainder: `ShardOptions.drop_remainder`, which decides about the last global batch.
        global_batch: records per step over all shards.
        one_to_one: whether every record becomes exactly one element before it is batched.
        fingerprint: which stream this is.
    """

    step: int
    position: int
    skip: tuple[int, ...]
    shard_index: int
    shard_count: int
    drop_remainder: bool
    global_batch: int
    one_to_one: bool
    fingerprint: Fingerprint

    def __post_init__(self) -> None:
        _check_number("step", self.step)
        _check_number("position", self.position)
        _check_number("shard_count", self.shard_count, minimum=1)
        _check_number("shard_index", self.shard_index, maximum=self.shard_count - 1)
        _check_number("global_batch", self.global_batch, minimum=self.shard_count)
        _exactly("drop_remainder", self.drop_remainder, bool)
        _exactly("one_to_one", self.one_to_one, bool)
        _exactly("fingerprint", self.fingerprint, Fingerprint)
        _exactly("skip", self.skip, tuple)
        if not 1 <= len(self.skip) <= PHASE_LIMIT:
            raise ValueError(f"skip must hold between 1 and {PHASE_LIMIT} numbers, got {len(self.skip)}.")
        for number in self.skip:
            _check_number("skip", number, maximum=0 if self.one_to_one else NUMBER_LIMIT)

    def encode(self) -> bytes:
        """Returns the state as canonical JSON in UTF-8, a few hundred bytes."""
        fields = vars(self) | {
            "fingerprint": vars(self.fingerprint) | {"sampler": dict(self.fingerprint.sampler)},
            "format": FORMAT,
            "version": VERSION,
        }
        text = _ENCODER.encode(fields).encode()
        # "crc32" sorts before every other key, so the text stays canonical with it in front.
        return b'{"crc32":%d,%b' % (zlib.crc32(text), text[1:])

    @staticmethod
    def decode(raw: bytes | bytearray | memoryview) -> "LoaderState":
        """Returns the state that `encode` wrote, from its bytes or from the same JSON written differently.

        Raises:
            CheckpointError: whatever else `raw` is.
        """
        try:
            return _from_fields(_checked_fields(_parse(raw)))
        except CheckpointError:
            raise
        except (ValueError, TypeError, RecursionError) as error:
            reason = "it is nested too deeply." if isinstance(error, RecursionError) else error
            raise CheckpointError(
                f"The state cannot be read: {reason} Give the bytes that get_state() returned, unchanged."
            ) from error


def check_compatible(saved: LoaderState, here: LoaderState, allow: Collection[str] = ()) -> None:
    """Returns if the loader whose state is `here` can go on from `saved` with exactly the batches that would have come.

    Of a 1:1 pipeline any shard goes on where any other stopped, while the global batch is the same. A pipeline that is
    not 1:1 goes on only on the shard that saved, because what the others skipped is not in its state.

    Args:
        saved: the state to go on from.
        here: any state of the loader that is to go on, for what it says about its stream and shard.
        allow: differences to accept on purpose, out of `ALLOWABLE`. A new global batch must divide the saved position.

    Raises:
        CheckpointError: the streams differ; names every difference, what was saved, what is here and what to do.
        ValueError: `allow` names something else.
    """
    if not set(allow) <= set(ALLOWABLE):
        raise ValueError(f"allow must be a collection of names out of {', '.join(ALLOWABLE)}; got {allow!r}.")
    refused = [difference for difference in _differences(saved, here) if difference.part not in allow]
    if refused:
        listed = "".join(f"\n  {difference.text}" for difference in refused)
        raise CheckpointError(f"The state belongs to another stream:{listed}\n{_advice(refused, allow)}")


class _Difference(NamedTuple):
    """One difference between two states: in words, and the name in ALLOWABLE that accepts it (None: nothing does)."""

    part: str | None
    text: str


def _differences(saved: LoaderState, here: LoaderState) -> Iterator[_Difference]:
    """Yields every difference that keeps `here` from going on from `saved`."""
    old, new = dict(saved.fingerprint.sampler), dict(here.fingerprint.sampler)
    for name in sorted(old.keys() | new.keys()):
        yield from _unequal("sampler", f"sampler {name}", old.get(name), new.get(name))
    yield from _unequal("source", "source", saved.fingerprint.source, here.fingerprint.source)
    pairs = itertools.zip_longest(saved.fingerprint.operations, here.fingerprint.operations)
    for number, (before, now) in enumerate(pairs):
        yield from _unequal("operations", f"operations[{number}]", before, now)
    if min(saved.shard_count, here.shard_count) > 1:  # A single shard has no remainder to drop.
        yield from _unequal("sampler", "shard_options.drop_remainder", saved.drop_remainder, here.drop_remainder)
    if saved.one_to_one and here.one_to_one:
        yield from _batch_differences(saved, here)
    else:
        yield from _shard_differences(saved, here)


def _batch_differences(saved: LoaderState, here: LoaderState) -> Iterator[_Difference]:
    """Yields what keeps a 1:1 pipeline from going on with another global batch."""
    yield from _unequal("global_batch", "global_batch", saved.global_batch, here.global_batch)
    step, rest = divmod(saved.position, here.global_batch)
    if rest and saved.global_batch != here.global_batch:
        yield _Difference(
            None,
            f"position: saved {saved.position}, which is no multiple of the global_batch {here.global_batch} here; the "
            f"nearest are {saved.position - rest}, which is seek({step}), and "
            f"{saved.position - rest + here.global_batch}, which is seek({step + 1})",
        )


def _shard_differences(saved: LoaderState, here: LoaderState) -> Iterator[_Difference]:
    """Yields what keeps a pipeline from going on that is not 1:1, or was not when it was saved."""
    reason = ", and a pipeline with a filter or flat_map goes on only on the shard that saved it"
    for name in ("shard_index", "shard_count", "global_batch"):
        yield from _unequal(None, name, getattr(saved, name), getattr(here, name), reason)
    # With nothing to skip, any pipeline can start at the saved position: that is the user's choice of operations.
    part = "operations" if saved.one_to_one else None
    yield from _unequal(part, "one_to_one", saved.one_to_one, here.one_to_one)
    if not saved.one_to_one:
        yield from _unequal(None, "number of phases in skip", len(saved.skip), len(here.skip))


def _unequal(part: str | None, label: str, saved: object, here: object, reason: str = "") -> Iterator[_Difference]:
    """Yields the difference between two values unless they are equal; None stands for no such thing."""
    if saved != here:
        before, now = ("nothing" if value is None else value for value in (saved, here))
        yield _Difference(part, f"{label}: saved {before}, here {now}{reason}")


def _advice(refused: Iterable[_Difference], allow: Collection[str]) -> str:
    """Returns what a user can do about the refused differences."""
    advice = "Build the loader as it was when the state was saved"
    parts = {difference.part for difference in refused}
    names = sorted({*allow, *(part for part in parts if part is not None)})
    if None in parts:
        return f"{advice}; the state cannot be used otherwise."
    quoted = ", ".join(f'"{name}"' for name in names)
    return f"{advice}, or go on with these differences on purpose: set_state(state, allow={{{quoted}}})."


def _parse(raw: bytes | bytearray | memoryview) -> dict[str, object]:
    """Returns the JSON object in `raw`, in which every number is a whole one and no key comes twice."""
    # The annotation is the contract, but callers read states from anywhere.
    if not isinstance(raw, (bytes, bytearray, memoryview)):
        raise TypeError(f"it must be bytes, got {type(raw).__name__}.")
    size = memoryview(raw).nbytes
    if size > SIZE_LIMIT:
        raise ValueError(f"a state has at most {SIZE_LIMIT} bytes, got {size}.")
    try:
        fields = json.loads(
            bytes(raw).decode(),
            parse_int=_whole_number,
            parse_float=_no_number,
            parse_constant=_no_number,
            object_pairs_hook=_without_duplicates,
        )
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"it is no JSON in UTF-8 ({error}).") from error
    return _exactly("the outermost value", fields, dict)


def _whole_number(text: str) -> int:
    """Returns the number, refusing what no field may hold before its digits are converted."""
    if not text.isdecimal() or len(text) > len(str(NUMBER_LIMIT)):
        raise ValueError(f"numbers must lie between 0 and 2**63, got {text[:24]}.")
    return int(text)


def _no_number(text: str) -> None:
    """Refuses fractions, exponents, NaN and infinities."""
    raise ValueError(f"every number must be a whole one, got {text[:24]}.")


def _without_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Returns the pairs as a dict, refusing a key that comes twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a key comes twice.")
    return fields


def _checked_fields(fields: dict[str, object]) -> dict[str, object]:
    """Returns the fields of the state itself, once format, version and CRC are found right and taken off."""
    if fields.pop("format", None) != FORMAT:
        raise ValueError(f'it has no "format": "{FORMAT}".')
    version = fields.pop("version", None)
    _check_number("version", version, minimum=1)
    if version != VERSION:
        raise CheckpointError(
            f"The state has version {version}, and this millstream reads version {VERSION}: it was written by a newer "
            "millstream. Upgrade millstream to read it."
        )
    crc = fields.pop("crc32", None)
    _check_number("crc32", crc)
    if zlib.crc32(_ENCODER.encode(fields | {"format": FORMAT, "version": VERSION}).encode()) != crc:
        raise ValueError("its crc32 does not match, so it was damaged or edited.")
    return fields


def _from_fields(fields: Mapping[str, object]) -> LoaderState:
    """Returns the state with these fields, all of them and no others, of exactly these types."""
    _check_keys("the state", fields, LoaderState)
    words = _exactly("fingerprint", fields["fingerprint"], dict)
    _check_keys("fingerprint", words, Fingerprint)
    fingerprint = Fingerprint(
        sampler=tuple(_exactly("sampler", words["sampler"], dict).items()),
        source=words["source"],
        operations=tuple(_exactly("operations", words["operations"], list)),
    )
    skip = tuple(_exactly("skip", fields["skip"], list))
    build: Callable[..., LoaderState] = LoaderState  # Its __post_init__ checks the types that mypy cannot know.
    return build(**{**fields, "skip": skip, "fingerprint": fingerprint})


def _check_keys(where: str, fields: Mapping[str, object], kind: type[LoaderState | Fingerprint]) -> None:
    """Raises ValueError unless `fields` has exactly the fields of the dataclass `kind`."""
    expected = {field.name for field in dataclasses.fields(kind)}
    for text, names in (("lacks", expected - fields.keys()), ("must not have", fields.keys() - expected)):
        if names:
            raise ValueError(f"{where} {text} {', '.join(map(ascii, sorted(names)))[:200]}.")


def _check_number(name: str, value: object, minimum: int = 0, maximum: int = NUMBER_LIMIT) -> None:
    """Raises unless `value` is a whole number in the range; True and False are none."""
    if not minimum <= _exactly(name, value, int) <= maximum:
        raise ValueError(f"{name} must be between {minimum} and {maximum}, got {value}.")


def _exactly(name: str, value: object, kind: type[_Kind]) -> _Kind:
    """Returns `value`, or raises TypeError unless it is of this very type: True is no int here."""
    if not isinstance(value, kind) or type(value) is not kind:
        raise TypeError(f"{name} must be {kind.__name__}, got {type(value).__name__}.")
    return value


def _check_words(field: str, words: Collection[str]) -> None:
    """Raises unless `words` are few, short, writable strings."""
    if len(words) > WORDS_LIMIT:
        raise ValueError(f"{field} must hold at most {WORDS_LIMIT} descriptions, got {len(words)}.")
    for word in words:
        _exactly(field, word, str)
        if len(word) > WORD_LIMIT:
            raise ValueError(f"{field} must hold at most {WORD_LIMIT} characters each, got {len(word)}.")
        if _UNWRITABLE.search(word):
            raise ValueError(f"{field} must hold no control characters or surrogates, got {word!r}.")
