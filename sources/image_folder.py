"""Images in folders, one for each class."""

import errno
import itertools
import os
import stat
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, SupportsIndex, final

import numpy as np

from millstream.errors import DataSourceError
from millstream.notebook_repr import Pictured
from millstream.sources.base import RecordKeys, checked_record_key, checked_record_keys
from millstream.sources.files.multi_file import INSPECTION_THREADS
from millstream.sources.storage.open_files import descriptor_share

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""How the names of images end, in small or capital letters: torchvision's list."""

_AT_ONCE = 32
"""How many files are asked for at once where storage is slow, and read between two looks at the clock."""

_SLOW_READ_SECONDS = 100e-6
"""A file in the page cache is opened and read in some 10 µs; from a disk or network it takes 100 µs and more."""


@final
class ImageFolderDataSource(Pictured):
    """The images in folders, each of which has the name of a class: `{"image": bytes, "label": int}`.

    The image is the content of the file, to be decoded in an operation, by the workers. The label is the place of the
    class in `classes`, the sorted names of the folders in `root`. Classes, labels, and the order of the records are
    those of torchvision's `ImageFolder`: class by class, in a class by folder, in a folder by name.

    An image is a file whose name ends in .jpg, .jpeg, .png, .ppm, .bmp, .pgm, .tif, .tiff or .webp, in lower or upper
    case, however deep below the folder of its class. Other files are passed over, and so are files and folders whose
    names begin with a dot. Links are followed, those to folders too.

    Names are listed once, by several threads; some 50 bytes of memory an image. A file is opened when it is read, by
    one read, and closed: none stays open. Where storage is slow, the files of a batch are asked for at once.

    Args:
        root: the folder of the classes' folders; `~` is expanded. It is made absolute at once.

    Attributes:
        classes: the names of the classes, in the order of the labels: a list of str.
        labels: the label of each record, an int64 array of shape (n,).

    Raises:
        FileNotFoundError: there is no such folder, or no class in it, or a class without images.
        NotADirectoryError, PermissionError, …: a folder cannot be listed.
        ValueError: a link leads to a folder that contains it.

    Each reading member raises DataSourceError, with the file and the record, for a file that was removed, cannot be
    read, is empty, or is not a regular file.

    Examples:
        >>> source = millstream.ImageFolderDataSource("images")
        >>> source.classes, source.labels.tolist()
        (['cat', 'dog'], [0, 0, 1])
        >>> source[2]["label"], type(source[2]["image"])
        (1, <class 'bytes'>)
    """

    _picture_kind = "source"

    takes_key_arrays: ClassVar[bool] = True

    def __init__(self, root: str | os.PathLike[str]) -> None:
        from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415  (takes long to import)

        name = os.path.expanduser(os.fsdecode(root))  # noqa: PTH111
        self._root = os.path.join(os.getcwd(), name)  # noqa: PTH109, PTH118  (an absolute name stays as it is)
        self.classes = sorted(entry.name for entry in _entries(self._root) if entry.is_dir())
        if not self.classes:
            raise FileNotFoundError(
                errno.ENOENT, "The images must be in folders, one for each class, but there is none in", self._root
            )
        with ThreadPoolExecutor(min(INSPECTION_THREADS, descriptor_share()), "millstream-inspect") as threads:
            images = list(threads.map(self._images_of, self.classes))
        self.labels = np.repeat(np.arange(len(images)), list(map(len, images)))
        names = [os.fsencode(path) for path in itertools.chain.from_iterable(images)]
        # As two arrays, which workers share, whatever their number.
        self._ends = np.cumsum(np.fromiter(map(len, names), np.int64, len(names)))
        self._names = np.frombuffer(b"".join(names), np.uint8)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, record_key: SupportsIndex) -> dict[str, Any]:
        return self.__getitems__([checked_record_key(record_key, len(self))])[0]

    def __getitems__(self, record_keys: RecordKeys) -> list[dict[str, Any]]:
        """Returns the records of the keys, in their order."""
        keys = checked_record_keys(record_keys, len(self))
        images = _contents([self._path(key) for key in keys.tolist()], keys.tolist())
        labels = self.labels[keys].tolist()
        return [{"image": image, "label": label} for image, label in zip(images, labels, strict=True)]

    def __repr__(self) -> str:
        return f"ImageFolderDataSource({len(self):,} images of {len(self.classes):,} classes in {self._root!r})"

    def fingerprint(self) -> str:
        """Returns the number of images and classes, and a digest of the files' names within the root."""
        import hashlib  # noqa: PLC0415  (OpenSSL takes its time)

        digest = hashlib.blake2b(self._names.data, digest_size=8)
        digest.update(self._ends.astype("<i8").data)
        digest.update(repr(self.classes).encode("utf-8", "surrogateescape"))
        return f"ImageFolder records={len(self)} classes={len(self.classes)} digest={digest.hexdigest()}"

    def _path(self, key: int) -> str:
        start = self._ends[key - 1] if key else 0
        return os.path.join(self._root, os.fsdecode(self._names[start : self._ends[key]].tobytes()))  # noqa: PTH118

    def _images_of(self, name: str) -> list[str]:
        """Returns the images of a class: paths within the root."""
        folder = os.path.join(self._root, name)  # noqa: PTH118
        found = sorted(_folders_within(folder, frozenset()))
        images = [
            f"{path}/{image}"[len(self._root) :].lstrip("/") for path, images in found for image in sorted(images)
        ]
        if not images:
            ends = ", ".join(IMAGE_EXTENSIONS)
            raise FileNotFoundError(
                errno.ENOENT, f"Each class must have an image ({ends}), but there is none in", folder
            )
        return images


