"""Checks for sources, samplers, operations and iterators of your own: the laws that millstream relies on.

    def test_my_source():
        millstream.testing.check_source(MySource("data"))

Each check returns None, or raises one AssertionError: a sentence with the smallest example that it has found. With
Hypothesis installed, the examples are drawn and made smaller by it. Without, there are fewer, and the small ones come
first. The same examples come in each run.
"""

import contextlib
import copy
import functools
import itertools
import math
import os
import pickle
import select
import signal
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from millstream.core import tree
from millstream.dataset import MapDataset
from millstream.loader import DataLoader, ReadOptions
from millstream.loader.debugging import difference
from millstream.loader.load_function import load
from millstream.samplers.balanced import BalancedSampler
from millstream.samplers.base import has_varying_batches, largest_key, vectorised
from millstream.sharding import ShardOptions
from millstream.sources.base import is_held
from millstream.sources.source_checks import batched_read_of, check_readable, is_in_memory
from millstream.transforms import Batch

__all__ = ["check_iterator", "check_operation", "check_sampler", "check_source"]

NUM_THREADS = 8
NUM_EXAMPLES = 30
SECONDS = 120.0
"""The time that another process has for its answer."""

NUM_FORKS = 3
"""The number of forked children of which one must answer: a thread of a library may hold a lock at a fork by chance."""


def check_source(source: Any) -> None:
    """Checks a source: `len(source)`, `source[key]`, and whatever else it has of `millstream.sources.DataSource`.

    The laws: a key has an equal record each time, alone, in a batched read, in several threads, in
    a worker process and in a forked child. The record is not memory that the source keeps and the caller can write
    to, except of lists and arrays. `source[len(source)]` is an error, except of a `MapDataset`, which may be longer
    than one epoch; -1 is an error or the last record. `fingerprint()` is one line, and the same in copies.
    `unit_sizes` add up to the length.

    Args:
        source: the source. At most 60 records are read, most of them many times.

    Raises:
        AssertionError: a law does not hold.
        TypeError: it is not a source.
    """
    check_readable(source, "source")
    name, count = type(source).__name__, len(source)
    keys = _spread(count)
    records = {key: _kept(source[key]) for key in keys}

    def check_read(read: Callable[[Any], Any], how: str, chosen: Sequence[int]) -> None:
        found = read(list(chosen))
        _check(len(found) == len(chosen), f"{how} of {list(chosen)} returned {len(found)} records")
        for key, record in zip(chosen, found, strict=True):
            text = difference(records[key], record)
            _check(text is None, f"{how} of {list(chosen)}, read for key {key} {text} than source[{key}] at first")

    def read_singly(chosen: Sequence[int]) -> list[Any]:
        return [source[key] for key in chosen]

    _for_all(keys, lambda chosen: check_read(read_singly, f"{name}[key], again,", chosen))
    batched = batched_read_of(source)
    if batched is not None:
        _for_all(keys, lambda chosen: check_read(batched, f"{name}.__getitems__", chosen))
        if getattr(source, "takes_key_arrays", False):
            of_array = functools.partial(_read_array, batched)
            _for_all(keys, lambda chosen: check_read(of_array, f"{name}.__getitems__, given an int64 array,", chosen))
    _check_bounds(source, name, count)
    if keys and not (is_in_memory(source) or is_held(source)):
        _check_memory(source, name, keys[0])
    _in_threads(
        [
            functools.partial(check_read, read_singly, f"{name}[key], in {NUM_THREADS} threads,", _turned(keys, start))
            for start in range(NUM_THREADS)
        ]
    )
    _check_words_of_source(source, name, count)
    _same_everywhere(_described_source, (source, keys[:8]), _described_source((source, keys[:8])), f"{name}[key]")


