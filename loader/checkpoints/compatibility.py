"""The comparison of two streams: whether a loader can resume from a state, and from which position.

In a 1:1 pipeline any shard resumes where any other stopped, as long as the global batch is the same. A pipeline that is
not 1:1 resumes from a state with the positions of all its logical shards, whose total number never changes: from its
own shard's state, or from the states of several shards combined. The number of epochs is free, if the saved stream is
the beginning of this one.
"""

import dataclasses
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from millstream.core.checks import as_flag, is_listed
from millstream.core.warn import log_warning
from millstream.errors import CheckpointError
from millstream.loader.checkpoints.description import CODE
from millstream.loader.checkpoints.state import LoaderState, SavedCursor, Stream
from millstream.loader.pipeline.calls import Cursor, Position
from millstream.transforms.base import BEFORE

ALLOWABLE = ("global_batch", "on_error", "operations", "sampler", "source", "stream")
"""The names of what can differ on purpose. A path within one, such as `operations[0].size`, accepts less.

A `stream` is what a chain of iterators begins with.
"""

_RECORDS = re.compile(r"\bnum_(?:source_)?records=(\d+)")

MAX_PATHS = 4
"""If more paths differ, the error advises to allow whole parts of the pipeline."""

_EITHER = (".first_and_last_bytes", ".versions")
"""Content marks of files, and of objects in stores: a source that was moved from one to the other is the same."""


class Resumption(NamedTuple):
    """The position at which a loader resumes from a state. `changes` describe the differences in content."""

    position: Position
    changes: tuple[str, ...]


