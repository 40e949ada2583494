"""The nodes that chains begin with: a source of records, and a user's own dataset."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import numpy as np

from millstream.dataset.nodes.node import Node, Positions, divided, divided_one, words_of
from millstream.loader.checkpoints.description import Description
from millstream.loader.checkpoints.fingerprint import add_source
from millstream.loader.pipeline.arguments import source_name
from millstream.loader.pipeline.elements import Elements, Origins
from millstream.loader.pipeline.reading import reader_of
from millstream.loader.pipeline.steps import annotated
from millstream.sources import DataSource
from millstream.sources.base import HeldRecords


@dataclasses.dataclass(frozen=True, eq=False)
class Source(Node):
    """The records of a source, in their order.

    Attributes:
        source: anything with `len(source)` and `source[key]`; `__getitems__` is used if it is there.
    """

    source: DataSource[Any]

    @property
    def parents(self) -> tuple[Node, ...]:
        """None."""
        return ()

    @functools.cached_property
    def length(self) -> int:
        """How many records there are."""
        return len(self.source)

    @functools.cached_property
    def sources(self) -> tuple[Any, ...]:
        """The source, unless it is empty: nothing is read from it then."""
        return (self.source,) if self.length else ()

    def record_keys(self, positions: Positions, starts: Mapping[int, int]) -> Positions:
        """Returns offsets in the epoch, after the sources that come before."""
        return divided(positions, self.length)[1] + starts[id(self.source)]

    def locate(self, positions: Positions) -> tuple[Positions, Positions]:
        """Returns the positions, and their record keys."""
        return positions, divided(positions, self.length)[1]

    def elements(self, located: tuple[Positions, Positions], start: int, stop: int) -> Sequence[Any]:
        """Returns the records, read in one call where the source can."""
        positions, keys = located
        table = np.zeros((5, stop - start), np.int64)
        table[0], table[1] = positions[start:stop], keys[start:stop]
        run = self._read(Origins(table))
        if run.error is not None:
            raise run.error
        return run.values

    def at(self, position: int) -> Any:
        """Returns a record, alone."""
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
        """What single records are taken from: of a list in memory, each reader gets dicts of its own."""
        source = cast("Sequence[Any]", self.source)
        return HeldRecords(source).quickest if type(source) in (list, tuple) else source

    @functools.cached_property
    def _read(self) -> Callable[[Origins], Elements]:
        return reader_of(self.source)

    def __reduce__(self) -> tuple[Any, ...]:
        # How it is read is found out in each process. Workers share the records of a list in memory.
        source: Any = self.source
        return rebuilt, (HeldRecords(source) if type(source) in (list, tuple) else source,)

    @property
    def text(self) -> str:
        """The source."""
        return f"source({source_name(self.source)})"

    def words(self) -> Iterator[str]:
        """Yields what the source says of itself, or what it is made of."""
        words = self.content().identity
        yield f"Source({', '.join(f'source{name}: {text}' for name, text in words.items())})"

    def content(self) -> Description:
        """Returns the description of the source."""
        found = Description()
        add_source(found, "", self.source)
        return found


def rebuilt(source: Any) -> Source:
    """Returns the node of a source that was pickled, or of what a worker has in its place."""
    return Source(source.records if type(source) is HeldRecords else source)


@dataclasses.dataclass(frozen=True, eq=False)
class Own(Node):
    """The elements of a user's subclass of MapDataset, which is asked for one after the other.

    Attributes:
        dataset: an object of that class.
        above: the nodes of its parents.
    """

    dataset: Any
    above: tuple[Node, ...]

    @property
    def parents(self) -> tuple[Node, ...]:
        """The parents that the dataset has named."""
        return self.above

    @functools.cached_property
    def length(self) -> int:
        """What the dataset says."""
        return len(self.dataset)

    @functools.cached_property
    def looks_ahead(self) -> bool:
        """Nothing is located: positions are handed on as they are."""
        return True

    def locate(self, positions: Positions) -> Positions:
        """Returns the positions."""
        return positions

    def elements(self, located: Positions, start: int, stop: int) -> Sequence[Any]:
        """Returns what the dataset's `__getitem__` gives for each position."""
        return [self.dataset[position] for position in located[start:stop].tolist()]

    def at(self, position: int) -> Any:
        """Returns what the dataset's `__getitem__` gives."""
        return self.dataset[position]

    @property
    def text(self) -> str:
        """The class of the dataset."""
        return type(self.dataset).__name__

    def words(self) -> Iterator[str]:
        """Yields the class and the attributes of the dataset, without its parents."""
        yield f"{type(self.dataset).__qualname__}(length: {self.length}, {words_of(self._parameters())})"

    def content(self) -> Description:
        """Returns the description of the dataset: its attributes, and the code of its class."""
        found = Description()
        found.add("", self._parameters())
        found.add_code("", type(self.dataset))
        return found

    def _parameters(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self.dataset).items() if name not in _KEPT_BY_MAP_DATASET}


_KEPT_BY_MAP_DATASET = {"_parents", "_depth", "_node", "_blocks"}
"""The attributes of every MapDataset."""
