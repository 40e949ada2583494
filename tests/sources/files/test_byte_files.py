"""Spans that are read together if they are near each other; the parts of URLs, and the names that a pattern means."""

import contextlib
import glob
import itertools
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from millstream.sources.files.byte_files import LocalFile
from millstream.sources.remote import object_stores
from millstream.sources.remote.object_stores import join_near
from millstream.sources.remote.urls import Url, is_url, matching

SIZE = 3 << 20
LENGTH = 24
RNG = np.random.default_rng(0)
STARTS = {
    "adjacent": np.arange(64) * LENGTH + 5,
    "one": np.array([77]),
    "backwards": np.arange(64)[::-1] * LENGTH,
    "overlapping": np.arange(64) * (LENGTH - 1),
    "repeated": np.full(64, 9),
    "a window": RNG.permutation(512)[:64] * LENGTH,
    "two adjacent ones in the wrong order": np.array([LENGTH, 0]),
    "more bytes than are read together": np.arange(64) * 16_000,
    "far": RNG.permutation(SIZE - LENGTH)[:64],
    "at the end": np.array([SIZE - 2 * LENGTH, SIZE - LENGTH]),
}
ALONE = {"more bytes than are read together", "far"}


@pytest.mark.parametrize("name", STARTS)
def test_near_spans_are_read_by_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The bytes are those of the file, in the order of the spans; far ones take a call each."""
    content = RNG.integers(0, 256, SIZE, dtype=np.uint8)
    content.tofile(tmp_path / "a")
    starts = STARTS[name].tolist()
    rows = np.zeros((len(starts), LENGTH), np.uint8)
    preadv = os.preadv
    calls: list[int] = []

    def noted(descriptor: int, buffers: Any, offset: int) -> int:
        calls.append(offset)
        return preadv(descriptor, buffers, offset)

    monkeypatch.setattr(os, "preadv", noted)
    with contextlib.closing(LocalFile(str(tmp_path / "a"))) as file:
        assert file.read_into(starts, rows) == [LENGTH] * len(starts)
    assert rows.tolist() == [content[start : start + LENGTH].tolist() for start in starts]
    assert len(calls) == (len(starts) if name in ALONE else 1)


@given(st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 60)), max_size=60))
def test_spans_are_joined_where_that_costs_little(spans: list[tuple[int, int]]) -> None:
    """Each span that is not empty is in one request; requests are in order, far apart, and not long."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(object_stores, "_NEAR_BYTES", 10)
        patch.setattr(object_stores, "_REQUEST_BYTES", 100)
        joined = join_near([start for start, _ in spans], [length for _, length in spans])

    assert sorted(place for part in joined for place in part.spans) == [
        place for place, (_, length) in enumerate(spans) if length
    ]
    for part in joined:
        inside = [spans[place] for place in part.spans]
        assert part.start == min(start for start, _ in inside)
        assert part.stop == max(start + length for start, length in inside)
        assert part.stop - part.start <= 100
    for one, other in itertools.pairwise(joined):
        longest = max(spans[place][1] for place in other.spans)
        assert other.start - one.stop > 10 or other.start + longest - one.start > 40


NAMES = ["a", "b", "ab", "a1", "b2", "d/a", "d/ab", "d/e/a", "e/a.txt", "[a]", "a-b"]


@pytest.fixture(scope="module")
def tree(folder: Path) -> Path:
    """A folder with files of the names."""
    for name in NAMES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder


@given(st.lists(st.sampled_from(["a", "b", "*", "?", "**/", "/", "[ab]", "[!a]", "d/", "1", "-", ".txt"]), min_size=1))
@example(["*", "*", "a"])
@example(["d", "[!a]", "e", "[!b]", "a"])
def test_patterns_mean_what_they_mean_for_files(tree: Path, pieces: list[str]) -> None:
    """The oracle is `glob` on files of these names."""
    pattern = "".join(pieces)
    if "//" in pattern or pattern.startswith("/") or pattern.endswith("/"):
        return  # There is no such thing in the names of files.
    found = glob.glob(pattern, root_dir=tree, recursive=True)  # noqa: PTH207
    assert matching(NAMES, pattern) == sorted({name for name in found if (tree / name).is_file()})


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("gs://bucket/a%20b/c d", Url("gs", "bucket", "a%20b/c d")),
        ("s3://bucket/a?b=c", Url("s3", "bucket", "a?b=c")),
        ("HTTP://Host:80/a%20b?c=d", Url("http", "Host:80?c=d", "/a b")),
    ],
)
def test_the_parts_of_a_url(url: str, parts: Url) -> None:
    """Names in buckets are taken as they are; paths of HTTP are decoded. Other names are files."""
    assert is_url(url)
    assert Url.of(url) == parts
    assert not any(map(is_url, ["a", "/a", "a:/b", "C:\\a", "a b://c", "://a"]))
