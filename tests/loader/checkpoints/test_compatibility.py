"""Two streams are compared in one place: each difference is named, and what the error advises works."""

import dataclasses
from typing import Any, cast

import numpy as np
import pytest

from millstream.errors import CheckpointError
from millstream.loader.checkpoints.compatibility import ALLOWABLE, Resumption, resumption
from millstream.loader.checkpoints.fingerprint import Fingerprint
from millstream.loader.checkpoints.state import LoaderState, SavedCursor, Stream, combined
from millstream.loader.pipeline.calls import Cursor

FINGERPRINT = Fingerprint(identity={}, content={"operations[0].map()": "code #1a2b3c4d"}, python="3.11")
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
POSITION = STATE.cursors[0].position
FILTERED = LoaderState(5, (SavedCursor(160, (3, 0), is_final=False),), dataclasses.replace(STREAM, one_to_one=False))
IDENTITY = {
    "operations[0]": "Map Crop",
    "operations[0]._sizes": "[1, 2]",
    "operations[1]": "Batch",
    "sampler": "IndexSampler",
    "sampler.seed": "7",
    "source": "100 records of list #47fe23d2",
}


def at(state: LoaderState, **changes: Any) -> LoaderState:
    return state._replace(cursors=(state.cursors[0]._replace(**changes),))


def with_stream(state: LoaderState, **changes: Any) -> LoaderState:
    return state._replace(stream=dataclasses.replace(state.stream, **changes))


def with_identity(changes: dict[str, str | None], **others: Any) -> LoaderState:
    """Returns the state of a stream with another identity; None removes them."""
    identity = {path: text for path, text in (IDENTITY | changes).items() if text is not None}
    return with_stream(STATE, fingerprint=dataclasses.replace(FINGERPRINT, identity=identity, **others))


SAVED = with_identity({})


def mismatch(saved: LoaderState, here: LoaderState, *allow: str, strict: bool = False) -> str:
    with pytest.raises(CheckpointError) as caught:
        resumption(saved, here, allow, strict=strict)
    return str(caught.value)


IDENTITY_DIFFERENCES: list[tuple[str, dict[str, str | None], list[str]]] = [
    ("sampler", {"sampler.seed": "8"}, ["sampler.seed: saved 7, here 8"]),
    (
        "sampler",
        {"sampler": "Mine", "sampler.seed": None, "sampler.weights": "[1]"},
        ["sampler: saved IndexSampler, here Mine"],
    ),
    ("source", {"source": "9 files"}, ["source: saved 100 records of list #47fe23d2, here 9 files"]),
    ("operations", {"operations[0]._sizes": "[1, 3]"}, ["operations[0]._sizes: saved [1, 2], here [1, 3]"]),
    ("operations", {"operations[0]._sizes": None}, ["operations[0]._sizes: saved [1, 2], here nothing"]),
    ("operations", {"operations[1]": None}, ["operations[1]: saved Batch, here nothing"]),
    ("operations", {"operations[10]": "Map", "operations[2]": "Map"}, ["operations[2]: saved nothing, here Map"]),
    ("operations", {"operations[0]": "Filter Crop"}, ["operations[0]: saved Map Crop, here Filter Crop"]),
]


@pytest.mark.parametrize(("part", "changes", "texts"), IDENTITY_DIFFERENCES)
def test_a_difference_in_identity_is_named_and_can_be_allowed(
    part: str, changes: dict[str, str | None], texts: list[str]
) -> None:
    """Each difference is shown by the part that differs, and refused unless its own part is allowed."""
    here = with_identity(changes)
    for saved, other in ((SAVED, here), (here, SAVED)):
        message = mismatch(saved, other, *(set(ALLOWABLE) - {part}))
        assert part in message.splitlines()[-1]
        assert resumption(saved, other, {part}).position[0].block == 5
    lines = mismatch(SAVED, here).splitlines()
    assert [line.strip() for line in lines[1 : 1 + len(texts)]] == texts


def test_equal_streams_are_compatible_wherever_they_stand() -> None:
    """Step, position and what is skipped say where the stream is, not which stream it is."""
    assert resumption(STATE, at(STATE, position=0)._replace(step=0)) == Resumption((Cursor(5, (0,)),), ())
    begun = at(FILTERED, position=0, skip=(0, 0))
    assert resumption(FILTERED, begun) == Resumption((Cursor(5, (3, 0)),), ())


def test_every_difference_is_named_at_once() -> None:
    """A message lists all that differs, and the advice allows all of it together with what was allowed before."""
    here = with_stream(with_identity({"sampler.seed": "8", "source": "x", "operations[0]": "Map"}), global_batch=16)
    message = mismatch(SAVED, here, "source")
    for text in ("sampler.seed", "operations[0]", "global_batch: saved 32, here 16"):
        assert text in message
    assert "source:" not in message
    assert 'allow={"global_batch", "operations[0]", "sampler.seed", "source"}' in message
    assert resumption(SAVED, here, ALLOWABLE).position[0].block == 10


