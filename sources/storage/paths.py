"""Which files, and which of their records, a user's paths mean."""

import contextlib
import dataclasses
import datetime as dt
import errno
import glob
import operator
import os
import re
import stat
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

from millstream.errors import DataSourceError
from millstream.sources.storage.urls import Url, canonical, is_url, matching, without_query

_RANGE = re.compile(r"(.*)\[(\d+):(\d+)\]", re.DOTALL)
_MAGIC = re.compile(r"[*?[]")
_BROKEN_URL = re.compile(r"(gs|s3|az|https?):/[^/]")
"""What `pathlib` makes of a URL."""

RECORD_LIMIT = (1 << 63) - 1
"""No file or source has more records than this: their numbers are int64."""


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
        path: the file, absolute, with `~` expanded; or a URL.
        start: the number of the first record in the file, from 0.
        stop: the number after the last one, or None for the end of the file.
    """

    path: str
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        stop = self.start if self.stop is None else self.stop
        if not 0 <= self.start <= stop <= RECORD_LIMIT:
            raise ValueError(
                f"A range of records must have 0 <= start <= stop < 2**63, got [{self.start}:{self.stop}] of "
                f"{self.path!r}."
            )


class FileIdentity(NamedTuple):
    """Which file it is, and in which state: while none of these change, neither does the content.

    Attributes:
        device: the number of its device.
        inode: its number there.
        size: in bytes.
        modified: when it was last written to, in nanoseconds; for an object, a digest of the version.
        version: what the store of an object calls its state; empty for a local file.
        changed: when it, its name or its rights last changed, in nanoseconds (ctime): no program can set this back.
        owner: the user that it belongs to.
    """

    device: int
    inode: int
    size: int
    modified: int
    version: bytes = b""
    changed: int = 0
    owner: int = 0

    @property
    def content_state(self) -> tuple[int, ...] | bytes:
        """What differs for other content. The number of a device is left out: hosts that share a disk number it."""
        return self.version or (self.inode, self.size, self.modified, self.changed)

    @property
    def last_written(self) -> str:
        """When it was last written to, in words."""
        return str(dt.datetime.fromtimestamp(self.modified / 1e9, tz=dt.UTC))

    @classmethod
    def of(cls, path: str) -> "FileIdentity":
        """Returns the identity of the file that is now at the path.

        Raises:
            OSError: it cannot be found.
        """
        return cls._of_status(os.stat(path))  # noqa: PTH116  (the path is a string throughout)

    @classmethod
    def of_regular_file(cls, path: str, kind: str) -> "FileIdentity":
        """Returns the same; directories, pipes and devices are errors, and `kind` says which format was expected.

        Raises:
            FileNotFoundError, PermissionError, …: it cannot be found.
            IsADirectoryError: it is a directory.
            DataSourceError: it is a pipe, a socket or a device, which reading would wait for.
        """
        try:
            status = os.stat(path)  # noqa: PTH116
        except FileNotFoundError:
            raise FileNotFoundError(errno.ENOENT, f"No such {kind} file", path) from None
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(
                errno.EISDIR,
                f"{kind} sources read files: pass '{path.rstrip('/')}/*' or the like, not the directory",
                path,
            )
        if not stat.S_ISREG(status.st_mode):
            raise DataSourceError(
                f"{path!r} is a pipe, a socket or a device, not a regular file: its records cannot be read at random. "
                "Copy it to a file."
            )
        return cls._of_status(status)

    @classmethod
    def of_object(cls, size: int, version: bytes) -> "FileIdentity":
        """Returns the identity of an object of a store."""
        import hashlib  # noqa: PLC0415  (OpenSSL takes long to import)

        return cls(0, 0, size, int.from_bytes(hashlib.blake2b(version, digest_size=7).digest(), "big"), version)

    @classmethod
    def _of_status(cls, status: os.stat_result) -> "FileIdentity":
        return cls(
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            changed=status.st_ctime_ns,
            owner=status.st_uid,
        )


def resolve_paths(paths: Any, kind: str) -> list[FilePart]:
    """Returns the parts of files that the paths mean, in their order, absolute: a later `chdir` changes nothing.

    Only names that could be patterns or ranges are looked up; whether the others exist is not checked.

    Args:
        paths: one path, or several in an order. A path is a `str` or path-like object: a file, a pattern (`*`, `?`,
            `[…]`, `**`; its matches come sorted), or a file followed by a range of its records, `file[10:20]`. An
            existing file is that file, even if its name reads as a pattern or range. Instead of a path, an object with
            the attributes `filename`, `skip` and `take` will do. A `str` may be a URL, of `gs://`, `s3://`, `http://`
            or `https://`; those of the first two may be patterns too.
        kind: the name of the format, for errors.

    Raises:
        FileNotFoundError: nothing matches a pattern.
        PermissionError: the folder of a pattern may not be read.
        TypeError: something that is not a path, or a set of paths.
        ValueError: no paths, a range that ends before it starts, or a URL that names no object, is of another scheme,
            or is a pattern of HTTP, whose servers have no lists.
    """
    if isinstance(paths, str | os.PathLike | FileInstruction):
        return _resolve(paths, kind)
    if isinstance(paths, set | frozenset):
        raise TypeError(
            "paths must have an order, which is that of the records, but the order of a set differs between processes. "
            "Pass sorted(paths)."
        )
    if isinstance(paths, bytes) or not isinstance(paths, Iterable):
        raise TypeError(f"paths must be a path or a sequence of paths, got {type(paths).__name__}.")
    parts = [part for path in paths for part in _resolve(path, kind)]
    if not parts:
        raise ValueError("paths must name at least one file, got an empty sequence.")
    return parts


def _resolve(path: Any, kind: str) -> list[FilePart]:
    if isinstance(path, FileInstruction):
        skip, take = operator.index(path.skip), operator.index(path.take)
        return [FilePart(_absolute(os.fspath(path.filename)), skip, None if take == -1 else skip + take)]
    if not isinstance(path, str | os.PathLike):
        raise TypeError(
            "Each path must be a str, a path-like object, or an object with filename, skip and take, "
            f"got {type(path).__name__}."
        )
    name = _absolute(os.fsdecode(path))
    if is_url(name):
        return _resolve_url(name, kind)
    if not isinstance(path, str) and _BROKEN_URL.match(os.fspath(path)):
        raise ValueError("URLs must be str, because `pathlib` takes a slash out of them. Pass the str itself.")
    if not _MAGIC.search(name) or os.path.exists(name):  # noqa: PTH110
        return [FilePart(name)]
    if match := _RANGE.fullmatch(name):
        return [FilePart(match[1], int(match[2]), int(match[3]))]
    return [FilePart(match) for match in _matches(name, kind)]


def _resolve_url(name: str, kind: str) -> list[FilePart]:
    """Returns the parts that a URL means."""
    match = _RANGE.fullmatch(name)
    path, start, stop = (match[1], int(match[2]), int(match[3])) if match else (name, 0, None)
    url = Url.of(path)
    path = canonical(path)
    if not _MAGIC.search(url.key):
        return [FilePart(path, start, stop)]
    if not url.can_list:
        if "*" not in url.key:
            return [FilePart(path, start, stop)]
        raise ValueError(
            f"HTTP servers do not list their files: pass the URLs one by one, not a pattern, got {path!r}. (A `*` "
            "that is part of a name is `%2A`.)"
        )
    root = f"{url.scheme}://{url.root}/"
    from millstream.sources.storage.object_stores import keys_within  # noqa: PLC0415  (for those who read from stores)

    keys = keys_within(url._replace(key=_MAGIC.split(url.key)[0]))
    if url.key in keys:
        return [FilePart(path, start, stop)]
    matches = matching(keys, url.key)
    if not matches:
        raise FileNotFoundError(errno.ENOENT, f"No {kind} file matches the pattern", path)
    return [FilePart(root + key, start, stop) for key in matches]


def _absolute(name: str) -> str:
    name = os.path.expanduser(name)  # noqa: PTH111  (Path would drop a trailing slash, `./`, `//`)
    if os.path.isabs(name) or is_url(name):  # noqa: PTH117
        return name
    # Not abspath: it would remove a link's name together with a `..` after it.
    return os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH118


def _matches(pattern: str, kind: str) -> list[str]:
    """Returns the files that match, sorted; an error if there are none, or if a folder may not be read."""
    matches = sorted(set(glob.glob(pattern, recursive=True)))  # noqa: PTH207
    if not matches:
        folder = os.path.dirname(_MAGIC.split(pattern)[0])  # noqa: PTH120
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.scandir(folder).close()  # Raises if it may not be read: `glob` has hidden that.
        raise FileNotFoundError(errno.ENOENT, f"No {kind} file matches the pattern", pattern)
    return matches


def names_within_common_folder(paths: Sequence[str]) -> list[str]:
    """Returns the paths without the folder that holds all of the files."""
    # The root of a store is as good as one of a disk, and a bucket as good as a folder.
    rooted = [f"/{without_query(path)}" if is_url(path) else path for path in paths]
    normal = [os.path.normpath(path) for path in rooted]
    folder = os.path.commonpath([os.path.dirname(path) for path in normal])  # noqa: PTH120
    return [path[len(folder) :].lstrip(os.sep) for path in normal]
