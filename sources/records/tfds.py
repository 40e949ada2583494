"""Prepared datasets of TensorFlow Datasets, read without TensorFlow and without its library."""

import json
import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, final

import numpy as np

from millstream.core.closing import Closing
from millstream.errors import DataSourceError
from millstream.sources.base import ReadsBatches, RecordKeys, checked_record_keys, explained
from millstream.sources.column_records import records_of_arrays
from millstream.sources.memory import rows_of
from millstream.sources.records.array_record import ArrayRecordDataSource
from millstream.sources.records.tfds_features import leaves_of
from millstream.sources.records.tfds_splits import Split, ranges_of, splits_of
from millstream.sources.records.tfrecord import TFRecordDataSource
from millstream.sources.remote.urls import is_url, without_query
from millstream.sources.storage.byte_files import refuse_placeholder
from millstream.sources.storage.paths import FileIdentity, absolute_path
from millstream.tf_example.columns import decode_columns

_SOURCES: Mapping[str, Callable[[Any], Any]] = {"array_record": ArrayRecordDataSource, "tfrecord": TFRecordDataSource}
"""The source class of each file format."""

_DAMAGE = (LookupError, TypeError, AttributeError)
"""The errors of a description that has other types than expected."""

_T = TypeVar("_T")


@final
class TfdsDataSource(Closing, ReadsBatches):
    """Random access to a dataset that TensorFlow Datasets has prepared, as dicts. TensorFlow is not needed.

    It reads the dataset's ArrayRecord or TFRecord files, and decodes all Examples of a batch together. The return value
    of `tfds.data_source(...)` is also a source, which decodes one Example at a time and supports all features.

    A record has the structure of the dataset's features:

    - `Tensor`, `Scalar`, `ClassLabel` and `BBoxFeature`: NumPy scalars, or arrays of their shape and dtype;
    - `Text`, and tensors of strings: bytes, or arrays of them;
    - `Image`: the bytes of the PNG or JPEG file. Decode them in an operation, so that workers do it;
    - `Sequence`: arrays with one more dimension; for a dict, a dict of such arrays;
    - `FeaturesDict` and `Translation`: dicts.

    Other features (`Audio`, `Video`, `Dataset`, `Optional`, sequences within sequences, tensors with two unknown
    sizes) are an error. If Batch is the first operation and all shapes agree, columns become arrays directly.

    Args:
        dataset: the folder of a prepared dataset, which contains `dataset_info.json` (`~` is expanded), or a builder of
            `tensorflow_datasets`.
        split: the name of a split, with an optional slice, or several of these joined by `+`: "train", "train[:80%]",
            "train[100:200]+test", "all".

    Raises:
        FileNotFoundError, PermissionError, …: the folder, or a file of the split, is missing or cannot be read.
        DataSourceError: the dataset's description or a file is damaged, or the file format is not supported.
        ValueError: the split does not exist or has fewer records, or a feature is not supported.
        TypeError: the dataset is neither a path nor a builder, or the split is not a str.

    Reading raises DataSourceError, with the file and the record, if a record is damaged, or if a file was truncated,
    removed or written to after the source was constructed.

    Examples:
        >>> source = millstream.TfdsDataSource("tensorflow_datasets/digits/1.0.0", "train[:50%]")
        >>> len(source), source[1]
        (5, {'label': np.int64(1)})
    """

    def __init__(self, dataset: Any, split: str) -> None:
        if not isinstance(split, str):
            raise TypeError(f"split must be a str, such as 'train' or 'train[:80%]', got {type(split).__name__}.")
        folder = _folder_of(dataset)
        file_format, splits = _described(
            folder, "dataset_info.json", lambda info: _splits_of(info, folder), (*_DAMAGE, ValueError)
        )
        self._split = split
        self._leaves = _described(folder, "features.json", leaves_of, _DAMAGE)
        self._stored = {leaf.name: leaf.stored for leaf in self._leaves}
        self._source = _SOURCES[file_format](ranges_of(split, splits))

    def __len__(self) -> int:
        return len(self._source)

    def __getitems__(self, record_keys: RecordKeys) -> Sequence[Any]:
        """Returns the records of the keys, in their order; keys may repeat."""
        keys = checked_record_keys(record_keys, len(self))
        examples = list(self._source.__getitems__(keys))
        if not examples:
            return []
        columns = explained(
            lambda: self._columns(examples), lambda row: self._columns([examples[row]]), keys, self._record_error
        )
        if all(isinstance(column, np.ndarray) for column in columns):
            return records_of_arrays(self._tree(columns), len(keys))
        # The rows of a feature whose shapes differ are objects.
        leaves = [np.fromiter(column, object, len(keys)) if isinstance(column, list) else column for column in columns]
        rows: list[Any] = rows_of(self._tree(leaves), len(keys))
        return rows

    def __repr__(self) -> str:
        return f"TfdsDataSource({self._split!r}, {self._source!r})"

    @property
    def files(self) -> dict[str, FileIdentity]:
        """The identity of each file at construction, by path, in their order."""
        files: dict[str, FileIdentity] = self._source.files
        return files

    def close(self) -> None:
        """Closes all files. Reading then raises ValueError. May be called again."""
        self._source.close()

    def fingerprint(self) -> str:
        """Returns the fingerprint of the files' source with a checksum of the features."""
        checksum = zlib.crc32(repr(self._leaves).encode("utf-8", "surrogatepass"))
        return f"TFDS {self._source.fingerprint()} features={len(self._leaves)}:{checksum:08x}"

    def content_marks(self) -> dict[str, str]:
        """Returns digests of file ends. A checkpoint warns if they differ."""
        marks: dict[str, str] = self._source.content_marks()
        return marks

    def _columns(self, examples: list[bytes]) -> list[Any]:
        stored = decode_columns(self._stored, examples)
        return [leaf.column(stored[leaf.name]) for leaf in self._leaves]

    def _tree(self, columns: Sequence[Any]) -> dict[str, Any]:
        """Returns the columns in the structure of the features."""
        tree: dict[str, Any] = {}
        for leaf, column in zip(self._leaves, columns, strict=True):
            inner = tree
            for name in leaf.path[:-1]:
                inner = inner.setdefault(name, {})
            inner[leaf.path[-1]] = column
        return tree

    def _record_error(self, key: int, error: ValueError) -> DataSourceError:
        path, position = self._source.locate(key)
        return DataSourceError(
            f"Cannot read record {position} of {path!r} (record key {key}): {error} Restore the file."
        )


