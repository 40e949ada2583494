"""The records of Hugging Face datasets, read from the buffers of their Arrow tables."""

import copy
import dataclasses
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from millstream.errors import DataSourceError
from millstream.sources.arrow.columns import Column, Rows
from millstream.sources.arrow.tables import ArrowTable, Decoded, dicts_or_error, records_of
from millstream.sources.base import ReadsBatches, RecordKeys, checked_record_keys
from millstream.sources.digests import FINGERPRINT_RECORDS, spread_keys, updated_crc
from millstream.sources.files.byte_files import identify
from millstream.sources.files.paths import absolute_path, resolve_paths
from millstream.sources.reads import explained


@final
class HuggingFaceDataSource(ReadsBatches):
    """The records of a `datasets.Dataset`, as dicts, read from its Arrow tables.

    A dataset is also a source as it is: its records are then those of `dataset[key]`, in its format. Here they are the
    dicts of `ParquetDataSource`, whose documentation lists the types: numbers keep the width of their column, lists of
    numbers are NumPy arrays, nulls None. That is faster, and if Batch comes first, columns become arrays without
    records in between. Images, audio and other features with `decode_example` are decoded by it (an image is a
    `PIL.Image`), and `datasets.Array2D` to `Array5D` are arrays of their shape.

    The rows are those after `select`, `shuffle`, `filter` and `map`, and the columns those of
    `with_format(columns=...)`. The type of a format has no effect.

    `datasets` maps the files of a dataset into memory: do not shorten or overwrite them while they are read. Workers
    receive the names of the files of a mapped dataset, or all rows of a dataset in memory.

    Args:
        dataset: a `datasets.Dataset`, with at least one column; or the path of one: the folder that `save_to_disk`
            wrote, or Arrow files, such as `"data-*.arrow"`.

    Raises:
        ImportError: a path, and `datasets` is not installed: `pip install 'millstream[huggingface]'`.
        FileNotFoundError, PermissionError, …: a file cannot be found or read.
        TypeError: it is another object, such as a `DatasetDict`, an `IterableDataset`, or a dataset with
            `with_transform`.
        ValueError: it has no columns, or a folder has several splits.

    Reading raises DataSourceError, with the file and the record, for damaged values.

    Examples:
        >>> import datasets
        >>> dataset = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 1, 0]})
        >>> source = millstream.HuggingFaceDataSource(dataset)
        >>> source[1]
        {'text': 'b', 'label': np.int64(1)}
        >>> next(iter(millstream.load(source, batch_size=3)))["label"]
        array([0, 1, 0])
    """

    def __init__(self, dataset: Any) -> None:
        paths = dataset if isinstance(dataset, list) and dataset else [dataset]
        if all(isinstance(path, str | os.PathLike) for path in paths):
            dataset = _saved_dataset(dataset)
        self._dataset = dataset
        self._names = _checked_columns(dataset)
        self._num_records = len(dataset)
        self._is_converted = False
        self._tables: _Tables | None = None

    def __len__(self) -> int:
        return self._num_records

    def __getitems__(self, record_keys: RecordKeys) -> Sequence[Any]:
        keys = checked_record_keys(record_keys, self._num_records)
        if not len(keys):
            return []
        return records_of(self._opened().columns, self._rows_or_error(keys), keys, self._row_error)

    def __repr__(self) -> str:
        names = ", ".join(self._names[:8]) + (", …" if len(self._names) > 8 else "")
        return f"HuggingFaceDataSource({self._num_records:,} records with {names[:150]})"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_tables": None}

    def for_conversion(self) -> "HuggingFaceDataSource":
        """Returns a source that has images and audio as the bytes of their files, and names of classes beside labels.

        The name of a label is in `NAME_name`.
        """
        other = copy.copy(self)
        other._is_converted, other._tables = True, None  # noqa: SLF001  (of this class)
        return other

    @property
    def origin(self) -> str:
        """The fingerprint that `datasets` gives the dataset, by its origin and all that was done to it."""
        return str(self._dataset._fingerprint)  # noqa: SLF001  (as above)

    def fingerprint(self) -> str:
        """Returns the number of records, the columns, and a CRC over up to 16 records, spread evenly.

        Images and other encoded values count in their encoded form.
        """
        columns = self._opened().data.columns
        keys = np.array(spread_keys(self._num_records, FINGERPRINT_RECORDS))
        crc = 0
        for record in dicts_or_error(columns, self._rows_or_error(keys), keys, self._row_error):
            crc = updated_crc(crc, record)
        schema = zlib.crc32(repr([(name, column.type_name) for name, column in columns.items()]).encode())
        return f"HuggingFace records={self._num_records} columns={len(columns)}:{schema:08x} crc32={crc:08x}"

    def _rows_or_error(self, keys: NDArray[np.int64]) -> Rows:
        return explained(lambda: self._rows(keys), lambda row: self._rows(keys[[row]]), keys, self._row_error)

    def _rows(self, keys: Any) -> Rows:
        return self._opened().data.rows(self._row_numbers(keys))

    def _row_numbers(self, keys: Any) -> Any:
        tables = self._opened()
        if tables.indices is None:
            return keys
        (column,) = tables.indices.columns.values()
        numbers = column.batch(tables.indices.rows(keys), np.empty).astype(np.int64)
        count = len(self._dataset.data)
        if len(wrong := numbers[(numbers < 0) | (numbers >= count)]):
            raise ValueError(f"its indices select row {wrong[0]} of {count:,}")
        return numbers

    def _row_error(self, key: int, error: ValueError) -> DataSourceError:
        try:
            row = int(self._row_numbers(np.array([key]))[0])
        except ValueError:
            return DataSourceError(f"Cannot read record key {key} of {self!r}: {error}. Build the dataset again.")
        table = self._dataset.data
        for blocks in getattr(table, "blocks", [[table]]):
            if row < len(blocks[0]):
                break
            row -= len(blocks[0])
        path = getattr(blocks[0], "path", None)
        table_name = repr(path) if path else "a table in memory"
        return DataSourceError(
            f"Cannot read record {row} of {table_name} (record key {key}): {error}. Restore the file, or build the "
            "dataset again."
        )

    def _opened(self) -> "_Tables":
        """Returns the tables of the dataset in this process. Two threads may build them concurrently."""
        if self._tables is None:
            data = ArrowTable.of(self._dataset.data.table, self._names)
            indices = self._dataset._indices  # noqa: SLF001  (there is no public name for them)
            table = None if indices is None else ArrowTable.of(indices.table, [indices.table.column_names[0]])
            columns = dict(data.columns)
            for name, column in data.columns.items():
                feature = self._dataset.features[name]
                decode = _decoder(feature)
                if decode is not None:
                    decode = _file_content if self._is_converted and hasattr(feature, "decode_example") else decode
                    columns[name] = Decoded(column, decode, f"decoded {column.type_name}")
                if self._is_converted and isinstance(classes := getattr(feature, "names", None), list):
                    columns[f"{name}_name"] = Decoded(column, _ClassNames(tuple(classes)), "name")
            self._tables = _Tables(data, table, columns)
        return self._tables


