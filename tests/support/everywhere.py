"""The law of all streams: in each place the same elements, errors and states, whatever happens meanwhile."""

import contextlib
import itertools
import json
import os
import random
import re
import signal
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

from millstream import ReadOptions
from support.draw.shares import Elastic
from support.draw.streams import HERE, RAISED, Errors, Place, Stream, UndecidedError, text_of
from support.faults.interrupted import interrupt_at
from support.oracle.blame import blamed_for
from support.processes.process_tree import worker_pids

THREADS = [
    Place(),
    Place(ReadOptions(2, 3)),
    Place(ReadOptions(3, 1)),
    Place(ReadOptions(4, 500, max_buffer_bytes=100)),
]
"""Places in threads, also with budgets below one block."""


def in_workers(chance: random.Random, numbers: Sequence[int | Literal["auto"]] = (1, 2)) -> Place:
    """Returns any place in such a number of worker processes: of the whole stream, or of parts of it."""
    spots = chance.choice([frozenset[int](), frozenset({0, 2}), frozenset({1})])
    reading = chance.choice([None, ReadOptions(2, 3)])
    return Place(reading, chance.choice(numbers), spots, chance.choice([None, None, 4]))


class Reading(NamedTuple):
    """The elements of an iterator, and its states: those before, between and after the elements, and at the end.

    The notes of the error say where it happened, in words that depend on the place. If there are two states of the end
    of a stream below, others may be there after a state was loaded.
    """

    values: list[Any]
    error: str | None
    states: list[Any]
    last: Any
    notes: tuple[str, ...] = ()
    has_two_ends: bool = False

    def names(self, words: Iterable[str]) -> bool:
        """Returns True if each of some words, which are patterns, is in the notes."""
        return all(any(re.search(rf"\b{word}\b", note) for note in self.notes) for word in words)


Act = Callable[[Any], object]
"""Something that happens to a stream while it is read, before each element: it gets the iterator."""


def state_of(iterator: Any) -> Any:
    """Returns the state, as it comes back from a file."""
    return json.loads(json.dumps(iterator.get_state()))


def read(iterator: Any, limit: int | None = None, act: Act | None = None) -> Reading:
    """Reads up to some elements. An error comes again if the element is asked for again."""
    values: list[Any] = []
    error, states = None, [state_of(iterator)]
    notes: tuple[str, ...] = ()
    while error is None and (limit is None or len(values) < limit):
        if act is not None:
            act(iterator)
        try:
            values.append(next(iterator))
        except StopIteration:
            break
        except Exception as raised:  # noqa: BLE001  (any may be planted)
            error, notes = text_of(raised), notes_of(raised)
            assert len(set(notes)) == len(notes), notes
            assert error_of(iterator) == (error, notes)
        else:
            states.append(state_of(iterator))
    return Reading(values, error, states, state_of(iterator), notes)


def notes_of(error: BaseException) -> tuple[str, ...]:
    return tuple(getattr(error, "__notes__", ()))


def check_rest(found: Reading, whole: Reading, begin: int, limit: int | None, named: Sequence[str] = ()) -> None:
    """Checks what was read from a state on. At the end, there may be any state that is the end.

    The notes of an error must have the words in `named`.
    """
    values, error, states = whole[:3]
    stop = len(values) if limit is None else min(len(values), begin + limit)
    is_over = limit is None or stop < begin + limit
    assert found[:2] == (values[begin:stop], error if is_over else None)
    assert found.error is None or found.names(named), (named, found.notes)
    if whole.has_two_ends:
        return
    if found.values:
        assert found.states == states[begin : stop + 1]
    assert is_over or found.last == states[stop]


def error_of(iterator: Any) -> tuple[str, tuple[str, ...]] | None:
    """Returns the error of the next element, with its notes, if it is one."""
    try:
        next(iterator)
    except Exception as error:  # noqa: BLE001
        return text_of(error), notes_of(error)
    return None


def kill_once(chance: random.Random) -> Act:
    """Returns what kills one worker, before one of the first elements."""
    left, which = [chance.randrange(6)], chance.random()

    def act(_: Any) -> None:
        if left and not left[0] and (pids := sorted(worker_pids())):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pids[int(which * len(pids))], signal.SIGKILL)
            left.clear()
        elif left and left[0]:
            left[0] -= 1

    return act


def assert_same_everywhere(
    stream: Stream, chance: random.Random, places: Sequence[Place], errors: Errors = RAISED, *, kills: bool = False
) -> int:
    """Checks that a stream is the oracle's in each place, and resumes in any from the states of any other.

    Args:
        stream: the stream.
        chance: decides where and how it resumes.
        places: the places besides the consumer's thread.
        errors: the options for elements that fail.
        kills: whether a worker is killed in each pass.

    Returns:
        How often it was read from somewhere.
    """
    values, error, named = stream.outcome(errors)
    if error == UndecidedError.__name__:
        return 0
    datasets = {place: stream.dataset(place, errors) for place in (HERE, *places)}
    whole: Reading | None = None
    for place, dataset in datasets.items():
        found = read(iter(dataset), act=kill_once(chance) if kills and place.workers else None)
        assert found[:2] == (values, error), place
        assert found.names(named), (named, found.notes, place)
        whole = whole or found._replace(has_two_ends=stream.has_two_ends)
        assert found[:4] == whole[:4], f"other states in {place}"
    assert whole is not None
    if errors.max_errors is not None or stream.is_limited:
        return len(datasets) + assert_counts_from_states(stream, chance, list(datasets.values()), errors, whole)
    for begin in chance.sample(range(len(whole.states)), min(len(whole.states), 6)):
        place = chance.choice(list(datasets))
        # The workers of one that is dropped stay for the next one.
        iterator = iter(datasets[place])
        with iterator if chance.random() < 0.2 else contextlib.nullcontext():
            if chance.random() < 0.2:
                iterator.start_prefetch()
            iterator.set_state(whole.states[begin])
            check_rest(read(iterator, limit := chance.choice([1, 3, None])), whole, begin, limit, named)
            iterator.set_state(whole.states[then := chance.randrange(len(whole.states))])
            check_rest(read(iterator, 2), whole, then, 2, named)
            iterator.set_state(whole.last)
            check_rest(read(iterator, 1), whole, len(values), 1, named)
            with contextlib.suppress(NotImplementedError):
                # One that draws from a stream cannot seek.
                iterator.seek(begin)
                check_rest(read(iterator, 1), whole, begin, 1, named)
    return len(datasets) + 3 * min(len(whole.states), 6)


