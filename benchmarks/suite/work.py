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
        graph: the same for tf.data, in TensorFlow's operations; None where it would have to call Python.
        graph_of_many: the same for a batch of records at once; None where that cannot be.
    """

    function: Callable[[Any], Any]
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
    """Keeps the records for which a function returns true; the rest as for `Map`."""

    function: Callable[[Any], bool]
    graph: Callable[[Any], Any] | None = None
    graph_of_many: Callable[[Any], Any] | None = None


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
    """Records in files.

    Attributes:
        paths: the files.
        records_per_file: how many records each holds.
        format: "array_record", of group size 1, one of `suite.formats.FORMATS` or `suite.array_files.ARRAY_FORMATS`, or
            "parquet" or "arrow": tables.
        columns: of tables, which columns are read.
    """

    paths: tuple[str, ...]
    records_per_file: int
    format: str = "array_record"
    columns: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Components that are equally long and come in equal shares: all of them end together."""

    parts: tuple[Records, ...] | tuple[Files, ...]

    def whole(self) -> Records | Files:
        if isinstance(self.parts[0], Records):
            return Records([value for part in self.parts for value in part.values])
        paths = tuple(path for part in self.parts for path in part.paths)
        return dataclasses.replace(self.parts[0], paths=paths)


Source: TypeAlias = Records | Columns | Files | Mixture


@dataclasses.dataclass(frozen=True)
class Work:
    """Records, globally shuffled, through steps, into batches.

    Attributes:
        source: where the records are.
        steps: what happens to each record, in order.
        batch_size: records, or rows, in a batch; None for single elements.
        one_epoch: whether the stream ends after one epoch; otherwise it is endless.
        shard: which part to read, and of how many.
        row_length: tokens in a row, where records are documents that are packed into rows; None where they are not.
        packing: "first fit", "best fit" or "concatenated", where they are packed as they come; else as a contender's
            mode says.
    """

    source: Source
    steps: tuple[Step, ...]
    batch_size: int | None
    one_epoch: bool = False
    shard: tuple[int, int] = (0, 1)
    row_length: int | None = None
    packing: str = ""

    @property
    def filters(self) -> bool:
        return any(isinstance(step, Filter) for step in self.steps)


def apply_to_many(steps: Sequence[Step], values: list[Any], rng: np.random.Generator) -> list[Any]:
    """Returns the records after the steps, in plain list comprehensions: nothing in Python is cheaper per record."""
    for step in steps:
        function: Callable[..., Any] = step.function
        match step:
            case Map():
                values = [function(value) for value in values]
            case RandomMap():
                values = [function(value, rng) for value in values]
            case Filter():
                values = [value for value in values if function(value)]
    return values
