"""Mixtures of packed rows: each component has the rows that it has alone, in exact proportions, on any hosts."""

from typing import Any

import numpy as np
import pytest

from millstream import (
    Batch,
    ConcatenatedDataSource,
    DataLoader,
    IndexSampler,
    MapWithIndexTransform,
    MixtureSampler,
    OnlyFor,
    Pack,
    PackingSampler,
    RandomMapTransform,
    ShardOptions,
)
from support.laws import assert_shards_agree, inline_loader

ROW = 16
SIZES = {"web": 800, "books": 500, "code": 600}
WEIGHTS = {"web": 3, "books": 1, "code": 2}


def lengths_of(name: str) -> np.ndarray[Any, Any]:
    return np.random.default_rng(SIZES[name]).integers(1, 21, SIZES[name])


def documents(name: str) -> list[np.ndarray[Any, Any]]:
    first = 10**6 * (1 + list(SIZES).index(name))
    return [first + 100 * key + np.arange(length) for key, length in enumerate(lengths_of(name))]


def sampler_of(name: str, **options: Any) -> PackingSampler:
    seed = list(SIZES).index(name)
    return PackingSampler(lengths_of(name), ROW, **{"shuffle": True, "seed": seed, "overflow": "split", **options})


def corpora() -> ConcatenatedDataSource:
    return ConcatenatedDataSource({name: documents(name) for name in SIZES})


def mixture() -> MixtureSampler:
    mixed = MixtureSampler({name: sampler_of(name) for name in SIZES}, WEIGHTS)
    return mixed.reweighted(24, {"web": 1, "books": 3, "code": 0})


def nested() -> MixtureSampler:
    inner = MixtureSampler([sampler_of("books"), sampler_of("code")], [1, 2])
    return MixtureSampler([sampler_of("web"), inner], [1, 1])


def numbered(index: int, document: Any) -> dict[str, Any]:
    return {"tokens": document, "index": np.full(len(document), index)}


