"""Promises of the methods of MapDataset beside elements: errors, seeds, columns, texts, classes of the user's."""

import copy
import operator
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any, SupportsIndex

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream import (
    Batch,
    ConcatenatedDataSource,
    DataLoader,
    FilterTransform,
    FlatMapTransform,
    IndexSampler,
    InMemoryDataSource,
    MapTransform,
    MapWithIndexTransform,
    MixtureSampler,
    OnlyFor,
    PaddedBatch,
    RandomMapTransform,
    SequentialSampler,
)
from millstream.core.columnar import ColumnarRecords
from millstream.dataset import IterDataset, MapDataset
from millstream.dataset.arguments import OF_MAP_DATASETS, OF_STREAMS
from millstream.errors import CheckpointError
from millstream.experimental import FlatMapMapDataset, WindowShuffleMapDataset, ZipMapDataset
from millstream.transforms import DatasetSelectionMap, Rebatch, WindowShuffle
from support.draw.chains import CountedSource, Every

TEN = MapDataset.range(10)
UNTYPED: Any = MapDataset
"""For calls that no type checker lets pass, the class and a dataset."""
UNTYPED_TEN: Any = TEN


def read(dataset: MapDataset[Any], count: int | None = None) -> list[Any]:
    return list(dataset.__getitems__(range(len(dataset) if count is None else count)))


def draw(element: Any, rng: np.random.Generator) -> tuple[Any, int]:
    return element, int(rng.integers(2**40))


def test_an_inserted_map_changes_neither_order_nor_draws() -> None:
    """Only operations that draw count for seeds: maps, batches and slices in between change nothing."""

    def chain(between: Callable[[MapDataset[Any]], MapDataset[Any]]) -> list[Any]:
        start = between(TEN.seed(7)).shuffle()
        return read(between(between(start).random_map(draw)).random_map(draw).repeat(2))

    plain = chain(lambda dataset: dataset)

    assert chain(lambda dataset: dataset.map(lambda element: element)) == plain
    assert chain(lambda dataset: dataset.repeat(1)[:].map_with_index(lambda _, element: element)) == plain


def test_the_nearest_seed_counts_and_operations_under_it_differ() -> None:
    """A `.seed` holds until the next one, and an own seed wins; each shuffle and each random map draws otherwise."""
    own = read(TEN.shuffle(seed=3).random_map(draw, seed=4))
    dataset, permutations = TEN.seed(5), set()
    for _ in range(4):
        before, dataset = read(dataset), dataset.shuffle()
        permutations.add(tuple(map(before.index, read(dataset))))
    drawn = read(TEN.random_map(draw, seed=2).random_map(draw, seed=2).seed(2).random_map(draw))

    assert read(TEN.seed(3).shuffle().seed(4).random_map(draw)) == own
    assert read(TEN.seed(1).shuffle(seed=3).random_map(draw, seed=4)) == own
    assert len(permutations) == 4
    assert all(len({first, second, third}) == 3 for (((_, first), second), third) in drawn)


def test_seeds_of_several_parents_make_one() -> None:
    """A shuffle after a mix has the seed of its parts if they agree, else one of all of them."""

    def order(*seeds: int) -> list[int]:
        return read(MapDataset.concatenate([TEN.seed(seed) for seed in seeds]).shuffle())

    assert order(1, 1) == read(MapDataset.concatenate([TEN, TEN]).shuffle(seed=1))
    assert len({tuple(order(*seeds)) for seeds in [(1, 1), (1, 2), (2, 1), (2, 2), (1, 2**64 - 1)]}) == 5


def test_the_seed_of_datasets_that_are_used_twice_is_found() -> None:
    """The search visits each dataset once, although 2**40 paths lead to the first of these."""
    dataset, stream = TEN.seed(5).random_map(draw), TEN.seed(5).to_iter_dataset().random_map(draw)
    for _ in range(40):
        dataset, stream = MapDataset.mix([dataset, dataset]), IterDataset.mix([stream, stream])

    dataset.shuffle().random_map(draw)
    stream.random_map(draw).apply(WindowShuffle(4))