def _entries(folder: str) -> list["os.DirEntry[str]"]:
    """Returns what is in a folder and not hidden."""
    with os.scandir(folder) as entries:
        return [entry for entry in entries if not entry.name.startswith(".")]


def _folders_within(folder: str, above: frozenset[tuple[int, int]]) -> Iterator[tuple[str, list[str]]]:
    """Yields a folder and those below it, each with the names of its images."""
    status = os.stat(folder)  # noqa: PTH116
    identity = status.st_dev, status.st_ino
    if identity in above:
        raise ValueError(f"{folder!r} is a link to a folder that contains it. Remove the link.")
    entries = _entries(folder)
    yield (
        folder,
        [entry.name for entry in entries if entry.name.lower().endswith(IMAGE_EXTENSIONS) and not entry.is_dir()],
    )
    for entry in entries:
        if entry.is_dir():
            yield from _folders_within(entry.path, above | {identity})


def _contents(paths: Sequence[str], keys: Sequence[int]) -> list[bytes]:
    """Returns the contents of files. If reading begins slowly, the others are asked for at once, some at a time."""
    contents: list[bytes] = []
    is_slow = False
    while len(contents) < len(paths):
        some = slice(len(contents), len(contents) + _AT_ONCE)
        if is_slow:
            _ask_for(paths[some])
        before = time.perf_counter()
        contents += map(_content, paths[some], keys[some])
        is_slow = is_slow or time.perf_counter() - before > _SLOW_READ_SECONDS * len(paths[some])
    return contents


def _ask_for(paths: Sequence[str]) -> None:
    """Has the operating system begin to read some files; what is wrong with one is found out when it is read."""
    if not hasattr(os, "posix_fadvise"):  # Not on macOS.
        return
    for path in paths:
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_WILLNEED)
        except OSError:
            continue
        finally:
            os.close(descriptor)


def _content(path: str, key: int) -> bytes:
    """Returns the content of the file of a record."""
    try:
        # Without waiting for whoever writes into it, if it is a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            content = os.read(descriptor, status.st_size + 1) if stat.S_ISREG(status.st_mode) else b""
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataSourceError(f"Cannot read record {key}, the file {path!r}: {error.strerror}.") from error
    if not content or len(content) != status.st_size:
        reason = "it is empty" if not status.st_size else "it was changed while it was being read"
        reason = reason if stat.S_ISREG(status.st_mode) else "it is not a regular file"
        raise DataSourceError(f"Cannot read record {key}, the file {path!r}: {reason}. Restore the file.")
    return content
