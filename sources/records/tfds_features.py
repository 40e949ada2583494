"""The features of a TensorFlow Datasets dataset, as its `features.json` describes them, and their columns.

The file is the JSON form of a protocol buffer (tensorflow_datasets/core/proto/feature.proto). A record is a
`tf.train.Example`. Each of its features has the path of a leaf, joined by `/`, as its name. TFDS's
`example_serializer.py` and the feature classes define how each kind is stored.
"""

import dataclasses
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from millstream.sources.storage.compression import inflated
from millstream.tf_example.features import FixedLengthFeature, RaggedColumn, VariableLengthFeature

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
