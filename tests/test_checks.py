"""The rules for arguments, which all of millstream shares."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest

import millstream
from millstream.core.checks import as_flag, as_integer, as_positive, named_arguments
from millstream.transforms import Batch, FlatMap


@pytest.mark.parametrize(
    ("check", "value", "expected"),
    [
        *((as_integer, value, 3) for value in (3, np.int64(3), np.uint8(3))),
        (as_flag, True, True),
        (as_flag, np.False_, False),
        *((as_positive, value, float(value)) for value in (1, 0.5, np.float32(2), float("inf"))),
    ],
)
def test_values_of_numpy_become_plain_ones(check: Callable[..., Any], value: Any, expected: Any) -> None:
    """Whatever is an integer, a flag or a number of seconds comes out as Python's."""
    checked = check(value, "name")
    assert (type(checked), checked) == (type(expected), expected)


@pytest.mark.parametrize(
    ("check", "value", "error", "rule"),
    [
        *(
            (as_integer, value, TypeError, f"must be an integer, got {value!r} of type")
            for value in (True, np.True_, 3.0, np.float32(3), "3", None, np.array([3]), [3])
        ),
        (functools.partial(as_integer, minimum=1), 0, ValueError, "must be at least 1, got 0"),
        *((as_flag, value, TypeError, f"must be True or False, got {value!r} of") for value in (1, 0, "no", None)),
        *((as_positive, value, ValueError, "must be a number above 0") for value in (0, float("nan"))),
        *((as_positive, value, TypeError, "must be a number, got") for value in ("1", True)),
    ],
)
def test_other_values_are_refused(check: Callable[..., Any], value: Any, error: type[Exception], rule: str) -> None:
    """A value merely like an integer, a flag or a time is an error with the name, the rule and the value."""
    with pytest.raises(error, match=re.escape(f"name {rule}")):
        check(value, "name")


ORDER = millstream.IndexSampler(4, seed=0)

# Each argument that may be several values.
LISTS: list[tuple[Callable[[Any], object], str]] = [
    (millstream.load, "data_source must"),
    (lambda value: millstream.load([1, 2], weights=value, seed=0), "weights must"),
    (lambda value: millstream.load({"a": [1]}, weights=value), "weights must"),
    (lambda value: millstream.DataLoader(data_source=value, sampler=ORDER), "data_source must"),
    (lambda value: millstream.DataLoader(data_source=[1], sampler=value), "A sampler must"),
    (lambda value: millstream.MixtureSampler([ORDER], value), "weights must"),
    (lambda value: millstream.MixtureSampler([ORDER], [1], changes=value), "changes must"),
    (lambda value: millstream.BalancedSampler(value, costs=[1], global_batch_size=2, parts=2), "A sampler must"),
    (lambda value: millstream.BucketSampler([1, 2], value, global_batch_size=1), "boundaries must"),
    (lambda value: millstream.IndexSampler(1, keys=value), "keys must"),
    (lambda value: millstream.WindowDataSource(value, 1), "source must"),
    (millstream.MapDataset.source, "source must"),
    (millstream.JsonLinesDataSource, "paths must"),
    (lambda value: millstream.TokenDataSource(value, 2), "paths must"),
    (lambda value: millstream.BucketBatch(value, [1], "x"), "boundaries must"),
    (lambda value: millstream.BucketBatch([1], value, "x"), "batch_sizes must"),
    (lambda value: millstream.BucketBatch([1], [1], value), "feature must"),
    (lambda value: next(iter(millstream.load([value], transformations=[FlatMap(np.copy, 2)]))), "flat_map must"),
]


@pytest.mark.parametrize(("call", "text"), LISTS)
@pytest.mark.parametrize("value", [np.array(3), np.float32(3)], ids=["array", "number"])
def test_a_number_of_numpy_is_no_list(call: Callable[[Any], object], text: str, value: Any) -> None:
    """An array of shape () has the methods of a list, which raise errors that name no argument."""
    with pytest.raises((TypeError, ValueError), match=f"^{text} "):
        call(value)


def test_a_source_without_a_length_is_refused_before_it_is_described() -> None:
    """By the name of the argument, whatever its class."""

    class InOrder:
        def __iter__(self) -> Any: ...

    with pytest.raises(TypeError, match=r"^data_source must have len.*Write millstream.IterDataset"):
        millstream.DataLoader(data_source=cast("Any", InOrder()), sampler=ORDER)


def test_an_integer_that_no_array_holds_is_refused_by_its_name() -> None:
    """Positions and sizes are in arrays of int64. A buffer of that many batches would be filled without an end."""
    loader = millstream.load([1, 2], batch_size=1)
    calls: list[Callable[[int], object]] = [
        lambda value: millstream.WeightedSampler([1, 2], seed=0).reweighted(value, [1, 2]),
        lambda value: millstream.WindowDataSource([1, 2], value),
        lambda value: iter(loader).seek(value),
        lambda value: millstream.device_put(iter(loader), buffer_size=value),
        lambda value: millstream.ReadOptions(num_threads=value),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=r"^(position|size|step|buffer_size|num_threads) must be at most"):
            call(2**63 + 1)


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
    (millstream.MapDataset.range(1).to_iter_dataset().batch, {"batch_size": 1}),
    (FlatMap, {"function": list, "max_fan_out": 1}),
]


@pytest.mark.parametrize(("call", "arguments"), CALLS, ids=lambda value: getattr(value, "__name__", ""))
def test_every_misspelt_argument_is_told_the_near_one(call: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Each argument, one letter short, is a TypeError with the name of what was called, the wrong and the right one."""
    call(**arguments)
    for name in inspect.signature(call).parameters:
        with pytest.raises(TypeError) as caught:
            call(**{**arguments, name[:-1]: 1})
        words = f"{call.__qualname__} has no argument '{name[:-1]}': did you mean '{name}'? It takes "
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
