"""Files that are a record each, on a disk and in buckets; folders of images, as torchvision reads them."""

import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import millstream
from millstream.errors import DataSourceError
from millstream.sources import FileDataSource, ImageFolderDataSource
from millstream.sources.files.paths import FileIdentity
from millstream.sources.formats import whole_files
from millstream.sources.remote import object_stores
from support.files.record_files import every_record
from support.stores.object_server import ObjectServer

NAMES = ["b/2.bin", "b/10.bin", "a.bin", "b/empty.bin", "c/deep/é 1.bin"]


def write(folder: Path, names: list[str]) -> Path:
    """Writes files whose content is their own name, or none, and returns the folder."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"" if "empty" in name else name.encode())
    return folder


def upload(store: ObjectServer, folder: Path) -> None:
    """Puts the files of a folder into the bucket."""
    for path in folder.rglob("*"):
        if path.is_file():
            store.objects[f"bucket/{folder.name}/{path.relative_to(folder)}"] = path.read_bytes()


def test_a_record_is_the_path_and_the_content_of_a_file(tmp_path: Path) -> None:
    """Paths are in the given order, matches of a pattern sorted, and an empty file is a record."""
    write(tmp_path, NAMES)
    source = FileDataSource([tmp_path / "c/deep/é 1.bin", f"{tmp_path}/b/*.bin"])

    expected = [tmp_path / name for name in ("c/deep/é 1.bin", "b/10.bin", "b/2.bin", "b/empty.bin")]
    assert every_record(source) == [{"path": str(path), "bytes": path.read_bytes()} for path in expected]


def test_all_files_of_a_tree_are_a_pattern(tmp_path: Path) -> None:
    """`**/*` matches the files at any depth, as in a bucket, and no folder; that of a folder says so."""
    write(tmp_path, NAMES)
    source = FileDataSource(f"{tmp_path}/**/*")
    assert [record["path"] for record in every_record(source)] == sorted(str(tmp_path / name) for name in NAMES)
    with pytest.raises(IsADirectoryError, match=re.escape(f"Pass a glob such as '{tmp_path}/**/*'")):
        FileDataSource(tmp_path)
    with pytest.raises(TypeError, match=re.escape(f"FileDataSource('{tmp_path}/**/*') if each file is a record")):
        millstream.load(str(tmp_path), batch_size=1)


PATTERNS = {
    "**/*.{jpg,jpeg}": (["a.jpg", "b/c.jpeg", "{x,y}/d.jpg"], ["B/E.JPG", "a.jpg", "b/c.jpeg", "{x,y}/d.jpg"]),
    "{b,B}/*.jp{,e}g": (["b/c.jpeg"], ["B/E.JPG", "b/c.jpeg"]),
    "b/[C-D].*": ([], ["b/c.jpeg"]),
    "[!B]/*": (["b/c.jpeg", "b/f.txt"], []),
    "{x,y}/*": (["{x,y}/d.jpg"], ["{x,y}/d.jpg"]),
    "A.JPG": ([], []),
}
"""For each pattern, the names that it matches, and those that it matches in either case."""


@pytest.mark.third_party
@pytest.mark.parametrize("pattern", PATTERNS)
def test_patterns_have_alternatives_and_may_ignore_case(tmp_path: Path, store: ObjectServer, pattern: str) -> None:
    """The matches of all names in braces are sorted together; a path without a pattern is the file of that name."""
    folder = write(tmp_path / "Data", ["a.jpg", "b/c.jpeg", "b/f.txt", "B/E.JPG", "{x,y}/d.jpg"])
    upload(store, folder)
    for ignore_case, expected in zip((False, True), PATTERNS[pattern], strict=True):
        for start in (f"{folder}/", "gs://bucket/Data/"):
            if pattern == "{x,y}/*" and start.startswith("gs"):
                continue  # A bucket has no folders: only a name of a whole object is not read as a pattern.
            try:
                source = FileDataSource(start + pattern, ignore_case=ignore_case)
                found = [source.locate(key)[0].removeprefix(start) for key in range(len(source))]
                every_record(source)
            except (FileNotFoundError, DataSourceError):
                found = []
            assert found == expected


@pytest.mark.third_party
def test_objects_of_any_size_are_read(tmp_path: Path, store: ObjectServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty object is an empty record, and what follows the first bytes of a large one is requested afterwards."""
    monkeypatch.setattr(object_stores, "FIRST_BYTES", 7)
    upload(store, write(tmp_path / "files", NAMES))
    urls = [f"gs://bucket/files/{name}" for name in NAMES]

    contents = [(tmp_path / "files" / name).read_bytes() for name in NAMES]
    expected = [{"path": url, "bytes": content} for url, content in zip(urls, contents, strict=True)]
    assert every_record(FileDataSource(urls)) == expected


