"""Lineage of a 1:1 pipeline: the records of a step, the steps of records, and the composition of steps.

The order is a function of the position, so nothing is read, and a loader that was never iterated over can answer.
"""

import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer
from millstream.loader import reporting
from millstream.loader.checkpoints.state import BatchRange, Run, Segment
from millstream.loader.pipeline.elements import Origins
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import Plan, keys_in_epochs
from millstream.loader.threads.thread_settings import ThreadSettings, in_fresh_thread
from millstream.samplers.base import checked_keys_at, has_varying_batches, is_mixed, is_packed
from millstream.samplers.order import Occurrences, checked_keys, checked_stop, whole_numbers
from millstream.sharding import NoSharding, ShardOptions
from millstream.sources import ConcatenatedDataSource
from millstream.sources.base import ChainOrigins
from millstream.transforms import Batch

ResultT = TypeVar("ResultT")

_SEARCHED_TOGETHER = 1 << 20
"""The number of positions whose keys are computed together."""

_MAX_SEARCHED = 1 << 48
"""The number of positions of an endless chain that can be searched: a shuffle of all of them reads larger ones."""


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


class RunLineage(NamedTuple):
    """A pipeline, its plan, and the history of a run of it: batches that were skipped, and other global batches."""

    pipeline: Pipeline
    plan: Plan
    run: Run

    def plan_of(self, segment: Segment, shard: ShardOptions) -> Plan:
        """Returns the plan of a segment, that of another shard only if its global batch is another."""
        if segment.global_batch == self.plan.partition.global_block:
            return self.plan
        return Plan(_of_global_batch(self.pipeline, segment.global_batch, shard))


