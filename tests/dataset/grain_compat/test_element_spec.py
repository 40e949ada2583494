"""An element spec describes the elements, and is derived without computing one."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from millstream import InMemoryDataSource, IterDataset, MapDataset, MapTransform, RangeDataSource
from millstream.experimental import (
    LimitIterDataset,
    ShapeDtypeStruct,
    ShapeDtypeStructProtocol,
    ZipIterDataset,
    ZipMapDataset,
    get_element_spec,
)

COLUMNS = {"x": np.arange(24, dtype=np.float32).reshape(8, 3), "y": (np.arange(8),)}


class Doubled(MapTransform[Any, Any]):
    """Doubles the columns x, in float64, and says so."""

    def map(self, element: Any) -> Any:
        return {"x": element["x"].astype(np.float64) * 2}

    def output_spec(self, spec: Any) -> Any:
        return {"x": ShapeDtypeStruct(spec["x"].shape, np.dtype(np.float64))}


def columns() -> MapDataset[Any]:
    return MapDataset.source(InMemoryDataSource(COLUMNS))


KNOWN: dict[str, Callable[[], Any]] = {
    "range": lambda: MapDataset.range(10).shuffle(seed=0)[:4].repeat(2),
    "range source": lambda: MapDataset.source(RangeDataSource(1, 5)),
    "array": lambda: MapDataset.source(np.zeros((6, 2, 2), np.uint8)),
    "columns": columns,
    "batches": lambda: columns().batch(4),
    "short batch": lambda: columns().batch(3),
    "no short batch": lambda: columns().batch(3, drop_remainder=True),
    "batches of batches": lambda: columns().batch(2).batch(2),
    "map": lambda: columns().map(Doubled()).batch(8),
    "filter": lambda: columns().filter(lambda record: bool(record["x"][0] > 3)).to_iter_dataset().batch(2),
    "mix": lambda: MapDataset.mix([columns(), columns().shuffle(seed=0)], [1, 2]),
    "zip": lambda: ZipMapDataset([columns(), MapDataset.range(8)]),
    "stream": lambda: columns().to_iter_dataset().map(Doubled()).batch(3, drop_remainder=True).mp_prefetch(0),
    "streams": lambda: LimitIterDataset(
        ZipIterDataset([IterDataset.mix([columns().to_iter_dataset()] * 2), columns().to_iter_dataset()]), 3
    ),
}


def fits(spec: Any, leaf: Any) -> bool:
    """True if a leaf is as it was described."""
    shape, dtype = np.shape(leaf), np.asarray(leaf).dtype
    same_axes = len(shape) == len(spec.shape) and all(
        said in (None, is_) for said, is_ in zip(spec.shape, shape, strict=True)
    )
    return same_axes and spec.dtype == dtype


@pytest.mark.parametrize("make", KNOWN.values(), ids=KNOWN)
def test_elements_are_as_the_spec_says(make: Callable[[], Any]) -> None:
    """Each element has the structure, shape and dtype of the spec; a length in it is that of all elements."""
    dataset = make()
    spec = get_element_spec(dataset)
    elements = list(dataset)
    assert elements
    for element in elements:
        jax.tree.map(lambda said, _: said, spec, element)  # The same structure, or it raises.
        assert all(map(fits, jax.tree.leaves(spec), jax.tree.leaves(element)))
    assert all(isinstance(leaf, ShapeDtypeStructProtocol) for leaf in jax.tree.leaves(spec))


class Unread:
    """A source that must not be read, and says what it holds."""

    element_spec = ShapeDtypeStruct((2,), np.dtype(np.int8))

    def __len__(self) -> int:
        return 10

    def __getitem__(self, key: int) -> int:
        raise AssertionError(key)


def test_nothing_is_read() -> None:
    """A source says what it gives, and a batch whether all are of one size."""
    dataset = MapDataset.source(Unread()).repeat()
    assert get_element_spec(dataset.batch(5)) == ShapeDtypeStruct((None, 2), np.dtype(np.int8))
    assert get_element_spec(dataset[:10].batch(5)) == ShapeDtypeStruct((5, 2), np.dtype(np.int8))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: columns().map(len), r"Cannot determine the elements of Map\(len\) .* output_spec"),
        (lambda: MapDataset.source(["a", "b"]), "list of 2.*attribute element_spec"),
        (lambda: columns().batch(2, batch_fn=list), r"Batch\(batch_size=2, batch_fn=list\)"),
        (lambda: columns().to_iter_dataset().map(len), r"Map\(len\)"),
        (lambda: MapDataset.mix([columns(), MapDataset.range(3)]), "differ: "),
    ],
    ids=["map", "list", "batch_fn", "stream", "mix"],
)
def test_what_is_not_known_is_named(make: Callable[[], Any], match: str) -> None:
    """The error says which part does not tell, and what to give it."""
    with pytest.raises(ValueError, match=match):
        get_element_spec(make())


def test_only_datasets_have_specs() -> None:
    """Anything else is refused at once."""
    nothing: Any = [1, 2]
    with pytest.raises(TypeError, match="must be a MapDataset or an IterDataset, got list"):
        get_element_spec(nothing)
