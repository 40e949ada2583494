"""Reading records from a source, in batched reads if the source has them."""

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from types import FunctionType
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from millstream.core.columnar import ColumnarRecords
from millstream.core.signals import cannot_wait, is_from_signal_handler
from millstream.core.warn import log_warning
from millstream.loader.operations.elements import Elements, Location, Origins, describe_origin
from millstream.loader.operations.steps import annotated, collect
from millstream.sources import DataSource
from millstream.sources.base import HeldRecords
from millstream.sources.source_checks import batched_read_of

MAX_HELD_RECORDS = 1 << 30
"""No source holds this many records in memory as objects. A source that claims more reads or generates them."""


KeysOf = Callable[[Origins], NDArray[np.int64]]
"""A function that returns the keys of records in their source, an int64 array of shape (n,)."""


def _record_keys(origins: Origins) -> NDArray[np.int64]:
    return origins.record_key


def may_depend_on_thread(source: DataSource[Any]) -> bool:
    """Returns True if records are read one by one, by user code that may depend on its thread.

    A stream in the guise of a source may have an iterator per reading thread. Whether the consumer's thread is one of
    them must not depend on the duration of a read.
    """
    method = getattr(type(source), "__getitem__", None)
    is_own = not type(source).__module__.startswith("millstream.")
    return is_own and isinstance(method, FunctionType) and batched_read_of(source) is None


def reader_of(
    source: DataSource[Any], keys_of: KeysOf = _record_keys, *, skips_none: bool = False
) -> Callable[[Origins], Elements]:
    """Returns the function that reads records.

    Args:
        source: the source.
        keys_of: computes the keys of records in the source from their origins.
        skips_none: True if None stands for a missing element, which is an error.
    """
    stand_in: Any = source
    kind: type = stand_in.stands_in_for if hasattr(type(source), "stands_in_for") else type(source)
    where = f"reading from {kind.__name__}"
    read_batch = batched_read_of(source)
    read_one: Callable[[int], Any] = source.__getitem__
    # A source that replaces a list builds a new dict or list for each reader.
    if type(source) in {list, tuple}:
        held = HeldRecords(cast("Sequence[Any]", source))
        read_one, read_batch = held.quickest.__getitem__, held.__getitems__

    if skips_none:
        read_one = functools.partial(_present, read_one)

    def read_singly(origins: Origins) -> Elements:
        keys = keys_of(origins).tolist()
        values, error = collect(map(read_one, keys), origins, where, len(keys), may_end=True)
        at = None if error is None else Location.of(origins, len(values))
        return Elements(values, origins.take(slice(len(values))), error, at)

    if read_batch is None:
        return read_singly
    return _batched_reader(source, read_batch, read_singly, keys_of, where, skips_none=skips_none)


def _present(read_one: Callable[[int], Any], key: int) -> Any:
    record = read_one(key)
    if record is None:
        raise MissingElementError
    return record


class MissingElementError(ValueError):
    """An element of a MapDataset is None, and a loader cannot skip it."""

    def __init__(self) -> None:
        super().__init__(
            "An element of a MapDataset is None, which stands for a missing one, and a loader reads every position: a "
            "map before it returned None, or its source contains None. Return another value, or read the dataset as a "
            "stream, dataset.to_iter_dataset(), which skips missing elements."
        )


def _batched_reader(
    source: DataSource[Any],
    read_batch: Callable[[Any], Sequence[Any]],
    read_singly: Callable[[Origins], Elements],
    keys_of: KeysOf,
    where: str,
    *,
    skips_none: bool,
) -> Callable[[Origins], Elements]:
    """Returns the function that reads records in one call, and one by one if that fails."""
    takes_arrays = bool(getattr(source, "takes_key_arrays", False))
    warned: list[bool] = []

    def read(origins: Origins) -> Elements:
        # The source gets an array of its own, because it may sort it, or pass it to a library that writes to it.
        keys = keys_of(origins)
        keys = keys.copy() if takes_arrays else keys.tolist()
        try:
            records = read_batch(keys)
            # The source may reuse a list.
            values = records if isinstance(records, (tuple, ColumnarRecords)) else list(records)
            error: BaseException
            if len(values) != len(keys):
                error = _WrongCountError(
                    f"__getitems__ of {type(source).__name__} got {len(keys)} keys and returned {len(values)} records."
                )
            elif skips_none and not isinstance(values, ColumnarRecords) and any(value is None for value in values):
                error = MissingElementError()
            else:
                return Elements(values, origins)
        except BaseException as raised:
            if cannot_wait(raised):
                raise
            error = raised
        # One by one, to deliver the records before the faulty one, and to name that one.
        run = read_singly(origins)
        if run.error is not None:
            return run
        if _is_of_the_call(error):
            location = f"{where}, {len(keys)} records in one call, the first at {describe_origin(origins, 0)}"
            return Elements.failed(annotated(error, location))
        if not warned:
            warned.append(True)
            name, text = type(source).__name__, f"{type(error).__name__}: {error}"
            log_warning(
                f"{name}.__getitems__ failed for {len(keys)} records, and __getitem__ read each of them: {text}. "
                "Reading records one by one is slower. Fix __getitems__, or delete it."
            )
        return run

    return read


def _is_of_the_call(error: BaseException) -> bool:
    """Returns True if the error of a batched read stands although each of the records can be read."""
    if not isinstance(error, Exception) or isinstance(error, _WrongCountError | StopIteration):
        return True
    return is_from_signal_handler(error)


class _WrongCountError(ValueError):
    """A batched read returned the wrong number of records."""


def copies_of_held(source: Any, elements: Sequence[Any], origins: Origins) -> list[Any]:
    """Returns the elements, with copies of those arrays that may be memory of a source that holds its records.

    The trainer may change what it gets, as it may with elements that come from worker processes.
    """
    values = list(elements)
    for row, key in enumerate(origins.record_key.tolist()):
        value = values[row]
        kind = type(value)
        if kind is np.ndarray:
            if value.base is not None or value is source[key]:
                values[row] = value.copy()
        elif kind not in _IMMUTABLE:
            values[row] = _with_copies(value, set(_arrays_in(source[key])))
    return values


_IMMUTABLE = frozenset({int, float, complex, bool, str, bytes, type(None)})


def _arrays_in(value: Any) -> Iterator[int]:
    """Yields the `id` of each array in a record."""
    if isinstance(value, np.ndarray):
        yield id(value)
    elif isinstance(value, dict | list | tuple):
        for member in value.values() if isinstance(value, dict) else value:
            yield from _arrays_in(member)


def _with_copies(value: Any, held: Collection[int]) -> Any:
    """Returns a value with copies of arrays that are held, or are views, which may be views of those."""
    if isinstance(value, np.ndarray):
        return value.copy() if value.base is not None or id(value) in held else value
    if type(value) is dict:
        return {name: _with_copies(member, held) for name, member in value.items()}
    if isinstance(value, list | tuple):
        members = [_with_copies(member, held) for member in value]
        return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
    return value
