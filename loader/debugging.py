"""What the debug mode of a loader looks at: what operations do that would make batches depend on who makes them.

Everything is made in the trainer's thread. Each part of the work is done twice, the second time on copies, and what the
first made is what the trainer gets. Each finding is a warning, once for each operation.
"""

import contextlib
import copy
import functools
import pickle
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import numpy as np

from millstream import tree
from millstream.loader.pipeline.elements import Elements, Origins, describe_origin
from millstream.loader.pipeline.pipeline import Pipeline
from millstream.loader.pipeline.plan import READ
from millstream.loader.pipeline.stages import split_stages
from millstream.loader.transport.payload import unpicklable_parts
from millstream.warn import warn

RECORDS = 4
"""Of each block, this many records are read again, to see whether they are still what they were."""


@final
class DebugChecks:
    """Wraps the parts of a pipeline's work, and warns of what is wrong with them.

    Args:
        pipeline: whose work.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self._source = pipeline.source
        self._labels = pipeline.labels
        self._leaving = set(_last_labels(pipeline))
        self._delivering = self._labels[-1] if self._labels else READ
        self._found: set[tuple[str, str]] = set()
        self._records: list[tuple[int, Any]] = []

    def watch(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Returns a function that does the same part of the work, and looks at how."""
        if label != READ and label not in self._labels:
            return function

        @functools.wraps(function)
        def call(given: Any, *others: Any) -> Any:
            again, before = _copied(given), _global_randomness()
            result = function(given, *others)
            if isinstance(result, Elements) and result.error is None:
                draws = self._look_at_randomness(label, before)
                if again is not None and not draws:
                    self._look_at_purity(label, result, function(again, *others))
                self._look_at_elements(label, result)
                if label == READ:
                    self._records = _kept(result)
                else:
                    self._look_at_source(label)
            return result

        return call

    def _look_at_randomness(self, label: str, before: dict[str, Any]) -> bool:
        """Warns where the state of a global generator has changed."""
        after = _global_randomness()
        changed = [name for name, state in before.items() if after[name] != state]
        for name in changed:
            self._warn(
                label,
                "randomness",
                f"{_subject(label)} draws from the global generator of {name}: its draws depend on the number of "
                "workers, and cannot be repeated. Make it a RandomMapTransform, and draw from the rng that it gets.",
            )
        return bool(changed)

    def _look_at_purity(self, label: str, first: Elements, second: Elements) -> None:
        """Warns where the same input gave something else the second time."""
        values, others = list(first.values), list(second.values)
        row, path = next(
            ((row, path) for row, pair in enumerate(zip(values, others, strict=False)) if (path := _difference(*pair))),
            (min(len(values), len(others)), "another number of elements") if len(values) != len(others) else (0, None),
        )
        if path is None:
            return
        where = f", at {describe_origin(first.origins, row)}" if row < len(first.origins) else ""
        self._warn(
            label,
            "purity",
            f"{_subject(label)} is not pure: done twice, it gave {path}{where}. A worker that is replaced and a run "
            "that resumes do it again, and would get other batches. Keep nothing that changes, and draw from the rng "
            "of a RandomMapTransform.",
        )

    def _look_at_elements(self, label: str, result: Elements) -> None:
        """Warns of elements that could not leave a worker, or that are the source's own memory."""
        if not len(result.values):
            return
        value = result.values[0]
        if label in self._leaving and (parts := unpicklable_parts(value)):
            self._warn(
                label,
                "pickling",
                f"What {_subject(label)} gives cannot be pickled, and so not be sent from a worker process: "
                f"{'; '.join(parts)}. Make it an array, a number or a string.",
            )
        if label == self._delivering and len(result.origins) and self._is_of_source(value, result.origins):
            self._warn(
                label,
                "views",
                f"What {_subject(label)} gives is the source's own memory, not a copy, at "
                f"{describe_origin(result.origins, 0)}: a training step that writes to it changes the record, but not "
                "where workers make the batches. Copy it in an operation, or make batches with Batch.",
            )

    def _is_of_source(self, value: Any, origins: Origins) -> bool:
        with contextlib.suppress(Exception):
            record = self._source[int(origins.record_key[0])]
            return any(np.shares_memory(one, other) for one in _arrays(value) for other in _arrays(record))
        return False

    def _look_at_source(self, label: str) -> None:
        """Warns where a record that was read is another one after an operation."""
        changes = [(key, path) for key, record in self._records if (path := self._change(key, record)) is not None]
        if changes:
            self._records, (key, path) = [], changes[0]
            self._warn(
                label,
                "source",
                f"{_subject(label)} keeps a view of the source's memory and changes it in place (record key {key}, "
                f"{path}): the next epoch reads the changed record. Copy what you change.",
            )

    def _change(self, key: int, record: Any) -> str | None:
        """Returns in which leaf a record is no longer what it was; None where it is."""
        with contextlib.suppress(Exception):
            return _difference(record, self._source[key])
        return None

    def _warn(self, label: str, kind: str, text: str) -> None:
        if (label, kind) not in self._found:
            self._found.add((label, kind))
            warn(f"debug: {text}")


def _subject(label: str) -> str:
    return "reading from the source" if label == READ else f"{label},"


def _last_labels(pipeline: Pipeline) -> Iterator[str]:
    """Yields what makes the elements that go from one process to another: the last operation of each stage."""
    number = 0
    for group in split_stages(pipeline.operations):
        number += len(group)
        yield pipeline.labels[number - 1] if number else READ


def _copied(given: Any) -> Any:
    """Returns what a part of the work was given, copied; None where it cannot be."""
    if isinstance(given, Origins):
        return given
    with contextlib.suppress(Exception):
        return Elements(copy.deepcopy(given.values), given.origins, given.error)
    return None


def _kept(run: Elements) -> list[tuple[int, Any]]:
    """Returns copies of some records with their keys."""
    with contextlib.suppress(Exception):
        keys = run.origins.record_key[:RECORDS].tolist()
        return [(key, copy.deepcopy(run.values[row])) for row, key in enumerate(keys)]
    return []


def _global_randomness() -> dict[str, Any]:
    """Returns the states of the generators that all code of a process shares."""
    return {"NumPy": pickle.dumps(np.random.get_state()), "Python": random.getstate()}  # noqa: NPY002  (looked at only)


def _arrays(value: Any) -> Sequence[Any]:
    return [leaf for _, leaf in tree.leaves(value) if isinstance(leaf, np.ndarray)]


def _difference(one: Any, other: Any) -> str | None:
    """Returns in which leaf two values differ, in words; None where they do not, or where nobody can tell."""
    with contextlib.suppress(Exception):
        leaves, others = dict(tree.leaves(one)), dict(tree.leaves(other))
        if leaves.keys() != others.keys():
            return "another structure"
        for path, leaf in leaves.items():
            if not _is_same(leaf, others[path]):
                return f"another {path or 'element'}"
    return None


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray) or hasattr(one, "__array__"):
        one, other = np.asarray(one), np.asarray(other)
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        if one.dtype.hasobject:
            return all(map(_is_same, one.flat, other.flat))
        return bool(one.tobytes() == other.tobytes())
    equality: Any = type(one).__eq__
    if equality is object.__eq__:
        # Objects without a meaning of equality: two that were made apart are never equal.
        return bool(vars(one).keys() == vars(other).keys()) if hasattr(one, "__dict__") else True
    return bool(one == other) or (one != one and other != other)  # noqa: PLR0124  (nan)
