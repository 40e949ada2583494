"""The first nodes of chains: a source of records, or a user's own dataset."""

import dataclasses
import functools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from millstream.dataset.nodes.node import Node, Positions, Units, divided, divided_one
from millstream.loader.checkpoints.description import Description, identity_of
from millstream.loader.checkpoints.fingerprint import add_source, slots_of
from millstream.loader.pipeline.elements import Elements, Origins
from millstream.loader.pipeline.pipeline import source_name
from millstream.loader.pipeline.steps import annotated, reader_of
from millstream.samplers.order import Occurrences
from millstream.sources import DataSource
from millstream.sources.base import HeldRecords, is_held
from millstream.sources.source_checks import is_in_memory, reads_one_by_one


@dataclasses.dataclass(frozen=True, eq=False)
class Source(Node):
    """The records of a source, in order."""

    source: DataSource[Any]

    @property
    def parents(self) -> tuple[Node, ...]:
        return ()

    @functools.cached_property
    def length(self) -> int:
        return len(self.source)

    @functools.cached_property
    def sources(self) -> tuple[Any, ...]:
        """The source, unless it is empty, because nothing is read from it then."""
        return (self.source,) if self.length else ()

    @property
    def traced(self) -> tuple[Any, ...]:
        return self.sources

    @functools.cached_property
    def reads_one_by_one(self) -> bool:
        return reads_one_by_one([self.source])

    @functools.cached_property
    def is_in_memory(self) -> bool:
        return is_in_memory(self.source)

    @functools.cached_property
    def window_units(self) -> int | None:
        window = getattr(self.source, "window_units", None)
        return window if isinstance(window, int) and self.units().sizes.sum() == self.length else None

    def units(self) -> Units:
        source: Any = self.source
        sizes = np.array(source.unit_sizes, np.int64)
        return Units(sizes, np.arange(len(sizes)))

    def record_keys(self, positions: Positions, starts: Mapping[int, int]) -> Positions:
        return divided(positions, self.length)[1] + starts[id(self.source)]

    def occurrences(self, keys: Positions, starts: Mapping[int, int], stop: int) -> Occurrences:
        # An empty source has no start.
        own = keys - starts.get(id(self.source), 0)
        rows = np.flatnonzero((own >= 0) & (own < self.length))
        epochs = np.arange(-(-stop // max(1, self.length)) if len(rows) else 0)
        positions = np.add.outer(own[rows], epochs * self.length).ravel()
        is_before = positions < stop
        return Occurrences(np.repeat(rows, len(epochs))[is_before], positions[is_before])

    def locate(self, positions: Positions) -> tuple[Positions, Positions]:
        return positions, divided(positions, self.length)[1]

    def elements(self, located: tuple[Positions, Positions], start: int, stop: int) -> Sequence[Any]:
        positions, keys = located
        table = np.zeros((5, stop - start), np.int64)
        table[0], table[1] = positions[start:stop], keys[start:stop]
        run = self._read(Origins(table))
        if run.error is not None:
            raise run.error
        return run.values

    def at(self, position: int) -> Any:
        key = divided_one(position, self.length)[1]
        try:
            return self._records[key]
        except BaseException as error:
            where = f"reading from {type(self.source).__name__}, at record key {key}"
            failure = annotated(error, where, may_end=True)
            if failure is error:
                raise
            raise failure from None

    @functools.cached_property
    def _records(self) -> Any:
        """The object that single records are read from. Each reader of data in memory gets its own copies."""
        source = cast("Sequence[Any]", self.source)
        return HeldRecords(source).quickest if is_held(source) else source

    @functools.cached_property
    def _read(self) -> Callable[[Origins], Elements]:
        return reader_of(self.source)

    def __reduce__(self) -> tuple[Any, ...]:
        # Each process finds out how to read it. Workers share the records of a list in memory.
        source: Any = self.source
        return rebuilt, (HeldRecords(source) if type(source) in (list, tuple) else source,)

    @property
    def text(self) -> str:
        return f"source({source_name(self.source)})"

    def identities(self) -> Iterator[str]:
        identity = self.content().identity
        yield f"Source({', '.join(f'source{name}: {text}' for name, text in identity.items())})"

    def content(self) -> Description:
        found = Description()
        add_source(found, "", self.source)
        return found


def rebuilt(source: Any) -> Source:
    """Returns the node of an unpickled source, or of its replacement in a worker."""
    return Source(source.records if type(source) is HeldRecords else source)


@dataclasses.dataclass(frozen=True, eq=False)
class Own(Node):
    """The elements of a user's subclass of MapDataset, read one by one, whatever its parents do."""

    dataset: Any
    above: tuple[Node, ...]
    # Positions are passed on unchanged, and elements are read one by one.
    looks_ahead = reads_one_by_one = True
    # Its `__getitem__` sees positions continued across epochs.
    differs_by_epoch = is_of_user = True
    # The user's code may wait for anything.
    is_in_memory = False

    @functools.cached_property
    def length(self) -> int:
        return len(self.dataset)

    def locate(self, positions: Positions) -> Positions:
        return positions

    def elements(self, located: Positions, start: int, stop: int) -> Sequence[Any]:
        return [self.dataset[position] for position in located[start:stop].tolist()]

    def at(self, position: int) -> Any:
        return self.dataset[position]

    @property
    def text(self) -> str:
        return type(self.dataset).__name__

    def identities(self) -> Iterator[str]:
        yield f"{type(self.dataset).__qualname__}(length: {self.length}, {identity_of(self._parameters())})"

    def content(self) -> Description:
        found = Description()
        found.add("", self._parameters())
        found.add_code("", type(self.dataset))
        return found

    def _parameters(self) -> types.SimpleNamespace:
        """Returns its attributes, each of which is described by itself."""
        return types.SimpleNamespace(**self.attributes)

    @property
    def attributes(self) -> dict[str, Any]:
        """The attributes of the user's class."""
        own = slots_of(self.dataset) | vars(self.dataset)
        return {name: value for name, value in own.items() if name not in _KEPT_BY_MAP_DATASET}


def copied_with(dataset: Any, attributes: Mapping[str, Any]) -> Any:
    """Returns a dataset of the same class with other attributes, and no call of its `__init__`."""
    copied = object.__new__(type(dataset))
    slots = slots_of(dataset)
    for name, value in slots.items():
        object.__setattr__(copied, name, attributes.get(name, value))
    changed = {name: value for name, value in attributes.items() if name not in slots}
    vars(copied).update(vars(dataset) | changed)
    return copied


HANDED = "_handed_options"
"""The attribute of a copy of a dataset with the options of a user's dataset that draws from it."""

_KEPT_BY_MAP_DATASET = {"_parents", "_depth", "_node", "_blocks", HANDED}
"""The attributes that every MapDataset has."""
