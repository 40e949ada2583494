"""Mixtures through the loader: each component is as if alone, weights may change at a checkpoint, errors name it."""

import itertools
import json
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream import (
    Batch,
    CheckpointError,
    ConcatenatedDataSource,
    DataLoader,
    FilterTransform,
    FlatMapTransform,
    IndexSampler,
    MapTransform,
    MapWithIndexTransform,
    MixtureSampler,
    OnlyFor,
    RandomMapTransform,
    RecordMetadata,
    ShardOptions,
)
from millstream.core.randomness import Purpose, derive_seed
from millstream.loader.threads.reader_threads import THREAD_NAME
from millstream.transforms import Transformation
from support.laws import INLINE

SIZES = {"a": 7, "b": 11, "c": 4}


def draw(element: Any, rng: np.random.Generator) -> Any:
    return (*element, int(rng.integers(10**9)))


def number(index: int, element: Any) -> Any:
    return (*element, index)


def split(element: Any) -> Iterator[Any]:
    return iter([(*element, child) for child in range(2 - 2 * (element[1] % 2))])


def seen(element: Any) -> Any:
    return (*element, "seen")


def is_small(element: Any) -> bool:
    return bool(element[1] < 5)


def sources() -> dict[str, list[Any]]:
    return {name: [(name, key) for key in range(size)] for name, size in SIZES.items()}


def samplers() -> dict[str, IndexSampler]:
    """One of each kind of randomness: own seeds, and none for the last one."""
    return {
        "a": IndexSampler(7, shuffle=True, seed=3),
        "b": IndexSampler(11, shuffle=True, seed=4, num_epochs=3),
        "c": IndexSampler(4, seed=5),
    }


def mixed(operations: list[Any], weights: Any = (2, 3, 1), **options: Any) -> DataLoader:
    return over(sources(), MixtureSampler(samplers(), list(weights)), *operations, **options)


def over(source: Any, sampler: Any, *operations: Any, **options: Any) -> DataLoader:
    return DataLoader(data_source=ConcatenatedDataSource(source), sampler=sampler, operations=operations, **options)


def take(loader: DataLoader, count: int) -> list[Any]:
    with iter(loader) as iterator:
        return [element for element, _ in zip(iterator, range(count), strict=False)]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_component_yields_what_it_yields_alone(workers: int) -> None:
    """A component has the records, indices and draws that it has alone, in that order, after Filter and FlatMap too."""
    operations: list[Any] = [
        RandomMapTransform(draw),
        MapWithIndexTransform(number),
        FilterTransform(is_small),
        FlatMapTransform(split, 2),
        RandomMapTransform(draw),
    ]
    with mixed(operations, worker_count=workers) as loader:
        together = take(loader, 150)
    for name in SIZES:
        own = [element for element in together if element[0] == name]
        alone = DataLoader(data_source=sources()[name], sampler=samplers()[name].endless(), operations=operations)
        assert len(own) > 10
        assert own == take(alone, len(own))


ASKING: dict[str, Callable[[Callable[[Any], bool]], Transformation]] = {
    "draw": lambda is_own: RandomMapTransform(lambda one, rng: draw(one, rng) if is_own(one) else one),
    "number": lambda is_own: MapWithIndexTransform(lambda index, one: number(index, one) if is_own(one) else one),
    "is_small": lambda is_own: FilterTransform(lambda one: is_small(one) if is_own(one) else True),
    "split": lambda is_own: FlatMapTransform(lambda one: split(one) if is_own(one) else [one], 2),
    "seen": lambda is_own: MapTransform(lambda one: seen(one) if is_own(one) else one),
}
"""Operations that ask each element whether it is one of theirs."""


