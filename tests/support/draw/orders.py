"""Orders of every kind: all or some records of one source, units, rows of documents, mixtures; and these balanced."""

from typing import Any

import numpy as np
from hypothesis import strategies as st

from millstream import (
    BalancedSampler,
    BucketSampler,
    HierarchicalSampler,
    IndexSampler,
    MixtureSampler,
    PackingSampler,
    WeightedSampler,
    samplers,
)

STOPS = ["first_exhausted", "all_exhausted", "drop_exhausted"]


def public_samplers() -> dict[str, type[Any]]:
    """Returns the classes of samplers that users construct, by name; no protocols."""
    named = {name: getattr(samplers, name) for name in samplers.__all__}
    return {
        name: kind
        for name, kind in named.items()
        if hasattr(kind, "record_keys_at") and not getattr(kind, "_is_protocol", False)
    }


@st.composite
def orders(draw: st.DrawFn, *, rows: bool = False) -> tuple[Any, int]:
    """Draws a sampler of one source, and the number of records of that."""
    seed, shuffle = draw(st.integers(0, 9)), draw(st.booleans())
    num_epochs = draw(st.none() | st.integers(1, 3))
    if rows:
        lengths = draw(
            st.lists(st.integers(0, 25), min_size=1, max_size=30).filter(lambda some: any(0 < n < 9 for n in some))
        )
        strategy, overflow = draw(
            st.sampled_from(
                [("concat_then_split", "error"), *(("best_fit", how) for how in ("split", "truncate", "drop"))]
            )
        )
        ends = sorted(draw(st.lists(st.integers(0, len(lengths)), max_size=4)))
        units = {"unit_sizes": np.diff([0, *ends, len(lengths)]), "window_units": draw(st.none() | st.integers(1, 3))}
        options = {"strategy": strategy, "overflow": overflow, "num_epochs": num_epochs, **units}
        return PackingSampler(lengths, 10, shuffle=shuffle, seed=seed, **options), len(lengths)  # type: ignore[arg-type]
    size = draw(st.integers(1, 40))
    kind = draw(st.sampled_from(["all", "some", "units", "weights"]))
    if kind == "weights":
        return draw(weighted(size, seed, num_epochs)), size
    if kind == "some":
        keys = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=30))
        return IndexSampler(len(keys), shuffle=shuffle, seed=seed, num_epochs=num_epochs, keys=keys), size
    if kind == "units":
        sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9).filter(any))
        some: dict[str, Any] = {"window_units": draw(st.integers(1, 4)), "seed": seed, "num_epochs": num_epochs}
        if draw(st.booleans()):
            some["keys"] = draw(st.lists(st.integers(0, sum(sizes) - 1), min_size=1, max_size=30))
        if draw(st.booleans()):
            some["unit_numbers"] = draw(st.lists(st.integers(0, 5), min_size=len(sizes), max_size=len(sizes)))
        return HierarchicalSampler(sizes, **some), sum(sizes)
    return IndexSampler(size, shuffle=shuffle, seed=seed, num_epochs=num_epochs), size


@st.composite
def weighted(draw: st.DrawFn, size: int, seed: int, num_epochs: int | None) -> WeightedSampler:
    """Draws an order by weights, which change."""
    number = st.sampled_from([0, 0, 1, 2]) | st.floats(0, 10) | st.sampled_from([5e-324, 1e300])
    weights = st.lists(number, min_size=size, max_size=size).filter(any)
    num_records = draw(st.none() | st.integers(1, 50))
    sampler = WeightedSampler(draw(weights), seed=seed, num_records=num_records, num_epochs=num_epochs)
    for position in sorted(draw(st.sets(st.integers(0, 60), max_size=2))):
        if sampler.length is None or position < sampler.length:
            sampler = sampler.reweighted(position, draw(weights))
    return sampler


