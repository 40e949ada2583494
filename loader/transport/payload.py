"""Messages between processes: requests, outputs and errors.

Arrays never pass through a socket. pickle's protocol 5 passes their buffers out of band, and these are in the worker's
arena already, because a Batch stacks directly into it, or are copied there. Small arrays are part of the message.
cloudpickle pickles the rest, so that classes and functions of the user's `__main__` cross by value. Classes of the
pipeline come back as the same classes (`ClassTable`).

A request that carries elements crosses as one pickle. Small arrays that are alike are merged into one (see
`element_columns`), and rows that were built together cross as their columns.
"""

import contextlib
import pickle
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, final

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from millstream.core import tree
from millstream.core.signals import is_from_signal_handler
from millstream.errors import WorkerError
from millstream.loader.pipeline.calls import Fed, Group
from millstream.loader.pipeline.elements import Elements, FailedRecord, Location, Origins
from millstream.loader.pipeline.recycled_memory import ALIGNMENT
from millstream.loader.transport.arena import INLINE_BYTES, LARGE_LEAF_BYTES, Allocator, ArenaView
from millstream.loader.transport.class_table import ClassTable
from millstream.loader.transport.element_columns import to_columns, to_elements
from millstream.transforms.packing.rows import Rows

INLINE_PICKLE_BYTES = 1 << 15
"""Longer pickles travel in the arena, so that a worker does not wait for the parent to empty a socket."""

COPIED_BYTES = 1 << 16
"""Upper bound on the small arrays of a message that the consumer gets as copies, such as the labels of a batch of
images: keeping a copy pins nothing. If they are larger together, they stay in the arena, in shared chunks, because
allocating memory for each message would cost more."""

MAX_PATH_LENGTH = 200


Span: TypeAlias = tuple[int, int, int]
"""Bytes in an arena: the index of the chunk in the message, the offset in the chunk, the number of bytes."""

Payload: TypeAlias = tuple[bytes | Span, tuple[Span, ...], tuple[tuple[int, int], ...]]
"""Serialized outputs: the pickle or its span, the spans of its out-of-band buffers, and the chunks of these spans as
(offset, bytes used). Each chunk is one lease.

Plain tuples, because there is one per batch, and pickle looks up every class that it meets.
"""


def dump_request(request: Group | Fed, classes: ClassTable) -> bytes:
    """Returns the pickle of a request with the elements of a group, or with elements drawn from a stream."""
    values = request.elements.values
    columns: Any = values if isinstance(values, Rows) else to_columns(list(values), np.empty)
    return classes.dumps(_with_values(request, columns))


def load_request(data: bytes, classes: ClassTable) -> Group | Fed:
    request: Group | Fed = classes.loads(data)
    columns: Any = request.elements.values
    return _with_values(request, to_elements(columns))


def _with_values(request: Group | Fed, values: Any) -> Group | Fed:
    elements = request.elements
    return request._replace(elements=Elements(values, elements.origins, elements.error))


class Failure(NamedTuple):
    """A serialized exception."""

    pickled: bytes | None  # None if it does not survive a round trip.
    type_name: str
    text: str
    notes: tuple[str, ...]
    traceback: str
    at: Location | None = None


@final
class WorkerTraceback(Exception):  # noqa: N818  (not an error of its own, but the origin of one)
    """The worker's traceback, as the cause of the exception that the parent raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@final
class _Packer:
    """Pickles one message and moves its buffers to the arena."""

    def __init__(self, allocator: Allocator, classes: ClassTable) -> None:
        self._allocator = allocator
        self._classes = classes
        self._chunks: dict[int, int] = {}
        self._ends: list[int] = []
        self._spans: list[Span] = []

    def pack(self, value: Any) -> Payload:
        try:
            body = self._classes.dumps(value, self._take_out, self._allocator.allocate)
            span = self._store(np.frombuffer(body, dtype=np.uint8)) if len(body) > INLINE_PICKLE_BYTES else None
        except BaseException:
            for offset in self._chunks:
                self._allocator.take_back(offset)
            raise
        finally:
            self._allocator.end_message()
        return span or body, tuple(self._spans), tuple(zip(self._chunks, self._ends, strict=True))

    def _take_out(self, buffer: pickle.PickleBuffer) -> bool:
        """Moves a buffer to the arena, or returns True to leave it in the pickle."""
        raw = buffer.raw()
        span = None if raw.nbytes < INLINE_BYTES else self._store(np.frombuffer(raw, dtype=np.uint8))
        if span is not None:
            self._spans.append(span)
        return span is None

    def _store(self, memory: NDArray[np.uint8]) -> Span | None:
        """Returns the span of bytes, which are copied unless they are in the arena. Returns None if it has no room."""
        found = self._allocator.locate(memory)
        if found is None:
            copy = self._allocator.bytes_for(len(memory))
            if copy is None:
                return None
            copy[:] = memory
            found = self._allocator.locate(copy)
            if found is None:
                raise AssertionError("the span of new bytes is known")
        offset, start = found
        if offset not in self._chunks:
            self._chunks[offset] = len(self._ends)
            self._ends.append(0)
            # Immediately, because the last reference to the copy may end before the next buffer is stored.
            self._allocator.lend(offset)
        chunk = self._chunks[offset]
        self._ends[chunk] = max(self._ends[chunk], start + len(memory))
        return chunk, start, len(memory)


def pack(run: Elements, allocator: Allocator, classes: ClassTable) -> Payload:
    """Serializes a run for the parent. Errors in it must have been replaced by their `Failure`."""
    return _Packer(allocator, classes).pack((to_columns(list(run.values), allocator.allocate), run.origins.to_bytes()))


def unpack(payload: Payload, arena: ArenaView, classes: ClassTable) -> tuple[list[Any], Origins]:
    """Returns the values and origins of a run. Large arrays are views of the arena, small ones may be copies."""
    body, spans, chunks = payload
    leases = [arena.lease(offset, used) for offset, used in chunks]
    pickled = body if isinstance(body, bytes) else _bytes_at(body, leases)
    copies = sum(num_bytes for _, _, num_bytes in spans if num_bytes < LARGE_LEAF_BYTES) <= COPIED_BYTES
    buffers = [_bytes_at(span, leases) for span in spans]
    buffers = [copied(buffer) if copies and len(buffer) < LARGE_LEAF_BYTES else buffer for buffer in buffers]
    columns, origins = classes.loads(pickled, buffers)
    values = to_elements(columns)
    return values, Origins.from_bytes(origins, len(values))


def release(payload: Payload, arena: ArenaView) -> None:
    _, _, chunks = payload
    for offset, _ in chunks:
        arena.release(offset)


def copied(memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns a copy of bytes in private memory, aligned as in an arena."""
    buffer = np.empty(len(memory) + ALIGNMENT, dtype=np.uint8)
    start = -int(buffer.__array_interface__["data"][0]) % ALIGNMENT
    buffer[start : start + len(memory)] = memory
    return buffer[start : start + len(memory)]


