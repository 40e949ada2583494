"""Mixtures: exact shares, each component's own order, ends, changed weights, any position alone."""

import contextlib
import gc
import itertools
import json
import pickle
import sys
from collections.abc import Iterator, Sequence
from math import gcd
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from millstream import Batch, IndexSampler, MixtureSampler, RecordMetadata
from millstream.samplers.mixtures.mixing import checked_weights, reduced
from millstream.samplers.mixtures.proportions import TABLE_LIMIT, Table, Tree, proportions
from support.draw.orders import STOPS
from support.laws import inline_loader

Change = tuple[int, tuple[int, ...]]


def plain_mixture(changes: Sequence[Change], lengths: Sequence[int | None], stop: str) -> Iterator[tuple[int, int]]:
    """Yields component and index position by position: the oracle."""
    drawn, begun = [0] * len(lengths), 0
    weights: tuple[int, ...] = ()
    now: tuple[int, ...] = ()
    for position in itertools.count():
        through = [length is not None and count >= length for count, length in zip(drawn, lengths, strict=True)]
        weights = dict(changes).get(position, weights)
        having = tuple(0 if stop == "drop_exhausted" and done else w for w, done in zip(weights, through, strict=True))
        if not any(having) or (stop == "all_exhausted" and all(through[c] for c, w in enumerate(having) if w)):
            return
        if having != now or position in dict(changes):
            now, begun = having, position
        turns = [component for component, weight in enumerate(having) if weight]
        place, _ = proportions(reduced([having[c] for c in turns])).locate(np.array([position - begun]))
        component = turns[place[0]]
        if stop == "first_exhausted" and through[component]:
            return
        yield component, drawn[component]
        drawn[component] += 1


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[MixtureSampler, list[Change], list[int | None], str]:
    """Draws a mixture, perhaps reweighted, and what it is made of."""
    count = draw(st.integers(1, 5))
    weights = st.lists(st.integers(0, 9), min_size=count, max_size=count).filter(any).map(reduced)
    sizes = draw(st.lists(st.integers(1, 40), min_size=count, max_size=count))
    epochs = draw(st.lists(st.none() | st.integers(1, 2), min_size=count, max_size=count))
    stop = draw(st.sampled_from(STOPS))
    samplers = [
        IndexSampler(size, shuffle=True, seed=number, num_epochs=times)
        for number, (size, times) in enumerate(zip(sizes, epochs, strict=True))
    ]
    changes = [(0, draw(weights))]
    mixture = MixtureSampler(samplers, changes[0][1], stop=stop)
    for position in sorted(draw(st.sets(st.integers(1, 60), max_size=5))):
        if mixture.length is None or position <= mixture.length:
            changed = draw(weights)
            mixture = mixture.reweighted(position, changed)
            changes += [] if changed == changes[-1][1] else [(position, changed)]
    return mixture, changes, [sampler.length for sampler in samplers], stop


@settings(max_examples=40)
@given(drawn=mixtures())
def test_a_mixture_is_its_oracle(drawn: tuple[MixtureSampler, list[Change], list[int | None], str]) -> None:
    """Components, indices and the end are the oracle's, under each rule and with weights that change."""
    mixture, changes, lengths, stop = drawn
    expected = list(itertools.islice(plain_mixture(changes, lengths, stop), 200))
    assert mixture.length == (len(expected) if len(expected) < 200 else mixture.length)
    assert mixture.length is None or mixture.length >= len(expected)
    components, indices = mixture.locate(np.arange(len(expected)))
    assert list(zip(components.tolist(), indices.tolist(), strict=True)) == expected
    assert mixture.components(0, len(expected)).tolist() == [component for component, _ in expected]


@settings(max_examples=40)
@given(drawn=mixtures())
def test_record_keys_are_those_of_each_component_on_its_own(
    drawn: tuple[MixtureSampler, list[Change], list[int | None], str],
) -> None:
    """The keys of a component, less where its source begins, are its sampler's, and continue into new epochs."""
    mixture = drawn[0]
    count = 200 if mixture.length is None else min(mixture.length, 200)
    keys, components = mixture.record_keys(0, count), mixture.components(0, count)
    starts = np.cumsum([0, *mixture.source_lengths])
    for number, sampler in mixture.parts.items():
        own = keys[components == number] - starts[number]
        assert own.tolist() == sampler.endless().record_keys(0, len(own)).tolist()


