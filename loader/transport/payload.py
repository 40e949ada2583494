"""The content of messages between processes: requests, outputs and errors.

Arrays never pass through a socket. pickle's protocol 5 passes their buffers out of band, and these are in the worker's
arena already, because a Batch stacks directly into it, or are copied there. Small arrays are part of the message.
cloudpickle pickles the rest, so that classes and functions of the user's `__main__` cross by value. Classes of the
pipeline come back as the same classes (`ClassTable`).

Pickling an array costs microseconds, however small it is. Elements that are not batched yet often have the same
structure and small arrays, so these cross as the rows of one array (`to_columns`). Arrays of different lengths, such as
documents, are concatenated. Rows that were built together cross as their columns. Of all structures, only plain dicts
and tuples are split. Others may hold more than their children, in attributes or in their constructor, and have to come
back complete.

Guarantees:
    * Elements come back with the same structure, keys, dtypes, shapes, bytes and writability.
    * Elements that are not alike cross as they are: a list of elements is a valid column.
    * Arrays of one column share memory. Only small arrays become columns, so keeping one of them pins little.
"""

import contextlib
import math
import pickle
import traceback
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, TypeAlias, final

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from millstream.core import tree
from millstream.core.columnar import Allocate
from millstream.core.signals import is_from_signal_handler
from millstream.errors import WorkerError
from millstream.loader.pipeline.calls import Fed, Group
from millstream.loader.pipeline.elements import Elements, FailedRecord, Location, Origins
from millstream.loader.pipeline.recycled_memory import ALIGNMENT
from millstream.loader.transport.arena import INLINE_BYTES, LARGE_LEAF_BYTES, Allocator, ArenaView
from millstream.loader.transport.pickling import ClassTable
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
    return _Packer(allocator, classes).pack(as_columns(run, allocator.allocate))


def unpack(payload: Payload, arena: ArenaView, classes: ClassTable) -> Elements:
    """Returns the run that was packed. Large arrays are views of the arena, small ones may be copies."""
    body, spans, chunks = payload
    leases = [arena.lease(offset, used) for offset, used in chunks]
    pickled = body if isinstance(body, bytes) else _bytes_at(body, leases)
    buffers = with_small_ones_copied([_bytes_at(span, leases) for span in spans])
    return from_columns(*classes.loads(pickled, buffers))


def release(payload: Payload, arena: ArenaView) -> None:
    _, _, chunks = payload
    for offset, _ in chunks:
        arena.release(offset)


def with_small_ones_copied(buffers: Sequence[NDArray[np.uint8]]) -> list[NDArray[np.uint8]]:
    """Returns buffers with copies of the small ones, if these have at most COPIED_BYTES together."""
    copies = sum(len(buffer) for buffer in buffers if len(buffer) < LARGE_LEAF_BYTES) <= COPIED_BYTES
    return [copied(buffer) if copies and len(buffer) < LARGE_LEAF_BYTES else buffer for buffer in buffers]


