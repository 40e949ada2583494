"""How outputs, errors and the pipeline itself cross from one process to another.

Arrays never pass through a socket: pickle's protocol 5 hands out their buffers, which are in the worker's arena already
(a Batch stacks straight into it) or are copied there. What is small goes along in the message. cloudpickle pickles the
rest, so that classes and functions of the user's `__main__` cross by value, and those of the pipeline come back as the
very same classes (`ClassTable`).
"""

import contextlib
import pickle
import traceback
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, final

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from millstream import tree
from millstream.errors import WorkerError
from millstream.loader.pipeline.elements import Elements, FailedRecord, Origins
from millstream.loader.pipeline.recycled_memory import ALIGNMENT
from millstream.loader.transport.arena import INLINE_BYTES, LARGE_LEAF_BYTES, Allocator, ArenaView
from millstream.loader.transport.class_table import ClassTable
from millstream.loader.transport.element_columns import to_columns, to_elements
from millstream.signal_exceptions import is_from_signal_handler

INLINE_PICKLE_BYTES = 1 << 15
"""Longer pickles travel in the arena: a worker must not wait for the parent to empty a socket."""

COPIED_BYTES = 1 << 16
"""The consumer gets copies of a message's small arrays, such as the labels beside a batch of images, if they have this
many bytes at most together: one that is kept pins nothing then. More of them stay in the arena, in chunks that they
share: new memory for each message would cost more than to make it."""

LONGEST_PATH = 200
"""Nobody reads where a leaf is, if that takes more characters to say."""


Place: TypeAlias = tuple[int, int, int]
"""Some bytes in an arena: which of the message's chunks, where in it, how many."""

Payload: TypeAlias = tuple[bytes | Place, tuple[Place, ...], tuple[tuple[int, int], ...]]
"""Outputs on their way: a pickle, or where it lies; the places of the buffers that it left out, in its order; and the
arena's chunks that the places are in, offset and bytes used, of which each is one lease.

Plain tuples, as there is one for each batch: pickle looks up every class that it meets, which costs more than the rest.
"""


class Failure(NamedTuple):
    """An exception on its way.

    Attributes:
        pickled: the exception itself, where it survives a round trip; else None.
        type_name: its class's full name.
        text: the message.
        notes: what `add_note` added.
        traceback: the worker's, formatted.
    """

    pickled: bytes | None
    type_name: str
    text: str
    notes: tuple[str, ...]
    traceback: str


@final
class WorkerTraceback(Exception):  # noqa: N818  (it is not an error of its own, but where one came from)
    """The worker's side of an exception's traceback: the cause of the exception that the parent raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@final
class _Packer:
    """Pickles one message, and puts its buffers into the arena."""

    def __init__(self, allocator: Allocator, classes: ClassTable) -> None:
        self._allocator = allocator
        self._classes = classes
        self._chunks: dict[int, int] = {}
        self._ends: list[int] = []
        self._places: list[Place] = []

    def pack(self, value: Any) -> Payload:
        """Returns the payload of a value.

        Raises:
            Exception: the value cannot be pickled.
        """
        try:
            body = self._classes.dumps(value, self._take_out, self._allocator.allocate)
            place = self._place(np.frombuffer(body, dtype=np.uint8)) if len(body) > INLINE_PICKLE_BYTES else None
        except BaseException:
            for offset in self._chunks:
                self._allocator.take_back(offset)
            raise
        finally:
            self._allocator.end_message()
        return place or body, tuple(self._places), tuple(zip(self._chunks, self._ends, strict=True))

    def _take_out(self, buffer: pickle.PickleBuffer) -> bool:
        """Puts a buffer into the arena; True says that it stays in the pickle."""
        raw = buffer.raw()
        place = None if raw.nbytes < INLINE_BYTES else self._place(np.frombuffer(raw, dtype=np.uint8))
        if place is not None:
            self._places.append(place)
        return place is None

    def _place(self, memory: NDArray[np.uint8]) -> Place | None:
        """Returns where some bytes are in the arena, having copied them there if need be; None where it has no room."""
        found = self._allocator.place_of(memory)
        if found is None:
            copy = self._allocator.bytes_for(len(memory))
            if copy is None:
                return None
            copy[:] = memory
            found = self._allocator.place_of(copy)
            if found is None:
                raise AssertionError("bytes just allocated have a place")
        offset, start = found
        if offset not in self._chunks:
            self._chunks[offset] = len(self._ends)
            self._ends.append(0)
            # At once: the copy's last reference here may be gone before the next buffer is placed.
            self._allocator.hand_over(offset)
        chunk = self._chunks[offset]
        self._ends[chunk] = max(self._ends[chunk], start + len(memory))
        return chunk, start, len(memory)


def pack(run: Elements, allocator: Allocator, classes: ClassTable) -> Payload:
    """Returns a run on its way to the parent. An error in it must have been replaced by its `Failure`.

    Raises:
        Exception: an element cannot be pickled.
    """
    return _Packer(allocator, classes).pack((to_columns(list(run.values), allocator.allocate), run.origins.to_bytes()))


def unpack(payload: Payload, arena: ArenaView, classes: ClassTable) -> tuple[list[Any], Origins]:
    """Returns the values and origins of a run; large arrays are views of the arena, a few small ones copies."""
    body, places, chunks = payload
    leases = [arena.lease(offset, used) for offset, used in chunks]
    pickled = body if isinstance(body, bytes) else _bytes_at(body, leases)
    few = sum(num_bytes for _, _, num_bytes in places if num_bytes < LARGE_LEAF_BYTES) <= COPIED_BYTES
    buffers = [_bytes_at(place, leases) for place in places]
    buffers = [copied(buffer) if few and len(buffer) < LARGE_LEAF_BYTES else buffer for buffer in buffers]
    columns, origins = classes.loads(pickled, buffers)
    values = to_elements(columns)
    return values, Origins.from_bytes(origins, len(values))


def release(payload: Payload, arena: ArenaView) -> None:
    """Gives back what a payload that is no longer wanted has in the arena."""
    _, _, chunks = payload
    for offset, _ in chunks:
        arena.release(offset)


def copied(memory: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Returns the same bytes in memory of their own, aligned as those of an arena are."""
    room = np.empty(len(memory) + ALIGNMENT, dtype=np.uint8)
    start = -int(room.__array_interface__["data"][0]) % ALIGNMENT
    room[start : start + len(memory)] = memory
    return room[start : start + len(memory)]


