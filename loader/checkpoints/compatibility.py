"""Whether a loader can resume from a state, and where: the one place that compares two streams.

Of a 1:1 pipeline any shard resumes where any other stopped, while the global batch is the same. A pipeline that is not
1:1 resumes from a state that has the places of all logical shards which it runs, and these are always as many in all:
its own shard's state, or the states of several combined. The number of epochs is free: what the saved stream has
delivered is then also what this one begins with, or it is an error.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from millstream.errors import CheckpointError
from millstream.loader.checkpoints.code_marks import CODE
from millstream.loader.checkpoints.state import LoaderState, Place, Stream

ALLOWABLE = ("global_batch", "operations", "sampler", "source")
"""The parts that can differ on purpose. A path within a part, such as `operations[0].size`, accepts less."""


_EITHER = (".first_and_last_bytes", ".versions")
"""Marks of which files have the one and objects in stores the other: where they lie makes no other stream."""

_OPERATION = re.compile(r"(before )?operations\[\d+\]")
"""The path of an operation: its kind is the text there."""

SHOWN_PATHS = 4
"""If more paths differ, an error advises to allow whole parts."""

_BEGINNING = re.compile(r"^sampler\.\w+_from_(\d+)$")
"""The path of a word that holds from some position on."""


class Resumption(NamedTuple):
    """How a loader resumes from a state.

    Attributes:
        places: for each logical shard the first block that is not used up, what is used up of it, one number per stage,
            and whether the last batch was what it was because the order ended.
        changes: differences in content that do not refuse the state, in words.
    """

    places: tuple[tuple[int, tuple[int, ...], bool], ...]
    changes: tuple[str, ...]


def resumption(
    saved: LoaderState, here: LoaderState, allow: Collection[str] = (), *, strict: bool = False
) -> Resumption:
    """Returns where a loader resumes from `saved` and yields exactly the batches that would have followed.

    Args:
        saved: the state to resume from.
        here: any state of the loader that is to resume, for what it says about its stream and shard.
        allow: differences to accept on purpose: parts out of `ALLOWABLE`, and paths within them. A new global batch
            must divide the saved position.
        strict: whether a difference in content refuses the state, too.

    Raises:
        CheckpointError: the streams differ; names every difference, what was saved, what is here and what to do.
        ValueError: `allow` names something else.
    """
    if isinstance(allow, str) or not all(isinstance(path, str) and _part_of(path) in ALLOWABLE for path in allow):
        raise ValueError(
            f"allow must be a collection of names out of {', '.join(ALLOWABLE)}, or of paths within them, such as "
            f'"operations[0].size"; got {allow!r}.'
        )
    changes = [change for change in _content_changes(saved.stream, here.stream) if not _is_allowed(change.path, allow)]
    differences = [*_differences(saved, here), *(changes if strict else [])]
    refused = [difference for difference in differences if not _is_allowed(difference.path, allow)]
    if refused:
        listed = "".join(f"\n  {difference.text}" for difference in refused)
        raise CheckpointError(f"The state belongs to another stream:{listed}\n{_advice(refused, allow)}")
    places = []
    for now, place in zip(here.places, _places_for(saved, here), strict=True):
        skip = (0,) * len(now.skip) if saved.stream.one_to_one else place.skip
        # Rounded up: a position that is not a multiple is the end of the order here.
        places.append((-(-place.position // here.stream.global_batch), skip, place.is_final))
    return Resumption(tuple(places), tuple(change.text for change in changes))


def warn_of_changes(changes: Collection[str]) -> None:
    """Logs what has changed in the content of a pipeline that resumes anyway."""
    import logging  # noqa: PLC0415  (takes long to import)

    logging.getLogger("millstream").warning(
        "millstream: the loader resumes, although it differs from the one that saved the state:\n  %s\nThe batches are "
        "those that would have followed only if it computes the same. strict=True makes this an error, and "
        "allow={...} with these paths accepts it.",
        "\n  ".join(changes),
    )


def differences(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """Returns the differences between the contents of two streams, in words."""
    paths = sorted(before.keys() | after.keys(), key=_natural_order)
    pairs = [(path, before.get(path, "nothing"), after.get(path, "nothing")) for path in paths]
    return [f"{path}: saved {then}, here {now}" for path, then, now in pairs if then != now]


class _Difference(NamedTuple):
    """One difference between two states: in words, and the path in `allow` that accepts it (None: nothing does)."""

    path: str | None
    text: str


def _differences(saved: LoaderState, here: LoaderState) -> Iterator[_Difference]:
    """Yields every difference that keeps `here` from resuming from `saved`, except those in content."""
    if saved.stream is not here.stream:  # Or there is nothing to compare.
        yield from _stream_differences(saved.stream, here.stream, max(place.position for place in saved.places))
    if not saved.stream.one_to_one:
        before, after = (len(state.places[0].skip) for state in (saved, here))
        reason = ""
        if before < after and _kinds(saved.stream) == _kinds(here.stream):
            reason = (
                ": an earlier release saved a wrong position if an operation after ConcatThenSplit or Rebatch drops or "
                f"splits elements. Seek to the step instead: seek({saved.step})"
            )
        yield from _unequal(None, "the numbers of a position", before, after, reason)
    yield from _position_differences(saved, here)


def _stream_differences(then: Stream, now: Stream, position: int) -> Iterator[_Difference]:
    """Yields the differences of the streams themselves, of which some may not count before a position."""
    yield from _word_differences(then, now, position)
    if min(then.logical_shards, now.logical_shards) > 1:  # A single shard has no remainder to drop.
        yield from _unequal("sampler", "shard_options.drop_remainder", then.drop_remainder, now.drop_remainder)
    if then.one_to_one and now.one_to_one:
        yield from _unequal("global_batch", "global_batch", then.global_batch, now.global_batch)
    else:
        yield from _shard_differences(then, now)
        # With nothing to skip, any pipeline can begin at the saved position: that is the user's choice of operations.
        part = "operations" if then.one_to_one else None
        yield from _unequal(part, "one_to_one", then.one_to_one, now.one_to_one)


def _shard_differences(then: Stream, now: Stream) -> Iterator[_Difference]:
    """Yields what keeps a shard from resuming where each logical shard has a position of its own."""
    yield from _unequal(
        None,
        "logical_shards",
        then.logical_shards,
        now.logical_shards,
        f", and a pipeline that is not 1:1 is dealt to as many for good: give ShardOptions or ShardByJaxProcess "
        f"logical_shards={then.logical_shards}",
    )
    yield from _unequal(None, "global_batch", then.global_batch, now.global_batch)
    saved, here = _own_shards(then), _own_shards(now)
    if then.logical_shards == now.logical_shards and not set(here) <= set(saved):
        yield _Difference(
            None,
            f"shard: saved {then.shard_index} of {then.shard_count}, here {now.shard_index} of {now.shard_count}, and "
            f"the state has the positions of the logical shards {saved[0]} to {saved[-1]}, where {here[0]} to "
            f"{here[-1]} are needed: give the states of all shards that saved together to set_states",
        )


def _own_shards(stream: Stream) -> range:
    """Returns which logical shards the shard of a stream runs."""
    share = stream.logical_shards // stream.shard_count
    return range(stream.shard_index * share, (stream.shard_index + 1) * share)


def _places_for(saved: LoaderState, here: LoaderState) -> Sequence[Place]:
    """Returns the saved places of the logical shards that are here, where there is no difference."""
    if saved.stream.one_to_one:
        return saved.places * len(here.places)
    first = _own_shards(here.stream).start - _own_shards(saved.stream).start
    return saved.places[first : first + len(here.places)]


def _word_differences(then: Stream, now: Stream, position: int) -> Iterator[_Difference]:
    """Yields the differences of the fingerprints; of a value that is another one as a whole, not those of its parts.

    Words that hold from some position on (`weights_from_500`) do not count before it; of those that differ, the first
    one is told: where one order leaves the other, what comes later is another order anyway.
    """
    before, after = then.fingerprint.words, now.fingerprint.words
    reported: list[str] = []
    left = False
    for path in _different_paths(then, now):
        if _is_allowed(path, reported):
            continue
        reason = ""
        if beginning := _BEGINNING.search(path):
            if left or int(beginning[1]) >= position:
                continue
            left = True
            reason = f": the orders differ from position {beginning[1]} on, and the state is at position {position}"
        reported.append(path)
        yield from _unequal(path, path, before.get(path), after.get(path), reason)


def _different_paths(then: Stream, now: Stream) -> list[str]:
    """Returns the paths at which the identities of two streams differ, sorted."""
    if then.fingerprint == now.fingerprint:
        return []
    before, after = then.fingerprint.words, now.fingerprint.words
    different = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    if not then.fingerprint.python:
        # An earlier release described other parts, and had other CRCs.
        both = before.keys() & after.keys()
        is_known = {path for path in both if "#" not in before[path] + after[path]}
        different &= is_known | {path for path in before.keys() | after.keys() if _OPERATION.fullmatch(path)}
    return sorted(different, key=_natural_order)


def _kinds(stream: Stream) -> dict[str, str]:
    """Returns the kinds of the operations of a stream, by path."""
    return {path: text for path, text in stream.fingerprint.words.items() if _OPERATION.fullmatch(path)}


def _position_differences(saved: LoaderState, here: LoaderState) -> Iterator[_Difference]:
    """Yields what keeps a stream of another length, or with another global batch, from resuming at these positions."""
    length, size = here.stream.length, here.stream.global_batch
    last = max(place.position for place in saved.places)
    unaligned = next((place.position for place in saved.places if place.position % size), last)
    step, rest = divmod(unaligned, size)
    if length is not None and last > length:
        yield _Difference(
            None,
            f"position: saved {last}, but here the sampler ends at {length}: give it as many epochs as it had",
        )
    elif any(place.is_final for place in saved.places) and saved.stream.length != length:
        # Of several logical shards, one may have ended long before the last batch.
        advice = "resume from a state that was saved before the first short batch"
        if len(saved.places) == 1:
            advice = f"call seek({saved.step - 1})"
        yield _Difference(
            None,
            f"length: saved at the end of {saved.stream.length} positions, where the last batch was short or padded; "
            f"here the sampler has {'no end' if length is None else f'{length} positions'}, and that batch is a whole "
            f"one. To get it as a whole, which repeats its records, {advice}",
        )
    elif rest and unaligned != length:
        yield _Difference(
            None,
            f"position: saved {unaligned}, which is not a multiple of the global_batch {size} here; the nearest "
            f"are {unaligned - rest}, which is seek({step}), and {unaligned - rest + size}, which is "
            f"seek({step + 1})",
        )


def _content_changes(then: Stream, now: Stream) -> Iterator[_Difference]:
    """Yields the differences in content. Code that another minor version of Python has marked cannot be compared."""
    before, after = then.fingerprint, now.fingerprint
    if before == after:
        return
    if not before.python:
        yield _Difference(None, "an earlier release saved the state: code and objects cannot be compared")
        return
    reported = _different_paths(then, now)
    different = before.content.keys() | after.content.keys()
    for path in sorted(different, key=_natural_order):
        saved, here = before.content.get(path), after.content.get(path)
        # What is part of another value, or has become plain, is reported there.
        if saved == here or _is_allowed(path, reported) or (path.endswith(_EITHER) and None in (saved, here)):
            continue
        if before.python != after.python and (saved or here or "").startswith(CODE):
            text = f"Python {before.python} saved its mark, and the bytecode of Python {after.python} differs"
            yield _Difference(path, f"{path}: the code cannot be compared: {text}")
        elif saved is not None and here is not None and here.startswith(CODE):
            yield _Difference(path, f"{path}: the code has changed")
        else:
            yield from _unequal(path, path, saved, here)


def _unequal(path: str | None, label: str, saved: object, here: object, reason: str = "") -> Iterator[_Difference]:
    """Yields the difference between two values unless they are equal; None stands for no such thing."""
    if saved != here:
        before, now = ("nothing" if value is None else value for value in (saved, here))
        yield _Difference(path, f"{label}: saved {before}, here {now}{reason}")


def _advice(refused: Sequence[_Difference], allow: Collection[str]) -> str:
    """Returns what a user can do about the refused differences."""
    advice = "Build the loader as it was when the state was saved"
    paths = {difference.path for difference in refused}
    if None in paths:
        return f"{advice}: there is no allow={{...}} for this."
    known = {path for path in paths if path is not None}
    if len(known) > SHOWN_PATHS:
        known = set(map(_part_of, known))
    names = sorted({*allow, *known}, key=_natural_order)
    quoted = ", ".join(f'"{name}"' for name in names if not _is_allowed(name, [one for one in names if one != name]))
    return f"{advice}, or resume with these differences on purpose: set_state(state, allow={{{quoted}}})."


def _is_allowed(path: str | None, allow: Collection[str]) -> bool:
    """Returns whether a path, or what it is a part of, is named in `allow`."""
    if path is None or not allow:
        return False
    return any(path == name or (path.startswith(name) and path[len(name)] in ".[(") for name in allow)


def _part_of(path: str) -> str:
    """Returns the name in ALLOWABLE that a path of a fingerprint belongs to."""
    return re.split(r"[.\[(]", path, maxsplit=1)[0]


def _natural_order(path: str) -> list[tuple[int, str]]:
    """Returns a key that sorts paths with their numbers as numbers."""
    return [(int(text), "") if text.isdecimal() else (-1, text) for text in re.split(r"(\d+)", path)]
