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
from millstream.loader.state import (
    ALLOWABLE,
    NUMBER_LIMIT,
    PHASE_LIMIT,
    SIZE_LIMIT,
    WORD_LIMIT,
    WORDS_LIMIT,
    Fingerprint,
    LoaderState,
    check_compatible,
)

FINGERPRINT = Fingerprint(
    sampler=(("num_records", "100"), ("seed", "7"), ("shuffle", "True")),
    source="100 records of list#47fe23d2",
    operations=("Map(scale=2)#1a2b3c4d", "RandomMap(crop#5e6f7a8b(size=(24, 24)))", "Batch(16)"),
)
STATE = LoaderState(
    step=5,
    position=160,
    skip=(0,),
    shard_index=1,
    shard_count=2,
    drop_remainder=False,
    global_batch=32,
    one_to_one=True,
    fingerprint=FINGERPRINT,
)
FILTERED = dataclasses.replace(STATE, one_to_one=False, skip=(3, 0))
NON_ASCII = dataclasses.replace(
    STATE,
    fingerprint=Fingerprint((("größe", "“ß”"),), 'C:\\data\\"日本語" 🎉', ("Map(\\x1b, é)", "/")),
)

words = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=40)
numbers = st.integers(0, NUMBER_LIMIT)


@st.composite
def states(draw: st.DrawFn) -> LoaderState:
    """Draws any valid state."""
    shard_count = draw(st.integers(1, NUMBER_LIMIT))
    one_to_one = draw(st.booleans())
    skip = st.lists(st.just(0) if one_to_one else numbers, min_size=1, max_size=PHASE_LIMIT)
    return LoaderState(
        step=draw(numbers),
        position=draw(numbers),
        skip=tuple(draw(skip)),
        shard_index=draw(st.integers(0, shard_count - 1)),
        shard_count=shard_count,
        drop_remainder=draw(st.booleans()),
        global_batch=draw(st.integers(shard_count, NUMBER_LIMIT)),
        one_to_one=one_to_one,
        fingerprint=Fingerprint(
            sampler=tuple(draw(st.dictionaries(words, words, max_size=4)).items()),
            source=draw(words),
            operations=tuple(draw(st.lists(words, max_size=4))),
        ),
    )


