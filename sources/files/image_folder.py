"""Images in folders that are named by their classes."""

import errno
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, ClassVar, final

import numpy as np

from millstream.sources.base import RecordKeys, checked_record_keys
from millstream.sources.files.multi_file import INSPECTION_THREADS
from millstream.sources.files.whole_files import FileDataSource
from millstream.sources.remote.urls import Url, canonical, is_url
from millstream.sources.storage.object_listing import list_keys
from millstream.sources.storage.open_files import in_threads
from millstream.sources.storage.paths import absolute_path

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""The ends of the names of images, in lower or upper case: torchvision's list."""


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
        self._keep_names(folder, [folder + image for images in found for image in images])

    def __getitems__(self, record_keys: RecordKeys) -> list[dict[str, Any]]:
        """Returns the records of the keys, in their order; keys may repeat."""
        keys = checked_record_keys(record_keys, len(self))
        _, images = self._read(keys)
        return [
            {"image": image, "label": label} for image, label in zip(images, self.labels[keys].tolist(), strict=True)
        ]

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
