"""The table of file formats, and the recognition of a file by its name and its first bytes.

The module of a format is not imported to recognise it.
"""

import contextlib
import dataclasses
import glob
import itertools
import os
import re
from collections.abc import Callable
from typing import Any, final

from millstream.errors import DataSourceError
from millstream.sources.remote.urls import canonical, is_url, without_query
from millstream.sources.storage.byte_files import LocalFile
from millstream.sources.storage.compression import HEAD_BYTES, compressed_error, compression_of, without_ending
from millstream.sources.storage.offset_index import Placement, placement
from millstream.sources.storage.paths import GLOB, FileIdentity

_SHARD = re.compile(r"-\d+-of-\d+$")
"""The text after the extension in names such as `mnist-train.array_record-00000-of-00001`."""


@final
@dataclasses.dataclass(frozen=True)
class FileFormat:
    """A format of files.

    Attributes:
        name: the name of the format on the command line.
        extensions: the ends of the names of its files, the usual one first.
        source: the name of the class in `millstream.sources` that reads it.
        begins: returns True if a path with these first bytes is of the format; None if bytes cannot tell.
    """

    name: str
    extensions: tuple[str, ...]
    source: str
    begins: Callable[[str, bytes], bool] | None = None

    def open(self, paths: Any, where: Placement = Placement.CACHE) -> Any:
        """Returns the source of files of this format, with its defaults. New indices are saved at `where`."""
        from importlib import import_module  # noqa: PLC0415  (lazy: only one format is needed)

        token = placement.set(where)
        try:
            return getattr(import_module(str(__package__)), self.source)(paths)
        finally:
            placement.reset(token)


_RIEGELI = bytes.fromhex("83af70d10d884a3f0000000000000000400000000000000091bac23c9287e1a9")
"""The first bytes of each ArrayRecord file: the header of a block, and of the chunk that is the signature."""


def _is_array_record(_: str, start: bytes) -> bool:
    return start.startswith(_RIEGELI)


def _is_tfrecord(_: str, start: bytes) -> bool:
    from millstream.sources.records.tfrecord import is_tfrecord  # noqa: PLC0415  (lazy: only one format is needed)

    return is_tfrecord(start)


def _is_tar(_: str, start: bytes) -> bool:
    return start[257:262] == b"ustar"


def _is_megatron(path: str, _: bytes) -> bool:
    # Any bytes may be tokens: the index beside the file tells.
    try:
        return _first_bytes(os.path.splitext(path)[0] + ".idx").startswith(b"MMIDIDX\x00\x00")  # noqa: PTH122
    except OSError:
        return False