def check_sampler(sampler: Any) -> None:
    """Checks a sampler: `sampler[position]`, or whatever else it has of `millstream.samplers.VectorisedSampler`.

    The laws: the record key of a position, and what its generator draws, are the same each time, in any order, one by
    one and in runs, in a copy and in a worker process. Keys are from 0 to `largest_key`. Shards are parts of the same
    order. `positions_of(keys)` finds each position. `of_epoch(number)` has a length, and is the same each time.
    `fingerprint()` is one line, and the same in copies.

    Args:
        sampler: the sampler. Some 100 of its positions are looked at.

    Raises:
        AssertionError: a law does not hold.
        TypeError: it is not a sampler.
    """
    order, name = vectorised(sampler), type(sampler).__name__
    limit = 1000 if order.length is None else min(order.length, 1000)
    positions = _spread(limit)
    keys = _described_sampler((sampler, positions))
    largest = largest_key(sampler)
    for position, (key, _) in zip(positions, keys, strict=True):
        in_range = key >= 0 and (largest is None or key <= largest)
        _check(in_range, f"{name} has the record key {key} at position {position}, and the largest is {largest}")
    expected = dict(zip(positions, keys, strict=True))

    def check_keys_at(chosen: Sequence[int]) -> None:
        found = order.record_keys_at(np.array(chosen, dtype=np.int64)).tolist()
        for position, key in zip(chosen, found, strict=True):
            _check(
                key == expected[position][0],
                f"{name} has the record key {key} at position {position} if asked for {list(chosen)}, and "
                f"{expected[position][0]} if asked for it alone",
            )

    _for_all(positions, check_keys_at)
    for start in positions:
        stop = min(start + 5, limit)
        run = order.record_keys(start, stop).tolist()
        alone = [int(order.record_keys(position, position + 1)[0]) for position in range(start, stop)]
        _check(run == alone, f"{name} has the keys {run} at positions {start} to {stop - 1}, and {alone} one by one")
    _check(
        [key for key, _ in keys] == [int(order.record_keys(position, position + 1)[0]) for position in positions],
        f"{name}[position] and record_keys(position, position + 1) have other keys",
    )
    _check_text(sampler, name)
    _check_shards(sampler, name, limit)
    _check_inverse(sampler, name, expected)
    _check_epochs(sampler, name)
    _same_everywhere(_described_sampler, (sampler, positions[:8]), keys[:8], f"The order of {name}")


