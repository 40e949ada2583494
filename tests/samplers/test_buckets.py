"""BucketSampler: each global batch has records of one class of lengths, on any number of hosts."""

import functools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream import BucketSampler, PadTo, ShardOptions
from support.laws import assert_shards_agree, inline_loader

BOUNDARIES = [4, 8, 20]


@settings(max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=60),
    size=st.integers(1, 7),
    seed=st.none() | st.integers(0, 9),
    drop_remainder=st.booleans(),
)
def test_global_batches_are_whole_classes(
    *, lengths: list[int], size: int, seed: int | None, drop_remainder: bool
) -> None:
    """Each class has its whole batches of different records; if none is dropped, a last one repeats records of it."""
    classes = np.searchsorted(BOUNDARIES, lengths)
    counts = np.bincount(classes, minlength=3)
    batches = counts // size if drop_remainder else -(-counts // size)
    options: dict[str, Any] = {"seed": seed, "shuffle": seed is not None, "drop_remainder": drop_remainder}
    if not batches.any():
        with pytest.raises(ValueError, match="must be at most the number of records of a class"):
            BucketSampler(lengths, BOUNDARIES, global_batch_size=size, **options)
        return
    sampler = BucketSampler(lengths, BOUNDARIES, global_batch_size=size, **options)
    assert sampler.num_records == batches.sum() * size
    for epoch in (0, 3):
        keys = sampler.record_keys(epoch * sampler.num_records, (epoch + 1) * sampler.num_records).reshape(-1, size)
        found = classes[keys]
        assert (found == found[:, :1]).all()
        assert np.bincount(found[:, 0], minlength=3).tolist() == batches.tolist()
        uses = np.bincount(keys.ravel(), minlength=len(lengths))
        for number in range(3):
            own, places = uses[classes == number], int(batches[number]) * size
            assert own.sum() == places
            assert not len(own) or (own.min(), own.max()) == (places // len(own), -(-places // len(own)))


def test_every_epoch_has_its_own_batches_and_order() -> None:
    """Records meet others, classes come in another order, and other records are left out."""
    lengths = np.random.default_rng(0).integers(1, 21, 1000)
    sampler = BucketSampler(lengths, BOUNDARIES, global_batch_size=16, seed=0, shuffle=True)
    first, second = (
        sampler.record_keys(epoch * sampler.num_records, (epoch + 1) * sampler.num_records) for epoch in (0, 1)
    )
    assert 0 < len(np.setdiff1d(first, second)) < 40
    classes = np.searchsorted(BOUNDARIES, lengths[first.reshape(-1, 16)[:, 0]])
    assert (np.diff(classes) != 0).mean() > 0.4
    pairs = [{tuple(sorted(pair)) for pair in keys.reshape(-1, 2).tolist()} for keys in (first, second)]
    assert len(pairs[0] & pairs[1]) < 20


@settings(max_examples=40)
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=60),
    sizes=st.tuples(st.integers(1, 7), st.integers(1, 7), st.integers(1, 7)),
    seed=st.none() | st.integers(0, 9),
    drop_remainder=st.booleans(),
)
def test_sizes_of_classes_fill_a_part_of_equally_many_positions(
    *, lengths: list[int], sizes: tuple[int, int, int], seed: int | None, drop_remainder: bool
) -> None:
    """A step has as many used positions as its class says, its batches are whole classes, and keys lead back."""
    classes = np.searchsorted(BOUNDARIES, lengths)
    counts = np.bincount(classes, minlength=3)
    batches = counts // sizes if drop_remainder else -(-counts // np.array(sizes))
    if not batches.any():
        return
    options: dict[str, Any] = {"seed": seed, "shuffle": seed is not None, "drop_remainder": drop_remainder}
    sampler = BucketSampler(lengths, BOUNDARIES, global_batch_size=sizes, num_epochs=2, **options)
    step = max(sizes)
    assert sampler.num_records == batches.sum() * step
    positions = np.arange(len(sampler))
    is_used, keys = sampler.are_used(positions), sampler.record_keys_at(positions)
    for start in range(0, len(sampler), step):
        own, used = keys[start : start + step], is_used[start : start + step]
        assert used[0]
        assert len(set(classes[own])) == 1
        assert used.sum() == sizes[classes[own[0]]]
        assert own.tolist() == own[used][np.cumsum(used) - 1].tolist()
    found = {(key, position) for key, row in enumerate(sampler.positions_of(range(len(lengths)))) for position in row}
    assert {pair for pair in found if pair[1] >= 0} == set(zip(keys[is_used], positions[is_used], strict=True))