def sealed(fields: Any) -> bytes:
    """Returns the fields as JSON with a CRC that fits, as a careful forger would write them."""
    body = {key: value for key, value in fields.items() if key != "crc32"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
    return json.dumps(body | {"crc32": zlib.crc32(text)}).encode()


def refusal(raw: Any) -> str:
    """Returns the text of the CheckpointError that decoding must end in."""
    with pytest.raises(CheckpointError) as caught:
        LoaderState.decode(raw)
    return str(caught.value)


@settings(deadline=None, max_examples=200)
@given(states(), st.sampled_from([None, 0, 3, "\t"]), st.booleans(), st.randoms(use_true_random=False))
def test_round_trip_through_any_json_writer(state: LoaderState, indent: Any, ascii_only: bool, random: Any) -> None:
    """A state comes back equal from its bytes, and from the same JSON in other white space, escapes and key order."""
    raw = state.encode()
    fields = json.loads(raw)
    shuffled = dict(random.sample([*fields.items()], len(fields)))
    rewritten = json.dumps(shuffled, indent=indent, ensure_ascii=ascii_only).encode()

    assert LoaderState.decode(raw) == state
    assert LoaderState.decode(rewritten) == state
    assert LoaderState.decode(rewritten).encode() == raw


def test_a_state_is_small_canonical_json_and_every_buffer_reads() -> None:
    """A typical state takes a few hundred bytes of JSON, and may come in any kind of bytes."""
    raw = STATE.encode()
    assert len(raw) < 500
    assert raw == json.dumps(json.loads(raw), sort_keys=True, separators=(",", ":")).encode()
    spread = bytes(itertools.chain.from_iterable((byte, 0) for byte in raw))
    for buffer in (raw, bytearray(raw), memoryview(raw), memoryview(spread)[::2]):
        assert LoaderState.decode(buffer) == STATE


def test_the_largest_state_still_reads() -> None:
    """Whatever a fingerprint may hold stays below the size that is refused."""
    names = [chr(0x10000 + i) * WORD_LIMIT for i in range(WORDS_LIMIT // 2)]
    large = Fingerprint(
        tuple((name, '"' * WORD_LIMIT) for name in names), "\\" * WORD_LIMIT, ("\U00010000" * WORD_LIMIT,) * WORDS_LIMIT
    )
    state = dataclasses.replace(FILTERED, fingerprint=large, skip=(NUMBER_LIMIT,) * PHASE_LIMIT)
    assert len(state.encode()) <= SIZE_LIMIT
    assert LoaderState.decode(state.encode()) == state


@pytest.mark.parametrize("state", [STATE, FILTERED, NON_ASCII], ids=["typical", "filtered", "non-ascii"])
def test_every_bit_flip_is_refused(state: LoaderState) -> None:
    """No single wrong bit is accepted, and none raises anything but CheckpointError."""
    raw = state.encode()
    for bit in range(len(raw) * 8):
        damaged = bytearray(raw)
        damaged[bit // 8] ^= 1 << bit % 8
        refusal(damaged)


@pytest.mark.parametrize("state", [STATE, FILTERED, NON_ASCII], ids=["typical", "filtered", "non-ascii"])
def test_every_truncation_and_every_extra_byte_is_refused(state: LoaderState) -> None:
    """A state that lost bytes at either end or in the middle, or gained one, is refused."""
    raw = state.encode()
    for place in range(len(raw)):
        refusal(raw[:place])
        refusal(raw[place + 1 :])
        refusal(raw[:place] + raw[place + 1 :])
        refusal(raw[:place] + b"\0" + raw[place:])
    for byte in set(range(256)) - set(b" \t\r\n"):
        refusal(raw + bytes([byte]))


@settings(deadline=None, max_examples=300)
@given(states(), st.data())
def test_damage_anywhere_is_refused_or_changes_nothing(state: LoaderState, data: st.DataObject) -> None:
    """Overwritten runs of bytes are refused, unless the JSON still says the very same."""
    raw = bytearray(state.encode())
    start = data.draw(st.integers(0, len(raw) - 1))
    raw[start : start + 8] = data.draw(st.binary(max_size=8) | st.sampled_from([b" ", b"0", b"9", b'"', b",", b"}"]))
    try:
        read = LoaderState.decode(raw)
    except CheckpointError:
        return
    assert read == state


@settings(deadline=None, max_examples=300)
@given(
    st.binary()
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner) | st.dictionaries(st.text() | st.sampled_from([*json.loads(STATE.encode())]), inner)
        ),
        max_leaves=8,
    ).map(lambda value: json.dumps(value).encode())
)
def test_other_bytes_and_other_json_are_refused(raw: bytes) -> None:
    """Bytes that no `encode` wrote are refused, be they JSON or not."""
    refusal(raw)


def test_swapped_values_and_swapped_names_are_refused() -> None:
    """Two fields that changed places, values or names, do not go unnoticed."""
    for state in (STATE, FILTERED):
        fields = json.loads(state.encode())
        for one, other in itertools.combinations(fields, 2):
            swapped = fields | {one: fields[other], other: fields[one]}
            if json.dumps(swapped) != json.dumps(fields):
                refusal(json.dumps(swapped).encode())


NUMBERS = ["step", "position", "shard_index", "shard_count", "global_batch", "version", "crc32"]
NO_NUMBERS: list[Any] = [None, True, "5", 5.0, 1.5, [], [5], {}, -1, NUMBER_LIMIT + 1, 10**30, 10**4299]
NO_BOOLEANS: list[Any] = [None, 0, 1, "true", [], {}]
NO_WORDS: list[Any] = [None, 1, True, [], {}, "x" * (WORD_LIMIT + 1), "line\nbreak", "\x7f", "\x00"]
NO_FIELDS: list[tuple[str, Any]] = [
    *itertools.product(NUMBERS, NO_NUMBERS),
    *itertools.product(["drop_remainder", "one_to_one"], NO_BOOLEANS),
    *itertools.product(["format"], [None, 1, "", "Millstream", "grain", ["millstream"]]),
    *itertools.product(
        ["skip"], [None, 0, "0", {}, [], [0] * (PHASE_LIMIT + 1), [[0]], [1], *([x] for x in NO_NUMBERS)]
    ),
    *itertools.product(["fingerprint"], [None, 1, "words", [], {}, [["source", "x"]]]),
    ("shard_index", STATE.shard_count),
    ("shard_count", 0),
    ("global_batch", STATE.shard_count - 1),
]
NO_PARTS: list[tuple[str, Any]] = [
    *itertools.product(["source"], NO_WORDS),
    *itertools.product(["operations"], [None, "Map", {}, ["x"] * (WORDS_LIMIT + 1), *([x] for x in NO_WORDS)]),
    *itertools.product(["sampler"], [None, "seed", [], [["seed", "7"]], *({"seed": x} for x in NO_WORDS), {"\n": "7"}]),
]


def test_a_field_of_another_type_or_range_is_refused_by_name() -> None:
    """Even with a CRC that fits, every value that the field cannot have is refused."""
    for name, value in NO_FIELDS:
        fields = json.loads(STATE.encode()) | {name: value}
        message = refusal(json.dumps(fields).encode() if name == "crc32" else sealed(fields))
        assert name in message or "number" in message, (name, value)


def test_a_fingerprint_of_another_type_is_refused_by_name() -> None:
    """Even with a CRC that fits, every part of a fingerprint has its type and its limits."""
    for name, value in NO_PARTS:
        fields = json.loads(STATE.encode())
        fields["fingerprint"][name] = value
        assert name in refusal(sealed(fields)), (name, value)


def test_missing_extra_and_repeated_fields_are_refused_by_name() -> None:
    """A state has exactly its fields, at both levels, each once."""
    fields = json.loads(STATE.encode())
    for name in fields:
        lacking = {key: value for key, value in fields.items() if key != name}
        assert name in refusal(json.dumps(lacking).encode() if name == "crc32" else sealed(lacking))
        repeated = json.dumps(fields)[:-1] + f", {json.dumps(name)}: {json.dumps(fields[name])}}}"
        assert "twice" in refusal(repeated.encode())
    for name in fields["fingerprint"]:
        words = {key: value for key, value in fields["fingerprint"].items() if key != name}
        assert name in refusal(sealed(fields | {"fingerprint": words}))
    assert "worker_count" in refusal(sealed(fields | {"worker_count": 2}))
    assert "worker_count" in refusal(sealed(fields | {"fingerprint": fields["fingerprint"] | {"worker_count": "2"}}))
    inner = json.dumps(fields).replace('"source":', '"source": "", "source":')
    assert "twice" in refusal(inner.encode())


@settings(deadline=None, max_examples=300)
@given(
    st.sampled_from([name for name in json.loads(STATE.encode()) if name != "crc32"]),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
        max_leaves=6,
    ),
)
def test_a_forged_field_is_refused_or_taken_as_it_is(name: str, value: Any) -> None:
    """With a CRC that fits, any value of any field is either refused or comes out unchanged, type and all."""
    raw = sealed(json.loads(STATE.encode()) | {name: value})
    try:
        read = LoaderState.decode(raw)
    except CheckpointError:
        return
    assert repr(json.loads(read.encode())[name]) == repr(value)