def copied(memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns a copy of bytes in private memory, aligned as in an arena."""
    buffer = np.empty(len(memory) + ALIGNMENT, dtype=np.uint8)
    start = -int(buffer.__array_interface__["data"][0]) % ALIGNMENT
    buffer[start : start + len(memory)] = memory
    return buffer[start : start + len(memory)]


def _bytes_at(span: Span, leases: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    chunk, start, num_bytes = span
    return leases[chunk][start : start + num_bytes]


class Pickles(Protocol):
    """Pickles and unpickles values: a `ClassTable`, or the module `pickle` among processes of the same program."""

    def dumps(self, value: Any, /) -> bytes: ...
    def loads(self, data: bytes, /) -> Any: ...


def pack_failure(error: BaseException, classes: Pickles) -> Failure:
    return Failure(
        pickled=_survivor(error, classes),
        type_name=f"{type(error).__module__}.{type(error).__qualname__}",
        text=_text(error),
        notes=tuple(getattr(error, "__notes__", ())),
        traceback="".join(traceback.format_exception(error)),
    )


def unpack_failure(failure: Failure, classes: Pickles) -> BaseException:
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


def _survivor(error: BaseException, classes: Pickles) -> bytes | None:
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


LARGE_BYTES = 1 << 14
"""Arrays of at least this size are sent one by one."""

UNALIGNED_BYTES = 1 << 12
"""Smaller arrays may begin anywhere. Others begin at a multiple of ALIGNMENT."""

MAX_DEPTH = 8
"""Structures nested more deeply cross as they are."""

_IS_WRITEABLE = attrgetter("flags.writeable")


@final
class Even(NamedTuple):
    """Arrays of one shape and dtype, as the rows of one array."""

    array: NDArray[Any]


@final
class Fields(NamedTuple):
    """Dicts or tuples of one structure, as one column per field."""

    names: Sequence[str] | None  # The keys of the dicts; None for tuples.
    columns: Sequence["Columns"]


@final
class Ragged(NamedTuple):
    """Arrays of one dtype and different lengths, such as documents, concatenated into one."""

    array: NDArray[Any]
    lengths: bytes  # Of each array along the first axis: int64 as bytes, which pickle faster than an array.
    step: int  # The alignment of each array's first entry, in entries.


Columns: TypeAlias = Even | Ragged | Fields | list[Any]


def as_columns(run: Elements, allocate: Allocate) -> tuple[Columns, bytes]:
    """Returns the values and the origins of a run as they are pickled."""
    return to_columns(list(run.values), allocate), run.origins.to_bytes()


def from_columns(columns: Columns, origins: bytes) -> Elements:
    """Inverts `as_columns`."""
    values = to_elements(columns)
    return Elements(values, Origins.from_bytes(origins, len(values)))


def to_columns(elements: list[Any], allocate: Allocate, depth: int = MAX_DEPTH) -> Columns:
    """Returns elements of any kind as columns, whose common arrays are in memory of `allocate`.

    `depth` is the number of nested levels to split. It ends the recursion of an element that contains itself.
    """
    kinds, count = set(map(type, elements)), len(elements)
    kind = kinds.pop() if len(kinds) == 1 and count > 1 and depth else None
    if kind is np.ndarray:
        return _rows(elements, allocate)
    names: list[str] | None = None
    if kind is dict:
        names = list(elements[0])
        # Only string keys: others may be equal to a key of another type, or define equality in their own way.
        are_strings = set(map(type, chain.from_iterable(elements))) == {str}
        are_alike = are_strings and list(map(list, elements)).count(names) == count
        fields = zip(*map(dict.values, elements), strict=True)
    elif kind is tuple:
        are_alike = list(map(len, elements)).count(len(elements[0]) or -1) == count
        fields = zip(*elements, strict=True)
    else:
        return elements
    columns = [to_columns(list(values), allocate, depth - 1) for values in fields] if are_alike else []
    # Without arrays, pickle is faster with the elements as they are.
    return Fields(names, columns) if any(not isinstance(column, list) for column in columns) else elements


def to_elements(columns: Columns) -> list[Any]:
    """Inverts `to_columns`. Small arrays are views of the common ones."""
    if isinstance(columns, Even):
        return list(columns.array)
    if isinstance(columns, Ragged):
        lengths = np.frombuffer(columns.lengths, dtype=np.int64)
        starts = _starts(lengths, columns.step)[:-1]
        return [
            columns.array[start : start + length]
            for start, length in zip(starts.tolist(), lengths.tolist(), strict=True)
        ]
    if isinstance(columns, Fields):
        rows = zip(*map(to_elements, columns.columns), strict=True)
        return list(rows) if columns.names is None else [dict(zip(columns.names, row, strict=True)) for row in rows]
    return columns


def _rows(arrays: list[NDArray[Any]], allocate: Allocate) -> Columns:
    first = arrays[0]
    is_shared = list(map(_IS_WRITEABLE, arrays)).count(first.flags.writeable) == len(arrays)
    if first.ndim == 0 or first.dtype.hasobject or not is_shared:
        return arrays
    try:
        lengths = list(map(len, arrays))
        is_even = lengths.count(len(first)) == len(arrays)
        return _even(arrays, allocate) if is_even else _ragged(arrays, lengths, allocate)
    except (TypeError, ValueError):
        # Different shapes or dtypes: NumPy checks them anyway.
        return arrays


def _even(arrays: list[NDArray[Any]], allocate: Allocate) -> Columns:
    count, first = len(arrays), arrays[0]
    if not 0 < first.nbytes < LARGE_BYTES or (first.nbytes >= UNALIGNED_BYTES and first.nbytes % ALIGNMENT):
        return arrays
    rows = allocate((count, *first.shape), first.dtype)
    np.concatenate(arrays, axis=0, out=rows.reshape(-1, *first.shape[1:]), casting="no")
    rows.flags.writeable = first.flags.writeable
    return Even(rows)


def _ragged(arrays: list[NDArray[Any]], lengths: list[int], allocate: Allocate) -> Columns:
    first, shape = arrays[0], arrays[0].shape[1:]
    entry_bytes = math.prod(shape) * first.dtype.itemsize
    if not 0 < sum(lengths) * entry_bytes < LARGE_BYTES * len(arrays):
        return arrays
    step = 1
    if max(lengths) * entry_bytes >= UNALIGNED_BYTES:
        step, remainder = divmod(ALIGNMENT, entry_bytes)
        if remainder:
            return arrays
    sizes = np.array(lengths, dtype=np.int64)
    starts = _starts(sizes, step)
    joined = allocate((int(starts[-1]), *shape), first.dtype)
    gap = np.zeros((step - 1, *shape), first.dtype)
    gaps = (np.diff(starts) - sizes).tolist()
    padded = [run for array, missing in zip(arrays, gaps, strict=True) for run in (array, gap[:missing])]
    np.concatenate(padded if any(gaps) else arrays, axis=0, out=joined, casting="no")
    joined.flags.writeable = first.flags.writeable
    return Ragged(joined, sizes.tobytes(), step)


def _starts(lengths: NDArray[np.int64], step: int) -> NDArray[np.int64]:
    """Returns the start of each array and of the next one, all multiples of `step`."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(-(-lengths // step) * step, out=starts[1:])
    return starts
