"""Lists of the objects in buckets and datasets.

Stores list 1,000 objects per request, and the next request needs the response of the last one. Different folders are
listed concurrently.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, final

from millstream.sources.remote import hugging_face_hub
from millstream.sources.remote.object_clients import check_process, exceptions, obstore, store_of
from millstream.sources.remote.object_stores import error_for, request_threads, wait_for
from millstream.sources.remote.urls import Url
from millstream.sources.storage.progress import Progress

_PAGE = 1000
"""The number of objects that stores list per request."""

_KEYS_PER_FOLDER = 50
"""Folders of a bucket are listed one by one, concurrently, if the first ones have this many objects on average.

The requests are then at most 20 times as many as for the whole bucket.
"""


def list_keys(prefix: Url) -> list[str]:
    """Returns the keys of all objects of a bucket or dataset that begin with that of `prefix`, which may be empty.

    They have no order, because several folders of a bucket are listed together.
    """
    url = f"{prefix.scheme}://{prefix.root}/{prefix.key}"
    # Stores list whole folders, so the last part of the prefix is compared here.
    folder = prefix.key.rpartition("/")[0]
    try:
        if prefix.scheme == "hf":
            check_process(url)
            keys = wait_for(request_threads().submit(hugging_face_hub.list_files, prefix.root, folder), url, 0)
        else:
            keys = _list_folders(url, [_Folder(store_of(url, prefix), folder, prefix.key)])
    except exceptions().BaseError as error:
        raise error_for(url, error) from None
    return [key for key in keys if key.startswith(prefix.key)]


def _list_folders(url: str, folders: list["_Folder"]) -> list[str]:
    keys: list[str] = []
    with contextlib.closing(Progress(f"Listing {url!r}", None, "objects")) as progress:
        while folders:
            futures = [request_threads().submit(folder.read) for folder in folders]
            try:
                pages = [wait_for(future, url, 0) for future in futures]
            finally:
                for future in futures:
                    future.cancel()
            found = [key for page, _ in pages for key in page]
            keys += found
            progress.advance(len(found))
            folders = [folder for _, remaining in pages for folder in remaining]
    return keys


@final
class _Folder:
    """A folder of a bucket that is being listed."""

    def __init__(self, store: Any, path: str, prefix: str) -> None:
        self._store = store
        self._path = path
        self._prefix = prefix
        self._pages = obstore().list(store, prefix=path or None, chunk_size=_PAGE)
        self._is_new = True

    def read(self) -> tuple[list[str], list["_Folder"]]:
        """Returns the keys of the next page, and the folders that remain to be listed."""
        page = [meta["path"] for meta in next(self._pages, ())]
        if len(page) < _PAGE:
            return page, []
        if not self._is_new or not self._has_large_folders(page):
            self._is_new = False
            return page, [self]
        listed = obstore().list_with_delimiter(self._store, self._path or None)
        paths = [path for path in listed["common_prefixes"] if f"{path}/".startswith(self._prefix)]
        return [meta["path"] for meta in listed["objects"]], [_Folder(self._store, path, "") for path in paths]

    def _has_large_folders(self, page: Sequence[str]) -> bool:
        start = len(self._path) + bool(self._path)
        folders = {key[start:].partition("/")[0] for key in page if "/" in key[start:]}
        return 0 < len(folders) * _KEYS_PER_FOLDER <= len(page)
