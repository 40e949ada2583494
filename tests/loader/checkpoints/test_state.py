"""A state says exactly what was saved, or is refused with one clear error."""

import dataclasses
import itertools
import json
import zlib
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.errors import CheckpointError
from millstream.loader.checkpoints.envelope import VERSION
from millstream.loader.checkpoints.fingerprint import Fingerprint
from millstream.loader.checkpoints.state import LoaderState, Run, SavedCursor, Segment, Stream

FINGERPRINT = Fingerprint(
    identity={"sampler": "IndexSampler", "sampler.seed": "7", "source": "100 records of list #47fe23d2"},
    content={"operations[0].map()": "code #1a2b3c4d"},
    python="3.11",
)
STREAM = Stream(
    shard_index=1,
    shard_count=2,
    logical_shards=2,
    drop_remainder=False,
    global_batch=32,
    one_to_one=True,
    length=None,
    fingerprint=FINGERPRINT,
)
STATE = LoaderState(step=5, cursors=(SavedCursor(160, (0,), is_final=False),), stream=STREAM)
FILTERED = LoaderState(
    step=5,
    cursors=(SavedCursor(160, (3, 0), is_final=True), SavedCursor(165, (0, 0), is_final=False)),
    stream=dataclasses.replace(STREAM, one_to_one=False, length=165, logical_shards=4),
)

texts = st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.text(max_size=40), max_size=4)
numbers = st.integers(0, 1 << 63)


