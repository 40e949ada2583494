"""Held-out parts: disjoint, stable when records are appended, and sources with all that the whole has."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream import MapDataset
from support.files.small_sources import image_folder

SHARES = (
    st.lists(st.integers(1, 8), min_size=1, max_size=4)
    .map(lambda some: {f"part{number}": share / 20 for number, share in enumerate(some)})
    .filter(lambda some: sum(some.values()) <= 1)
)


@settings(max_examples=60)
@given(shares=SHARES, seed=st.integers(0, 99), more=st.integers(0, 300), has_names=st.booleans())
def test_parts_are_disjoint_and_stable(*, shares: dict[str, float], seed: int, more: int, has_names: bool) -> None:
    """A record keeps its part when others are appended; shares hold in each run of 64; names are never divided."""
    names = np.random.default_rng(seed).integers(0, 200, 700 + more) if has_names else None
    small, large = (
        millstream.split(range(size), shares, seed=seed, by=None if names is None else names[:size])
        for size in (700, 700 + more)
    )
    assert list(small) == list(shares)
    taken = np.full(700 + more, "", "U9")
    for name, part in large.items():
        keys = np.array(list(part))
        assert (np.diff(keys) > 0).all()
        assert not taken[keys].any()
        taken[keys] = name
        assert list(small[name]) == keys[keys < 700].tolist()
        if names is None:
            counts = np.bincount(keys // 64)[: (700 + more) // 64]
            assert np.abs(counts - 64 * shares[name]).max() < 2
            assert abs(len(keys) - (700 + more) * shares[name]) < 32
    if names is not None:
        assert all(len(set(taken[names == name])) == 1 for name in set(names.tolist()))


def test_a_function_of_the_record_is_the_same_as_its_results_and_seeds_differ() -> None:
    """`by` may be a function; shares of many names are about as given; other seeds make other parts."""
    records = [{"speaker": f"s{number % 500}", "n": number} for number in range(2000)]
    shares = {"train": 0.8, "val": 0.2}
    by_call = millstream.split(records, shares, seed=0, by=lambda record: record["speaker"])
    by_name = millstream.split(records, shares, seed=0, by=[record["speaker"] for record in records])
    assert list(by_call["val"]) == list(by_name["val"])
    assert 0.15 < len(by_call["val"]) / 2000 < 0.25
    parts = [millstream.split(range(1000), shares, seed=seed)["val"] for seed in (0, 1)]
    assert len(set(parts[0]) & set(parts[1])) < 80


def test_names_keep_their_part_in_each_version_of_python() -> None:
    """Also names of characters that a version does not know yet, which `repr` escapes: here of Unicode 14 to 16."""
    names = ["ann", "Zoë", "李", "\u1c8a", "\U0001fae9", "\U00031350", "bob"]
    parts = millstream.split(range(7), {"a": 0.5, "b": 0.5}, seed=1, by=names)
    assert {name: list(part) for name, part in parts.items()} == {"a": [2, 5], "b": [0, 1, 3, 4, 6]}


def test_a_part_keeps_classes_files_and_units(tmp_path: Path) -> None:
    """Also after a map, in a mixture, of a part, and of joined parts; a chain that reorders has none: a key is none."""
    images = image_folder(tmp_path)
    parts = millstream.split(images, {"train": 0.5, "val": 0.5}, seed=0)
    part: Any = parts["val"].map(dict)[1:]
    assert part.classes == images.classes
    for position, record in enumerate(part):
        path, number = part.locate(position)
        assert (Path(path).read_bytes(), number) == (record["image"], 0)
    made = millstream.load({"a": part, "b": [1, 2]}, weights=[1, 1])
    located = made.locate([2, len(part)])
    assert (located[0].component, located[0].file) == ("a", part.locate(2)[0])
    assert (located[1].component, located[1].file, located[1].record) == ("b", None, 0)
    for wrong in (-1, len(part)):
        with pytest.raises(IndexError, match="record_key must be between 0 and"):
            part.locate(wrong)
    both: Any = MapDataset.concatenate([part[2:], part[:2]])
    assert both.classes == images.classes
    assert both.locate(0) == part.locate(2)
    others = MapDataset.concatenate([MapDataset.source([1, 2]), part])
    (found,) = millstream.load(others).locate([3])
    assert (found.component, found.file) == (1, part.locate(1)[0])
    assert not hasattr(others, "locate")
    shuffled: Any = parts["val"].shuffle(seed=0)
    assert not hasattr(shuffled, "locate")
    assert not hasattr(MapDataset.range(3), "classes")


def test_records_of_a_part_in_memory_have_their_keys_in_the_whole() -> None:
    """A held-out record is known by its number in the source, not in the part."""
    part = MapDataset.source(list("abcdef")).slice([5, 1, 3])
    assert [one.record for one in millstream.load(part).locate([0, 1, 2])] == [5, 1, 3]


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"shares": {"a": 0.9, "b": 0.2}}, ValueError, "shares must have a sum of at most 1, got 1.1"),
        ({"shares": {"a": 0}}, ValueError, "share of part 'a' must be above 0 and at most 1, got 0"),
        ({"shares": {"a": float("nan")}}, ValueError, "share of part 'a' must be above 0"),
        ({"shares": {"a": "much"}}, TypeError, "share of part 'a' must be a number, got 'much'"),
        ({"shares": [0.9, 0.1]}, TypeError, "shares must be a mapping from names to numbers"),
        ({"shares": {"a": 0.999, "b": 0.001}}, ValueError, "Part 'b' would have none of 40 records"),
        ({"seed": -1}, ValueError, "seed must be between"),
        ({"by": [1, 2]}, ValueError, r"by must have one name for each of the 40 records, got shape \(2,\)"),
        ({"by": np.ones(40)}, TypeError, "by must have integers or text, got an array of dtype float64"),
        ({"source": MapDataset.range(40).shuffle(seed=0)}, ValueError, "must have the same records in each epoch"),
        ({"source": MapDataset.range(40).repeat()}, ValueError, r"must have an end.* Split it before \.repeat\(\)"),
        ({"source": 4}, TypeError, "source"),
    ],
)
def test_what_cannot_be_split_is_refused(options: Any, error: type[Exception], text: str) -> None:
    """Each wrong argument has its rule and what to do."""
    with pytest.raises(error, match=text):
        millstream.split(**{"source": range(40), "shares": {"a": 0.5}, "seed": 0, **options})


def test_thirds_are_whole() -> None:
    """Shares that add up to 1 but for rounding leave no record out."""
    parts = millstream.split(range(300), dict.fromkeys("abc", 1 / 3), seed=0)
    assert sum(map(len, parts.values())) == 300
