"""The files, and the ranges of their records, that the paths of a user select, on disks and in buckets.

Stores list 1,000 objects per request, and the next request needs the response of the last one. Different folders are
listed concurrently.
"""

import contextlib
import dataclasses
import datetime as dt
import errno
import glob
import operator
import os
import re
import stat
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, final, runtime_checkable

from millstream.core.checks import is_listed
from millstream.errors import DataSourceError
from millstream.sources.digests import digest
from millstream.sources.files.progress import Progress
from millstream.sources.remote import object_clients
from millstream.sources.remote.object_clients import check_process, exceptions, obstore, store_of
from millstream.sources.remote.object_stores import error_for, request_threads, wait_for
from millstream.sources.remote.urls import Url, canonical, is_url, matching, with_other_name, without_query

_RANGE = re.compile(r"(.*)\[(\d+):(\d+)\]", re.DOTALL)
_BRACES = re.compile(r"\{([^{}/]*,[^{}/]*)\}")
GLOB = re.compile(r"[*?[]|" + _BRACES.pattern.replace("(", "").replace(")", ""))
"""The characters of a glob, and the names in braces."""

_BROKEN_URL = re.compile(r"(gs|s3|az|hf|https?):/[^/]")
"""The form of a URL after a conversion by `pathlib`."""

RECORD_LIMIT = (1 << 63) - 1
"""Limit of the number of records of a file or source, because record keys are int64."""


@runtime_checkable
class FileInstruction(Protocol):
    """A range of records of one file, as in TensorFlow Datasets: `take` records after the first `skip`.

    A `take` of -1 selects all remaining records.
    """

    filename: str
    skip: int
    take: int


def member_path(folder: str, name: str) -> str:
    """Returns the path of a file that a description in its folder names. The query of a signed URL is for both.

    Raises:
        ValueError: the file is outside the folder. The description is data, which anyone may have written.
    """
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"it names {name!r}, which is not in its folder")
    return with_other_name(folder, lambda path: f"{path.rstrip('/')}/{name}")


