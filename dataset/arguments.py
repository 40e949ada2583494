"""Checks of the arguments of datasets' methods, so that mistakes raise immediately, and the seeds of operations.

An operation without its own seed uses that of the nearest `.seed(...)` before it. If several parents lead to different
ones, the seeds are combined. Its number counts the operations of its kind before it that draw from the same seed, on
the path with the most of them. Operations in between that draw nothing therefore change nothing.
"""

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex, TypeVar

import numpy as np

from millstream import grain_kinds
from millstream.core.checks import as_integer, as_options, has_fields
from millstream.core.descriptions import described
from millstream.core.randomness import Purpose, as_seed, derive_seed
from millstream.core.warn import log_warning
from millstream.dataset.node_source import node_of
from millstream.dataset.nodes.joining_nodes import warn_of_proportions
from millstream.dataset.nodes.node import ENDLESS, Node
from millstream.dataset.step import Step, folded
from millstream.loader.threads.options import MultiprocessingOptions, available_cores
from millstream.transforms import Transformation
from millstream.transforms.given import adopted_operation, as_transformation

Operation = TypeVar("Operation", bound=Transformation)

MAX_DEPTH = 100
"""The maximum number of datasets from a chain's end to its sources: each takes several frames of Python's stack."""


def depth_above(parents: Iterable[Any]) -> int:
    """Returns the number of datasets from a new one with these parents to its farthest source."""
    depth = 1
    for parent in parents:
        depth = max(depth, 1 + getattr(parent, "_depth", 0))
    if depth > MAX_DEPTH:
        raise ValueError(
            f"A chain must have at most {MAX_DEPTH} datasets from its end to its sources, got {depth}. Mix or "
            "concatenate all datasets in one call, and join functions into one map."
        )
    return depth


_BEFORE = "before .to_iter_dataset(), on the MapDataset"

OF_STREAMS = {
    "enumerate": "Write .map_with_index(lambda index, element: (index, element)).",
    "padded_batch": "Write .map(millstream.PadTo({'tokens': n})).batch(m).",
    "select": f"Write .slice(positions) {_BEFORE}.",
    "shard": f"Write .shard(index, count) {_BEFORE}, or use millstream.load with shard_options.",
    "shuffle": f"Write .shuffle(seed=0) {_BEFORE}, or .window_shuffle(n, seed=0).",
    "slice": f"Write .slice(...) {_BEFORE}.",
    "to_iter_dataset": "It is a stream already.",
    "unbatch": "Write .flat_map(function, max_fan_out=n), with a function that returns the elements of a batch.",
    "with_options": 'Write .options(on_error="skip").',
}
"""Methods of other libraries that streams do not have, with what to write instead."""

OF_MAP_DATASETS = {
    "cache": "Write MapDataset.source(list(dataset)), if its elements fit into memory.",
    "concat": "Write MapDataset.concatenate([dataset, another]).",
    "enumerate": "Write .map_with_index(lambda position, element: (position, element)).",
    "interleave": "Write MapDataset.mix([dataset, another]).",
    "mp_prefetch": "Write .to_iter_dataset().mp_prefetch(n).",
    "options": 'Write .to_iter_dataset().options(on_error="skip").',
    "padded_batch": "Write .map(millstream.PadTo({'tokens': n})).batch(m).",
    "prefetch": "Write .to_iter_dataset(millstream.ReadOptions(num_threads=n)).",
    "rebatch": "Write .to_iter_dataset().rebatch(n).",
    "select": "Write .slice(positions).",
    "skip": "Write [n:].",
    "take": "Write [:n].",
    "train_test_split": 'Write millstream.split(dataset, {"train": 0.9, "test": 0.1}, seed=0).',
    "unbatch": "Write .flat_map(function, max_fan_out=n), with a function that returns the elements of a batch.",
    "with_options": 'Write .to_iter_dataset().options(on_error="skip").',
}
"""Methods of other libraries that MapDatasets do not have, with what to write instead."""


def warn_of_replacement(node: Node) -> None:
    """Logs that the shuffle of an endless dataset draws its elements with replacement.

    Raises:
        ValueError: it cannot, because not every position below 2**63 has an element.
    """
    if node.length != ENDLESS:
        return
    try:
        # A user's selection map is not called.
        _ = node.looks_ahead and node.locate(np.array([ENDLESS - 1]))
    except IndexError as error:
        raise ValueError(
            "An endless dataset of batches, or of every n-th element, cannot be shuffled: it has no elements "
            "at positions near 2**63. Write .shuffle(...) before .repeat()."
        ) from error
    log_warning(
        "the shuffle of an endless dataset draws its elements with replacement: some come twice before others come "
        "once. Write .shuffle(...) before .repeat()."
    )


def rows_of(node: Node, rows: slice) -> range:
    """Returns the positions within an epoch that a slice selects. Logs if they are a poor share of a host."""
    picked = range(node.length)[rows]
    bounds = [operator.index(bound) for bound in (rows.start, rows.stop) if bound is not None]
    if node.length == ENDLESS and min([picked.step, *bounds]) < 0:
        raise ValueError(
            "An endless dataset has no last element, so it cannot be read backwards, or counted from its end: slice it "
            "before .repeat()."
        )
    if abs(picked.step) > 1 and node.length and not picked:
        log_warning(
            f"a shard of a dataset is empty: its slice {rows.start}:{rows.stop}:{rows.step} selects none of "
            f"{node.length:,} elements. Use fewer shards, or slice records instead of files."
        )
    if abs(picked.step) > 1 and node.is_mixed:
        warn_of_proportions(node, picked)
    return picked


