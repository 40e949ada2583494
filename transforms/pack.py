"""Rows laid out from several documents."""

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from millstream.checks import as_integer, named_arguments
from millstream.transforms.transformation import Transformation


class Document(NamedTuple):
    """A document on its way into a row.

    Attributes:
        value: what the operations before have made of the record.
        record_key: which record it is.
        length: how many tokens it has to have.
        begin: the first token that goes into the row.
        end: one more than the last.
    """

    value: Any
    record_key: int
    length: int
    begin: int
    end: int


@functools.lru_cache(maxsize=4)
def _counting(length: int) -> NDArray[np.int32]:
    """Returns 0, 1, 2, …; not to be written to."""
    return np.arange(length, dtype=np.int32)


@final
class Pack(Transformation):
    """Makes one row of the documents that a `PackingSampler` puts into it.

    The operations before see documents, one by one; those after see rows, and a Batch batches rows. A document is a
    dict with the features named here (others are left out), or, where there is one only, that feature's array itself.
    Features are arrays with one entry for each token: equally long, in their first axis.

    A row is a dict. For each feature, say "tokens", it has

        tokens                the documents one after the other, then padding; of their dtype
        tokens_segment_ids    int32: 1 for the tokens of the first document, 2 for the second, …; 0 is padding
        tokens_positions      int32: 0, 1, 2, … from each document's first token in the row on; 0 in the padding

    all of shape (length, …). The names are those of Grain.

    Args:
        length_struct: how long a row is, for each feature: at least the sampler's row_length.
        meta_features: features that need no segment ids and positions of their own.
        padding_struct: what fills up each feature; 0 for those that are not named.

    Attributes:
        length_struct, meta_features, padding_struct: as given.

    Raises:
        TypeError, ValueError: an argument is of the wrong kind, or names what is no feature. While reading, a
            ValueError where a document is not as long as the sampler's lengths say, lacks a feature, or has another
            dtype or shape than the others of its row.
    """

    is_complete: ClassVar[bool] = True
    gathers: ClassVar[bool] = True

    @named_arguments()
    def __init__(
        self,
        length_struct: Mapping[str, int],
        *,
        meta_features: Collection[str] = (),
        padding_struct: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(length_struct, Mapping):
            raise TypeError(
                f"length_struct must say how long each feature is, such as {{'tokens': 2048}}, got {length_struct!r}."
            )
        if not length_struct:
            raise ValueError("length_struct must name at least one feature, got none.")
        self.length_struct = {
            name: as_integer(length, f"length_struct[{name!r}]", minimum=1) for name, length in length_struct.items()
        }
        if isinstance(meta_features, str):
            raise TypeError(f"meta_features must be a list of names, got {meta_features!r}: write [{meta_features!r}].")
        self.meta_features = tuple(sorted(meta_features))
        self.padding_struct = dict(padding_struct or {})
        for what, names in (("meta_features", self.meta_features), ("padding_struct", self.padding_struct)):
            if unknown := [name for name in names if name not in self.length_struct]:
                raise ValueError(f"{what} names {unknown[0]!r}, which length_struct does not: {list(length_struct)}.")

    def __repr__(self) -> str:
        options = {"meta_features": self.meta_features, "padding_struct": self.padding_struct}
        shown = "".join(f", {name}={value!r}" for name, value in options.items() if value)
        return f"Pack({self.length_struct!r}{shown})"

    def pack(self, documents: Sequence[Document]) -> dict[str, NDArray[Any]]:
        """Returns the row of some documents, at least one, in their order.

        Raises:
            ValueError: a document does not fit.
        """
        row: dict[str, NDArray[Any]] = {}
        for name, length in self.length_struct.items():
            arrays = [self._feature(document, name) for document in documents]
            first = arrays[0]
            tokens = np.full((length, *first.shape[1:]), self.padding_struct.get(name, 0), dtype=first.dtype)
            has_companions = name not in self.meta_features
            segment_ids, positions = (np.zeros(length if has_companions else 0, dtype=np.int32) for _ in range(2))
            counting = _counting(length)
            start = 0
            for number, (array, document) in enumerate(zip(arrays, documents, strict=True), 1):
                if array.dtype != first.dtype or array.shape[1:] != first.shape[1:]:
                    raise ValueError(
                        f"The documents of a row must be alike, but {name!r} of record key {documents[0].record_key} "
                        f"has dtype {first.dtype} and shape {first.shape}, of record key {document.record_key} "
                        f"{array.dtype} and {array.shape}."
                    )
                stop = start + document.end - document.begin
                tokens[start:stop] = array[document.begin : document.end]
                if has_companions:
                    segment_ids[start:stop] = number
                    positions[start:stop] = counting[: stop - start]
                start = stop
            row[name] = tokens
            if has_companions:
                row[f"{name}_segment_ids"], row[f"{name}_positions"] = segment_ids, positions
        return row

    def _feature(self, document: Document, name: str) -> NDArray[Any]:
        value = document.value
        # Arrays first: to find out that one is no mapping takes longer than all else.
        if not isinstance(value, np.ndarray) and isinstance(value, Mapping):
            if name not in value:
                raise ValueError(
                    f"Pack needs the feature {name!r}, but the document of record key {document.record_key} has "
                    f"{', '.join(map(repr, value)) or 'none'}."
                )
            value = value[name]
        elif len(self.length_struct) > 1:
            raise ValueError(
                f"Pack of several features needs dicts, got {type(value).__name__} at record key {document.record_key}."
            )
        array = np.asarray(value)
        if array.ndim == 0 or len(array) != document.length:
            raise ValueError(
                f"The document of record key {document.record_key} has {name!r} of shape {array.shape}, but the "
                f"sampler's lengths say that it has {document.length} tokens: make the lengths anew, of what the "
                "operations before Pack give."
            )
        return array