@dataclasses.dataclass(frozen=True, slots=True)
class FileRange:
    """The records [start, stop) of one file: an absolute path, or a URL. A `stop` of None is the end of the file."""

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
    """The identity and state of a file. If none of it changes, the content is the same.

    Attributes:
        device: the number of the device.
        inode: the number of the file on the device.
        size: the size in bytes.
        modified: the time of the last write, in nanoseconds; for an object, a digest of the version.
        version: the store's name for the version of an object; empty for a local file.
        changed: the time of the last change of content, name or permissions, in nanoseconds (ctime). No program can
            reset it.
        owner: the user ID of the owner.
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
        """A value that differs for other content. The device is omitted, because hosts number disks differently."""
        return self.version or (self.inode, self.size, self.modified, self.changed)

    @property
    def last_written(self) -> str:
        return str(dt.datetime.fromtimestamp(self.modified / 1e9, tz=dt.UTC))

    @classmethod
    def of(cls, path: str) -> "FileIdentity":
        return cls._of_status(os.stat(path))  # noqa: PTH116  (the path is a string throughout)

    @classmethod
    def of_regular_file(cls, path: str, kind: str) -> "FileIdentity":
        """Returns the identity of a regular file. A pipe, a socket or a device is a DataSourceError."""
        try:
            status = os.stat(path)  # noqa: PTH116
        except FileNotFoundError:
            is_annexed = os.path.islink(path) and "annex/objects/" in os.readlink(path)  # noqa: PTH114, PTH115
            advice = " (run `git annex get` in its repository)" if is_annexed else ""
            raise FileNotFoundError(errno.ENOENT, f"No such {kind} file{advice}", path) from None
        if stat.S_ISDIR(status.st_mode):
            advice = f"Pass a glob such as '{glob.escape(path.rstrip('/'))}/**/*', not the directory"
            raise IsADirectoryError(errno.EISDIR, f"{kind} sources read files. {advice}", path)
        if not stat.S_ISREG(status.st_mode):
            raise DataSourceError(
                f"Cannot read records of {path!r} at random: it is a pipe, a socket or a device. Copy it to a regular "
                "file."
            )
        return cls._of_status(status)

    @classmethod
    def of_object(cls, size: int, version: bytes) -> "FileIdentity":
        return cls(0, 0, size, int.from_bytes(digest(7, version), "big"), version)

    @classmethod
    def _of_status(cls, status: os.stat_result) -> "FileIdentity":
        times = status.st_mtime_ns, b"", status.st_ctime_ns
        return cls(status.st_dev, status.st_ino, status.st_size, *times, status.st_uid)


def resolve_paths(paths: Any, kind: str, *, ignore_case: bool = False) -> list[FileRange]:
    """Returns the files, and ranges of records, that paths select, in their order.

    The paths are made absolute, so a later `chdir` does not matter. Only names that could be globs or ranges are looked
    up; other files need not exist.

    Args:
        paths: one path, or several in an order. A path is a `str` or path-like object: a file, a glob (`*`, `?`, `[…]`,
            `{a,b}`, `**`; its matches are sorted), or a file followed by a range of its records, `file[10:20]`. The
            name of an existing file is never read as a glob or range, nor is that of an existing folder with a bracket
            or brace. An object with the attributes `filename`, `skip` and `take` is also a path, and so is a FileRange
            of an absolute one. A `str` may be a URL of `gs://`, `s3://`, `az://`, `hf://`, `http://` or `https://`,
            and that of a bucket may be a glob.
        kind: the name of the format, for errors.
        ignore_case: True if letters in globs also match the other case.
    """
    if isinstance(paths, str | os.PathLike | FileInstruction):
        return _resolve(paths, kind, ignore_case=ignore_case)
    if isinstance(paths, set | frozenset):
        raise TypeError(
            "paths must have an order, because it is the order of the records, but the order of a set differs between "
            "processes. Pass sorted(paths)."
        )
    if not is_listed(paths):
        raise TypeError(f"paths must be a path or a sequence of paths, got {type(paths).__name__}.")
    ranges = [file for path in paths for file in _resolve(path, kind, ignore_case=ignore_case)]
    if not ranges:
        raise ValueError("paths must name at least one file, got an empty sequence.")
    return ranges


def _resolve(path: Any, kind: str, *, ignore_case: bool) -> list[FileRange]:
    if isinstance(path, FileRange):
        return [path]
    if not isinstance(path, str | os.PathLike):
        if isinstance(path, FileInstruction):
            skip, take = operator.index(path.skip), operator.index(path.take)
            return [FileRange(absolute_path(os.fspath(path.filename)), skip, None if take == -1 else skip + take)]
        raise TypeError(
            "Each path must be a str, a path-like object, or an object with filename, skip and take, "
            f"got {type(path).__name__}."
        )
    text = os.fsdecode(path)
    if is_url(text):
        return _resolve_url(canonical(text), kind, ignore_case=ignore_case)
    if not isinstance(path, str) and _BROKEN_URL.match(os.fspath(path)):
        raise ValueError("URLs must be str, because `pathlib` removes one of their slashes. Pass the str itself.")
    name = absolute_path(text)
    if not GLOB.search(_split_folder(text)[1]) or os.path.exists(name):  # noqa: PTH110
        return [FileRange(name)]
    if match := _RANGE.fullmatch(name):
        return [FileRange(match[1], int(match[2]), int(match[3]))]
    return [FileRange(match) for match in _matches(text, kind, ignore_case=ignore_case)]


def _resolve_url(name: str, kind: str, *, ignore_case: bool) -> list[FileRange]:
    match = _RANGE.fullmatch(name)
    path, start, stop = (match[1], int(match[2]), int(match[3])) if match else (name, 0, None)
    url = Url.of(path)
    path = canonical(path)
    if not GLOB.search(url.key):
        return [FileRange(path, start, stop)]
    if not url.can_list:
        if "*" not in url.key:
            return [FileRange(path, start, stop)]
        raise ValueError(
            f"Patterns need a store that can list files, and HTTP cannot. Pass each URL, got {path!r}. (A `*` in a "
            "name is `%2A`.)"
        )
    root = f"{url.scheme}://{url.root}/"
    start_of_glob = GLOB.search(url.key)
    literal = url.key[: start_of_glob.start() if start_of_glob else 0].rpartition("/")
    folder = f"{literal[0]}{literal[1]}"
    keys = list_keys(url._replace(key=folder if ignore_case else folder + literal[2]))
    if url.key in keys:
        return [FileRange(path, start, stop)]
    patterns = _patterns(url.key[len(folder) :], ignore_case=ignore_case)
    within = [key[len(folder) :] for key in keys]
    matches = sorted({folder + key for pattern in patterns for key in matching(within, pattern)})
    if not matches:
        raise FileNotFoundError(errno.ENOENT, f"No {kind} file matches the pattern", path)
    return [FileRange(root + key, start, stop) for key in matches]


def resolve_with_folders(paths: Any, kind: str, extensions: tuple[str, ...]) -> tuple[list[FileRange], dict[str, str]]:
    """Returns the files that paths and folders of tables select, and the folder of each file that one was found in.

    As usual for tables, files and folders in these are skipped if their names begin with `_` or a dot, and so are such
    matches of a glob. If names in a folder have one of the extensions, all others are skipped.
    """
    ranges: list[FileRange] = []
    roots: dict[str, str] = {}
    for given in paths if isinstance(paths, list | tuple) else [paths]:
        folder = absolute_path(os.fsdecode(given)) if isinstance(given, str | os.PathLike) else ""
        if folder.endswith("/") if is_url(folder) else os.path.isdir(folder):  # noqa: PTH112
            found = _files_of_folder(folder, kind, extensions)
            ranges += map(FileRange, found)
            roots |= dict.fromkeys(found, folder)
            continue
        matches = resolve_paths(given, kind)
        visible = [file for file in matches if not file.path.rpartition("/")[2].startswith(("_", "."))]
        ranges += visible if len(matches) > 1 else matches
    return ranges or resolve_paths(paths, kind), roots


def _files_of_folder(folder: str, kind: str, extensions: tuple[str, ...]) -> list[str]:
    """Returns the sorted files at any depth in a folder or below a URL."""
    if is_url(folder):
        url = Url.of(folder)
        names = [key[len(url.key) :] for key in list_keys(url)]
    else:
        found = (os.path.join(path, name) for path, _, files in os.walk(folder) for name in files)  # noqa: PTH118
        names = [os.path.relpath(path, folder) for path in found]
    visible = sorted(name for name in names if not any(level.startswith(("_", ".")) for level in name.split("/")))
    if not visible:
        raise FileNotFoundError(errno.ENOENT, f"There is no {kind} file in", folder)
    named = [name for name in visible if name.lower().endswith(extensions)]
    return [f"{folder.rstrip('/')}/{name}" for name in named or visible]


_NULL = "__HIVE_DEFAULT_PARTITION__"
"""The value in the name of a folder that means null."""


def values_in_folders(path: str) -> dict[str, str | None]:
    """Returns the values that the folders of a path have in their names, such as `year=2024`."""
    import urllib.parse  # noqa: PLC0415  (lazy: slow to import, in each worker)

    folders = (without_query(path) if is_url(path) else path).split("/")[:-1]
    pairs = [folder.split("=", 1) for folder in folders if "=" in folder[1:]]
    return {name: None if value == _NULL else urllib.parse.unquote(value) for name, value in pairs}


def absolute_path(name: str) -> str:
    """Returns a path as an absolute one, with `~` expanded, or a URL as a canonical one."""
    return canonical(name) if is_url(name) else "".join(_split_folder(name))


def _split_folder(name: str) -> tuple[str, str]:
    """Returns the folder that makes a local path absolute, with `~` expanded, and the text of the user after it."""
    if os.path.isabs(name):  # noqa: PTH117
        return "", name
    expanded = os.path.expanduser(name)  # noqa: PTH111  (Path would drop a trailing slash, `./`, `//`)
    if expanded == name:
        # Not abspath, because it would remove a `..` together with a link before it.
        return os.path.join(os.getcwd(), ""), name  # noqa: PTH109, PTH118
    rest = name.partition("/")[2].lstrip("/")
    return expanded.removesuffix(rest), rest


def _split_pattern(text: str) -> tuple[str, str]:
    """Returns the absolute folder that a glob is searched in, and the glob.

    The folder is literal, and includes existing folders with a bracket or brace in their names, such as `run [2]`.
    """
    folder, pattern = _split_folder(text)
    while "/" in pattern:
        name, _, rest = pattern.partition("/")
        if GLOB.search(name) and not (re.search(r"[\[{]", name) and os.path.isdir(folder + name)):  # noqa: PTH112
            break
        folder, pattern = f"{folder}{name}/", rest
    return folder, pattern


def _patterns(pattern: str, *, ignore_case: bool) -> list[str]:
    """Returns the globs that `glob` knows for one that may have names in braces, and letters of either case."""
    if match := _BRACES.search(pattern):
        before, after = pattern[: match.start()], pattern[match.end() :]
        every = [_patterns(before + choice + after, ignore_case=ignore_case) for choice in match[1].split(",")]
        return [each for found in every for each in found]
    if not ignore_case:
        return [pattern]
    tokens = re.split(r"(\[[^\]]+\])", pattern)
    for number, token in enumerate(tokens):
        if number % 2:  # A set of characters, which `!` inverts.
            tokens[number] = f"{token[:-1]}{token[1:-1].removeprefix('!').swapcase()}]"
        else:
            tokens[number] = "".join(f"[{one}{one.swapcase()}]" if one.isalpha() else one for one in token)
    return ["".join(tokens)]


def glob_paths(text: str, *, ignore_case: bool = False) -> list[str]:
    """Returns the sorted absolute paths that a glob matches. The folder before it is no part of the pattern."""
    folder, pattern = _split_pattern(text)
    patterns = _patterns(pattern, ignore_case=ignore_case)
    found = {name for each in patterns for name in glob.iglob(each, root_dir=folder, recursive=True)}  # noqa: PTH207
    return sorted(folder + name for name in found)


def _matches(text: str, kind: str, *, ignore_case: bool) -> list[str]:
    """Returns the sorted matches of a glob; no match, or a folder that may not be read, is an error."""
    matches = glob_paths(text, ignore_case=ignore_case)
    if text.endswith(
        ("/**", "/**/*")
    ):  # Every file of a tree, as in a bucket: folders match as well, and are no files.
        matches = [match for match in matches if not os.path.isdir(match)]  # noqa: PTH112
    if not matches:
        folder, pattern = _split_pattern(text)
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.scandir(folder).close()  # Raises if it may not be read, which `glob` ignores.
        raise FileNotFoundError(errno.ENOENT, f"No {kind} file matches the pattern", folder + pattern)
    return matches


def common_folder(paths: Sequence[str]) -> str:
    """Returns the beginning of paths or URLs up to the last slash before their first difference."""
    prefix = os.path.commonprefix([min(paths), max(paths)])  # noqa: RUF071  (it is cut at a slash)
    return prefix[: prefix.rfind("/") + 1]


def names_within_common_folder(paths: Sequence[str]) -> list[str]:
    # Stores are treated as folders of the root, and buckets as folders of a store.
    normal = [os.path.normpath(f"/{without_query(path)}" if is_url(path) else path) for path in paths]
    folder = os.path.commonpath({path.rpartition("/")[0] or "/" for path in normal})
    return [path[len(folder) :].lstrip(os.sep) for path in normal]


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
            keys = wait_for(request_threads().submit(object_clients.list_files, prefix.root, folder), url, 0)
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