def check_operation(operation: Any, elements: Iterable[Any]) -> None:
    """Checks an operation, or a function, on elements as it gets them.

    The laws are those of `debug=True`: run twice, it returns equal elements, it draws from its own generator only, it
    neither keeps what it has returned nor changes what a source keeps, and a worker process computes the same. Besides,
    a pass equals the pass before, also with threads, and a state that is taken after any element resumes with the next
    one. An operation that cannot be pickled is checked in this process only.

    Args:
        operation: an operation of any kind, or a function of an element.
        elements: elements for it, at least one, of which 50 are used.

    Raises:
        AssertionError: a law does not hold.
        Exception: the operation raises on these elements.
    """
    given = [element for element, _ in zip(elements, range(50), strict=False)]
    if not given:
        raise ValueError("elements must have at least one element.")

    def loader_of(threads: int, *, debug: bool = False) -> DataLoader:
        return load(
            # With debug=True, the elements themselves, which an operation must not change.
            _Held(copy.deepcopy(given)) if debug else _Copies(given),
            seed=0,
            num_epochs=1,
            transformations=[copy.copy(operation)],
            read_options=ReadOptions(num_threads=threads),
            debug=debug,
        )

    expected = [_kept(element) for element in loader_of(0)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watched = list(loader_of(0, debug=True))
    found = [str(warning.message).partition("debug: ")[2] for warning in caught]
    # An operation may hand on what it got.
    found = [text for text in found if text and "is the source's own memory" not in text]
    _check(not found, "".join(found[:1]).rstrip("."))
    _check_stream(watched, expected, "run a second time")
    _check_stream(list(loader_of(4)), expected, "run in threads")
    check_iterator(lambda: iter(loader_of(0)), limit=50)


def check_iterator(make: Callable[[], Iterator[Any]], *, limit: int = 100) -> None:
    """Checks an iterator that has `get_state()` and `set_state(state)`.

    The laws: iterators of `make` yield equal elements. A state that is taken before any element, or at the end, is a
    value that does not change while the iterator moves on. In a new iterator, in one that was used, and after it was
    pickled, it is followed by the elements that followed it. Taking it moves nothing. After the end comes the end.

    Args:
        make: returns an iterator at the beginning of the same stream.
        limit: the number of elements that are compared.

    Raises:
        AssertionError: a law does not hold.
    """
    saved: Any = make()
    name = type(saved).__name__
    expected: list[Any] = []
    states: list[tuple[Any, bytes]] = []
    with _closing(saved):
        while len(expected) < limit:
            state = saved.get_state()
            states.append((state, pickle.dumps(state)))
            element = next(saved, _END)
            if element is _END:
                _check(next(saved, _END) is _END, f"{name} yields an element after its end")
                break
            expected.append(_kept(element))
    with _closing(make()) as alone:
        found = [element for element, _ in zip(alone, range(len(expected)), strict=False)]
    _check_stream(found, expected, "made again, without taking states")
    used: Any = make()
    with _closing(used):
        for step in _spread(len(states)):
            state, taken = states[step]
            _check(
                difference(pickle.loads(taken), state) is None,  # noqa: S301  (our own)
                f"A state of {name}, taken after {step} elements, changed while the iterator moved on: return a copy",
            )
            new: Any = make()
            with _closing(new):
                for iterator, how in ((used, "a used iterator"), (new, "a new iterator")):
                    iterator.set_state(pickle.loads(taken))  # noqa: S301  (our own)
                    following = expected[step : step + 5]
                    found = [element for element, _ in zip(iterator, following, strict=False)]
                    _check_stream(found, following, f"resumed by {how} after {step} elements")


def _read_array(batched: Callable[[Any], Any], keys: Sequence[int]) -> Any:
    return batched(np.array(keys, dtype=np.int64))


def _check_bounds(source: Any, name: str, count: int) -> None:
    if isinstance(source, MapDataset):
        return
    beyond: list[Any] = []
    last: list[Any] = []
    with contextlib.suppress(Exception):
        beyond.append(source[count])
    _check(not beyond, f"{name}[{count}] is a record, but len(source) is {count}: raise an IndexError")
    with contextlib.suppress(Exception):
        last.append(source[-1])
    is_last = count > 0 and all(difference(source[count - 1], record) is None for record in last)
    _check(is_last or not last, f"{name}[-1] is neither an error nor the last record: raise an IndexError")


def _check_memory(source: Any, name: str, key: int) -> None:
    first, second = (_arrays(source[key]) for _ in range(2))
    for one, other in zip(first, second, strict=False):
        is_kept = one.flags.writeable and one.size and np.shares_memory(one, other)
        _check(
            not is_kept,
            f"{name}[{key}] returns the same memory each time, so that an operation that writes to it changes the "
            "record: return a copy, or make the array read-only",
        )


def _check_words_of_source(source: Any, name: str, count: int) -> None:
    _check_text(source, name)
    sizes = getattr(source, "unit_sizes", None)
    if sizes is not None:
        total = sum(int(size) for size in sizes)
        _check(total == count, f"{name}.unit_sizes add up to {total}, but len(source) is {count}")


def _check_text(owner: Any, name: str) -> None:
    if not callable(getattr(owner, "fingerprint", None)):
        return
    text = owner.fingerprint()
    _check(isinstance(text, str) and text and "\n" not in text, f"{name}.fingerprint() must be one line, got {text!r}")
    again = owner.fingerprint()
    _check(again == text, f"{name}.fingerprint() is {text!r} at first, and then {again!r}")


def _check_shards(sampler: Any, name: str, limit: int) -> None:
    order, steps = vectorised(sampler), 4
    given = getattr(order, "given_batch", None)
    global_batch = 6 if given is None else given[1]
    max_hosts = math.gcd(
        global_batch,
        *(getattr(order, "batch_sizes", None) or ()),
        *([sampler.parts] if isinstance(sampler, BalancedSampler) else ()),
    )
    hosts = next((count for count in (3, 2) if max_hosts % count == 0), 1)
    rows = global_batch // hosts
    if limit < steps * global_batch:
        return

    def read(batch_size: int, shard: ShardOptions) -> list[list[int]]:
        loader = DataLoader(
            data_source=range((largest_key(sampler) or 1 << 62) + 1),
            sampler=sampler,
            operations=[Batch(batch_size, drop_remainder=True)],
            shard_options=shard,
            read_options=ReadOptions(num_threads=0),
        )
        with iter(loader) as batches:
            return [next(batches).tolist() for _ in range(steps)]

    whole = read(hosts * rows, ShardOptions(0, 1, drop_remainder=True))
    shards = zip(*(read(rows, ShardOptions(index, hosts, drop_remainder=True)) for index in range(hosts)), strict=True)
    for step, batches in enumerate(shards):
        found = [key for keys in batches for key in keys]
        _check(
            found == whole[step], f"{hosts} shards of {name} read {found} at step {step}, and one reads {whole[step]}"
        )


def _check_inverse(sampler: Any, name: str, expected: dict[int, tuple[int, Any]]) -> None:
    if not callable(getattr(sampler, "positions_of", None)):
        return
    stop = max(expected, default=0) + 1
    if has_varying_batches(order := vectorised(sampler)):  # Positions that no batch has are not found.
        used = order.are_used(np.array([*expected], dtype=np.int64))
        expected = {position: expected[position] for position in itertools.compress(expected, used)}
    keys = [key for key, _ in expected.values()]
    for position, key, row in zip(expected, keys, np.asarray(sampler.positions_of(keys, stop)), strict=True):
        _check(
            position in row.tolist(),
            f"{name} has the record key {key} at position {position}, which is not among "
            f"positions_of([{key}], {stop}), {[found for found in row.tolist() if found >= 0]}",
        )


def _check_epochs(sampler: Any, name: str) -> None:
    if not callable(getattr(sampler, "of_epoch", None)):
        return
    for number in (0, 1, 7):
        epoch, again = sampler.of_epoch(number), sampler.of_epoch(number)
        try:
            length = len(epoch)
        except TypeError:
            _check(False, f"{name}.of_epoch({number}) has no len(): an epoch ends")
        keys = [vectorised(one).record_keys(0, min(length, 100)).tolist() for one in (epoch, again)]
        _check(keys[0] == keys[1], f"{name}.of_epoch({number}) is another order each time")


def _check_stream(found: Sequence[Any], expected: Sequence[Any], how: str) -> None:
    for row, (one, other) in enumerate(zip(expected, found, strict=False)):
        text = difference(one, other)
        _check(text is None, f"Element {row} of the stream is {text}, {how}")
    _check(len(found) == len(expected), f"The stream has {len(found)} elements instead of {len(expected)}, {how}")


def _described_source(asked: tuple[Any, Sequence[int]]) -> Any:
    source, keys = asked
    fingerprint = source.fingerprint() if callable(getattr(source, "fingerprint", None)) else ""
    return fingerprint, len(source), [source[key] for key in keys]


def _described_sampler(asked: tuple[Any, Sequence[int]]) -> list[tuple[int, Any]]:
    """Returns the record key, and a draw of the generator, of each position."""
    sampler, positions = asked
    if not hasattr(sampler, "__getitem__"):
        order = vectorised(sampler)
        return [(int(order.record_keys(position, position + 1)[0]), None) for position in positions]
    found = [sampler[position] for position in positions]
    return [(int(each.record_key), None if each.rng is None else int(each.rng.integers(1 << 62))) for each in found]


class _Held:
    """The elements as a source that hands out what it holds."""

    def __init__(self, elements: list[Any]) -> None:
        self._elements = elements

    def __len__(self) -> int:
        return len(self._elements)

    def __getitem__(self, key: int) -> Any:
        return self._elements[key]


class _Copies(_Held):
    """The elements as a source that hands out copies."""

    def __getitem__(self, key: int) -> Any:
        return _kept(super().__getitem__(key))


_END = object()


def _check(holds: object, sentence: str) -> None:
    if not holds:
        raise AssertionError(f"{sentence}.")


def _kept(element: Any) -> Any:
    """Returns a copy of an element, or the element if it has none."""
    try:
        return copy.deepcopy(element)
    except Exception:  # noqa: BLE001  (of a class of others)
        return element


def _arrays(element: Any) -> list[Any]:
    return [leaf for _, leaf in tree.leaves(element) if isinstance(leaf, np.ndarray)]


def _spread(count: int) -> list[int]:
    """Returns at most 60 numbers below a count: the first, the last, and some between."""
    chosen = {*range(min(count, 20)), *range(max(0, count - 10), count)}
    return sorted(chosen | {int(number) for number in np.linspace(0, max(0, count - 1), 30)} if count else chosen)


def _turned(keys: Sequence[int], start: int) -> list[int]:
    first = start * len(keys) // NUM_THREADS
    return [*keys[first:], *keys[:first]]


def _for_all(values: Sequence[int], law: Callable[[list[int]], None]) -> None:
    """Calls a law with lists of values, the smallest first if Hypothesis is not there to make them small."""
    law([])
    if not values:
        return
    try:
        import hypothesis  # noqa: PLC0415  (optional)
    except ImportError:
        rng = np.random.default_rng(0)
        for size in np.arange(NUM_EXAMPLES) // 3 + 1:
            law([values[row] for row in rng.integers(0, len(values), size)])
        return
    lists = hypothesis.strategies.lists(hypothesis.strategies.sampled_from(values), max_size=10)
    quiet = hypothesis.settings(
        max_examples=NUM_EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    try:
        quiet(hypothesis.given(lists)(law))()
    except AssertionError as error:
        # Without the notes and the traceback of Hypothesis: the sentence has the example.
        raise AssertionError(str(error)) from None


def _in_threads(calls: Sequence[Callable[[], None]]) -> None:
    barrier = threading.Barrier(len(calls))

    def call(work: Callable[[], None]) -> None:
        barrier.wait()
        work()

    with ThreadPoolExecutor(len(calls)) as threads:
        for _ in threads.map(call, calls):
            pass


def _same_everywhere(function: Callable[[Any], Any], value: Any, expected: Any, subject: str) -> None:
    """Compares the result of a function in a worker process, and in a forked child of it, with the one here."""
    asked = functools.partial(_answers, function, value, SECONDS)
    options = ReadOptions(num_threads=0)
    # The worker answers itself, and then its child.
    with load(
        range(1), transformations=[asked], read_options=options, worker_count=1, stall_timeout=SECONDS + 60
    ) as loader:
        try:
            answers = pickle.loads(next(iter(loader)))  # noqa: S301  (our own)
        except Exception as error:
            raise AssertionError(f"{subject} cannot be read in a worker process: {str(error).rstrip('.')}.") from error
    for (found, problem), where in zip(answers, ("a worker process", "a forked process"), strict=True):
        _check(not problem, f"{subject} cannot be read in {where}: {problem.rstrip('.')}")
        text = difference(expected, found)
        _check(text is None, f"{subject} has {text} in {where}")


def _answers(function: Callable[[Any], Any], value: Any, seconds: float, _: int) -> bytes:
    """Returns the pickled results of a function in this process, and in a forked child of it, each with its error."""
    here = function(value)
    content = next(
        filter(None, (_answer_of_child(function, value, seconds / NUM_FORKS) for _ in range(NUM_FORKS))), b""
    )
    forked = pickle.loads(content) if content else (None, f"it had no answer in {seconds:g} s")  # noqa: S301  (our own)
    return pickle.dumps([(here, ""), forked])


def _answer_of_child(function: Callable[[Any], Any], value: Any, seconds: float) -> bytes:
    """Returns the pickled result of a function in a forked child of this process; empty if none comes."""
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        # It must not return into the worker's loop.
        try:
            with open(theirs, "wb") as file:  # noqa: PTH123  (a descriptor)
                pickle.dump(_result(function, value), file)
        finally:
            os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as file:  # noqa: PTH123
        if not select.select([file], [], [], seconds)[0]:
            # Such as for a lock that a thread of the worker holds.
            os.kill(child, signal.SIGKILL)
        content = file.read()
    os.waitpid(child, 0)
    return content


def _result(function: Callable[[Any], Any], value: Any) -> tuple[Any, str]:
    try:
        return function(value), ""
    except Exception as error:  # noqa: BLE001  (of the user's class)
        return None, str(error) or repr(error)


@contextlib.contextmanager
def _closing(iterator: Any) -> Iterator[Any]:
    try:
        yield iterator
    finally:
        if callable(getattr(iterator, "close", None)):
            iterator.close()
