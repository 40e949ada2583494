"""Padding: batches are filled up as if zeros had been stacked after the real rows, and features to a length."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import millstream
from millstream.transforms import BucketBatch, PadTo, TokenBudgetBatch
from millstream.transforms.batching.batch import PaddedBatch, pad
from millstream.transforms.batching.stack import stack
from support.draw.elements_of_all_kinds import BFLOAT16, STRUCTURED, Example, FrozenExample, Pair, filled
from support.streams import comparable

LEAVES: list[tuple[list[Any], Any]] = [
    ([1, 2, 3], 0),
    ([2**63, 1, 2**64 - 1], 0),
    ([True, True, False], False),
    ([1.5, -0.0, np.inf], 0.0),
    ([1j, 2j, 3j], 0j),
    (["a", "longer", ""], ""),
    (["a\0", "b", ""], ""),
    ([b"a\0", b"", b"ccc"], b""),
    ([None, None, None], None),
    ([np.float16(2), np.float16(3), np.float16(4)], np.float16(0)),
    ([np.datetime64(5, "s")] * 3, np.datetime64(0, "s")),
    *(
        ([filled(shape, np.dtype(dtype), seed) for seed in (1, 2, 3)], np.zeros(shape, dtype))
        for shape in ((), (0,), (2, 3))
        for dtype in (np.uint8, ">i4", np.float32, np.bool_, "<U5", "S3", "M8[s]", BFLOAT16, STRUCTURED)
    ),
    ([np.array([{1}, {2}], dtype=object)] * 3, np.array([None, None], dtype=object)),
    ([{"a": 1, "b": [2, (3,)]}] * 3, {"a": 0, "b": [0, (0,)]}),
    ([Pair(1, "x"), Pair(2, "y"), Pair(3, "z")], Pair(0, "")),
    ([Example(np.ones(2), b"1")] * 3, Example(np.zeros(2), b"")),
    ([FrozenExample({"x": 1.0})] * 3, FrozenExample({"x": 0.0})),
]


@pytest.mark.parametrize(("elements", "zero"), LEAVES, ids=lambda value: repr(value)[:40].replace("\0", "0"))
def test_padding_is_stacking_zeros(elements: list[Any], zero: Any) -> None:
    """The padded batch equals the batch of the elements followed by zeros, for every kind of leaf and structure."""
    padded = pad(stack(elements), 3, 8)

    assert comparable(padded.batch) == comparable(stack([*elements, *[zero] * 5]))
    assert comparable(padded.mask) == comparable(np.array([True] * 3 + [False] * 5))


def test_of_a_template_nothing_stays_but_its_structure() -> None:
    """A batch without a real row keeps only its structure, shapes and dtypes."""
    template = stack([{"text": "word", "image": np.full((2,), 7, np.uint8), "raw": b"x", "nothing": None}])
    zeros = {"text": np.zeros(3, "<U4"), "image": np.zeros((3, 2), np.uint8), "raw": np.array([b""] * 3, object)}

    assert comparable(pad(template, 0, 3)) == comparable(PaddedBatch(zeros | {"nothing": None}, np.zeros(3, np.bool_)))


def test_a_full_batch_is_not_copied() -> None:
    """A full batch is returned unchanged, with a mask."""
    batch = {"x": np.arange(3)}

    assert pad(batch, 3, 3).batch is batch
    assert comparable(pad(batch, 3, 3)) == comparable(PaddedBatch(batch, np.ones(3, np.bool_)))


def test_arrays_are_made_where_they_are_wanted() -> None:
    """The allocator gives the memory of the mask and of every array that holds no objects; its old content is gone."""
    given: list[NDArray[Any]] = []

    def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
        given.append(np.full((*shape, dtype.itemsize), 0xFF, np.uint8).view(dtype)[..., 0])
        return given[-1]

    padded = pad({"x": np.arange(2), "text": np.array([b"a", b"b"], dtype=object)}, 2, 4, allocate)

    assert [id(array) for array in given] == [id(padded.mask), id(padded.batch["x"])]
    assert padded.batch["x"].tolist() == [0, 1, 0, 0]
    assert padded.batch["text"].tolist() == [b"a", b"b", b"", b""]
    assert padded.mask.tolist() == [True, True, False, False]


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
    ("arguments", "element", "error", "message"),
    [
        (({"a": 3},), {"a": np.ones(4)}, ValueError, "Cannot pad 'a' to 3: an element has 4"),
        (({"a": 3},), {"b": np.ones(3)}, ValueError, "The feature 'a' is missing"),
        (({"a": 3},), {"a": 3}, ValueError, r"an array with a token axis, got an array of shape \(\)"),
        (
            ({"a": 3},),
            {"a": np.ma.masked_array([1], [True])},
            ValueError,
            "feature 'a': its mask would be lost",
        ),
        ((["a"],), {}, TypeError, r"boundaries\[0\] must be an integer, got 'a'"),
        (([2, 1],), {}, ValueError, "boundaries must be a non-empty, ascending list"),
        (([2, 4],), {"tokens": np.ones(5)}, ValueError, "Cannot pad 'tokens' to 4: an element has 5"),
        (([2], None, 3), {}, TypeError, "too many positional arguments"),
        (({"a": 0},), {}, ValueError, "at least 1"),
        (({"a": 1 << 32},), {}, ValueError, r"length_struct\['a'\] must be at most 2,147,483,648"),
        (({"a": 3}, {"a": 1.5}), {"a": np.arange(2)}, ValueError, r"padding_struct\['a'\] must be a value of int64"),
        (({"a": 3}, {"a": -1}), {"a": np.ones(2, np.uint8)}, ValueError, "the dtype of the feature, got -1"),
        (({"a": 3}, {"a": "x"}), {"a": np.ones(2)}, ValueError, "must be a value of float64, .* got 'x'"),
        (({"a": 3}, {"b": 1}), {}, ValueError, "padding_struct names 'b'"),
    ],
)
def test_what_cannot_be_padded_is_an_error(
    arguments: Any, element: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Bad arguments are errors at construction; of an element, it says which feature."""
    with pytest.raises(error, match=message):
        PadTo(*arguments).map(element)