def test_only_several_shards_have_a_remainder_to_drop() -> None:
    """At one global batch, shard count and index may differ; `drop_remainder` matters only between several shards."""
    dropping = with_stream(STATE, drop_remainder=True)
    assert "drop_remainder: saved False, here True" in mismatch(STATE, dropping)
    resumption(STATE, dropping, {"sampler"})
    for count in (1, 4, 32):
        resumption(STATE, with_stream(STATE, shard_index=count - 1, shard_count=count))
    resumption(with_stream(STATE, shard_count=1, shard_index=0, logical_shards=1), dropping)


def test_another_global_batch_needs_leave_and_a_position_that_it_divides() -> None:
    """Another global batch must be allowed and divide the saved position; where it does not, steps are suggested."""
    for size in (16, 64, 80, 160, 33, 100, 1000):
        here = with_stream(STATE, global_batch=size)
        message = mismatch(STATE, here)
        assert f"global_batch: saved 32, here {size}" in message
        if POSITION % size == 0:
            assert 'allow={"global_batch"}' in message
            assert resumption(STATE, here, ["global_batch"]).position[0].block == POSITION // size
        else:
            assert "allow={}" not in message
            below = POSITION // size
            for text in (f"{below * size}: seek({below})", f"seek({below + 1})"):
                assert text in mismatch(STATE, here, "global_batch")


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({"shard_index": 0}, ["shard: saved 1 of 2, here 0 of 2", "shards 1 to 1, but 0 to 0 are needed"]),
        ({"shard_index": 0, "shard_count": 1}, ["here 0 of 1", "shards 1 to 1, but 0 to 1 are needed"]),
        ({"shard_count": 4, "logical_shards": 4}, ["logical_shards: saved 2, here 4", "logical_shards=2"]),
        ({"global_batch": 16}, ["global_batch: saved 32, here 16"]),
    ],
)
def test_a_filtered_pipeline_resumes_only_from_its_logical_shards(changes: dict[str, Any], texts: list[str]) -> None:
    """A pipeline that is not 1:1 resumes only where the state has its logical shards, whatever is allowed."""
    message = mismatch(FILTERED, with_stream(FILTERED, **changes), *ALLOWABLE)
    for text in texts:
        assert text in message
    assert "cannot accept this" in message


