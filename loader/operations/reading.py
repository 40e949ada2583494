"""Reading records from a source, in batched reads if the source has them."""

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, cast

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


def may_depend_on_thread(source: DataSource[Any]) -> bool:
    """Returns True if records are read one by one, by user code that may depend on its thread.

    A stream in the guise of a source may have an iterator per reading thread. Whether the consumer's thread is one of
    them must not depend on the duration of a read.
    """
    method = getattr(type(source), "__getitem__", None)
    is_own = not type(source).__module__.startswith("millstream.")
    return is_own and isinstance(method, FunctionType) and batched_read_of(source) is None


def reader_of(source: DataSource[Any]) -> Callable[[Origins], Elements]:
    stand_in: Any = source
    kind: type = stand_in.stands_in_for if hasattr(type(source), "stands_in_for") else type(source)
    where = f"reading from {kind.__name__}"
    read_batch = batched_read_of(source)
    read_one: Callable[[int], Any] = source.__getitem__
    # A source that replaces a list builds a new dict or list for each reader.
    if type(source) in {list, tuple}:
        held = HeldRecords(cast("Sequence[Any]", source))
        read_one, read_batch = held.quickest.__getitem__, held.__getitems__

    def read_singly(origins: Origins) -> Elements:
        keys = origins.record_key.tolist()
        values, error = collect(map(read_one, keys), origins, where, len(keys), may_end=True)
        at = None if error is None else Location.of(origins, len(values))
        return Elements(values, origins.take(slice(len(values))), error, at)

    if read_batch is None:
        return read_singly
    return _batched_reader(source, read_batch, read_singly, where)


def _batched_reader(
    source: DataSource[Any],
    read_batch: Callable[[Any], Sequence[Any]],
    read_singly: Callable[[Origins], Elements],
    where: str,
) -> Callable[[Origins], Elements]:
    """Returns the function that reads records in one call, and one by one if that fails."""
    takes_arrays = bool(getattr(source, "takes_key_arrays", False))
    warned: list[bool] = []

    def read(origins: Origins) -> Elements:
        # The source gets an array of its own, because it may sort it, or pass it to a library that writes to it.
        keys = origins.record_key.copy() if takes_arrays else origins.record_key.tolist()
        try:
            records = read_batch(keys)
            # The source may reuse a list.
            values = records if isinstance(records, (tuple, ColumnarRecords)) else list(records)
            if len(values) == len(keys):
                return Elements(values, origins)
            error: BaseException = _WrongCountError(
                f"__getitems__ of {type(source).__name__} got {len(keys)} keys and returned {len(values)} records."
            )
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
