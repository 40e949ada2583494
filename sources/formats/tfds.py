"""Prepared datasets of TensorFlow Datasets, read without TensorFlow and without its library.

For each split, `dataset_info.json` contains the number of records per file and a template of the file names. The
notation `train[:80%]+test` is described at tensorflow.org/datasets/splits.

`features.json` is the JSON form of a protocol buffer (tensorflow_datasets/core/proto/feature.proto). A record is a
`tf.train.Example`. Each of its features has the path of a leaf, joined by `/`, as its name. TFDS's
`example_serializer.py` and the feature classes define how each kind is stored.
"""

import dataclasses
import itertools
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.core.closing import Closing
from millstream.errors import DataSourceError
from millstream.sources.base import ReadsBatches, RecordKeys, checked_record_keys
from millstream.sources.file_formats import format_named
from millstream.sources.files.byte_files import refuse_placeholder
from millstream.sources.files.compression import inflated
from millstream.sources.files.paths import FileIdentity, FileRange, absolute_path, member_path
from millstream.sources.memory import records_of_arrays, rows_of
from millstream.sources.reads import explained
from millstream.sources.remote.urls import is_url, without_query
from millstream.tf_example.columns import decode_columns
from millstream.tf_example.features import FixedLengthFeature, RaggedColumn, VariableLengthFeature

_ONE = re.compile(r"(?P<name>[\w-]+)(?:\[(?P<start>[^:\]]*):(?P<stop>[^:\]]*)\])?")
_BOUND = re.compile(r"(-?[\d_.]+)(%?)")

_WORD = re.compile(r"\{(\w+)\}")

_DEFAULT_TEMPLATE = "{DATASET}-{SPLIT}.{FILEFORMAT}-{SHARD_X_OF_Y}"


@final
@dataclasses.dataclass(frozen=True)
class Split:
    """A split as it is stored: its files, and the number of records of each."""

    name: str
    files: Sequence[str]
    lengths: Sequence[int]

    @property
    def num_records(self) -> int:
        return sum(self.lengths)

    def ranges(self, start: int, stop: int) -> Iterator[FileRange]:
        """Yields the ranges of the files that hold the records [start, stop) of the split."""
        ends = list(itertools.accumulate(self.lengths))
        for file, length, end in zip(self.files, self.lengths, ends, strict=True):
            first, last = max(start, end - length), min(stop, end)
            if first < last:
                yield FileRange(file, first - (end - length), last - (end - length))


def splits_of(info: Mapping[str, Any], folder: str, file_format: str) -> dict[str, Split]:
    """Returns the splits of a dataset by name, given its `dataset_info.json` and its folder."""
    splits = {}
    for entry in info.get("splits", []):
        lengths = [int(length) for length in entry.get("shardLengths", [])]
        template = entry.get("filepathTemplate") or _DEFAULT_TEMPLATE
        count, digits = len(lengths), max(5, len(str(len(lengths))))
        files = []
        for number in range(count):
            fields = {
                "DATASET": info.get("name", ""),
                "SPLIT": entry["name"],
                "FILEFORMAT": file_format,
                "SHARD_INDEX": f"{number:0{digits}}",
                "NUM_SHARDS": f"{count:0{digits}}",
                "SHARD_X_OF_Y": f"{number:0{digits}}-of-{count:0{digits}}",
            }
            name = _WORD.sub(lambda match, fields=fields: fields.get(match[1], match[0]), template)
            files.append(member_path(folder, name))
        splits[entry["name"]] = Split(entry["name"], files, lengths)
    return splits


def ranges_of(text: str, splits: Mapping[str, Split]) -> list[FileRange]:
    """Returns the ranges of files for a split such as `train`, `train[:80%]` or `train[100:200]+test`."""
    found: list[FileRange] = []
    for slice_text in text.split("+"):
        one = _ONE.fullmatch(slice_text.strip())
        if one is None:
            raise ValueError(
                "split must be a name with an optional slice of records or percents, or several of these "
                f"joined by '+', such as 'train', 'train[:80%]' or 'train[100:200]+test', got {text!r}."
            )
        if one["name"] == "all" and one["start"] is None and "all" not in splits:
            chosen = list(splits.values())
        elif one["name"] not in splits:
            raise ValueError(f"split must be one of {', '.join(map(repr, splits))}, or 'all', got {text!r}.")
        else:
            chosen = [splits[one["name"]]]
        for split in chosen:
            start = _bound(one["start"], 0, split, text)
            stop = _bound(one["stop"], split.num_records, split, text)
            found += split.ranges(start, stop)
    if not found:
        raise ValueError(f"A source must hold at least one record, got none in the split {text!r}.")
    return found