SAVED_BY_TWO = [
    LoaderState(
        5,
        tuple(SavedCursor(32 * number, (number, 0), is_final=number == 3) for number in numbers),
        dataclasses.replace(FILTERED.stream, shard_index=index, logical_shards=4),
    )
    for index, numbers in enumerate([(0, 1), (2, 3)])
]
"""The states of two shards of a filtered pipeline that is dealt to four logical shards."""


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_shard_resumes_from_the_places_of_its_logical_shards(count: int) -> None:
    """Combined states are that of a single shard, of which every number of shards takes its own part."""
    whole = combined(SAVED_BY_TWO[::-1])
    assert whole.stream == dataclasses.replace(SAVED_BY_TWO[0].stream, shard_count=1)
    cursors = [cursor for state in SAVED_BY_TWO for cursor in state.cursors]
    for index in range(count):
        own = cursors[index * 4 // count : (index + 1) * 4 // count]
        here = LoaderState(0, tuple(cursor._replace(position=0) for cursor in own), whole.stream)
        here = with_stream(here, shard_index=index, shard_count=count)
        expected = tuple(Cursor(cursor.position // 32, cursor.skip, cursor.is_final) for cursor in own)
        assert resumption(whole, here) == Resumption(expected, ())


def one_to_one(index: int, step: int = 5) -> LoaderState:
    return with_stream(at(STATE, position=32 * step), shard_index=index)._replace(step=step)


@pytest.mark.parametrize(
    ("states", "text"),
    [
        ([], "got none"),
        (SAVED_BY_TWO[:1], "of 1 of 2 shards: shard 1 is missing"),
        ([with_stream(FILTERED, shard_index=5, shard_count=8)], "shards 0, 1, 2, 3, 4, 6, 7 are missing"),
        (SAVED_BY_TWO[:1] * 2, "Two of the 2 states are of shard 0 of 2"),
        ([*SAVED_BY_TWO, with_stream(FILTERED, shard_count=4)], "of 2 and of 4 shards"),
        ([SAVED_BY_TWO[0], SAVED_BY_TWO[1]._replace(step=6)], "shard 0 at step 5, shard 1 at step 6"),
        ([one_to_one(1), one_to_one(0, 6)], "shard 0 at step 6, position 192, shard 1 at step 5, position 160"),
        ([one_to_one(0), with_stream(one_to_one(1), global_batch=16)], "shard 0 and of shard 1 are of different"),
        ([with_stream(one_to_one(0), logical_shards=4), one_to_one(1)], "shard 0 and of shard 1 are of different"),
    ],
    ids=["none", "missing", "many missing", "twice", "counts", "steps", "positions", "streams", "logical shards"],
)
def test_states_that_were_not_saved_together_are_refused(states: list[LoaderState], text: str) -> None:
    """A missing state, one of another step, stream or number of shards, and two of one shard are told apart."""
    with pytest.raises(CheckpointError, match=text):
        combined(states)


def test_what_was_skipped_must_mean_something_here() -> None:
    """A position within a filtered stream fits no pipeline with other stages; a 1:1 position fits any, if allowed."""
    assert "one_to_one: saved False, here True" in mismatch(FILTERED, STATE, *ALLOWABLE)
    other = at(FILTERED, skip=(0,))
    assert "the numbers of a position: saved 2, here 1" in mismatch(FILTERED, other, *ALLOWABLE)
    assert "one_to_one: saved True, here False" in mismatch(STATE, FILTERED)
    assert resumption(STATE, FILTERED, {"operations"}) == Resumption((Cursor(5, (0, 0)),), ())


ENDED = with_stream(at(STATE, position=170, is_final=True), length=170)


def test_the_end_of_one_order_is_no_position_of_a_longer_one() -> None:
    """After a short last batch a state fits the same length only; its error, and one beyond the end, say what to do."""
    assert resumption(ENDED, ENDED).position[0].block == 6
    for length in (340, None):
        message = mismatch(ENDED, with_stream(STATE, length=length))
        assert "end of 170 positions" in message
        assert "call seek(4)" in message
    assert "here the sampler ends at 100" in mismatch(STATE, with_stream(STATE, length=100))
    assert resumption(STATE, with_stream(STATE, length=160)).position[0].block == 5
    filtered = at(FILTERED, is_final=True)
    assert "seek(4)" in mismatch(filtered, with_stream(filtered, length=320))


CHANGED = with_identity({}, content={"operations[0].map()": "code #ffffffff", "source.root": "'/b'"})


def test_changed_content_is_reported_and_refused_only_if_asked_for() -> None:
    """It is a warning that names the path; strict makes it a difference like any other, and `allow` accepts it."""
    changes = ("operations[0].map(): the code has changed", "source.root: saved nothing, here '/b'")
    assert resumption(SAVED, CHANGED).changes == changes
    assert resumption(SAVED, SAVED, strict=True).changes == ()
    assert resumption(SAVED, CHANGED, {"operations"}).changes == changes[1:]
    assert resumption(SAVED, CHANGED, {"operations[0].map", "source.root"}, strict=True).changes == ()
    message = mismatch(SAVED, CHANGED, strict=True)
    assert all(change in message for change in changes)
    assert 'allow={"operations[0].map()", "source.root"}' in message
    other = with_identity({}, content=CHANGED.stream.fingerprint.content, python="3.12")
    assert (
        "Python 3.11 saved its digest, and the bytecode of Python 3.12 differs" in resumption(SAVED, other).changes[0]
    )


def test_a_path_accepts_what_is_below_it_and_nothing_else() -> None:
    """`operations[1]` is neither `operations[10]` nor a part of it, and a parent accepts its parts."""
    here = with_identity({"operations[0]._sizes": "[1, 3]"})
    for allow in ("operations[0]._sizes", "operations[0]", "operations"):
        assert resumption(SAVED, here, {allow}).position[0].block == 5
    for other in ("operations[0]._size", "operations[0]._sizes[0]", "operations[1]", "source"):
        assert "operations[0]._sizes: saved [1, 2], here [1, 3]" in mismatch(SAVED, here, other)


@pytest.mark.parametrize("allow", [{"seed"}, ["operations", "shards"], "operations", {"Sampler"}, {""}])
def test_an_unknown_name_in_allow_is_an_error(allow: Any) -> None:
    """A misspelt name is an error that lists the valid ones, whether or not anything differs."""
    with pytest.raises(ValueError, match="global_batch, on_error, operations, sampler, source, stream") as caught:
        resumption(STATE, STATE, allow)
    assert not isinstance(caught.value, CheckpointError)


@pytest.mark.parametrize("allow", [None, True, 3, np.array(3), (name for name in ["sampler"])])
def test_allow_is_a_collection(allow: Any) -> None:
    """An iterator is none: it would be at its end after the first look at it, and accept nothing."""
    with pytest.raises(ValueError, match=r"^allow must be a collection of names"):
        resumption(STATE, STATE, allow)


def test_strict_is_a_flag() -> None:
    """A text such as "no" would be taken for True."""
    with pytest.raises(TypeError, match=r"^strict must be True or False"):
        resumption(STATE, STATE, strict=cast("Any", "no"))
