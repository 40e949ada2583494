"""A look at the first elements of a loader: some mistakes in operations show there, and the log names the operation.

Guarantees:
    * Nothing here changes a batch or raises. A mistake is a warning in the log of `millstream`, once in each process.
    * Only the first records are looked at: afterwards a block costs two looks at an attribute more.
"""

import contextlib
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, final

import numpy as np

from millstream import tree
from millstream.columnar import ColumnarRecords
from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.steps import Step

RECORDS = 8
"""How many records are looked at."""

ARRAY_BYTES = 1 << 21
"""Of larger arrays, evenly spaced rows are looked at."""

TEXT_BYTES = 1 << 12
"""Of longer bytes, the beginning is looked at. They cannot change, only be replaced."""

DEPTH = 8
"""How deep in a record it is looked."""


@final
class FirstLook:
    """Watches what the operations do to the first records and to the first batch.

    Args:
        read: reads one record, given its key; None where it must not be read twice, and records are not watched.
        labels: what to call each operation.
        makers: the numbers of the operations that make elements, one by one.

    Attributes:
        left: the operations whose elements are still to be looked at, by number; None stands for the records.
        left_at_batches: the looks at outputs that are still to be taken.
    """

    def __init__(self, read: Callable[[int], Any] | None, labels: Sequence[str], makers: Collection[int]) -> None:
        self._read = read
        self._labels = labels
        # Each look is taken once. To pop is one step: several threads may come at the same time.
        self.left: dict[int | None, bool] = dict.fromkeys(makers if read is None else [None, *makers], True)
        self.left_at_batches = [True]

    def at_records(self, run: Elements) -> "WatchedRecords | None":
        """Returns what watches the records just read, or None where that is not needed."""
        if self._read is None or not self.left.pop(None, False) or isinstance(run.values, ColumnarRecords):
            return None
        return WatchedRecords(run, self._read, self._labels)

    def at_results(self, number: int, step: Step, run: Elements) -> Elements:
        """Returns what the step of operation `number` makes of a run: the first element alone, the first time.

        Warns if the others change what it was: the operation returns memory that it writes to again.
        """
        if len(run.values) < 2 or not self.left.pop(number, False):
            return step(run, np.empty)
        first = step(Elements(run.values[:1], run.origins.take(slice(1))), np.empty)
        if first.error is not None:
            return first
        before = _contents(first.values)
        others = step(Elements(run.values[1:], run.origins.take(slice(1, None)), run.error), np.empty)
        if _contents(first.values) != before:
            _log(
                "millstream: %s, returns an element, and changes it when it is called for the next one: elements of a "
                "batch would be equal, and others depend on the number of threads. Return a new element each time: "
                "copy what you keep.",
                self._labels[number],
            )
        return Elements.concatenate([first, others])

    def at_batches(self, run: Elements, last: int) -> None:
        """Looks at the first outputs of a block, which operation number `last` made."""
        if not run.values or not _taken(self.left_at_batches):
            return
        if last >= 0 and all(value is None for value in run.values):
            _log("millstream: %s, returned None for the first batch: did you forget `return`?", self._labels[last])


@final
class WatchedRecords:
    """The first records, as the source gave them, and what they contained then."""

    def __init__(self, run: Elements, read: Callable[[int], Any], labels: Sequence[str]) -> None:
        self._read = read
        self._labels = labels
        self._watched: list[tuple[int, Any, int]] = []
        # Records are of any class: one that cannot be looked at is not.
        with contextlib.suppress(Exception):
            keys = run.origins.record_key[:RECORDS].tolist()
            records = run.values[:RECORDS]
            self._watched = [(key, record, content(record)) for key, record in zip(keys, records, strict=True)]

    def after(self, number: int) -> None:
        """Warns if operation `number` has changed a record in place, and so the source: reading gives what it made."""
        with contextlib.suppress(Exception):
            for key, record, before in self._watched:
                now = content(record)
                if now != before:
                    self._watched = []
                    self._check_source(number, key, now)
                    return

    def _check_source(self, number: int, key: int, changed: int) -> None:
        if content(self._read(key)) == changed:
            _log(
                "millstream: %s, changes its input in place, and with it the record of the source (record key %d). The "
                "next epoch gets the changed record, and batches depend on the number of workers. Return a new element "
                "instead: copy what you change.",
                self._labels[number],
                key,
            )


def _contents(values: Sequence[Any]) -> list[int]:
    """Returns what some elements contain; nothing where they cannot be looked at, as elements are of any class."""
    with contextlib.suppress(Exception):
        return [content(value) for value in values[:RECORDS]]
    return []


def _taken(looks: list[bool]) -> bool:
    """Takes a look, if there is one left."""
    try:
        return looks.pop()
    except IndexError:
        return False


def content(value: Any, crc: int = 0, depth: int = 0) -> int:
    """Returns a checksum of what a record contains, continued from `crc`. What is of no known kind counts as equal."""
    crc = zlib.crc32(type(value).__name__.encode(), crc)
    if value is None or depth > DEPTH:
        return crc
    if isinstance(value, (bool, int, float, complex, np.generic)):
        return zlib.crc32(repr(value).encode(), crc)
    if isinstance(value, str):
        value = value[:TEXT_BYTES].encode(errors="replace")
    if isinstance(value, bytes | bytearray | memoryview):
        return zlib.crc32(bytes(value[:TEXT_BYTES]), crc)
    for member in _members(value):
        crc = zlib.crc32(member, crc) if isinstance(member, _Bytes) else content(member, crc, depth + 1)
    return crc


class _Bytes(bytes):
    """The memory of an array."""


def _members(value: Any) -> Sequence[Any]:
    """Returns what a value is made of."""
    parts = tree.parts(value)
    if parts is not None:
        return [*value, *parts] if isinstance(value, Mapping) else parts
    if isinstance(value, np.ndarray) or hasattr(value, "__array__"):
        return _array_members(value)
    return list(getattr(value, "__dict__", {}).values())


def _array_members(value: Any) -> Sequence[Any]:
    """Returns the memory of an array or of what looks like one; of an array of objects, the first of them."""
    try:
        array = np.asarray(value)
    except (TypeError, ValueError, RuntimeError):
        return []
    if array.dtype.hasobject:
        return list(array.flat[:TEXT_BYTES])
    rows = array[:: array.nbytes // ARRAY_BYTES + 1] if array.ndim else array
    return [_Bytes(rows.tobytes())]


def _log(message: str, *arguments: object) -> None:
    import logging  # noqa: PLC0415  (takes long to import)

    logging.getLogger("millstream").warning(message, *arguments)
