"""Maps that get many elements in one call stay 1:1, and say what is wrong with what they return."""

from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np
import pytest

import millstream
from millstream.errors import CheckpointError
from millstream.transforms import Map
from millstream.transforms.given import as_transformation
from support.laws import inline_loader


class Lengths(Map):
    def map_batch(self, elements: list[str]) -> list[int]:
        return [len(text) for text in elements]


def doubled(numbers: list[int]) -> list[int]:
    return [2 * number for number in numbers]


def test_a_call_has_the_elements_of_a_block() -> None:
    """A batch of records is one call of the function, and what comes out is 1:1."""
    calls: list[int] = []

    def noted(numbers: list[int]) -> list[int]:
        calls.append(len(numbers))
        return doubled(numbers)

    loader = inline_loader(range(64), millstream.SequentialSampler(64), Map(noted, batched=True), millstream.Batch(32))
    assert len(loader) == 2
    assert np.concatenate(list(loader)).tolist() == list(range(0, 128, 2))
    assert max(calls) >= 31
    assert sum(calls) == 64


def test_chains_take_them() -> None:
    """`map(function, batched=True)` of both kinds of chain, and a class with `map_batch`."""
    numbers = millstream.MapDataset.range(10)
    assert list(numbers.map(doubled, batched=True)) == list(range(0, 20, 2))
    assert numbers.map(doubled, batched=True)[3] == 6
    assert repr(numbers.map(doubled, batched=True)).count(".map(doubled, batched=True)") == 1
    assert list(numbers.to_iter_dataset().map(doubled, batched=True).batch(5))[1].tolist() == [10, 12, 14, 16, 18]
    texts = millstream.MapDataset.source(["a", "bcd"])
    assert list(texts.map(Lengths())) == list(texts.to_iter_dataset().map(Lengths())) == [1, 3]
    assert list(texts.filter(lambda text: len(text) > 1).map(Lengths())) == [3]


def test_one_component_only() -> None:
    """Within OnlyFor, a call has the elements of that component."""
    only = millstream.OnlyFor("b", Map(doubled, batched=True))
    loader = millstream.load(
        {"a": [1, 2], "b": [10, 20]}, weights=[1, 1], num_epochs=1, transformations=[only], batch_size=4
    )
    assert sorted(next(iter(loader)).tolist()) == [1, 2, 20, 40]


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (lambda texts: texts[:-1], ValueError, r"one result per element, got \d results for \d elements"),
        (lambda texts: {"ids": texts}, TypeError, r"a list, a tuple or an array with one result per element, got dict"),
        (print, TypeError, r"got NoneType"),
        (lambda texts: np.zeros(len(texts)).sum(keepdims=False)[...], TypeError, r"got ndarray"),
    ],
)
def test_what_is_not_one_result_per_element_is_an_error(
    function: Callable[[Any], Any], error: type[Exception], message: str
) -> None:
    """The error says what the rule is, and its note names the operation."""
    operation = Map(lambda texts: texts if len(texts) == 1 else function(texts), batched=True)
    loader = inline_loader(list("abcde"), millstream.SequentialSampler(5), operation, millstream.Batch(5))
    for _ in range(2):
        with pytest.raises(error, match=message) as caught:
            next(iter(loader))
    assert caught.value.__notes__[0].startswith("millstream: in operation 0, Map(<lambda>, batched=True), ")
    assert "elements in one call, the first at record key" in caught.value.__notes__[0]
    with pytest.raises(error, match=r"one result per element"):
        millstream.MapDataset.source(["a", "b", "c", "d"]).map(operation).__getitems__(range(4))


def test_an_error_is_that_of_its_element() -> None:
    """Elements before the one that fails are delivered, and the note names its record key."""

    def inverse(numbers: list[int]) -> list[float]:
        return [1 / number for number in numbers]

    operations = [Map(inverse, batched=True)]
    loader = millstream.load([4, 2, 1, 0, 5], num_epochs=1, transformations=operations)
    with iter(loader) as numbers:
        assert [next(numbers) for _ in range(3)] == [0.25, 0.5, 1.0]
        with pytest.raises(ZeroDivisionError) as caught:
            next(numbers)
    assert caught.value.__notes__ == [
        "millstream: in operation 0, Map(inverse, batched=True), at record key 3 (position 3)."
    ]
    skipping = millstream.load([4, 2, 1, 0, 5], num_epochs=1, transformations=operations, on_error="skip")
    assert list(skipping) == [0.25, 0.5, 1.0, 0.2, 0.2]


def test_batched_is_part_of_what_a_stream_is() -> None:
    """A state of the same function called with each element is refused."""
    state = iter(millstream.load(["a"], transformations=[Map(sorted, batched=True)])).get_state()
    with pytest.raises(CheckpointError, match="_is_batched"):
        iter(millstream.load(["a"], transformations=[Map(sorted)])).set_state(state)


def test_they_are_pickled_and_shown() -> None:
    """A batched map pickles, and its repr names its function."""
    copy = cloudpickle.loads(cloudpickle.dumps(Map(doubled, batched=True)))
    assert (copy.is_batched, repr(copy), copy.map(4)) == (True, "Map(doubled, batched=True)", 8)
    assert not Map(doubled).is_batched


def yielding(numbers: list[int]) -> Any:
    yield from numbers


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: as_transformation(type("Both", (Lengths,), {"map": len})()),
            "map or map_batch, but Both overrides both",
        ),
        (lambda: Map(yielding, batched=True), "which yields"),
        (lambda: Map(doubled, batched=1), "batched must be True or False, got 1"),  # type: ignore[call-overload]
        (lambda: millstream.MapDataset.range(3).map(Lengths(), batched=True), "needs a function, got Lengths"),  # type: ignore[call-overload]
    ],
)
def test_what_is_no_batched_map_is_refused(make: Any, message: str) -> None:
    """An invalid batched map is an error at construction that names the alternative."""
    with pytest.raises(TypeError, match=message):
        make()
