"""Parquet files of a user's file system, such as that of the Hugging Face Hub."""

import errno
import os
from collections.abc import Callable, Sequence
from typing import Any, final

from millstream.errors import DataSourceError
from millstream.sources.parquet import ParquetDataSource
from millstream.sources.storage.paths import FileIdentity, FilePart
from millstream.sources.tables.arrow_tables import filesystems
from millstream.sources.tables.parquet_file import ParquetFile


@final
class FilesystemParquetDataSource(ParquetDataSource):
    """The rows of Parquet files of any file system. All else is as in `ParquetDataSource`.

    A file is opened for each row group, because network file systems have a connection per open file. It must not
    change while it is read: that is not checked.

    Args:
        paths: one path of the file system, or a sequence of them. Patterns and ranges are not supported.
        filesystem: a `pyarrow.fs.FileSystem`, or one of fsspec, such as `huggingface_hub.HfFileSystem()`. It must be
            picklable for worker processes.
        options: `columns` and `cache_bytes`.

    Raises:
        TypeError: `filesystem` is not a file system; otherwise as `ParquetDataSource`.
    """

    def __init__(self, paths: Any, filesystem: Any, **options: Any) -> None:
        self._filesystem = filesystem
        _arrow_filesystem(filesystem)
        super().__init__(paths, **options)

    def _resolved(self, paths: Any) -> list[FilePart]:
        given: Sequence[Any] = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        if not given:
            raise ValueError("paths must name at least one file, got an empty sequence.")
        return [FilePart(os.fspath(path)) for path in given]

    def _identify(self, path: str) -> FileIdentity:
        fs = filesystems()
        found = _arrow_filesystem(self._filesystem).get_file_info(path)
        if found.type == fs.FileType.NotFound:
            raise FileNotFoundError(errno.ENOENT, "No such Parquet file", path)
        if found.type == fs.FileType.Directory:
            raise IsADirectoryError(errno.EISDIR, "Parquet sources read files, not directories", path)
        if found.size is None:
            raise DataSourceError(f"Cannot find the size of {path!r} in its file system. Copy it to a local file.")
        return FileIdentity.of_object(found.size, repr((found.size, found.mtime_ns)).encode())

    def _identity_now(self, path: str) -> FileIdentity:
        return self._identities[path]

    def _open(self, path: str, location: str) -> ParquetFile:
        del location  # There are no copies.
        return ParquetFile(path, self._identities[path], self._opener(path))

    def _opener(self, path: str) -> Callable[[], Any]:
        return lambda: _arrow_filesystem(self._filesystem).open_input_file(path)

    @property
    def _is_far(self) -> bool:
        return True


def _arrow_filesystem(given: Any) -> Any:
    """Returns the file system as one of pyarrow."""
    fs = filesystems()
    if isinstance(given, fs.FileSystem):
        return given
    if not all(callable(getattr(given, name, None)) for name in ("info", "isfile", "open")):
        raise TypeError(f"filesystem must be one of pyarrow.fs or of fsspec, got {type(given).__name__}.")
    return fs.PyFileSystem(fs.FSSpecHandler(given))