@settings(max_examples=60)
@given(
    inside=st.lists(st.sampled_from(sorted(ASKING)), min_size=1, max_size=3),
    after=st.lists(st.sampled_from(sorted(ASKING)), max_size=2),
    component=st.sampled_from(sorted(SIZES)),
)
def test_only_for_is_operations_that_ask_each_element(inside: list[str], after: list[str], component: str) -> None:
    """The elements are those of an operation that asks each one, but other components keep their indices."""
    following = [ASKING[name](lambda _: True) for name in after]
    scoped = take(mixed([OnlyFor(component, [ASKING[name](lambda _: True) for name in inside]), *following]), 60)
    asking = take(mixed([*(ASKING[name](lambda one: one[0] == component) for name in inside), *following]), 60)
    if "split" in inside:
        # Their draws and numbers follow the index.
        scoped, asking = ([e if e[0] == component else e[:2] for e in some] for some in (scoped, asking))
    assert scoped == asking


def test_others_keep_their_index_where_one_component_is_split() -> None:
    """Operations on one component do not change the draws of the others."""
    split_first = mixed([OnlyFor("a", FlatMapTransform(split, 2)), RandomMapTransform(draw)])
    others = [element for element in take(split_first, 60) if element[0] != "a"]
    plain = [element for element in take(mixed([RandomMapTransform(draw)]), 100) if element[0] != "a"]
    assert others == plain[: len(others)]