def _is_json_lines(path: str, start: bytes) -> bool:
    return start.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{" and _is_text(path, start)


def _is_text(_: str, start: bytes) -> bool:
    if not start or b"\x00" in start:
        return False
    try:
        start.decode()
    except UnicodeDecodeError as error:
        return error.start > HEAD_BYTES - 4  # Cut within a character.
    return True


FORMATS = (
    FileFormat("array_record", (".array_record", ".arrayrecord"), "ArrayRecordDataSource", _is_array_record),
    FileFormat("tfrecord", (".tfrecord", ".tfrecords"), "TFRecordDataSource", _is_tfrecord),
    FileFormat("webdataset", (".tar",), "WebDatasetDataSource", _is_tar),
    FileFormat("bagz", (".bag", ".bagz"), "BagzDataSource"),
    FileFormat("parquet", (".parquet", ".pq"), "ParquetDataSource", lambda _, start: start.startswith(b"PAR1")),
    FileFormat("megatron", (), "MegatronDataSource", _is_megatron),
    FileFormat("csv", (".csv",), "CsvDataSource"),
    FileFormat("jsonl", (".jsonl", ".ndjson"), "JsonLinesDataSource", _is_json_lines),
    FileFormat("text", (".txt", ".text"), "TextLineDataSource", _is_text),
)
"""All formats, in the order in which first bytes are compared."""


def format_of_name(path: str) -> FileFormat | None:
    name = _SHARD.sub("", without_ending(path).lower())
    return next((kind for kind in FORMATS if name.endswith(kind.extensions)), None)


def format_of_file(path: str) -> FileFormat:
    """Returns the format of a file by its name, else by its first bytes; of a remote file by its name."""
    by_name = format_of_name(without_query(path) if is_url(path) else path)
    if is_url(path) and by_name is not None:
        return by_name
    if is_url(path):
        raise _unknown(canonical(path), "its name")
    start = _first_bytes(path)
    if (compression := compression_of(start)) is not None and not (by_name is not None and by_name.name == "bagz"):
        raise compressed_error(path, compression)
    if by_name is not None:
        return by_name
    if (found := _format_of_content(path, start)) is not None:
        return found
    raise _unknown(path, "its name or first bytes")


def _format_of_content(path: str, start: bytes) -> FileFormat | None:
    return next((kind for kind in FORMATS if kind.begins is not None and kind.begins(path, start)), None)


_MEDIA = (
    ".wav",
    ".flac",
    ".mp3",
    ".ogg",
    ".opus",
    ".m4a",
    ".mp4",
    ".webm",
    ".avi",
    ".mkv",
    ".npz",
    ".npy",
    ".pt",
    ".pkl",
)
"""The extensions of files that are a record each, besides those of images."""


def expression_for(path: str) -> str | None:
    """Returns the Python expression that reads what a path, pattern or URL names, or None if nothing tells its format.

    The name tells, or else what a folder contains, or the first bytes of a file.
    """
    from millstream.sources.files.image_folder import IMAGE_EXTENSIONS  # noqa: PLC0415  (lazy: only errors need it)

    if not is_url(path) and os.path.isdir(path):  # noqa: PTH112
        return _expression_for_folder(path.rstrip("/") or "/")
    name = without_query(path).lower() if is_url(path) else path.rstrip("/").lower()
    if (known := format_of_name(name)) is not None:
        return f"millstream.{known.source}({path!r})"
    is_one = not GLOB.search(name)
    for extensions, expression in {
        (".h5", ".hdf5", ".hdf", ".he5", ".nc", ".nc4"): f"millstream.Hdf5DataSource({{'x': {f'{path}/NAME'!r}}})",
        (".zarr", ".n5"): f"millstream.ZarrDataSource({{'x': {f'{path}/NAME'!r}}})",
        (".lance",): f"millstream.LanceDataSource({path!r})",
        (".arrow", ".feather"): f"millstream.HuggingFaceDataSource(datasets.Dataset.from_file({path!r}))",
        (".tsv",): f"millstream.CsvDataSource({path!r}, delimiter='\\t')",
        (".mds",): f"millstream.MdsDataSource({(os.path.dirname(path) or '.')!r})",  # noqa: PTH120
        (".npz",) * is_one: f"millstream.InMemoryDataSource(dict(numpy.load({path!r})))",
        (".npy",) * is_one: f"millstream.InMemoryDataSource(numpy.load({path!r}, mmap_mode='r'))",
        (".bin",): f"millstream.TokenDataSource({path!r}, window=...)",
        (*IMAGE_EXTENSIONS, *_MEDIA): f"millstream.FileDataSource({path!r})",
    }.items():
        if name.endswith(extensions):
            return expression
    with contextlib.suppress(OSError):
        if not is_url(path) and (known := _format_of_content(path, _first_bytes(path))) is not None:
            return f"millstream.{known.source}({path!r})"
    return None


_MARKS_OF_FOLDERS = {
    "state.json": "millstream.HuggingFaceDataSource(datasets.load_from_disk({path!r}))",
    "dataset_dict.json": "millstream.HuggingFaceDataSource(datasets.load_from_disk({path!r})['train'])",
    "features.json": "millstream.TfdsDataSource({path!r}, 'train')",
    "index.json": "millstream.MdsDataSource({path!r})",
    ".zarray": "millstream.ZarrDataSource({{'x': {path!r}}})",
    ".zgroup": "millstream.ZarrDataSource({{'x': {member!r}}})",
    "zarr.json": "millstream.ZarrDataSource({{'x': {member!r}}})",
    "_versions": "millstream.LanceDataSource({path!r})",
}
"""The expressions for folders that contain an entry of a name; `member` is a folder in it."""


def _expression_for_folder(path: str) -> str | None:
    from millstream.sources.files.image_folder import IMAGE_EXTENSIONS  # noqa: PLC0415

    try:
        with os.scandir(path) as listed:
            entries = sorted(itertools.islice(listed, _MAX_LISTED), key=lambda entry: entry.name)
        names = {entry.name for entry in entries}
        folders = [entry for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
        for mark, expression in _MARKS_OF_FOLDERS.items():
            if mark in names:
                # An array of version 3 has its chunks in `c`.
                is_array = not folders or folders[0].name == "c"
                return expression.format(path=path, member=path if is_array else f"{path}/{folders[0].name}")
        for folder in folders:
            if any(name.lower().endswith(IMAGE_EXTENSIONS) for name in os.listdir(folder.path)):  # noqa: PTH208
                return f"millstream.ImageFolderDataSource({path!r})"
    except OSError:
        return None
    files = [entry.name for entry in entries if not entry.name.startswith(".") and entry.is_file()]
    for name in files[:1]:
        pattern = f"{glob.escape(path)}/*{os.path.splitext(name)[1]}"  # noqa: PTH122
        return expression_for(pattern) or f"millstream.FileDataSource({pattern!r})"
    return None


_MAX_LISTED = 1000
"""The number of entries of a folder that are looked at for advice."""


def _first_bytes(path: str) -> bytes:
    """Returns the first bytes of a regular file. A folder or a pipe is an error."""
    FileIdentity.of_regular_file(path, "data")
    with contextlib.closing(LocalFile(path)) as file:
        return file.read(0, HEAD_BYTES)


def _unknown(path: str, evidence: str) -> DataSourceError:
    if expression := expression_for(path):
        return DataSourceError(f"Cannot read {path!r} by a command. In Python, write {expression}.")
    return DataSourceError(
        f"Cannot tell the format of {path!r} from {evidence}. Pass --format, one of "
        f"{', '.join(kind.name for kind in FORMATS)}."
    )
