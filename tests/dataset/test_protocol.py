"""Iterators of all kinds of chains, and `device_put` of them, have all members of the one protocol, which agree.

A stream has no random access, and a user's iterator measures nothing: these members say what to write. A state that is
damaged at any leaf, or of another kind, is an error.
"""

import contextlib
import copy
import functools
import itertools
import json
import operator
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import millstream
from millstream import CheckpointError, DatasetIterator, IterDataset, MapDataset, ReadOptions, experimental
from millstream.checkpoint import CheckpointHandler
from millstream.transforms import Filter, FirstFitPack, Map
from support.user_streams import Counted, Numbers

COUNT = 12


class Kind(NamedTuple):
    """A kind of iterator.

    Attributes:
        begin: returns an iterator at its beginning.
        has_len: whether it knows its length.
        seeks: whether it moves to a step.
        has_views: whether it measures, and has a summary.
        is_previewed: whether it can be previewed and traced.
        is_join: whether it only combines streams: it has all views except a trace.
    """

    begin: Callable[[], Any]
    has_len: bool = False
    seeks: bool = False
    has_views: bool = False
    is_previewed: bool = False
    is_join: bool = False


def numbers(start: int = 0) -> IterDataset[Any]:
    """Returns COUNT numbers."""
    return MapDataset.range(start, start + COUNT).to_iter_dataset(ReadOptions(2, 8))


def mixed(*operations: Any) -> Any:
    """Returns an iterator over a mixture of straight chains, and operations after it."""
    return iter(IterDataset.mix([numbers(), numbers(100)]).apply(list(operations)))


def sparse(*operations: Any) -> Any:
    """Returns an iterator over a mixture that is drawn from, and operations after it."""
    return iter(IterDataset.mix([numbers(1), numbers(100).filter(bool)]).apply(list(operations)))


KINDS = {
    "loader": Kind(lambda: iter(millstream.load(range(COUNT), num_epochs=1)), True, True, True, True),
    "read": Kind(lambda: iter(numbers().map(abs)), True, True, True, True),
    "filter": Kind(lambda: iter(numbers(1).filter(bool)), False, True, True, True),
    "elastic": Kind(
        lambda: experimental.ElasticIterator(MapDataset.range(COUNT), 1, millstream.ShardOptions(0, 1)),
        *(True, True, True, True),
    ),
    "mixture, map": Kind(lambda: mixed(abs), True, True, True, True),
    "drawn mixture, map": Kind(lambda: sparse(abs), has_views=True),
    "stream, map": Kind(lambda: iter(Counted(COUNT).map(abs)), has_views=True),
    "mixture": Kind(mixed, is_join=True),
    "zip": Kind(lambda: iter(experimental.ZipIterDataset([numbers(), numbers(100)])), is_join=True),
    "interleave": Kind(
        lambda: iter(experimental.InterleaveIterDataset([numbers(), numbers(50)], cycle_length=2)), is_join=True
    ),
    "skip": Kind(lambda: iter(numbers(-2).concatenate(numbers(9)).skip(COUNT)), is_join=True),
    "concatenate": Kind(lambda: iter(numbers().concatenate(numbers(50).take(2))), is_join=True),
    "limit": Kind(lambda: iter(experimental.LimitIterDataset(numbers(), COUNT - 1)), seeks=True, is_join=True),
    "repeat": Kind(lambda: iter(experimental.RepeatIterDataset(numbers(), num_epochs=2)), is_join=True),
    "cache": Kind(lambda: iter(experimental.CacheIterDataset(numbers())), is_join=True),
    "window shuffle": Kind(lambda: iter(numbers().apply(millstream.WindowShuffle(3, seed=0))), False, True, True, True),
    "a user's stream": Kind(lambda: iter(Counted(COUNT))),
    "a user's iterator": Kind(lambda: iter(Numbers(COUNT))),
    "iterable": Kind(lambda: iter(IterDataset.source(list(range(COUNT))))),
    "device_put in a chain": Kind(
        lambda: iter(experimental.device_put(numbers().map(abs), None)), True, True, True, True
    ),
}


def placed(kind: Kind) -> Kind:
    """Returns a kind of iterator on the device."""
    return kind._replace(begin=lambda: millstream.device_put(kind.begin()))


ALL_KINDS = KINDS | {
    f"device_put of {name}": placed(kind) for name, kind in KINDS.items() if name != "device_put in a chain"
}
OF_USERS = {"a user's stream", "a user's iterator", "iterable"}
each_kind = pytest.mark.parametrize("name", ALL_KINDS)