@settings(max_examples=20)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=4), st.data())
def test_a_mix_is_in_the_order_of_a_mixture_sampler(lengths: list[int], data: st.DataObject) -> None:
    """Order, length and what comes after a part's end are those of MixtureSampler; weights may be given by name."""
    weights = data.draw(
        st.lists(st.sampled_from([1, 2, 0.3, 0.7, 1e-3, 0.123457]), min_size=len(lengths), max_size=len(lengths))
    )
    parts = [list(range(100 * part, 100 * part + length)) for part, length in enumerate(lengths)]

    def loader(num_epochs: int | None) -> DataLoader:
        samplers = [IndexSampler(length, num_epochs=num_epochs) for length in lengths]
        return DataLoader(data_source=ConcatenatedDataSource(parts), sampler=MixtureSampler(samplers, weights))

    named = {str(number): MapDataset.source(part) for number, part in enumerate(parts)}
    dataset = MapDataset.mix(named, dict(reversed([*zip(named, weights, strict=True)])))
    endless = iter(loader(None))

    assert read(dataset) == list(loader(1))
    assert read(dataset, 50) == [next(endless) for _ in range(50)]


class Alternate:
    """Takes turns."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, position: int) -> tuple[int, int]:
        return position % 2, position // 2


def test_a_selection_map_of_ones_own_is_asked_at_each_position() -> None:
    """Any object with `len` and `[position]` selects, after its length too."""
    dataset = MapDataset.select_from_datasets([TEN, MapDataset.range(50, 60)], Alternate())

    assert (len(dataset), read(dataset, 6)) == (4, [0, 50, 1, 51, 2, 52])
    assert [dataset[position] for position in range(6)] == read(dataset, 6)


class Strided(DatasetSelectionMap):
    def __init__(self, stride: int) -> None:
        self.stride, self.function = stride, abs

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[int, int]:
        return 0, self.function(index * self.stride) % 10


class Scaled(MapDataset[int]):
    def __init__(self, parent: MapDataset[int], scale: int) -> None:
        super().__init__(parent)
        self.scale, self.function = scale, abs

    def __len__(self) -> int:
        return len(self._parent)

    def __getitem__(self, position: Any) -> Any:
        return self.function(self._parent[position]) * self.scale


def test_parameters_next_to_a_function_are_identity() -> None:
    """Of a selection map and of a dataset of one's own: another parameter is another stream."""
    for made in (
        [MapDataset.select_from_datasets([TEN], Strided(n)) for n in (1, 3)],
        [Scaled(TEN, n) for n in (1, 3)],
    ):
        assert made[0].fingerprint() != made[1].fingerprint()


