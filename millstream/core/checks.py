"""Checks of arguments: integers, flags, times, and the names of keyword arguments."""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import numpy as np

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
Class = TypeVar("Class", bound=type)
Options = TypeVar("Options")


LARGEST_COUNT = 1 << 63
"""The largest number of records, positions or bytes, whose indices are in int64 arrays."""


def as_integer(value: object, name: str, minimum: int | None = None, maximum: int | None = LARGEST_COUNT) -> int:
    """Returns a plain int from `minimum` to `maximum`. NumPy's integers are integers; booleans and floats are not."""
    try:
        integer = operator.index(value)  # type: ignore[arg-type]  # what has no index raises TypeError
    except TypeError:
        raise TypeError(_not_an_integer(value, name)) from None
    if isinstance(value, bool):
        raise TypeError(_not_an_integer(value, name))
    if minimum is not None and integer < minimum:
        raise ValueError(f"{name} must be at least {minimum}, got {integer}.")
    if maximum is not None and integer > maximum:
        raise ValueError(f"{name} must be at most {maximum:,}, got {integer:,}.")
    return integer


def as_integer_or_none(value: object, name: str) -> int | None:
    """Returns a plain int of at least 1 as `as_integer` does, or None for None."""
    number = None if value is None else as_integer(value, name, maximum=None)
    if number is not None and number < 1:
        raise ValueError(f"{name} must be at least 1, or None, got {number}.")
    return number


def as_flag(value: object, name: str) -> bool:
    """Returns a plain bool for a bool of Python or NumPy."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} must be True or False, got {value!r} of type {type(value).__name__}.")
    return bool(value)


def as_options(value: object, name: str, kind: type[Options]) -> Options:
    """Returns options of a class: as they are, or a copy of another library's options with the same fields."""
    if isinstance(value, kind):
        return value
    if not has_fields(value, kind):
        raise TypeError(f"{name} must be of type {kind.__name__}, got {value!r} of type {type(value).__name__}.")
    return kind(**{field: getattr(value, field) for field in _field_names(kind) if hasattr(value, field)})


def has_fields(value: object, kind: type) -> bool:
    """Returns True for an instance of a class of options, or of another dataclass with its first two fields."""
    first_two = _field_names(kind)[:2]
    is_alike = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return isinstance(value, kind) or (is_alike and all(hasattr(value, field) for field in first_two))


def _field_names(kind: type) -> list[str]:
    return [field.name for field in dataclasses.fields(kind)]


def as_positive(value: object, name: str, what: str = "a number") -> float:
    """Returns a positive number as a float. Infinity is allowed."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise TypeError(f"{name} must be {what}, got {value!r} of type {type(value).__name__}.")
    if not value > 0:
        raise ValueError(f"{name} must be {what} above 0, got {value!r}.")
    return float(value)


def named_arguments(
    advice: Mapping[str, str] | None = None, positional: str = "", spellings: Mapping[str, str] | None = None
) -> Callable[[Callable[Parameters, Result]], Callable[Parameters, Result]]:
    """Returns a decorator: a call with an unknown argument fails with a suggestion.

    `advice` has suggestions for names that users know from other libraries, `positional` that for too many arguments.
    `spellings` has the names of parameters for other names of theirs, which are accepted without being documented.
    """

    def decorate(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
        @functools.wraps(function)
        def call(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
            if spellings and not spellings.keys().isdisjoint(kwargs):
                for other in spellings.keys() & kwargs.keys():
                    if (name := spellings[other]) in kwargs:
                        raise TypeError(f"{name} and {other} are two names of one argument. Pass {name} alone.")
                    kwargs[name] = kwargs.pop(other)
            try:
                return function(*args, **kwargs)
            except TypeError:
                # Binding arguments takes longer than most functions do, so only a call that failed is checked.
                signature = inspect.signature(function)
                try:
                    signature.bind(*args, **kwargs)
                except TypeError as error:
                    called = type(args[0]).__name__ if function.__name__ == "__init__" else function.__qualname__
                    wrong = _wrong_call(
                        called, signature, kwargs, str(error), advice=advice or {}, positional=positional
                    )
                else:
                    raise
            raise TypeError(wrong)

        return call

    return decorate


def named_fields(cls: Class) -> Class:
    """Decorates a dataclass, whose constructor then has the errors of `named_arguments`."""
    cls.__init__ = named_arguments()(cls.__init__)  # type: ignore[misc]  # the signature stays as it is
    return cls


def _wrong_call(
    called: str,
    signature: inspect.Signature,
    given: Mapping[str, object],
    problem: str,
    *,
    advice: Mapping[str, str],
    positional: str,
) -> str:
    known = [name for name in signature.parameters if name != "self"]
    unknown = [name for name in given if name not in known]
    if not unknown:
        return f"{called}: {problem}.{f' {positional}' if positional and 'positional' in problem else ''}"
    name = unknown[0]
    if name in advice:
        return f"{called} has no argument {name!r}: {advice[name]}"
    import difflib  # noqa: PLC0415  (for this error only)

    near = difflib.get_close_matches(name, known, n=1)
    meant = f": did you mean {near[0]!r}?" if near else "."
    return f"{called} has no argument {name!r}{meant} It takes {', '.join(known)}."


def _not_an_integer(value: object, name: str) -> str:
    return f"{name} must be an integer, got {value!r} of type {type(value).__name__}."


def is_scalar(value: object) -> bool:
    """Returns True for NumPy's numbers and arrays of shape (): they have the methods of lists, which raise."""
    return getattr(value, "ndim", None) == 0


def is_listed(value: object) -> bool:
    """Returns True if a value can be iterated, and is not a text."""
    return hasattr(value, "__iter__") and not isinstance(value, str | bytes) and not is_scalar(value)


def as_boundaries(value: Any) -> tuple[int, ...]:
    """Returns the largest lengths of classes of lengths: plain ints from 1 on, ascending."""
    if not is_listed(value):
        raise TypeError(f"boundaries must be a list of integers, one per bucket, got {value!r}.")
    boundaries = [as_integer(one, f"boundaries[{row}]", minimum=1) for row, one in enumerate(value)]
    if not boundaries or sorted(set(boundaries)) != boundaries:
        raise ValueError(f"boundaries must be a non-empty, ascending list, got {boundaries}.")
    return tuple(boundaries)


OVERFLOWS = ("error", "truncate", "split", "drop")
"""The treatments of a document that is longer than a row, common to all packers."""


def as_overflow(value: object) -> str:
    """Returns a valid treatment."""
    if value not in OVERFLOWS:
        raise ValueError(f"overflow must be one of {', '.join(map(repr, OVERFLOWS))}, got {value!r}.")
    return str(value)
