"""Files that are a record each: images in folders of their classes, audio, documents, on a disk or in a bucket."""

import contextlib
import copy
import errno
import itertools
import os
import stat
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, SupportsIndex, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_flag
from millstream.errors import DataSourceError
from millstream.sources.base import ReadsBatches, RecordKeys, checked_record_key, checked_record_keys
from millstream.sources.digests import digest, spread_keys
from millstream.sources.file_formats import IMAGE_EXTENSIONS
from millstream.sources.files.byte_files import identify, prefetch_file, refuse_placeholder
from millstream.sources.files.multi_file import INSPECTION_THREADS, MARKED_FILES, marks_of_paths, reading_error
from millstream.sources.files.open_files import in_threads
from millstream.sources.files.paths import FileIdentity, absolute_path, common_folder, list_keys, resolve_paths
from millstream.sources.remote.object_stores import WholeObjects
from millstream.sources.remote.urls import Url, canonical, is_url, without_query

_FILES_PER_REQUEST = 32
"""The number of files that are requested together if storage is slow, and read between two looks at the clock."""

_SLOW_READ_SECONDS = 100e-6
"""A file in the page cache is opened and read in 10 µs; from a disk or over a network it takes 100 µs and more."""

_LISTED_PER_FILE = 4
"""The number of entries of a folder that are read per file of the source, to learn the types of the files."""


