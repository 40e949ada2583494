"""The operations that users subclass or make from functions."""

import abc
import dataclasses
import functools
import inspect
import math
import operator
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import cloudpickle
import numpy as np
import pytest

from millstream import transforms
from millstream.transforms import Batch, Filter, FlatMap, Map, MapWithIndex, RandomMap, RandomMapTransform
from millstream.transforms.base import METHODS
from millstream.transforms.given import as_transformation


class PlainAdd(Map):
    """A subclass without a constructor."""

    amount = 1

    def map(self, element: int) -> int:
        return element + self.amount


class AddWithOwnConstructor(PlainAdd):
    """A subclass whose constructor does not call its base's."""

    def __init__(self, amount: int) -> None:
        self.amount = amount


class AddCallingSuper(PlainAdd):
    def __init__(self, amount: int) -> None:
        super().__init__()
        self.amount = amount


@dataclasses.dataclass
class AddDataclass(PlainAdd):
    """The usual way in Grain's examples."""

    amount: int


@dataclasses.dataclass(frozen=True)
class AddFrozen(PlainAdd):
    """A frozen dataclass."""

    amount: int


@dataclasses.dataclass(frozen=True, slots=True)
class AddSlots(PlainAdd):
    """A frozen dataclass with slots."""

    amount: int


class Amount:
    """A further base with a constructor of its own."""

    def __init__(self, amount: int) -> None:
        self.amount = amount


class AddOfTwoBases(PlainAdd, Amount):
    """A subclass that leaves construction to its second base."""


class AbstractAdd(Map, abc.ABC):
    """A user's own abstract class between Map and the concrete one."""

    @abc.abstractmethod
    def amount(self) -> int:
        """Returns what to add."""

    def map(self, element: int) -> int:
        return element + self.amount()


class AddOne(AbstractAdd):
    def amount(self) -> int:
        return 1


SUBCLASSES = [
    PlainAdd(),
    AddWithOwnConstructor(1),
    AddCallingSuper(1),
    AddDataclass(1),
    AddFrozen(1),
    AddSlots(1),
    AddOfTwoBases(1),  # type: ignore[call-overload]  # Type checkers see the constructor of the first base only.
    AddOne(),
]


@pytest.mark.parametrize("operation", SUBCLASSES, ids=lambda operation: type(operation).__name__)
def test_subclasses_run_however_they_are_written(operation: Map) -> None:
    """Every way to write a subclass gives an operation that works, passes as it is, and pickles."""
    assert as_transformation(operation) is operation
    assert operation.map(41) == 42
    for copied in (pickle.loads(pickle.dumps(operation)), cloudpickle.loads(cloudpickle.dumps(operation))):
        assert copied.map(41) == 42


@pytest.mark.parametrize("kind", [Map, RandomMap, MapWithIndex, Filter, FlatMap])
def test_constructors_show_their_arguments(kind: type) -> None:
    """Tools display the arguments that a constructor accepts."""
    expected = ["function", *({FlatMap: ["max_fan_out"], Map: ["batched"]}.get(kind, []))]

    assert list(inspect.signature(kind).parameters) == expected


def test_types_leave_no_trace() -> None:
    """`Map[int, str]` is for type checkers: at run time it is Map, so that pickles and checkpoints are the same."""
    assert Map[int, str] is Map
    assert RandomMapTransform[int, str] is RandomMap
    assert FlatMap[int, str] is FlatMap
    assert Filter[int] is Filter
    assert vars(Map[int, int](double)) == vars(Map(double))


@dataclasses.dataclass(frozen=True)
class Repeat(FlatMap):
    """A splitting operation whose limit is a field."""

    max_fan_out: int

    def flat_map(self, element: Any) -> Sequence[Any]:
        return [element] * self.max_fan_out


def double(element: int) -> int:
    return 2 * element


