"""The combination of the states of several shards: the state of a single shard that runs all their logical shards."""

import dataclasses
from collections.abc import Sequence

from millstream.errors import CheckpointError
from millstream.loader.checkpoints.state import LoaderState, Stream


def combined(states: Sequence[LoaderState]) -> LoaderState:
    """Returns the combined state of all shards that saved together.

    Raises:
        CheckpointError: a shard is missing or repeated, or the states differ in stream or step.
    """
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
    places = first.places if first.stream.one_to_one else tuple(place for state in ordered for place in state.places)
    # The furthest logical shard has passed the most changes of a mixture.
    furthest = max(ordered, key=lambda state: max(place.position for place in state.places)).stream
    # The logical shards of a 1:1 pipeline are its shards, and their number does not affect the following batches.
    alone = dataclasses.replace(furthest, shard_index=0, shard_count=1)
    return LoaderState(first.step, places, first.stream if first.stream.one_to_one else alone)


def _check_together(ordered: Sequence[LoaderState]) -> None:
    """Raises an error unless the states of all shards, in their order, are of one stream and step."""
    first = ordered[0]
    for index, state in enumerate(ordered):
        if not _is_same_stream(state.stream, first.stream):
            raise CheckpointError(
                f"The states of shard 0 and of shard {index} are of different streams. Pass the states that were saved "
                "together."
            )
    is_one_to_one = first.stream.one_to_one
    positions = [(state.step, state.places if is_one_to_one else None) for state in ordered]
    if len(set(positions)) > 1:
        listed = ", ".join(
            f"shard {index} at step {state.step}" + f", position {state.places[0].position}" * is_one_to_one
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
    """Returns a list of at most 8 numbers as text."""
    shown = ", ".join(map(str, numbers[:8])) + (", …" if len(numbers) > 8 else "")
    return f"{what}{'s' if len(numbers) > 1 else ''} {shown}"
