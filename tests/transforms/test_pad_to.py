"""Features padded to a length."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.transforms import PadTo


@given(length=st.integers(0, 9), padding=st.integers(0, 5), dtype=st.sampled_from(["i4", "f8", "u1"]))
def test_features_are_filled_up_at_the_end(length: int, padding: int, dtype: str) -> None:
    """Named features are padded to their lengths and keep dtype and other axes; the element itself does not change."""
    element: dict[str, Any] = {"a": np.arange(length, dtype=dtype), "b": np.ones((length, 2)), "c": "text"}
    made = PadTo({"a": 9, "b": 10}, {"a": padding}).map(element)

    assert made["a"].tolist() == [*range(length), *[padding] * (9 - length)]
    assert made["a"].dtype == dtype
    assert made["b"].tolist() == [[1, 1]] * length + [[0, 0]] * (10 - length)
    assert list(made) == ["a", "b", "c"]
    assert made["c"] == "text"
    assert len(element["a"]) == length


@pytest.mark.parametrize(
    ("element", "message"),
    [
        ({"a": np.ones(4)}, "Cannot pad 'a' to 3: an element has 4"),
        ({"b": np.ones(3)}, "The feature 'a' is missing"),
        ({"a": 3}, r"an array with a token axis, got an array of shape \(\)"),
    ],
)
def test_what_cannot_be_padded_is_an_error(element: dict[str, Any], message: str) -> None:
    """It says which feature."""
    with pytest.raises(ValueError, match=message):
        PadTo({"a": 3}).map(element)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((["a"],), TypeError, "map features to row lengths"),
        (({"a": 0},), ValueError, "at least 1"),
        (({"a": 3}, {"b": 1}), ValueError, "padding_struct names 'b'"),
    ],
)
def test_bad_arguments_are_errors(arguments: Any, error: type[Exception], message: str) -> None:
    """Bad arguments are errors at construction."""
    with pytest.raises(error, match=message):
        PadTo(*arguments)
