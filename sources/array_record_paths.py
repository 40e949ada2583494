"""Which ArrayRecord files, and which records of them, a user's paths mean."""

import dataclasses
import errno
import glob
import os
import re
from collections.abc import Iterable
from typing import Any, Protocol, runtime_checkable

_RANGE = re.compile(r"(.*)\[(\d+):(\d+)\]", re.DOTALL)


@runtime_checkable
class FileInstruction(Protocol):
    """Some records of one file, as TensorFlow Datasets describes them: `take` records after the first `skip`.

    A `take` of -1 takes all that remain.
    """

    filename: str
    skip: int
    take: int


@dataclasses.dataclass(frozen=True, slots=True)
class FilePart:
    """The records [start, stop) of one file.

    Attributes:
        path: the file, with `~` expanded.
        start: the number of the first record in the file, from 0.
        stop: the number after the last one, or None for the end of the file.
    """

    path: str
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        if self.start < 0 or (self.stop is not None and self.stop < self.start):
            raise ValueError(
                f"A range of records must have 0 <= start <= stop, got [{self.start}:{self.stop}] of {self.path!r}."
            )


def resolve_paths(paths: Any) -> list[FilePart]:
    """Returns the parts of files that the paths mean, in their order; all files exist.

    Args:
        paths: one path or several. A path is a `str` or path-like object: a file, a pattern (`*`, `?`, `[…]`, `**`;
            its matches come sorted), or a file followed by a range of its records, `file[10:20]`. An existing file
            wins over its name's reading as a pattern or range. Instead of a path, an object with the attributes
            `filename`, `skip` and `take` will do.

    Raises:
        FileNotFoundError: no such file, or nothing matches.
        IsADirectoryError: a directory instead of a file.
        TypeError: something that is no path.
        ValueError: an empty sequence, or a range that ends before it starts.
    """
    if isinstance(paths, str | os.PathLike | FileInstruction):
        return _resolve(paths)
    if isinstance(paths, bytes) or not isinstance(paths, Iterable):
        raise TypeError(f"paths must be a path or a sequence of paths, got {type(paths).__name__}.")
    parts = [part for path in paths for part in _resolve(path)]
    if not parts:
        raise ValueError("paths must name at least one file, got an empty sequence.")
    return parts


def _resolve(path: Any) -> list[FilePart]:
    if isinstance(path, FileInstruction):
        stop = None if path.take == -1 else path.skip + path.take
        return [FilePart(_existing_file(os.fspath(path.filename)), path.skip, stop)]
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            "Each path must be a str, a path-like object, or an object with filename, skip and take, "
            f"got {type(path).__name__}."
        )
    name = os.path.expanduser(os.fsdecode(path))  # noqa: PTH111  (Path would drop a trailing slash, `./`, `//`)
    if os.path.exists(name):  # noqa: PTH110
        return [FilePart(_existing_file(name))]
    if match := _RANGE.fullmatch(name):
        return [FilePart(_existing_file(match[1]), int(match[2]), int(match[3]))]
    if glob.has_magic(name):
        matches = sorted(glob.glob(name, recursive=True))  # noqa: PTH207
        if not matches:
            raise FileNotFoundError(errno.ENOENT, "No ArrayRecord file matches the pattern", name)
        return [FilePart(_existing_file(match)) for match in matches]
    return [FilePart(_existing_file(name))]


def _existing_file(path: str) -> str:
    """Returns the path of a file that exists; directories and absent files are errors."""
    name = os.path.expanduser(path)  # noqa: PTH111
    if os.path.isdir(name):  # noqa: PTH112
        raise IsADirectoryError(
            errno.EISDIR,
            f"An ArrayRecord source reads files: pass '{name.rstrip('/')}/*' or the like, not the directory",
            name,
        )
    if not os.path.exists(name):  # noqa: PTH110
        remote = " (only local and mounted files can be read)" if "://" in name else ""
        raise FileNotFoundError(errno.ENOENT, f"No such ArrayRecord file{remote}", name)
    return name
