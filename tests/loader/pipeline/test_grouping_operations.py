"""Operations that group elements as they come, through the loader: the oracle's stream, whoever makes it."""

import dataclasses
import itertools
import zlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream import (
    Batch,
    BestFitPack,
    BOSHandling,
    BucketBatch,
    ConcatThenSplit,
    DataLoader,
    FirstFitPack,
    IndexSampler,
    MapTransform,
    Rebatch,
    ShardOptions,
    TokenBudgetBatch,
    WindowShuffle,
)
from millstream.core.randomness import OF_GROUPS, generator
from millstream.transforms import Transformation
from millstream.transforms.grouping import GroupId, GroupingOperation
from support.draw.random_groupings import GROUPINGS, ROW, Document, Label, Rows, grouping_pipelines
from support.draw.random_pipelines import UNEVEN_ENDS, Pipeline
from support.laws import assert_resumes_everywhere, expected_of, loader_of
from support.streams import drain

pytestmark = pytest.mark.usefixtures("small_groups")
EVERY_OPERATION = pytest.mark.parametrize("name", GROUPINGS)


class FailOnce(MapTransform):
    """Raises the first time that it gets an element of some kinds."""

    def __init__(self) -> None:
        self.got: set[bytes] = set()

    def map(self, element: dict[str, Any]) -> dict[str, Any]:
        mark = repr(element).encode()
        if zlib.crc32(mark) % 3 == 0 and mark not in self.got:
            self.got.add(mark)
            raise KeyError(mark)
        return element

    def __getstate__(self) -> dict[str, Any]:
        return {}


@UNEVEN_ENDS
@EVERY_OPERATION
@given(data=st.data())
@settings(deadline=None, max_examples=12)
def test_next_after_an_error_that_was_caught_repeats_and_loses_nothing(name: str, data: st.DataObject) -> None:
    """An operation that fails now and then, wherever it is, delays the stream and does not change it."""
    stream = data.draw(grouping_pipelines(name))
    first = next(row for row, operation in enumerate(stream.operations) if isinstance(operation, GroupingOperation))
    # What fails sees rows and documents, not batches of rows that do not stack.
    stop = next((row for row, one in enumerate(stream.operations[first:], first) if isinstance(one, Batch)), None)
    place = data.draw(st.integers(1, len(stream.operations) if stop is None else stop))
    operations = (*stream.operations[:place], FailOnce(), *stream.operations[place:])
    expected, error = expected_of(stream)
    iterator = iter(loader_of(dataclasses.replace(stream, operations=operations)))
    got: list[object] = []
    found: type[BaseException] | None = KeyError
    while found is KeyError:
        more, found = drain(iterator)
        got += more
    assert (got, found) == (expected, error)


SPLIT = FirstFitPack({"a": ROW}, num_packing_bins=4, overflow="split")
EXAMPLES: dict[str, list[Transformation]] = {
    "FirstFitPack": [Document(), FirstFitPack({"a": ROW, "b": ROW}, num_packing_bins=4), Batch(3)],
    "BestFitPack": [Document(), BestFitPack({"a": ROW}, num_packing_bins=4), Label(), Batch(3)],
    "ConcatThenSplit": [Document(3 * ROW), ConcatThenSplit({"a": ROW, "b": ROW}), Label(), Batch(3)],
    "WindowShuffle": [Document(3 * ROW), SPLIT, WindowShuffle(7, seed=1), Batch(3)],
    "TokenBudgetBatch": [Document(), TokenBudgetBatch(4 * ROW, ["a", "b"]), Label()],
    "BucketBatch": [Document(), BucketBatch([4, 8, ROW], [4, 3, 2], ["a", "b"], window_size=20)],
    "Rebatch": [Rows(9), Rebatch(4), Label()],
}
"""One pipeline of each."""


