"""Folders of images: classes, labels and order are torchvision's; each file that cannot be read is an error."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.errors import DataSourceError
from millstream.sources import ImageFolderDataSource
from millstream.sources.files import whole_files

EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


def write(root: Path, *names: str) -> Path:
    """Writes files whose content is their own name, and returns the root."""
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(name.encode())
    return root


def content(source: Any) -> list[tuple[str, int]]:
    """Returns all records: content and label."""
    return [(record["image"].decode(), record["label"]) for record in source.__getitems__(range(len(source)))]


def torchvision_samples(root: str) -> list[tuple[str, int]]:
    """Returns the samples as torchvision's make_dataset finds them, without hidden files: the oracle."""
    classes = sorted(entry.name for entry in os.scandir(root) if entry.is_dir())
    found = []
    for label, name in enumerate(classes):
        for folder, _, files in sorted(os.walk(os.path.join(root, name), followlinks=True)):  # noqa: PTH118
            paths = [os.path.join(folder, file) for file in sorted(files)]  # noqa: PTH118
            found += [(os.path.relpath(path, root), label) for path in paths if path.lower().endswith(EXTENSIONS)]
    return found


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three classes, with images in nested folders, and other files."""
    return write(
        tmp_path / "data",
        *("dog/b.jpg", "dog/a.JPEG", "dog/x/c.Png", "dog/x-y/d.webp", "dog/x/z/e.jpg", "dog/notes.txt"),
        *("Cat/1.tif", "Cat/10.tiff", "Cat/2.bmp", "ant/deep/er/still/1.ppm", "ant/2.pgm", "readme.md", "lost.jpg"),
    )


def test_records_and_their_order_are_those_of_torchvision(root: Path) -> None:
    """Class by class, in a class folder by folder, in a folder by name; capital letters come first."""
    source = ImageFolderDataSource(root)

    assert content(source) == torchvision_samples(str(root))
    assert source.classes == ["Cat", "ant", "dog"]
    assert source.labels.tolist() == [label for _, label in content(source)]
    assert type(source[0]["label"]) is int


def test_hidden_files_and_folders_are_passed_over(root: Path) -> None:
    """Hidden files and folders, such as those of notebooks and of macOS, are skipped."""
    expected = content(ImageFolderDataSource(root))
    write(root, ".ipynb_checkpoints/a.jpg", "dog/.x/a.jpg", "dog/._b.jpg")

    assert content(ImageFolderDataSource(root)) == expected


def test_links_are_followed(root: Path, tmp_path: Path) -> None:
    """Links to files and folders are followed; a link to a folder that contains it is an error."""
    write(tmp_path / "other", "in/1.jpg")
    (root / "owl").symlink_to(tmp_path / "other")
    (root / "dog" / "link.jpg").symlink_to(tmp_path / "other" / "in" / "1.jpg")
    found = content(ImageFolderDataSource(root))

    assert ("in/1.jpg", 3) in found
    assert ("in/1.jpg", 2) in found
    (tmp_path / "other" / "in" / "loop").symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match=r"loop' is a link to a folder that contains it"):
        ImageFolderDataSource(root)


def test_any_names_will_do(tmp_path: Path) -> None:
    """File names may have any bytes, spaces and newlines included."""
    names = [b"a/\xff\xfe.jpg", b"a/new\nline.jpg", b"b c/ .png", "b c/日本.png".encode()]
    for name in names:
        path = os.path.join(os.fsencode(tmp_path), name)  # noqa: PTH118
        os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
        Path(os.fsdecode(path)).write_bytes(name)
    source = pickle.loads(pickle.dumps(ImageFolderDataSource(tmp_path)))

    assert sorted(record["image"] for record in source.__getitems__(range(4))) == sorted(names)
    assert len(source.fingerprint()) < 100


def replace_by_file(root: Path) -> None:
    shutil.rmtree(root)
    root.write_bytes(b"")


def leave_only_files(root: Path) -> None:
    shutil.rmtree(root)
    write(root, "a.jpg")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (shutil.rmtree, FileNotFoundError, "data"),
        (replace_by_file, NotADirectoryError, "data"),
        (leave_only_files, FileNotFoundError, "one for each class"),
        (lambda root: (root / "empty").mkdir(), FileNotFoundError, r"must have an image \(\.jpg, .*data/empty"),
    ],
    ids=["missing", "file", "no class", "empty class"],
)
def test_folders_that_are_not_as_they_should_be_are_errors(
    root: Path, make: Callable[[Path], Any], error: type[Exception], message: str
) -> None:
    """A folder that is missing, a file, or without classes or images is an error at construction."""
    make(root)
    with pytest.raises(error, match=message):
        ImageFolderDataSource(root)


def replace_by_pipe(path: Path) -> None:
    """Puts a pipe, into which nobody writes, in the place of a file."""
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("slow", [False, True])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "No such file"),
        (lambda path: path.write_bytes(b""), "it is empty"),
        (replace_by_pipe, "not a regular file"),
        (replace_by_folder, "not a regular file"),
    ],
    ids=["removed", "emptied", "pipe", "folder"],
)
def test_what_happens_to_a_file_is_an_error_with_file_and_record(
    root: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], Any], message: str, slow: bool
) -> None:
    """A file that was damaged after construction is an error with its name and record, read ahead or not."""
    if slow:
        monkeypatch.setattr(whole_files, "_SLOW_READ_SECONDS", -1.0)
        monkeypatch.setattr(whole_files, "_FILES_PER_REQUEST", 2)
    source = ImageFolderDataSource(root)
    expected = content(source)
    damage(root / "dog" / "b.jpg")
    with pytest.raises(DataSourceError, match=rf"record 6, the file '.*/dog/b\.jpg': .*{message}"):
        source.__getitems__(range(len(source)))
    others = [key for key in range(len(source)) if key != 6]
    assert [record["image"].decode() for record in source.__getitems__(others)] == [expected[key][0] for key in others]


def test_a_copy_elsewhere_is_the_same_source(root: Path, tmp_path: Path) -> None:
    """A copy elsewhere has the same fingerprint; moving a file to another class changes it."""
    before = ImageFolderDataSource(root).fingerprint()
    shutil.copytree(root, tmp_path / "copy")
    after = ImageFolderDataSource(tmp_path / "copy").fingerprint()
    (root / "ant" / "2.pgm").rename(root / "Cat" / "2.pgm")

    assert after == before != ImageFolderDataSource(root).fingerprint()