class FileDataSource(ReadsBatches):
    """Files that are a record each: `{"path": str, "bytes": bytes}`.

    The names take some 50 bytes of memory per file. A file is opened when it is read, by one read, and closed: none
    stays open. If storage is slow, or is a store, the files of a batch are requested together.

    Args:
        paths: one path or a sequence of paths, made absolute immediately. A path is a file (`~` is expanded) or a
            pattern such as `audio/**/*.{flac,wav}` (its matches sorted by name). The order of the paths is that of the
            records. A `str` may be a URL of `gs://`, `s3://`, `http://` or `https://`.
        ignore_case: True if letters in patterns also match the other case: `*.jpg` then matches `1.JPG`.

    Raises:
        FileNotFoundError, PermissionError, …: a file cannot be found, or a pattern has no match. Objects in stores are
            looked up when they are read.
        IsADirectoryError: a path is a directory.
        ValueError: no paths, or a range of records after a path.

    Each reading member raises DataSourceError, with the file and the record, for a file that was removed, cannot be
    read, or is not a regular file.

    Examples:
        >>> source = millstream.FileDataSource("images/*/*.png")
        >>> len(source), source[2]["path"][-9:], source[2]["bytes"][1:4]
        (3, 'dog/1.png', b'PNG')
    """

    allows_empty_files: ClassVar[bool] = True

    def __init__(self, paths: Any, *, ignore_case: bool = False) -> None:
        files = resolve_paths(paths, "data", ignore_case=as_flag(ignore_case, "ignore_case"))
        if (ranged := next((file for file in files if file.stop is not None), None)) is not None:
            raise ValueError(
                f"paths must be files, each of which is one record, got the range [{ranged.start}:{ranged.stop}] of "
                f"{ranged.path!r}. Pass the file alone."
            )
        names = [file.path for file in files]
        _check_regular([name for name in names if not is_url(name)])
        self._keep_names(common_folder(names), names)

    def _keep_names(self, root: str, paths: Sequence[str]) -> None:
        """Sets the files: paths or URLs that begin with `root`, which is not stored with each of them."""
        encoded = [os.fsencode(path[len(root) :]) for path in paths]
        self._root = root
        self._digest = ""
        self._marks: dict[str, str] | None = None
        # Two arrays: workers share them, whatever the number of files.
        self._ends = np.cumsum(np.fromiter(map(len, encoded), np.int64, len(encoded)))
        self._names = np.frombuffer(b"".join(encoded), np.uint8)
        if os.path.isfile(self._path(0)):  # noqa: PTH113
            identify(self._path(0), "data")  # If one file is a placeholder, all are, or are found when they are read.

    def __len__(self) -> int:
        return len(self._ends)

    def __getitems__(self, record_keys: RecordKeys) -> list[dict[str, Any]]:
        """Returns the records of the keys, in their order; keys may repeat."""
        paths, contents = self._read(checked_record_keys(record_keys, len(self)))
        return [{"path": path, "bytes": content} for path, content in zip(paths, contents, strict=True)]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self):,} file{'s'[: len(self) > 1]}, first {self._path(0)!r})"

    def fingerprint(self) -> str:
        """Returns the number of files and a digest of their names within the folder that holds all of them."""
        return f"Files records={len(self)} digest={self._digest_of_names()}"

    def content_marks(self) -> dict[str, str]:
        """Returns digests of the sizes, of the ends and of the versions of up to 64 files, evenly spread ones.

        A checkpoint warns if they differ. Files that cannot be read are left out.
        """
        if self._marks is None:
            self._marks = marks_of_paths([self._path(row) for row in spread_keys(len(self), MARKED_FILES)])
        return self._marks

    def _digest_of_names(self, *others: bytes) -> str:
        if not self._digest:
            names, ends = self._names, self._ends
            if self._root.startswith("http") and is_url(self._root):  # Passwords and signatures change.
                plain = [without_query(self._path(key)) for key in range(len(self))]
                folder = common_folder(plain)
                encoded = [os.fsencode(name.removeprefix(folder)) for name in plain]
                names, ends = np.frombuffer(b"".join(encoded), np.uint8), np.cumsum([*map(len, encoded)])
            self._digest = digest(8, names.data, ends.astype("<i8").data, *others).hex()
        return self._digest

    def locate(self, record_key: SupportsIndex) -> tuple[str, int]:
        """Returns the file of a record, and 0, because a file is one record.

        Args:
            record_key: the record key, 0 … len(source) - 1.

        Raises:
            IndexError: the record key is out of range.
        """
        return self._path(checked_record_key(record_key, len(self))), 0

    def _path(self, key: int) -> str:
        start = self._ends[key - 1] if key else 0
        name = self._root + os.fsdecode(self._names[start : self._ends[key]].tobytes())
        return canonical(name) if is_url(name) else name

    def _read(self, keys: NDArray[np.int64]) -> tuple[list[str], list[bytes]]:
        paths = [self._path(key) for key in keys.tolist()]
        far = [row for row, path in enumerate(paths) if is_url(path)]
        near = [row for row, path in enumerate(paths) if not is_url(path)]
        contents = dict(zip(near, self._read_local([paths[row] for row in near], keys[near].tolist()), strict=True))
        if far:
            contents |= zip(far, self._read_objects([paths[row] for row in far], keys[far].tolist()), strict=True)
        return paths, [contents[row] for row in range(len(paths))]

    def _read_local(self, paths: Sequence[str], keys: Sequence[int]) -> list[bytes]:
        """Returns the contents of local files. If the first reads are slow, the others are requested in advance."""
        contents: list[bytes] = []
        is_slow = False
        while len(contents) < len(paths):
            rows = slice(len(contents), len(contents) + _FILES_PER_REQUEST)
            if is_slow:
                for path in paths[rows]:
                    prefetch_file(path)
            before = time.perf_counter()
            contents += map(self._content, paths[rows], keys[rows])
            is_slow = is_slow or time.perf_counter() - before > _SLOW_READ_SECONDS * len(paths[rows])
        return contents

    def _content(self, path: str, key: int) -> bytes:
        try:
            # O_NONBLOCK: opening a pipe does not wait for a writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise _error(key, path, "it is not a regular file")
                chunks = [os.read(descriptor, status.st_size + 1)]
                while chunks[-1] and sum(map(len, chunks)) < status.st_size:  # One read is at most 2 GiB.
                    chunks.append(os.read(descriptor, status.st_size + 1))
            finally:
                os.close(descriptor)
        except DataSourceError:
            raise
        except OSError as error:
            raise reading_error(error, path, 0, key) from error
        content = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        if len(content) != status.st_size:
            raise _error(key, path, "it was changed while it was being read")
        return self._checked(content, path, key)

    def _read_objects(self, urls: Sequence[str], keys: Sequence[int]) -> list[bytes]:
        """Returns the contents of objects, all requested together."""
        objects = WholeObjects(urls)
        contents: list[bytes] = []
        try:
            for number, (url, key) in enumerate(zip(urls, keys, strict=True)):
                contents.append(self._checked(objects.result(number), url, key))
        except OSError as error:
            raise reading_error(error, urls[len(contents)], 0, keys[len(contents)]) from error
        finally:
            objects.cancel()
        return contents

    def _checked(self, content: bytes, path: str, key: int) -> bytes:
        if not content and not self.allows_empty_files:
            raise _error(key, path, "it is empty")
        try:
            refuse_placeholder(path, content)
        except DataSourceError as error:
            raise reading_error(error, path, 0, key) from None
        return content


