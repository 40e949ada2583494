"""The table of file formats, and the recognition of a file by its name and its first bytes.

It is the only place that knows the modules of formats, and imports one when a file of its format is opened. Installed
packages add formats by entry points of the group `millstream.formats`.
"""

import contextlib
import dataclasses
import functools
import glob
import importlib
import itertools
import os
import re
from collections.abc import Callable
from typing import Any, final

from millstream.core.warn import log_warning
from millstream.errors import DataSourceError
from millstream.sources.files.byte_files import LocalFile
from millstream.sources.files.compression import HEAD_BYTES, compressed_error, compression_of, without_ending
from millstream.sources.files.offset_index import Placement, placement
from millstream.sources.files.paths import FileIdentity, FileRange, resolve_paths
from millstream.sources.files.spans import SpanFormat, SpanRecords
from millstream.sources.remote.urls import canonical, is_url, without_query

ENTRY_POINTS = "millstream.formats"

_SHARD = re.compile(r"-\d+-of-\d+$")
"""The text after the extension in names such as `mnist-train.array_record-00000-of-00001`."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_.-]*")

IMAGE_EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
"""The ends of the names of images, in lower or upper case: torchvision's list."""


_MEDIA = (".wav", ".flac", ".mp3", ".ogg", ".opus", ".m4a", ".mp4", ".webm", ".avi", ".mkv", ".pt", ".pkl")
"""The ends of the names of other files that are a record each."""


@final
@dataclasses.dataclass(frozen=True)
class FileFormat:
    """A file format, recognised by the name or the first bytes of a file.

    `load(path)`, `convert` and the command line read files of each format in a table. An installed package adds one by
    an entry point, whose name is that of the format and whose object is a FileFormat:

        [project.entry-points."millstream.formats"]
        fours = "my_package.fours:FORMAT"

    Args:
        name: the name of the format, for `--format`: lower-case letters, digits, `_`, `-` and `.`.
        extensions: the ends of the names of its files in lower case, such as `.fours`, the usual one first. If
            several formats match, the longest extension wins, and then the first format in the table.
        source: the class that reads files, called with a path or several; or its `SpanFormat`, called without
            arguments; or the place of either, `"module:Class"`, which is imported when a file is read.
        begins: a function that returns True if a file, given its path and first 512 bytes, is of the format, or its
            place, `"module:function"`; None if bytes cannot tell. For a folder, there are no bytes.
        folders: True if a path may be a folder, such as a Zarr group.

    Raises:
        TypeError, ValueError: an argument is not as described.

    Examples:
        >>> class Fours(millstream.SpanFormat):
        ...     index_kind = "fours"
        ...
        ...     def offsets(self, scan):
        ...         yield np.arange(0, scan.size + 1, 4)
        ...
        ...     def decode(self, spans, request):
        ...         return [int.from_bytes(span, "little") for span in spans]
        >>> fours = millstream.FileFormat("fours", (".fours",), Fours)
        >>> np.arange(10, dtype="<u4").tofile("x.fours")
        >>> source = fours.open("x.fours")
        >>> len(source), source[7]
        (10, 7)
    """

    name: str
    extensions: tuple[str, ...]
    source: type[Any] | str
    begins: Callable[[str, bytes], bool] | str | None = None
    folders: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ValueError(f"name must be lower-case letters, digits, _, - and ., got {self.name!r}.")
        ends: Any = self.extensions
        if not isinstance(ends, list | tuple) or not all(
            isinstance(end, str) and re.fullmatch(r"\.\S+", end) and end == end.lower() for end in ends
        ):
            raise ValueError(f"extensions must be a tuple of lower-case ends such as '.x', got {self.extensions!r}.")
        object.__setattr__(self, "extensions", tuple(self.extensions))
        for name, value, is_one in (
            ("source", self.source, isinstance(self.source, type)),
            ("begins", self.begins, self.begins is None or callable(self.begins)),
        ):
            if not is_one and not (isinstance(value, str) and re.fullmatch(r"[\w.]+:\w+", value)):
                kind = "a class" if name == "source" else "a function"
                raise TypeError(f"{name} must be {kind}, or its place, 'module:name', got {value!r}.")

    def open(self, paths: Any) -> Any:
        """Returns the source of files of this format, with the defaults of its class.

        Args:
            paths: one path or a sequence of paths, in the order of the records, as the class takes them.
        """
        if isinstance(paths, list) and len(paths) == 1 and isinstance(paths[0], str):
            (paths,) = paths
        reader = _imported(self.source)
        return SpanRecords(paths, reader(), kind=self.name) if issubclass(reader, SpanFormat) else reader(paths)

    def open_with_indices(self, paths: Any, where: Placement) -> Any:
        """Returns the source of files of this format, which saves new indices at `where`."""
        token = placement.set(where)
        try:
            return self.open(paths)
        finally:
            placement.reset(token)

    def has_begun(self, path: str, start: bytes) -> bool:
        """Returns True if a file with these first bytes is known to be of this format."""
        return self.begins is not None and bool(_imported(self.begins)(path, start))

    @property
    def class_name(self) -> str:
        """The name of the class that reads the files, with its module."""
        module, name = (
            self.source.split(":")
            if isinstance(self.source, str)
            else (self.source.__module__, self.source.__qualname__)
        )
        return f"{module.partition('.')[0] if module.startswith(f'{__package__}.') else module}.{name}"