def test_long_files_are_read_in_several_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system returns at most 2 GiB per read; a file that shrinks meanwhile is an error."""
    (tmp_path / "a").write_bytes(bytes(range(100)))
    source = FileDataSource(tmp_path / "a")
    read = os.read
    monkeypatch.setattr(os, "read", lambda descriptor, length: read(descriptor, min(length, 30)))
    assert source[0]["bytes"] == bytes(range(100))

    monkeypatch.setattr(os, "read", lambda _descriptor, _length: b"")
    with pytest.raises(DataSourceError, match="it was changed while it was being read"):
        source[0]


WRONG: list[tuple[Any, list[str], str, type[Exception], str]] = [
    (FileDataSource, NAMES, "none.bin", FileNotFoundError, "No such data file"),
    (FileDataSource, NAMES, "b", IsADirectoryError, "read files"),
    (FileDataSource, NAMES, "a.bin[0:3]", ValueError, r"each of which is one record, got the range \[0:3\]"),
    (ImageFolderDataSource, [], "data", FileNotFoundError, "data"),
    (ImageFolderDataSource, ["data"], "data", NotADirectoryError, "data"),
    (ImageFolderDataSource, ["data/a.jpg"], "data", FileNotFoundError, "one for each class"),
    (ImageFolderDataSource, ["data/a/x.jpg", "data/b/x"], "data", FileNotFoundError, r"image \(\.jpg, .*data/b"),
]


@pytest.mark.parametrize("case", WRONG)
def test_wrong_paths_are_refused_at_construction(tmp_path: Path, case: Any) -> None:
    """A missing file or folder, a folder for a file and the reverse, a range, and folders without classes or images."""
    kind, names, path, error, message = case
    write(tmp_path, names)
    with pytest.raises(error, match=message):
        kind(f"{tmp_path}/{path}")


@pytest.mark.third_party
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_the_objects_of_a_batch_are_all_in_flight_together(tmp_path: Path, store: ObjectServer, scheme: str) -> None:
    """No object of a batch is awaited before all are requested, by one request each."""
    folder = write(tmp_path / "files", [f"{number}.bin" for number in range(16)])
    upload(store, folder)
    source = FileDataSource(f"{scheme}://bucket/files/*.bin")
    store.forget()
    store.gathering = 16

    assert [record["bytes"] for record in every_record(source)] == [
        record["bytes"] for record in every_record(FileDataSource(f"{folder}/*.bin"))
    ]
    assert store.most_at_once == len(store.requests) == 16
    assert source.fingerprint() == FileDataSource(f"{folder}/*.bin").fingerprint()


@pytest.mark.third_party
@pytest.mark.parametrize(
    ("failure", "message"), [(404, "has no such object"), (403, "The store refuses access"), (400, "Cannot read")]
)
def test_an_object_that_cannot_be_read_is_an_error_with_its_url_and_record(
    tmp_path: Path, store: ObjectServer, failure: int, message: str
) -> None:
    """The secrets of a signed URL are not in the error; the other records are read."""
    upload(store, write(tmp_path / "files", NAMES))
    urls = [f"{store.url}/bucket/files/{name}?sig=hunter2" for name in ("a.bin", "b/2.bin")]
    source = FileDataSource(urls)
    store.failure = lambda request: failure if request.key.endswith("b/2.bin") else None

    with pytest.raises(DataSourceError, match=rf"record 0 of '.*b/2\.bin\?…' \(record key 1\): .*{message}") as caught:
        every_record(source)
    assert "hunter2" not in str(caught.value)
    assert "hunter2" not in repr(source)
    assert source[0]["bytes"] == b"a.bin"


@pytest.mark.third_party
def test_a_server_without_ranges_is_an_error_with_url_and_record(store: ObjectServer) -> None:
    """A server that sends only whole files, as Python's own does, is an error of the first record that it has."""
    store.objects = {"bucket/a": b"content", "bucket/empty": b""}
    store.supports_ranges = False
    source = FileDataSource([f"{store.url}/bucket/empty", f"{store.url}/bucket/a"])
    assert source[0]["bytes"] == b""
    with pytest.raises(DataSourceError, match=r"of '.*bucket/a' \(record key 1\): .*Range request not supported"):
        every_record(source)