@st.composite
def states(draw: st.DrawFn) -> LoaderState:
    shards, own, width = draw(st.integers(1, 9)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    one_to_one = draw(st.booleans())
    cursor = st.builds(
        SavedCursor, numbers, st.lists(numbers, min_size=width, max_size=width).map(tuple), is_final=st.booleans()
    )
    count = 1 if one_to_one else own
    stream = Stream(
        shard_index=draw(st.integers(0, shards - 1)),
        shard_count=shards,
        logical_shards=shards * own,
        drop_remainder=draw(st.booleans()),
        global_batch=draw(st.integers(1, 1 << 62)),
        one_to_one=one_to_one,
        length=draw(st.none() | numbers | st.integers(1 << 64, 1 << 90)),
        fingerprint=Fingerprint(draw(texts), draw(texts), "3.11"),
    )
    cursors = tuple(draw(st.lists(cursor, min_size=count, max_size=count)))
    return LoaderState(draw(numbers), cursors, stream, draw(st.none() | runs()))


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Draws a history that is not plain."""
    steps = [0, *sorted(draw(st.sets(st.integers(1, 1 << 62), max_size=3)))]
    segments = tuple(Segment(step, draw(numbers), draw(st.integers(1, 1 << 30))) for step in steps)
    weights = st.lists(st.integers(0, 9), min_size=1) | st.dictionaries(st.text(), st.integers(0, 9), min_size=1)
    return Run(segments, tuple(draw(st.lists(st.tuples(numbers, weights), max_size=3))))


def sealed(fields: dict[str, Any]) -> bytes:
    body = {key: value for key, value in fields.items() if key != "crc32"}
    return json.dumps(body | {"crc32": zlib.crc32(canonical(body))}).encode()


def canonical(fields: Any) -> bytes:
    return json.dumps(fields, sort_keys=True, separators=(",", ":")).encode()


def refusal(raw: Any) -> str:
    """Returns the text of the CheckpointError that decoding raises."""
    with pytest.raises(CheckpointError) as caught:
        LoaderState.decode(raw)
    return str(caught.value)


@settings(deadline=None, max_examples=60)
@given(states(), st.sampled_from([None, 0, 3, "\t"]), st.booleans(), st.randoms(use_true_random=False))
def test_round_trip_through_any_json_writer(state: LoaderState, indent: Any, ascii_only: bool, random: Any) -> None:
    """Bytes are canonical; a state comes back equal from them, and from other white space, escapes and key order.

    Records times epochs may be more than any position.
    """
    raw = state.encode()
    fields = json.loads(raw)
    shuffled = dict(random.sample([*fields.items()], len(fields)))
    rewritten = json.dumps(shuffled, indent=indent, ensure_ascii=ascii_only).encode()

    assert raw == canonical(fields)
    assert LoaderState.decode(raw) == LoaderState.decode(rewritten) == state
    assert LoaderState.decode(rewritten).encode() == raw


def test_a_state_is_small_and_every_buffer_reads() -> None:
    """A typical state is a few hundred bytes, and is read from any kind of buffer."""
    raw = STATE.encode()
    assert len(raw) < 600
    spread = bytes(itertools.chain.from_iterable((byte, 0) for byte in raw))
    for buffer in (raw, bytearray(raw), memoryview(raw), memoryview(spread)[::2]):
        assert LoaderState.decode(buffer) == STATE


@pytest.mark.parametrize("state", [STATE, FILTERED], ids=["typical", "filtered"])
def test_every_damaged_byte_is_refused(state: LoaderState) -> None:
    """No wrong bit, lost byte or added byte is accepted, and none raises anything but CheckpointError."""
    raw = state.encode()
    for bit in range(len(raw) * 8):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        refusal(damaged)
    for offset in range(len(raw)):
        refusal(raw[:offset])
        refusal(raw[offset + 1 :])
        refusal(raw[:offset] + raw[offset + 1 :])
        refusal(raw[:offset] + b"\0" + raw[offset:])


def test_missing_and_extra_fields_are_refused_by_name() -> None:
    """A state has exactly its fields, at every level."""
    fields = json.loads(STATE.encode())
    for name in ("position", "stream", "step"):
        assert name in refusal(sealed({key: value for key, value in fields.items() if key != name}))
    assert "worker_count" in refusal(sealed(fields | {"worker_count": 2}))
    assert "worker_count" in refusal(sealed(fields | {"stream": fields["stream"] | {"worker_count": 2}}))
    assert refusal(sealed(fields | {"stream": 5}))


JUNK: list[Any] = [None, True, -1, 1 << 64, 1.5, "", "7", [], [1], {}, {"a": 1}, [[[]]], "x" * 5000]


@pytest.mark.parametrize("state", [STATE, FILTERED], ids=["typical", "filtered"])
def test_anything_at_any_leaf_is_refused_or_a_state_that_says_so(state: LoaderState) -> None:
    """With a CRC that fits, junk at any depth is a CheckpointError, or a value that the field can have."""
    for path in paths(json.loads(state.encode())):
        for junk in JUNK:
            fields = json.loads(state.encode())
            inner = fields
            for key in path[:-1]:
                inner = inner[key]
            inner[path[-1]] = junk
            try:
                read = LoaderState.decode(sealed(fields))
            except CheckpointError:
                continue
            fields.pop("crc32", None)
            assert json.loads(read.encode()).items() >= fields.items()


def paths(value: Any) -> Iterator[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in items:
        yield (key,)
        yield from ((key, *path) for path in paths(part))


def test_another_version_is_refused_with_what_to_do() -> None:
    """A state of a later or an earlier millstream is refused as such, whatever fields it has."""
    for version, texts in ((VERSION + 1, ("newer", "Upgrade")), (1, ("earlier", "seek(step)"))):
        fields = json.loads(STATE.encode()) | {"version": version, "something_else": 1}
        message = refusal(json.dumps(fields).encode())
        for text in (f"version {version},", f"reads version {VERSION}", *texts):
            assert text in message


def test_what_is_no_state_is_refused() -> None:
    """Whatever is given as a state, the only error is CheckpointError, with the reason and what to give."""
    raw = STATE.encode()
    given = {
        b"": "JSON",
        raw.decode().encode("utf-16"): "UTF-8",
        raw + raw: "JSON",
        b"[" + raw + b"]": "format",
        raw.replace(b'"step":5', b'"step":' + b"9" * 5000): "JSON",
        raw.replace(b'"step":5', b'"step":NaN'): "Cannot read",
        raw.replace(b'"step":5', b'"step":5.0'): "crc32",
        b"[" * 100_000: "Cannot read",
        None: "bytes",
        5: "bytes",
        raw.decode(): "bytes",
        object(): "bytes",
    }
    for other, word in given.items():
        message = refusal(other)
        assert word in message
        assert "get_state()" in message
        assert len(message) < 600