def _imported(location: Any) -> Any:
    if not isinstance(location, str):
        return location
    module, _, name = location.partition(":")
    return getattr(importlib.import_module(module), name)


_FORMATS = f"{__package__}.formats"
"""The package of the formats in the table below."""


_RIEGELI = bytes.fromhex("83af70d10d884a3f0000000000000000400000000000000091bac23c9287e1a9")
"""The first bytes of each ArrayRecord file: the header of a block, and of the chunk that is the signature."""


def _is_array_record(_: str, start: bytes) -> bool:
    return start.startswith(_RIEGELI)


def _is_tar(_: str, start: bytes) -> bool:
    return start[257:262] == b"ustar"


def _is_megatron(path: str, _: bytes) -> bool:
    # Any bytes may be tokens: the index beside the file tells.
    try:
        return _first_bytes(os.path.splitext(path)[0] + ".idx").startswith(b"MMIDIDX\x00\x00")  # noqa: PTH122
    except OSError:
        return False


def _is_hdf5(path: str, start: bytes) -> bool:
    signature = b"\x89HDF\r\n\x1a\n"
    if start.startswith(signature) or len(start) < HEAD_BYTES:
        return start.startswith(signature)
    with contextlib.closing(LocalFile(path)) as file:  # After bytes of the user's, of a power of two.
        return any(file.read(offset, len(signature)) == signature for offset in (512, 1024, 2048))


def _has_any(folder: str, *names: str) -> bool:
    return any(os.path.lexists(os.path.join(folder, name)) for name in names)  # noqa: PTH118


def _is_zarr(path: str, _: bytes) -> bool:
    return _has_any(path, ".zarray", ".zgroup", "zarr.json", "attributes.json")


def _is_lance(path: str, _: bytes) -> bool:
    return _has_any(path, "_versions")


def _is_tfds(path: str, _: bytes) -> bool:
    return _has_any(path, "dataset_info.json") and _has_any(path, "features.json")


def _is_hugging_face(path: str, start: bytes) -> bool:
    return start.startswith(b"ARROW1") if start else _has_any(path, "state.json", "dataset_dict.json")


def _is_mds(path: str, _: bytes) -> bool:
    return _has_any(path, "index.json") and any(".mds" in entry.name for entry in _entries_of(path))


def _is_parquet(path: str, start: bytes) -> bool:
    if start:
        return start[:4] == b"PAR1"
    entries = _entries_of(path)
    tables = [entry for entry in entries if entry.name.lower().endswith((".parquet", ".pq"))]
    partitions = [entry for entry in entries if "=" in entry.name[1:] and entry.is_dir()]
    return bool(tables) or any(_is_parquet(entry.path, b"") for entry in partitions[:1])


def _is_image_folder(path: str, _: bytes) -> bool:
    folders = [entry.path for entry in _entries_of(path) if entry.is_dir()]
    return any(entry.name.lower().endswith(IMAGE_EXTENSIONS) for folder in folders for entry in _entries_of(folder))


def _entries_of(folder: str) -> "list[os.DirEntry[str]]":
    """Returns the visible entries of a folder, up to a limit, or none if it cannot be listed."""
    try:
        with os.scandir(folder) as listed:
            entries = itertools.islice(listed, _MAX_LISTED)
            return sorted((entry for entry in entries if entry.name[0] not in "._"), key=lambda entry: entry.name)
    except OSError:
        return []


_MAX_LISTED = 1000
"""The number of entries of a folder that are considered to tell its format."""


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