def test_a_newer_version_says_to_upgrade() -> None:
    """A state of a later millstream is refused as such, whatever fields it has, and the way out is told."""
    for version in (2, 999, NUMBER_LIMIT):
        fields = json.loads(STATE.encode()) | {"version": version, "something_new": 1}
        message = refusal(json.dumps(fields).encode())
        for text in (f"version {version},", "version 1:", "newer millstream", "Upgrade"):
            assert text in message


def hostile() -> Iterator[tuple[str, Any, str]]:
    """Yields what is no state: a name, the bytes or object, and a word of the message."""
    raw = STATE.encode()
    deep = 100_000
    yield "empty", b"", "JSON"
    yield "blank", b"  ", "JSON"
    yield "latin 1", NON_ASCII.encode().decode().replace("é", "\xe9").encode("latin-1", "ignore"), "UTF-8"
    yield "utf-16", raw.decode().encode("utf-16"), "UTF-8"
    yield "utf-8 with a byte order mark", b"\xef\xbb\xbf" + raw, "JSON"
    yield "surrogate", raw.replace(b'"100 records', b'"\\ud800 records'), "cannot be read"
    yield "two states", raw + raw, "JSON"
    yield "in a list", b"[" + raw + b"]", "dict"
    yield "in a string", json.dumps(raw.decode()).encode(), "dict"
    yield "huge number", raw.replace(b'"step":5', b'"step":' + b"9" * 5000), "number"
    yield "huge crc", raw.replace(b'"crc32":', b'"crc32":' + b"9" * 500_000), "number"
    yield "huge exponent", raw.replace(b'"step":5', b'"step":5e999999999'), "whole"
    yield "negative", raw.replace(b'"step":5', b'"step":-5'), "-5"
    yield "not a number", raw.replace(b'"step":5', b'"step":NaN'), "NaN"
    yield "infinite", raw.replace(b'"step":5', b'"step":Infinity'), "Infinity"
    yield "minus infinite", raw.replace(b'"step":5', b'"step":-Infinity'), "Infinity"
    yield "fraction", raw.replace(b'"step":5', b'"step":5.0'), "5.0"
    yield "deep lists", b"[" * deep + b"]" * deep, "deep"
    yield "unclosed lists", b"[" * deep, "deep"
    yield "deep objects", b'{"a":' * deep + b"1" + b"}" * deep, "deep"
    yield "deep field", raw.replace(b'"step":5', b'"step":' + b"[" * deep + b"]" * deep), "deep"
    yield "rather deep field", raw.replace(b'"step":5', b'"step":' + b"[" * 400 + b"]" * 400), "cannot be read"
    yield "too large", raw + b" " * SIZE_LIMIT, str(SIZE_LIMIT)
    yield "too large view", memoryview(bytearray(8 * SIZE_LIMIT)).cast("Q"), str(SIZE_LIMIT)
    yield "many keys", json.dumps({str(i): i for i in range(50_000)}).encode(), "format"
    for other in (None, 5, raw.decode(), [raw], json.loads(raw), STATE, object()):
        yield type(other).__name__, other, "bytes"


