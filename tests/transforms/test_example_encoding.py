"""`encode_example`: what it encodes is what other code encodes, and what `decode_examples` reads."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from millstream import FixedLengthFeature, VariableLengthFeature, decode_examples, encode_example
from support.files.example_messages import example_message

INTS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 300), min_size=1, max_size=30)
FLOATS = st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=6)
BYTES = st.lists(st.binary(max_size=300), min_size=1, max_size=4)


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.tuples(st.just("int64"), INTS) | st.tuples(st.just("float32"), FLOATS) | st.tuples(st.just("bytes"), BYTES),
        max_size=4,
    )
)
def test_lists_are_encoded_as_other_code_does(features: dict[str, tuple[str, list[Any]]]) -> None:
    """Byte for byte, with the values of a list packed."""
    values = {name: values for name, (_, values) in features.items()}
    assert encode_example(values) == example_message(features)
    one = {name: (kind, values[:1]) for name, (kind, values) in features.items()}
    assert encode_example({name: values[0] for name, (_, values) in one.items()}) == example_message(one)


@given(
    arrays.arrays(
        st.sampled_from([np.int8, np.uint16, np.int64, np.bool_, np.float32, np.float16]),
        arrays.array_shapes(max_dims=3, max_side=4),
    )
)
def test_arrays_come_out_with_their_values(array: Any) -> None:
    """Arrays of any shape and any dtype of an Example, contiguous or not, are encoded with their values."""
    dtype = np.float32 if array.dtype.kind == "f" else np.int64
    for given_array in (array, array.T, array[::-1]):
        decode = decode_examples({"x": FixedLengthFeature(given_array.shape, dtype)})
        np.testing.assert_array_equal(decode.map([encode_example({"x": given_array})])["x"][0], given_array)


def test_texts_empty_lists_and_absent_values() -> None:
    """Text is UTF-8; an empty list has no values; None is left out."""
    decode = decode_examples(
        {
            "text": FixedLengthFeature((), bytes),
            "texts": VariableLengthFeature(bytes),
            "none": FixedLengthFeature((), np.int64, default=-7),
            "empty": VariableLengthFeature(np.int64),
        }
    )
    encoded = encode_example({"text": "ä", "texts": np.array(["a", "bc"]), "none": None, "empty": []})
    columns = decode.map([encoded])
    assert columns["text"].tolist() == ["ä".encode()]
    assert columns["texts"].values.tolist() == [b"a", b"bc"]
    assert columns["none"].tolist() == [-7]
    assert columns["empty"].lengths.tolist() == [0]
    assert encode_example({}) == example_message({})


@pytest.mark.parametrize(
    ("value", "error", "words"),
    [
        ({"a": 1}, TypeError, "'x' must be bytes, str, a number, .* got dict"),
        ([[1], [2, 3]], TypeError, "got list"),
        ([b"a", 1], TypeError, "got list"),
        (1j, TypeError, "got complex"),
        (object(), TypeError, "got object"),
        (np.datetime64("2026-01-01"), TypeError, "got datetime64"),
        (2**63, ValueError, "below 2"),
        (2**64, ValueError, "more than 64 bits"),
        (np.array([2**63], np.uint64), ValueError, r"below 2\*\*63, .* got 9223372036854775808"),
    ],
)
def test_what_an_example_cannot_hold_is_an_error(value: Any, error: type[Exception], words: str) -> None:
    """A value that an Example cannot contain is an error that names the feature."""
    with pytest.raises(error, match=words):
        encode_example({"x": value})