_TABLE = (
    FileFormat(
        "array_record",
        (".array_record", ".arrayrecord"),
        f"{_FORMATS}.array_record:ArrayRecordDataSource",
        _is_array_record,
    ),
    FileFormat(
        "tfrecord",
        (".tfrecord", ".tfrecords"),
        f"{_FORMATS}.tfrecord:TFRecordDataSource",
        f"{_FORMATS}.tfrecord:begins",
    ),
    FileFormat("webdataset", (".tar",), f"{_FORMATS}.webdataset:WebDatasetDataSource", _is_tar),
    FileFormat("bagz", (".bag", ".bagz"), f"{_FORMATS}.bagz:BagzDataSource"),
    FileFormat("parquet", (".parquet", ".pq"), f"{_FORMATS}.parquet:ParquetDataSource", _is_parquet, folders=True),
    FileFormat("hdf5", (".h5", ".hdf5", ".hdf", ".he5", ".nc", ".nc4"), f"{_FORMATS}.hdf5:Hdf5DataSource", _is_hdf5),
    FileFormat("zarr", (".zarr", ".n5"), f"{_FORMATS}.zarr_arrays:ZarrDataSource", _is_zarr, folders=True),
    FileFormat("lance", (".lance",), f"{_FORMATS}.lance_rows:LanceDataSource", _is_lance, folders=True),
    FileFormat("tfds", (), f"{_FORMATS}.tfds:TfdsDataSource", _is_tfds, folders=True),
    FileFormat("mds", (), f"{_FORMATS}.mds:MdsDataSource", _is_mds, folders=True),
    FileFormat(
        "huggingface", (".arrow",), f"{_FORMATS}.hugging_face:HuggingFaceDataSource", _is_hugging_face, folders=True
    ),
    FileFormat("numpy", (".npz", ".npy"), f"{__package__}.memory:InMemoryDataSource"),
    FileFormat("images", (), f"{_FORMATS}.whole_files:ImageFolderDataSource", _is_image_folder, folders=True),
    FileFormat("files", (*IMAGE_EXTENSIONS, *_MEDIA), f"{_FORMATS}.whole_files:FileDataSource"),
    FileFormat("megatron", (), f"{_FORMATS}.tokens:MegatronDataSource", _is_megatron),
    FileFormat("csv", (".csv", ".tsv"), f"{_FORMATS}.lines:CsvDataSource"),
    FileFormat("jsonl", (".jsonl", ".ndjson"), f"{_FORMATS}.lines:JsonLinesDataSource", _is_json_lines),
    FileFormat("text", (".txt", ".text"), f"{_FORMATS}.lines:TextLineDataSource", _is_text),
)


@functools.cache
def _entry_points() -> dict[str, Any]:
    """Returns the entry points of formats that are not in the table, by name."""
    from importlib.metadata import entry_points  # noqa: PLC0415  (lazy: it takes long to import)

    known = {kind.name for kind in _TABLE}
    return {point.name: point for point in sorted(entry_points(group=ENTRY_POINTS)) if point.name not in known}


def format_names() -> list[str]:
    return [*(kind.name for kind in _TABLE), *_entry_points()]


@functools.cache
def all_formats() -> tuple[FileFormat, ...]:
    """Returns all formats, in the order in which first bytes are compared. One that cannot be imported is logged."""
    found = list(_TABLE)
    for name, point in _entry_points().items():
        try:
            kind = point.load()
        except Exception as error:  # noqa: BLE001  (the package may raise anything)
            log_warning(f"the format {name!r} of {point.value!r} cannot be imported: {error!r}. Reinstall its package.")
            continue
        if isinstance(kind, FileFormat) and kind.name == name:
            found.append(kind)
        else:
            log_warning(f"the entry point {name!r} must be a FileFormat of that name, got {kind!r}, and is ignored.")
    return tuple(found)


def format_named(name: str) -> FileFormat:
    formats = {kind.name: kind for kind in all_formats()}
    if name not in formats:
        raise ValueError(f"The format must be one of {', '.join(formats)}, got {name}.")
    return formats[name]


def format_of_name(path: str) -> FileFormat | None:
    name = _SHARD.sub("", without_ending(path).lower())
    matches = [(len(end), kind) for kind in all_formats() for end in kind.extensions if name.endswith(end)]
    return max(matches, key=lambda match: match[0])[1] if matches else None


