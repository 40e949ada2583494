"""Weights of a mixture: their checks, and the integers of the same ratios."""

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

PERIOD_LIMIT = 1 << 31
"""Whole numbers that stand for weights have a smaller sum: products of two of them fit 62 bits."""


def checked_weights(weights: Sequence[Any] | Mapping[str, Any], names: Sequence[str]) -> tuple[int, ...]:
    """Returns one whole number for each component, in the ratios of the weights and without a common divisor.

    Decimals are taken as they are written: 0.3 and 0.7 are 3 and 7. If that makes the numbers' sum 2**31 or more, as
    with computed weights, the numbers are as near as a sum just below that allows.
    """
    if isinstance(weights, Mapping):
        missing, unknown = [n for n in names if n not in weights], [n for n in weights if n not in names]
        if missing or unknown:
            raise ValueError(
                "weights must name exactly the components: "
                + ", ".join(
                    [f"there is no weight for {name!r}" for name in missing]
                    + [f"there is no component {name!r}" for name in unknown]
                )
                + ". A component that is to be left out has the weight 0."
            )
        weights = [weights[name] for name in names]
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
    if isinstance(weight, (bool, str, bytes)):
        raise TypeError(f"{what}, got {weight!r} of type {type(weight).__name__}.")
    try:
        is_finite = math.isfinite(weight)
    except TypeError:
        raise TypeError(f"{what}, got {weight!r} of type {type(weight).__name__}.") from None
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
    """Returns numbers, not all 0, without a common divisor."""
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