def _check_regular(paths: Sequence[str]) -> None:
    """Raises the error of a path that is not a regular file.

    A folder's list tells the types of its files, so one request of network storage replaces hundreds.
    """
    names: defaultdict[str, list[str]] = defaultdict(list)
    for path in paths:
        folder, _, name = path.rpartition("/")
        names[folder].append(name)

    def others_of(folder: str) -> list[str]:
        wanted = names[folder]
        regular: set[str] = set()
        # A few files of a large folder, and a folder that may not be listed, are looked up one by one.
        with contextlib.suppress(OSError), os.scandir(folder or "/") as entries:
            listed = itertools.islice(entries, _LISTED_PER_FILE * len(wanted))
            regular.update(entry.name for entry in listed if entry.is_file(follow_symlinks=False))
        return [f"{folder}/{name}" for name in wanted if name not in regular]

    others = [path for found in in_threads(others_of, list(names), INSPECTION_THREADS) for path in found]
    for _ in in_threads(lambda path: FileIdentity.of_regular_file(path, "data"), others, INSPECTION_THREADS):
        pass


def _error(key: int, path: str, reason: str) -> DataSourceError:
    return DataSourceError(f"Cannot read record 0 of {path!r} (record key {key}): {reason}. Restore the file.")


@final
class ImageFolderDataSource(FileDataSource):
    """The images in folders, each of which has the name of a class: `{"image": bytes, "label": int}`.

    The image is the content of the file, to be decoded in an operation, by the workers. The label is the index of the
    class in `classes`, by default the sorted names of the folders in `root`. Classes, labels, and the order of the
    records are those of torchvision's `ImageFolder`: class by class, in a class by folder, in a folder by name.

    Pass `classes=train.classes` for every folder but that of the training images. The folder of the validation images
    may lack a class, and the labels of all classes after it would be others.

    An image is a file whose name ends in .jpg, .jpeg, .png, .ppm, .bmp, .pgm, .tif, .tiff or .webp, in lower or upper
    case, at any depth below the folder of its class. Other files are skipped, and so are files and folders whose names
    begin with a dot. Links are followed, those to folders too.

    Names are listed once, by several threads, and take some 50 bytes of memory per image. A file is read when it is
    needed, by one read, and closed: none stays open. If storage is slow, or is a store, the files of a batch are
    requested together.

    Args:
        root: the folder of the classes' folders; `~` is expanded. It is made absolute immediately. A `str` may be a URL
            of `gs://` or `s3://`.
        classes: the names of the classes, in the order of the labels, such as `train.classes`; None for the sorted
            names of the folders. A class may have no folder in `root`.

    Attributes:
        classes: the names of the classes, in the order of the labels: a list of str.
        labels: the label of each record, an int64 array of shape (n,).

    Raises:
        FileNotFoundError: there is no such folder, or no class in it, or a class without images.
        NotADirectoryError, PermissionError, …: a folder cannot be listed.
        TypeError: classes are not names.
        ValueError: a folder is not in `classes`, or a name is in it twice; a link leads to a folder that contains it; a
            URL of a server that cannot list files.

    Each reading member raises DataSourceError, with the file and the record, for a file that was removed, cannot be
    read, is empty, or is not a regular file.

    Examples:
        >>> source = millstream.ImageFolderDataSource("images")
        >>> source.classes, source.labels.tolist()
        (['cat', 'dog'], [0, 0, 1])
        >>> source[2]["label"], type(source[2]["image"])
        (1, <class 'bytes'>)
        >>> millstream.ImageFolderDataSource("images", classes=["bird", "cat", "dog"]).labels.tolist()
        [1, 1, 2]
    """

    allows_empty_files: ClassVar[bool] = False

    def __init__(self, root: str | os.PathLike[str], *, classes: Sequence[str] | None = None) -> None:
        path = absolute_path(os.fsdecode(root))
        folder = f"{path.rstrip('/')}/"
        chosen = None if classes is None else _checked_classes(classes)
        names = _names_of_objects(folder) if is_url(path) else _names_of_files(path)
        self.classes = sorted(names) if chosen is None else chosen
        if unknown := sorted(names.keys() - set(self.classes)):
            raise ValueError(
                f"classes must have the name of each folder in {path!r}, but {unknown[0]!r} is not in it. Add it, or "
                "move the folder."
            )
        if not names:
            raise FileNotFoundError(
                errno.ENOENT, "The images must be in folders, one for each class, but there is none in", path
            )
        for class_name, images in names.items():
            if not images:
                raise FileNotFoundError(
                    errno.ENOENT,
                    f"Each class must have an image ({', '.join(IMAGE_EXTENSIONS)}), but there is none in",
                    folder + class_name,
                )
        found = [names.get(class_name, []) for class_name in self.classes]
        self.labels = np.repeat(np.arange(len(found)), [*map(len, found)])
        self._has_names = False
        self._keep_names(folder, [folder + image for images in found for image in images])

    def __getitems__(self, record_keys: RecordKeys) -> list[dict[str, Any]]:
        """Returns the records of the keys, in their order; keys may repeat."""
        keys = checked_record_keys(record_keys, len(self))
        _, images = self._read(keys)
        records: list[dict[str, Any]] = [
            {"image": image, "label": label} for image, label in zip(images, self.labels[keys].tolist(), strict=True)
        ]
        if self._has_names:
            for record in records:
                record["label_name"] = self.classes[record["label"]]
        return records

    def for_conversion(self) -> "ImageFolderDataSource":
        """Returns a source whose records also have the name of their class, as `label_name`."""
        named = copy.copy(self)
        named._has_names = True  # noqa: SLF001  (of this class)
        return named

    def __repr__(self) -> str:
        root = self._root.rstrip("/") or "/"
        return f"ImageFolderDataSource({len(self):,} images of {len(self.classes):,} classes in {root!r})"

    def fingerprint(self) -> str:
        """Returns the number of images and classes, and a digest of the files' names within the root."""
        classes = repr(self.classes).encode("utf-8", "surrogateescape")
        named = self._digest_of_names(classes)
        return f"ImageFolder records={len(self)} classes={len(self.classes)} digest={named}"


