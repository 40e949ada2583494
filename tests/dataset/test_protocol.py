"""Iterators of all kinds of chains, and `device_put` of them, have all members of the one protocol, which agree.

A stream has no random access, and a user's iterator measures nothing: these members say what to write.
"""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

import millstream
from millstream import CheckpointError, IterDataset, MapDataset, ReadOptions, experimental
from millstream.checkpoint import CheckpointHandler
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
    """Steps count what was delivered. States, state_dicts, Orbax and seek lead to the same elements and step."""
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
        if not kind.has_len:
            with pytest.raises(TypeError, match=r"len|number of batches left"):
                len(other)
        for wrong in ({}, {"state": None, "more": 1}, saved["state"]):
            with pytest.raises(CheckpointError):
                other.load_state_dict(wrong)


@each_kind
def test_a_closed_iterator_says_so(name: str) -> None:
    """A `with` block closes at its end, even if it raises; then all that needs work is an error, and the state remains.

    Closing again does nothing.
    """
    with contextlib.suppress(KeyError), ALL_KINDS[name].begin() as iterator:
        assert iter(iterator) is iterator
        next(iterator)
        state = iterator.get_state()
        raise KeyError
    iterator.close()
    way = r"millstream\.device_put\(iter\(loader\)\)" if "device_put of" in name else "iter"
    moves: list[Callable[[], Any]] = [lambda: next(iterator)]
    if name in OF_USERS:
        # The class of a user's iterator does not check this.
        moves = moves[: name != "a user's iterator"]
    else:
        moves += [iterator.start_prefetch, lambda: iterator.set_state(state)]
        moves += [lambda: iterator.seek(0)][: ALL_KINDS[name].seeks]
    for move in moves:
        with pytest.raises(ValueError, match=f"(?i)closed.* call {way}"):
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
