"""The paths of HDF5 datasets: the path or URL of a file, followed by the name of a dataset. Both may be patterns."""

import glob
import os
from collections.abc import Mapping

from millstream.sources.storage.byte_files import exists
from millstream.sources.storage.paths import resolve_paths
from millstream.sources.storage.urls import Url, is_url


def has_magic(name: str) -> bool:
    """Returns True if a name is a pattern."""
    return any(character in name for character in "*?[")


def split_paths(datasets: Mapping[str, str]) -> tuple[list[str], dict[str, str]]:
    """Returns the files, and the pattern of the datasets of each column.

    Args:
        datasets: the path of a file followed by the name of a dataset, by column. Both may be patterns.

    Raises:
        FileNotFoundError: no file is at the beginning of a path.
        ValueError: a path has no name of a dataset, or columns have different files.
    """
    files: dict[str, list[str]] = {}
    patterns: dict[str, str] = {}
    for name, path in datasets.items():
        components = path.split("/")
        numbers = range(1, len(components) + 1)
        # A server of HTTP may answer for a folder, too.
        for number in reversed(numbers) if is_url(path) and not Url.of(path).can_list else numbers:
            if found := _matching_files("/".join(components[:number])):
                break
        else:
            raise FileNotFoundError(2, "No HDF5 file is at the beginning of the path", path)
        files[name], patterns[name] = list(found), "/".join(components[number:]).strip("/")
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


def _matching_files(path: str) -> list[str]:
    """Returns the regular files or objects that a path, URL or pattern means, sorted."""
    if is_url(path):
        try:
            can_list = Url.of(path).can_list
        except ValueError:  # A bucket.
            return []
        if not has_magic(path):
            return [path] * exists(path)
        try:
            return [part.path for part in resolve_paths(path, "HDF5")] if can_list else []
        except FileNotFoundError:
            return []
    if os.path.isfile(path) or not has_magic(path):  # noqa: PTH113
        return [path] * os.path.isfile(path)  # noqa: PTH113
    return sorted(filter(os.path.isfile, glob.glob(path)))  # noqa: PTH207