def format_of_file(path: str) -> FileFormat:
    """Returns the format of a file by its name, else by its first bytes; of a remote file by its name."""
    by_name = format_of_name(without_query(path) if is_url(path) else path)
    if is_url(path) and by_name is not None:
        return by_name
    if is_url(path):
        raise _unknown(canonical(path), "its name")
    start = _first_bytes(path)
    may_be_compressed = by_name is not None and by_name.name in {"bagz", "numpy", "files"}
    if (compression := compression_of(start)) is not None and not may_be_compressed:
        raise compressed_error(path, compression)
    if by_name is not None:
        return by_name
    if (found := _format_of_content(path, start)) is not None:
        return found
    raise _unknown(path, "its name or first bytes")


def _format_of_content(path: str, start: bytes) -> FileFormat | None:
    return next((kind for kind in all_formats() if (start or kind.folders) and kind.has_begun(path, start)), None)


def format_of_folder(path: str) -> tuple[FileFormat, str] | None:
    """Returns the format of a local folder, and the path that selects its records: the folder, or files in it.

    The name tells, or the contents of the folder, or the name of the first file in it. None if nothing does.
    """
    kind = format_of_name(path.rstrip("/"))
    if kind is None or not kind.folders:
        kind = _format_of_content(path, b"")
    if kind is not None:
        return kind, path
    names = [entry.name for entry in _entries_of(path) if not entry.is_dir()]
    if not names:
        return None
    pattern = os.path.join(glob.escape(path), f"*{os.path.splitext(names[0])[1]}")  # noqa: PTH118, PTH122
    kind = format_of_name(names[0])
    return None if kind is None else (kind, pattern)


def files_at(path: str) -> list[FileRange]:
    """Returns the files that a path, glob or URL selects, and ranges of their records; a folder is an error.

    A prefix of Megatron, `corpus` for `corpus.bin` and `corpus.idx`, selects the former.
    """
    if not is_url(path) and not os.path.exists(path) and os.path.exists(f"{path}.idx"):  # noqa: PTH110
        path = f"{path}.bin"
    ranges = resolve_paths(path, "data")
    for file in ranges:
        if os.path.isdir(file.path):  # noqa: PTH112
            pattern = os.path.join(glob.escape(file.path), "**/*")  # noqa: PTH118
            raise IsADirectoryError(f"{file.path!r} is a directory. Pass its files, such as {pattern!r}.")
    return ranges


def _selected(path: str) -> tuple[FileFormat, str] | None:
    """Returns the format of a path, glob or URL, and the path that selects its records, or None if it is unknown."""
    if is_url(path):
        kind = format_of_name(without_query(path).rstrip("/"))
        return None if kind is None else (kind, path)
    name = _RANGE.sub("", path).rstrip("/")
    if os.path.isdir(name):  # noqa: PTH112
        return format_of_folder(path)
    kind = format_of_name(name)
    if kind is None:
        with contextlib.suppress(OSError):
            first = files_at(path)[0].path
            kind = format_of_name(first) or _format_of_content(first, _first_bytes(first))
    return None if kind is None else (kind, path)


def open_path(path: str) -> Any:
    """Returns the source of what a path, glob or URL selects, or None if no format is known to read it."""
    found = _selected(os.path.expanduser(path) if not is_url(path) else path)  # noqa: PTH111
    return None if found is None else found[0].open(found[1])


_RANGE = re.compile(r"\[\d+:\d+\]$")


def expression_for(path: str) -> str | None:
    """Returns the Python expression that reads what a path, pattern or URL names, or None if nothing tells its format.

    The name tells, or else the contents of a folder, or the first bytes of a file.
    """
    if (found := _selected(path)) is not None:
        kind, selected = found
        return f"{kind.class_name}({selected!r})"
    if path.lower().endswith(".bin"):
        return f"millstream.TokenDataSource({path!r}, window=...)"
    if path.lower().endswith((".mds", ".mds.zstd")):
        return f"millstream.MdsDataSource({(os.path.dirname(path) or '.')!r})"  # noqa: PTH120
    return None


def _first_bytes(path: str) -> bytes:
    """Returns the first bytes of a regular file. A folder or a pipe is an error."""
    FileIdentity.of_regular_file(path, "data")
    with contextlib.closing(LocalFile(path)) as file:
        return file.read(0, HEAD_BYTES)


def _unknown(path: str, evidence: str) -> DataSourceError:
    if expression := expression_for(path):
        return DataSourceError(f"Cannot read {path!r} without more arguments. In Python, write {expression}.")
    return DataSourceError(
        f"Cannot tell the format of {path!r} from {evidence}. Pass --format, one of {', '.join(format_names())}."
    )
