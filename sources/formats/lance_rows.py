"""The rows of Lance datasets."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer_or_none
from millstream.errors import DataSourceError
from millstream.sources.arrow.tables import ArrowTable, columns_of, normalised, plain_types, records_of
from millstream.sources.base import ReadsBatches, RecordKeys, checked_record_keys
from millstream.sources.digests import digest_of
from millstream.sources.files.paths import absolute_path
from millstream.sources.reads import LibraryReadError, OpenedHere, read_naming_failures
from millstream.sources.source_checks import check_file_columns, checked_columns


@final
class LanceDataSource(ReadsBatches):
    """The rows of one version of a Lance dataset, as dicts, in any order. It needs pylance.

    A batch is one `take` of the library. Values are those of `ParquetDataSource`: NumPy scalars, `str`, `bytes`, arrays
    of lists, dicts of structs. If Batch comes first, and there are no nulls, columns become the arrays of the batch
    without records in between.

    The version is part of the fingerprint: rows that are added or deleted later belong to other versions, so the
    records of a source never change. A state of a checkpoint resumes with the version that it was saved with.

    Lance does not survive a fork. Worker processes of a loader are not forked from this one, and read on their own; in
    other forks of a process that has such a source, reading is an error.

    Args:
        path: the path of the dataset (`~` is expanded); or, as a `str`, a URL of `s3://`, `gs://` or `az://`, which
            Lance reads with its own credentials.
        columns: the names of the wanted columns, in the order of the dicts; None for all columns.
        filter: a condition of SQL that the records fulfil, such as `"width >= 256"`; None for all rows. It is evaluated
            once, by the constructor, and its rows are found by their numbers from then on: 8 bytes of memory per row.
        version: the number of the version; None for the latest one.

    Attributes:
        version: the number of the version that is read.

    Raises:
        ImportError: pylance is not installed: `pip install 'millstream[lance]'`.
        FileNotFoundError: there is no dataset at the path, or it does not have the version.
        DataSourceError: the dataset cannot be read.
        TypeError: path, columns, filter or version have the wrong type.
        ValueError: the dataset lacks a column, the filter is not a condition of its columns, or it has no records.

    Reading raises DataSourceError, with the dataset and the record, for rows that are damaged or gone.

    Examples:
        >>> source = millstream.LanceDataSource("people.lance", columns=["name"], filter="age < 40")
        >>> len(source), source[1]
        (2, {'name': 'Grace'})
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        columns: Sequence[str] | None = None,
        filter: str | None = None,  # noqa: A002  (Lance's own name)
        version: int | None = None,
    ) -> None:
        self._path = absolute_path(os.fsdecode(path))
        if filter is not None and not isinstance(filter, str):
            raise TypeError(f"filter must be a condition of SQL, such as 'width >= 256', or None, got {filter!r}.")
        self._filter = filter
        self.version = as_integer_or_none(version, "version")
        wanted = checked_columns(columns)
        self._opened: OpenedHere[Any] = OpenedHere("Lance")
        dataset = self._opened.get(self._open)
        self.version = int(dataset.version)
        schema = dataset.schema
        self._names = tuple(schema.names) if wanted is None else wanted
        check_file_columns(self._path, schema.names, self._names, is_all=False)
        self._columns = columns_of(schema, self._names)
        self._types = plain_types(schema, self._names)
        self._rows: NDArray[np.int64] | None = None if filter is None else self._matching(dataset, filter)
        self._num_records = dataset.count_rows() if self._rows is None else len(self._rows)
        if not self._num_records:
            raise ValueError(f"{self._path!r} must have records, got no row in version {self.version}.")

    def __len__(self) -> int:
        return self._num_records

    def __getitems__(self, record_keys: RecordKeys) -> Sequence[dict[str, Any]]:
        keys = checked_record_keys(record_keys, self._num_records)
        if not len(keys):
            return []
        table = read_naming_failures(self._take, keys)
        rows = ArrowTable(self._columns, table).rows(np.arange(len(keys)))
        return records_of(self._columns, rows, keys, self._row_error)

    def __repr__(self) -> str:
        return f"LanceDataSource({self._num_records:,} records in version {self.version} of {self._path!r})"

    @property
    def origin(self) -> str:
        """The path or URL of the dataset, which the fingerprint lacks, because it may move."""
        return self._path

    def fingerprint(self) -> str:
        """Returns the version, the number of records, and a digest of the columns and the filter."""
        described = [(name, column.type_name) for name, column in self._columns.items()], self._filter
        digest = digest_of(described, 8)
        return f"Lance version={self.version} records={self._num_records} columns={len(self._names)} digest={digest}"

    def _open(self) -> Any:
        lance = _lance()
        try:
            with _panics_as_errors():
                dataset = lance.dataset(self._path, version=self.version)
                _ = dataset.schema  # A damaged one is found here.
                return dataset
        except (ValueError, OSError) as error:
            if "not found" in str(error).lower():
                wanted = "dataset" if self.version is None else f"dataset with version {self.version}"
                raise FileNotFoundError(2, f"No Lance {wanted}", self._path) from error
            raise DataSourceError(f"Cannot open the dataset {self._path!r}: {_reason(error)}.") from error

    def _matching(self, dataset: Any, condition: str) -> NDArray[np.int64]:
        """Returns the numbers of the rows that fulfil a condition, in order."""
        try:
            with _panics_as_errors():
                table = dataset.scanner(columns=["_rowoffset"], filter=condition).to_table()
        except ValueError as error:
            raise ValueError(
                f"filter must be a condition of the columns of {self._path!r}, got {condition!r}: {_reason(error)}."
            ) from error
        except OSError as error:
            raise DataSourceError(f"Cannot filter the rows of {self._path!r}: {_reason(error)}.") from error
        return np.sort(table.column(0).to_numpy().astype(np.int64))

    def _take(self, keys: NDArray[np.int64]) -> list[Any]:
        rows = keys if self._rows is None else self._rows[keys]
        try:
            with _panics_as_errors():
                table = self._opened.get(self._open).take(rows.tolist(), columns=list(self._names))
        except (ValueError, OSError) as error:
            if isinstance(error, DataSourceError):
                raise
            raise LibraryReadError(
                f"{self._path!r} (record key {keys[0]}): {_reason(error)}. Restore version {self.version}."
            ) from error
        return [normalised(chunk, self._names, self._types) for chunk in table.combine_chunks().to_batches()]

    def _row_error(self, key: int, error: ValueError) -> DataSourceError:
        return DataSourceError(f"Cannot read record {key} of {self._path!r} (record key {key}): {error}.")


@contextlib.contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Raises ValueError instead of a panic of Lance, which is not an Exception and has no type to import."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(str(error)) from error


def _reason(error: Exception) -> str:
    return str(error).partition(", /")[0].rstrip(".")


def _lance() -> Any:
    try:
        import lance  # noqa: PLC0415  (lazy: an optional package)
    except ImportError as error:
        raise ImportError("Cannot read Lance datasets without pylance: pip install 'millstream[lance]'.") from error
    return lance
