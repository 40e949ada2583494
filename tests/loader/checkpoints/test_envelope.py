"""A chain's state comes back as it was saved, through any JSON, and is refused after any damage."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream import CheckpointError
from millstream.loader.checkpoints.envelope import (
    VERSION,
    SavedPosition,
    UsersState,
    ending_of,
    opened_dict,
    sealed_dict,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
plain = st.integers(-(1 << 64), 1 << 64) | st.booleans() | st.none() | texts
users = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3))
items = st.recursive(
    plain | users.map(UsersState),
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.lists(inner, max_size=4).map(SavedPosition),
    max_leaves=12,
)
positions = st.builds(lambda step, rest: SavedPosition(("a {}", step, *rest)), st.integers(0, 1 << 63), st.lists(items))
STREAM = {"length": None, "fingerprint": {"identity": {"source": "ten"}, "content": {}}}
POSITION = SavedPosition(
    ("zipped", 3, False, (SavedPosition((77, 3, 12)), UsersState({"next": [1, {}]}), SavedPosition(("é", 0, None))))
)


def sealed(position: SavedPosition, stream: Any = None) -> dict[str, Any]:
    return sealed_dict(position, stream, ending_of(stream))


@given(positions, st.sampled_from([None, STREAM]), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_a_state_comes_back_from_memory_and_from_any_json(
    position: SavedPosition, stream: Any, shuffling: random.Random
) -> None:
    """Step, position, users' states and stream are equal, whatever the order of keys, the white space and escapes."""
    state = sealed(position, stream)
    shuffled = dict(shuffling.sample([*state.items()], len(state)))
    for read in (state, shuffled, json.loads(json.dumps(shuffled, indent=1, ensure_ascii=False))):
        found = opened_dict(read)
        assert (found.step, found.position, found.stream) == (position[1], position, stream)
        assert found.position.text == position.text
        assert sealed(found.position, found.stream) == state


def test_users_states_and_the_stream_belong_to_the_owner_of_a_state() -> None:
    """Whatever the owner does with a state, later ones are the same."""
    state = sealed(POSITION, STREAM)
    expected = json.dumps(state)
    state["states"][0]["next"].clear()
    state["stream"]["fingerprint"]["identity"].clear()

    assert json.dumps(sealed(POSITION, STREAM)) == expected


def test_values_that_json_cannot_hold_stay_in_memory() -> None:
    """A state with such a value of a user's iterator is taken and read; one with another type of value is refused."""
    state = sealed(SavedPosition(("a stream", 0, UsersState({"held": {1, 2}, 3: (4, 5)}))))

    assert opened_dict(state).position[2].value == {"held": {1, 2}, 3: (4, 5)}
    with pytest.raises(CheckpointError, match="crc32"):
        opened_dict(state | {"states": [{"held": [1, 2], 3: (4, 5)}]})


@pytest.mark.parametrize("version", [6, VERSION + 1])
def test_a_chains_state_of_another_version_is_named(version: int) -> None:
    """Whatever else it has, also the fields of an earlier form."""
    text = f"has version {version}, and this millstream reads version {VERSION}"
    with pytest.raises(CheckpointError, match=text):
        opened_dict({"format": "millstream", "version": version, "kind": "a mixture", "parents": []})
