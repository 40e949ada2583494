"""What a mixture accepts as its components: each mistake is an error at construction."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from millstream.checks import as_integer
from millstream.samplers.base import AdaptedSampler, VectorisedSampler, is_packed, largest_key, vectorised
from millstream.sharding import NoSharding


def named_parts(given: Any, what: str) -> tuple[tuple[Any, ...], list[Any]]:
    """Returns the names and the values of a mapping; of a sequence, its numbers are the names."""
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
    """Returns a component's sampler as one that answers for many positions at once."""
    try:
        ready = vectorised(sampler)
    except TypeError as error:
        error.add_note(f"millstream: in component {name!r} of the mixture.")
        raise
    if is_packed(ready):
        raise TypeError(
            f"The sampler of component {name!r} makes rows, which cannot be mixed: mix the documents, or pack each "
            "component by itself."
        )
    shard = getattr(sampler, "shard_options", None)
    if shard is not None and not isinstance(shard, NoSharding):
        raise ValueError(
            f"The sampler of component {name!r} has shard_options={shard}, but the mixture is sharded, "
            "not its components: give shard_options to the MixtureSampler, or to the DataLoader."
        )
    if ready.length == 0:
        raise ValueError(f"The sampler of component {name!r} has no positions: leave the component out.")
    return ready


def checked_source_lengths(
    parts: Mapping[Any, Any], given: Sequence[int] | Mapping[str, int] | None
) -> tuple[int, ...]:
    """Returns how many records the source of each component has."""
    if given is None:
        return tuple(_own_source_length(name, sampler) for name, sampler in parts.items())
    names, lengths = named_parts(given, "source_lengths")
    if sorted(map(str, names)) != sorted(map(str, parts)):
        raise ValueError(f"source_lengths must have one number for each of {list(parts)}, got {list(names)}.")
    by_name = dict(zip(names, lengths, strict=True))
    checked = []
    for name, sampler in parts.items():
        length = as_integer(by_name[name], f"The source length of component {name!r}", minimum=1)
        largest = largest_key(sampler)
        if largest is not None and largest >= length:
            raise ValueError(
                f"The sampler of component {name!r} asks for record keys up to {largest}, but source_lengths says that "
                f"its source has {length} records."
            )
        checked.append(length)
    return tuple(checked)


def _own_source_length(name: Any, sampler: Any) -> int:
    of_mixture = getattr(sampler, "num_source_records", None)
    if of_mixture is not None:
        return operator.index(of_mixture)
    num_records = getattr(sampler, "num_records", None)
    if num_records is None or largest_key(sampler) != operator.index(num_records) - 1:
        raise ValueError(
            f"It is not known how many records the source of component {name!r} has: its sampler "
            + ("has no num_records" if num_records is None else "leaves some out")
            + ". Give source_lengths=[len(source), ...]."
        )
    return operator.index(num_records)