def _bound(text: str | None, default: int, split: Split, whole: str) -> int:
    if not text:
        return default
    match, count = _BOUND.fullmatch(text.strip()), split.num_records
    try:
        if match is None:
            raise ValueError  # noqa: TRY301  (as for text that is not a number)
        # TFDS rounds percents in the same way: to the closest, halves to the even one.
        position = round(float(match[1]) * count / 100) if match[2] else int(match[1])
    except ValueError:
        raise ValueError(
            f"A slice of a split must have record numbers or percents, such as [10:20] or [:80%], got {whole!r}."
        ) from None
    if abs(position) > count:
        raise ValueError(f"Split {split.name!r} has {count} records, too few for {text} in {whole!r}.")
    return position + count if position < 0 else position


Column = NDArray[Any] | list[NDArray[Any]]
"""The values of a feature: one array, or one array per record if their shapes differ."""

_UNKNOWN = -1
"""The size of a dimension that varies between records."""


@final
@dataclasses.dataclass(frozen=True)
class Leaf:
    """A feature that has an array, or one value, in each record.

    The path has the names of the dicts around it, and its own. A dtype of None is bytes. At most one size of the shape
    is -1, for any size. The encoding is "none" if each value is stored by itself, and "bytes" or "zlib" if the array is
    stored as one string.
    """

    path: tuple[str, ...]
    dtype: str | None
    shape: tuple[int, ...] = ()
    encoding: str = "none"

    @property
    def name(self) -> str:
        return "/".join(self.path)

    @property
    def stored(self) -> FixedLengthFeature | VariableLengthFeature:
        """Its description for the decoder of Examples."""
        if self.encoding != "none":
            return FixedLengthFeature((), bytes)
        kind: Any = bytes if self.dtype is None else np.float32 if np.dtype(self.dtype).kind == "f" else np.int64
        return VariableLengthFeature(kind) if _UNKNOWN in self.shape else FixedLengthFeature(self.shape, kind)

    def column(self, stored: Any) -> Column:
        """Returns the values of several records, from the values that their Examples contain."""
        if self.encoding != "none":
            arrays = [self._decoded(content) for content in stored.tolist()]
            return np.stack(arrays) if len({array.shape for array in arrays}) == 1 else arrays
        if not isinstance(stored, RaggedColumn):
            return self._converted(stored)
        values = self._converted(stored.values)
        size = math.prod(size for size in self.shape if size != _UNKNOWN)
        if size == 0 or (stored.lengths % size).any():
            raise ValueError(f"Feature {self.name!r} has a number of values that does not fit the shape {self.shape}.")
        if len(stored.lengths) and (stored.lengths == stored.lengths[0]).all():
            return values.reshape(len(stored.lengths), *self._shape_of(int(stored.lengths[0]) // size))
        rows = RaggedColumn(values, stored.lengths).rows()
        return [row.reshape(self._shape_of(len(row) // size)) for row in rows]

    def _shape_of(self, unknown: int) -> tuple[int, ...]:
        return tuple(unknown if size == _UNKNOWN else size for size in self.shape)

    def _decoded(self, content: bytes) -> NDArray[Any]:
        try:
            if self.encoding == "zlib":
                num_bytes = math.prod(self.shape) * np.dtype(self.dtype).itemsize
                content = inflated(content, None if _UNKNOWN in self.shape else num_bytes)
            values: NDArray[Any] = np.frombuffer(content, self.dtype).reshape(self.shape).copy()
        except (ValueError, zlib.error) as error:
            raise ValueError(f"Feature {self.name!r} is not an array of shape {self.shape}: {error}.") from error
        return values

    def _converted(self, values: NDArray[Any]) -> NDArray[Any]:
        if self.dtype is None:
            return values
        return values.astype(self.dtype, copy=False)


def leaves_of(description: Mapping[str, Any]) -> list[Leaf]:
    """Returns the leaves of a dataset's features. One that is not supported is a ValueError."""
    if "featuresDict" not in description:
        kind = _kind_of(description)
        raise ValueError(f"The features of a dataset must be a FeaturesDict in the form of TFDS 4, got {kind}.")
    leaves = list(_leaves(description, (), ()))
    if not leaves:
        raise ValueError("A dataset must have at least one feature, got an empty FeaturesDict.")
    return leaves


def _leaves(feature: Mapping[str, Any], path: tuple[str, ...], outer: tuple[int, ...]) -> Iterator[Leaf]:
    """Yields the leaves of a feature inside sequences of the lengths in `outer`."""
    if "featuresDict" in feature:
        for name, member in feature["featuresDict"].get("features", {}).items():
            yield from _leaves(member, (*path, name), outer)
    elif "sequence" in feature:
        if outer:
            raise _unsupported(feature, path, "a sequence within a sequence")
        length = int(feature["sequence"].get("length", _UNKNOWN))
        yield from _leaves(feature["sequence"]["feature"], path, (length,))
    elif "translation" in feature:
        yield from (Leaf((*path, language), None, outer) for language in feature["translation"]["languages"])
    elif "text" in feature or "image" in feature:
        yield Leaf(path, None, outer)
    elif "classLabel" in feature:
        yield Leaf(path, "int64", outer)
    elif "tensor" in feature or "boundingBox" in feature:
        yield _tensor(feature, path, outer)
    else:
        raise _unsupported(feature, path, _kind_of(feature))


def _tensor(feature: Mapping[str, Any], path: tuple[str, ...], outer: tuple[int, ...]) -> Leaf:
    tensor = feature.get("tensor") or feature["boundingBox"]
    shape = outer + tuple(int(size) for size in tensor.get("shape", {}).get("dimensions", []))
    encoding = tensor.get("encoding", "none") or "none"
    if shape.count(_UNKNOWN) > 1:
        raise _unsupported(feature, path, f"a tensor of shape {shape}, with more than one unknown size")
    if tensor.get("optional"):
        raise _unsupported(feature, path, "an optional tensor")
    if encoding not in {"none", "bytes", "zlib"} or (encoding != "none" and outer):
        raise _unsupported(feature, path, f"a tensor of encoding {encoding!r}{' in a sequence' if outer else ''}")
    if tensor["dtype"] in {"string", "object", "str"}:
        return Leaf(path, None, shape)
    try:
        dtype = np.dtype(tensor["dtype"])
    except TypeError:
        raise _unsupported(feature, path, f"a tensor of dtype {tensor['dtype']}") from None
    return Leaf(path, dtype.name, shape, encoding)


def _unsupported(feature: Mapping[str, Any], path: tuple[str, ...], what: str) -> ValueError:
    return ValueError(
        f"Feature {'/'.join(path)!r} is {what} ({_kind_of(feature)}), which is not supported. Use the dataset's own "
        "reader: tfds.data_source(...) is a source, too."
    )


def _kind_of(feature: Mapping[str, Any]) -> str:
    return str(feature.get("pythonClassName") or feature.get("type") or "an unknown feature").rpartition(".")[2]


_FILE_FORMATS = frozenset({"array_record", "tfrecord"})

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
            "train[100:200]+test", "all"; None if there is only one.

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

    def __init__(self, dataset: Any, split: str | None = None) -> None:
        if not isinstance(split, str | None):
            raise TypeError(f"split must be a str, such as 'train' or 'train[:80%]', got {type(split).__name__}.")
        folder = _folder_of(dataset)
        file_format, splits = _described(
            folder, "dataset_info.json", lambda info: _splits_of(info, folder), (*_DAMAGE, ValueError)
        )
        if split is None and len(splits) != 1:
            raise ValueError(
                f"split must be one of {', '.join(map(repr, splits))}, or 'all', because {folder!r} has several. Write "
                f"millstream.TfdsDataSource({folder!r}, {next(iter(splits), 'all')!r})."
            )
        split = next(iter(splits)) if split is None else split
        self._split = split
        self._leaves = _described(folder, "features.json", leaves_of, _DAMAGE)
        self._stored = {leaf.name: leaf.stored for leaf in self._leaves}
        self._source = format_named(file_format).open(ranges_of(split, splits))

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
    if file_format not in _FILE_FORMATS:
        raise DataSourceError(
            f"The files of a dataset must be of the format {' or '.join(sorted(_FILE_FORMATS))}, but {folder!r} has "
            f"{file_format}. Prepare it again: builder.download_and_prepare(file_format='array_record')."
        )
    return file_format, splits_of(info, folder, file_format)
