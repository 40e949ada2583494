"""Lineage of a 1:1 pipeline: the records of a step, the steps of records, and the composition of steps.

The order is a function of the position, so nothing is read, and a loader that was never iterated over can answer.
"""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer
from millstream.loader.pipeline.plan import Plan
from millstream.loader.threads.thread_settings import ThreadSettings, in_fresh_thread
from millstream.samplers.order import Occurrences, checked_keys, checked_stop
from millstream.sources import ConcatenatedDataSource

if TYPE_CHECKING:
    from millstream.loader.reporting.composition import Composition

Result = TypeVar("Result")


class RecordLocation(NamedTuple):
    """The origin of one record.

    Attributes:
        component: the name of its source in a `ConcatenatedDataSource`, "outer/inner" if these are nested; None for any
            other source.
        file: the path or URL of its file; None if the source has no `locate`, as sources in memory.
        record: its number in the file, from 0; without a file, its record key in the component.
    """

    component: Any
    file: str | None
    record: int


class Lineage:
    """A loader whose order can be searched in both directions."""

    _plan: Plan

    def record_keys(self, step: int) -> NDArray[np.int64]:
        """Returns the keys of the records in this shard's batch number `step`, in order, without reading them.

        `locate(keys)` returns their files, and for a mixture their components. For packed rows, they are the keys of
        the documents, one row after another.

        Args:
            step: the number of the batch, from 0.

        Returns:
            An int64 array of shape `(records,)`.

        Raises:
            IndexError: there is no such batch.
            TypeError: the pipeline is not 1:1: it has a Filter or FlatMap, or groups elements by their content; or the
                source is a chain that is shuffled or mixed.

        Examples:
            >>> loader = millstream.load(["a", "b", "c", "d"], shuffle=True, seed=0, batch_size=2)
            >>> loader.record_keys(0), next(iter(loader))
            (array([3, 1]), array(['d', 'b'], dtype='<U1'))
        """
        _check_keys(self._plan, "record_keys(step)")
        step, shard = as_integer(step, "step"), self._plan.shards[0]
        if not shard.block_limit:
            raise IndexError(f"step {step} does not exist: this DataLoader yields no batch.")
        if not 0 <= step < shard.block_limit:
            raise IndexError(f"step must be between 0 and {shard.block_limit - 1}, the last batch, got {step}.")
        origins = _in_neutral_thread(functools.partial(self._plan.lookups.locate, step, step + 1))
        if step == shard.partition.whole_blocks:
            is_used = origins.position < shard.partition.tail.start + shard.tail_records
            return origins.record_key[is_used]
        return origins.record_key.copy()

    def steps_of(self, keys: Any, start: int = 0, stop: int | None = None) -> NDArray[np.int64]:
        """Returns the steps whose global batches contain records: int64, shape (keys, occurrences), a row per key.

        The order is inverted, so nothing is read and no step is enumerated. Shards play no role. Rows are ascending,
        and padded with -1 if other keys occur more often. For packed rows, keys are those of documents.

        Args:
            keys: record keys, shape (m,). The row of a key that never occurs is -1.
            start: the first step to include.
            stop: the first step to exclude; None for the end of the order.

        Raises:
            TypeError: the pipeline is not 1:1, the sampler cannot be inverted, or the source is a chain that is
                shuffled or mixed.
            ValueError: the order is endless, and stop is None.

        Examples:
            >>> loader = millstream.load(range(6), shuffle=True, seed=0, batch_size=2)
            >>> loader.steps_of([0, 5], stop=6)
            array([[2, 3],
                   [1, 4]])
        """
        plan = self._plan
        _check_keys(plan, "steps_of(keys)")
        sampler, partition = plan.pipeline.order, plan.partition
        if not hasattr(sampler, "occurrences"):
            raise TypeError(
                f"steps_of(keys) needs a sampler that can be inverted, and {type(plan.pipeline.sampler).__name__} has "
                "no positions_of(keys)."
            )
        wanted, size = checked_keys(keys), partition.global_block
        start = as_integer(start, "start", minimum=0)
        last = None if stop is None else as_integer(stop, "stop", minimum=0) * size
        found = sampler.occurrences(wanted, checked_stop(last, partition.length))
        is_counted = (found.positions >= start * size) & plan.shards[0].are_delivered(found.positions)
        return Occurrences(found.rows[is_counted], found.positions[is_counted] // size).table(len(wanted))

    def locate(self, keys: Any) -> list[RecordLocation]:
        """Returns the origin of each record: its component, its file, and its number in the file. Nothing is read.

        Args:
            keys: record keys, shape (m,), for instance those of `record_keys(step)`.

        Raises:
            IndexError: a key is not a record key of the source.
            TypeError: keys are not integers.

        Examples:
            >>> loader = millstream.load({"web": ["a", "b", "c"], "books": ["X"]}, weights={"web": 3, "books": 1})
            >>> loader.locate([1])
            [RecordLocation(component='web', file=None, record=1)]
        """
        source = self._plan.pipeline.source
        wanted, num_records = checked_keys(keys).tolist(), len(source)
        if wrong := [key for key in wanted if not 0 <= key < num_records]:
            raise IndexError(f"keys must be between 0 and {num_records - 1}, the last record, got {wrong[0]}.")
        return [_location(source, key) for key in wanted]

    def composition(self, start: int = 0, stop: int | None = None, *, lengths: Any = None) -> "Composition":
        """Returns the documents, tokens, epochs and share of each component between two steps, over all shards.

        Printed, it is a table. Components are those of a mixture, or the sources of a `ConcatenatedDataSource`; any
        other loader has one. Nothing is read. Tokens are known for packed rows, and if lengths are passed. Records of
        a mixture are counted in closed form; otherwise it takes some 50 ns per document between the steps.

        Args:
            start: the first step to include.
            stop: the first step to exclude; None for the end of the order. `stop=batches.step` counts what an
                iterator has delivered.
            lengths: the number of tokens of each record, by record key; None if rows are packed, or tokens unknown.

        Raises:
            TypeError: the pipeline is not 1:1.
            ValueError: the order is endless, and stop is None; start is above stop; lengths do not fit the source.

        Examples:
            >>> corpora = {"web": ["a", "b", "c"], "books": ["X"]}
            >>> loader = millstream.load(corpora, weights={"web": 3, "books": 1}, num_epochs=None, batch_size=4)
            >>> print(loader.composition(stop=3))
            steps 0 to 3
            component  documents  epochs   share
            web                9    3.00  75.0%
            books              3    3.00  25.0%
            total             12          100.0%
        """
        from millstream.loader.reporting.composition import composition_of  # noqa: PLC0415  (lazy: only people need it)

        _check_one_to_one(self._plan, "composition(start, stop)")
        return _in_neutral_thread(functools.partial(composition_of, self._plan, start, stop, lengths))


def _check_keys(plan: Plan, call: str) -> None:
    _check_one_to_one(plan, call)
    if reordering := plan.pipeline.view.reordering:
        raise TypeError(
            f"{call} needs a source in which a key is one record, and {reordering} in the chain brings another record "
            "to a key in each epoch. Let the loader shuffle or mix: load(source, shuffle=True), load(sources, "
            "weights=...)."
        )


def _check_one_to_one(plan: Plan, call: str) -> None:
    if not plan.one_to_one:
        raise TypeError(
            f"{call} needs a 1:1 pipeline: the batches after {plan.deciding}, depend on the elements. Keep the keys "
            "with the elements (meta_features of a packer), or filter in advance (millstream.surviving_keys)."
        )


def _in_neutral_thread(call: Callable[[], Result]) -> Result:
    """Calls a function in a thread without settings: a user's sampler that sees some would return other keys."""
    return call() if ThreadSettings().are_neutral() else in_fresh_thread(call)


def _location(source: Any, key: int) -> RecordLocation:
    names = []
    while isinstance(source, ConcatenatedDataSource):
        (number,), (key,) = (row.tolist() for row in source.locate([key]))
        names.append(source.names[number])
        source = source.parts[source.names[number]]
    component = None if not names else names[0] if len(names) == 1 else "/".join(map(str, names))
    if not callable(getattr(source, "locate", None)):
        return RecordLocation(component, None, key)
    return RecordLocation(component, *source.locate(key))