def warn_of_uneven_shards(length: int, num_shards: int) -> None:
    """Logs that the shards of a dataset have different numbers of elements, or none."""
    if 0 < length < num_shards:
        log_warning(
            f"{num_shards - length} of {num_shards} shards of a dataset of {length:,} elements are empty. Use fewer "
            "shards, or .repeat() it before."
        )
    elif length != ENDLESS and (longer := length % num_shards):
        log_warning(
            f"{longer} of {num_shards} shards of a dataset of {length:,} elements have one more element than the "
            f"others, so their batches may end at different steps. Cut it before, dataset[:{length - longer}], or "
            ".repeat() it."
        )


def raise_missing(dataset: Any, name: str, remedies: Mapping[str, str]) -> NoReturn:
    """Raises the AttributeError for an attribute that a dataset does not have, with the remedy if there is one."""
    if hasattr(type(dataset), name):
        # A property has raised an AttributeError of its own.
        object.__getattribute__(dataset, name)
    remedy = f". {remedies[name]}" if name in remedies else ""
    raise AttributeError(f"{type(dataset).__name__!r} object has no attribute {name!r}{remedy}", name=name, obj=dataset)


def only_parent(node: Any) -> Any:
    parents = node._parents  # noqa: SLF001  (the attribute that subclasses know)
    if len(parents) != 1:
        raise AttributeError(f"{type(node).__name__} has {len(parents) or 'no'} parents, not one.")
    return parents[0]


def as_operation(given: Any, kind: type[Operation], **options: Any) -> Operation:
    """Returns an operation of a kind: `given` itself, which has its own options, or one for a function with these."""
    given = adopted_operation(given) or given
    # A class of operations is a mistake, but `list` is a function.
    if not (isinstance(given, Transformation) or (isinstance(given, type) and issubclass(given, Transformation))):
        return kind(given, **options)  # type: ignore[call-arg]  # each kind has a constructor for a function
    operation = as_transformation(given)
    if not isinstance(operation, kind):
        raise TypeError(f"Expected a {kind.__name__} or a function, got {given!r}. Use .apply({given!r}).")
    for name, value in options.items():
        if value:
            raise TypeError(f"{name}={value!r} needs a function, got {described(operation)}, which has its own {name}.")
    return operation


def seed_for(method: str, parent: Step, given: SupportsIndex | None) -> int:
    """Returns the seed of a method's operation after a step: the given one, or the nearest."""
    seed = nearest_seed(parent) if given is None else as_seed(given)
    if seed is None:
        raise ValueError(
            f"{method} needs a seed, and there is none above it: write .{method}(..., seed=0), or .seed(0) before it."
        )
    return seed


def nearest_seed(end: Step) -> int | None:
    """Returns the seed for an operation after a step; None if no seed is set before it."""

    def seed_after(step: Step, above: Sequence[int | None]) -> int | None:
        if step.given_seed is not None:
            return step.given_seed
        found = [seed for seed in above if seed is not None]
        return functools.reduce(_joined_seed, found) if len(set(found)) > 1 else next(iter(found), None)

    return folded(end, seed_after)


def count_random_maps(end: Step, seed: int) -> int:
    """Returns the number of random maps that draw from a seed, from this step upwards."""
    return longest_count(end, lambda step: step.drawing_seed == seed)


def longest_count(end: Step, counts: Callable[[Step], bool]) -> int:
    """Returns the number of steps that count, on the path upwards with the most of them."""
    return folded(end, lambda step, above: counts(step) + max(above, default=0))


def as_map_dataset(value: Any, name: str) -> Any:
    """Returns a MapDataset. Refuses anything else, which the error calls `name`."""
    if not isinstance(value, grain_kinds.MapDataset):
        raise TypeError(
            f"{name} must be a MapDataset, got {type(value).__name__}: write MapDataset.source(...) around a source."
        )
    return value


def nodes_of(datasets: Any) -> tuple[Node, ...]:
    if isinstance(datasets, grain_kinds.MapDataset) or not isinstance(datasets, Sequence):
        raise TypeError(f"datasets must be a list of MapDatasets, got {type(datasets).__name__}.")
    if not datasets:
        raise ValueError("datasets must have at least one dataset, got none.")
    return tuple(node_of(as_map_dataset(dataset, f"datasets[{number}]")) for number, dataset in enumerate(datasets))


def as_workers(options: Any) -> MultiprocessingOptions:
    """Returns options of workers: as given, or for a number of them; one per core for None."""
    if has_fields(options, MultiprocessingOptions):
        return as_options(options, "options", MultiprocessingOptions)
    if isinstance(options, str) and options == "auto":
        return MultiprocessingOptions(chooses_workers=True)
    return MultiprocessingOptions(available_cores() if options is None else as_integer(options, "num_workers", 0))


def _joined_seed(seed: int, other: int) -> int:
    return derive_seed(seed, Purpose.JOINED_SEEDS, other)