class FailAt(MapTransform):
    """Raises at one number."""

    def map(self, element: int) -> int:
        if element == 40:
            raise KeyError("bad")
        return element


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_error_comes_at_the_same_output_wherever_the_stream_was_resumed(name: str) -> None:
    """The outputs before a failing record are the same from every state, and then the error comes."""
    order = IndexSampler(60, num_epochs=1, seed=0)
    stream = Pipeline(range(60), order, (FailAt(), *EXAMPLES[name]), ShardOptions(0, 1))
    outputs, error = assert_resumes_everywhere(loader_of(stream))
    assert outputs
    assert error is KeyError
    with pytest.raises(KeyError) as caught:
        list(loader_of(stream))
    assert any("record key 40" in note for note in caught.value.__notes__)


ALIKE = FirstFitPack({"a": ROW}, num_packing_bins=6, shuffle_bins=False)
UNLIKE: list[tuple[Transformation, list[Any], list[int], str, str]] = [
    (ALIKE, [5] * 9 + [np.int32] + [5] * 2, [ROW] * 4, r"'a' has dtype int64 .* int32 .* in another", "8, 9"),
    (Rebatch(2), [3, 2, np.int32], [2, 2], r"int64.* and .*int32.* at \['a'\]", "1, 2"),
]


@pytest.mark.parametrize(("operation", "records", "lengths", "message", "keys"), UNLIKE, ids=["rows", "batches"])
def test_elements_that_are_not_alike_do_not_become_one(
    operation: Transformation, records: list[Any], lengths: list[int], message: str, keys: str
) -> None:
    """Documents of a row or rows of a batch that differ: both dtypes and record keys, after what comes before."""
    source = [{"a": np.ones(5, one) if isinstance(one, type) else np.ones(one, np.int64)} for one in records]
    iterator = iter(millstream.load(source, num_epochs=1, transformations=[operation]))
    assert [len(next(iterator)["a"]) for _ in lengths] == lengths
    with pytest.raises(ValueError, match=message) as caught:
        next(iterator)
    assert any(f"record keys of these elements: {keys}" in note for note in caught.value.__notes__)