@pytest.mark.parametrize(("kind", "method"), METHODS.items())
def test_a_function_stands_in_place_of_the_method(kind: Any, method: str) -> None:
    """The method of an operation made from a function is that very function, also after pickling."""
    limit = [3] * (kind is FlatMap)
    operation = kind(operator.mul, *limit)
    assert getattr(as_transformation(operation), method) is operator.mul
    assert getattr(pickle.loads(pickle.dumps(operation)), method) is operator.mul
    from_lambda = cloudpickle.loads(cloudpickle.dumps(kind(lambda *arguments: arguments, *limit)))
    assert getattr(from_lambda, method)(1, 2) == (1, 2)


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (Map(double), "Map(double)"),
        (RandomMap(lambda _element, _rng: 0), "RandomMap(<lambda>)"),
        (FlatMap(str.split, max_fan_out=4), "FlatMap(split, max_fan_out=4)"),
        (Filter(functools.partial(operator.lt, 3)), "Filter(partial(lt, 3))"),
        (Map(functools.partial(double, element=1)), "Map(partial(double, element=1))"),
        (Map(operator.itemgetter("image")), "Map(operator.itemgetter('image'))"),
        (AddFrozen(1), "AddFrozen(amount=1)"),
        (Repeat(3), "Repeat(max_fan_out=3)"),
        (Batch(2, batch_fn=sum), "Batch(batch_size=2, batch_fn=sum)"),
        (Batch(2, batch_fn=lambda elements: elements), "Batch(batch_size=2, batch_fn=<lambda>)"),
        (PlainAdd(), ""),
    ],
)
def test_repr_names_the_function(operation: Any, text: str) -> None:
    """The repr of an operation made from a function names it; a dataclass keeps its own, a plain class Python's."""
    assert repr(operation) == (text or object.__repr__(operation))


@pytest.mark.parametrize("kind", [RandomMap, MapWithIndex, Filter, FlatMap])
def test_instances_of_every_kind_pass_as_they_are(kind: type) -> None:
    """An operation of any kind is returned itself; the limit of a FlatMap may be an attribute of its class."""
    own = type("Own", (kind,), {METHODS[kind]: lambda *_: (), "max_fan_out": 2})()
    for operation in (own, Repeat(3), Batch(2)):
        assert as_transformation(operation) is operation


@pytest.mark.parametrize("function", [double, math.sqrt, functools.partial(max, 1), AddSlots(1).map, lambda x: x])
def test_a_bare_function_means_map(function: Callable[[Any], Any]) -> None:
    """A callable that is not an operation becomes a Map of it."""
    operation = as_transformation(function)
    assert type(operation) is Map
    assert operation.map(4) == function(4)


@pytest.mark.parametrize("operation", [FlatMap(list, 3), FlatMap(list, max_fan_out=np.int64(3))])
def test_flat_map_keeps_its_limit(operation: FlatMap[str, str]) -> None:
    """A FlatMap made from a function holds max_fan_out as a plain int, however given, also after pickling."""
    assert type(operation.max_fan_out) is int
    assert pickle.loads(pickle.dumps(operation)).max_fan_out == 3


def test_a_batch_is_a_value() -> None:
    """The ints and bools of numpy become Python's; a Batch cannot be changed, compares by value and pickles."""
    batch = Batch(np.int32(4), drop_remainder=np.True_)  # type: ignore[arg-type]
    assert (type(batch.batch_size), type(batch.drop_remainder)) == (int, bool)
    assert batch == Batch(4, drop_remainder=True)
    assert repr(batch) == "Batch(batch_size=4, drop_remainder=True)"
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.batch_size = 3  # type: ignore[misc]
    with_function = Batch(2, batch_fn=sum)
    assert pickle.loads(pickle.dumps(with_function)) == with_function


class Nothing(Map):
    """Overrides nothing."""


class NoSplit(FlatMap):
    max_fan_out = 2


class TwoKinds(Map, Filter):
    """Is of two kinds."""

    def map(self, element: Any) -> Any:
        return element

    def filter(self, element: Any) -> bool:
        return bool(element)


class OldStyle:
    """An operation that gets an iterator of records and yields."""

    def __call__(self, records: Any) -> Any:
        yield from records


def yielding(*elements: Any) -> Any:
    yield from elements


YieldingMap = type("YieldingMap", (Map,), {"map": yielding})
YieldingFlatMap = type("YieldingFlatMap", (FlatMap,), {"flat_map": yielding, "max_fan_out": 1})


async def in_a_moment(record: int) -> int:
    """Returns a record later."""
    return record