def test_keys_of_large_sources_are_exact() -> None:
    """The last position of an endless mixture has the last key of sources of 2**63 records."""
    mixture = MixtureSampler([IndexSampler(2**62, shuffle=True, seed=1), IndexSampler(2**62)], [1, 1])
    with pytest.raises(TypeError, match="endless"):
        len(mixture)
    assert mixture.record_keys(2**63 - 4, 2**63)[-1] == mixture[2**63 - 1].record_key == 2**63 - 1


class Thirds:
    """A custom sampler: every third record, seven of them."""

    num_records, length = 21, 7

    def __getitem__(self, position: int) -> RecordMetadata:
        return RecordMetadata(position, 3 * position + 2, np.random.default_rng(position))


def test_a_sampler_of_ones_own_is_a_component() -> None:
    """A custom sampler can be a component; where it begins anew, it begins with its first position."""
    mixture = MixtureSampler(
        {"own": Thirds(), "plain": IndexSampler(20, num_epochs=1)}, {"plain": 1, "own": 1}, stop="all_exhausted"
    )
    keys, components = mixture.record_keys(0, len(mixture)), mixture.components(0, len(mixture))
    assert keys[components == 0].tolist() == [2 + 3 * (number % 7) for number in range(20)]
    rng = mixture[0].rng
    assert rng is not None
    assert rng.integers(1000) == np.random.default_rng(0).integers(1000)


@pytest.mark.parametrize("sizes", [(5_000, 9_000), (4_096, 4_096, 70_000), (100, 9_000)])
def test_a_long_range_at_once_gives_the_keys_of_many_short_ones(sizes: Sequence[int]) -> None:
    """However many positions are asked at once, in whatever order, each component goes on as it does alone."""
    samplers = [IndexSampler(size, shuffle=True, seed=seed) for seed, size in enumerate(sizes)]
    mixture = MixtureSampler(samplers, range(1, len(sizes) + 1))
    count = 40_000
    shorts = np.concatenate([mixture.record_keys(start, start + 1_000) for start in range(0, count, 1_000)])
    backwards = np.arange(count)[::-1]
    assert mixture.record_keys(0, count).tolist() == shorts.tolist()
    assert mixture.record_keys_at(backwards).tolist() == shorts[::-1].tolist()


def test_mixtures_of_mixtures() -> None:
    """A component may be a mixture: its records lie where its own components have them."""
    inner = MixtureSampler([IndexSampler(4), IndexSampler(6)], [1, 1])
    outer = MixtureSampler([IndexSampler(5), inner], [1, 1])
    keys, components = outer.record_keys(0, 40), outer.components(0, 40)
    assert (keys[components == 1] - 5).tolist() == inner.record_keys(0, 20).tolist()
    assert outer.num_source_records == 15


@pytest.mark.parametrize(
    ("weights", "whole"),
    [
        ([0.3, 0.7], (3, 7)),
        ([np.float32(0.1), 0.2], (1, 2)),
        ([1e-3, 2], (1, 2000)),
        ([4, 0, 6], (2, 0, 3)),
        ({"b": 1, "a": 2}, (2, 1)),
    ],
)
def test_weights_are_the_decimals_that_were_written(weights: Any, whole: tuple[int, ...]) -> None:
    """Weights are taken as the decimals that were written, in lowest terms."""
    names = sorted(weights) if isinstance(weights, dict) else range(len(weights))
    assert checked_weights(weights, names) == whole  # type: ignore[arg-type]  # numbers name as well


@given(weights=st.lists(st.floats(1e-3, 1), min_size=2, max_size=20))
def test_weights_of_many_digits_are_as_near_as_31_bits_allow(weights: list[float]) -> None:
    """The whole numbers' sum is below 2**31, and no share is off by more than one in 2**31."""
    whole = checked_weights(weights, range(len(weights)))  # type: ignore[arg-type]  # as above
    assert sum(whole) < 2**31
    for number, weight in zip(whole, weights, strict=True):
        assert number / sum(whole) == pytest.approx(weight / sum(weights), abs=2**-30)