class Lineage:
    """A loader whose order can be searched in both directions, or an iterator, whose run can be.

    The steps of an iterator are those of training: batches that were skipped are not counted, and steps before a change
    of the weights or of the global batch had those of their time.
    """

    @property
    def lineage(self) -> RunLineage:
        """The pipeline and its run, which the methods below ask."""
        raise NotImplementedError

    def record_keys(self, step: int) -> NDArray[np.int64]:
        """Returns the keys of the records in this shard's batch number `step`, in order, without reading them.

        For a chain that is shuffled or mixed, they are the keys in its source, or in its sources, one after another.
        `locate(keys)` returns their files, and for a mixture their components. For packed rows, they are the keys of
        the documents, one row after another.

        Args:
            step: the number of the batch, from 0.

        Returns:
            An int64 array of shape `(records,)`.

        Raises:
            IndexError: there is no such batch.
            TypeError: the pipeline is not 1:1: it has a Filter or FlatMap, or groups elements by their content; or the
                source is a chain that is shuffled or mixed, and each of its elements is made of several records.

        Examples:
            >>> loader = millstream.load(["a", "b", "c", "d"], shuffle=True, seed=0, batch_size=2)
            >>> loader.record_keys(0), next(iter(loader))
            (array([3, 1]), array(['d', 'b'], dtype='<U1'))
        """
        pipeline, plan, run = history = self.lineage
        _check_keys(plan, "record_keys(step)")
        segment = run.segment_at(step := as_integer(step, "step"))
        shard_count = pipeline.shard.shard_count
        if segment.global_batch % shard_count:
            raise ValueError(
                f"Step {step} had a global batch of {segment.global_batch}, which {shard_count} shards cannot share."
            )
        num_steps = plan.shards[0].block_limit - run.last.offset
        if not num_steps:
            raise IndexError(f"step {step} does not exist: this DataLoader yields no batch.")
        if not 0 <= step < num_steps:
            raise IndexError(f"step must be between 0 and {num_steps - 1}, the last batch, got {step}.")
        plan, batch = history.plan_of(segment, pipeline.shard), step + segment.offset
        shard = plan.shards[0]
        origins = _in_neutral_thread(functools.partial(shard.locator.locate, batch, batch + 1))
        keys = origins.record_key.copy()
        if (chain := plan.pipeline.view.origins) is not None:
            keys = chain.record_keys(keys_in_epochs(plan.pipeline, origins))
        if batch == shard.partition.complete_blocks:
            return keys[origins.position < shard.partition.tail.start + shard.tail_records]
        return keys

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
                shuffled or mixed, and each of its elements is made of several records.
            ValueError: the order is endless, and stop is None.

        Examples:
            >>> loader = millstream.load(range(6), shuffle=True, seed=0, batch_size=2)
            >>> loader.steps_of([0, 5], stop=6)
            array([[2, 3],
                   [1, 4]])
        """
        pipeline, plan, run = history = self.lineage
        _check_keys(plan, "steps_of(keys)")
        if not hasattr(plan.pipeline.order, "occurrences"):
            raise TypeError(
                f"steps_of(keys) needs a sampler that can be inverted, and {type(pipeline.sampler).__name__} has "
                "no positions_of(keys)."
            )
        wanted, start = checked_keys(keys), as_integer(start, "start", minimum=0)
        found = []
        for segment, first, last in run.ranges(start, None if stop is None else as_integer(stop, "stop", 0)):
            occurrences = _occurrences(history.plan_of(segment, NoSharding()), wanted, first, last)
            found.append(Occurrences(occurrences.rows, occurrences.positions - segment.offset))
        return Occurrences.concatenate(found).table(len(wanted))

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
        plan = self.lineage.plan
        chain = plan.pipeline.view.origins
        source = plan.pipeline.source if chain is None else chain.source
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
        _, plan, run = history = self.lineage
        _check_one_to_one(plan, "composition(start, stop)")
        start = as_integer(start, "start", minimum=0)
        if stop is not None and start > as_integer(stop, "stop", minimum=0):
            raise ValueError(f"start must be at most stop, which is {stop}, got {start}.")
        here = run.segment_at(start)
        nothing = BatchRange(here, start + here.offset, start + here.offset)
        counted, ends = [], []
        for segment, first, last in [*run.ranges(start, stop)] or [nothing]:
            count = functools.partial(_counts_of, history.plan_of(segment, NoSharding()), first, last, lengths)
            counted.append(_in_neutral_thread(count))
            ends.append((counted[-1].start - segment.offset, counted[-1].stop - segment.offset))
        names, _ = _components(plan.pipeline.order, plan.pipeline.source)
        return Composition(ends[0][0], ends[-1][1], dict(zip(names, _joined(counted), strict=True)))


def _occurrences(plan: Plan, keys: NDArray[np.int64], start: int, stop: int | None) -> Occurrences:
    """Returns the batches [start, stop) whose global batches contain records."""
    size = plan.partition.global_block
    limit = checked_stop(None if stop is None else stop * size, plan.partition.length)
    if (chain := plan.pipeline.view.origins) is not None:
        found = _occurrences_in_chain(plan.pipeline, chain, keys, limit)
    else:
        found = plan.pipeline.order.occurrences(keys, limit)  # type: ignore[union-attr]  # which has it
    is_counted = (found.positions >= start * size) & plan.shards[0].are_delivered(found.positions)
    return Occurrences(found.rows[is_counted], found.positions[is_counted] // size)


def _of_global_batch(pipeline: Pipeline, global_batch: int, shard: ShardOptions) -> Pipeline:
    """Returns a 1:1 pipeline with another global batch: the size of its last Batch is another one."""
    numbers = [number for number, operation in enumerate(pipeline.operations) if isinstance(operation, Batch)]
    sizes = [operation.batch_size for operation in pipeline.operations if isinstance(operation, Batch)]
    size, remainder = divmod(global_batch, shard.shard_count * math.prod(sizes[:-1]))
    if not numbers or remainder:
        raise ValueError(
            f"Steps of the run had a global batch of {global_batch}, and the operations of this loader batch "
            f"{math.prod(sizes)} elements. Ask a loader that has the operations of that time."
        )
    operations = list(pipeline.operations)
    operations[numbers[-1]] = dataclasses.replace(operations[numbers[-1]], batch_size=size)  # type: ignore[type-var]
    return dataclasses.replace(pipeline, operations=tuple(operations), shard=shard)


def _check_keys(plan: Plan, call: str) -> None:
    _check_one_to_one(plan, call)
    view = plan.pipeline.view
    if view.reordering and view.origins is None:
        raise TypeError(
            f"{call} needs a source in which a key is one record, and {view.reordering} in the chain brings another "
            "record to a key in each epoch. Let the loader shuffle or mix: load(source, shuffle=True), load(sources, "
            "weights=...)."
        )


def _occurrences_in_chain(pipeline: Pipeline, chain: ChainOrigins, keys: NDArray[np.int64], stop: int) -> Occurrences:
    """Returns the positions of a loader before `stop` at which a chain has an element of a record."""
    num_elements, order = len(pipeline.source), pipeline.order
    if num_elements == sys.maxsize:
        # It is one epoch, so a key of the order is a position in it.
        rows, elements = chain.occurrences(keys, _num_elements_read(pipeline, stop))
        element_rows, positions = order.occurrences(elements, stop)  # type: ignore[union-attr]  # which has it
        return Occurrences(rows[element_rows], positions)
    ends = np.arange(max(0, stop - 1), stop)
    table = np.zeros((5, len(ends)), np.int64)
    table[0] = ends
    last = int(keys_in_epochs(pipeline, Origins(table)).max(initial=-1)) // num_elements
    rows, elements = chain.occurrences(keys, (last + 1) * num_elements)
    element_rows, positions = order.occurrences(elements % num_elements, stop)  # type: ignore[union-attr]  # which has it
    table = np.zeros((5, len(element_rows)), np.int64)
    table[0], table[1] = positions, elements[element_rows] % num_elements
    # The order has each element in each epoch, and the record is at that element in one.
    is_record = keys_in_epochs(pipeline, Origins(table)) == elements[element_rows]
    return Occurrences(rows[element_rows][is_record], positions[is_record])


def _num_elements_read(pipeline: Pipeline, stop: int) -> int:
    """Returns an end of the positions of an endless chain that a loader reads before `stop`."""
    blocks = ((start, min(start + _SEARCHED_TOGETHER, stop)) for start in range(0, stop, _SEARCHED_TOGETHER))
    last = max((int(pipeline.order.record_keys(*block).max()) for block in blocks), default=-1)
    if last >= _MAX_SEARCHED:
        raise TypeError(
            "steps_of(keys) cannot search the shuffle of an endless dataset, which has each at too many positions. "
            "Write .shuffle(seed=...) before .repeat(), and load it without shuffle."
        )
    return last + 1


def _check_one_to_one(plan: Plan, call: str) -> None:
    if not plan.one_to_one:
        raise TypeError(
            f"{call} needs a 1:1 pipeline: the batches after {plan.first_dynamic_label}, depend on the elements. Keep "
            "the keys with the elements (meta_features of a packer), or filter in advance (millstream.surviving_keys)."
        )


def _in_neutral_thread(call: Callable[[], ResultT]) -> ResultT:
    """Calls a function in a thread without settings: a user's sampler that sees some would return other keys."""
    return call() if ThreadSettings().are_neutral() else in_fresh_thread(call)