def test_hostile_input_is_refused() -> None:
    """Whatever is given as a state, the one error is CheckpointError, short, with the reason and what to give."""
    for name, raw, word in hostile():
        message = refusal(raw)
        assert word in message, name
        assert "get_state()" in message, name
        assert len(message) < 600, name


def test_a_released_view_is_refused() -> None:
    """A memoryview whose memory is gone is unreadable like anything else."""
    view = memoryview(STATE.encode())
    view.release()
    refusal(view)


IMPOSSIBLE: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"step": -1}, ValueError),
    ({"step": True}, TypeError),
    ({"position": 1.0}, TypeError),
    ({"shard_count": 0}, ValueError),
    ({"shard_index": 2}, ValueError),
    ({"global_batch": 1}, ValueError),
    ({"drop_remainder": 1}, TypeError),
    ({"one_to_one": None}, TypeError),
    ({"skip": ()}, ValueError),
    ({"skip": [0]}, TypeError),
    ({"skip": (1,)}, ValueError),
    ({"fingerprint": None}, TypeError),
]


def test_an_impossible_state_is_not_built() -> None:
    """A loader that computes nonsense learns it when it builds the state, with the field's name."""
    for changes, error in IMPOSSIBLE:
        with pytest.raises(error, match=next(iter(changes))):
            dataclasses.replace(STATE, **changes)


