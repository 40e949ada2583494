"""Sources are accepted, everything else is refused with the call to write instead; each format has one class."""

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.sources.formats import FORMATS
from millstream.sources.source_checks import advice_for


def of_library(name: str, **members: Any) -> type:
    """Returns a class that another library might define, with a length and records under any key."""
    return type(
        "Table",
        (),
        {"__module__": f"{name}.core.frame", "__len__": lambda _: 3, "__getitem__": lambda *_: np.ones(3), **members},
    )


FRAME = of_library("pandas", columns=["a"], iloc=None)

NOT_SOURCES: dict[str, tuple[Callable[[], Any], str]] = {
    "text": (lambda: "x.array_record", r"got str: .*ArrayRecordDataSource\('x\.array_record'\)"),
    "path": (lambda: Path("a/x"), r"ArrayRecordDataSource\('a/x'\)"),
    "TFRecord": (lambda: "a.tfrecord", r"TFRecordDataSource\('a\.tfrecord'\)"),
    "JSON Lines": (lambda: Path("a.jsonl"), r"JsonLinesDataSource\('a\.jsonl'\)"),
    "archive": (lambda: "a.tar", r"WebDatasetDataSource\('a\.tar'\)"),
    "columns": (lambda: {"a": np.zeros(3)}, r"got dict: its keys are names.*millstream\.InMemoryDataSource\(dict\("),
    "proxy": (lambda: types.MappingProxyType({"a": 1}), r"InMemoryDataSource\("),
    "class": (lambda: millstream.RangeDataSource, r"Pass an instance of it: RangeDataSource\(\.\.\.\)"),
    "iterator": (lambda: iter([1]), r"Pass list\(iterator\)"),
    "DataFrame": (FRAME, r"got Table: .*\{name: table\[name\]\.to_numpy\(\) for name in table\.columns\}"),
    "its subclass": (type("Own", (FRAME,), {}), r"got Own: .*table\.columns"),
    "polars": (of_library("polars", columns=["a"]), r"table\.columns"),
    "Series": (of_library("pandas", iloc=None), r"its keys are labels\. Pass series\.to_numpy\(\)"),
    "Arrow": (of_library("pyarrow", column_names=["a"]), r"for name in table\.column_names"),
}


@pytest.mark.parametrize("name", NOT_SOURCES)
def test_what_is_not_a_source_is_refused_with_the_right_way(name: str) -> None:
    """DataLoader and load refuse what is not a source, with its kind and the code to write."""
    make, message = NOT_SOURCES[name]
    with pytest.raises(TypeError, match=f"^data_source must be a source of records, {message}|{message}"):
        millstream.load(make())
    with pytest.raises(TypeError, match=message):
        millstream.DataLoader(data_source=make(), sampler=millstream.IndexSampler(1))


@pytest.mark.parametrize(
    "value",
    [[1], (1,), range(3), np.arange(3), {0: "a", 1: "b"}, millstream.RangeDataSource(0, 3), of_library("datasets")()],
)
def test_sources_are_taken_as_they_are(value: Any) -> None:
    """Lists, arrays, tables of other libraries that have records, and dicts by number."""
    assert advice_for(value) is None
    assert len(list(millstream.load(value, num_epochs=1))) == len(value)


def decoded(kind: Any, **members: Any) -> Any:
    """Returns a class that decodes in `__getitem__`; it has no `__getitems__` of its own unless `members` has it."""
    return type("Decoded", (kind,), {"__getitem__": lambda self, key: 100 + kind.__getitem__(self, key), **members})


class Forwarding:
    """A wrapper that decodes, and forwards every other attribute, `__getitems__` too."""

    def __init__(self, source: Any) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, record_key: int) -> int:
        return 100 + int(self._source[record_key])

    def __getattr__(self, name: str) -> Any:
        if name == "_source":
            raise AttributeError(name)
        return getattr(self._source, name)


OVERRIDDEN: dict[str, tuple[Callable[[], Any], int]] = {
    "a source of millstream": (lambda: decoded(millstream.RangeDataSource)(0, 8), 100),
    "columns": (lambda: decoded(millstream.InMemoryDataSource)(np.arange(8)), 100),
    "a wrapper": (lambda: Forwarding(millstream.RangeDataSource(0, 8)), 100),
    "a list": (lambda: decoded(list)(range(8)), 100),
    "a batched read of its own": (
        lambda: decoded(millstream.RangeDataSource, __getitems__=lambda _, keys: [200 + int(key) for key in keys])(
            0, 8
        ),
        200,
    ),
}


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_the_more_derived_read_wins(name: str) -> None:
    """A `__getitem__` that overrides alone, or a wrapper's, is used by loaders, chains, and sources of sources."""
    make, offset = OVERRIDDEN[name]
    expected = [offset + key for key in range(8)]
    both = millstream.ConcatenatedDataSource({"a": make(), "b": make()})

    assert list(millstream.load(make(), num_epochs=1)) == expected
    assert next(iter(millstream.load(make(), num_epochs=1, batch_size=8))).tolist() == expected
    assert list(millstream.MapDataset.source(make()).to_iter_dataset()) == expected
    assert next(iter(millstream.MapDataset.source(make()).batch(8))).tolist() == expected
    assert list(millstream.load(both, num_epochs=1)) == expected * 2
    assert list(millstream.load(millstream.InMemoryDataSource(make()), num_epochs=1)) == expected


def test_each_format_is_listed_once() -> None:
    """No two formats have a name, an extension or a class in common, and the class is the public one of that name."""
    names, sources = ([getattr(kind, member) for kind in FORMATS] for member in ("name", "source"))
    for words in (names, sources, [ending for kind in FORMATS for ending in kind.extensions]):
        assert len(set(words)) == len(words)
    for source in sources:
        assert getattr(millstream.sources, source) is getattr(millstream, source)