def _location(source: Any, key: int) -> RecordLocation:
    names = []
    while True:
        if isinstance(source, ConcatenatedDataSource):
            (number,), (key,) = (row.tolist() for row in source.locate([key]))
            names.append(source.names[number])
            source = source.parts[source.names[number]]
        elif (origin := getattr(source, "_origin_at", lambda _: None)(key)) is not None:
            # A part of a source, or its elements after a map.
            source, key = origin
        else:
            break
    component = None if not names else names[0] if len(names) == 1 else "/".join(map(str, names))
    if not callable(getattr(source, "locate", None)):
        return RecordLocation(component, None, key)
    return RecordLocation(component, *source.locate(key))


_POSITIONS_PER_CHUNK = 1 << 16


class ComponentCount(NamedTuple):
    """The elements of one component between two steps.

    Attributes:
        documents: the number of records; a document that is cut counts once for each row with a segment of it.
        tokens: the number of tokens, without padding; None if lengths are not known.
        epochs: the number of passes over the component: its positions divided by those of one epoch of its order, or
            its records divided by those of its source if the order has no epochs of its own. None for a component that
            was left out of a mixture.
        share: the fraction of all tokens, 0 … 1; of all documents if tokens are not known.
    """

    documents: int
    tokens: int | None
    epochs: float | None
    share: float


