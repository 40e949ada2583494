"""Which spans of an object one request asks for, and which names a pattern means."""

import glob
import itertools
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.sources.remote import object_stores
from millstream.sources.remote.object_stores import join_near
from millstream.sources.remote.urls import Url, is_url, matching


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


@given(st.lists(st.sampled_from(["a", "b", "*", "?", "**/", "/", "[ab]", "[!a]", "d/", "1", "-", ".txt"]), min_size=1))
def test_patterns_mean_what_they_mean_for_files(pieces: list[str]) -> None:
    """The oracle is `glob` on files of these names."""
    pattern = "".join(pieces)
    if "//" in pattern or pattern.startswith("/") or pattern.endswith("/"):
        return  # There is no such thing in the names of files.
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(TREE)
        expected = sorted(
            {name for name in glob.glob(pattern, recursive=True) if os.path.isfile(name)}  # noqa: PTH113, PTH207
        )
    assert matching(NAMES, pattern) == expected


TREE = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def tree(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Makes files of the names."""
    global TREE  # noqa: PLW0603  (hypothesis gives no fixture to its examples)
    TREE = tmp_path_factory.mktemp("tree")
    for name in NAMES:
        (TREE / name).parent.mkdir(parents=True, exist_ok=True)
        (TREE / name).touch()


@pytest.mark.parametrize(
    ("url", "parts"),
    [
        ("gs://bucket/a%20b/c d", Url("gs", "bucket", "a%20b/c d")),
        ("s3://bucket/a?b=c", Url("s3", "bucket", "a?b=c")),
        ("HTTP://Host:80/a%20b?c=d", Url("http", "Host:80?c=d", "/a b")),
    ],
)
def test_the_parts_of_a_url(url: str, parts: Url) -> None:
    """Names in buckets are taken as they are; paths of HTTP are decoded."""
    assert is_url(url)
    assert Url.of(url) == parts


@pytest.mark.parametrize("path", ["a", "/a", "a:/b", "C:\\a", "a b://c", "://a"])
def test_what_is_no_url(path: str) -> None:
    """Such names are files."""
    assert not is_url(path)