def test_a_fingerprint_names_each_part_of_the_sampler_once() -> None:
    """The order of the sampler's names does not matter; a name given twice is an error."""
    assert Fingerprint((("b", "2"), ("a", "1")), "", ()) == Fingerprint((("a", "1"), ("b", "2")), "", ())
    with pytest.raises(ValueError, match="once"):
        Fingerprint((("a", "1"), ("a", "2")), "", ())
    with pytest.raises(TypeError, match="operations"):
        Fingerprint((), "", ["Map"])  # type: ignore[arg-type]


def with_words(**changes: Any) -> LoaderState:
    """Returns STATE with another fingerprint."""
    return dataclasses.replace(STATE, fingerprint=dataclasses.replace(FINGERPRINT, **changes))


def mismatch(saved: LoaderState, here: LoaderState, *allow: str) -> str:
    """Returns the text of the CheckpointError that comparing must end in."""
    with pytest.raises(CheckpointError) as caught:
        check_compatible(saved, here, allow)
    return str(caught.value)


MAP, CROP, BATCH = FINGERPRINT.operations
WORD_DIFFERENCES: list[tuple[str, LoaderState, list[str]]] = [
    ("sampler", with_words(sampler=(("num_records", "100"), ("seed", "8"), ("shuffle", "True"))), ["seed", "7", "8"]),
    (
        "sampler",
        with_words(sampler=(("num_records", "99"), ("seed", "7"), ("shuffle", "False"))),
        ["num_records", "100", "99", "shuffle", "True", "False"],
    ),
    (
        "sampler",
        with_words(sampler=(("sampler", "Mine()"),)),
        ["seed: saved 7, here nothing", "saved nothing, here Mine()"],
    ),
    ("sampler", dataclasses.replace(STATE, drop_remainder=True), ["drop_remainder: saved False, here True"]),
    ("source", with_words(source="90 records of list#0"), [FINGERPRINT.source, "90 records of list#0"]),
    (
        "operations",
        with_words(operations=("Map(scale=3)#1a2b3c4d", CROP, BATCH)),
        ["operations[0]: saved Map(scale=2)#1a2b3c4d, here Map(scale=3)#1a2b3c4d"],
    ),
    ("operations", with_words(operations=(MAP, CROP)), [f"operations[2]: saved {BATCH}, here nothing"]),
    ("operations", with_words(operations=(*FINGERPRINT.operations, "f#0")), ["operations[3]: saved nothing, here f#0"]),
    ("operations", with_words(operations=(CROP, MAP, BATCH)), ["operations[0]", "operations[1]", MAP, CROP]),
    ("operations", with_words(operations=()), ["operations[0]", "operations[1]", "operations[2]"]),
]


@pytest.mark.parametrize(("part", "here", "texts"), WORD_DIFFERENCES)
def test_a_difference_in_words_is_named_and_can_be_allowed(part: str, here: LoaderState, texts: list[str]) -> None:
    """Each difference is refused with what was saved and what is here, unless its own part is allowed."""
    message = mismatch(STATE, here, *(set(ALLOWABLE) - {part}))
    for text in texts:
        assert text in message
    assert part in message.splitlines()[-1]
    assert "set_state(state, allow={" in message
    check_compatible(STATE, here, {part})


def test_equal_streams_are_compatible_wherever_they_stand() -> None:
    """Step, position and what is skipped are where the stream stands, not which stream it is."""
    check_compatible(STATE, STATE)
    check_compatible(STATE, dataclasses.replace(STATE, step=0, position=0))
    check_compatible(FILTERED, dataclasses.replace(FILTERED, step=0, position=0, skip=(0, 0)))


