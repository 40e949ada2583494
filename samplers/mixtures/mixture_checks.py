"""Checks of the components of a mixture: each mistake is an error at construction."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from millstream.checks import as_integer
from millstream.samplers.base import AdaptedSampler, VectorisedSampler, largest_key, vectorised
from millstream.samplers.protocols import is_packed
from millstream.sharding import NoSharding


def named_components(given: Any, what: str) -> tuple[tuple[Any, ...], list[Any]]:
    if isinstance(given, Mapping):
        names, values = list(given), list(given.values())
        if wrong := [name for name in names if not isinstance(name, str)]:
            raise TypeError(f"{what} must be named by strings, got the name {wrong[0]!r}.")
    elif isinstance(given, (str, bytes)) or not isinstance(given, Sequence):
        raise TypeError(f"{what} must be a list, or a mapping by name, got {type(given).__name__}.")
    else:
        names, values = list(range(len(given))), list(given)
    if not values:
        raise ValueError(f"{what} must have at least one component, got none.")
    return tuple(names), values


def checked_component(name: Any, sampler: Any) -> VectorisedSampler | AdaptedSampler:
    """Returns a component's sampler as one that computes many positions in one call."""
    try:
        ready = vectorised(sampler)
    except TypeError as error:
        error.add_note(f"millstream: in component {name!r} of the mixture.")
        raise
    shard = getattr(sampler, "shard_options", None)
    if shard is not None and type(shard).__name__ != NoSharding.__name__:
        raise ValueError(
            f"The sampler of component {name!r} has shard_options={shard}, but the mixture is sharded, "
            "not its components: give shard_options to the MixtureSampler, or to the DataLoader."
        )
    if ready.length == 0:
        raise ValueError(f"The sampler of component {name!r} has no positions: leave the component out.")
    return ready


def checked_row_length(names: Sequence[Any], samplers: Sequence[VectorisedSampler | AdaptedSampler]) -> int | None:
    row_lengths = [sampler.row_length if is_packed(sampler) else None for sampler in samplers]
    for name, row_length in zip(names, row_lengths, strict=True):
        if row_length != row_lengths[0]:
            made = ["no rows" if length is None else f"rows of {length}" for length in (row_length, row_lengths[0])]
            raise ValueError(
                f"The sampler of component {name!r} makes {made[0]}, and that of component {names[0]!r} {made[1]}: "
                "give each a PackingSampler of one row_length, or none."
            )
    return row_lengths[0]


def checked_source_lengths(
    components: Mapping[Any, Any], given: Sequence[int] | Mapping[str, int] | None
) -> tuple[int, ...]:
    if given is None:
        return tuple(_own_source_length(name, sampler) for name, sampler in components.items())
    names, lengths = named_components(given, "source_lengths")
    if sorted(map(str, names)) != sorted(map(str, components)):
        raise ValueError(f"source_lengths must have one number for each of {list(components)}, got {list(names)}.")
    by_name = dict(zip(names, lengths, strict=True))
    checked = []
    for name, sampler in components.items():
        length = as_integer(by_name[name], f"The source length of component {name!r}", minimum=1)
        if is_packed(sampler) and sampler.num_source_records != length:
            raise ValueError(
                f"The lengths of component {name!r} are of {sampler.num_source_records} documents, but source_lengths "
                f"says that its source has {length}."
            )
        largest = largest_key(sampler)
        if largest is not None and largest >= length:
            raise ValueError(
                f"The sampler of component {name!r} asks for record keys up to {largest}, but source_lengths says that "
                f"its source has {length} records."
            )
        checked.append(length)
    return tuple(checked)


def _own_source_length(name: Any, sampler: Any) -> int:
    # A mixture and a sampler of rows know it.
    known = getattr(sampler, "num_source_records", None)
    if known is not None:
        return operator.index(known)
    num_records = getattr(sampler, "num_records", None)
    if num_records is None or largest_key(sampler) != operator.index(num_records) - 1:
        raise ValueError(
            f"It is not known how many records the source of component {name!r} has: its sampler "
            + ("has no num_records" if num_records is None else "leaves some out")
            + ". Give source_lengths=[len(source), ...]."
        )
    return operator.index(num_records)