def resumption(
    saved: LoaderState, here: LoaderState, allow: Collection[str] = (), *, strict: bool = False
) -> Resumption:
    """Returns the position from which a loader yields exactly the batches that would have followed a state.

    Args:
        saved: the state to resume from.
        here: any state of the loader that resumes, with its complete stream.
        allow: differences to accept on purpose: names in `ALLOWABLE`, and paths within them. A new global batch must
            divide the saved position.
        strict: True if a difference in content also refuses the state.

    Raises:
        CheckpointError: the streams differ. The message names every difference, both values and the remedy.
        ValueError: `allow` names something else.
    """
    check_allow(allow, strict=strict)
    reached = max(cursor.position for cursor in saved.cursors)
    saved = saved._replace(stream=_without_absent(saved.stream.before(reached), here.stream, reached))
    here = here._replace(stream=here.stream.before(reached))
    changes = [change for change in _content_changes(saved.stream, here.stream) if not _is_allowed(change.path, allow)]
    differences = [*_differences(saved, here), *(changes if strict else [])]
    refused = [difference for difference in differences if not _is_allowed(difference.path, allow)]
    _refuse(refused, allow)
    cursors = []
    for now, cursor in zip(here.cursors, _cursors_for(saved, here), strict=True):
        skip = (0,) * len(now.skip) if saved.stream.one_to_one else cursor.skip
        # Rounded up: a position that is not a multiple is the end of the order here.
        cursors.append(Cursor(-(-cursor.position // here.stream.global_batch), skip, cursor.is_final))
    return Resumption(tuple(cursors), tuple(change.text for change in changes))


def _without_absent(saved: Stream, here: Stream, reached: int) -> Stream:
    """Returns the saved stream without the texts of components that were left out here, and are not needed any more."""
    absent = [path for path, until in here.fingerprint.absent if until <= reached]
    if not absent:
        return saved
    kept = [
        {path: text for path, text in texts.items() if not any(_is_of_component(path, one) for one in absent)}
        for texts in (saved.fingerprint.identity, saved.fingerprint.content)
    ]
    fingerprint = dataclasses.replace(saved.fingerprint, identity=kept[0], content=kept[1])
    return dataclasses.replace(saved, fingerprint=fingerprint)


def _is_of_component(path: str, beginning: str) -> bool:
    suffix = path.removeprefix(beginning)
    return suffix != path and (not suffix or suffix[0] in ".[(" or suffix.startswith("_from_"))


def warn_of_changes(changes: Collection[str]) -> None:
    texts = "\n  ".join(changes)
    log_warning(
        f"the loader resumes, although it differs from the one that saved the state:\n  {texts}\nThe batches are those "
        "that would have followed only if it computes the same. strict=True makes this an error, and allow={...} with "
        "these paths accepts it."
    )


def accept(
    identity: tuple[Mapping[str, str], Mapping[str, str]],
    content: tuple[Mapping[str, str], Mapping[str, str]],
    allow: Collection[str],
    *,
    strict: bool,
) -> None:
    """Compares two streams that are described by texts alone, the saved one first, as `resumption` does."""
    check_allow(allow, strict=strict)
    differences, changes = (
        [
            difference
            for path in sorted(saved.keys() | here.keys(), key=_natural_order)
            if not _is_allowed(path, allow)
            for difference in _unequal(path, path, saved.get(path), here.get(path))
        ]
        for saved, here in (identity, content)
    )
    _refuse([*differences, *(changes if strict else [])], allow)
    if changes:
        warn_of_changes([change.text for change in changes])


def check_allow(allow: Collection[str], *, strict: bool) -> None:
    as_flag(strict, "strict")
    is_collection = isinstance(allow, Collection) and is_listed(allow)
    if not is_collection or not all(isinstance(path, str) and _root_of(path) in ALLOWABLE for path in allow):
        raise ValueError(
            f"allow must be a collection of names out of {', '.join(ALLOWABLE)}, or of paths within them, such as "
            f'"operations[0].size", got {allow!r}.'
        )


class _Difference(NamedTuple):
    """One difference between two states. The path in `allow` that accepts it is None if nothing does."""

    path: str | None
    text: str


def _differences(saved: LoaderState, here: LoaderState) -> Iterator[_Difference]:
    """Yields every difference that keeps `here` from resuming from `saved`, except those in content."""
    then, now = saved.stream, here.stream
    identity, identity_here = then.fingerprint.identity, now.fingerprint.identity
    for path in _different_paths(then, now):
        reason = _advice_on(path, identity.get(path), identity_here.get(path), now)
        yield from _unequal(path, path, identity.get(path), identity_here.get(path), reason)
    if min(then.logical_shards, now.logical_shards) > 1:  # A single shard has no remainder to drop.
        yield from _unequal("sampler", "shard_options.drop_remainder", then.drop_remainder, now.drop_remainder)
    if then.one_to_one and now.one_to_one:
        yield from _unequal("global_batch", "global_batch", then.global_batch, now.global_batch)
    else:
        yield from _shard_differences(then, now)
        # With nothing to skip, any pipeline can begin at the saved position: that is the user's choice.
        has_other_errors = identity.get("on_error") != identity_here.get("on_error")
        allowed_by = ("on_error" if has_other_errors else "operations") if then.one_to_one else None
        yield from _unequal(allowed_by, "one_to_one", then.one_to_one, now.one_to_one)
    if not then.one_to_one:
        before, after = (len(state.cursors[0].skip) for state in (saved, here))
        yield from _unequal(None, "the numbers of a position", before, after)
    yield from _position_differences(saved, here)


def _advice_on(path: str, saved: str | None, here: str | None, now: Stream) -> str:
    """Returns the remedy for a difference that growing data makes."""
    until = next((until for beginning, until in now.fingerprint.absent if _is_of_component(path, beginning)), None)
    if until is not None:
        return f", because it was left out. It has records up to position {until}: pass its sampler and source"
    counts = [
        int(found[1]) if (found := _RECORDS.search(f"{path.rpartition('.')[2]}={text}")) else 0
        for text in (saved, here)
    ]
    if path.startswith("sampler") and 0 < counts[0] < counts[1]:
        return (
            f". If the source has grown, keep to its first {counts[0]} records. The new ones can join the run as a "
            "component of a mixture: see MixtureSampler.reweighted(position, weights, samplers={...})"
        )
    return ""


def _shard_differences(then: Stream, now: Stream) -> Iterator[_Difference]:
    """Yields the differences that matter if each logical shard has a position of its own."""
    yield from _unequal(
        None,
        "logical_shards",
        then.logical_shards,
        now.logical_shards,
        f", and a pipeline that is not 1:1 keeps its number. Give ShardOptions or ShardByJaxProcess "
        f"logical_shards={then.logical_shards}",
    )
    yield from _unequal(None, "global_batch", then.global_batch, now.global_batch)
    saved, here = _logical_shards_of(then), _logical_shards_of(now)
    if then.logical_shards == now.logical_shards and not set(here) <= set(saved):
        yield _Difference(
            None,
            f"shard: saved {then.shard_index} of {then.shard_count}, here {now.shard_index} of {now.shard_count}, and "
            f"the state has the positions of the logical shards {saved[0]} to {saved[-1]}, but {here[0]} to "
            f"{here[-1]} are needed. Give the states of all shards that saved together to set_states",
        )


def _logical_shards_of(stream: Stream) -> range:
    share = stream.logical_shards // stream.shard_count
    return range(stream.shard_index * share, (stream.shard_index + 1) * share)


def _cursors_for(saved: LoaderState, here: LoaderState) -> Sequence[SavedCursor]:
    """Returns the saved cursors of the logical shards that run here; for states without differences."""
    if saved.stream.one_to_one:
        return saved.cursors * len(here.cursors)
    first = _logical_shards_of(here.stream).start - _logical_shards_of(saved.stream).start
    return saved.cursors[first : first + len(here.cursors)]


def _different_paths(then: Stream, now: Stream) -> list[str]:
    """Returns the sorted paths at which the identities of two streams differ, without those within another one."""
    before, after = then.fingerprint.identity, now.fingerprint.identity
    found: list[str] = []
    for path in sorted(before.keys() | after.keys(), key=_natural_order):
        if before.get(path) != after.get(path) and not _is_allowed(path, found):
            found.append(path)
    return found


def _position_differences(saved: LoaderState, here: LoaderState) -> Iterator[_Difference]:
    """Yields the differences of a stream of another length, or with another global batch, at these positions."""
    length, size = here.stream.length, here.stream.global_batch
    last = max(cursor.position for cursor in saved.cursors)
    unaligned = next((cursor.position for cursor in saved.cursors if cursor.position % size), last)
    step, remainder = divmod(unaligned, size)
    if length is not None and last > length:
        yield _Difference(
            None,
            f"position: saved {last}, but here the sampler ends at {length}. Give it the number of epochs that it had",
        )
    elif any(cursor.is_final for cursor in saved.cursors) and saved.stream.length != length:
        # Of several logical shards, one may have ended long before the last batch.
        advice = "resume from a state that was saved before the first short batch"
        if len(saved.cursors) == 1:
            advice = f"call seek({saved.step - 1})"
        yield _Difference(
            None,
            f"length: saved at the end of {saved.stream.length} positions, after a short or padded batch. Here the "
            f"sampler has {'no end' if length is None else f'{length} positions'}, and that batch is complete. To get "
            f"it completely, which repeats its records, {advice}",
        )
    elif remainder and unaligned != length:
        yield _Difference(
            None,
            f"position: saved {unaligned}, which is not a multiple of the global_batch {size} here. The nearest "
            f"multiples are {step * size}: seek({step}), and {(step + 1) * size}: seek({step + 1})",
        )


def _content_changes(then: Stream, now: Stream) -> Iterator[_Difference]:
    """Yields the differences in content. Digests of code by another minor version of Python cannot be compared."""
    before, after = then.fingerprint, now.fingerprint
    reported = _different_paths(then, now)
    different = before.content.keys() | after.content.keys()
    for path in sorted(different, key=_natural_order):
        saved, here = before.content.get(path), after.content.get(path)
        # Part of a value that differs, or has become plain, is reported there.
        if saved == here or _is_allowed(path, reported) or (path.endswith(_EITHER) and None in (saved, here)):
            continue
        if before.python != after.python and (saved or here or "").startswith(CODE):
            text = f"Python {before.python} saved its digest, and the bytecode of Python {after.python} differs"
            yield _Difference(path, f"{path}: the code cannot be compared, because {text}")
        elif saved is not None and here is not None and here.startswith(CODE):
            yield _Difference(path, f"{path}: the code has changed")
        else:
            yield from _unequal(path, path, saved, here)


def _unequal(path: str | None, label: str, saved: object, here: object, reason: str = "") -> Iterator[_Difference]:
    """Yields the difference between two values unless they are equal. None stands for an absent one."""
    if saved != here:
        before, now = ("nothing" if value is None else value for value in (saved, here))
        yield _Difference(path, f"{label}: saved {before}, here {now}{reason}")


def _refuse(refused: Sequence[_Difference], allow: Collection[str]) -> None:
    """Raises CheckpointError if there is any difference that is not allowed."""
    if refused:
        listed = "".join(f"\n  {difference.text}" for difference in refused)
        raise CheckpointError(f"The state belongs to another stream:{listed}\n{_advice(refused, allow)}")


def _advice(refused: Sequence[_Difference], allow: Collection[str]) -> str:
    advice = "Build the loader as it was when the state was saved"
    known = {difference.path.removeprefix(BEFORE) for difference in refused if difference.path is not None}
    if any(difference.path is None for difference in refused):
        return f"{advice}: allow={{...}} cannot accept this."
    if len(known) > MAX_PATHS:
        known = set(map(_root_of, known))
    names = sorted({*allow, *known}, key=_natural_order)
    quoted = ", ".join(f'"{name}"' for name in names if not _is_allowed(name, [one for one in names if one != name]))
    return f"{advice}, or resume with these differences on purpose: set_state(state, allow={{{quoted}}})."


def _is_allowed(path: str | None, allow: Collection[str]) -> bool:
    """Returns True if a path, or a path that contains it, is named in `allow`."""
    if path is None or not allow:
        return False
    path = path.removeprefix(BEFORE)
    return any(path == name or (path.startswith(name) and path[len(name)] in ".[(") for name in allow)


def _root_of(path: str) -> str:
    return re.split(r"[.\[(]", path, maxsplit=1)[0]


def _natural_order(path: str) -> list[tuple[int, str]]:
    """Returns a key that sorts paths with their numbers as numbers."""
    return [(int(text), "") if text.isdecimal() else (-1, text) for text in re.split(r"(\d+)", path)]
