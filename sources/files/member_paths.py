"""Paths of members of files, such as `train.h5/images`: the path or URL of a file, and a name in it.

Both may be patterns.
"""

import os
from collections.abc import Mapping

from millstream.sources.files.byte_files import exists
from millstream.sources.files.paths import GLOB, absolute_path, glob_paths, resolve_paths
from millstream.sources.remote.urls import Url, is_url


def split_paths(datasets: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Returns the files, and the pattern of the datasets of each column; both may be patterns."""
    files: dict[str, list[str]] = {}
    patterns: dict[str, str] = {}
    for name, path in datasets.items():
        files[name], patterns[name] = split_path(path)
        if not patterns[name]:
            raise ValueError(
                f"The path of a column must be that of a file and a dataset in it, such as 'train.h5/images', got "
                f"{path!r} for {name!r}."
            )
    first, *others = files
    for name in others:
        if files[name] != files[first]:
            raise ValueError(
                f"All columns must be in the same files, got {files[first]} for {first!r}, but {files[name]} for "
                f"{name!r}."
            )
    return files[first], patterns


def split_path(path: str) -> tuple[list[str], str]:
    """Returns the files that the beginning of a path selects, and its end: a name in them."""
    components = path.split("/")
    numbers = range(1, len(components) + 1)
    # A server of HTTP may answer for a folder, too.
    for number in reversed(numbers) if is_url(path) and not Url.of(path).can_list else numbers:
        if found := _matching_files("/".join(components[:number])):
            return list(found), "/".join(components[number:]).strip("/")
    raise FileNotFoundError(2, "No HDF5 file is at the beginning of the path", path)


def _matching_files(path: str) -> list[str]:
    """Returns the regular files or objects that a path, URL or pattern means, sorted."""
    name = absolute_path(path)
    if is_url(name):
        try:
            can_list = Url.of(name).can_list
        except ValueError:  # A bucket.
            return []
        if not GLOB.search(name):
            return [name] if exists(name) else []
        try:
            return [file.path for file in resolve_paths(name, "HDF5")] if can_list else []
        except FileNotFoundError:
            return []
    if os.path.isfile(name):  # noqa: PTH113
        return [name]
    return list(filter(os.path.isfile, glob_paths(path)))