def taken(iterator: Any) -> list[Any]:
    """Returns the elements left."""
    return [jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), element) for element in iterator]


@each_kind
def test_positions_agree_however_they_are_saved(name: str, tmp_path: Path) -> None:
    """Steps count what was delivered. States, state_dicts, Orbax and seek lead to the same elements and step.

    `skip` moves on, and is counted by all iterators but those of loaders.
    """
    kind = ALL_KINDS[name]
    with kind.begin() as iterator, kind.begin() as other:
        iterator.start_prefetch()
        assert (iterator.step, bool(iterator), iterator.epoch in {None, 0}) == (0, True, True)
        next(iterator), next(iterator)
        assert iterator.step == 2
        state, saved = iterator.get_state(), iterator.state_dict()
        with ocp.Checkpointer(CheckpointHandler()) as checkpointer:
            checkpointer.save(tmp_path / "position", iterator)
        rest = taken(iterator)
        assert (iterator.step, bool(iterator)) == (2 + len(rest), True)
        assert len(rest) >= COUNT - 3

        def restore() -> None:
            with ocp.Checkpointer(CheckpointHandler()) as checkpointer:
                checkpointer.restore(tmp_path / "position", other)

        through_json = state if isinstance(state, bytes) else json.loads(json.dumps(state))
        moves: list[Callable[[], Any]] = [lambda: other.set_state(through_json), lambda: other.load_state_dict(saved)]
        moves += [restore, lambda: other.seek(2)][: 1 + kind.seeks]
        for move in moves:
            move()
            assert other.step == 2
            assert other.get_state() == state
            assert len(other) == len(rest) if kind.has_len else True
            assert taken(other) == rest
            assert len(other) == 0 if kind.has_len else True
        if not kind.seeks:
            with pytest.raises(NotImplementedError, match=r"cannot seek step 2: .* or use set_state"):
                other.seek(2)
            with pytest.raises(NotImplementedError, match=r"cannot skip 2 elements: .* Write dataset\.skip\(2\)"):
                other.skip(2)
        else:
            other.seek(1)
            other.skip(2)
            assert other.step == (1 if isinstance(state, bytes) else 3)
            assert taken(other) == rest[1:]
            with pytest.raises(IndexError):
                other.skip(COUNT)
        if not kind.has_len:
            with pytest.raises(TypeError, match=r"len|number of batches left"):
                len(other)
        for wrong in ({}, {"state": None, "more": 1}, saved["state"]):
            with pytest.raises(CheckpointError):
                other.load_state_dict(wrong)


@each_kind
def test_a_closed_iterator_says_so(name: str) -> None:
    """A closed iterator raises an error for all that needs work, of chains one that says what; the state remains.

    A `with` block closes at its end, even if it raises. Closing again does nothing.
    """
    with contextlib.suppress(KeyError), ALL_KINDS[name].begin() as iterator:
        assert iter(iterator) is iterator
        next(iterator)
        state = iterator.get_state()
        raise KeyError
    iterator.close()
    way = r"millstream\.device_put\(iter\(loader\)\)" if "device_put of" in name else "iter"
    moves: list[tuple[str, Callable[[], Any]]] = [("advance", lambda: next(iterator))]
    if name in OF_USERS:
        # The class of a user's iterator does not check this.
        moves = moves[: name != "a user's iterator"]
    else:
        moves += [("prefetch from", iterator.start_prefetch), ("move", lambda: iterator.set_state(state))]
        moves += [("move", lambda: iterator.seek(0))][: ALL_KINDS[name].seeks]
    for tried, move in moves:
        with pytest.raises(ValueError, match=f"(?i)(trying to {tried} a closed|is closed).* call {way}"):
            move()
    assert iterator.get_state() == state