class _Tables(NamedTuple):
    """The tables of a dataset: the rows before decoding, and the numbers of the dataset's rows, None for all."""

    data: ArrowTable
    indices: ArrowTable | None
    columns: Mapping[str, Column]


def _saved_dataset(paths: Any) -> Any:
    """Returns the dataset that `save_to_disk` has written to a folder, or that of Arrow files."""
    try:
        import datasets  # noqa: PLC0415  (lazy: an optional package)
    except ImportError as error:
        raise ImportError(
            "Cannot open saved datasets without Hugging Face's library: pip install 'millstream[huggingface]'."
        ) from error
    folder = absolute_path(os.fsdecode(paths)) if isinstance(paths, str | os.PathLike) else ""
    if not os.path.isdir(folder):  # noqa: PTH112  (paths are strings throughout)
        files = [file.path for file in resolve_paths(paths, "Arrow")]
        for file in files:
            identify(file, "Arrow")
        try:
            return datasets.concatenate_datasets([datasets.Dataset.from_file(file) for file in files])
        except (OSError, ValueError) as error:
            raise DataSourceError(f"Cannot open {files[0]!r}: {str(error).rstrip('.')}. Restore the file.") from error
    found = datasets.load_from_disk(folder)
    if isinstance(found, datasets.DatasetDict):
        if len(found) != 1:
            splits = ", ".join(repr(f"{folder.rstrip('/')}/{name}") for name in found)
            raise ValueError(f"{folder!r} has {len(found)} splits. Pass the folder of one of them: {splits}.")
        (found,) = found.values()
    return found


