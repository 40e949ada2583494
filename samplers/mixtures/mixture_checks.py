"""Checks of the components and weights of a mixture, and the integers in the ratios of the weights."""

import dataclasses
import itertools
import math
import operator
from collections.abc import Collection, Mapping, Sequence
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer
from millstream.record import RecordMetadata
from millstream.samplers.base import AdaptedSampler, VectorisedSampler, largest_key, vectorised
from millstream.samplers.protocols import has_varying_batches, is_packed
from millstream.sharding import NoSharding

PERIOD_LIMIT = 1 << 31
"""Whole numbers that stand for weights have a smaller sum: products of two of them fit 62 bits."""


@dataclasses.dataclass(frozen=True)
class AbsentComponent:
    """The order of a component that was left out after its last turn. It has no record key."""

    name: str
    seed: int = 0
    num_records: None = None
    length: None = None

    def __getitem__(self, position: int) -> RecordMetadata:
        self._refuse()

    def record_keys(self, start: int, stop: int) -> NDArray[np.int64]:
        del start, stop
        self._refuse()

    def record_keys_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        del positions
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise ValueError(
            f"The records of component {self.name!r} are not known: it was left out of the samplers. To read positions "
            "at which it has a turn, pass its sampler and its source again."
        )


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


def with_absent_names(names: tuple[Any, ...], changes: Sequence[tuple[Any, Any]]) -> tuple[Any, ...]:
    """Returns the names of all components: those given, and between them those that only changes of weights name.

    A component without a sampler comes before the one that follows it in the first weights that name it.
    """
    if not isinstance(names[0], str):
        return names
    found = list(names)
    for _, weights in changes:
        named = [name for name in weights if isinstance(name, str)] if isinstance(weights, Mapping) else []
        for row, name in enumerate(named):
            if name not in found:
                later = [found.index(other) for other in named[row + 1 :] if other in found]
                found.insert(later[0] if later else len(found), name)
    return tuple(found)


def checked_changes(changes: Any) -> list[tuple[Any, Any]]:
    rule = "changes must be pairs of a position and weights, positions ascending"
    if isinstance(changes, (str, bytes, Mapping)) or not hasattr(changes, "__iter__"):
        raise TypeError(f"{rule}, got {type(changes).__name__}.")
    pairs = [tuple(change) if isinstance(change, list | tuple) else (change,) for change in changes]
    for before, change in itertools.pairwise([(-1, None), *pairs]):
        if len(change) != 2:
            raise TypeError(f"{rule}, got {change!r}.")
        if as_integer(change[0], "The position of a change") <= before[0]:
            raise ValueError(f"{rule}, got position {change[0]} after {before[0]}.")
    return pairs


def checked_component(name: Any, sampler: Any) -> VectorisedSampler | AdaptedSampler:
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


def check_batches(components: Mapping[Any, Any], batches_of: int | None) -> None:
    """Refuses components that decide which records a global batch has, unless the batches are theirs."""
    for name, sampler in components.items():
        given = getattr(sampler, "given_batch", None)
        if has_varying_batches(sampler):
            raise ValueError(
                f"The sampler of component {name!r}, {type(sampler).__name__}, has a global batch per class, and a "
                "mixture has one size. Pass one global_batch_size."
            )
        if given is not None and given[1] != batches_of:
            raise ValueError(
                f"batches_of must be {given[1]}, because the {type(sampler).__name__} of component {name!r} has "
                f"{given[0]}={given[1]}, got {batches_of}."
            )


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
    if len(names) != len(components) or (isinstance(given, Mapping) and set(names) != set(components)):
        raise ValueError(f"source_lengths must have one number for each of {list(components)}, got {list(names)}.")
    by_name = dict(zip(names if isinstance(given, Mapping) else components, lengths, strict=True))
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


def checked_weights(
    weights: Sequence[Any] | Mapping[str, Any], names: Sequence[str], optional: Collection[str] = ()
) -> tuple[int, ...]:
    """Returns one whole number for each component, in the ratios of the weights and without a common divisor.

    Components that need not be named have the weight 0.

    Decimals are taken as they are written: 0.3 and 0.7 are 3 and 7. If that makes the numbers' sum 2**31 or more, as
    with computed weights, the numbers are as near as a sum just below that allows.
    """
    if isinstance(weights, Mapping):
        missing = [n for n in names if n not in weights and n not in optional]
        unknown = [n for n in weights if n not in names]
        if missing or unknown:
            raise ValueError(
                "weights must name exactly the components: "
                + ", ".join(
                    [f"there is no weight for {name!r}" for name in missing]
                    + [f"there is no component {name!r}" for name in unknown]
                )
                + ". A component that is to be left out has the weight 0."
            )
        weights = [weights.get(name, 0) for name in names]
    if isinstance(weights, (str, bytes)) or not hasattr(weights, "__len__") or not hasattr(weights, "__iter__"):
        raise TypeError(f"weights must be a list of numbers, or a mapping from names to numbers, got {weights!r}.")
    if len(weights) != len(names):
        raise ValueError(f"weights must have one number for each of the {len(names)} components, got {len(weights)}.")
    fractions = [_as_fraction(weight, name) for weight, name in zip(weights, names, strict=True)]
    if not any(fractions):
        raise ValueError("At least one of the weights must be above 0, got nothing but zeros.")
    whole = _whole_numbers(fractions)
    for name, fraction, number in zip(names, fractions, whole, strict=True):
        if fraction and not number:
            raise ValueError(
                f"The weight {float(fraction)!r} of component {name!r} is less than 2**-31 of all weights together, "
                "so that it would never have a turn: write 0, or a larger weight."
            )
    return whole


def _as_fraction(weight: Any, name: str) -> Fraction:
    what = f"The weight of component {name!r} must be a number, 0 or above"
    if isinstance(weight, (bool, np.bool_, str, bytes)):
        raise TypeError(f"{what}, got {weight!r} of type {type(weight).__name__}.")
    try:
        is_finite = math.isfinite(weight)
    except TypeError:
        raise TypeError(f"{what}, got {weight!r} of type {type(weight).__name__}.") from None
    except OverflowError:
        raise ValueError(f"{what}, and below 2**1024, got one of {weight.bit_length()} bits.") from None
    if not is_finite or weight < 0:
        raise ValueError(f"{what}, got {weight!r}.")
    # As it is written, not as it is stored: 0.1 is a tenth.
    return Fraction(str(weight))


def _whole_numbers(fractions: Sequence[Fraction]) -> tuple[int, ...]:
    scale = math.lcm(*(fraction.denominator for fraction in fractions))
    numbers = [int(fraction * scale) for fraction in fractions]
    if sum(numbers) // math.gcd(*numbers) >= PERIOD_LIMIT:
        numbers = _rounded(numbers, PERIOD_LIMIT - 1)
    return reduced(numbers)


def reduced(numbers: Sequence[int]) -> tuple[int, ...]:
    divisor = math.gcd(*numbers)
    return tuple(number // divisor for number in numbers)


def _rounded(numbers: Sequence[int], total: int) -> list[int]:
    """Returns whole numbers of that sum in nearly the same ratios; the remainder goes to the largest fractions."""
    whole = sum(numbers)
    rounded = [number * total // whole for number in numbers]
    by_rest = sorted(range(len(numbers)), key=lambda number: -(numbers[number] * total % whole))
    for number in by_rest[: total - sum(rounded)]:
        rounded[number] += 1
    return rounded
