"""The work on elements: reading records, and operations as functions from runs to runs.

A step processes a complete run. Only the user's function is called once per element. A step that fails at an element
passes on the elements before it, so a chain of steps has the same result as processing element by element, but faster.
The last step before a grouping prepares its elements, and the first one after it builds outputs from segments of them.
"""

import contextvars
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType
from typing import Any, Protocol, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from millstream.core import tree
from millstream.core.columnar import Allocate, ColumnarRecords
from millstream.core.descriptions import described
from millstream.core.direct_copies import DirectCopies
from millstream.core.segments import Segments
from millstream.core.signals import cannot_wait, is_from_signal_handler
from millstream.core.warn import log_warning
from millstream.errors import StackError
from millstream.loader.pipeline.elements import Elements, Location, Origins, SourceEnded, add_note, describe_origin
from millstream.sources import DataSource
from millstream.sources.base import HeldRecords, is_held
from millstream.sources.source_checks import DirectRead, batched_read_of, read_directly_of
from millstream.transforms import (
    Batch,
    Filter,
    FlatMap,
    Map,
    MapWithIndex,
    OnlyFor,
    Pack,
    RandomMap,
    Transformation,
    WithComponent,
)
from millstream.transforms.base import WholeCallError, children_of, results_of
from millstream.transforms.batching.batch import pad
from millstream.transforms.batching.stack import stack
from millstream.transforms.components import leaves
from millstream.transforms.grouping import MAX_FAN_OUT, GroupId, GroupingOperation, Prepared
from millstream.transforms.of_chains import AbsentElement, Present, SeededRandomMap

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
    is_users = not type(source).__module__.startswith("millstream.")
    return is_users and isinstance(method, FunctionType) and batched_read_of(source) is None


class Reader(Protocol):
    """A function that reads records; with `copies`, those of `read_directly_of`."""

    def __call__(self, origins: Origins, copies: DirectCopies | None = None, /) -> Elements: ...


def reader_of(
    source: DataSource[Any], keys_of: KeysOf = _record_keys, *, skips_none: bool = False, is_stacked: bool = False
) -> Reader:
    """Returns the function that reads records.

    Args:
        source: the source.
        keys_of: computes the keys of records in the source from their origins.
        skips_none: True if None stands for a missing element, which is an error.
        is_stacked: True if records are stacked before any function of the user gets them.
    """
    stand_in: Any = source
    kind: type = stand_in.original_type if hasattr(type(source), "original_type") else type(source)
    where = f"reading from {kind.__name__}"
    read_batch, read_directly = batched_read_of(source), read_directly_of(source)
    read_one: Callable[[int], Any] = source.__getitem__
    # A source that replaces a list copies the records of each reader.
    if is_held(source):
        held = HeldRecords(cast("Sequence[Any]", source), is_stacked=is_stacked)
        read_one, read_batch = held.quickest.__getitem__, held.__getitems__

    if skips_none:
        read_one = functools.partial(_present, read_one)

    def read_singly(origins: Origins, _: DirectCopies | None = None) -> Elements:
        keys = keys_of(origins).tolist()
        values, error = collect(map(read_one, keys), origins, where, len(keys), may_end=True)
        at = None if error is None else Location.of(origins, len(values))
        return Elements(values, origins.take(slice(len(values))), error, at)

    if read_batch is None:
        return read_singly
    return _batched_reader(source, (read_batch, read_directly), read_singly, keys_of, where, skips_none=skips_none)


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
    reads: tuple[Callable[[Any], Sequence[Any]], DirectRead | None],
    read_singly: Reader,
    keys_of: KeysOf,
    where: str,
    *,
    skips_none: bool,
) -> Reader:
    """Returns the function that reads records in one call, and one by one if that fails."""
    read_batch, read_directly = reads
    takes_arrays = bool(getattr(source, "takes_key_arrays", False))
    warned: list[bool] = []

    def read(origins: Origins, copies: DirectCopies | None = None) -> Elements:
        # The source gets an array of its own, because it may sort it, or pass it to a library that writes to it.
        keys = origins.table[1] if keys_of is _record_keys else keys_of(origins)
        keys = keys.copy() if takes_arrays else keys.tolist()
        try:
            records = read_batch(keys) if copies is None or read_directly is None else read_directly(keys, copies)
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


def writable_copies(elements: Sequence[Any]) -> list[Any]:
    """Returns the elements, with copies of those arrays that cannot be written to.

    The trainer may change what it gets: others may be memory that a source holds (see `HeldRecords`).
    """
    return [value if type(value) in _IMMUTABLE else _with_writable_copies(value) for value in elements]