def assert_counts_from_states(
    stream: Stream, chance: random.Random, datasets: Sequence[Any], errors: Errors, whole: Reading
) -> int:
    """Checks that a new iterator counts the elements that fail from its state on, the same ones in each place.

    Returns:
        How often the stream was read.
    """
    values, error, _ = stream.outcome(errors, is_limited=False)
    for begin in chance.sample(range(len(whole.states)), min(len(whole.states), 3)):
        found = []
        for dataset in datasets:
            with iter(dataset) as iterator:
                iterator.set_state(whole.states[begin])
                found.append(read(iterator)[:2])
        (got, got_error), *others = found
        assert others == [found[0]] * len(others), (begin, found)
        # Fewer than those from the beginning on.
        assert len(whole.values) - begin <= len(got)
        assert got == values[begin : begin + len(got)]
        assert got_error is not None or (len(got), None) == (len(values) - begin, error)
    return len(datasets) * min(len(whole.states), 3)


def assert_shares_are_the_whole(elastic: Elastic, chance: random.Random, places: Sequence[Place]) -> None:
    """Checks that the shards of a chain, laid end to end, are its global batches, for any number of shards.

    Each shard is read in one of the places, up to its own error if it has one. All have the same states, from which any
    shard of any number resumes.
    """
    size = elastic.global_batch
    states = read_shard(elastic, 0, 1, HERE)
    for count in chance.sample([count for count in (1, 2, 3, 4, 6) if size % count == 0], 1):
        for index in range(count):
            own = read_shard(elastic, index, count, place := chance.choice([HERE, *places]))
            common = min(len(own), len(states))
            assert own[:common] == states[:common], place
            states = max(own, states, key=len)
            step = chance.randrange(len(states))
            read_shard(elastic, index, count, chance.choice([HERE, *places]), states[step])


def read_shard(elastic: Elastic, index: int, count: int, place: Place, state: Any = None) -> list[Any]:
    """Checks the batches of a shard from a state on, and returns its states."""
    with elastic.shard(index, count, place) as iterator:
        if state is not None:
            iterator.set_state(state)
        begin = iterator.step
        assert len(iterator) == elastic.chain.oracle.length // elastic.global_batch - begin
        found = read(iterator)
    expected: list[list[int]] = []
    error: str | None = None
    named: tuple[str, ...] = ()
    try:
        expected.extend(elastic.batches(index, count, begin))
    except Exception as failure:  # noqa: BLE001  (any may be planted)
        error, named = text_of(failure), blamed_for(failure)
    values = [batch.tolist() for batch in found.values]
    assert (values, found.error) == (expected, error), place
    assert error is None or found.names(named), (named, found.notes, place)
    return found.states


def position_of(iterator: Any, dataset: Any, whole: Reading) -> int:
    """Returns the number of elements before an iterator, by its state, or by what follows.

    A user's iterator may have states between its elements, and some have one of their end.
    """
    if (state := state_of(iterator)) in whole.states:
        return whole.states.index(state)
    with iter(dataset) as other:
        other.set_state(state)
        return len(whole.values) - len(read(other).values)


def assert_survives_interrupts(stream: Stream, chance: random.Random, place: Place) -> bool:
    """Checks that an iterator is where it says after an exception at any moment of `next`, and goes on from there.

    The `next` that is interrupted may lose its element on the way to the caller, and that one alone.

    Returns:
        True if there was an interrupt.
    """
    with iter(stream.dataset(HERE)) as iterator:
        whole = read(iterator)._replace(has_two_ends=stream.has_two_ends)
    values, error = whole.values, whole.error
    got: list[Any] = []
    with iter(stream.dataset(place)) as iterator:
        got.extend(itertools.islice(iterator, chance.randrange(min(len(values), 3) + 1)))
        if chance.random() < 0.3 and not stream.is_limited:
            # Of those from there on, none was drawn yet.
            iterator.set_state(whole.states[then := chance.randrange(len(whole.states))])
            got[:] = values[:then]

        def work() -> None:
            with contextlib.suppress(*([] if error is None else [Exception])):
                got.extend(itertools.islice(iterator, 4))

        was_interrupted = interrupt_at(int(2 ** chance.uniform(0, 14)), work)
        position = position_of(iterator, stream.dataset(), whole)
        assert position in {len(got), len(got) + 1}
        assert got == values[: len(got)]
        check_rest(read(iterator), whole, position, None)
    return was_interrupted