def test_every_difference_is_named_at_once() -> None:
    """A message lists all that differs, and the advice allows all of it together with what was allowed before."""
    here = with_words(sampler=(("seed", "8"),), source="other", operations=(MAP, "Mine", BATCH))
    message = mismatch(STATE, dataclasses.replace(here, global_batch=16), "source")
    for text in ("num_records", "seed", "shuffle", "operations[1]", "global_batch: saved 32, here 16"):
        assert text in message
    assert "source:" not in message
    assert 'allow={"global_batch", "operations", "sampler", "source"}' in message
    check_compatible(STATE, dataclasses.replace(here, global_batch=16), ALLOWABLE)


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 32), st.data())
def test_a_one_to_one_pipeline_goes_on_on_any_shard(shard_count: int, data: st.DataObject) -> None:
    """At one global batch, number and index of the shards are free."""
    shard_index = data.draw(st.integers(0, shard_count - 1))
    check_compatible(STATE, dataclasses.replace(STATE, shard_index=shard_index, shard_count=shard_count))


def test_a_single_shard_has_no_remainder_to_drop() -> None:
    """`drop_remainder` of the shards counts only between several shards and several shards."""
    single = dataclasses.replace(STATE, shard_count=1, shard_index=0)
    check_compatible(single, dataclasses.replace(STATE, drop_remainder=True))
    check_compatible(dataclasses.replace(STATE, drop_remainder=True), single)


def test_another_global_batch_needs_leave_and_a_position_that_it_divides() -> None:
    """Another global batch is refused; allowed, it must divide the saved position, or the nearest steps are told."""
    for size in (16, 64, 80, 160, 33, 100, 1000):
        here = dataclasses.replace(STATE, global_batch=size)
        message = mismatch(STATE, here)
        assert f"global_batch: saved 32, here {size}" in message
        if STATE.position % size == 0:
            assert 'allow={"global_batch"}' in message
            check_compatible(STATE, here, ["global_batch"])
        else:
            assert "allow=" not in message
            allowed = mismatch(STATE, here, "global_batch")
            assert "position: saved 160" in allowed
            assert "global_batch: saved" not in allowed
            below = STATE.position // size
            assert f"{below * size}, which is seek({below})" in allowed
            assert f"{(below + 1) * size}, which is seek({below + 1})" in allowed


@pytest.mark.parametrize(
    "changes", [{"shard_index": 0}, {"shard_count": 4}, {"global_batch": 16}, {"shard_count": 8, "shard_index": 5}]
)
def test_a_filtered_pipeline_goes_on_only_on_its_shard(changes: dict[str, Any]) -> None:
    """Of a pipeline that is not 1:1, shard and global batch must be those that saved; nothing allows otherwise."""
    message = mismatch(FILTERED, dataclasses.replace(FILTERED, **changes), *ALLOWABLE)
    for name, value in changes.items():
        assert f"{name}: saved {getattr(FILTERED, name)}, here {value}" in message
    assert "filter" in message
    assert "allow=" not in message


def test_what_was_skipped_must_mean_something_here() -> None:
    """A place within a filtered stream fits no pipeline of other phases; a 1:1 place fits any, if allowed."""
    assert "one_to_one: saved False, here True" in mismatch(FILTERED, STATE, *ALLOWABLE)
    assert "phases in skip: saved 2, here 1" in mismatch(FILTERED, dataclasses.replace(FILTERED, skip=(0,)), *ALLOWABLE)
    assert "one_to_one: saved True, here False" in mismatch(STATE, FILTERED)
    check_compatible(STATE, FILTERED, {"operations"})


@pytest.mark.parametrize("allow", [{"seed"}, ["operations", "shards"], "operations", {"Sampler"}, {""}])
def test_an_unknown_name_in_allow_is_an_error(allow: Any) -> None:
    """A misspelt name does not pass in silence, be there a difference or not: the valid ones are listed."""
    with pytest.raises(ValueError, match="global_batch, operations, sampler, source") as caught:
        check_compatible(STATE, STATE, allow)
    assert not isinstance(caught.value, CheckpointError)