@pytest.mark.third_party
def test_a_folder_of_images_may_be_in_a_bucket(tmp_path: Path, store: ObjectServer) -> None:
    """Classes, labels, order, contents and fingerprint are those of the same folder on a disk."""
    names = ["dog/x/c.Png", "dog/b.jpg", "dog/x-y/d.webp", "dog/notes.txt", "Cat/1.tif", "ant/.x/1.jpg", "ant/2.pgm"]
    folder = write(tmp_path / "images", [*names, "readme.jpg", ".hidden/1.jpg"])
    upload(store, folder)
    local = ImageFolderDataSource(folder)

    for url in ("gs://bucket/images", "s3://bucket/images/"):
        source = ImageFolderDataSource(url)
        assert (source.classes, source.labels.tolist()) == (local.classes, local.labels.tolist())
        assert every_record(source) == every_record(local)
        assert source.fingerprint() == local.fingerprint()
    with pytest.raises(FileNotFoundError, match="one for each class"):
        ImageFolderDataSource("gs://bucket/none")
    store.objects["bucket/images/owl/readme.txt"] = b"x"
    with pytest.raises(FileNotFoundError, match=r"must have an image \(\.jpg"):
        ImageFolderDataSource("gs://bucket/images")
    with pytest.raises(ValueError, match="a store that can list its files"):
        ImageFolderDataSource(f"{store.url}/bucket/images")


