"""Checks of the functions that operations are constructed from, and of their arguments."""

import inspect

from millstream.checks import as_integer
from millstream.descriptions import function_name


def valid_max_fan_out(name: str, max_fan_out: object) -> int:
    """Returns `max_fan_out` as an int. Errors name the operation."""
    if max_fan_out is None:
        raise TypeError(f"{name} needs max_fan_out, an integer: the maximum number of children per element.")
    return as_integer(max_fan_out, f"{name}'s max_fan_out", minimum=1)


def check_yields_nothing(name: str, function: object) -> None:
    """Refuses a generator function, which would turn each element into a generator."""
    called = (function, getattr(type(function), "__call__", None))  # noqa: B004  (the method of its class)
    if any(map(inspect.isgeneratorfunction, called)):
        raise TypeError(
            f"{name} needs a function that returns one result per element, got {function_name(function)}, "
            "which yields. Use FlatMap(function, max_fan_out) to split an element into several. To group elements as "
            "they arrive, use Batch, Rebatch, ConcatThenSplit or a packer."
        )
