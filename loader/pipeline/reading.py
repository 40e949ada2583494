"""Reading records from a source: many in one call where the source can."""

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, cast

from millstream.columnar import ColumnarRecords
from millstream.interruptions import cannot_wait
from millstream.loader.pipeline.elements import Elements, Origins, describe_origin
from millstream.loader.pipeline.steps import annotated, collect
from millstream.sources import DataSource
from millstream.sources.base import HeldRecords
from millstream.sources.lookalikes import batched_read_of

MOST_HELD = 1 << 30
"""No source has this many records in memory, as objects: one that says so reads them, or makes them up."""


def may_tell_threads_apart(source: DataSource[Any]) -> bool:
    """Whether records are read one by one, by code of the user's, which may depend on the thread that it runs in.

    A stream in the guise of a source may have an iterator for each thread that reads: whether the consumer's thread is
    one of them must not depend on how long a read happens to take.
    """
    method = getattr(type(source), "__getitem__", None)
    is_own = not type(source).__module__.startswith("millstream.")
    return is_own and isinstance(method, FunctionType) and batched_read_of(source) is None


def reader_of(source: DataSource[Any]) -> Callable[[Origins], Elements]:
    """Returns the function that reads records: in one call where the source can."""
    stand_in: Any = source
    kind: type = stand_in.stands_in_for if hasattr(type(source), "stands_in_for") else type(source)
    where = f"reading from {kind.__name__}"
    read_many = batched_read_of(source)
    read_one: Callable[[int], Any] = source.__getitem__
    # What stands in for a list makes a dict or list for each reader.
    if type(source) in {list, tuple}:
        held = HeldRecords(cast("Sequence[Any]", source))
        read_one, read_many = held.quickest.__getitem__, held.__getitems__
    takes_arrays = bool(getattr(source, "takes_key_arrays", False))

    def read_singly(origins: Origins) -> Elements:
        keys = origins.record_key.tolist()
        values, error = collect(map(read_one, keys), origins, where, len(keys), may_end=True)
        return Elements(values, origins.take(slice(len(values))), error)

    def read(origins: Origins) -> Elements:
        if read_many is None:
            return read_singly(origins)
        # An array of the source's own: it may sort it, or hand it to a library that wants to write to it.
        keys = origins.record_key.copy() if takes_arrays else origins.record_key.tolist()
        try:
            records = read_many(keys)
            # A list may be the source's own, which it fills again.
            values = records if isinstance(records, (tuple, ColumnarRecords)) else list(records)
            if len(values) != len(keys):
                raise ValueError(  # noqa: TRY301  (handled as any other failure of the source's method)
                    f"__getitems__ of {type(source).__name__} was asked for {len(keys)} records and gave {len(values)}."
                )
        except BaseException as error:
            if cannot_wait(error):
                raise
            # One by one, to deliver what comes before the bad record and to say which it is.
            run = read_singly(origins)
            if run.error is None:
                # The source can read each record, but not all at once: the error of the whole read stands.
                whole = f"{where}, {len(keys)} records at once, the first at {describe_origin(origins, 0)}"
                run = Elements.failed(annotated(error, whole))
            return run
        return Elements(values, origins)

    return read