def _bytes_at(span: Span, leases: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    chunk, start, num_bytes = span
    return leases[chunk][start : start + num_bytes]


def pack_failure(error: BaseException, classes: ClassTable) -> Failure:
    return Failure(
        pickled=_survivor(error, classes),
        type_name=f"{type(error).__module__}.{type(error).__qualname__}",
        text=_text(error),
        notes=tuple(getattr(error, "__notes__", ())),
        traceback="".join(traceback.format_exception(error)),
    )


def unpack_failure(failure: Failure, classes: ClassTable) -> BaseException:
    """Returns the exception to raise in the parent. It has its original type if that is possible."""
    error: BaseException | None = None
    if failure.pickled is not None:
        try:
            error = classes.loads(failure.pickled)
        except Exception as failed:
            if is_from_signal_handler(failed):
                raise
            # Its class is not available here: the text must do.
    if error is None:
        error = WorkerError(f"{failure.type_name}: {failure.text}")
    # Its class may refuse each of these.
    with contextlib.suppress(Exception):
        error.__cause__ = WorkerTraceback(failure.traceback)
        if not getattr(error, "__notes__", None):
            for note in failure.notes:
                error.add_note(note)
    return error


def unpack_failures(failures: Sequence[FailedRecord], classes: ClassTable) -> tuple[FailedRecord, ...]:
    return tuple(one._replace(error=unpack_failure(one.error, classes)) for one in failures)


def unpicklable_leaves(value: Any, path: str = "", above: frozenset[int] = frozenset()) -> list[str]:
    """Returns a description of each leaf of a nested structure that cannot be pickled: its path and the cause.

    `above` has the identities of the structures that contain it. It ends the recursion of one that contains itself.
    """
    if id(value) in above:
        return []
    children: list[tuple[str, Any]] = []
    # The user's classes, those of keys included, may fail in __repr__. Then the complete structure is reported.
    with contextlib.suppress(Exception):
        children = _children(value, path)
    found = [
        leaf for child_path, child in children for leaf in unpicklable_leaves(child, child_path, above | {id(value)})
    ]
    if found:
        return found
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001  (any error of pickling is the result)
        return [f"{path or 'the element'} of type {type(value).__name__}: {_text(error)}"]
    return []


def _children(value: Any, path: str) -> list[tuple[str, Any]]:
    if len(path) > MAX_PATH_LENGTH:
        return []
    children = tree.children(value)
    return [(path + step, child) for step, child in zip(tree.paths(value), children, strict=True)] if children else []


def rebuild_exception(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    """Creates an exception without calling its constructor, whose parameters may differ from `args`."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class _WithoutConstructor:
    """Pickles an exception by `rebuild_exception`."""

    def __init__(self, error: BaseException) -> None:
        self._recipe = type(error), error.args, vars(error)

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_exception, self._recipe


def _survivor(error: BaseException, classes: ClassTable) -> bytes | None:
    """Returns the pickle of an exception, or None if the exception does not survive a round trip."""
    for recipe in (lambda: error, lambda: _WithoutConstructor(error)):
        try:
            pickled = classes.dumps(recipe())
            again = classes.loads(pickled)
        except Exception:  # noqa: BLE001, S112  (an exception may do anything when pickled)
            continue
        if type(again) is type(error) and _text(again) == _text(error):
            return pickled
    return None


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  (a broken __str__ must not hide the error)
        return "(its __str__ raises)"