@each_kind
def test_views_are_there_or_say_what_to_write(name: str, tmp_path: Path) -> None:
    """Metrics count what was delivered, and all views have the pipeline; a user's iterator asks for an operation.

    Operations after a stream cannot be previewed, because its first elements would then be lost.
    """
    kind = ALL_KINDS[name]
    with kind.begin() as iterator:
        next(iterator), next(iterator)
        measured: list[Callable[[], Any]] = [
            lambda: iterator.metrics()["loader/batches"] == iterator.metrics()["loader/step"] == 2.0,
            lambda: iterator.profile()["next"] > 0,
            lambda: "read" in str(iterator.summary()),
            lambda: iterator.report(tmp_path / "report.html").stat().st_size,
            lambda: "millstream_step 2.0" in millstream.prometheus_text(iterator),
        ]
        previewed: list[Callable[[], Any]] = [lambda: len(iterator.preview(2).batches) == 2]
        traced: list[Callable[[], Any]] = [lambda: str(iterator.trace())]
        for there, views in (
            (kind.has_views or kind.is_join, measured),
            (kind.is_previewed or kind.is_join, previewed),
            (kind.is_previewed, traced),
        ):
            for view in views:
                if there:
                    assert view()
                    continue
                with pytest.raises(
                    NotImplementedError, match=r"Add an operation at the end of the chain|Cannot (preview|trace)"
                ):
                    view()
        assert iterator.step == 2


def packed(number: int) -> dict[str, Any]:
    return {"t": np.full(1 + number % 3, number)}


def loaded(*operations: Any) -> Any:
    return iter(millstream.load(range(COUNT), batch_size=2, shuffle=True, seed=1, transformations=list(operations)))