def _checked_columns(dataset: Any) -> list[str]:
    kinds = {kind.__name__ for kind in type(dataset).__mro__ if kind.__module__.partition(".")[0] == "datasets"}
    if "Dataset" not in kinds:
        advice = ""
        if "DatasetDict" in kinds:
            advice = f" Choose one of its splits: {', '.join(map(repr, dataset))}."
        elif "IterableDataset" in kinds:
            advice = (
                " It is read in order. Write millstream.IterDataset.source(dataset), or load it without streaming=True."
            )
        raise TypeError(f"dataset must be a datasets.Dataset, got {type(dataset).__name__}.{advice}")
    if dataset.format["type"] == "custom":
        raise TypeError(
            "dataset must not have a transform (with_transform or set_transform), because that computes its records. "
            "Pass the dataset itself to the DataLoader, or write the transform as a Map and pass "
            "dataset.with_format(None)."
        )
    names = list(dataset.format["columns"])
    if not names:
        raise ValueError("dataset must have at least one column, got none.")
    return names


def _decoder(feature: Any) -> Callable[[Any], Any] | None:
    """Returns the function that decodes stored values of a feature, or None if they need no decoding."""
    if hasattr(feature, "decode_example") and getattr(feature, "decode", True):
        decode_example: Callable[[Any], Any] = feature.decode_example
        return decode_example
    if isinstance(feature, dict):
        decoders = {name: decode for name, member in feature.items() if (decode := _decoder(member)) is not None}
        return _MembersDecoder(decoders) if decoders else None
    inner = feature[0] if isinstance(feature, list | tuple) and feature else getattr(feature, "feature", None)
    decode_inner = None if inner is None else _decoder(inner)
    return None if decode_inner is None else _ListDecoder(decode_inner)


def _file_content(value: Mapping[str, Any]) -> bytes:
    """Returns the content of an image or a recording, given its stored value."""
    content: bytes | None = value["bytes"]
    if content is None:
        with open(value["path"], "rb") as file:  # noqa: PTH123  (paths are strings throughout)
            return file.read()
    return content


@dataclasses.dataclass(frozen=True, slots=True)
class _ClassNames:
    """Returns the name of a label, and nothing for -1, which stands for a missing one."""

    names: tuple[str, ...]

    def __call__(self, label: int) -> str:
        return self.names[label] if 0 <= label < len(self.names) else ""


@dataclasses.dataclass(frozen=True, slots=True)
class _MembersDecoder:
    """Decodes the members of dicts that have a decoder."""

    decoders: Mapping[str, Callable[[Any], Any]]

    def __call__(self, value: dict[str, Any]) -> dict[str, Any]:
        decoded = {name: None if value[name] is None else decode(value[name]) for name, decode in self.decoders.items()}
        return value | decoded


@dataclasses.dataclass(frozen=True, slots=True)
class _ListDecoder:
    """Decodes each member of lists."""

    decode: Callable[[Any], Any]

    def __call__(self, value: Sequence[Any]) -> list[Any]:
        return [None if member is None else self.decode(member) for member in value]