def test_sources_may_be_longer_than_their_samplers() -> None:
    """`source_lengths` says where each source begins."""
    some = IndexSampler(2, keys=[0, 7])
    mixture = MixtureSampler([some, IndexSampler(3)], [1, 1], source_lengths=[10, 3])
    assert mixture.record_keys(0, 4).tolist() == [0, 10, 7, 11]
    assert mixture.largest_key == 12
    by_name = MixtureSampler({"0": some, "1": IndexSampler(3)}, [1, 1], source_lengths={"1": 3, "0": 10})
    assert by_name.source_lengths == mixture.source_lengths


def test_a_mixture_goes_on_after_its_end() -> None:
    """At the end itself, new weights continue with what is left; beyond it, they are an error."""
    samplers = [IndexSampler(4, num_epochs=1)] * 2
    mixture = MixtureSampler(samplers, [3, 1])
    assert len(mixture) == 5
    longer = mixture.reweighted(5, [0, 1])
    assert sorted(longer.record_keys(0, len(longer)).tolist()) == list(range(8))
    with pytest.raises(ValueError, match=r"position must be between 0 and 5, .* got 6.*num_epochs"):
        mixture.reweighted(6, [1, 1])
    with pytest.raises(ValueError, match="position must be between 0 and 5"):
        MixtureSampler(samplers, [3, 1], changes=[(900, [1, 2])])


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("num_epochs", [None, 1])
def test_a_change_of_weights_costs_the_same_however_many_came_before(stop: str, num_epochs: int | None) -> None:
    """The 600th change makes as many calls as the 100th, but for a binary search, whether components end or not."""
    mixture = MixtureSampler([IndexSampler(10**9, num_epochs=num_epochs) for _ in range(3)], [1, 1, 1], stop=stop)
    calls = []
    for number in range(1, 601):
        weights = [1 + number % 5, 50, 49]
        with counted_calls() as counted:
            mixture = mixture.reweighted(number * 256, weights)
        calls.append(counted[0])
    assert max(calls[-5:]) <= max(calls[95:100]) + 10
    mixture.record_keys(0, 1)  # Imports, once in a process, are no calls of it.
    with counted_calls() as counted:
        assert len(mixture.record_keys(300 * 256 - 8, 300 * 256 + 8)) == 16
    # Two of the 600 tables are built.
    assert counted[0] < 6000
    assert pickle.loads(pickle.dumps(mixture)).record_keys(10**5, 10**5 + 99).tolist() == (
        mixture.record_keys(10**5, 10**5 + 99).tolist()
    )


@contextlib.contextmanager
def counted_calls() -> Iterator[list[int]]:
    """Counts the calls of functions, those in C included, but none that the garbage collector makes."""
    counted, before = [0], sys.getprofile()

    def count(_: object, event: str, __: object) -> None:
        counted[0] += event in {"call", "c_call"}

    gc.disable()
    sys.setprofile(count)
    try:
        yield counted
    finally:
        sys.setprofile(before)
        gc.enable()


def test_the_same_weights_change_nothing() -> None:
    """Weights in the same ratios as before do not begin a new period."""
    mixture = MixtureSampler([IndexSampler(50), IndexSampler(50)], [2, 1])
    same = mixture.reweighted(7, [0.4, 0.2])
    assert same.fingerprint() == mixture.fingerprint()
    assert same.record_keys(0, 30).tolist() == mixture.record_keys(0, 30).tolist()
    assert mixture.reweighted(7, [1, 5]).reweighted(0, [2, 1]).fingerprint() == mixture.fingerprint()


def test_fingerprints_say_components_and_weights_and_stay_short() -> None:
    """Fingerprints list components and weights one by one; where there are many, checksums."""
    mixture = MixtureSampler({"web": IndexSampler(9), "a b": IndexSampler(5)}, {"web": 2, "a b": 1})
    assert mixture.reweighted(6, [1, 0]).fingerprint() == (
        "MixtureSampler batches=permuted component_web=IndexSampler(num_records=9,shuffle=False,seed=None) "
        "component_a_b_806c5cd3=IndexSampler(num_records=5,shuffle=False,seed=None) "
        "weights_from_0=web:2,a_b_806c5cd3:1 weights_from_6=web:1"
    )
    many = [IndexSampler(number + 1, num_epochs=1) for number in range(300)]
    first, *parts = MixtureSampler(many, [1] * 300, stop="drop_exhausted").fingerprint().split(" ")
    assert first == "MixtureSampler"
    assert len(parts) == 302
    assert max(map(len, parts)) < 100
    other = [*many[:-1], IndexSampler(300, shuffle=True, seed=5, num_epochs=1)]
    assert MixtureSampler(other, [1] * 300, stop="drop_exhausted").fingerprint().split(" ")[2] != parts[1]