@dataclasses.dataclass(frozen=True)
class Composition:
    """The composition of the global batches between two steps. Printed, it is a table.

    Attributes:
        start: the first step.
        stop: the step after the last one; the end of the order if it comes first.
        components: a `ComponentCount` by name of the component.
    """

    start: int
    stop: int
    components: dict[Any, ComponentCount]

    def as_dict(self) -> dict[Any, dict[str, Any]]:
        """Returns a dict of `documents`, `tokens`, `epochs` and `share` by name of the component, for JSON."""
        return {name: count._asdict() for name, count in self.components.items()}

    def __str__(self) -> str:
        return "\n".join([self._title, *reporting.snapshot.aligned(list(self._rows()))])

    def _repr_html_(self) -> str:
        from millstream.core import html_fragments  # noqa: PLC0415  (lazy: only notebooks need it)

        shares = html_fragments.proportions([(str(name), count.share) for name, count in self.components.items()])
        table = html_fragments.table(*([html_fragments.escaped(cell) for cell in row] for row in self._rows()))
        return html_fragments.figure(html_fragments.card("composition", self._title, shares), table)

    @property
    def _title(self) -> str:
        return f"steps {self.start:,} to {self.stop:,}"

    def _rows(self) -> Iterator[list[str]]:
        counts = list(self.components.values())
        has_tokens = any(count.tokens is not None for count in counts)
        yield ["component", "documents", *["tokens"] * has_tokens, "epochs", "share"]
        documents, tokens = sum(count.documents for count in counts), sum(count.tokens or 0 for count in counts)
        for name, count in self.components.items():
            middle = [f"{count.tokens or 0:,}"] * has_tokens
            yield [
                str(name),
                f"{count.documents:,}",
                *middle,
                "" if count.epochs is None else f"{count.epochs:.2f}",
                f"{count.share:.1%}",
            ]
        if len(counts) > 1:
            share = sum(count.share for count in counts)
            yield ["total", f"{documents:,}", *[f"{tokens:,}"] * has_tokens, "", f"{share:.1%}"]


class _Counts(NamedTuple):
    """The counts of each component in the global batches [start, stop). `tokens` is None if they are not known."""

    start: int
    stop: int
    documents: NDArray[np.int64]
    tokens: NDArray[np.int64] | None
    epochs: list[float | None]