def _folder_of(dataset: Any) -> str:
    folder = dataset if isinstance(dataset, str | os.PathLike) else getattr(dataset, "data_dir", None)
    if not isinstance(folder, str | os.PathLike):
        raise TypeError(
            "dataset must be the folder of a prepared dataset, or a builder of tensorflow_datasets, got "
            f"{type(dataset).__name__}."
        )
    return absolute_path(os.fsdecode(folder))


def _described(
    folder: str, name: str, parse: Callable[[dict[str, Any]], _T], damage: tuple[type[Exception], ...]
) -> _T:
    """Parses a file that describes a dataset. `parse` raises one of the errors `damage` for a damaged one."""
    if is_url(folder):
        raise ValueError(
            f"Prepared datasets are read from local folders, got {without_query(folder)!r}. Copy the folder to a local "
            "disk."
        )
    path = absolute_path(os.path.join(folder, name))  # noqa: PTH118
    try:
        with open(path, "rb") as file:  # noqa: PTH123
            text = file.read()
        refuse_placeholder(path, text)
        content = json.loads(text)
    except FileNotFoundError as error:
        raise FileNotFoundError(
            error.errno,
            "Not a prepared dataset of TensorFlow Datasets (give the folder of a version, such as mnist/3.0.1)",
            path,
        ) from None
    except (ValueError, RecursionError) as error:
        raise DataSourceError(f"{path!r} is damaged: {error}. Restore the file.") from error
    try:
        return parse(content)
    except DataSourceError:
        raise
    except damage as error:
        raise DataSourceError(
            f"{path!r} is damaged: it does not describe a dataset ({error!r}). Restore it."
        ) from error


def _splits_of(info: Mapping[str, Any], folder: str) -> tuple[str, dict[str, Split]]:
    """Returns the format of the files, and the splits by name."""
    file_format = info.get("fileFormat") or "tfrecord"
    if file_format not in _SOURCES:
        raise DataSourceError(
            f"The files of a dataset must be of the format {' or '.join(_SOURCES)}, but {folder!r} has "
            f"{file_format}. Prepare it again: builder.download_and_prepare(file_format='array_record')."
        )
    return file_format, splits_of(info, folder, file_format)