def test_names_that_look_alike_are_words_of_their_own() -> None:
    """Names that look alike have different words: else one would stand for both."""
    mixture = MixtureSampler({"a b": IndexSampler(3), "a_b": IndexSampler(4)}, [1, 1])
    names = [word.split("=")[0] for word in mixture.fingerprint().split(" ")[1:]]
    assert len(set(names)) == len(names) == 4


@settings(max_examples=40)
@given(drawn=mixtures(), named=st.booleans())
def test_changes_rebuild_a_mixture_after_a_way_through_json(
    drawn: tuple[MixtureSampler, list[Change], list[int | None], str], named: bool
) -> None:
    """`changes`, through JSON, rebuild the mixture whatever weights the constructor is given."""
    mixture, changes, _, stop = drawn
    assert [position for position, _ in mixture.changes] == [position for position, _ in changes]
    kept = json.loads(json.dumps(mixture.changes))
    parts: Any = {f"c{name}": sampler for name, sampler in mixture.parts.items()} if named else mixture.parts.values()
    if named:
        kept = [(position, {f"c{number}": weight for number, weight in enumerate(some)}) for position, some in kept]
    again = MixtureSampler(parts if named else list(parts), [1] * len(mixture.names), stop=stop, changes=kept)
    assert again.length == mixture.length
    count = 100 if mixture.length is None else min(100, mixture.length)
    assert again.record_keys(0, count).tolist() == mixture.record_keys(0, count).tolist()
    assert json.loads(json.dumps(again.changes)) == [list(change) for change in kept]


def test_a_component_without_a_turn_does_not_count_before_its_first_one() -> None:
    """A component of weight 0, wherever it is, changes no word; with a turn later on, words from there on only."""
    before = MixtureSampler({"web": IndexSampler(9), "code": IndexSampler(5)}, {"web": 3, "code": 1})
    for names in (["web", "code", "math"], ["math", "web", "code"], ["web", "math", "code"]):
        parts = {"math": IndexSampler(7), **before.parts}
        added = MixtureSampler({name: parts[name] for name in names}, {"web": 3, "code": 1, "math": 0})
        assert added.fingerprint() == before.fingerprint()
        later = added.reweighted(48, dict.fromkeys(names, 1))
        more = set(later.fingerprint().split()) - set(before.fingerprint().split())
        assert {word.split("=")[0] for word in more} == {"component_math_from_48", "weights_from_48"}