class OwnStates(DatasetIterator[Any]):
    """A user's iterator, whose states have no envelope, and whose `set_state` checks nothing."""

    def __next__(self) -> Any:
        return next(self._parent)

    def get_state(self) -> dict[str, Any]:
        return {"deep": [{"number": 1}], "parent": self._parent.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        self._parent.set_state(state["parent"])


class Own(IterDataset[Any]):
    def __iter__(self) -> Any:
        return OwnStates(iter(self._parent))


STATEFUL: dict[str, Callable[[], Any]] = {
    name: kind.begin for name, kind in KINDS.items() if name != "a user's iterator"
} | {
    "loader with a filter": lambda: loaded(Filter(bool)),
    "loader with a packer": lambda: loaded(Map(packed), FirstFitPack({"t": 4}, num_packing_bins=2)),
    "chain with a filter": lambda: iter(numbers().filter(bool).batch(1)),
    "chain with workers": lambda: iter(numbers().map(abs).mp_prefetch(1)),
    "mixture by name": lambda: iter(IterDataset.mix({"a": numbers(), "b": numbers(100)})),
    "mixture of mixtures": lambda: iter(IterDataset.mix([IterDataset.mix([numbers(), numbers(100)]), numbers(200)])),
    "chain after a mixture": lambda: sparse(Filter(bool), millstream.Batch(1)),
    "repeat of a limit": lambda: iter(
        experimental.RepeatIterDataset(experimental.LimitIterDataset(numbers(), 4), num_epochs=3)
    ),
    "window shuffle of a mixture": lambda: sparse(millstream.WindowShuffle(4, seed=1)),
    "own iterator below a chain": lambda: iter(Own(numbers()).map(float)),
    "own iterators below a join": lambda: iter(experimental.ZipIterDataset([Own(numbers()), Counted(COUNT)])),
    "device_put of loader": lambda: millstream.device_put(iter(millstream.load(range(COUNT), num_epochs=1))),
    "device_put of a chain": lambda: millstream.device_put(iter(numbers().batch(1))),
}
"""Kinds whose states the library checks."""

BEFORE = 5
"""The number of elements before the state that is damaged."""
NUMBERS = (None, True, -1, 0, 1, 1 << 70, 0.5, float("nan"))
JUNK: tuple[Any, ...] = (*NUMBERS, "", "x", b"x", [], [[]], {}, {"x": 1}, object())


def damaged(state: Any) -> Iterator[Any]:
    """Yields junk, and copies of a state in which one value, at any depth, is replaced, removed or added."""
    yield from JUNK
    for path in paths(state):
        for new in JUNK[:-1]:
            if repr(new) != repr(at(state, path)):
                yield with_change(state, path, functools.partial(replace, new))
        yield with_change(state, path, operator.delitem)
        yield with_change(state, path, add)


def replace(new: Any, holder: Any, name: Any) -> None:
    holder[name] = new


def add(holder: Any, _: Any) -> None:
    holder.update(x=1) if is_dict(holder) else holder.append(1)


def is_dict(value: Any) -> bool:
    return isinstance(value, dict)


def paths(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yields the paths of all values below a value: keys of dicts and positions in lists."""
    children = value.items() if is_dict(value) else enumerate(value) if isinstance(value, list) else ()
    for name, child in children:
        yield (*above, name)
        yield from paths(child, (*above, name))


def at(state: Any, path: tuple[Any, ...]) -> Any:
    return functools.reduce(operator.getitem, path, state)


def with_change(state: Any, path: tuple[Any, ...], change: Callable[[Any, Any], Any]) -> Any:
    """Returns a copy of a state, after a change of the container that holds the value at a path."""
    copied = copy.deepcopy(state)
    change(at(copied, path[:-1]), path[-1])
    return copied


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_state_that_is_damaged_anywhere_is_refused(kind: str) -> None:
    """Each damage is a CheckpointError, the state stays as it was, and so do the elements that follow."""
    with STATEFUL[kind]() as iterator, STATEFUL[kind]() as uninterrupted:
        for _ in range(BEFORE):
            next(iterator), next(uninterrupted)
        here = iterator.get_state()
        written = json.loads(here) if isinstance(here, bytes) else json.loads(json.dumps(here))
        num_refused = 0
        for wrong in damaged(written):
            for state in encoded(wrong) if isinstance(here, bytes) else [wrong]:
                with pytest.raises(CheckpointError):
                    iterator.set_state(state)
                num_refused += 1
        assert num_refused > 100
        assert iterator.get_state() == here
        following, expected = (list(itertools.islice(each, 4)) for each in (iterator, uninterrupted))
        assert repr(following) == repr(expected)
        iterator.set_state(written if isinstance(here, dict) else here)
        assert iterator.get_state() == here


SAME_STREAMS = [{"loader", "device_put of loader"}, {"read", "device_put in a chain"}, {"read", "chain with workers"}]
SAME_STREAMS += [{"device_put in a chain", "chain with workers"}]
"""Kinds whose streams are the same, so that each resumes from the states of the other."""


@pytest.fixture(scope="module")
def first_states() -> dict[str, Any]:
    """The state of each kind after its first element."""
    states = {}
    for kind, begin in STATEFUL.items():
        with begin() as iterator:
            next(iterator)
            states[kind] = iterator.get_state()
    return states


@pytest.mark.parametrize("kind", STATEFUL)
def test_a_state_of_every_other_kind_is_refused(kind: str, first_states: dict[str, Any]) -> None:
    """A whole state of another pipeline is a CheckpointError, and the iterator stays where it was."""
    with STATEFUL[kind]() as iterator:
        for _ in range(BEFORE):
            next(iterator)
        here = iterator.get_state()
        for other in STATEFUL.keys() - {kind}:
            if {kind, other} not in SAME_STREAMS:
                with pytest.raises(CheckpointError):
                    iterator.set_state(first_states[other])
                assert iterator.get_state() == here, other


def encoded(state: Any) -> Iterator[Any]:
    """Yields a state of a loader as bytes if JSON can hold it, and the value itself if it is not a dict."""
    if not isinstance(state, dict):
        yield state
    try:
        yield json.dumps(state).encode()
    except TypeError:
        assert not isinstance(state, str)


class Reduced(IterDataset[int]):
    """Numbers whose pickles are a tuple."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start

    def __getstate__(self) -> Any:
        return (self.start,)

    def __setstate__(self, state: tuple[int]) -> None:
        Reduced.__init__(self, *state)

    def __iter__(self) -> Any:
        return iter(range(self.start, self.start + COUNT))


class ReducedToNothing(Reduced):
    """Numbers that refuse to be pickled."""

    def __getstate__(self) -> Any:
        raise TypeError("cannot be pickled")


@pytest.mark.parametrize("kind", [Reduced, ReducedToNothing])
@pytest.mark.parametrize("follow", [lambda dataset: dataset, lambda dataset: dataset.map(abs).filter(bool)])
def test_the_pickled_form_of_a_dataset_is_no_matter_of_its_stream(
    kind: type[Reduced], follow: Callable[[Any], IterDataset[int]], caplog: pytest.LogCaptureFixture
) -> None:
    """A stream resumes whatever its `__getstate__` returns, and a state names the attributes that differ."""
    with iter(follow(kind(1))) as iterator, iter(follow(kind(1))) as resumed, iter(follow(kind(2))) as other:
        assert list(itertools.islice(iterator, 5)) == [1, 2, 3, 4, 5]
        state = json.loads(json.dumps(iterator.get_state()))
        resumed.set_state(state)
        assert next(resumed) == 6
        assert not caplog.messages
        other.set_state(state)
        assert "stream.start" in caplog.text
