"""The work of all contenders: one pipeline, described once, in no loader's terms."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

SEED = 17
"""Of all shuffles and all data."""


@dataclasses.dataclass(frozen=True)
class Map:
    """Calls a function with each record.

    Attributes:
        function: takes and returns an element.
        of_list: takes and returns a list of elements, where a library does many at once.
        graph: the same for tf.data, in TensorFlow's operations; None where it would have to call Python.
        graph_of_many: the same for a batch of records at once; None where that cannot be.
    """

    function: Callable[[Any], Any]
    of_list: Callable[[list[Any]], list[Any]] | None = None
    graph: Callable[[Any], Any] | None = None
    graph_of_many: Callable[[Any], Any] | None = None


@dataclasses.dataclass(frozen=True)
class RandomMap:
    """Calls a function with each record and a NumPy generator; the rest as for `Map`, with TensorFlow's randomness."""

    function: Callable[[Any, np.random.Generator], Any]
    graph: Callable[[Any], Any] | None = None
    graph_of_many: Callable[[Any], Any] | None = None


@dataclasses.dataclass(frozen=True)
class Filter:
    """Keeps the records for which a function returns true."""

    function: Callable[[Any], bool]


Step: TypeAlias = Map | RandomMap | Filter


@dataclasses.dataclass(frozen=True)
class Records:
    """Records in memory: a list, or anything else with `len()` and `[]`."""

    values: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class Columns:
    """Records in memory as equally long arrays, one row per record."""

    arrays: dict[str, NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Files:
    """Records in files: "array_record" of group size 1, "json_lines", or "parquet" with a column of texts."""

    paths: tuple[str, ...]
    records_per_file: int
    format: str = "array_record"


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Components that are equally long and come in equal shares: all of them end together."""

    parts: tuple[Files, ...]


Source: TypeAlias = Records | Columns | Files | Mixture


@dataclasses.dataclass(frozen=True)
class Work:
    """Records, globally shuffled where a peer can, through steps, into batches.

    Attributes:
        source: where the records are.
        steps: what happens to each record, in order.
        batch_size: records, or packed rows, in a batch.
        one_epoch: whether the stream ends after one epoch; otherwise it is endless.
        row_length: tokens in a row, where records are documents that are packed into rows as they come.
    """

    source: Source
    steps: tuple[Step, ...]
    batch_size: int
    one_epoch: bool = False
    row_length: int | None = None

    @property
    def filters(self) -> bool:
        return any(isinstance(step, Filter) for step in self.steps)


@dataclasses.dataclass(frozen=True)
class Contender:
    """One peer in one mode: what the mode means is the adapter's."""

    peer: str
    mode: str
    workers: int = 0

    @property
    def label(self) -> str:
        return f"{self.mode}, {self.workers} worker{'s'[: self.workers != 1]}"


class UnsupportedError(Exception):
    """A peer cannot do this case, and the message says why: that is a result, not a failure."""


def apply_to_many(steps: Sequence[Step], values: list[Any], rng: np.random.Generator) -> list[Any]:
    """Returns the records after the steps, in plain list comprehensions: nothing in Python is cheaper per record."""
    for step in steps:
        match step:
            case Map(of_list=of_list) if of_list is not None:
                values = of_list(values)
            case Map(function):
                values = [function(value) for value in values]
            case RandomMap(draw):
                values = [draw(value, rng) for value in values]
            case Filter(keeps):
                values = [value for value in values if keeps(value)]
    return values


def stacked(elements: list[Any]) -> Any:
    """Returns the batch of some elements."""
    if isinstance(elements[0], dict):
        return {name: stacked([element[name] for element in elements]) for name in elements[0]}
    return np.stack(elements) if isinstance(elements[0], np.ndarray) else np.array(elements)
