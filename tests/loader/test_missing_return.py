"""Operations that lack a `return`: an error or the log names the operation."""

from typing import Any

import numpy as np
import pytest

import millstream
from millstream.transforms import Batch, Filter, FlatMap


def pass_on(element: Any) -> Any:
    return element


def dicts() -> list[Any]:
    return [{"image": np.full(4, 100.0 + key)} for key in range(16)]


def first_batch(source: Any, *operations: Any, batch_size: int | None = 4, **options: Any) -> Any:
    """Returns the first batch of a loader in the order of the source, and stops its threads."""
    loader = millstream.load(source, num_epochs=1, transformations=operations, batch_size=batch_size, **options)
    with iter(loader) as batches:
        return next(batches)


def forgetful(element: Any) -> None:
    _ = {**element, "label": 0}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("operations", "named"),
    [
        ([forgetful], "operations[0], Map(forgetful)"),
        ([pass_on, forgetful], "operations[1], Map(forgetful)"),
        ([forgetful, Filter(lambda _: True)], "operations[0], Map(forgetful)"),
        ([FlatMap(lambda _: [None, None], max_fan_out=2)], "operations[0], FlatMap(<lambda>, max_fan_out=2)"),
    ],
)
def test_a_batch_of_nothing_is_an_error(operations: list[Any], named: str, workers: int) -> None:
    """If all elements of a batch are None, the error names the operation that returned them, and two record keys."""
    with pytest.raises(millstream.StackError) as caught:
        first_batch(dicts(), *operations, worker_count=workers)

    assert f"Every element of this batch is None: did {named}, or one before it, forget `return`?" in str(caught.value)
    assert any("the record keys of these elements: 0, " in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    "stumbling",
    [
        lambda element: element["image"],
        Filter(lambda element: element["image"][0] > 0),
        FlatMap(lambda element: list(element["image"]), max_fan_out=9),
    ],
)
def test_an_operation_that_fails_at_none_tells_who_made_it(stumbling: Any) -> None:
    """The operation after the one that forgot to return raises its own error, with a note of the likely reason."""
    with pytest.raises(TypeError, match="NoneType") as caught:
        first_batch(dicts(), forgetful, stumbling)

    notes = "\n".join(caught.value.__notes__)
    assert "the element that it got is None: did operations[0], Map(forgetful), or one before it, forget" in notes


def test_errors_at_other_elements_have_no_such_note() -> None:
    """An error at an element that is not None is left as it was."""
    with pytest.raises(KeyError) as caught:
        first_batch(dicts(), pass_on, lambda element: element["label"])

    assert len(caught.value.__notes__) == 1


def test_a_batch_that_is_none_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """An operation after Batch that returns None for the first batch is named in the log: it may be intended."""
    loader = millstream.load(dicts(), num_epochs=1, transformations=[Batch(4), forgetful])

    assert list(loader) == [None] * 4
    assert [record.getMessage() for record in caplog.records] == [
        "millstream: operations[1], Map(forgetful), returned None for the first batch: did you forget `return`?"
    ]


def test_none_stays_a_value() -> None:
    """Records that are None, None beside values in a batch of one, and leaves that are None stay what they were."""
    assert first_batch([None] * 4) is None
    assert first_batch([1, 2], lambda _: None, batch_size=1) is None
    assert first_batch([1, 2], lambda number: {"a": None, "b": number}, batch_size=2)["a"] is None