def test_slices_of_an_endless_dataset_share_it_out() -> None:
    """`ds[i::n]` of an endless dataset are exact strides of one order, and endless; so is what is made of them."""
    whole = TEN.shuffle(seed=0).repeat()
    parts = [whole[start::3] for start in range(3)]

    assert {len(part) for part in [whole, *parts, whole.batch(3), parts[0].map(str)]} == {sys.maxsize}
    assert [parts[position % 3][position // 3] for position in range(60)] == read(whole, 60)
    assert [read(part, 20) for part in parts] == [read(whole, 60)[start::3] for start in range(3)]
    assert len(whole[:25]) == 25
    assert [read(TEN[start :: 2**70], 1) for start in (0, 3)] == [[TEN[0]], [TEN[3]]]


@pytest.mark.parametrize("shuffles", [False, True])
@pytest.mark.parametrize(
    "part",
    [
        lambda endless: endless[1:4],
        lambda endless: endless.slice([1, 2, 3]),
        lambda endless: MapDataset.select_from_datasets([endless], [(0, 1), (0, 2), (0, 3)]),
        lambda endless: endless[1:4].batch(1, batch_fn=list).map(sum),
    ],
)
def test_a_part_of_an_endless_dataset_has_one_epoch(
    part: Callable[[MapDataset[int]], MapDataset[int]], shuffles: bool
) -> None:
    """Its later epochs are positions from 2**63 on: an error with the remedy, one by one and in blocks."""
    once = MapDataset.range(10).shuffle(seed=0) if shuffles else MapDataset.range(10)
    dataset = part(once.repeat())

    assert [dataset[position] for position in range(3)] == list(dataset) == list(once[1:4])
    for read in (lambda: dataset[4], lambda: dataset.__getitems__([0, 4]), lambda: list(dataset.repeat(2))):
        with pytest.raises(IndexError, match=r"part of an endless dataset .* before \.repeat\(\), or"):
            read()
    assert list(dataset.repeat(2, reseed_each_epoch=False)) == 2 * list(dataset)


def test_a_slice_may_be_positions() -> None:
    """Positions in any order, also twice or none, are taken from each epoch of the dataset, and resume."""
    shuffled = MapDataset.range(10).shuffle(seed=0)
    epochs = [list(shuffled.repeat(2))[start : start + 10] for start in (0, 10)]
    chosen = [5, 0, 5, 9]
    for positions in (chosen, np.array(chosen), MapDataset.source(chosen)):
        taken = shuffled.slice(positions).repeat(2)
        assert list(taken) == [epoch[position] for epoch in epochs for position in chosen]
    assert list(shuffled.slice([])) == []
    # However many they are, each counts in the fingerprint.
    many = [list(range(12_000)) for _ in range(4)]
    for row in (0, 5, 11_999):
        many[row % 4][row] = 6
    assert len({MapDataset.range(12_000).slice(positions).fingerprint() for positions in many}) == 4
    assert MapDataset.range(12_000).slice(many[2]).content_marks() == {}
    with iter(taken) as saved, iter(taken) as resumed:
        next(saved)
        resumed.set_state(saved.get_state())
        assert list(resumed) == list(taken)[1:]


def test_shuffling_an_endless_dataset_draws_with_replacement() -> None:
    """A shuffle after an endless repeat permutes all positions up to 2**63."""
    dataset = TEN.repeat().shuffle(seed=0)

    assert set(read(dataset, 200)) == set(range(10))
    assert read(dataset, 20) == [dataset[position] for position in range(20)]


def test_records_in_memory_are_not_changed_by_maps() -> None:
    """A map that writes into its element finds the record as it was in the next epoch, read alone or in blocks."""
    records = [{"x": number} for number in range(20)]

    def spoil(record: dict[str, int]) -> dict[str, int]:
        record["x"] += 100
        return record

    dataset = MapDataset.source(records).map(spoil).repeat(2)
    expected = [{"x": number + 100} for number in range(20)] * 2

    assert read(dataset) == expected
    assert [dataset[position] for position in range(40)] == expected
    assert list(DataLoader(data_source=dataset, sampler=SequentialSampler(40))) == expected
    assert records == [{"x": number} for number in range(20)]


def test_columns_pass_through_index_nodes() -> None:
    """Columns of a source reach a batch as columns: no record is made of them on the way."""
    columns = {"x": np.arange(100), "y": np.arange(200.0).reshape(100, 2)}
    source = InMemoryDataSource(columns)
    dataset = MapDataset.source(source).shuffle(seed=0)[5:95].repeat(2).seed(1)
    joined = MapDataset.concatenate([WindowShuffleMapDataset(dataset, window_size=8, seed=0)])
    order = [record["x"] for record in read(joined)]

    assert isinstance(joined.__getitems__(np.arange(64)), ColumnarRecords)
    for batch, start in zip(joined.batch(50).__getitems__([0, 1]), (0, 50), strict=True):
        rows = order[start : start + 50]
        assert np.array_equal(batch["x"], columns["x"][rows])
        assert np.array_equal(batch["y"], columns["y"][rows])
    assert read(joined.map(lambda record: int(record["x"]))) == order

    mixed = MapDataset.mix([dataset, MapDataset.source(InMemoryDataSource(columns))[::-1], dataset[:7]], [3, 2, 1])
    assert isinstance(mixed.__getitems__(np.arange(64)), ColumnarRecords)
    assert mixed.batch(30)[0]["x"].tolist() == [mixed[position]["x"] for position in range(30)]


def test_a_dataset_is_a_source_of_its_first_epoch() -> None:
    """`source(dataset)` has the dataset's first epoch in each of its own."""
    inner = TEN.shuffle(seed=0)

    assert read(MapDataset.source(inner).repeat(2)) == 2 * read(inner)


class Squares(MapDataset[int]):
    """A dataset of a user's without parents, which is generic and does not call `super().__init__`."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        return (index % self.count) ** 2


class Named:
    name = "named"


class Both(Named, MapDataset[Any]):
    """Two datasets in one, as a user would write it."""

    def __init__(self, first: MapDataset[Any], second: MapDataset[Any]) -> None:
        super().__init__()
        MapDataset.__init__(self, [first, second])

    def __len__(self) -> int:
        return min(map(len, self.parents))

    def __getitem__(self, index: Any) -> Any:
        return tuple(parent[index] for parent in self._parents)


def test_users_subclass_map_dataset() -> None:
    """A dataset of one's own stands anywhere in a chain, with any number of parents, and other base classes."""
    both = Both(Squares(5).map(str), TEN.shuffle(seed=0))

    order = read(MapDataset.range(5).shuffle(seed=1).repeat(2))
    positions = [*order[:5], *(5 + number for number in order[5:])]
    assert read(both.shuffle(seed=1).repeat(2)) == [
        (str((position % 5) ** 2), TEN.shuffle(seed=0)[position]) for position in positions
    ]
    assert len(both.parents) == 2
    assert both.name == "named"
    assert Every(both, 2)._parent is both
    with pytest.raises(AttributeError, match="Both has 2 parents, not one"):
        _ = both._parent
    with pytest.raises(AttributeError, match="Squares has no parents"):
        _ = Squares(3)._parent


class Half(MapDataset[int]):
    def __len__(self) -> int:
        return 3


def test_the_elements_of_a_users_dataset_are_asked_for_one_by_one() -> None:
    """A dataset of a user's needs no batched read, and one that lacks a method is an error that names it."""
    assert read(Squares(4).batch(2, batch_fn=list)) == [[0, 1], [4, 9]]
    with pytest.raises(NotImplementedError, match="Half must override __getitem__"):
        Half().map(str)
    with pytest.raises(NotImplementedError, match="MapDataset must override __len__"):
        len(MapDataset())


def test_apply_takes_every_kind_of_operation() -> None:
    """`apply` takes one operation or several, functions too, and does what the methods do."""
    operations: list[Any] = [
        MapTransform(lambda x: x + 1),
        lambda x: x * 2,
        MapWithIndexTransform(lambda index, x: (index, x)),
        RandomMapTransform(draw),
    ]
    by_methods = TEN.seed(1).map(lambda x: (x + 1) * 2).map_with_index(lambda index, x: (index, x)).random_map(draw)

    assert read(TEN.seed(1).pipe(MapDataset.apply, transformations=operations)) == read(by_methods)
    assert read(TEN.apply(FilterTransform(lambda x: x > 7))) == [None] * 8 + [8, 9]
    assert read(TEN[:2].apply(FlatMapTransform(lambda x: [x] * x, 2))) == [None, None, 1, None]
    assert read(TEN[:2].flat_map(lambda x: [x] * x, 2)) == [None, None, 1, None]
    assert read(TEN[:2].map(range).flat_map(list, 2)) == [None, None, 0, None]
    assert read(TEN.apply(Batch(4, drop_remainder=True)).map(lambda batch: batch.tolist())) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    padded = TEN.apply(Batch(4, pad_remainder=True))[2]
    assert isinstance(padded, PaddedBatch)
    assert (padded.batch.tolist(), padded.mask.tolist()) == ([8, 9, 0, 0], [True, True, False, False])


def test_the_chain_is_shown_line_by_line() -> None:
    """`repr` has a node a line, and what is joined side by side."""
    chain = UNTYPED_TEN.shuffle(seed=0).map(draw).filter(FilterTransform(bool))[2:8:2].repeat(reseed_each_epoch=False)
    mixed = MapDataset.mix([chain, Every(MapDataset.source([1, 2, 3]), 2)], [1, 2])

    assert repr(ZipMapDataset([mixed.random_map(draw, seed=5), TEN[:3]])[:1].shuffle(seed=1)).splitlines() == [
        "MapDataset of 1 element",
        "  zip",
        "  - mix(weights=[1, 2])",
        "    - source(range(0, 10))",
        "      .shuffle(seed=0)",
        "      .map(draw)",
        "      .filter(bool)",
        "      [2:8:2]",
        "      .repeat(reseed_each_epoch=False)",
        "    - source(list of 3 records)",
        "      Every",
        "    .random_map(draw, seed=5)",
        "  - source(range(0, 10))",
        "    [0:3]",
        "  [0:1]",
        "  .shuffle(seed=1)",
    ]
    assert repr(TEN).startswith("MapDataset of 10 elements\n")


class SomeOf:
    """A selection map of a number of positions."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, position: int) -> tuple[int, int]:
        return 0, position % self.count


def variants() -> Iterator[MapDataset[Any]]:
    """Yields datasets, no two of which have the same elements."""
    yield TEN
    yield MapDataset.range(11)
    for seed in (0, 1):
        yield TEN.shuffle(seed=seed)
        yield TEN.random_map(draw, seed=seed)
        yield WindowShuffleMapDataset(TEN, window_size=3, seed=seed)
    yield TEN.random_map(draw, seed=0).random_map(draw, seed=0)
    yield TEN.repeat(2).shuffle(seed=0)
    yield TEN.shuffle(seed=0)[:4].repeat(2)
    yield TEN.shuffle(seed=0)[:4].repeat(2, reseed_each_epoch=False)
    yield TEN[1:]
    yield TEN.map(str)
    yield TEN.map(float)
    yield TEN.filter(bool)
    yield TEN.batch(2)
    yield TEN.batch(3)
    yield TEN.batch(3, drop_remainder=True)
    yield TEN.repeat(2).batch(3)
    yield MapDataset.mix([TEN, TEN.map(str)])
    yield MapDataset.mix([TEN, TEN.map(str)], [1, 2])
    yield MapDataset.concatenate([TEN, TEN.map(str)])
    yield ZipMapDataset([TEN, TEN.map(str)])
    yield MapDataset.select_from_datasets([TEN, TEN.map(str)], [(0, 1)])
    yield MapDataset.select_from_datasets([TEN, TEN.map(str)], [(1, 1)])
    for num_epochs in (1, 2, 3):
        repeated: list[MapDataset[Any]] = [TEN.shuffle(seed=0).repeat(num_epochs), TEN.map(str)]
        yield MapDataset.concatenate(repeated)
        yield MapDataset.concatenate([MapDataset.concatenate(repeated).map(str), TEN])
        yield MapDataset.mix(repeated, stop="all_exhausted")
        yield MapDataset.mix(repeated, stop="drop_exhausted")
        yield MapDataset.select_from_datasets(repeated, [(0, 2), (1, 3)])
        yield MapDataset.select_from_datasets([TEN], SomeOf(num_epochs))
    yield Every(TEN, 2)
    yield Every(TEN, 3)
    yield Every(TEN.map(str), 3)


def test_fingerprints_tell_datasets_apart() -> None:
    """Each difference in a chain is one in the fingerprint; the same chain, and more epochs of it, have the same."""
    fingerprints = [dataset.fingerprint() for dataset in variants()]

    assert len(set(fingerprints)) == len(fingerprints)
    assert fingerprints == [dataset.fingerprint() for dataset in variants()]
    assert TEN.shuffle(seed=0).repeat(3).fingerprint() == TEN.shuffle(seed=0).fingerprint()
    texts: MapDataset[Any] = TEN.map(str)
    mixed, longer = (MapDataset.mix([TEN.repeat(n), texts]) for n in (1, 2))
    assert mixed.fingerprint() == longer.fingerprint()
    once, same = (MapDataset.concatenate([one, texts]) for one in (TEN.repeat(1), TEN))
    assert once.fingerprint() == same.fingerprint()
    assert "source: CountedSource, source.start: 7" in MapDataset.source(CountedSource(7, 3)).fingerprint()


def test_a_state_of_joined_datasets_needs_their_numbers_of_epochs() -> None:
    """The number of epochs of a part decides what follows its end, so a state with another one is refused."""
    texts: MapDataset[Any] = TEN.map(str)
    iterators = [iter(MapDataset.concatenate([TEN.repeat(n), texts]).to_iter_dataset()) for n in (2, 1)]
    for _ in range(12):
        next(iterators[0])

    with pytest.raises(CheckpointError, match="belongs to another stream"):
        iterators[1].set_state(iterators[0].get_state())


def fail_at_seven(element: int) -> int:
    """Fails at one element."""
    if element == 7:
        raise KeyError(element)
    return element


@pytest.mark.parametrize("node", ["map", "filter", "map_with_index", "batch_fn"])
def test_errors_say_in_which_node_and_at_which_position(node: str) -> None:
    """The exception of a function arrives unchanged, with the node and the position in notes, also from blocks."""
    shuffled = MapDataset.source(list(range(20)))[::-1]
    chains: dict[str, MapDataset[Any]] = {
        "map": shuffled.map(fail_at_seven),
        "filter": shuffled.filter(fail_at_seven),
        "map_with_index": shuffled.map_with_index(lambda _, element: fail_at_seven(element)),
        "batch_fn": shuffled.batch(1, batch_fn=lambda batch: fail_at_seven(batch[0])),
    }
    for positions in ([12], list(range(20))):
        with pytest.raises(KeyError) as caught:
            chains[node].__getitems__(positions)
        (note,) = caught.value.__notes__
        assert f".{'batch' if node == 'batch_fn' else node}(" in note
        assert "of a MapDataset at position 12" in note
    with pytest.raises(KeyError):
        _ = chains[node][12]


def test_an_error_of_a_source_names_the_record() -> None:
    """The exception of a source has a note with the record, read alone or in a block."""

    class Broken(CountedSource):
        def __getitem__(self, key: int) -> int:
            return fail_at_seven(key)

    dataset = MapDataset.source(Broken(0, 10)).shuffle(seed=0)
    for reading in (lambda: read(dataset), lambda: dataset[read(TEN.shuffle(seed=0)).index(7)]):
        with pytest.raises(KeyError) as caught:
            reading()
        assert "reading from Broken, at record key 7" in caught.value.__notes__[0]


def test_stop_iteration_of_a_function_is_an_error() -> None:
    """A StopIteration from user code does not pass for an end."""

    def stop(element: Any) -> Any:
        raise StopIteration(element)

    for positions in ([0], range(10)):
        with pytest.raises(RuntimeError, match="StopIteration was raised"):
            TEN.map(stop).__getitems__(positions)


def test_batches_of_absent_elements_are_refused() -> None:
    """A batch with a hole is an error that says where, or at construction where holes are to be expected."""
    holes = TEN.map(lambda element: None if element == 3 else element)

    assert read(holes.batch(3)[2:])[0].tolist() == [6, 7, 8]
    with pytest.raises(ValueError, match=r"missing element at position 3: a map before .batch returned None"):
        _ = holes.batch(3)[1]
    for sparse in (TEN.filter(bool), TEN.apply(FlatMapTransform(lambda x: [x], 2)), Every(TEN.filter(bool), 2)):
        with pytest.raises(ValueError, match=r"may be absent, after a filter or flat_map.*to_iter_dataset"):
            sparse.batch(2)


def test_elements_that_do_not_stack_are_named() -> None:
    """The error of a batch says at which positions the elements that differ stand."""
    with pytest.raises(ValueError, match="shape") as caught:
        read(MapDataset.source([np.zeros(2), np.zeros(2), np.zeros(3)]).shuffle(seed=0).batch(3))

    assert any("the positions of these elements before .batch" in note for note in caught.value.__notes__)


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "path": (lambda: UNTYPED.source("a.txt"), TypeError, r"millstream\.TextLineDataSource\('a\.txt'\)"),
    "no seed": (UNTYPED_TEN.shuffle, ValueError, r"shuffle needs a seed, .*write \.shuffle\(\.\.\., seed=0\), or"),
    "no draws": (lambda: UNTYPED_TEN.random_map(draw), ValueError, "random_map needs a seed"),
    "large seed": (lambda: UNTYPED_TEN.shuffle(seed=2**64), ValueError, r"seed must be between 0 and 2\*\*64 - 1"),
    "negative seed": (lambda: UNTYPED_TEN.seed(-1), ValueError, "seed must be between"),
    "float seed": (lambda: UNTYPED_TEN.random_map(draw, seed=1.5), TypeError, "seed must be an integer"),
    "endless twice": (lambda: UNTYPED_TEN.repeat().repeat(2), ValueError, "is endless already"),
    "no epochs": (lambda: UNTYPED_TEN.repeat(0), ValueError, "num_epochs must be at least 1, or None, got 0"),
    "flag": (lambda: UNTYPED_TEN.repeat(2, reseed_each_epoch=1), TypeError, "reseed_each_epoch must be True or False"),
    "endless part": (lambda: UNTYPED.concatenate([TEN, UNTYPED_TEN.repeat()]), ValueError, r"datasets\[1\] has no end"),
    "no parts": (lambda: UNTYPED.concatenate([]), ValueError, "at least one dataset, got none"),
    "a list": (lambda: UNTYPED.concatenate([TEN, [1]]), TypeError, r"datasets\[1\] must be a MapDataset, got list"),
    "not a list": (lambda: UNTYPED.concatenate(TEN), TypeError, "datasets must be a list of MapDatasets"),
    "empty part": (lambda: UNTYPED.mix([TEN, UNTYPED_TEN[3:3]]), ValueError, "Dataset 1 is empty"),
    "weights": (lambda: UNTYPED.mix([TEN, TEN], [1]), ValueError, "one number for each of the 2 components"),
    "selection": (lambda: UNTYPED.select_from_datasets([TEN], [(1, 0)]), IndexError, r"selection_map\[0\] must be"),
    "a pair after the end": (
        lambda: UNTYPED.select_from_datasets([TEN, UNTYPED_TEN[:2]], [(0, 5), (1, 2)]),
        IndexError,
        r"selection_map\[1\] must be .* got \(1, 2\), and datasets\[1\] has 2 elements",
    ),
    "a pair in nothing": (
        lambda: UNTYPED.select_from_datasets([TEN, UNTYPED_TEN[:0]], [(1, 0)]),
        IndexError,
        r"datasets\[1\] has 0 elements",
    ),
    "a map into nothing": (
        lambda: UNTYPED.select_from_datasets([UNTYPED_TEN[:0], TEN], Alternate())[0],
        IndexError,
        r"selection_map\[0\] must be .* datasets\[0\] has 0 elements",
    ),
    "triples": (lambda: UNTYPED.select_from_datasets([TEN], [(0, 0, 0)] * 2), ValueError, r"pairs .*, shape \(2, 3\)"),
    "a flat selection": (lambda: UNTYPED.select_from_datasets([TEN], [0, 0]), ValueError, r"shape \(2,\)"),
    "a float selection": (lambda: UNTYPED.select_from_datasets([TEN], [(0, 0.5)]), ValueError, "got dtype float64"),
    "no selection": (lambda: UNTYPED.select_from_datasets([TEN], 3), TypeError, "selection_map must have len"),
    "lengths": (lambda: ZipMapDataset([TEN, UNTYPED_TEN[:3]]), ValueError, r"equal length.*\[10, 3\]"),
    "window": (lambda: WindowShuffleMapDataset(TEN, window_size=0, seed=0), ValueError, "window_size must be at least"),
    "a list of windows": (
        lambda: WindowShuffleMapDataset([TEN], window_size=2, seed=0),  # type: ignore[arg-type]
        TypeError,
        "parent must be a MapDataset, got list",
    ),
    "a list of parents": (lambda: FlatMapMapDataset([TEN], FlatMapTransform(str, 3)), TypeError, "got list"),  # type: ignore[arg-type]
    "huge window": (
        lambda: WindowShuffleMapDataset(TEN, window_size=2**70, seed=0),
        ValueError,
        "window_size must be at most",
    ),
    "operation": (lambda: UNTYPED_TEN.map(FilterTransform(bool)), TypeError, "Expected a Map or a function"),
    "a class": (lambda: UNTYPED_TEN.map(MapTransform), TypeError, "must be an instance, got the class Map"),
    "fan out": (lambda: UNTYPED_TEN.flat_map(lambda x: [x]), TypeError, "max_fan_out"),
    "two fan outs": (
        lambda: UNTYPED_TEN.flat_map(FlatMapTransform(str, 3), 4),
        TypeError,
        r"max_fan_out=4 needs a function, got FlatMap.*, which has its own max_fan_out",
    ),
    "a batched operation": (
        lambda: UNTYPED_TEN.map(MapTransform(str), batched=True),
        TypeError,
        r"batched=True needs a function, got Map\(str\)",
    ),
    "huge fan out": (lambda: UNTYPED_TEN.flat_map(lambda x: [x], 2**63), ValueError, "max_fan_out must be at most"),
    "packer": (lambda: UNTYPED_TEN.apply(Rebatch(2)), TypeError, r"to_iter_dataset\(\)\.apply"),
    "component": (lambda: UNTYPED_TEN.apply(OnlyFor("a", fail_at_seven)), TypeError, r"to_iter_dataset\(\)\.apply"),
    "backwards": (lambda: UNTYPED_TEN.repeat()[::-1], ValueError, "cannot be read backwards"),
    "endless batches": (
        lambda: UNTYPED_TEN.batch(4).repeat().shuffle(seed=0),
        ValueError,
        r"cannot be shuffled: .* Write \.shuffle\(\.\.\.\) before \.repeat\(\)",
    ),
    "from no end": (lambda: UNTYPED_TEN.repeat()[-2:], ValueError, "has no last element"),
    "to no end": (lambda: UNTYPED_TEN.repeat()[:-2], ValueError, r"slice it before \.repeat\(\)"),
    "a pair": (lambda: UNTYPED_TEN.slice(3), TypeError, r"such as slice\(0, 10\)"),
    "a position of another type": (lambda: UNTYPED_TEN.slice([0.5]), TypeError, "must be an integer, got 0.5"),
    "a mask": (lambda: UNTYPED_TEN.slice(np.ones(10, bool)), TypeError, r"Use np.flatnonzero\(mask\)"),
    "a huge position": (lambda: UNTYPED_TEN.slice([2**64, 1]), ValueError, "must be at most 9"),
    "positions in two dimensions": (lambda: UNTYPED_TEN.slice([[1, 2]]), TypeError, "must be an integer"),
    "a negative position": (lambda: UNTYPED_TEN.slice(np.array([3, -1])), ValueError, "must be at least 0, got -1"),
    "a position after the end": (lambda: UNTYPED_TEN.slice([10]), ValueError, "must be at most 9, got 10"),
    "negative": (lambda: UNTYPED_TEN[-1], IndexError, r"count from 0.* got -1. Use len\(dataset\) - 1"),
    "negatives": (lambda: UNTYPED_TEN.__getitems__([3, -1]), IndexError, "got -1"),
    "large": (lambda: UNTYPED_TEN[2**63], IndexError, r"below 2\*\*63"),
    "float": (lambda: UNTYPED_TEN[1.5], TypeError, "A position must be an integer, got 1.5 of type float"),
    "several": (lambda: UNTYPED_TEN[[1, 2]], TypeError, r"got \[1, 2\] of type list\. Write \.slice\(positions\)"),
    "floats": (lambda: UNTYPED_TEN.__getitems__(np.zeros(3)), TypeError, "integer"),
    "table": (lambda: UNTYPED_TEN.__getitems__(np.zeros((2, 2), np.int64)), ValueError, "one-dimensional"),
    "empty": (lambda: UNTYPED.source([])[0], IndexError, "empty: it has no element"),
    "empty block": (lambda: UNTYPED_TEN[5:5].shuffle(seed=0).__getitems__([0]), IndexError, "empty: it has no element"),
    "too many": (lambda: read(UNTYPED_TEN.flat_map(lambda x: [x] * 3, 2)), ValueError, "= 2 elements, got more"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_errors_that_say_what_to_do(name: str) -> None:
    """Each mistake is an error, at construction where it can be known, whose text says the rule or the remedy."""
    make, kind, text = REFUSED[name]
    with pytest.raises(kind, match=text):
        make()


def test_positions_of_all_kinds_are_taken() -> None:
    """NumPy's integers, lists, ranges and arrays of any integer type are positions; an empty dataset has none."""
    index: SupportsIndex = np.int64(3)
    empty: MapDataset[int] = MapDataset.source([])

    assert len(empty.shuffle(seed=0).map(str).batch(2).repeat()) == len(TEN[5:3].__getitems__([])) == 0
    assert TEN[index] == 3
    for positions in ([1, 2], (1, 2), range(1, 3), np.array([1, 2], np.uint8), np.array([1, 2])):
        assert list(TEN.__getitems__(positions)) == [1, 2]


STREAM: Any = MapDataset.range(3).to_iter_dataset()
REMEDIES = [(STREAM, *remedy) for remedy in OF_STREAMS.items()] + [
    (UNTYPED_TEN, *remedy) for remedy in OF_MAP_DATASETS.items()
]


@pytest.mark.parametrize(("dataset", "name", "remedy"), REMEDIES)
def test_methods_of_other_libraries_are_errors_with_the_remedy(dataset: Any, name: str, remedy: str) -> None:
    """The remedy is in the error, and its names and methods exist; all else behaves as without the attribute."""
    with pytest.raises(AttributeError, match=re.escape(remedy)) as raised:
        getattr(dataset, name)
    assert (raised.value.name, raised.value.obj) == (name, dataset)
    assert not hasattr(dataset, name)
    assert getattr(dataset, name, None) is None
    for path in re.findall(r"millstream\.([A-Za-z_.]+)", remedy):
        operator.attrgetter(path)(millstream)
    for operation in re.findall(r"\.(?:map|apply)\(millstream\.([A-Za-z]+)", remedy):
        assert issubclass(getattr(millstream, operation), millstream.transforms.Transformation)
    known = set(dir(MapDataset)) | set(dir(IterDataset))
    assert set(re.findall(r"(?<![\w])\.([a-z_]+)\(", remedy)) <= known


@pytest.mark.parametrize("dataset", [TEN.map(str), STREAM, IterDataset.source([1, 2])])
def test_datasets_are_copied_and_pickled_as_without_remedies(dataset: Any) -> None:
    """An unknown name is Python's own error; a property that raises AttributeError keeps its message."""
    for copied in (copy.copy(dataset), copy.deepcopy(dataset), pickle.loads(pickle.dumps(dataset))):
        assert list(copied) == list(dataset)
    with pytest.raises(AttributeError, match=f"^'{type(dataset).__name__}' object has no attribute 'shufle'$"):
        dataset.shufle  # noqa: B018

    class Own(type(dataset)):  # type: ignore[misc]
        @property
        def broken(self) -> Any:
            return self.inner_name

    with pytest.raises(AttributeError, match="inner_name"):
        Own.__new__(Own).broken  # noqa: B018
