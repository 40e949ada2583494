"""The Batch operation's arguments."""

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest

from millstream.transforms import Batch


def test_values_are_plain_python() -> None:
    """The ints and bools of numpy become Python's, so that two equal operations look equal."""
    batch = Batch(np.int32(4), drop_remainder=np.True_)  # type: ignore[arg-type]
    assert (type(batch.batch_size), type(batch.drop_remainder)) == (int, bool)
    assert batch == Batch(4, drop_remainder=True)
    assert repr(batch) == "Batch(batch_size=4, drop_remainder=True)"


def test_repr_names_the_function() -> None:
    """A batch_fn is shown by its name, without an address."""
    assert repr(Batch(2, batch_fn=sum)) == "Batch(batch_size=2, batch_fn=sum)"
    assert repr(Batch(2, batch_fn=lambda elements: elements)) == "Batch(batch_size=2, batch_fn=<lambda>)"


def test_frozen_and_picklable() -> None:
    """A Batch does not change after construction, and pickles with its function."""
    batch = Batch(2, batch_fn=sum)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.batch_size = 3  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(batch)) == batch


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((0,), ValueError, "batch_size must be at least 1, got 0"),
        ((-1,), ValueError, "batch_size must be at least 1, got -1"),
        ((2**40,), ValueError, "batch_size must be at most 2,147,483,648, got"),
        ((True,), TypeError, "batch_size must be an integer, got True"),
        ((2.0,), TypeError, r"batch_size must be an integer, got 2\.0"),
        (("2",), TypeError, "batch_size must be an integer, got '2'"),
        ((None,), TypeError, "batch_size must be an integer, got None"),
        ((2, sum), TypeError, "drop_remainder must be True or False, got <built-in function sum>"),
        ((2, False, 3), TypeError, "batch_fn must be a function .* got 3"),
        ((2, False, None, 1), TypeError, "pad_remainder must be True or False, got 1"),
        (
            (2, True, None, True),
            ValueError,
            "Cannot combine pad_remainder=True, .* with drop_remainder=True",
        ),
        ((2, False, sum, True), ValueError, "Cannot combine pad_remainder=True with batch_fn, .* to a Map"),
    ],
)
def test_wrong_arguments_are_refused(arguments: tuple[Any, ...], error: type[Exception], words: str) -> None:
    """Each wrong argument has an error that names it, the rule and what was got."""
    with pytest.raises(error, match=words):
        Batch(*arguments)
