"""Composition and origins of steps: what a count over `record_keys` and the files themselves say."""

import collections
import contextlib
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream import (
    BalancedSampler,
    ConcatenatedDataSource,
    HierarchicalSampler,
    IndexSampler,
    MixtureSampler,
    PackingSampler,
    ShardOptions,
)
from millstream.loader.pipeline import order
from support.documents.html_pages import Page

ROW_LENGTH = 8


@st.composite
def loaders(draw: st.DrawFn) -> tuple[list[millstream.DataLoader], list[int], bool]:
    """Draws the loaders of all shards of one pipeline, the lengths of its records, and whether it packs them."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    tokens = draw(st.lists(st.integers(1, ROW_LENGTH), min_size=sum(sizes), max_size=sum(sizes)))
    starts = np.cumsum([0, *sizes])
    documents = [{"tokens": np.full(length, key)} for key, length in enumerate(tokens)]
    parts = [documents[start : start + size] for start, size in zip(starts[:-1], sizes, strict=True)]
    is_packed, is_mixed = draw(st.booleans()), draw(st.booleans())
    num_epochs = draw(st.none() | st.integers(1, 3))

    def order_of(lengths: list[int], seed: int) -> Any:
        if is_packed:
            strategy = "concat_then_split" if seed % 2 else "best_fit"
            return PackingSampler(
                lengths, ROW_LENGTH, shuffle=True, seed=seed, num_epochs=num_epochs, strategy=strategy
            )
        if draw(st.booleans()):
            units = [1 + len(lengths) // 2, len(lengths) - 1 - len(lengths) // 2]
            return HierarchicalSampler(units, window_units=1, seed=seed, num_epochs=num_epochs)
        return IndexSampler(len(lengths), shuffle=True, seed=seed, num_epochs=num_epochs)

    seed = draw(st.integers(0, 9))
    sampler = order_of(tokens, seed)
    if is_mixed:
        parts_of_order = [order_of(tokens[starts[n] : starts[n + 1]], seed + n) for n in range(len(sizes))]
        weights = draw(st.lists(st.integers(1, 5), min_size=len(sizes), max_size=len(sizes)))
        stop = draw(st.sampled_from(["first_exhausted", "all_exhausted", "drop_exhausted"]))
        sampler = MixtureSampler(parts_of_order, weights, stop=stop, source_lengths=sizes)
        position = draw(st.integers(1, 20))
        if sampler.length is None or position <= sampler.length:
            sampler = sampler.reweighted(position, weights[::-1])
    shards, batch = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    if draw(st.booleans()):
        sampler = BalancedSampler(sampler, costs=tokens, global_batch_size=shards * batch, parts=shards)
    operations = [millstream.Pack({"tokens": ROW_LENGTH})] * is_packed
    drop, pad = draw(st.sampled_from([(False, False), (True, False), (False, True)]))
    with pytest.MonkeyPatch.context() as patch:
        # Orders of a few rows have many epochs in the usual look-ahead, each of which takes a millisecond.
        patch.setattr(order, "CHUNK_KEYS", 32)
        made = [
            millstream.DataLoader(
                data_source=ConcatenatedDataSource(parts),
                sampler=sampler,
                operations=[*operations, millstream.Batch(batch, drop_remainder=drop, pad_remainder=pad)],
                shard_options=ShardOptions(index, shards),
            )
            for index in range(shards)
        ]
    return made, tokens, is_packed


@settings(max_examples=30)
@given(drawn=loaders(), start=st.integers(0, 4), width=st.integers(0, 9))
def test_the_composition_is_a_count_over_record_keys(
    drawn: tuple[list[millstream.DataLoader], list[int], bool], start: int, width: int
) -> None:
    """Documents, tokens and shares of each component, of all shards, on loaders that were never iterated over."""
    parts, tokens, is_packed = drawn
    source: Any = parts[0].data_source
    keys: list[int] = []
    for part, step in itertools.product(parts, range(start, start + width)):
        with contextlib.suppress(IndexError):
            keys += part.record_keys(step).tolist()
    composition = parts[0].composition(start, start + width, lengths=None if is_packed else tokens)

    documents = collections.Counter(source.locate(keys)[0].tolist() if keys else [])
    assert [count.documents for count in composition.components.values()] == [documents[name] for name in source.names]
    counted = collections.Counter[int]()
    if is_packed:
        for batch in (batch for part in parts for batch in itertools.islice(part, start, start + width)):
            rows, mask = (
                (batch.batch, batch.mask) if isinstance(batch, millstream.PaddedBatch) else (batch, slice(None))
            )
            # A token is the key of its document.
            delivered = rows["tokens"][mask][rows["tokens_segment_ids"][mask] > 0]
            counted.update(source.locate(delivered)[0].tolist())
    else:
        for key in keys:
            counted[source.locate([key])[0].item()] += tokens[key]
    assert [count.tokens for count in composition.components.values()] == [counted[name] for name in source.names]
    shares = [count.share for count in composition.components.values()]
    assert shares == pytest.approx([counted[name] / max(1, sum(counted.values())) for name in source.names])
    assert composition.as_dict()[0]["documents"] == documents.get(0, 0)
    assert parts[-1].composition(start, start + width, lengths=None if is_packed else tokens) == composition


def test_epochs_are_passes_over_each_component() -> None:
    """12 batches of 8 records at 3:1 are 72 of a component of 24 and 24 of one of 12, in table and picture."""
    corpora = {"web": range(24), "<b>": range(12)}
    loader = millstream.load(corpora, weights={"web": 3, "<b>": 1}, shuffle=True, seed=0, batch_size=8)
    composition = loader.composition(0, 12)

    assert composition.components["web"] == (72, None, 3.0, 0.75)
    assert composition.components["<b>"] == (24, None, 2.0, 0.25)
    text = Page(composition._repr_html_()).text
    assert all(words in text for words in ("steps 0 to 12", "web 75.0%", "<b> 25.0%", *str(composition).split()))
    assert str(composition).splitlines() == [
        "steps 0 to 12",
        "component  documents  epochs   share",
        "web               72    3.00   75.0%",
        "<b>               24    2.00   25.0%",
        "total             96          100.0%",
    ]


def test_a_mixture_is_counted_without_its_positions() -> None:
    """A billion steps take no longer than one: a count position by position would take minutes."""
    loader = millstream.load(
        {"web": range(10**9), "books": range(10**9)},
        weights={"web": 2, "books": 1},
        shuffle=True,
        seed=0,
        batch_size=300,
    )

    composition = loader.composition(0, 10**9)

    assert [count.documents for count in composition.components.values()] == [2 * 10**11, 10**11]


def test_records_are_located_in_component_and_file(tmp_path: Path) -> None:
    """Each line is at its number in its file, also in nested sources; a whole file is its record 0."""
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text("".join(f"{name}{line}\n" for line in range(4)))
    web = millstream.TextLineDataSource([tmp_path / "a.txt[1:3]", tmp_path / "b.txt"])
    nested = ConcatenatedDataSource({"new": millstream.TextLineDataSource(tmp_path / "c.txt"), "old": ["x", "y"]})
    files = millstream.FileDataSource([tmp_path / "a.txt", tmp_path / "c.txt"])
    source = ConcatenatedDataSource({"web": web, "books": nested, "files": files})
    loader = millstream.load(source, num_epochs=1)
    origins = loader.locate(range(len(source)))

    for key, (component, file, number) in enumerate(origins):
        record = source[key]
        if component == "files":
            assert (record["path"], 0) == (file, number)
        elif file is None:
            assert (component, ["x", "y"][number]) == ("books/old", record)
        else:
            assert record == Path(file).read_text().splitlines()[number]
            assert component == ("books/new" if file.endswith("c.txt") else "web")
    assert [origin.component for origin in origins] == ["web"] * 6 + ["books/new"] * 4 + ["books/old"] * 2 + [
        "files"
    ] * 2
    assert millstream.load(web, num_epochs=1).locate(np.array([0])) == [(None, str(tmp_path / "a.txt"), 1)]
    with pytest.raises(IndexError, match="keys must be between 0 and 13, the last record, got 14"):
        loader.locate([0, 14])


def test_questions_without_an_answer_say_why() -> None:
    """An endless order without a stop, steps in the wrong order, lengths that do not fit, and a Filter."""
    loader = millstream.load(range(6), batch_size=2, num_epochs=None)
    with pytest.raises(ValueError, match="stop must be given for an endless order"):
        loader.composition()
    with pytest.raises(ValueError, match="start must be at most stop, which is 2, got 3"):
        loader.composition(3, 2)
    with pytest.raises(ValueError, match="lengths must have a number for each of the 6 records, got 2"):
        loader.composition(0, 2, lengths=[1, 2])
    filtered = millstream.load(range(6), transformations=[millstream.Filter(bool)])
    with pytest.raises(TypeError, match=r"composition\(start, stop\) needs a 1:1 pipeline"):
        filtered.composition(0, 2)
    packing = PackingSampler([3, 4], 8)
    rows = millstream.DataLoader(
        data_source=[np.zeros(3), np.zeros(4)], sampler=packing, operations=[millstream.Pack({"tokens": 8})]
    )
    with pytest.raises(ValueError, match="lengths must be left out for packed rows"):
        rows.composition(0, 1, lengths=[3, 4])
