"""The composition of steps: documents, tokens, epochs and share of each component."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from millstream.core.checks import as_integer
from millstream.loader.pipeline.plan import Plan
from millstream.loader.reporting.phrases import aligned
from millstream.samplers.base import checked_keys_at
from millstream.samplers.epochs import whole_numbers
from millstream.samplers.protocols import is_mixed, is_packed
from millstream.sources import ConcatenatedDataSource

_POSITIONS_PER_CHUNK = 1 << 16


class ComponentCount(NamedTuple):
    """The elements of one component between two steps.

    Attributes:
        documents: the number of records; a document that is cut counts once for each row with a segment of it.
        tokens: the number of tokens, without padding; None if lengths are not known.
        epochs: the number of passes over the component: its positions divided by those of one epoch of its order, or
            its records divided by those of its source if the order has no epochs of its own.
        share: the fraction of all tokens, 0 … 1; of all documents if tokens are not known.
    """

    documents: int
    tokens: int | None
    epochs: float
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
        return "\n".join([self._title, *aligned(list(self._rows()))])

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
            yield [str(name), f"{count.documents:,}", *middle, f"{count.epochs:.2f}", f"{count.share:.1%}"]
        if len(counts) > 1:
            share = sum(count.share for count in counts)
            yield ["total", f"{documents:,}", *[f"{tokens:,}"] * has_tokens, "", f"{share:.1%}"]


def composition_of(plan: Plan, start: int, stop: int | None, lengths: Any) -> Composition:
    """Returns the composition of the global batches of the steps [start, stop) of a 1:1 plan."""
    order, source, size = plan.pipeline.order, plan.pipeline.source, plan.partition.global_block
    start = as_integer(start, "start", minimum=0)
    limit = plan.partition.length
    num_steps = None if limit is None else -(-limit // size)
    if stop is None:
        if num_steps is None:
            raise ValueError("stop must be given for an endless order: each record occurs again and again.")
        stop = max(start, num_steps)
    stop = as_integer(stop, "stop", minimum=0)
    if start > stop:
        raise ValueError(f"start must be at most stop, which is {stop}, got {start}.")
    if num_steps is not None:
        start, stop = min(start, num_steps), min(stop, num_steps)
    last = stop * size if limit is None else min(stop * size, limit)
    first = min(start * size, last)
    whole = max(first, last // size * size)
    rest = np.arange(whole, last)
    rest = rest[plan.shards[0].are_delivered(rest)]
    names, sizes = _components(order, source)
    rows = _rows_of_components(order, len(names), first, whole, rest)
    known = _checked_lengths(lengths, len(source), packed=is_packed(order))
    tokens = None
    if rows is None or is_packed(order) or known is not None:
        documents, tokens = _counted(order, sizes, _chunks(first, whole, rest), known)
    else:
        documents = rows
    epochs = [
        _epochs(order, number, None if rows is None else int(rows[number]), count, records)
        for number, (count, records) in enumerate(zip(documents.tolist(), sizes, strict=True))
    ]
    shared = documents if tokens is None else tokens
    shares = (shared / max(1, int(shared.sum()))).tolist()
    listed = [None] * len(names) if tokens is None else tokens.tolist()
    counts = map(ComponentCount, documents.tolist(), listed, epochs, shares)
    return Composition(start, stop, dict(zip(names, counts, strict=True)))


def _components(order: Any, source: Any) -> tuple[tuple[Any, ...], Sequence[int]]:
    """Returns the names of the components, and the number of records of each."""
    if is_mixed(order):
        return order.names, order.source_lengths
    if isinstance(source, ConcatenatedDataSource):
        return source.names, source.lengths.tolist()
    return (type(source).__name__,), [len(source)]


def _rows_of_components(
    order: Any, count: int, first: int, whole: int, rest: NDArray[np.int64]
) -> NDArray[np.int64] | None:
    """Returns the number of positions of each component; None if the order does not know its components."""
    if is_mixed(order):
        before, after = (np.array(order.drawn_before(position), dtype=np.int64) for position in (first, whole))
        return after - before + np.bincount(order.locate(rest)[0], minlength=count)
    return np.array([whole - first + len(rest)], dtype=np.int64) if count == 1 else None


def _chunks(first: int, whole: int, rest: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for start in range(first, whole, _POSITIONS_PER_CHUNK):
        yield np.arange(start, min(start + _POSITIONS_PER_CHUNK, whole))
    if len(rest):
        yield rest


def _counted(
    order: Any, sizes: Sequence[int], chunks: Iterator[NDArray[np.int64]], lengths: NDArray[np.int64] | None
) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """Returns the number of documents and of tokens of each component, counted one by one."""
    ends = np.cumsum(sizes)
    documents, tokens = np.zeros(len(sizes), dtype=np.int64), np.zeros(len(sizes), dtype=np.int64)
    has_tokens = is_packed(order) or lengths is not None
    for positions in chunks:
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


def _epochs(order: Any, number: int, rows: int | None, documents: int, num_records: int) -> float:
    sampler = order.samplers[number] if is_mixed(order) else order
    if rows is None or sampler.num_records is None:
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