def test_types_of_files_are_read_from_the_list_of_their_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A look at a file is a request of network storage: a link, the first file, few of a large folder get one."""
    names = [f"{folder}/{number}.bin" for folder in "abc" for number in range(20)]
    write(tmp_path, [*names, *(f"large/{number}.txt" for number in range(100)), "large/a.bin"])
    (tmp_path / "a" / "link.bin").symlink_to(tmp_path / "b" / "0.bin")
    looked_up: list[str] = []
    of_regular_file = FileIdentity.of_regular_file

    def noted(path: str, kind: str) -> FileIdentity:
        looked_up.append(path)
        return of_regular_file(path, kind)

    monkeypatch.setattr(FileIdentity, "of_regular_file", noted)
    source = FileDataSource(f"{tmp_path}/[abc]/*.bin")
    assert (len(source), looked_up) == (61, [str(tmp_path / name) for name in ("a/link.bin", "a/0.bin")])
    assert len(FileDataSource([tmp_path / "large" / "a.bin", *(tmp_path / name for name in names)])) == 61
    assert len(looked_up) <= 4


def replace_by_pipe(path: Path) -> None:
    """Puts a pipe, into which nobody writes, in the place of a file."""
    path.unlink()
    os.mkfifo(path)


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def replace_by_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("none"))


@pytest.mark.parametrize("damage", [Path.unlink, replace_by_folder, replace_by_dangling_link, replace_by_pipe])
def test_a_path_among_many_files_that_is_not_a_file_is_an_error(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    """The list of a folder hides no path that cannot be read."""
    names = [f"a/{number}.bin" for number in range(20)]
    damage(write(tmp_path, names) / names[7])
    with pytest.raises(OSError, match=r"a/7\.bin"):
        FileDataSource([tmp_path / name for name in names])


def test_the_pickle_of_a_source_is_its_buffers(tmp_path: Path) -> None:
    """Two buffers, which workers share, hold all names; the rest does not grow with the number of files."""
    sizes = []
    for count in (10, 1000):
        folder = write(tmp_path / f"{count:04d}", [f"{number:04d}.bin" for number in range(count)])
        source = FileDataSource(f"{folder}/*.bin")
        buffers: list[pickle.PickleBuffer] = []
        content = pickle.dumps(source, 5, buffer_callback=buffers.append)
        sizes.append(len(content))
        assert len(buffers) == 2
        assert pickle.loads(content, buffers=buffers).locate(count - 1) == source.locate(count - 1)
    assert abs(sizes[1] - sizes[0]) < 20


EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")


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
    dogs = ["dog/b.jpg", "dog/a.JPEG", "dog/x/c.Png", "dog/x-y/d.webp", "dog/x/z/e.jpg", "dog/notes.txt"]
    others = ["Cat/1.tif", "Cat/10.tiff", "Cat/2.bmp", "ant/deep/er/still/1.ppm", "ant/2.pgm", "readme.md", "lost.jpg"]
    return write(tmp_path / "data", [*dogs, *others])


def test_records_and_their_order_are_those_of_torchvision(root: Path, tmp_path: Path) -> None:
    """By class, folder and name, through links; hidden files are skipped, and links in a circle are an error."""
    write(tmp_path / "other", ["in/1.jpg"])
    (root / "dog" / "folder").symlink_to(tmp_path / "other")
    (root / "dog" / "link.jpg").symlink_to(tmp_path / "other" / "in" / "1.jpg")
    expected = torchvision_samples(str(root))
    write(root, [".ipynb_checkpoints/a.jpg", "dog/.x/a.jpg", "dog/._b.jpg"])
    source = ImageFolderDataSource(root)

    assert [label for _, label in content(source)] == [label for _, label in expected]
    assert [source.locate(key)[0] for key in range(len(source))] == [str(root / name) for name, _ in expected]
    assert content(source)[0] == ("Cat/1.tif", 0)
    assert source.classes == ["Cat", "ant", "dog"]
    assert source.labels.tolist() == [label for _, label in content(source)]
    assert type(source[0]["label"]) is int
    (tmp_path / "other" / "in" / "loop").symlink_to(tmp_path / "other")
    with pytest.raises(ValueError, match=r"loop' is a link to a folder that contains it"):
        ImageFolderDataSource(root)


def test_labels_are_those_of_the_given_classes(root: Path, tmp_path: Path) -> None:
    """A class has one label in every folder, also in one that lacks a class; an unknown folder is an error."""
    train = ImageFolderDataSource(root)
    same = ImageFolderDataSource(root, classes=train.classes)
    assert (same.fingerprint(), content(same)) == (train.fingerprint(), content(train))
    validation = write(tmp_path / "validation", ["dog/1.jpg", "Cat/2.jpg"])
    source = ImageFolderDataSource(validation, classes=train.classes)
    assert (source.classes, content(source)) == (train.classes, [("Cat/2.jpg", 0), ("dog/1.jpg", 2)])
    assert pickle.loads(pickle.dumps(source)).labels.tolist() == source.labels.tolist() == [0, 2]
    assert source.fingerprint() != ImageFolderDataSource(validation).fingerprint()
    assert content(ImageFolderDataSource(validation, classes=train.classes[::-1])) == [
        ("dog/1.jpg", 0),
        ("Cat/2.jpg", 2),
    ]
    write(validation, ["bee/1.jpg"])
    with pytest.raises(ValueError, match=r"the name of each folder in '.*validation', but 'bee' is not in it"):
        ImageFolderDataSource(validation, classes=train.classes)
    refused: list[tuple[Any, type[Exception]]] = [("abc", TypeError), ([1], TypeError), (["dog", "dog"], ValueError)]
    for wrong, error in refused:
        with pytest.raises(error, match="classes must be"):
            ImageFolderDataSource(validation, classes=wrong)


def test_names_and_classes_are_part_of_the_fingerprint(root: Path) -> None:
    """Another name is another source, and so is an image of another class."""
    kinds: list[Callable[[], Any]] = [lambda: FileDataSource(f"{root}/*/2.*"), lambda: ImageFolderDataSource(root)]
    before = [kind().fingerprint() for kind in kinds]
    (root / "ant" / "2.pgm").rename(root / "Cat" / "2.pgm")
    assert [kind().fingerprint() == fingerprint for kind, fingerprint in zip(kinds, before, strict=True)] == [False] * 2


def test_a_moved_folder_is_the_same_source(root: Path, tmp_path: Path) -> None:
    """The fingerprint depends on the names below the folder that all files share, and not on that folder."""
    moved = tmp_path / "moved" / "d"
    before = [FileDataSource(f"{root}/*/*.*").fingerprint(), FileDataSource(root / "lost.jpg").fingerprint()]
    shutil.copytree(root, moved)
    assert [FileDataSource(f"{moved}/*/*.*").fingerprint(), FileDataSource(moved / "lost.jpg").fingerprint()] == before
    signed = [f"https://{user}h/{{}}/x?{query}" for user, query in (("", "a=1"), ("me:secret@", "b=2"))]
    one, other = (FileDataSource([url.format(folder) for folder in "ab"]) for url in signed)
    assert one.fingerprint() == other.fingerprint() != FileDataSource("https://h/a/x").fingerprint()


@pytest.mark.parametrize("kind", [lambda root: FileDataSource(f"{root}/*/**/*.*"), ImageFolderDataSource])
@pytest.mark.parametrize("change", [lambda content: content + b"x", lambda content: b"x" + content[1:]])
def test_other_files_under_the_same_names_are_a_warning(
    root: Path, kind: Callable[[Path], Any], change: Callable[[bytes], bytes], caplog: pytest.LogCaptureFixture
) -> None:
    """Other sizes and other first and last bytes are seen by a checkpoint, and unchanged files raise no alarm."""

    def resumed(saved: Any, here: Any) -> None:
        with iter(millstream.load(saved)) as one, iter(millstream.load(here)) as other:
            next(one)
            other.set_state(one.get_state())

    old = kind(root)
    resumed(old, kind(root))
    assert not caplog.records
    (root / "dog" / "a.JPEG").write_bytes(change((root / "dog" / "a.JPEG").read_bytes()))
    resumed(old, kind(root))
    assert "source.first_and_last_bytes: saved #" in caplog.text


@pytest.mark.third_party
def test_other_objects_under_the_same_names_are_a_warning(tmp_path: Path, store: ObjectServer) -> None:
    """The versions of some objects are a mark of the content; missing ones are an error when they are read."""
    upload(store, write(tmp_path / "files", NAMES))
    source = FileDataSource([f"gs://bucket/files/{name}" for name in [*NAMES, "none"]])
    copy = pickle.loads(pickle.dumps(source))
    marks = source.content_marks()
    assert copy.content_marks() == marks
    store.objects["bucket/files/a.bin"] = b"other"
    assert FileDataSource([f"gs://bucket/files/{name}" for name in NAMES]).content_marks() != marks


def test_the_marks_of_many_files_cost_no_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most 64 files are opened for a fingerprint, whatever their number, and once."""
    source = FileDataSource(f"{write(tmp_path, [f'{number}.bin' for number in range(500)])}/*.bin")
    opened: list[str] = []
    real_open = os.open

    def noted(path: str, *flags: int) -> int:
        opened.append(path)
        return real_open(path, *flags)

    monkeypatch.setattr(os, "open", noted)
    for _ in range(2):
        source.fingerprint()
        source.content_marks()
    assert 0 < len([path for path in opened if str(path).endswith(".bin")]) <= 64


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
    with pytest.raises(DataSourceError, match=rf"record 0 of '.*/dog/b\.jpg' \(record key 6\): .*{message}"):
        source.__getitems__(range(len(source)))
    others = [key for key in range(len(source)) if key != 6]
    assert [record["image"].decode() for record in source.__getitems__(others)] == [expected[key][0] for key in others]
