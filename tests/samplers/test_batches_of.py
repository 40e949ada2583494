"""Mixtures of whole global batches: each batch has one component, and the weights count batches."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream import BucketSampler, IndexSampler, MixtureSampler, ShardOptions
from support.draw.orders import STOPS
from support.laws import assert_shards_agree, inline_loader


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(6, 40), min_size=1, max_size=4),
    size=st.integers(1, 6),
    stop=st.sampled_from(STOPS),
    data=st.data(),
)
def test_batches_are_those_of_a_mixture_of_batches(
    lengths: list[int], size: int, stop: str, data: st.DataObject
) -> None:
    """Batch k has rows k * size … of the component that a mixture of orders of batches has at position k."""
    weights = data.draw(st.lists(st.integers(0, 5), min_size=len(lengths), max_size=len(lengths)).filter(any))
    samplers = [IndexSampler(length, num_epochs=1, shuffle=True, seed=9) for length in lengths]
    mixture = MixtureSampler(samplers, weights, stop=stop, batches_of=size)
    counts = [-(-length // size) if stop == "all_exhausted" else length // size for length in lengths]
    plain = MixtureSampler([IndexSampler(count, num_epochs=1) for count in counts], weights, stop=stop)
    if data.draw(st.booleans()) and plain.length:
        step = data.draw(st.integers(0, plain.length - 1))
        plain, mixture = plain.reweighted(step, [1] * len(lengths)), mixture.reweighted(step * size, [1] * len(lengths))
    assert mixture.length == plain.length * size  # type: ignore[operator]
    components, indices = plain.locate(np.arange(plain.length or 0))
    own, rows = mixture.locate(np.arange(mixture.length or 0))
    assert (own.reshape(-1, size) == components[:, np.newaxis]).all()
    assert (rows.reshape(-1, size) == indices[:, np.newaxis] * size + np.arange(size)).all()
    for position in range(0, (mixture.length or 0) + 1, 3):
        counted = np.bincount(own[:position], minlength=len(lengths)).tolist()
        assert list(mixture.drawn_before(position)) == counted


def loader(index: int = 0, count: int = 1, *, batch: int = 8, batches_of: int | None = 8) -> millstream.DataLoader:
    parts = {name: IndexSampler(size, shuffle=True, seed=size) for name, size in (("a", 30), ("b", 50))}
    sampler = MixtureSampler(parts, {"a": 1, "b": 2}, batches_of=batches_of)
    source = millstream.ConcatenatedDataSource({"a": range(30), "b": range(100, 150)})
    shard = ShardOptions(index, count, drop_remainder=True)
    return inline_loader(source, sampler, millstream.Batch(batch // count), shard_options=shard)


def test_any_number_of_hosts_reads_the_same_batches_of_one_component() -> None:
    """1, 2 and 8 hosts have the same batches, and resume each other; a mixture of records is another stream."""
    assert_shards_agree(loader, (2, 8), step=4, num_steps=3)
    made = loader()
    kinds = [set((batch >= 100).tolist()) for batch, _ in zip(made, range(9), strict=False)]
    assert all(len(kind) == 1 for kind in kinds)
    assert sum(True in kind for kind in kinds) == 6
    assert made.composition(stop=9).components["b"].documents == 48
    assert all(5 in row for row in made.steps_of(made.record_keys(5), stop=9).tolist())
    with pytest.raises(millstream.CheckpointError, match="batches_of"):
        iter(loader(batches_of=None)).set_state(iter(made).get_state())


def test_load_mixes_batches() -> None:
    """Epochs have whole batches of each source."""
    made = millstream.load(
        {"a": range(20), "b": range(100, 150)},
        weights={"a": 1, "b": 1},
        batches_of=8,
        batch_size=8,
        stop="drop_exhausted",
        shuffle=True,
        seed=0,
    )
    for _, batches in made.epochs(2):
        assert sorted(len(set((batch >= 100).tolist())) for batch in batches) == [1] * 8


def test_a_component_of_buckets_has_whole_batches() -> None:
    """Its batches are those of the mixture, and any other number is refused."""
    lengths = np.arange(1, 65) % 9
    buckets = BucketSampler(lengths, [4, 8], global_batch_size=8, shuffle=True, seed=0)
    mixture = MixtureSampler([IndexSampler(40), buckets], [1, 1], batches_of=8)
    keys = mixture.record_keys(0, 160).reshape(-1, 8)
    classes = lengths[keys[keys[:, 0] >= 40] - 40] > 4
    assert (classes == classes[:, :1]).all()
    with pytest.raises(ValueError, match=r"batches_of must be 8, because the BucketSampler of component 1 has .*None"):
        MixtureSampler([IndexSampler(40), buckets], [1, 1])


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: loader(batch=16), r"batches_of of the MixtureSampler must be 16, .* 16 \* 1, got 8\. Change one"),
        (lambda: loader(batches_of=9), r"batches_of of the MixtureSampler must be 8, .* 8 \* 1, got 9"),
        (lambda: MixtureSampler([IndexSampler(5, num_epochs=1)], [1], batches_of=6), "got 6, .* component 0 has 5"),
        (
            lambda: MixtureSampler([IndexSampler(5)], [1], batches_of=4).reweighted(6, [2]),
            "position must be a multiple of batches_of=4, .* got 6",
        ),
        (
            lambda: MixtureSampler([IndexSampler(8, num_epochs=1)] * 2, [1, 1], batches_of=4).reweighted(20, [2, 1]),
            "between 0 and 16, because the mixture ends there, got 20",
        ),
        (lambda: millstream.load(range(5), batches_of=2), "batches_of must be left out without sources by name"),
    ],
)
def test_what_does_not_fit_is_refused(make: Any, text: str) -> None:
    """With both numbers."""
    with pytest.raises(ValueError, match=text):
        make()
