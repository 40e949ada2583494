"""Checks of operations for `debug=True`: everything that would make batches depend on the process that computes them.

The trainer's thread does all the work. Each step runs twice, the second time on copies of its input, and the trainer
gets the results of the first run. A worker process computes the first batch as well. Each finding is a warning, issued
once per operation.
"""

import contextlib
import copy
import functools
import pickle
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import numpy as np

from millstream.core import tree
from millstream.core.warn import warn
from millstream.loader.execution import Execution
from millstream.loader.iterator import DataLoaderIterator
from millstream.loader.pipeline.elements import Elements, Origins, describe_origin
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import READ, Plan
from millstream.loader.pipeline.stages import split_stages
from millstream.loader.reporting.preview import first_outputs
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions
from millstream.loader.transport.payload import unpicklable_leaves
from millstream.loader.transport.pipeline_file import WorkerInit
from millstream.samplers.index import SequentialSampler
from millstream.transforms import Filter

RECORDS = 4
"""The number of records of each block that are read again, to find out whether they have changed."""

DEPTH = 8


@final
class DebugChecks:
    """Wraps the steps of a pipeline, and warns of mistakes in them."""

    def __init__(self, pipeline: Pipeline, worker_init_fn: WorkerInit) -> None:
        self._pipeline = pipeline
        self._worker_init_fn = worker_init_fn
        self._is_compared = False
        # Records that differ by epoch are not at their keys.
        self._source = () if pipeline.view.differs_by_epoch else pipeline.source
        self._labels = pipeline.labels
        self._leaving = set(_last_labels(pipeline))
        self._delivering = self._labels[-1] if self._labels else READ
        self._producers = set(_producer_labels(pipeline))
        self._found: set[tuple[str, str]] = set()
        self._records: list[tuple[int, Any]] = []

    def watch(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that runs the same step, and checks it."""
        if label != READ and label not in self._labels:
            return function

        @functools.wraps(function)
        def call(elements: Any, *arguments: Any) -> Any:
            again, before = _copied(elements), _global_randomness()
            result = function(elements, *arguments)
            if isinstance(result, Elements) and result.error is None:
                draws = self._check_randomness(label, before)
                if again is not None and not draws:
                    self._check_purity(label, result, self._run_again(label, function, again, *arguments))
                self._check_elements(label, result)
                if label == READ:
                    # A record that is another one each time says nothing about operations.
                    is_stable = self._found.isdisjoint({(READ, "randomness"), (READ, "purity")})
                    self._records = _copies_with_keys(result) if is_stable else []
                else:
                    self._check_source(label)
                if label == self._delivering and len(result.values) and not self._is_compared:
                    self._is_compared = True
                    self._compare_with_worker()
            return result

        return call

    def _check_randomness(self, label: str, before: dict[str, Any]) -> bool:
        """Returns True if the state of a global generator has changed."""
        after = _global_randomness()
        changed = [name for name, state in before.items() if after[name] != state]
        for name in changed:
            self._warn(
                label,
                "randomness",
                f"{_subject(label)} draws from the global generator of {name}: its draws depend on the number of "
                "workers, and cannot be repeated. Make it a RandomMap, and draw from its rng.",
            )
        return bool(changed)

    def _run_again(self, label: str, function: Callable[..., Any], elements: Any, *arguments: Any) -> Elements:
        """Runs a step on copies: on the first element alone, if the step might return the same memory for the next."""
        result: Elements
        if label not in self._producers or len(elements.values) < 2:
            result = function(elements, *arguments)
            return result
        first = function(Elements(elements.values[:1], elements.origins.take(slice(1))), *arguments)
        if first.error is not None or (before := _copied(first)) is None:
            result = function(elements, *arguments)
            return result
        remainder = function(
            Elements(elements.values[1:], elements.origins.take(slice(1, None)), elements.error, elements.at),
            *arguments,
        )
        pairs = zip(before.values, first.values, strict=True)
        if any(difference(one, other) is not None for one, other in pairs):
            self._warn(
                label,
                "reuse",
                f"{_subject(label)} returns an element, and changes it when it is called for the next one: elements of "
                "a batch would be equal, and others depend on the number of threads. Return a new element each time.",
            )
        return Elements.concatenate([first, remainder])

    def _check_purity(self, label: str, first: Elements, second: Elements) -> None:
        values, repeated = list(first.values), list(second.values)
        row, changed = next(
            (
                (row, text)
                for row, pair in enumerate(zip(values, repeated, strict=False))
                if (text := difference(*pair))
            ),
            (min(len(values), len(repeated)), "another number of elements")
            if len(values) != len(repeated)
            else (0, None),
        )
        if changed is None:
            return
        where = f", at {describe_origin(first.origins, row)}" if row < len(first.origins) else ""
        self._warn(
            label,
            "purity",
            f"{_subject(label)} is not pure: run twice, it returned {changed}{where}. A replaced worker and a resumed "
            "run repeat it, and would get other batches. Keep no state that changes, and draw from the rng of a "
            "RandomMap.",
        )

    def _check_elements(self, label: str, result: Elements) -> None:
        if not len(result.values):
            return
        value = result.values[0]
        if label in self._leaving and (culprits := unpicklable_leaves(value)):
            self._warn(
                label,
                "pickling",
                f"The result of {_subject(label)} cannot be pickled, so a worker process cannot send it: "
                f"{'; '.join(culprits)}. Make it an array, a number or a string.",
            )
        if label == self._delivering and len(result.origins) and self._is_of_source(value, result.origins):
            self._warn(
                label,
                "views",
                f"The result of {_subject(label)} is the source's own memory, not a copy, at "
                f"{describe_origin(result.origins, 0)}: a training step that writes to it changes the record, but not "
                "if workers make the batches. Copy it in an operation, or make batches with Batch.",
            )

    def _is_of_source(self, value: Any, origins: Origins) -> bool:
        with contextlib.suppress(Exception):
            record = self._source[int(origins.record_key[0])]
            return any(np.shares_memory(one, other) for one in _arrays(value) for other in _arrays(record))
        return False

    def _check_source(self, label: str) -> None:
        changes = [(key, text) for key, record in self._records if (text := self._change(key, record)) is not None]
        if changes:
            self._records, (key, text) = [], changes[0]
            self._warn(
                label,
                "source",
                f"{_subject(label)} changes its input in place, and with it a record that the source keeps (record key "
                f"{key}, {text}). The next epoch reads the changed record, and batches depend on the number of "
                "workers. Copy what you change.",
            )

    def _change(self, key: int, record: Any) -> str | None:
        with contextlib.suppress(Exception):
            return difference(record, self._source[key])
        return None

    def _compare_with_worker(self) -> None:
        """Warns of the first stage whose first results differ from those in a worker process."""
        if Plan(self._pipeline).reads_in_order_only:
            return
        here = FirstResults(self._pipeline)[0]
        try:
            in_worker = _in_worker(self._pipeline, self._worker_init_fn)
        except TypeError:
            # The pipeline cannot be pickled, which is an error if there are workers.
            return
        except Exception as error:  # noqa: BLE001  (of the start of a worker)
            self._warn("", "worker", f"A worker process cannot compute the first batch: {error}")
            return
        for label in (READ, *self._labels):
            text = _results_difference(here.get(label), in_worker.get(label))
            if text is None:
                continue
            # What differs here, too, is not pure, which another check finds.
            if _results_difference(here.get(label), FirstResults(self._pipeline)[0].get(label)) is None:
                self._warn(
                    label,
                    "worker",
                    f"In a worker process, {_subject(label).removesuffix(',')} {text}. It depends on something that "
                    "workers do not get from this process: pass it to the operation's constructor, or set it in "
                    "worker_init_fn.",
                )
            return

    def _warn(self, label: str, kind: str, text: str) -> None:
        if (label, kind) not in self._found:
            self._found.add((label, kind))
            warn(f"debug: {text}")


class Results(NamedTuple):
    """The results of one stage up to the first output: copies of elements, their record keys, and types of errors."""

    values: list[Any]
    record_keys: list[int]
    errors: list[str]


@final
class FirstResults:
    """A source of one record: the first results of each stage of a pipeline, computed by the process that reads it."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def __len__(self) -> int:
        return 1

    def __getitem__(self, key: int) -> Mapping[str, Results]:
        if key:
            raise IndexError(f"record key must be 0, got {key}.")
        found: dict[str, Results] = {}

        def observe(label: str, result: Elements) -> None:
            results = found.setdefault(label, Results([], [], []))
            # Later operations may change elements in place. What cannot be pickled is found by another check.
            with contextlib.suppress(Exception):
                values = copy.deepcopy(list(result.values))
                if not unpicklable_leaves(values):
                    results.values.extend(values)
                    results.record_keys.extend(result.origins.record_key.tolist())
            results.errors.extend([] if result.error is None else [type(result.error).__name__])

        with contextlib.suppress(Exception):
            next(first_outputs(self._pipeline, observe), None)
        return found

    def fingerprint(self) -> str:
        return "the first results of a pipeline"


def _in_worker(pipeline: Pipeline, worker_init_fn: WorkerInit) -> Mapping[str, Results]:
    """Returns the first results of the stages of a pipeline in a worker process."""
    asked = Pipeline.of(FirstResults(pipeline), SequentialSampler(1), (), None)
    workers = MultiprocessingOptions(num_workers=1, per_worker_buffer_size=1, worker_init_fn=worker_init_fn)
    with contextlib.closing(Execution(asked, workers, ReadOptions(num_threads=0))) as execution:
        found: Mapping[str, Results] = next(DataLoaderIterator.of(execution))
    return found


def _results_difference(here: Results | None, in_worker: Results | None) -> str | None:
    """Returns the first difference of a worker's results of a stage; None if they are those of this process."""
    if here is None or in_worker is None:
        return None
    # The process that is slower may have computed fewer elements beyond the first output.
    for row, (one, other) in enumerate(zip(here.values, in_worker.values, strict=False)):
        keys = [results.record_keys[row] for results in (here, in_worker) if row < len(results.record_keys)]
        if len(set(keys)) > 1:
            return f"returns the element of record key {keys[1]} instead of {keys[0]}"
        if (text := difference(one, other)) is not None:
            return f"returns {text}{f', at record key {keys[0]}' if keys else ''}"
    if here.errors != in_worker.errors:
        return (
            f"raises {in_worker.errors[0]}" if in_worker.errors else f"does not raise {here.errors[0]}, as it does here"
        )
    return "returns another number of elements" if bool(here.values) != bool(in_worker.values) else None


def difference(one: Any, other: Any, depth: int = DEPTH) -> str | None:
    """Returns a description of the first leaf in which two values differ; None if they are equal or incomparable.

    Arrays are compared with dtype and shape, NaN is equal to itself, and objects of classes that define no equality,
    or one that raises, are compared by their attributes.
    """
    if type(one) is not type(other):
        return f"another type, {type(other).__name__}"
    with contextlib.suppress(Exception):
        leaves, other_leaves = dict(tree.leaves(one)), dict(tree.leaves(other))
        if leaves.keys() != other_leaves.keys():
            return "another structure"
        for path, leaf in leaves.items():
            if not _are_equal(leaf, other_leaves[path], depth):
                return f"another {path or 'element'}"
    return None


def _are_equal(one: Any, other: Any, depth: int) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray) or hasattr(one, "__array__"):
        one, other = np.asarray(one), np.asarray(other)
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if one.dtype.hasobject:
            return all(_are_equal(*pair, depth) for pair in zip(one.flat, other.flat, strict=True))
        return bool(one.tobytes() == other.tobytes())
    equality: Any = type(one).__eq__
    if equality is not object.__eq__:
        # A dataclass of arrays raises: the truth of an array is ambiguous.
        with contextlib.suppress(Exception):
            return bool(one == other) or (one != one and other != other)  # noqa: PLR0124  (NaN)
    return depth == 0 or not hasattr(one, "__dict__") or difference(vars(one), vars(other), depth - 1) is None


