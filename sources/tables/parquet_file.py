"""An open Parquet file, on a disk or in a store: how many rows its row groups have, and the columns of one, decoded.

Guarantees:
    - Any number of threads may read row groups.
    - Of an object in a store, all columns of a row group that are wanted are asked for at once, in a few requests. No
      byte of another version of the object comes out.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

from millstream.errors import DataSourceError
from millstream.sources.storage.byte_files import RemoteFile, SpanReadError
from millstream.sources.storage.paths import FileIdentity
from millstream.sources.storage.urls import is_url
from millstream.sources.tables.arrow_library import arrow, normalised

_PIECE_BYTES = 4 << 20
"""How much of a column one request asks for: the pieces of a large one are on their way at the same time."""


class ParquetFile:
    """An open Parquet file.

    Args:
        path: its name: a path, or a URL.
        identity: which version of the object, where it is a URL.
        opened: opens it, where that is neither of the operating system nor of a store that is known here.

    Attributes:
        path: its name.
        schema: its columns, as Arrow describes them.
        group_sizes: how many rows each row group has.

    Raises:
        OSError: it cannot be opened, with the operating system's error number, or is damaged (DataSourceError).
    """

    def __init__(self, path: str, identity: FileIdentity, opened: Callable[[], Any] | None = None) -> None:
        import pyarrow.parquet as pq  # noqa: PLC0415

        self.path = path
        self._identity = identity
        self._opened = opened
        self._file = None if opened is not None or is_url(path) else arrow().OSFile(path)
        try:
            with self._bytes(path) as file:
                reader = pq.ParquetFile(file, page_checksum_verification=True)
                self._metadata = reader.metadata
                self.schema = reader.schema_arrow
            self.group_sizes = [self._metadata.row_group(n).num_rows for n in range(self._metadata.num_row_groups)]
            if min(self.group_sizes, default=0) < 0 or sum(self.group_sizes) != self._metadata.num_rows:
                raise ValueError("its row groups have other numbers of rows than the file")  # noqa: TRY301
        except SpanReadError as error:
            raise DataSourceError(str(error)) from error
        except Exception as error:
            self.close()
            raise DataSourceError(
                f"{path!r} is not a Parquet file, or is damaged, or was cut short: {_words(error)}. Restore the file."
            ) from error

    def group_bytes(self, names: Sequence[str] | None) -> list[int]:
        """Returns the size of each row group in bytes, decompressed: of the columns with these names, or of all."""
        groups = [self._metadata.row_group(number) for number in range(self._metadata.num_row_groups)]
        return [sum(_column_bytes(group.column(n), names) for n in range(group.num_columns)) for group in groups]

    @property
    def num_records(self) -> int:
        """How many rows it has."""
        return int(sum(self.group_sizes))

    def close(self) -> None:
        """Closes it. It is not being read."""
        if self._file is not None:
            self._file.close()

    def read_group(self, group: int, names: Sequence[str], types: Sequence[Any], place: str) -> list[Any]:
        """Returns the rows of a row group: record batches of some columns, normalised to these types.

        Args:
            group: its number.
            names: the columns.
            types: as `plain_types` gives them.
            place: where the bytes of the file are: at its own path, or at that of a copy.

        Raises:
            SpanReadError: its store does not give them.
            ValueError: the row group cannot be read; the message has the library's words.
        """
        import pyarrow.parquet as pq  # noqa: PLC0415

        try:
            with self._bytes(place, group, names) as file:
                # A reader of its own for each call: one is not made for several threads.
                reader = pq.ParquetFile(file, metadata=self._metadata, page_checksum_verification=True)
                # Threads of the library would not come along to a forked process, and are no faster here.
                table = reader.read_row_group(group, columns=list(names), use_threads=False)
            table.validate()
            chunks = [normalised(chunk, names, types) for chunk in table.to_batches() if len(chunk)]
        except SpanReadError:
            raise
        except Exception as error:
            raise ValueError(_words(error)) from error
        if (count := sum(map(len, chunks))) != self.group_sizes[group]:
            raise ValueError(f"it has {count} rows, and should have {self.group_sizes[group]}")
        return chunks

    @contextlib.contextmanager
    def _bytes(self, place: str, group: int | None = None, names: Sequence[str] = ()) -> Iterator[Any]:
        """Gives what pyarrow reads, for the length of a block; the columns of a row group are asked for at once."""
        if self._file is not None:
            yield self._file
            return
        if self._opened is not None:
            with self._opened() as file:
                yield file
            return
        if not is_url(place):
            with arrow().OSFile(place) as file:  # A copy, which may be taken away after the block.
                yield file
            return
        remote = RemoteFile(place, self._identity)
        spans = [] if group is None else self._spans(group, names)
        with arrow().PythonFile(_ObjectFile(remote, self._identity.size, spans), "r") as file:
            yield file

    def _spans(self, group: int, names: Sequence[str]) -> list[tuple[int, int]]:
        """Returns where the columns of a row group are, and how long they are, as far as that can be believed."""
        spans = []
        metadata = self._metadata.row_group(group)
        for number in range(metadata.num_columns):
            column = metadata.column(number)
            if not any(f"{column.path_in_schema}.".startswith(f"{name}.") for name in names):
                continue
            # Some writers have a dictionary and say that it is at 0.
            starts = [column.data_page_offset, column.dictionary_page_offset or 0]
            start, length = min(filter(None, starts), default=0), column.total_compressed_size
            if 0 < start < start + length <= self._identity.size:
                spans.append((start, length))
        return spans


@final
class _ObjectFile:
    """An object of a store as pyarrow reads files: some spans of it are there at once, others come when they are read.

    Args:
        file: the object.
        size: in bytes.
        spans: where those begin that will be read, and how long they are.

    Raises:
        SpanReadError: they cannot be read.
    """

    def __init__(self, file: RemoteFile, size: int, spans: Sequence[tuple[int, int]]) -> None:
        self._file = file
        self._size = size
        self._place = 0
        self.closed = False
        self._spans = list(zip((start for start, _ in spans), self._read(spans), strict=True))

    def read(self, size: int = -1) -> bytes:
        """Returns what comes next, fewer bytes at the end only."""
        size = max(0, self._size - self._place if size < 0 else min(size, self._size - self._place))
        start, self._place = self._place, self._place + size
        for begin, content in self._spans:
            if begin <= start and start + size <= begin + len(content):
                return content[start - begin : start - begin + size]
        return self._read([(start, size)])[0]

    def seek(self, place: int, whence: int = 0) -> int:
        """Goes to a place, counted from the beginning, from here, or from the end."""
        self._place = place + (0, self._place, self._size)[whence]
        return self._place

    def tell(self) -> int:
        """Returns the place of what comes next."""
        return self._place

    def readable(self) -> bool:
        """Returns True."""
        return True

    def seekable(self) -> bool:
        """Returns True."""
        return True

    def close(self) -> None:
        """Closes it."""
        self.closed = True
        self._file.close()

    def _read(self, spans: Sequence[tuple[int, int]]) -> list[bytes]:
        """Returns the bytes of some spans, asked for in pieces, all at once."""
        pieces = [
            (number, place, min(_PIECE_BYTES, start + length - place))
            for number, (start, length) in enumerate(spans)
            for place in range(start, start + length, _PIECE_BYTES)
        ]
        found = self._file.begin([start for _, start, _ in pieces], [length for _, _, length in pieces])()
        parts: list[list[bytes]] = [[] for _ in spans]
        for (number, _, _), content in zip(pieces, found, strict=True):
            parts[number].append(content)
        return [part[0] if len(part) == 1 else b"".join(part) for part in parts]


def _words(error: BaseException) -> str:
    """Returns the library's words in one line."""
    return " ".join(str(error).split())[:300].rstrip(".") or type(error).__name__


_VALUE_BYTES = {"INT32": 4, "FLOAT": 4, "INT64": 8, "DOUBLE": 8, "INT96": 8}


def _column_bytes(column: Any, names: Sequence[str] | None) -> int:
    """Returns the size of a column of a row group: decompressed, and numbers no longer in a dictionary."""
    if names is not None and column.path_in_schema.split(".", 1)[0] not in names:
        return 0
    stored: int = column.total_uncompressed_size
    decoded: int = column.num_values * _VALUE_BYTES.get(column.physical_type, 0)
    return max(stored, decoded)