BAD_BINS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"length_struct": ["a"]}, TypeError, "map features to row lengths"),
    (
        {"length_struct": {"a_positions": 3, "a": 3}},
        ValueError,
        "called 'a_positions', which is the name of an array that packing adds for 'a'",
    ),
    ({"num_packing_bins": 0}, ValueError, "num_packing_bins must be at least 1"),
    ({"seed": -1}, ValueError, "seed must be between 0 and"),
    ({"shuffle_bins": 1}, TypeError, "shuffle_bins must be True or False"),
    ({"max_sequences_per_bin": 0}, ValueError, "max_sequences_per_bin must be at least 1"),
    ({"overflow": "cut"}, ValueError, "overflow must be one of 'error', 'truncate', 'split', 'drop', got 'cut'"),
    ({"meta_features": ["a_positions"]}, ValueError, "name of an array that packing adds for 'a'"),
    ({"pack_alignment_struct": {"a": 0}}, ValueError, "at least 1"),
    ({"pack_alignment_struct": 2}, TypeError, "pack_alignment_struct must map features to values, got 2"),
    ({"padding_struct": ["a"]}, TypeError, "padding_struct must map features to values"),
    ({"num_bins": 3}, TypeError, "did you mean 'num_packing_bins'"),
]
REPLACE = BOSHandling.REPLACE_FIRST_TOKEN_WITH_BOS
BAD_CUTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"length_struct": {"a": 3, "b": 4}}, ValueError, "must give all features but meta_features the same length"),
    ({"bos_handling": 2}, TypeError, "bos_handling must be one of BOSHandling.DO_NOTHING"),
    ({"bos_token_id": 1}, ValueError, "got DO_NOTHING"),
    ({"bos_features": ["a"]}, ValueError, "got DO_NOTHING"),
    ({"bos_features": ["c"]}, ValueError, "bos_features names 'c'"),
    ({"bos_handling": REPLACE}, ValueError, "needs a bos_token_id"),
    (
        {"bos_handling": REPLACE, "bos_token_id": 1, "bos_features": ["a"], "meta_features": ["a"]},
        ValueError,
        "'a' must not be in both bos_features and meta_features",
    ),
]
BAD_BATCHES: list[tuple[Callable[..., object], tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (Rebatch, (0,), {}, ValueError, "batch_size must be at least 1"),
    (Rebatch, (2**63,), {}, ValueError, "batch_size must be at most"),
    (Rebatch, (2,), {"drop_remainder": 1}, TypeError, "drop_remainder must be True or False"),
    (WindowShuffle, (0,), {}, ValueError, "window_size must be at least 1"),
    (WindowShuffle, (2,), {"seed": -1}, ValueError, "seed must be between 0 and"),
    (TokenBudgetBatch, (0, "a"), {}, ValueError, "budget must be at least 1"),
    (TokenBudgetBatch, (9, [3]), {}, TypeError, "feature must be a name"),
    (TokenBudgetBatch, (9, []), {}, ValueError, "at least one feature"),
    (TokenBudgetBatch, (9, "a"), {"padding_struct": {"b": 0}}, ValueError, "padding_struct names 'b'"),
    (TokenBudgetBatch, (9, "a"), {"max_batch_size": 0}, ValueError, "max_batch_size must be at least 1"),
    (BucketBatch, ([], [], "a"), {}, ValueError, "non-empty, ascending"),
    (BucketBatch, (4, [1], "a"), {}, TypeError, "boundaries must be a list of integers"),
    (BucketBatch, ([4], 1, "a"), {}, TypeError, "batch_sizes must be a list of integers"),
    (BucketBatch, ([4, 4], [1, 1], "a"), {}, ValueError, "non-empty, ascending list, got"),
    (BucketBatch, ([4, 8], [1], "a"), {}, ValueError, "got 1 sizes and 2 boundaries"),
    (BucketBatch, ([4, 8], [1, 0], "a"), {}, ValueError, r"batch_sizes\[1\] must be at least 1"),
    (BucketBatch, ([4], [1], "a"), {"window_size": 0}, ValueError, "window_size must be at least 1"),
]
BINS = {"length_struct": {"a": ROW}, "num_packing_bins": 3}
CUTS = {"length_struct": {"a": ROW}}


@pytest.mark.parametrize(
    ("kind", "arguments", "options", "error", "message"),
    [
        *((kind, (), BINS | options, *rest) for kind in (FirstFitPack, BestFitPack) for options, *rest in BAD_BINS),
        *((ConcatThenSplit, (), CUTS | options, *rest) for options, *rest in BAD_CUTS),
        *BAD_BATCHES,
    ],
)
def test_bad_arguments_are_errors(
    kind: Any, arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Wrong arguments of the operations that pack, batch and shuffle are errors at construction."""
    with pytest.raises(error, match=message):
        kind(*arguments, **options)


PACK = FirstFitPack({"a": ROW}, num_packing_bins=1)
CUT = ConcatThenSplit({"a": 3, "b": 3})


@pytest.mark.parametrize(
    ("operation", "element", "num_outputs", "message"),
    [
        (PACK, {"a": np.arange(ROW + 1)}, 0, "A document has 13 'a', but a row takes 12. Use overflow="),
        (PACK, {"b": np.arange(3)}, 0, "The feature 'a' is missing: got 'b'"),
        (PACK, {"a": "some words"}, 0, "'a' must be an array with a token axis, got 'some words': convert it"),
        (PACK, b"some bytes", 0, "'a' must be an array with a token axis, got b'some bytes': convert it to tokens"),
        (TokenBudgetBatch(3, "a"), {"a": np.ones(4)}, 0, "An element has 4 tokens, but budget is 3"),
        (BucketBatch([2, 3], [1, 1], "a"), {"a": np.ones(4)}, 0, "has 4 tokens, but the last boundary is 3"),
        (BucketBatch([2, 3], [1, 1], "b"), {"a": np.ones(4)}, 0, "The feature 'b' is missing: got 'a'"),
        (CUT, {"a": np.ones(2), "b": np.ones(1)}, 1, "the same length.*{'a': 2, 'b': 1}"),
        (ConcatThenSplit({"a": 3, "b": 3}, meta_features=["b"]), {"a": np.ones(3), "b": np.ones(2)}, 1, "single value"),
        (Rebatch(3), {"a": np.ones(2), "b": np.ones(1)}, 1, "the same number of rows, got"),
        (Rebatch(3), {"a": np.ones(2), "b": np.int64(1)}, 1, r"got none at \['b'\]"),
        (Rebatch(3), {}, 1, "got none"),
    ],
)
def test_an_element_that_cannot_be_grouped_is_named(
    operation: Transformation, element: Any, num_outputs: int, message: str
) -> None:
    """An element that cannot be packed, batched or split is an error at its turn with the record key."""
    source = [{"a": np.ones(3), "b": np.ones(3)}, element]
    iterator = iter(DataLoader(data_source=source, sampler=IndexSampler(2, num_epochs=1), operations=[operation]))
    for _ in range(num_outputs):
        next(iterator)
    with pytest.raises(ValueError, match=message) as caught:
        next(iterator)
    assert any("operation 0" in note and "record key 1" in note for note in caught.value.__notes__)


def test_a_bos_that_replaces_nothing_is_a_warning() -> None:
    """A BOS token that replaces nothing does nothing, as in Grain, and is a warning."""
    with pytest.warns(UserWarning, match=r"replaces nothing, as in Grain.*bos_features=\['a'\]"):
        ConcatThenSplit({"a": 3}, bos_handling=BOSHandling.REPLACE_FIRST_TOKEN_WITH_BOS, bos_token_id=1)


def test_meta_features_come_with_each_segment() -> None:
    """A single value is repeated in each row that its document is in; too many for a row are an error at its turn."""
    documents = [{"tokens": np.full(length, length), "id": length} for length in (2, 5, 1)]
    packed = ConcatThenSplit({"tokens": 3, "id": 2}, meta_features=["id"])
    rows = list(millstream.load(documents, num_epochs=1, transformations=[packed]))
    assert [row["id"].tolist() for row in rows] == [[2, 5], [5, 0], [5, 1]]
    assert all(row.keys() == {"tokens", "tokens_segment_ids", "tokens_positions", "id"} for row in rows)

    loader = millstream.load(documents[2:] * 6, num_epochs=1, transformations=[packed])
    with pytest.raises(ValueError, match=r"length_struct\['id'\] must be at least 3 for a row of 3 segments, got 2"):
        next(iter(loader))


@EVERY_OPERATION
@given(data=st.data())
@settings(deadline=None, max_examples=20)
def test_a_group_does_not_depend_on_how_its_elements_come(name: str, data: st.DataObject) -> None:
    """The pieces in which elements come make no difference; a new group takes at least one, and a full one none."""
    elements, operation = data.draw(GROUPINGS[name])
    numbers: Any = range(1, data.draw(st.integers(2, 40)))
    sizes = operation.prepare([elements.map(number) for number in numbers]).sizes
    count = sizes.shape[1]

    def taken(stops: Iterable[int]) -> tuple[Any, ...]:
        group, at = operation.begin(), 0
        for stop in stops:
            while at < stop and (more := group.take(sizes[:, at:stop])):
                at += more
        assert at > 0 or not count
        if group.is_full:
            assert all(group.take(sizes[:, each : each + 1]) == 0 for each in range(count))
        else:
            assert at == count
        return at, group.is_full, group.used, group.decisions().tolist()

    assert taken([*sorted(data.draw(st.lists(st.integers(0, count)))), count]) == taken(range(count + 1))


def test_every_public_grouping_is_in_the_list() -> None:
    """A grouping of `millstream.transforms` that GROUPINGS lacks is found."""
    public = [getattr(millstream.transforms, name) for name in millstream.transforms.__all__]
    groupings = {each.__name__ for each in public if isinstance(each, type) and issubclass(each, GroupingOperation)}

    assert groupings - GROUPINGS.keys() == set()


@given(
    seed=st.integers(0, 2**64 - 1), position=st.integers(0, 99), index=st.integers(0, 99), operation=st.integers(0, 9)
)
def test_groups_draw_what_no_random_operation_draws(seed: int, position: int, index: int, operation: int) -> None:
    """Under one seed, the stream of a group is none of those of records, whatever their epoch and index."""
    ours = GroupId(position, index).generator(seed)

    assert ours.integers(2**63) != generator(seed, position, index, operation).integers(2**63)
    assert ours.bit_generator.state["state"]["counter"][3] == OF_GROUPS


ROW_OF = millstream.Map(lambda number: np.full(ROW, number))
BINS_OF_ALL: dict[str, Any] = {"length_struct": {"a": ROW}, "num_packing_bins": 20}
SHUFFLES: dict[str, Callable[..., list[Transformation]]] = {
    "WindowShuffle": lambda **seed: [WindowShuffle(20, **seed)],
    "FirstFitPack": lambda **seed: [ROW_OF, FirstFitPack(**BINS_OF_ALL, **seed)],
    "BestFitPack": lambda **seed: [ROW_OF, BestFitPack(**BINS_OF_ALL, **seed)],
}


def order(operations: Sequence[Transformation], kind: str, seed: int | None) -> list[int]:
    """Returns the order of the numbers below 60 after some operations."""
    elements: Any = millstream.MapDataset.range(60) if seed is None else millstream.MapDataset.range(60).seed(seed)
    elements = elements.to_iter_dataset()
    for operation in operations:
        elements = elements.apply(operation)
    if kind == "loader":
        elements = millstream.load(range(60), seed=seed, num_epochs=1, transformations=operations)
    elif kind == "mixture":
        halves = {"a": range(30), "b": range(30, 60)}
        weights = {"a": 1, "b": 1}
        elements = millstream.load(halves, weights=weights, seed=seed, num_epochs=1, transformations=operations)
    return [int(element["a"][0]) if isinstance(element, dict) else int(element) for element in elements]


@pytest.mark.parametrize("name", SHUFFLES)
def test_operations_that_shuffle_take_the_seed_of_the_pipeline(name: str) -> None:
    """Another seed of the pipeline is another order of groups, unless the operation has a seed; two in a row differ."""
    shuffle = SHUFFLES[name]
    for kind in ("loader", "mixture", "chain"):
        orders = [order(shuffle(), kind, seed) for seed in (None, 0, 1, 2)]
        assert all(len(set(some)) == 60 for some in orders)
        assert all(one != other for one, other in itertools.combinations(orders, 2))
        assert order(shuffle(seed=5), kind, 0) == order(shuffle(seed=5), kind, 1)
        assert order(shuffle(), kind, None) == order(shuffle(seed=0), kind, None)
    if name == "WindowShuffle":
        # Two with one seed would apply one permutation twice.
        once = order(shuffle(), "loader", 0)[:20]
        assert order([*shuffle(), *shuffle()], "loader", 0)[:20] != [once[number] for number in once]


def test_elements_without_tokens_fill_a_budget() -> None:
    """An endless order of nothing else yields batches, too."""
    empty = {"a": np.empty(0, np.int64)}
    batches = iter(millstream.load([empty], transformations=[TokenBudgetBatch(3, "a")]))
    assert [next(batches)["a"].shape for _ in range(2)] == [(3, 0)] * 2


@pytest.mark.parametrize("name", ["BucketBatch", "TokenBudgetBatch"])
def test_batches_of_several_shapes_are_for_one_shard(name: str) -> None:
    """Two hosts would get different shapes in one step: refused at construction, with the ways out."""
    sampler = IndexSampler(100, shuffle=True, seed=0, num_epochs=1)

    def loader(shard: ShardOptions) -> DataLoader:
        return DataLoader(data_source=range(100), sampler=sampler, operations=EXAMPLES[name], shard_options=shard)

    assert loader(ShardOptions(0, 1)).shard_options.shard_count == 1
    message = rf"operations\[1\], {name}.*, cannot run on 2 shards: .* Pack rows of one length"
    with pytest.raises(ValueError, match=message):
        loader(ShardOptions(0, 2))