def _subject(label: str) -> str:
    return "reading from the source" if label == READ else f"{label},"


def _last_labels(pipeline: Pipeline) -> Iterator[str]:
    """Yields the last operation of each stage: its results are sent from one process to another."""
    number = 0
    for group in split_stages(pipeline.operations):
        number += len(group)
        yield pipeline.labels[number - 1] if number else READ


def _producer_labels(pipeline: Pipeline) -> Iterator[str]:
    """Yields the operations that create elements one by one: those before the first that gathers, except Filters."""
    for label, operation in zip(pipeline.labels, pipeline.operations, strict=True):
        if operation.gathers:
            return
        if not isinstance(operation, Filter):
            yield label


def _copied(elements: Any) -> Any:
    """Returns a copy of the input of a step; None if it cannot be copied."""
    if isinstance(elements, Origins):
        return elements
    with contextlib.suppress(Exception):
        return Elements(copy.deepcopy(elements.values), elements.origins, elements.error, elements.at)
    return None


def _copies_with_keys(run: Elements) -> list[tuple[int, Any]]:
    with contextlib.suppress(Exception):
        keys = run.origins.record_key[:RECORDS].tolist()
        return [(key, copy.deepcopy(run.values[row])) for row, key in enumerate(keys)]
    return []


def _global_randomness() -> dict[str, Any]:
    return {"NumPy": pickle.dumps(np.random.get_state()), "Python": random.getstate()}  # noqa: NPY002  (only read)


def _arrays(value: Any) -> Sequence[Any]:
    return [leaf for _, leaf in tree.leaves(value) if isinstance(leaf, np.ndarray)]