@given(
    lengths=st.lists(st.integers(0, 9), min_size=2, max_size=2),
    boundaries=st.sets(st.integers(1, 20), max_size=4),
    padding=st.integers(-3, 3),
)
def test_boundaries_and_masks(lengths: list[int], boundaries: set[int], padding: int) -> None:
    """Features are padded to the smallest boundary that holds the longest of them; a mask is True at what was there."""
    element = {"a": np.full(lengths[0], 7), "b": np.full((lengths[1], 2), 7.0), "c": "kept"}
    bounds = sorted(boundaries | {9})
    made = PadTo(bounds, {"a": padding}, feature=["a", "b"], mask=True).map(element)
    length = min(bound for bound in bounds if bound >= max(lengths))
    for name, own, value in (("a", lengths[0], padding), ("b", lengths[1], 0)):
        assert (len(made[name]), made[f"{name}_mask"].dtype) == (length, np.bool_)
        assert made[f"{name}_mask"].tolist() == [True] * own + [False] * (length - own)
        assert (made[name][own:] == value).all()
        assert (made[name][:own] == 7).all()
    assert made.keys() == {*element, "a_mask", "b_mask"}


@pytest.mark.parametrize("of", [BucketBatch([4, 8], [2, 2], "t", mask=True), TokenBudgetBatch(16, "t", mask=True)])
def test_batches_of_similar_lengths_have_masks(of: Any) -> None:
    """`t_mask` has the shape of the padded feature, and counts the tokens of each element."""
    elements = [{"t": np.full(length, length)} for length in (3, 7, 1, 8, 2, 4)]
    for batch in millstream.load(elements, num_epochs=1, transformations=[of]):
        assert batch["t_mask"].shape == batch["t"].shape
        assert batch["t_mask"].sum(axis=1).tolist() == batch["t"].max(axis=1).tolist()


def test_an_element_with_a_mask_of_that_name_is_refused() -> None:
    """It is not overwritten, and other features may be named."""
    with pytest.raises(ValueError, match="Cannot add 'a_mask': the element has it already"):
        PadTo({"a": 3}, mask=True).map({"a": np.ones(2), "a_mask": np.ones(2)})
    with pytest.raises(ValueError, match="feature must be left out if length_struct names the features"):
        PadTo({"a": 3}, feature="a")