WEIGHTS = st.lists(st.integers(1, 40), min_size=1, max_size=9).map(
    lambda numbers: tuple(number // gcd(*numbers) for number in numbers)
)


@pytest.mark.parametrize(("kind", "limit"), [(Table, 1), (Tree, 1.7)])
@given(weights=WEIGHTS)
def test_each_component_comes_in_its_share(kind: type[Table | Tree], limit: float, weights: tuple[int, ...]) -> None:
    """Its elements come in order, each once, in each period as many as its weight says, nearly so in each prefix."""
    period = sum(weights)
    components, indices = kind(weights).locate(np.arange(3 * period))
    seen = [0] * len(weights)
    for position, (component, index) in enumerate(zip(components.tolist(), indices.tolist(), strict=True), 1):
        assert index == seen[component]
        seen[component] += 1
        assert all(abs(n * period - position * w) < limit * period for n, w in zip(seen, weights, strict=True))
    assert seen == [3 * weight for weight in weights]


@pytest.mark.parametrize("kind", [Table, Tree])
@given(weights=WEIGHTS, start=st.integers(0, 2**63 - 9), component=st.integers(0, 8), far=st.integers(0, 2**70))
def test_any_position_alone_and_the_way_back(
    kind: type[Table | Tree], weights: tuple[int, ...], start: int, component: int, far: int
) -> None:
    """Locating a position and going back gives the position; counts exclude its own element, also beyond 64 bits."""
    order = kind(weights)
    components, indices = order.locate(start + np.arange(8))
    found = list(zip(components.tolist(), indices.tolist(), strict=True))
    assert [order.position_of(*each) for each in found] == list(range(start, start + 8))
    for leaf, index in [*found, (component % len(weights), far)]:
        position = order.position_of(leaf, index)
        assert order.counts(position)[leaf] == index
        assert order.counts(position + 1)[leaf] == index + 1
        assert sum(order.counts(position)) == position


LONGER = st.lists(st.integers(1, 9) | st.integers(1, 2000), min_size=1, max_size=8).map(
    lambda numbers: tuple(number // gcd(*numbers) for number in numbers)
)


@settings(max_examples=40)
@given(weights=WEIGHTS | LONGER, data=st.data())
def test_counts_and_positions_are_the_same_without_a_table(weights: tuple[int, ...], data: st.DataObject) -> None:
    """A table that is never built gives the counts and positions of one that is, in any period, for any weights."""
    built, bare = Table(weights), Table(weights)
    built.locate(np.arange(1))
    for length in data.draw(st.lists(st.integers(0, 2 * sum(weights)), min_size=1, max_size=4)):
        assert bare.counts(length) == built.counts(length)
    for component, weight in enumerate(weights):
        index = data.draw(st.integers(0, 2 * weight))
        assert bare.position_of(component, index) == built.position_of(component, index)
    assert "_rows" not in vars(bare)
    # Of many elements, the table is built.
    component = data.draw(st.integers(0, len(weights) - 1))
    indices = np.array(data.draw(st.lists(st.integers(0, 2 * weights[component]), max_size=6)), dtype=np.int64)
    assert bare.positions_of(component, indices).tolist() == built.positions_of(component, indices).tolist()


@pytest.mark.parametrize("num_changes", [10, 100, 1000])
def test_lineage_through_changes_of_weights_builds_no_table(num_changes: int) -> None:
    """Each change of weights costs the way back of a few records a bounded number of calls, however long its period."""
    components = [IndexSampler(1000, shuffle=True, seed=seed) for seed in range(3)]
    changes = [(500 * number, (3001 + number, 1999, 5000 - number)) for number in range(num_changes)]
    mixture, stop = MixtureSampler(components, [1, 1, 1], changes=changes), 500 * num_changes
    mixture.positions_of([5, 2005], 600)  # Imports, once in a process, are no calls of it.
    with counted_calls() as counted:
        found = mixture.positions_of([5, 2005], stop)
    # A table of 10,000 positions takes 100,000 calls.
    assert counted[0] < 300 * num_changes + 1000
    assert found.shape[1] > num_changes // 10
    for key, row in zip((5, 2005), found, strict=True):
        positions = row[row >= 0]
        some = positions[[0, len(positions) // 2, -1]]
        assert (mixture.record_keys_at(some) == key).all()
        assert (np.diff(positions) > 0).all()
        # An endless component gives each of its records once in 1,000 turns.
        drawn = mixture.drawn_before(stop)[key // 1000]
        assert drawn // 1000 <= len(positions) <= -(-drawn // 1000)


@given(weights=st.lists(st.integers(1, 2**27), min_size=1, max_size=15))
def test_long_periods_are_located_within_62_bits(weights: list[int]) -> None:
    """Weights of a sum near 2**31 at positions near 2**63: nothing overflows, as the way back shows."""
    order = Tree([*weights, 2**31 - 1 - sum(weights)])
    start = 2**63 - 5
    components, indices = order.locate(start + np.arange(4))
    found = [order.position_of(*pair) for pair in zip(components.tolist(), indices.tolist(), strict=True)]
    assert found == list(range(start, start + 4))


def test_the_period_decides_which_serves() -> None:
    """Periods up to the limit are served by a table, longer ones by a tree."""
    assert isinstance(proportions((TABLE_LIMIT - 1, 1)), Table)
    assert isinstance(proportions((TABLE_LIMIT, 1)), Tree)


class EpochsCounted(IndexSampler):
    """An order of 4 records over and over, which keeps the epochs that were asked for."""

    def record_keys_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        vars(self).setdefault("epochs", set()).update((positions // 4).tolist())
        return super().record_keys_at(positions)


def test_the_first_batch_asks_a_tiny_component_for_few_epochs() -> None:
    """Orders of units and rows take about a millisecond per epoch: a chunk has 16 epochs of a component, or a batch."""
    tiny = EpochsCounted(4)
    mixture = MixtureSampler([tiny, IndexSampler(1000, seed=1, shuffle=True)], [1, 1])
    next(iter(inline_loader(range(1004), mixture, Batch(8))))
    assert 1 < len(vars(tiny)["epochs"]) <= 17