def drawn(element: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    """Adds a draw to each token of a document, or to a row."""
    if "tokens_positions" in element:
        return {**element, "row_draw": rng.integers(2**40)}
    return {**element, "draw": np.full(len(element["tokens"]), rng.integers(1, 2**40))}


PACK = Pack({"tokens": ROW})
OPERATIONS: list[Any] = [
    MapWithIndexTransform(numbered),
    RandomMapTransform(drawn),
    Pack({"tokens": ROW, "index": ROW, "draw": ROW}, meta_features=["index", "draw"]),
    RandomMapTransform(drawn),
    MapWithIndexTransform(lambda index, row: {**row, "row_index": index}),
]


def take(loader: DataLoader, count: int) -> list[Any]:
    with iter(loader) as iterator:
        return [next(iterator) for _ in range(count)]


def same(one: Any, other: Any) -> bool:
    return list(one) == list(other) and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_component_has_the_rows_that_it_has_alone(workers: int) -> None:
    """Tokens, indices and draws of documents and rows are those of a loader of the component; shares are exact."""
    with inline_loader(corpora(), mixture(), *OPERATIONS, worker_count=workers) as loader:
        rows = take(loader, 64)
    names = [list(SIZES)[row["tokens"][0] // 10**6 - 1] for row in rows]
    assert {name: names[:24].count(name) for name in SIZES} == {"web": 12, "books": 4, "code": 8}
    assert {name: names[24:].count(name) for name in SIZES} == {"web": 10, "books": 30, "code": 0}
    for name in SIZES:
        own = [row for row, from_ in zip(rows, names, strict=True) if from_ == name]
        alone = inline_loader(documents(name), sampler_of(name), *OPERATIONS)
        assert all(map(same, own, take(alone, len(own))))


@pytest.mark.parametrize(("shards", "is_nested", "step"), [(3, False, 1), (2, False, 12), (3, True, 30)])
def test_any_number_of_shards_makes_the_same_global_batches(shards: int, is_nested: bool, step: int) -> None:
    """Any number of shards resumes one shard's state with the same global batch, before and after new weights."""
    sources: Any = [documents(name) for name in SIZES]
    if is_nested:
        sources = [sources[0], ConcatenatedDataSource(sources[1:])]
    source, sampler = ConcatenatedDataSource(sources), nested() if is_nested else mixture()

    def part(index: int, count: int) -> DataLoader:
        return inline_loader(source, sampler, PACK, Batch(6 // count), shard_options=ShardOptions(index, count))

    assert_shards_agree(part, [shards], step, 1)


def test_a_mixture_in_a_mixture_has_the_rows_of_its_innermost_orders() -> None:
    """Tokens, indices and draws are those of a loader of the component; lengths are those of all documents."""
    inner = ConcatenatedDataSource([documents("books"), documents("code")])
    loader = inline_loader(ConcatenatedDataSource([documents("web"), inner]), nested(), *OPERATIONS)
    rows = take(loader, 36)
    for number, name in enumerate(SIZES, 1):
        own = [row for row in rows if row["tokens"][0] // 10**6 == number]
        assert len(own) > 5
        assert all(map(same, own, take(inline_loader(documents(name), sampler_of(name), *OPERATIONS), len(own))))
    assert nested().largest_key == sum(SIZES.values()) - 1
    keys = np.arange(sum(SIZES.values()))
    assert nested().lengths_at(keys).tolist() == np.concatenate([lengths_of(name) for name in SIZES]).tolist()


def test_an_order_ends_as_rows_do() -> None:
    """`drop_exhausted` gives every row of every component once, and so every token."""
    samplers = {name: sampler_of(name, num_epochs=1) for name in SIZES}
    loader = inline_loader(corpora(), MixtureSampler(samplers, WEIGHTS, stop="drop_exhausted"), PACK)
    rows = list(loader)
    assert len(rows) == len(loader) == sum(map(len, samplers.values()))
    tokens = np.concatenate([row["tokens"][row["tokens_segment_ids"] > 0] for row in rows])
    assert sorted(tokens.tolist()) == sorted(t for name in SIZES for d in documents(name) for t in d.tolist())


def test_a_document_that_is_not_as_planned_names_its_component() -> None:
    """An operation for one component only sees its documents; one that shortens them is an error that names it."""
    loader = inline_loader(corpora(), mixture(), OnlyFor("books", lambda document: document[:-1]), PACK)
    position = int(np.argmax(mixture().components(0, 24) == 1))
    with iter(loader) as iterator:
        for _ in range(position):
            next(iterator)
        with pytest.raises(ValueError, match="according to the sampler's lengths it has") as caught:
            next(iterator)
    assert any(f"(position {position}, component 'books')" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(
    ("samplers", "options", "message"),
    [
        ([PackingSampler([1], 3), PackingSampler([1], 4)], {}, "makes rows of 4, and that of component 0 rows of 3"),
        ([PackingSampler([1], 3), IndexSampler(4)], {}, "component 1 makes no rows, and that of component 0 rows of 3"),
        ([IndexSampler(4), PackingSampler([1], 3)], {}, "component 1 makes rows of 3, and that of component 0 no rows"),
        ([PackingSampler([1], 3)] * 2, {"source_lengths": [1, 2]}, "component 1 are of 1 documents, but source_length"),
    ],
)
def test_rows_that_do_not_go_together_are_refused(samplers: list[Any], options: Any, message: str) -> None:
    """Rows of different lengths, rows among records, and lengths of other documents are errors at construction."""
    with pytest.raises(ValueError, match=message):
        MixtureSampler(samplers, [1, 1], **options)


def test_rows_need_their_sources() -> None:
    """A loader refuses sources of another length, and a mixture of records has no pieces."""
    sources = [documents(name) for name in SIZES]
    with pytest.raises(ValueError, match="of component 'code' has 600 records, but it has 599"):
        inline_loader(ConcatenatedDataSource([*sources[:2], sources[2][1:]]), mixture(), PACK)
    without_rows = MixtureSampler([IndexSampler(3)], [1])
    for ask in (without_rows.segments_at, without_rows.lengths_at):
        with pytest.raises(TypeError, match="makes no rows: its components' samplers must be PackingSamplers"):
            ask(np.arange(2))