@st.composite
def buckets(draw: st.DrawFn) -> tuple[BucketSampler, int]:
    """Draws an order of global batches of one class each."""
    lengths = draw(st.lists(st.integers(0, 8), min_size=1, max_size=40))
    options: dict[str, Any] = {name: draw(st.booleans()) for name in ("shuffle", "drop_remainder")}
    size = draw(st.integers(1, 1 if options["drop_remainder"] and len(lengths) < 12 else 4))
    options |= {"seed": draw(st.integers(0, 9)), "num_epochs": draw(st.none() | st.integers(1, 3))}
    return BucketSampler(lengths, [2, 5, 8], global_batch_size=size, **options), len(lengths)


@st.composite
def mixtures(draw: st.DrawFn, *, rows: bool = False, depth: int = 1, batches: bool = False) -> tuple[Any, int]:
    """Draws a mixture whose weights change, or one sampler."""
    if not draw(st.integers(0, 3)) or not depth:
        return draw(orders(rows=rows))
    parts = draw(st.lists(mixtures(rows=rows, depth=depth - 1), min_size=1, max_size=4))
    stop = draw(st.sampled_from(STOPS))
    shortest = min((part.length for part, _ in parts if part.length is not None and stop != "all_exhausted"), default=5)
    size = draw(st.sampled_from([1, 2, 3, 5])) if batches and depth == 1 else 1
    batches_of = size if 1 < size <= shortest else None
    weights = st.lists(st.integers(0, 6) | st.sampled_from([70_000]), min_size=len(parts), max_size=len(parts)).filter(
        any
    )
    mixture = MixtureSampler(
        [sampler for sampler, _ in parts],
        draw(weights),
        stop=stop,
        batches_of=batches_of,
        source_lengths=[length for _, length in parts],
    )
    num_joining = draw(st.integers(0, len(parts) - 1))
    if num_joining:
        # Some of the components join later, by name, and may never have a turn.
        given = dict(zip("abcd", mixture.parts.values(), strict=False))
        lengths = dict(zip(given, mixture.source_lengths, strict=True))
        first = {name: given[name] for name in list(given)[:-num_joining]}
        mixture = MixtureSampler(
            first,
            [*draw(weights)[: len(first) - 1], 1],
            stop=stop,
            batches_of=batches_of,
            source_lengths={name: lengths[name] for name in first},
        )
        start = draw(st.integers(0, min(20, 20 if mixture.length is None else mixture.length)))
        start -= start % (batches_of or 1)
        mixture = mixture.reweighted(start, draw(weights), samplers=given, source_lengths=lengths)
    for drawn in sorted(draw(st.sets(st.integers(1, 60), max_size=4))):
        position = drawn - drawn % (batches_of or 1)
        if mixture.length is None or position <= mixture.length:
            mixture = mixture.reweighted(position, draw(weights))
    return mixture, sum(length for _, length in parts)


@st.composite
def balanced(draw: st.DrawFn, of: st.SearchStrategy[tuple[Any, int]]) -> tuple[Any, int]:
    """Draws an order whose global batches are dealt to parts; costs are those of documents: few are large."""
    order, num_records = draw(of)
    costs = np.random.default_rng(draw(st.integers(0, 9))).lognormal(0, 1.2, num_records)
    parts, size = draw(st.integers(1, 4)), draw(st.integers(2, 4))
    return BalancedSampler(order, costs=costs, global_batch_size=parts * size, parts=parts), num_records


def records_at(sampler: Any, positions: Any) -> list[list[tuple[int, ...]]]:
    """Returns the segments of the rows at positions; of an order without rows, the record keys."""
    positions = np.asarray(positions, dtype=np.int64)
    if getattr(sampler, "row_length", None) is None:
        return [[(key,)] for key in sampler.record_keys_at(positions).tolist()]
    starts, *columns = sampler.segments_at(positions)
    triples = list(zip(*(np.asarray(column).tolist() for column in columns), strict=True))
    return [triples[start:stop] for start, stop in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)]
