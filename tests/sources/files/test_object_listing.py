"""Lists of objects in buckets: several folders at a time, and all objects exactly once."""

import pytest

from millstream.errors import DataSourceError
from millstream.sources import FileDataSource
from millstream.sources.files import progress
from millstream.sources.files.paths import list_keys
from millstream.sources.remote.urls import Url
from support.stores.object_server import ObjectServer

pytestmark = pytest.mark.third_party

FOLDERS = [f"speaker {number:02d}%20#ü" for number in range(16)]


def fill(store: ObjectServer, folders: list[str], count: int) -> list[str]:
    """Puts objects into each folder of `bucket/train`, and returns the names of all, sorted."""
    names = sorted(f"train/{folder}/{number}.flac" for folder in folders for number in range(count))
    store.objects.update((f"bucket/{name}", b"x") for name in names)
    return names


@pytest.mark.parametrize("scheme", ["s3", "gs", "az"])
def test_large_folders_are_listed_together(store: ObjectServer, scheme: str) -> None:
    """One request finds that folders are large, one finds the folders, and all of these are in flight together."""
    names = [*fill(store, FOLDERS, 70), "train/z.flac"]
    store.objects["bucket/train/z.flac"] = b"x"
    store.objects["bucket/other/z.flac"] = b"x"
    store.on_headers = lambda _: setattr(store, "gathering", len(FOLDERS) * (len(store.requests) >= 2))

    assert sorted(list_keys(Url(scheme, "bucket", "train/"))) == names
    assert len(store.requests) == 2 + len(FOLDERS)
    assert store.most_at_once == len(FOLDERS)


def test_each_construction_lists_again(store: ObjectServer) -> None:
    """New objects, folders and deletions are seen; order and fingerprint are those of a list of names, without one."""
    names = fill(store, FOLDERS, 70)
    pattern = "s3://bucket/train/**/*.flac"
    before = FileDataSource(pattern)
    del store.objects[f"bucket/{names[100]}"]
    store.objects["bucket/train/new/1.flac"] = store.objects["bucket/train/new.flac"] = b"x"
    after = FileDataSource(pattern)

    expected = sorted([*names[:100], *names[101:], "train/new/1.flac", "train/new.flac"])
    assert [before.locate(key)[0] for key in range(len(before))] == [f"s3://bucket/{name}" for name in names]
    assert [after.locate(key)[0] for key in range(len(after))] == [f"s3://bucket/{name}" for name in expected]
    store.forget()
    assert before.fingerprint() == FileDataSource([f"gs://bucket/{name}" for name in names]).fingerprint()
    assert store.requests == []
    assert after.fingerprint() != before.fingerprint()


@pytest.mark.parametrize(("folders", "count"), [(400, 3), (1, 2500)])
def test_small_folders_and_a_single_one_are_listed_by_pages(store: ObjectServer, folders: int, count: int) -> None:
    """A request per folder would take more requests than pages, and is not made."""
    names = fill(store, [f"{number:03d}" for number in range(folders)], count)
    prefix = "train/" if folders > 1 else "train/000/"

    assert sorted(list_keys(Url("s3", "bucket", prefix))) == names
    assert len(store.requests) == -(-len(names) // 1000)


def test_only_folders_that_the_pattern_allows_are_listed(store: ObjectServer) -> None:
    """Folders at the beginning of the pattern that cannot match take no request."""
    names = fill(store, [f"{letter}{number}" for letter in "ab" for number in range(4)], 300)
    store.forget()

    assert len(FileDataSource("s3://bucket/train/b*/*.flac")) == sum("/b" in name for name in names)
    assert {request.key for request in store.requests} == {"bucket/train/", *(f"bucket/train/b{n}/" for n in range(4))}


@pytest.mark.parametrize("failing", ["bucket/train/", f"bucket/train/{FOLDERS[5]}/"])
def test_a_folder_that_cannot_be_listed_is_an_error(store: ObjectServer, failing: str) -> None:
    """No list is shorter silently because one of its requests was refused."""
    fill(store, FOLDERS, 70)
    store.failure = lambda request: 403 if request.key == failing else None

    with pytest.raises(DataSourceError, match=r"s3://bucket/train/.* 403 Forbidden"):
        FileDataSource("s3://bucket/train/**/*.flac")


def test_a_long_list_reports_its_progress(
    store: ObjectServer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The log has the number of objects so far, by which a slow store differs from a hanging one."""
    monkeypatch.setattr(progress, "SHOW_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(progress, "LOG_EVERY_SECONDS", 0.0)
    fill(store, ["a"], 2500)
    with caplog.at_level("INFO", "millstream"):
        list_keys(Url("s3", "bucket", "train/a/"))
    assert caplog.messages == [
        f"Listing 's3://bucket/train/a/': {count} objects" for count in ("1,000", "2,000", "2,500")
    ]
