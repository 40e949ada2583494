"""Random pipelines of operations that group elements as they come: packers, batches by length, window shuffles."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from millstream import (
    Batch,
    BestFitPack,
    BOSHandling,
    BucketBatch,
    ConcatThenSplit,
    FilterTransform,
    FirstFitPack,
    FlatMapTransform,
    IndexSampler,
    MapTransform,
    RandomMapTransform,
    Rebatch,
    ShardOptions,
    TokenBudgetBatch,
    WindowShuffle,
)
from millstream.transforms import Map, Transformation
from support.draw.random_pipelines import Pipeline

ROW = 12
"""The length of packed rows."""


@dataclasses.dataclass(frozen=True)
class Document(MapTransform):
    """Turns a number into a document of up to `longest` tokens, with features of one length or of two.

    Attributes:
        longest: the most tokens of a document.
        differ: whether the two features differ in length.
    """

    longest: int = ROW
    differ: bool = False

    def map(self, element: int) -> dict[str, Any]:
        length = element * 7 % (self.longest + 1)
        other = element * 5 % (self.longest + 1) if self.differ else length
        tokens = 100 * element + 1 + np.arange(length, dtype=np.int64)
        return {"a": tokens, "b": np.arange(other, dtype=np.float32) - element, "left out": element % 5}


@dataclasses.dataclass(frozen=True)
class Rows(MapTransform):
    """Turns a number into a batch of up to `longest` rows."""

    longest: int

    def map(self, element: int) -> dict[str, Any]:
        count = element * 7 % (self.longest + 1)
        return {"x": np.full(count, element), "y": np.arange(2 * count, dtype=np.float32).reshape(count, 2)}


@dataclasses.dataclass(frozen=True)
class Halves(FlatMapTransform):
    """Splits a document in two, and the shortest into none."""

    max_fan_out: int = 2

    def flat_map(self, element: dict[str, Any]) -> Sequence[dict[str, Any]]:
        arrays = {name: array for name, array in element.items() if isinstance(array, np.ndarray)}
        middle = len(next(iter(arrays.values()))) // 2
        halves = (slice(middle), slice(middle, None))
        parts = ({name: array[half] for name, array in arrays.items()} for half in halves)
        return [{**element, **part} for part in parts] if middle else []


class Label(RandomMapTransform):
    """Adds a random number to a row or batch."""

    def random_map(self, element: Any, rng: np.random.Generator) -> Any:
        return {**element, "label": rng.integers(1 << 60)} if isinstance(element, dict) else element


def is_even(element: dict[str, Any]) -> bool:
    """True if a document or batch has an even number of tokens or rows."""
    return len(next(iter(element.values()))) % 2 == 0


AFTER: list[list[Transformation]] = [
    [],
    [Map(dict)],
    [FilterTransform(is_even)],
    [Halves()],
    [Batch(3)],
    [Halves(), Batch(3)],
    [FilterTransform(is_even), Halves(), Halves(), Batch(2)],
    [Halves(), WindowShuffle(3)],
]
"""Operations after a grouping that keep, drop, split or batch what it makes."""

BINS = st.fixed_dictionaries(
    {
        "num_packing_bins": st.integers(1, 5),
        "seed": st.integers(0, 3),
        "shuffle_bins": st.booleans(),
        "max_sequences_per_bin": st.none() | st.integers(1, 3),
    }
)


Drawn = tuple[Any, Any]
"""Operations that produce elements, and one that groups them."""


def packers(kind: type[Transformation]) -> st.SearchStrategy[Drawn]:
    """Draws a packer into bins and the documents before it."""
    return st.builds(
        lambda lengths, options, groups, overflow, differ: (
            Document(ROW if overflow == "error" else 3 * ROW, differ),
            kind(lengths, overflow=overflow, **{**options, **groups}),  # type: ignore[call-arg]
        ),
        st.sampled_from([{"a": ROW}, {"a": ROW, "b": ROW}, {"b": ROW + 3, "a": ROW}]),
        BINS,
        st.sampled_from(
            [
                {"pack_alignment_struct": {"a": 4}},
                {},
                {"meta_features": ["left out"]},
                {"meta_features": ["left out"], "shuffle_bins": True, "pack_alignment_struct": {"a": 3}},
            ]
        ),
        st.sampled_from(["error", "truncate", "split", "drop"]),
        st.booleans(),
    )


GROUPINGS: dict[str, st.SearchStrategy[Drawn]] = {
    "FirstFitPack": packers(FirstFitPack),
    "BestFitPack": packers(BestFitPack),
    "ConcatThenSplit": st.builds(
        lambda longest, options: (Document(longest), ConcatThenSplit(**options)),
        st.sampled_from([3, ROW, 4 * ROW]),
        st.sampled_from(
            [
                {"length_struct": {"a": ROW}},
                {"length_struct": {"b": 7, "a": 7}},
                {"length_struct": {"left out": 15, "a": ROW, "b": ROW}, "meta_features": ["left out", "b"]},
                {
                    "length_struct": {"a": ROW, "b": ROW},
                    "bos_handling": BOSHandling.REPLACE_FIRST_TOKEN_WITH_BOS,
                    "bos_features": ["a"],
                    "bos_token_id": -1,
                },
            ]
        ),
    ),
    "WindowShuffle": st.builds(
        lambda *options: (Document(), WindowShuffle(*options)), st.integers(1, 9), st.integers(0, 3)
    ),
    "TokenBudgetBatch": st.builds(
        lambda budget, features, most, differ: (
            Document(ROW, differ),
            TokenBudgetBatch(budget, features, max_batch_size=most, padding_struct={"a": -1}),
        ),
        st.integers(ROW, 4 * ROW),
        st.just(["b", "a"]),
        st.none() | st.integers(1, 5),
        st.booleans(),
    ),
    "BucketBatch": st.builds(
        lambda boundaries, sizes, window, differ: (
            Document(ROW, differ),
            BucketBatch(boundaries, sizes, ["a", "b"], window_size=window, padding_struct={"b": 7}),
        ),
        st.sampled_from([[3, 7, ROW], [2, 6, 2 * ROW]]),
        st.lists(st.integers(1, 4), min_size=3, max_size=3),
        st.integers(1, 20),
        st.booleans(),
    ),
    "Rebatch": st.builds(
        lambda longest, *options: (Rows(longest), Rebatch(*options)),
        st.sampled_from([3, 25]),
        st.integers(1, 9),
        st.booleans(),
    ),
}
"""A pipeline of each operation that groups elements as they come: elements that it takes, and the operation."""


@st.composite
def grouping_pipelines(draw: st.DrawFn, name: str) -> Pipeline:
    """Draws a pipeline with a grouping: after a Filter or FlatMap or neither, and before others of each kind."""
    elements, operation = draw(GROUPINGS[name])
    between: list[Transformation] = draw(st.sampled_from([[], [FilterTransform(is_even)], [Halves()]]))
    after: list[Transformation] = draw(st.sampled_from([*AFTER, [Label()], [Batch(2, drop_remainder=True), Label()]]))
    size, shards = draw(st.integers(1, 50)), draw(st.integers(1, 3 if getattr(operation, "has_one_shape", True) else 1))
    sampler = IndexSampler(size, shuffle=True, seed=draw(st.integers(0, 9)), num_epochs=draw(st.integers(1, 2)))
    operations = (elements, *between, operation, *after)
    return Pipeline(range(size), sampler, operations, ShardOptions(draw(st.integers(0, shards - 1)), shards))