def _counts_of(plan: Plan, start: int, stop: int | None, lengths: Any) -> _Counts:
    order, source, size = plan.pipeline.order, plan.pipeline.source, plan.partition.global_block
    limit = plan.partition.length
    if limit is not None:
        num_batches = -(-limit // size)
        start, stop = min(start, num_batches), num_batches if stop is None else min(stop, num_batches)
    if stop is None:
        raise ValueError("stop must be given for an endless order: each record occurs again and again.")
    last = stop * size if limit is None else min(stop * size, limit)
    first = min(start * size, last)
    tail_start = max(first, last // size * size)
    tail = np.arange(tail_start, last)
    tail = tail[plan.shards[0].are_delivered(tail)]
    names, sizes = _components(order, source)
    rows = _rows_of_components(order, len(names), first, tail_start, tail)
    known = _checked_lengths(lengths, len(source), packed=is_packed(order))
    tokens = None
    if rows is None or is_packed(order) or known is not None:
        documents, tokens = _counted(order, sizes, _chunks(first, tail_start, tail), known)
    else:
        documents = rows
    epochs = [
        _epochs(order, number, None if rows is None else int(rows[number]), count, records)
        for number, (count, records) in enumerate(zip(documents.tolist(), sizes, strict=True))
    ]
    return _Counts(start, stop, documents, tokens, epochs)


def _joined(counted: Sequence[_Counts]) -> Iterator[ComponentCount]:
    """Yields the sums of the counts of consecutive batches, by component."""
    documents = np.sum([each.documents for each in counted], axis=0)
    known = [each.tokens for each in counted if each.tokens is not None]
    tokens = np.sum(known, axis=0) if known else None
    shared = documents if tokens is None else tokens
    for number, epochs in enumerate(zip(*(each.epochs for each in counted), strict=True)):
        yield ComponentCount(
            int(documents[number]),
            None if tokens is None else int(tokens[number]),
            None if None in epochs else sum(filter(None, epochs)),
            int(shared[number]) / max(1, int(shared.sum())),
        )


def _components(order: Any, source: Any) -> tuple[tuple[Any, ...], Sequence[int]]:
    """Returns the names of the components, and the number of records of each."""
    if is_mixed(order):
        return order.names, order.source_lengths
    if isinstance(source, ConcatenatedDataSource):
        return source.names, source.lengths.tolist()
    return (type(source).__name__,), [len(source)]


def _rows_of_components(
    order: Any, count: int, first: int, tail_start: int, tail: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """Returns the number of positions of each component; None if the order does not know its components."""
    if is_mixed(order):
        before, after = (np.array(order.drawn_before(position), dtype=np.int64) for position in (first, tail_start))
        return after - before + np.bincount(order.locate(tail)[0], minlength=count)
    if count > 1:
        return None
    if has_varying_batches(order):
        return np.array([sum(int(order.are_used(chunk).sum()) for chunk in _chunks(first, tail_start, tail))])
    return np.array([tail_start - first + len(tail)], dtype=np.int64)


def _chunks(first: int, tail_start: int, tail: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for start in range(first, tail_start, _POSITIONS_PER_CHUNK):
        yield np.arange(start, min(start + _POSITIONS_PER_CHUNK, tail_start))
    if len(tail):
        yield tail


def _counted(
    order: Any, sizes: Sequence[int], chunks: Iterator[NDArray[np.int64]], lengths: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Returns the number of documents and of tokens of each component, counted one by one."""
    ends = np.cumsum(sizes)
    documents, tokens = np.zeros(len(sizes), dtype=np.int64), np.zeros(len(sizes), dtype=np.int64)
    has_tokens = is_packed(order) or lengths is not None
    for positions in chunks:
        if has_varying_batches(order):
            positions = positions[order.are_used(positions)]  # noqa: PLW2901  (the others are not read)
        widths: NDArray[np.int64] | None = None
        if is_packed(order):
            segments = order.segments_at(positions)
            keys, widths = segments.elements, segments.lengths
        else:
            keys = checked_keys_at(order, positions)
            if lengths is not None:
                widths = lengths[keys]
        components = np.searchsorted(ends, keys, side="right")
        documents += np.bincount(components, minlength=len(sizes))
        if widths is not None:
            np.add.at(tokens, components, widths)
    return documents, tokens if has_tokens else None


def _epochs(order: Any, number: int, rows: int | None, documents: int, num_records: int) -> float | None:
    if is_mixed(order) and not num_records:
        return None
    sampler = order.samplers[number] if is_mixed(order) else order
    if rows is None or sampler.num_records is None or has_varying_batches(sampler):
        return documents / max(1, num_records)
    return rows / max(1, int(sampler.num_records))


def _checked_lengths(lengths: Any, num_records: int, *, packed: bool) -> NDArray[np.int64] | None:
    if lengths is None:
        return None
    if packed:
        raise ValueError("lengths must be left out for packed rows: their sampler has the lengths.")
    checked = whole_numbers(lengths, "lengths")
    if len(checked) != num_records:
        raise ValueError(f"lengths must have a number for each of the {num_records} records, got {len(checked)}.")
    return checked