_IMMUTABLE = frozenset({int, float, complex, bool, str, bytes, type(None)})


def _with_writable_copies(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value if value.flags.writeable else value.copy()
    # A batch may be a list of thousands of texts. No call of Python is made for each.
    if type(value) is list and _IMMUTABLE.issuperset(map(type, value)):
        return value.copy()
    if type(value) is dict:
        return {name: _with_writable_copies(member) for name, member in value.items()}
    if isinstance(value, list | tuple):
        members = map(_with_writable_copies, value)
        return type(value)(*members) if hasattr(value, "_fields") else type(value)(members)
    return value


ResultT = TypeVar("ResultT")
Results = Callable[[Elements], Iterator[Any]]
"""A function that yields the result of an operation for each element of a run."""


def within(component: int | None, results: Results, otherwise: Callable[[Any], Any]) -> Results:
    """Returns a function that applies `results` to one component, and `otherwise` to the elements of the others.

    With None, it applies `results` to all elements. They raise an error when the element's turn comes.
    """
    if component is None:
        return results

    def mixed(run: Elements) -> Iterator[Any]:
        is_of_component = run.origins.component == component
        if is_of_component.all():
            return results(run)
        values, chosen = list(run.values), is_of_component.tolist()
        component_results = results(
            Elements(list(itertools.compress(values, chosen)), run.origins.take(is_of_component))
        )
        return (
            next(component_results) if is_chosen else otherwise(value)
            for value, is_chosen in zip(values, chosen, strict=True)
        )

    return mixed


Step = Callable[[Elements, Allocate], Elements]
RandomStreams = Callable[[Origins, int, int | None], "Iterator[np.random.Generator]"]
"""A function that yields one generator per element, given origins, the number of the operation, and its own seed."""


def isolated(function: Callable[..., ResultT], *arguments: Any) -> ResultT:
    """Calls a function in a new context, in which all context variables have their defaults.

    NumPy's `errstate`, the precision of `decimal` and the user's variables are not the caller's, and changes end here.
    """
    return contextvars.Context().run(function, *arguments)


def run_steps(steps: Sequence[Step], run: Elements, allocate: Allocate) -> Elements:
    """Runs steps one after another. The records of a run that failed before belong to the result as well."""
    failures = run.failures
    for step in steps:
        run = step(run, allocate)
    run.failures = failures
    return run


def compile_step(
    operation: Transformation,
    where: str,
    *,
    producer: str | None,
    streams: RandomStreams,
    random_number: int,
    is_template: Callable[[int], bool],
    components: Sequence[Any] = (),
    by_block: bool = False,
) -> Step:
    """Returns the step of one operation, which is called `where` in error texts.

    `producer` is the name of the operation before; None for the source. `random_number` is the number of random
    operations before this one. `is_template` returns True for a block that is read for its structure only (see
    `shards`). `components` are the names of a mixture's components. If `by_block`, a Batch has the records of a block.
    """
    if isinstance(operation, Batch):
        if by_block:
            return _block_step(operation, where, producer)
        return _batch_step(operation, where, producer, is_template)
    if isinstance(operation, Present):
        return _present_step(operation)
    component = components.index(operation.component) if isinstance(operation, OnlyFor) else None
    steps = []
    for leaf in leaves(operation):
        inner = where if leaf is operation else f"{where}, in it {described(leaf)}"
        steps.append(_element_step(leaf, inner, producer, _numbered(streams, leaf, random_number), component))
        random_number += leaf.num_random
        producer = producer if isinstance(leaf, Filter) else inner
    return steps[0] if len(steps) == 1 else functools.partial(run_steps, steps)


def _numbered(
    streams: RandomStreams, operation: Transformation, random_number: int
) -> Callable[[Origins], "Iterator[np.random.Generator]"]:
    if isinstance(operation, SeededRandomMap):
        return lambda origins: streams(origins, operation.number, operation.seed)
    return lambda origins: streams(origins, random_number, None)


def _element_step(  # noqa: C901  (one case an operation)
    operation: Transformation,
    where: str,
    producer: str | None,
    streams: Callable[[Origins], "Iterator[np.random.Generator]"],
    component: int | None,
) -> Step:
    results: Results
    match operation:
        case Filter():
            return _filter_step(operation, where, producer, component)
        case FlatMap():
            return _flat_map_step(operation, where, producer, component)
        case Map():

            def results(run: Elements) -> Iterator[Any]:
                return results_of(operation, run.values)
        case MapWithIndex():

            def results(run: Elements) -> Iterator[Any]:
                return map(operation.map_with_index, run.origins.index.tolist(), run.values)
        case WithComponent():

            def results(run: Elements) -> Iterator[Any]:
                return map(operation.added, run.origins.component.tolist(), run.values)
        case RandomMap():
            drawing = operation.operation if isinstance(operation, SeededRandomMap) else operation

            def results(run: Elements) -> Iterator[Any]:
                return map(drawing.random_map, run.values, streams(run.origins))
        case _:
            raise TypeError(f"{operation!r} is an operation of an unknown kind.")
    return _map_step(within(component, results, lambda element: element), where, producer)


def _map_step(results: Results, where: str, producer: str | None) -> Step:
    def map_elements(run: Elements, _: Allocate) -> Elements:
        values: list[Any] = []
        try:
            values.extend(results(run))
            if len(values) == len(run.values):
                return Elements(values, run.origins, run.error, run.at)
            raise StopIteration  # noqa: TRY301  (of the user's function, see `collect`)
        except WholeCallError as failure:
            where_of_call = (
                f"{where}, with {len(run.values)} elements in one call, the first at {describe_origin(run.origins, 0)}"
            )
            return Elements([], run.origins.take(slice(0)), annotated(failure.error, where_of_call))
        except BaseException as failure:  # noqa: BLE001  (raised again, or delivered in order)
            error = stopped(failure, run.origins, where, len(values), len(run.values))
            return _ended_early(run, values, error, producer)

    return map_elements


def _present_step(operation: Present) -> Step:
    def step(run: Elements, _: Allocate) -> Elements:
        count = operation.count(run.values)
        if count == len(run.values):
            return run
        where = describe_origin(run.origins, count)
        return _cut(run, list(run.values[:count]), AbsentElement(f"There is no element at {where}: it is None."))

    return step


def _filter_step(operation: Filter, where: str, producer: str | None, component: int | None) -> Step:
    verdicts = within(component, lambda run: map(bool, map(operation.filter, run.values)), lambda _: True)

    def filter_elements(run: Elements, _: Allocate) -> Elements:
        values, keep = list(run.values), list[bool]()
        run = Elements(values, run.origins, run.error, run.at)
        try:
            keep.extend(verdicts(run))
            if len(keep) < len(values):
                raise StopIteration  # noqa: TRY301  (of the user's function, see `collect`)
            if all(keep):
                return run
        except BaseException as failure:  # noqa: BLE001  (raised again, or delivered in order)
            error = stopped(failure, run.origins, where, len(keep), len(values))
            run = _ended_early(run, values[: len(keep)], error, producer)
        kept = list(itertools.compress(values, keep))
        return Elements(kept, run.origins.take(np.frombuffer(bytes(keep), np.bool_)), run.error, run.at)

    return filter_elements


def _flat_map_step(operation: FlatMap, where: str, producer: str | None, component: int | None) -> Step:
    limit: int = getattr(operation, "max_fan_out", None) or MAX_FAN_OUT
    split = functools.partial(children_of, operation, limit)
    split_each = within(component, lambda run: map(split, run.values), lambda element: [element])

    def split_elements(run: Elements, _: Allocate) -> Elements:
        families, parents, error, at = _collect_from(run, split_each(run), where, producer)
        origins = parents.fan_out([len(family) for family in families], limit, component)
        return Elements(list(itertools.chain.from_iterable(families)), origins, error, at)

    return split_elements


def _batch_step(operation: Batch, where: str, producer: str | None, is_template: Callable[[int], bool]) -> Step:
    size = operation.batch_size

    def make(run: Elements, start: int, allocate: Allocate) -> Any:
        batch = _make_batch(operation, run, start, allocate, producer)
        if not operation.pad_remainder:
            return batch
        num_real = 0 if is_template(int(run.origins.block[start])) else min(size, len(run.values) - start)
        return pad(batch, num_real, size, allocate)

    def build_batches(run: Elements, allocate: Allocate) -> Elements:
        # A short batch before an error is not built. The error takes its place.
        ends = run.error is None or isinstance(run.error, SourceEnded)
        keeps_short = ends and not operation.drop_remainder
        count = len(run.values)
        starts = range(0, count if keeps_short else max(0, count - size + 1), size)
        firsts = run.origins.take(slice(0, starts.stop, size))
        batches: list[Any] = []
        try:
            for start in starts:
                batches.append(make(run, start, allocate))  # noqa: PERF401  (those before an error are kept)
        except BaseException as failure:  # noqa: BLE001  (raised again, or delivered in order)
            error = stopped(failure, firsts, where, len(batches), len(starts))
            return _cut(Elements(batches, firsts), batches, error)
        return Elements(batches, firsts, run.error, run.at)

    return build_batches


def _block_step(operation: Batch, where: str, producer: str | None) -> Step:
    """Returns the step that builds a batch of the records of each block, however many it has."""

    def make(run: Elements, start: int, stop: int, allocate: Allocate) -> Any:
        block = Elements(run.values[start:stop], run.origins.take(slice(start, stop)))
        return _make_batch(operation, block, 0, allocate, producer)

    def step(run: Elements, allocate: Allocate) -> Elements:
        blocks = run.origins.block[: len(run.values)]
        bounds = [0, *(np.flatnonzero(np.diff(blocks)) + 1).tolist(), *[len(blocks)] * (len(blocks) > 0)]
        # The block of the error is not built. The error takes its place.
        if run.error is not None and len(bounds) > 1 and (run.at is None or run.at.block == int(blocks[-1])):
            del bounds[-1]
        firsts = run.origins.take(np.array(bounds[:-1], np.int64))
        built = (make(run, start, stop, allocate) for start, stop in itertools.pairwise(bounds))
        batches, error = collect(built, firsts, where, len(bounds) - 1)
        if error is None:
            return Elements(batches, firsts, run.error, run.at)
        return _cut(Elements(batches, firsts), batches, error)

    return step


def _make_batch(operation: Batch, run: Elements, start: int, allocate: Allocate, producer: str | None) -> Any:
    """Builds the batch that begins at an element, in memory from `allocate` unless the user's `batch_fn` builds it.

    A note of a StackError lists the record keys of the elements at fault.
    """
    size = operation.batch_size
    values = run.values[start : start + size] if len(run.values) > size else run.values
    if operation.batch_fn is not None:
        return operation.batch_fn(list(values))
    try:
        if producer is not None and values[0] is None and len(values) > 1 and all(value is None for value in values):
            raise StackError(  # noqa: TRY301  (it gets the same note as others)
                f"Every element of this batch is None: {_forgotten_return(producer)}", rows=(0, 1)
            )
        return stack(values, allocate)
    except StackError as error:
        if error.rows:
            keys = ", ".join(str(run.origins.record_key[start + row]) for row in error.rows)
            error.add_note(f"millstream: the record keys of these elements: {keys}.")
        raise


def collect(
    results: Iterator[Any], origins: Origins, where: str, expected: int, *, may_end: bool = False
) -> tuple[list[Any], BaseException | None]:
    """Returns the results up to the first error, and that error with a note of where it happened.

    If the results may end, a StopIteration becomes `SourceEnded`.

    `list.extend` runs the iterator without a Python frame, and keeps the results before an exception. The length then
    determines which element failed.
    """
    values: list[Any] = []
    try:
        values.extend(results)
        if len(values) < expected:
            # A StopIteration from the user's function ends the iterator silently, and data would be lost.
            raise StopIteration  # noqa: TRY301  (handled as one that arrives here)
    except BaseException as failure:  # noqa: BLE001  (raised again, or delivered in order)
        return values, stopped(failure, origins, where, len(values), expected, may_end=may_end)
    return values, None


def stopped(
    failure: BaseException, origins: Origins, where: str, row: int, expected: int, *, may_end: bool = False
) -> BaseException:
    """Returns the error that takes the place of the result `row`, with a note of where it happened.

    An exception that cannot wait for its turn is raised again.
    """
    # If all results are there, a signal handler has raised it.
    location = f", at {describe_origin(origins, row)}" if row < expected else ""
    error = annotated(failure, where + location, may_end=may_end)
    if cannot_wait(failure):
        raise failure
    return error


def _collect_from(
    run: Elements, results: Iterator[Any], where: str, producer: str | None
) -> tuple[list[Any], Origins, BaseException | None, Location | None]:
    """Returns the result of each element of a run, up to the first error, the origins of these elements, and the end.

    An error at an element that is None gets a note, because a `return` may be missing in the operation before.
    """
    values, error = collect(results, run.origins, where, len(run.values))
    if error is None:
        return values, run.origins, run.error, run.at
    ended = _ended_early(run, values, error, producer)
    return values, ended.origins, error, ended.at


def _ended_early(run: Elements, values: list[Any], error: BaseException, producer: str | None) -> Elements:
    """Returns the results before an element whose error takes its place."""
    row = len(values)
    if producer is not None and row < len(run.values) and run.values[row] is None:
        add_note(error, f"millstream: the element that it got is None: {_forgotten_return(producer)}")
    return _cut(run, values, error)


def _forgotten_return(producer: str) -> str:
    return f"did {producer}, or one before it, forget `return`?"


def annotated(error: BaseException, where: str, *, may_end: bool = False) -> BaseException:
    """Returns the error with a note of where it happened.

    A StopIteration becomes a RuntimeError, because `next` would end the stream with it. If the source may end, it
    becomes `SourceEnded`. Elsewhere, the end of another source that user code has read is an error as well.
    """
    if isinstance(error, StopIteration) and may_end:
        error = SourceEnded()
    elif isinstance(error, StopIteration | SourceEnded) and not may_end:
        error = RuntimeError("StopIteration was raised where a result was expected.")
    add_note(error, f"millstream: in {where}.")
    return error


def depth_step(where: str) -> Step:
    """Returns the step that lets pass the elements up to the first that is nested too deeply, which is an error.

    Everything after it, here and in other processes, may then recurse into elements.
    """

    def check_depth(run: Elements, _: Allocate) -> Elements:
        values = run.values
        if type(values) is not list or tree.are_flat(values):
            return run
        row = next((row for row, value in enumerate(values) if tree.num_levels_exceed(value)), None)
        if row is None:
            return run
        error = ValueError(
            f"An element must have at most {tree.MAX_DEPTH} nested levels, got a {type(values[row]).__name__} with "
            "more, or one that contains itself. Return a flat dict of arrays, numbers and text."
        )
        return _cut(run, values[:row], annotated(error, f"{where}, at {describe_origin(run.origins, row)}"))

    return check_depth


def _cut(run: Elements, values: list[Any], error: BaseException) -> Elements:
    return Elements(values, run.origins.take(slice(len(values))), error, Location.of(run.origins, len(values)))


def prepare_step(operation: GroupingOperation, where: str) -> Step:
    """Returns the step that prepares elements for a grouping operation. It is the last step of the stage before."""
    return lambda run, _: prepared(operation, run, where, splits=operation.splits)


def prepared(operation: GroupingOperation | Pack, run: Elements, where: str, *, splits: bool = False) -> Elements:
    """Returns a run of prepared elements, whose origins contain their sizes.

    If it `splits`, an element may become several, which get their own indices.
    """
    values, error = list(run.values), None
    try:
        result, count = operation.prepare(values), len(values)
    except BaseException as failure:
        if cannot_wait(failure):
            raise
        each = (operation.prepare([value]) for value in values)
        prepared, error = collect(each, run.origins, where, len(values))
        result, count = Prepared.concatenate([operation.prepare([]), *prepared]), len(prepared)
    origins = run.origins.take(slice(count))
    if splits or result.counts is not None:
        counts = [1] * count if result.counts is None else result.counts
        origins = origins.fan_out(counts, MAX_FAN_OUT if splits else 1)
    ends = (run.error, run.at) if error is None else (error, Location.of(run.origins, count))
    return Elements(result.values, origins.with_sizes(result.sizes), *ends)


def group_step(operation: GroupingOperation, where: str, *, numbers_units: bool = False) -> Step:
    """Returns the step that builds the outputs of a group.

    If it `numbers_units`, the origins of outputs get a row with the number of each output in the group.
    """

    def step(group: Elements, allocate: Allocate) -> Elements:
        origins = group.origins
        group_id = GroupId(int(origins.position[0]), int(origins.index[0]))
        segments = operation.arrange(origins.sizes, group_id)
        firsts = segments.offsets[:-1]
        output_origins = origins.take(segments.elements[firsts]).without_sizes()
        if segments.starts is not None and operation.output_size is not None:
            output_origins = output_origins.numbered(segments.starts[firsts] // operation.output_size, MAX_FAN_OUT)
        if numbers_units:
            output_origins = output_origins.with_sizes(np.arange(len(output_origins))[np.newaxis])
        values = group.values
        return outputs_of(
            lambda chosen: operation.make(values, chosen, allocate), segments, origins, output_origins, where
        )

    return step


def outputs_of(
    make: Callable[[Segments], Sequence[Any]], segments: Segments, origins: Origins, output_origins: Origins, where: str
) -> Elements:
    """Builds the outputs that consist of the given segments, all together or, after an error, one by one.

    `origins` are those of the elements that the segments are cut from, `output_origins` those of the outputs.
    """
    error = None
    try:
        values = make(segments)
    except BaseException as failure:
        if cannot_wait(failure):
            raise

        def make_one(output: int) -> Any:
            try:
                (value,) = make(segments.of_output(output))
            except StackError as error:
                keys = ", ".join(str(origins.record_key[row]) for row in error.rows)
                error.add_note(f"millstream: the record keys of these elements: {keys}.")
                raise
            return value

        count = len(segments.offsets) - 1
        values, error = collect(map(make_one, range(count)), output_origins, where, count)
    return Elements(values, output_origins.take(slice(len(values))), error)
