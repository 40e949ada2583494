"""The older operation that packs and batches: its rows are those of FirstFitPack, in another form."""

from typing import Any

import numpy as np
import pytest

import millstream as grain
from millstream.transforms import PackAndBatchOperation


def documents(count: int) -> list[dict[str, Any]]:
    return [{"a": np.full(1 + number * 5 % 6, number), "left out": 3} for number in range(1, count + 1)]


def batches(worker_count: int, operations: list[Any]) -> list[Any]:
    """Returns what a loader makes of the documents."""
    sampler = grain.IndexSampler(31, num_epochs=1, seed=0)
    loader = grain.DataLoader(
        data_source=documents(31), sampler=sampler, operations=operations, worker_count=worker_count
    )
    return list(loader)


@pytest.mark.parametrize("worker_count", [0, 2])
@pytest.mark.parametrize("most", [None, 2])
def test_batches_are_the_rows_of_first_fit(worker_count: int, most: int | None) -> None:
    """Three dicts a batch: tokens, segment ids and positions, for any number of workers."""
    rows = batches(
        0,
        [
            grain.FirstFitPack({"a": 6}, num_packing_bins=4, shuffle_bins=False, max_sequences_per_bin=most),
        ],
    )
    made = batches(worker_count, [PackAndBatchOperation({"a": 6}, 4, most)])

    assert all(len(batch) == 3 and {*map(len, batch)} == {1} for batch in made)
    assert {len(batch[0]["a"]) for batch in made} == {4}
    for part, name in enumerate(("a", "a_segment_ids", "a_positions")):
        whole = np.concatenate([batch[part]["a"] for batch in made])
        assert whole[: len(rows)].tolist() == [row[name].tolist() for row in rows]
        assert not whole[len(rows) :].any()


def test_features_may_be_nested() -> None:
    """The three dicts have the form of length_struct, and the arrays of features that are not nested."""
    nested = [{"x": {"y": {"a": document["a"]}, "b": document["a"] + 1}, "z": 0} for document in documents(31)]
    flat = [{"a": document["a"], "b": document["a"] + 1} for document in documents(31)]
    operations = [PackAndBatchOperation({"x": {"y": {"a": 6}, "b": 7}}, 4), PackAndBatchOperation({"a": 6, "b": 7}, 4)]
    loaded = [
        list(grain.load(source, num_epochs=1, transformations=[operation]))
        for source, operation in zip((nested, flat), operations, strict=True)
    ]

    for nested_batch, flat_batch in zip(*loaded, strict=True):
        for part, expected in zip(nested_batch, flat_batch, strict=True):
            assert part.keys() == {"x"}
            assert part["x"].keys() == {"y", "b"}
            np.testing.assert_array_equal(part["x"]["y"]["a"], expected["a"])
            np.testing.assert_array_equal(part["x"]["b"], expected["b"])
    with pytest.raises(ValueError, match=r"The feature \['x'\]\['y'\] is missing"):
        list(grain.load([{"x": {"b": np.ones(2)}}], num_epochs=1, transformations=operations[:1]))


def test_it_resumes_and_refuses() -> None:
    """A state at any batch resumes with the same batches; a document longer than a row is an error."""
    loader = grain.load(
        documents(31), num_epochs=1, transformations=[PackAndBatchOperation(length_struct={"a": 6}, batch_size=4)]
    )
    with iter(loader) as iterator, iter(loader) as other:
        next(iterator)
        other.set_state(iterator.get_state())
        assert [batch[0]["a"].tolist() for batch in iterator] == [batch[0]["a"].tolist() for batch in other]
    with pytest.raises(ValueError, match="longer row"):
        list(
            grain.load(
                documents(5),
                num_epochs=1,
                transformations=[PackAndBatchOperation(length_struct={"a": 3}, batch_size=4)],
            )
        )
