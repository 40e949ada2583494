"""An open Parquet file, local or in an object store: its schema, and its row groups, decoded.

Guarantees:
    - Any number of threads may read row groups.
    - All needed columns of a row group in an object store are requested together, in a few requests. Bytes of another
      version of the object are an error.
    - Metadata of a column is used only after pyarrow has begun to read the column, which raises an error for metadata
      that are damaged or encrypted. `RowGroupMetaData.column` would abort the process for them.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from millstream.errors import DataSourceError
from millstream.sources.remote.urls import is_url
from millstream.sources.storage.byte_files import RemoteFile, SpanReadError
from millstream.sources.storage.paths import FileIdentity
from millstream.sources.storage.raw_file import RawFile
from millstream.sources.tables.arrow_tables import arrow, normalised

_CHUNK_BYTES = 4 << 20
"""Bytes per request. The chunks of a large column are requested concurrently."""


class ParquetFile:
    """An open Parquet file; `open_file` opens it if it is in a file system of another library."""

    def __init__(self, path: str, identity: FileIdentity, open_file: Callable[[], Any] | None = None) -> None:
        import pyarrow.parquet as pq  # noqa: PLC0415

        self.path = path
        self._identity = identity
        self._open_file = open_file
        self._file = None if open_file is not None or is_url(path) else arrow().OSFile(path)
        try:
            with self._reading(path) as file:
                reader = pq.ParquetFile(file, page_checksum_verification=True)
                self._metadata = reader.metadata
                self.schema = reader.schema_arrow
            self.group_sizes = [self._metadata.row_group(n).num_rows for n in range(self._metadata.num_row_groups)]
            if min(self.group_sizes, default=0) < 0 or sum(self.group_sizes) != self._metadata.num_rows:
                raise ValueError("the numbers of rows of its row groups do not add up to that of the file")  # noqa: TRY301
        except SpanReadError as error:
            raise DataSourceError(str(error)) from error
        except Exception as error:
            self.close()
            raise DataSourceError(
                f"Cannot open {path!r}: it is not a Parquet file, is damaged, or was truncated: {_message_of(error)}."
            ) from error

    @property
    def group_bytes(self) -> list[int]:
        """The decompressed size in bytes of each row group, of all columns, at least 1."""
        groups = map(self._metadata.row_group, range(self._metadata.num_row_groups))
        return [max(1, group.total_byte_size) for group in groups]

    def decoded_share(self, group: int, names: Sequence[str]) -> float:
        """Returns the size in memory of the named columns of a row group, as a multiple of its `group_bytes`."""
        if (columns := self._columns(group, names)) is None:
            return 1
        return sum(map(_column_bytes, columns)) / self.group_bytes[group]

    @property
    def num_records(self) -> int:
        return int(sum(self.group_sizes))

    def close(self) -> None:
        """Closes the file, which no thread reads."""
        if self._file is not None:
            self._file.close()

    def read_group(self, group: int, names: Sequence[str], types: Sequence[Any], path: str) -> list[Any]:
        """Returns the rows of a row group as normalised record batches, read from the file or its copy at `path`."""
        import pyarrow.parquet as pq  # noqa: PLC0415

        try:
            with self._reading(path, group, names) as file:
                # A separate reader per call, because a reader is not thread-safe.
                reader = pq.ParquetFile(file, metadata=self._metadata, page_checksum_verification=True)
                # Without threads of pyarrow: they do not survive a fork, and are no faster here.
                table = reader.read_row_group(group, columns=list(names), use_threads=False)
            table.validate()
            chunks = [normalised(chunk, names, types) for chunk in table.to_batches() if len(chunk)]
        except SpanReadError:
            raise
        except Exception as error:
            raise ValueError(_message_of(error)) from error
        if (count := sum(map(len, chunks))) != self.group_sizes[group]:
            raise ValueError(f"it has {count} rows instead of {self.group_sizes[group]}")
        return chunks

    @contextlib.contextmanager
    def _reading(self, path: str, group: int | None = None, names: Sequence[str] = ()) -> Iterator[Any]:
        """Yields a file for pyarrow. The columns of a row group in an object store are requested together."""
        if self._file is not None:
            yield self._file
            return
        if self._open_file is not None:
            with self._open_file() as file:
                yield file
            return
        if not is_url(path):
            with arrow().OSFile(path) as file:  # A copy, which may be evicted after the block.
                yield file
            return
        remote = RemoteFile(path, self._identity)
        spans = [] if group is None else self._spans(group, names)
        with arrow().PythonFile(RawFile(_reader(remote, spans), self._identity.size), "r") as file:
            yield file

    def _spans(self, group: int, names: Sequence[str]) -> list[tuple[int, int]]:
        """Returns the starts and lengths of the columns of a row group, without those that exceed the file."""
        spans = []
        for column in self._columns(group, names) or ():
            # Some writers set the offset of a dictionary to 0.
            starts = [column.data_page_offset, column.dictionary_page_offset or 0]
            start, length = min(filter(None, starts), default=0), column.total_compressed_size
            if 0 < start < start + length <= self._identity.size:
                spans.append((start, length))
        return spans

    def _columns(self, group: int, names: Sequence[str]) -> list[Any] | None:
        """Returns the metadata of the columns of a row group, and of their members, that have one of the names.

        None if pyarrow cannot read one of them.
        """
        import pyarrow.parquet as pq  # noqa: PLC0415

        paths = [self._metadata.schema.column(number).path for number in range(self._metadata.num_columns)]
        wanted = [
            number for number, path in enumerate(paths) if any(f"{path}.".startswith(f"{name}.") for name in names)
        ]
        with arrow().PythonFile(RawFile(_refuse, 1 << 62), "r") as file:
            reader = pq.ParquetFile(file, metadata=self._metadata)
            for number in wanted:
                try:
                    reader.read_row_group(group, columns=[paths[number]], use_threads=False)
                except _BytesAreReadError as error:
                    # pyarrow may keep the error, whose traceback has the frame of this call, and so this file.
                    error.__traceback__ = None
                except Exception as error:  # noqa: BLE001
                    error.__traceback__ = None
                    return None
        return [self._metadata.row_group(group).column(number) for number in wanted]


class _BytesAreReadError(Exception):
    """pyarrow wants bytes of a column, so it has accepted the metadata of the column."""


def _refuse(start: int, length: int) -> bytes:  # noqa: ARG001  (as RawFile calls it)
    raise _BytesAreReadError


def _reader(file: RemoteFile, spans: Sequence[tuple[int, int]]) -> Callable[[int, int], bytes]:
    """Returns a function that reads an object. Given spans are read in advance, others when they are needed."""
    known = list(zip((start for start, _ in spans), _read_spans(file, spans), strict=True))

    def read(start: int, length: int) -> bytes:
        for begin, content in known:
            if begin <= start and start + length <= begin + len(content):
                return content[start - begin : start - begin + length]
        return _read_spans(file, [(start, length)])[0]

    return read


def _read_spans(file: RemoteFile, spans: Sequence[tuple[int, int]]) -> list[bytes]:
    """Returns the bytes of spans, which are requested together in chunks."""
    chunks = [
        (number, position, min(_CHUNK_BYTES, start + length - position))
        for number, (start, length) in enumerate(spans)
        for position in range(start, start + length, _CHUNK_BYTES)
    ]
    contents = file.begin([start for _, start, _ in chunks], [length for _, _, length in chunks])()
    of_span: list[list[bytes]] = [[] for _ in spans]
    for (number, _, _), content in zip(chunks, contents, strict=True):
        of_span[number].append(content)
    return [contents[0] if len(contents) == 1 else b"".join(contents) for contents in of_span]


def _message_of(error: BaseException) -> str:
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__


_VALUE_BYTES = {"INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 8}


def _column_bytes(column: Any) -> int:
    """Returns the size of a column of a row group, decompressed and without dictionaries of numbers."""
    stored: int = column.total_uncompressed_size
    decoded: int = column.num_values * _VALUE_BYTES.get(column.physical_type, 0)
    return max(stored, decoded)