NO_OPERATIONS: list[tuple[Any, type[Exception], str]] = [
    (PlainAdd, TypeError, r"got the class PlainAdd: write PlainAdd\(...\)\.$"),
    (Batch, TypeError, r"got the class Batch: write Batch\(...\)\.$"),
    (int, TypeError, r"got the class int: write int\(...\), or Map\(int\)"),
    (Nothing(), TypeError, "Map must override map, but Nothing does not"),
    (NoSplit(), TypeError, "FlatMap must override flat_map, but NoSplit does not"),
    (Repeat(True), TypeError, "Repeat's max_fan_out must be an integer, got True"),
    (Repeat(2.0), TypeError, r"Repeat's max_fan_out must be an integer, got 2\.0"),  # type: ignore[arg-type]
    (Repeat(0), ValueError, "Repeat's max_fan_out must be at least 1, got 0"),
    (TwoKinds(), TypeError, "exactly one kind .*, but TwoKinds is Map and Filter: split it"),
    (transforms.Transformation(), TypeError, "exactly one kind .*, but Transformation is none of them"),
    (None, TypeError, "got None of type builtins.NoneType"),
    ("map", TypeError, "got 'map' of type builtins.str"),
    *((made, TypeError, r"which yields\. Use FlatMap\(") for made in (OldStyle(), yielding, YieldingMap())),
    (functools.partial(yielding, 1), TypeError, r"which yields\. Use FlatMap\(function, max_fan_out\)"),
    (in_a_moment, TypeError, r"got in_a_moment, which is async\. Write a plain function"),
]
CALLS: list[tuple[Callable[..., object], tuple[Any, ...], type[Exception], str]] = [
    (Map, (), TypeError, r"Map needs a function, got None: write Map\(function\), or subclass Map and override map\."),
    (Filter, (), TypeError, "Filter needs a function, got None"),
    (FlatMap, (), TypeError, "FlatMap needs a function, got None"),
    (RandomMap, (3,), TypeError, "RandomMap needs a function, got 3"),
    (Map, (double, double), TypeError, "too many positional arguments"),
    (FlatMap, (double,), TypeError, "FlatMap needs max_fan_out, an integer"),
    (FlatMap, (double, 0), ValueError, "FlatMap's max_fan_out must be at least 1, got 0"),
    (PlainAdd, (3,), TypeError, r"PlainAdd takes no arguments: write PlainAdd\.__init__, or decorate .*dataclass"),
    *((kind, (yielding,), TypeError, "which yields") for kind in (RandomMap, Filter)),
    *((kind, (in_a_moment,), TypeError, "which is async") for kind in (Map, Filter)),
    *(
        (getattr(type("Empty", (kind,), {})(), method), (0, 1)[: 1 + two], NotImplementedError, f"override {method}")
        for (kind, method), two in zip(METHODS.items(), (False, True, True, False, False), strict=True)
    ),
    (Batch, (0,), ValueError, "batch_size must be at least 1, got 0"),
    (Batch, (2**40,), ValueError, "batch_size must be at most 2,147,483,648, got"),
    (Batch, (True,), TypeError, "batch_size must be an integer, got True"),
    (Batch, (2.0,), TypeError, r"batch_size must be an integer, got 2\.0"),
    (Batch, (2, sum), TypeError, "drop_remainder must be True or False, got <built-in function sum>"),
    (Batch, (2, False, 3), TypeError, "batch_fn must be a function .* got 3"),
    (Batch, (2, False, None, 1), TypeError, "pad_remainder must be True or False, got 1"),
    (Batch, (2, True, None, True), ValueError, "Cannot combine pad_remainder=True, .* with drop_remainder=True"),
    (Batch, (2, False, sum, True), ValueError, "Cannot combine pad_remainder=True with batch_fn, .* to a Map"),
]


@pytest.mark.parametrize(
    ("make", "arguments", "error", "words"),
    [*((as_transformation, (value,), error, words) for value, error, words in NO_OPERATIONS), *CALLS],
)
def test_what_is_no_operation_is_refused(
    make: Callable[..., Any], arguments: tuple[Any, ...], error: type[Exception], words: str
) -> None:
    """Each mistake says what to write: in a list of operations, in a construction, or of a method not overridden."""
    with pytest.raises(error, match=words):
        make(*arguments)


def test_a_flat_map_may_yield() -> None:
    """The children of an element may come from a generator."""
    assert isinstance(as_transformation(YieldingFlatMap()), FlatMap)
    assert list(FlatMap(yielding, 1).flat_map(3)) == [3]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            functools.partial(FlatMap, list, max_fanout=3),
            "FlatMap has no argument 'max_fanout': did you mean 'max_fan_out'? It takes function, max_fan_out.",
        ),
        (
            functools.partial(Map, func=abs),
            "Map has no argument 'func': did you mean 'function'? It takes function, batched.",
        ),
        (functools.partial(Map, abs, abs), "Map: too many positional arguments."),
        (Batch, "Batch: missing a required argument: 'batch_size'."),
    ],
)
def test_wrong_names_of_arguments_are_told_the_near_one(make: Callable[..., Any], text: str) -> None:
    """A call that does not fit names the class that was called, what is wrong, and the argument that was meant."""
    with pytest.raises(TypeError) as caught:
        make()

    assert str(caught.value) == text
    assert caught.value.__cause__ is caught.value.__context__ is None