class Tokens:
    """Elements of the given lengths."""

    def __init__(self, lengths: Any, bad: int | None = None) -> None:
        self.lengths, self.bad = np.asarray(lengths), bad

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, key: int) -> dict[str, Any]:
        if key == self.bad:
            raise ValueError("broken")
        return {"tokens": np.full(self.lengths[key], key + 1)}


LENGTHS = np.random.default_rng(1).integers(1, 21, 300)


def loader(index: int = 0, count: int = 1, size: Any = 8, **options: Any) -> millstream.DataLoader:
    sampler = BucketSampler(LENGTHS, BOUNDARIES, global_batch_size=size, seed=3, shuffle=True, num_epochs=2)
    operations = [PadTo(BOUNDARIES, feature="tokens", mask=True), millstream.Batch(int(np.max(size)) // count)]
    return inline_loader(
        Tokens(LENGTHS, options.pop("bad", None)),
        sampler,
        *operations,
        shard_options=ShardOptions(index, count, drop_remainder=True),
        **options,
    )


@pytest.mark.parametrize("size", [8, (24, 16, 8)])
@pytest.mark.parametrize("read_options", [None, millstream.ReadOptions(num_threads=3)])
def test_hosts_have_one_shape_at_each_step(size: Any, read_options: Any) -> None:
    """The batches of 1, 2 and 8 hosts, one after another, are the same, and of one padded length; masks mark tokens."""
    make = functools.partial(loader, size=size, **({} if read_options is None else {"read_options": read_options}))
    assert_shards_agree(make, (2, 8), step=5, num_steps=3)
    seen = set()
    for batch in make():
        length = batch["tokens"].shape[1]
        seen.add(length)
        assert len(batch["tokens"]) == (size if isinstance(size, int) else size[BOUNDARIES.index(length)])
        real = LENGTHS[batch["tokens"][:, 0] - 1]
        assert BOUNDARIES[int(np.searchsorted(BOUNDARIES, real.max()))] == length
        assert (batch["tokens_mask"].sum(axis=1) == real).all()
        assert ((batch["tokens"] != 0) == batch["tokens_mask"]).all()
    assert seen == set(BOUNDARIES)


@pytest.mark.parametrize("size", [8, (24, 16, 8)])
def test_a_record_that_fails_is_replaced_by_one_of_its_class(size: Any) -> None:
    """Any other would have another shape."""
    for batch in loader(bad=7, on_error="skip", size=size):
        assert 8 not in batch["tokens"][:, 0]
        assert len(set(np.searchsorted(BOUNDARIES, LENGTHS[batch["tokens"][:, 0] - 1]).tolist())) == 1


def test_batches_of_several_sizes_know_their_records() -> None:
    """Lineage, composition, seek and states count the records of each step; an error comes after all whole batches."""
    made = loader(size=(24, 16, 8))
    whole = [batch["tokens"][:, 0] - 1 for batch in made]
    assert len(made) == len(whole)
    for step, keys in enumerate(whole):
        assert made.record_keys(step).tolist() == keys.tolist()
    assert all(step in row for step in (0, 5) for row in made.steps_of(whole[step]).tolist())
    (count,) = made.composition(2, 9).components.values()
    assert count.documents == sum(map(len, whole[2:9]))
    with iter(made) as batches, iter(loader(size=(24, 16, 8), worker_count=1)) as others:
        batches.seek(6)
        others.set_state(batches.get_state())
        assert [next(others)["tokens"][:, 0].tolist() for _ in range(3)] == [(keys + 1).tolist() for keys in whole[6:9]]
        assert batches.records_between(2, 9) == count.documents
    bad = int(whole[4][2])
    with iter(loader(size=(24, 16, 8), bad=bad)) as batches:
        first = next(step for step, keys in enumerate(whole) if bad in keys)
        assert [next(batches)["tokens"][:, 0].tolist() for _ in range(first)] == [
            (k + 1).tolist() for k in whole[:first]
        ]
        with pytest.raises(ValueError, match="broken"):
            next(batches)


def test_epochs_lineage_and_states() -> None:
    """Each epoch is an order of its own, records lead to their steps, and other lengths are another stream."""
    made = loader()
    assert len(made) == 2 * (made.sampler.num_records // 8)  # type: ignore[attr-defined]
    keys = made.record_keys(4)
    assert all(4 in row for row in made.steps_of(keys).tolist())
    (_, first), (_, second) = ((number, [b["tokens"][:, 0] for b in some]) for number, some in made.epochs(2))
    assert np.concatenate(first).tolist() != np.concatenate(second).tolist()
    state = iter(made).get_state()
    moved = LENGTHS[::-1].copy()
    sampler = BucketSampler(moved, BOUNDARIES, global_batch_size=8, seed=3, shuffle=True, num_epochs=2)
    operations = [PadTo(BOUNDARIES, feature="tokens", mask=True), millstream.Batch(8)]
    with pytest.raises(millstream.CheckpointError, match="sampler"):
        iter(inline_loader(Tokens(LENGTHS), sampler, *operations)).set_state(state)


def test_sizes_that_do_not_fit_are_refused() -> None:
    """One size for each class, a multiple of the number of hosts, one Batch, and no mixture or balancing above."""
    with pytest.raises(ValueError, match="one number for each of the 3 boundaries, got 2"):
        BucketSampler([1], BOUNDARIES, global_batch_size=[4, 2])
    with pytest.raises(ValueError, match="must be a multiple of the number of shards, 2, got 7"):
        loader(0, 2, size=(8, 8, 7))
    sampler = BucketSampler(LENGTHS, BOUNDARIES, global_batch_size=[8, 8, 4])
    for operations in ([millstream.Batch(4), millstream.Batch(2)], [millstream.Batch(8, pad_remainder=True)]):
        with pytest.raises(ValueError, match="needs exactly one Batch"):
            inline_loader(Tokens(LENGTHS), sampler, *operations)
    with pytest.raises(ValueError, match="the largest global_batch_size of the BucketSampler must be 4"):
        inline_loader(Tokens(LENGTHS), sampler, millstream.Batch(4))
    with pytest.raises(ValueError, match="a mixture has one size"):
        millstream.MixtureSampler([sampler], [1])
    with pytest.raises(ValueError, match="global batches of one size"):
        millstream.samplers.BalancedSampler(sampler, costs=LENGTHS, global_batch_size=8, parts=2)


@pytest.mark.parametrize(
    ("operations", "shards", "text"),
    [
        ([millstream.Batch(4)], 1, r"global_batch_size of the BucketSampler must be 4, .* 4 \* 1, got 8"),
        ([millstream.Batch(8)], 2, r"global_batch_size of the BucketSampler must be 16, .* 8 \* 2, got 8"),
        ([millstream.Filter(bool), millstream.Batch(8)], 1, "needs a 1:1 pipeline"),
    ],
)
def test_a_loader_of_another_global_batch_is_refused(operations: Any, shards: int, text: str) -> None:
    """Its batches would have records of several classes."""
    sampler = BucketSampler([1] * 16, [4], global_batch_size=8)
    shard = ShardOptions(0, shards, drop_remainder=True)
    with pytest.raises(ValueError, match=text):
        millstream.DataLoader(data_source=range(16), sampler=sampler, operations=operations, shard_options=shard)