def test_an_error_in_one_component_comes_at_its_turn_and_names_it() -> None:
    """An error follows all batches before it; its note names component, position and key."""

    def fails(element: Any) -> Any:
        if element[1] == 2:
            raise RuntimeError("two")
        return element

    loader = mixed([OnlyFor("c", fails), Batch(4, batch_fn=list)])
    iterator = iter(loader)
    keys = [loader.record_keys(step).tolist() for step in range(9)]
    step = next(step for step in range(9) if 20 in keys[step])
    position = 4 * step + keys[step].index(20)
    assert [len(next(iterator)) for _ in range(step)] == [4] * step
    with pytest.raises(RuntimeError, match="two") as caught:
        next(iterator)
    (note,) = caught.value.__notes__
    assert note == (
        f"millstream: in operation 0, OnlyFor('c', [Map(fails)]), in it Map(fails), at record key 20 "
        f"(position {position}, component 'c')."
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_errors_of_later_stages_name_the_component(workers: int) -> None:
    """Errors of later stages name the component even where elements were regrouped and came from another process."""

    def fails(_: Any) -> Any:
        raise RuntimeError("always")

    operations = [FilterTransform(is_small), Batch(3, batch_fn=list), MapTransform(fails)]
    with mixed(operations, worker_count=workers) as loader, pytest.raises(RuntimeError, match="always") as caught:
        take(loader, 1)
    assert any("(position 1, component 'a')" in note for note in caught.value.__notes__), caught.value.__notes__


def test_record_keys_say_what_a_batch_is_made_of() -> None:
    """`locate` turns the keys of a step into components and their own keys."""
    loader = mixed([Batch(6, batch_fn=list)])
    for step, batch in enumerate(take(loader, 5)):
        assert loader.locate(loader.record_keys(step)) == [(name, None, key) for name, key in batch]


@pytest.mark.parametrize("operations", [[Batch(2)], [Batch(1), Batch(2)], []])
def test_rows_are_permuted_within_global_batches(operations: list[Any]) -> None:
    """Each global batch has the mixture's rows of that step, and each of four hosts reads all components.

    Without the permutation, weights 1:1 leave a host whose share is even with the same rows of the period, and hosts
    that read one row with one component only. The rows after the last complete global batch keep their order.
    """
    lengths = {"a": 401, "b": 402}
    parts = {name: IndexSampler(length, num_epochs=1, seed=7) for name, length in lengths.items()}
    mixture = MixtureSampler(parts, [1, 1])
    source = ConcatenatedDataSource({name: range(length) for name, length in lengths.items()})
    loaders = [
        DataLoader(
            data_source=source, sampler=mixture, operations=operations, shard_options=ShardOptions(index, 4, True)
        )
        for index in range(4)
    ]
    size = 8 if operations else 4
    num_complete = len(mixture) // size
    keys = np.array([[loader.record_keys(step) for loader in loaders] for step in range(num_complete)])
    flat = keys.reshape(num_complete, size)
    unpermuted = mixture.record_keys(0, num_complete * size).reshape(-1, size)
    assert np.sort(flat).tolist() == np.sort(unpermuted).tolist()
    assert len(np.unique(np.argsort(flat), axis=0)) > 9
    for host in range(4):
        assert 0.4 < np.mean(keys[:, host] < 401) < 0.6
    if len(mixture) % size >= 4:
        tail = np.concatenate([loader.record_keys(num_complete) for loader in loaders])
        assert tail.tolist() == mixture.record_keys(num_complete * size, num_complete * size + len(tail)).tolist()
    other = MixtureSampler({**parts, "a": IndexSampler(401, num_epochs=1, seed=8)}, [1, 1])
    another = DataLoader(data_source=source, sampler=other, operations=[Batch(8)])
    one = DataLoader(data_source=source, sampler=mixture, operations=[Batch(8)])
    steps = range(40)
    assert [one.record_keys(step).tolist() for step in steps] != [another.record_keys(step).tolist() for step in steps]


def test_any_number_of_changes_after_a_state_is_the_same_stream() -> None:
    """A state is valid for any later changes of weights; another change before its position is an error."""

    def iterator_of(count: int, *more: Any) -> Any:
        changes = {8 * number: [1, number % 3 + 2, 1] for number in range(1, count + 1)} | dict(more)
        orders = [IndexSampler(90, shuffle=True, seed=seed) for seed in range(3)]
        sampler = MixtureSampler(orders, [2, 3, 1], changes=sorted(changes.items()))
        return iter(over([range(90)] * 3, sampler, Batch(4)))

    for step, needed in ((2, 0), (3, 1), (30, 14)):
        for count in (needed, needed + 1, needed + 25):
            saved = iterator_of(40)
            here, sought = (iterator_of(count, (8 * needed + 8, [1, 1, 1])) for _ in range(2))
            saved.seek(step), sought.seek(step)
            here.set_state(saved.get_state())
            assert next(here).tolist() == next(sought).tolist()
        if needed:
            saved, here = iterator_of(40), iterator_of(40, (8 * needed - 4, [5, 1, 1]))
            saved.seek(step)
            with pytest.raises(CheckpointError, match=r"sampler\.(changes|weights_from_)"):
                here.set_state(saved.get_state())
            here.set_state(saved.get_state(), allow={"sampler"})


@pytest.mark.parametrize("own", [False, True], ids=["with fingerprints", "without"])
def test_a_component_added_with_weight_0_is_the_same_stream(own: bool, caplog: pytest.LogCaptureFixture) -> None:
    """A state is accepted in silence by the mixture with one more source, up to the first turn of that source."""
    lists = {name: list(range(start, start + 10)) for name, start in (("a", 0), ("b", 100), ("c", 200))}

    def iterator_of(weights: dict[str, int], *changes: Any) -> Any:
        orders: Any = {name: Own() if own else IndexSampler(10, shuffle=True, seed=1) for name in weights}
        lengths = dict.fromkeys(weights, 10)
        sampler = MixtureSampler(orders, weights, source_lengths=lengths, changes=changes)
        return iter(over({name: lists[name] for name in weights}, sampler, Batch(2)))

    saved, later = iterator_of({"a": 2, "b": 1}), (12, {"a": 2, "b": 1, "c": 1})
    saved.seek(3)
    state = saved.get_state()
    for here in (iterator_of({"a": 2, "b": 1, "c": 0}), iterator_of({"a": 2, "b": 1, "c": 0}, later)):
        here.set_state(state, strict=True)
        assert next(here).tolist() == next(saved).tolist()
        saved.set_state(here.get_state(), strict=True)
        saved.set_state(state)
    here = iterator_of({"a": 2, "b": 1, "c": 0}, later)
    here.seek(9)
    with pytest.raises(CheckpointError, match=r"source\['c'\]: saved 10 records|sampler\.component_c_from_12: saved"):
        saved.set_state(here.get_state())
    assert not caplog.records


LISTS = {name: list(range(start, start + 10)) for name, start in (("a", 0), ("b", 100), ("c", 200))}


def ordered(name: str) -> IndexSampler:
    return IndexSampler(10, shuffle=True, seed=ord(name))


def named_loader(mixture: MixtureSampler) -> DataLoader:
    """Returns a loader of the components that have a sampler."""
    return over({name: LISTS[name] for name in mixture.parts}, mixture, Batch(4))


def first_batches(mixture: MixtureSampler, count: int = 20) -> list[list[int]]:
    with iter(named_loader(mixture)) as batches:
        return [batch.tolist() for batch in itertools.islice(batches, count)]


@pytest.mark.parametrize("order", ["abc", "cab", "acb"])
@pytest.mark.parametrize("batches_of", [None, 4])
def test_a_component_joins_at_any_position_wherever_it_is_in_the_list(order: str, batches_of: int | None) -> None:
    """Before its position, the batches are the old ones; from there on, it begins with its first record."""
    old = MixtureSampler({name: ordered(name) for name in "ab"}, {"a": 2, "b": 1}, batches_of=batches_of)
    parts = {name: ordered(name) for name in order}
    appended = old.reweighted(24, {"a": 1, "b": 1, "c": 2}, samplers={"c": parts["c"]})
    assert appended.names == ("a", "b", "c")
    grown = old.reweighted(24, {"a": 1, "b": 1, "c": 2}, samplers=parts)
    again = MixtureSampler(
        parts, dict.fromkeys("abc", 1), batches_of=batches_of, changes=json.loads(json.dumps(grown.changes))
    )
    assert grown.names == again.names == tuple(order)
    assert again.fingerprint() == grown.fingerprint()
    if order == "abc":
        assert appended.fingerprint() == grown.fingerprint()
    assert first_batches(grown)[:6] == first_batches(old)[:6]
    added = [number - 200 for batch in first_batches(again) for number in batch if number >= 200]
    assert sorted(added[:10]) == list(range(10))

    with iter(named_loader(old)) as saving, iter(named_loader(grown)) as resumed, iter(named_loader(grown)) as whole:
        saving.seek(5)
        resumed.set_state(saving.get_state(), strict=True)
        whole.seek(5)
        for _ in range(6):
            assert next(resumed).tolist() == next(whole).tolist()
        with pytest.raises(CheckpointError, match=r"component_c_from_24: saved IndexSampler.*, here nothing"):
            saving.set_state(resumed.get_state())


@pytest.mark.parametrize("order", ["abc", "cab"])
@pytest.mark.parametrize("batches_of", [None, 4])
def test_a_component_without_further_turns_may_be_missing(order: str, batches_of: int | None) -> None:
    """A program without its sampler and source yields the same batches from there on, and knows what it has read."""
    weights = dict.fromkeys(order, 1)
    old = MixtureSampler({name: ordered(name) for name in order}, weights, batches_of=batches_of)
    old = old.reweighted(24, {"a": 2, "b": 1, "c": 0})
    kept = {name: old.parts[name] for name in order if name != "c"}
    new = MixtureSampler(
        kept, dict.fromkeys("ab", 1), batches_of=batches_of, changes=old.changes, rows_seed=old.rows_seed
    )
    assert new.names == tuple(order)
    assert new.source_lengths[order.index("c")] == 0
    loader = named_loader(new)
    with iter(named_loader(old)) as saving, iter(loader) as resumed:
        for step in (6, 9):
            saving.seek(step)
            resumed.set_state(saving.get_state(), strict=True)
            assert [next(resumed).tolist() for _ in range(5)] == [next(saving).tolist() for _ in range(5)]
        # And once more, from a state of the program without the component.
        state = resumed.get_state()
        resumed.seek(6)
        resumed.set_state(state, strict=True)
        saving.seek(5)
        with pytest.raises(CheckpointError, match=r"'c'.*left out.*up to position 24"):
            resumed.set_state(saving.get_state())
        resumed.seek(0)
        with pytest.raises(ValueError, match="component 'c' are not known: it was left out"):
            list(itertools.islice(resumed, 6))
    before, after = (each.composition(stop=8).components for each in (named_loader(old), loader))
    assert {name: count.documents for name, count in after.items()} == (
        {name: count.documents for name, count in before.items()}
    )
    assert after["c"].epochs is None
    assert loader.steps_of([0], stop=12).tolist() == (
        named_loader(old).steps_of([10 if order[0] == "c" else 0], stop=12).tolist()
    )


def test_what_cannot_be_left_out_is_refused() -> None:
    """A component with a turn at the end, and the seed of one that led, are asked for at construction."""
    parts = {"b": ordered("b")}
    with pytest.raises(ValueError, match="samplers must have component 'a', whose weight is 1 from position 0 on"):
        MixtureSampler(parts, {"b": 1}, changes=[(0, {"a": 1, "b": 1})])
    changes = [(0, {"a": 1, "b": 1}), (8, {"b": 1})]
    with pytest.raises(ValueError, match=r"rows_seed must be given, because component 'a'"):
        MixtureSampler(parts, {"b": 1}, changes=changes)
    left = MixtureSampler(parts, {"b": 1}, changes=changes, rows_seed=97)
    assert left.reweighted(16, {"b": 1}).fingerprint() == left.fingerprint()
    with pytest.raises(ValueError, match="weights must be 0 for 'a', which was left out"):
        left.reweighted(16, {"a": 1, "b": 1})
    with pytest.raises(ValueError, match=r"another sampler of 'b'. A source that has grown"):
        left.reweighted(16, {"b": 1}, samplers={"b": IndexSampler(11)})
    with pytest.raises(TypeError, match="mapping by name"):
        MixtureSampler([ordered("a")], [1]).reweighted(4, [1, 1], samplers={"c": ordered("c")})


def test_a_source_that_has_grown_is_refused_with_the_remedy() -> None:
    """The difference of a longer source tells to keep its first records, and to add the others as a component."""

    def iterator_of(size: int) -> Any:
        return iter(over({"a": range(size)}, MixtureSampler({"a": IndexSampler(size)}, {"a": 1}), Batch(2)))

    with pytest.raises(
        CheckpointError, match=r"here .*num_records=12.*grown, keep to its first 10 records.*reweighted"
    ):
        iterator_of(12).set_state(iterator_of(10).get_state())
    plain = [iter(millstream.load(range(size), batch_size=2)) for size in (10, 12)]
    with pytest.raises(CheckpointError, match=r"num_records: saved 10, here 12\. If the source has grown"):
        plain[1].set_state(plain[0].get_state())


def test_states_of_shards_at_different_positions_of_a_mixture_combine() -> None:
    """Logical shards that filter stand at different positions, some of them before a change of weights, some after."""

    def iterator_of(index: int, count: int, sampler: Any) -> Any:
        kept = FilterTransform(lambda number: number % 2 == 0 or number > 990)
        options = {"shard_options": ShardOptions(index, count, logical_shards=2), "read_options": INLINE}
        return iter(over([range(1000), range(1000, 2000)], sampler, kept, Batch(4 // count), **options))

    plain = MixtureSampler([IndexSampler(1000), IndexSampler(1000)], [1, 1])
    for position in (8, 13, 18, 22, 27, 31, 36, 39):
        mixture = plain.reweighted(position, [3, 1])
        parts = [iterator_of(index, 2, mixture) for index in range(2)]
        for part in parts:
            part.seek(4)
        whole, expected = iterator_of(0, 1, mixture), iterator_of(0, 1, mixture)
        whole.set_states([part.get_state() for part in parts])
        expected.seek(4)
        assert next(whole).tolist() == next(expected).tolist()


def test_a_state_is_small_however_many_components_and_changes() -> None:
    """A state of 64 components and 200 changes of weights takes less than 4 KB."""
    corpora = {f"corpus number {number}": range(number + 1) for number in range(64)}
    mixture = MixtureSampler({name: IndexSampler(len(source)) for name, source in corpora.items()}, [1] * 64)
    for number in range(1, 201):
        mixture = mixture.reweighted(number * 8, [1 + number * component % 7 for component in range(64)])
    iterator = iter(over(corpora, mixture, Batch(8)))
    iterator.seek(100)
    assert len(iterator.get_state()) < 4096


def test_more_epochs_move_the_end_of_a_component_only() -> None:
    """A state from before a component dropped out is accepted where it has more epochs, one from after is not."""

    def iterator_of(epochs: int) -> Any:
        orders = [IndexSampler(4, num_epochs=epochs), IndexSampler(9, num_epochs=1)]
        return iter(over([range(4), range(9)], MixtureSampler(orders, [1, 1], stop="drop_exhausted")))

    with iterator_of(1) as saving:
        for _ in range(7):
            next(saving)
        early = saving.get_state()
        next(saving)
        late = saving.get_state()
    iterator_of(2).set_state(early)
    with pytest.raises(CheckpointError, match=r"sampler\.weights_from_7: saved 0:1, here nothing"):
        iterator_of(2).set_state(late)


class Own:
    """A custom sampler without a fingerprint and with generators of its own."""

    num_records = 5

    def __init__(self, shift: int = 0) -> None:
        self.shift = shift

    def __getitem__(self, position: int) -> RecordMetadata:
        return RecordMetadata(position, (position + self.shift) % 5, np.random.default_rng(position))


def test_a_component_of_ones_own_draws_from_its_own_generators() -> None:
    """A custom sampler draws from its own generators, beside one with a seed, and counts in a checkpoint."""

    def loader_of(own: Own) -> DataLoader:
        both = [[("own", key) for key in range(5)], sources()["a"]]
        return over(both, MixtureSampler([own, samplers()["a"]], [1, 1]), RandomMapTransform(draw))

    own = [element for element in take(loader_of(Own()), 30) if element[0] == "own"]
    source = [("own", key) for key in range(5)]
    alone = DataLoader(data_source=source, sampler=Own(), operations=[RandomMapTransform(draw)])
    assert own == take(alone, len(own))
    with pytest.raises(CheckpointError, match=r"shift: saved 0, here 1"):
        iter(loader_of(Own(1))).set_state(iter(loader_of(Own())).get_state())


def test_a_mixture_in_a_mixture_draws_as_it_would_alone() -> None:
    """The draws of a record in nested mixtures are those of its innermost sampler."""
    inner = MixtureSampler([samplers()["a"], samplers()["b"]], [1, 2])
    inner_source = ConcatenatedDataSource([sources()["a"], sources()["b"]])
    outer = MixtureSampler([samplers()["c"], inner], [1, 3])
    operations = [RandomMapTransform(draw), MapWithIndexTransform(number)]
    loader = over([sources()["c"], inner_source], outer, *operations)
    own = [element for element in take(loader, 50) if element[0] != "c"]
    alone = DataLoader(data_source=inner_source, sampler=inner, operations=operations)
    assert own == take(alone, len(own))


def test_no_component_of_one_seed_is_a_component_of_another() -> None:
    """Runs with the seeds 0 to 3 share no order and no draws, between any two of their components."""

    def components(seed: int) -> list[list[tuple[int, int]]]:
        loader = millstream.load(
            {name: list(range(40)) for name in "abc"},
            weights=dict.fromkeys("abc", 1),
            shuffle=True,
            seed=seed,
            num_epochs=1,
            transformations=[RandomMapTransform(lambda record, rng: (record, int(rng.integers(10**9))))],
        )
        elements = list(loader)
        return [elements[number::3] for number in range(3)]

    for one, other in itertools.combinations([order for seed in range(4) for order in components(seed)], 2):
        assert [record for record, _ in one] != [record for record, _ in other]
        assert not {draw for _, draw in one} & {draw for _, draw in other}


def test_load_mixes_named_sources() -> None:
    """`load` of named sources is a mixture of one IndexSampler each, with seeds that differ."""
    options: dict[str, Any] = {"shuffle": True, "num_epochs": 1}
    short = millstream.load(
        sources(),
        weights={"c": 1, "b": 3, "a": 2},
        seed=9,
        stop="drop_exhausted",
        transformations=[RandomMapTransform(draw)],
        batch_size=5,
        batch_fn=list,
        **options,
    )
    sizes = enumerate(SIZES.items())
    orders = {
        name: IndexSampler(size, seed=derive_seed(9, Purpose.COMPONENT, number), **options)
        for number, (name, size) in sizes
    }
    sampler = MixtureSampler(orders, [2, 3, 1], stop="drop_exhausted")
    long = over(sources(), sampler, RandomMapTransform(draw), Batch(5, batch_fn=list))
    assert list(short) == list(long)
    assert len(short) == 5
    assert sorted(element[:2] for batch in short for element in batch) == sorted(itertools.chain(*sources().values()))


def of_components(operations: Sequence[Any] = (), source: Any = None) -> DataLoader:
    return DataLoader(
        data_source=ConcatenatedDataSource(sources()) if source is None else source,
        sampler=MixtureSampler({**samplers(), "b": IndexSampler(11)}, [1, 1, 1]),
        operations=operations,
    )


REFUSED: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: millstream.load({"a": [1]}), TypeError, r"keys are names.* millstream.load\(dict\(sources\), weights="),
    (lambda: millstream.load([1, 2], weights=[1, 1]), TypeError, r"got list\. Write load\({'web': web, 'books': "),
    (lambda: millstream.load({"a": [1]}, weights={"b": 1}), ValueError, "no weight for 'a'"),
    (lambda: of_components(source=[1] * 21), ValueError, "22 records in total, but data_source has 21"),
    (lambda: of_components(source=joined(a=22)), ValueError, "mixes 3 components, but data_source consists of 1"),
    (lambda: of_components(source=joined(a=7, b=10, c=5)), ValueError, "component 'b' has 11 records, but it has 10"),
    (lambda: of_components(source=joined(a=7, c=11, b=4)), ValueError, "the same names in the same order"),
    (lambda: of_components([OnlyFor("d", seen)]), ValueError, "'d' only, but .* components are 'a', 'b', 'c'"),
    (lambda: of_components([Batch(2), OnlyFor("a", seen)]), ValueError, r"operations\[0\] builds batches"),
    (lambda: of_components([OnlyFor("b", RandomMapTransform(draw))]), ValueError, "component 'b' has no seed"),
    (lambda: millstream.load([1], transformations=[OnlyFor("a", seen)]), ValueError, "is not a MixtureSampler"),
    (lambda: OnlyFor("a", Batch(2)), TypeError, "element by element"),
    (lambda: OnlyFor("a", [OnlyFor("a", seen)]), TypeError, "element by element"),
    (lambda: OnlyFor("a", []), ValueError, "at least one operation"),
    (lambda: OnlyFor(None, seen), TypeError, "name or the number of a component"),  # type: ignore[arg-type]
]


def joined(**sizes: int) -> Any:
    return ConcatenatedDataSource({name: [1] * size for name, size in sizes.items()})


@pytest.mark.parametrize(("make", "error", "message"), REFUSED, ids=[message for _, _, message in REFUSED])
def test_what_does_not_fit_a_mixture_is_refused(
    make: Callable[[], object], error: type[Exception], message: str
) -> None:
    """Sources, weights, samplers and operations that do not fit each other are an error at construction."""
    with pytest.raises(error, match=message):
        make()


def cost_of(components: int) -> tuple[int, list[tuple[int, int]]]:
    """Returns what each process of a mixture has, once it runs: the most threads; descriptors and shared memory."""
    sizes = {str(number): range(10 * number, 10 * number + 10) for number in range(components)}
    with millstream.load(sizes, weights=[1] * components, batch_size=8, worker_count=2) as loader:
        iterator = iter(loader)
        for _ in range(100):
            next(iterator)
        here = psutil.Process()
        # Other threads here are those of the tests.
        threads = [sum(thread.name.startswith(THREAD_NAME) for thread in threading.enumerate())]
        workers = here.children(recursive=True)
        threads += [worker.num_threads() for worker in workers]
        return max(threads), sorted(
            (one.num_fds(), sum("memfd:" in mapped.path for mapped in one.memory_maps(grouped=False)))
            for one in [here, *workers]
        )


@pytest.mark.skipif(sys.platform != "linux", reason="the system is asked in Linux's way")
def test_components_cost_no_thread_process_or_buffer() -> None:
    """Three hundred are one plan: what runs for it is what runs for two, and its threads are those that read."""
    (threads, cost), (_, cost_of_two) = cost_of(300), cost_of(2)
    assert cost == cost_of_two
    # Sixteen read, as many as have work, and few do something else.
    assert threads < 40
