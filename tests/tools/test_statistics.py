"""Statistics of a stream are those of all its records together, however they are batched."""

import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 9), st.sampled_from([(), -1, (1, 2), (1, -1)]))
def test_statistics_are_those_of_all_values(seed: int, count: int, batch_size: int, keep: Any) -> None:
    """They do not depend on the batches, lose no digits by a large mean, and leave NaN out."""
    rng = np.random.default_rng(seed)
    x = rng.normal(1e8, 1, (count, 2, 3)).astype(np.float64)
    x[rng.random(x.shape) < 0.2] = np.nan
    loader = millstream.load(
        millstream.InMemoryDataSource({"x": x, "n": np.ones((count, 1, 1), np.int8)}),
        shuffle=True,
        seed=0,
        batch_size=batch_size,
    )

    found = millstream.statistics_of(loader.epochs(1), keep=keep)

    axes = tuple({0, 1, 2} - {axis % 3 for axis in ((keep,) if isinstance(keep, int) else keep)})
    assert (found["x"].count == (~np.isnan(x)).sum(axes)).all()
    some = found["x"].count > 0
    for name, expected in (("mean", np.nanmean), ("std", np.nanstd), ("min", np.nanmin), ("max", np.nanmax)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # NumPy warns where all are NaN.
            wanted = np.asarray(expected(x, axes))
        value = np.asarray(getattr(found["x"], name))
        assert value.dtype == np.float64
        np.testing.assert_allclose(value[some], wanted[some], rtol=1e-15, atol=1e-7)
        assert np.isnan(np.asarray(found["x"].mean)[~some]).all()
    assert (found["n"].mean == 1).all()


def test_any_batches_will_do() -> None:
    """A loader, a list, nested structures, and text, which has no statistics."""
    batches = [
        {"a": (np.arange(3), np.array(["x", "y", "z"], object))},
        {"a": (np.arange(2), np.array(["x", "y"], object))},
    ]
    numbers, text = millstream.statistics_of(batches)["a"]
    assert (float(numbers.mean), int(numbers.count), text) == (0.8, 5, None)
    assert int(millstream.statistics_of(millstream.load(range(7), num_epochs=1, batch_size=3)).max) == 6


@pytest.mark.parametrize(
    ("batches", "keep", "message"),
    [
        ([], (), "at least one batch"),
        ([np.zeros(3)], 0, "keep must not have 0"),
        ([np.zeros(3)], 1, r"got \(1,\) for batches of shape \(3,\)"),
        ([np.zeros(3)], -1, "axes after that of the records"),
        ([np.zeros((3, 2)), np.zeros((3, 3))], 1, "one size in all batches"),
        ([{"a": np.zeros(3)}, {"b": np.zeros(3)}], (), "one structure"),
    ],
)
def test_what_has_no_statistics_is_an_error(batches: Any, keep: Any, message: str) -> None:
    """Axes and structures must be the same in all batches."""
    with pytest.raises(ValueError, match=message):
        millstream.statistics_of(batches, keep=keep)
