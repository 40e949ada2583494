"""The rules for arguments, which all of millstream shares."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.checks import as_flag, as_integer, as_seconds, named_arguments
from millstream.transforms import Batch, FlatMap


@pytest.mark.parametrize("value", [3, np.int64(3), np.uint8(3)])
def test_integers_are_plain_ints(value: Any) -> None:
    """Whatever is an integer comes out as Python's."""
    assert type(as_integer(value, "steps")) is int
    assert as_integer(value, "steps", minimum=3) == 3


@pytest.mark.parametrize("value", [True, np.True_, 3.0, np.float32(3), "3", None, np.array([3]), [3]])
def test_what_is_not_an_integer_is_refused(value: Any) -> None:
    """Booleans, floats, texts and arrays are not integers, and the error says what was given."""
    with pytest.raises(TypeError, match=re.escape(f"steps must be an integer, got {value!r} of type")):
        as_integer(value, "steps")


def test_integers_have_a_minimum() -> None:
    """An integer below the minimum is a ValueError that says the rule."""
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        as_integer(0, "steps", minimum=1)


@pytest.mark.parametrize(("value", "expected"), [(True, True), (np.False_, False)])
def test_flags_are_plain_bools(value: Any, expected: bool) -> None:
    """A boolean of NumPy is one."""
    assert as_flag(value, "shuffle") is expected


@pytest.mark.parametrize("value", [1, 0, "no", None])
def test_what_is_not_a_flag_is_refused(value: Any) -> None:
    """What is merely true or false for Python is not a flag."""
    with pytest.raises(TypeError, match=re.escape(f"shuffle must be True or False, got {value!r} of type")):
        as_flag(value, "shuffle")


@pytest.mark.parametrize("value", [1, 0.5, np.float32(2), float("inf")])
def test_times_are_floats_above_zero(value: Any) -> None:
    """Any number above 0 is a time."""
    assert as_seconds(value, "timeout") == value


@pytest.mark.parametrize(
    ("value", "kind"), [(0, ValueError), (float("nan"), ValueError), ("1", TypeError), (True, TypeError)]
)
def test_what_is_not_a_time_is_refused(value: Any, kind: type[Exception]) -> None:
    """Everything else is an error that says so."""
    with pytest.raises(kind, match="timeout must be a number of seconds"):
        as_seconds(value, "timeout")


# Each constructor and function of the façade whose arguments are checked by name, with enough of them to be called.
CALLS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (millstream.DataLoader, {"data_source": [1], "sampler": millstream.SequentialSampler(1)}),
    (millstream.load, {"source": [1]}),
    (millstream.surviving_keys, {"data_source": [1], "operations": []}),
    (millstream.ReadOptions, {}),
    (millstream.MultiprocessingOptions, {}),
    (millstream.IndexSampler, {"num_records": 1}),
    (millstream.SequentialSampler, {"num_records": 1}),
    (millstream.ShardOptions, {"shard_index": 0, "shard_count": 1}),
    (Batch, {"batch_size": 1}),
    (FlatMap, {"function": list, "max_fan_out": 1}),
]


@pytest.mark.parametrize(("call", "arguments"), CALLS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_misspelt_argument_is_told_the_near_one(call: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Each argument, one letter short, is a TypeError with the name of what was called, the wrong and the right one."""
    call(**arguments)
    for name in inspect.signature(call).parameters:
        with pytest.raises(TypeError) as caught:
            call(**{**arguments, name[:-1]: 1})
        words = f"{call.__name__} has no argument '{name[:-1]}': did you mean '{name}'? It takes "
        assert str(caught.value).startswith(words)
        assert "_Operation" not in str(caught.value)


def test_a_decorated_function_is_itself() -> None:
    """Name, documentation, signature and result are those of the function, and its own TypeErrors are its own."""

    @named_arguments()
    def divide(dividend: int, divisor: int = 2) -> float:
        """Divides."""
        return dividend / divisor

    assert (divide.__name__, divide.__doc__) == ("divide", "Divides.")
    assert str(inspect.signature(divide)) == "(dividend: int, divisor: int = 2) -> float"
    assert divide(3) == divide(dividend=3, divisor=2) == 1.5
    with pytest.raises(TypeError, match="unsupported operand"):
        divide("3")  # type: ignore[arg-type]