def _checked_classes(classes: Any) -> list[str]:
    if isinstance(classes, str) or not all(isinstance(name, str) for name in classes):
        raise TypeError(f"classes must be a sequence of names, or None for those of the folders, got {classes!r}.")
    if len(set(classes)) < len(classes):
        raise ValueError(f"classes must be different names, got {list(classes)}.")
    return list(classes)


def _names_of_objects(folder: str) -> dict[str, list[str]]:
    url = Url.of(folder)
    if not url.can_list:
        raise ValueError(
            f"root must be a folder or a URL of a store that can list its files, got {canonical(folder)!r}."
        )
    names = [key[len(url.key) :] for key in list_keys(url)]
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name in sorted(names, key=lambda name: name.rpartition("/")[::2]):
        if "/" in name and not name.startswith(".") and "/." not in name:
            found[name.partition("/")[0]] += _images_among([name])
    return found


def _names_of_files(root: str) -> dict[str, list[str]]:
    classes = [entry.name for entry in _entries(root) if entry.is_dir()]

    def images_of(name: str) -> list[str]:
        folders = sorted(_folders_within(os.path.join(root, name), frozenset()))  # noqa: PTH118
        return [f"{path}/{image}"[len(root) :].lstrip("/") for path, images in folders for image in sorted(images)]

    return dict(zip(classes, in_threads(images_of, classes, INSPECTION_THREADS), strict=True))


def _entries(folder: str) -> list["os.DirEntry[str]"]:
    """Returns the entries of a folder that are not hidden."""
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def _folders_within(folder: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[str, list[str]]]:
    """Yields a folder and those below it, each with the names of its images."""
    status = os.stat(folder)  # noqa: PTH116
    identity = status.st_dev, status.st_ino
    if identity in above:
        raise ValueError(f"{folder!r} is a link to a folder that contains it. Remove the link.")
    entries = _entries(folder)
    yield folder, _images_among(entry.name for entry in entries if not entry.is_dir())
    for entry in entries:
        if entry.is_dir():
            yield from _folders_within(entry.path, above | {identity})


def _images_among(names: Iterable[str]) -> list[str]:
    return [name for name in names if name.lower().endswith(IMAGE_EXTENSIONS)]