def _bytes_at(place: Place, leases: Sequence[NDArray[np.uint8]]) -> NDArray[np.uint8]:
    chunk, start, num_bytes = place
    return leases[chunk][start : start + num_bytes]


def pack_failure(error: BaseException, classes: ClassTable) -> Failure:
    """Returns an exception on its way to the parent."""
    return Failure(
        pickled=_survivor(error, classes),
        type_name=f"{type(error).__module__}.{type(error).__qualname__}",
        text=_text(error),
        notes=_notes(error),
        traceback=_traceback(error),
    )


def unpack_failure(failure: Failure, classes: ClassTable) -> BaseException:
    """Returns the exception to raise in the parent: of the original type where that is possible."""
    error: BaseException | None = None
    if failure.pickled is not None:
        try:
            error = classes.loads(failure.pickled)
        except Exception as failed:
            if is_from_signal_handler(failed):
                raise
            # Its class is not to be had here: the text will do.
    if error is None:
        error = WorkerError(f"{failure.type_name}: {failure.text}")
    # Its class may refuse all of this.
    with contextlib.suppress(Exception):
        error.__cause__ = WorkerTraceback(failure.traceback)
        if not getattr(error, "__notes__", None):
            for note in failure.notes:
                error.add_note(note)
    return error


def unpack_failures(failures: Sequence[FailedRecord], classes: ClassTable) -> tuple[FailedRecord, ...]:
    """Returns the records that failed in a worker, each with the exception to raise here."""
    return tuple(one._replace(error=unpack_failure(one.error, classes)) for one in failures)


def unpicklable_parts(value: Any, path: str = "", above: frozenset[int] = frozenset()) -> list[str]:
    """Returns where in a nested structure the leaves are that cannot be pickled, with what is wrong with each.

    Args:
        value: the structure.
        path: where it is in the element.
        above: the identities of what it is in: a structure may contain itself.
    """
    if id(value) in above:
        return []
    children: list[tuple[str, Any]] = []
    # Classes of the user's, keys among them, may fail to be shown: then the whole is named.
    with contextlib.suppress(Exception):
        children = _children(value, path)
    found = [
        part for child_path, child in children for part in unpicklable_parts(child, child_path, above | {id(value)})
    ]
    if found:
        return found
    try:
        cloudpickle.dumps(value)
    except Exception as error:  # noqa: BLE001  (whatever pickling raises is what is asked for)
        return [f"{path or 'the element'} of type {type(value).__name__}: {_text(error)}"]
    return []


def _children(value: Any, path: str) -> list[tuple[str, Any]]:
    """Returns what a structure consists of, each part with where it is; nothing for a leaf."""
    if len(path) > LONGEST_PATH:
        return []
    parts = tree.parts(value)
    return [(path + step, part) for step, part in zip(tree.paths(value), parts, strict=True)] if parts else []


def rebuild_exception(kind: type[BaseException], args: tuple[Any, ...], attributes: dict[str, Any]) -> BaseException:
    """Returns an exception without calling its constructor, whose arguments may be others than `args`."""
    error = kind.__new__(kind, *args)
    error.__dict__.update(attributes)
    return error


class _WithoutConstructor:
    """Pickles an exception so that it comes back through `rebuild_exception`."""

    def __init__(self, error: BaseException) -> None:
        self._recipe = type(error), error.args, vars(error)

    def __reduce__(self) -> tuple[Any, ...]:
        return rebuild_exception, self._recipe


def _survivor(error: BaseException, classes: ClassTable) -> bytes | None:
    """Returns the pickle of an exception that comes back as what it was, None if it does not."""
    for recipe in (lambda: error, lambda: _WithoutConstructor(error)):
        try:
            pickled = classes.dumps(recipe())
            again = classes.loads(pickled)
        except Exception:  # noqa: BLE001, S112  (an exception may do anything when pickled)
            continue
        if type(again) is type(error) and _text(again) == _text(error):
            return pickled
    return None


def _notes(error: BaseException) -> tuple[str, ...]:
    try:
        notes = getattr(error, "__notes__", None)
    except Exception:  # noqa: BLE001  (its class may define the attribute as it likes)
        notes = None
    return tuple(note for note in notes if isinstance(note, str)) if isinstance(notes, list) else ()


def _traceback(error: BaseException) -> str:
    try:
        return "".join(traceback.format_exception(error))
    except Exception:  # noqa: BLE001  (an exception that cannot be shown still has a place where it was raised)
        return "".join(traceback.format_tb(error.__traceback__))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001  (a broken __str__ must not hide the error)
        return "(its text cannot be made)"
