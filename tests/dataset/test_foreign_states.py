"""States of users' iterators belong to them: taken and loaded ones are copied, whatever their classes do with them."""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import datasets
import jax
import pytest

import millstream
from millstream import DatasetIterator, IterDataset, MapDataset, ReadOptions
from millstream.experimental import (
    CacheIterDataset,
    InterleaveIterDataset,
    LimitIterDataset,
    RepeatIterDataset,
    ZipIterDataset,
)
from millstream.transforms import WindowShuffle

COUNT = 30


class Live(DatasetIterator[int]):
    """Returns its own dict as its state, with a buffer that it fills, and keeps the dict that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.state: dict[str, Any] = {"next": 0, "buffer": []}

    def __next__(self) -> int:
        state = self.state
        if not state["buffer"]:
            state["buffer"].extend(range(state["next"], min(COUNT, state["next"] + 4)))
        if not state["buffer"]:
            raise StopIteration
        state["next"] = state["buffer"].pop(0) + 1
        return int(state["next"] - 1)

    def get_state(self) -> Any:
        """Returns the live dict."""
        return self.state

    def set_state(self, state: Any) -> None:
        """Keeps the given dict."""
        self.state = state


class Forgetful(Live):
    """Returns the state of the beginning until it has yielded an element."""

    has_begun = False

    def __next__(self) -> int:
        element = super().__next__()
        self.has_begun = True
        return element

    def get_state(self) -> Any:
        """Returns the position only after an element."""
        return self.state if self.has_begun else {"next": 0, "buffer": []}


class Changing(Live):
    """Changes the form of a state that it is given."""

    def set_state(self, state: Any) -> None:
        """Accepts both forms."""
        state["buffer"] = [*state.pop("left", state.get("buffer"))]
        self.state = state

    def get_state(self) -> Any:
        """Returns the other form."""
        return {"next": self.state["next"], "left": self.state["buffer"]}


class Users(IterDataset[int]):
    """A dataset with one of these iterators."""

    def __init__(self, kind: type[Live]) -> None:
        super().__init__()
        self.kind = kind

    def __iter__(self) -> Any:
        return self.kind()


class Stateful:
    """A stream with states as torch has them: a live dict. At its end, it begins again."""

    def __init__(self) -> None:
        self.state = {"next": 0}
        self.has_begun = False
        self.thread = threading.get_ident()

    def __deepcopy__(self, memo: Any) -> "Stateful":
        """Refuses to be copied in another thread."""
        assert threading.get_ident() == self.thread
        return Stateful()

    def __iter__(self) -> Iterator[int]:
        while self.state["next"] < COUNT:
            self.has_begun = True
            self.state["next"] += 1
            yield self.state["next"] - 1
        self.state["next"] = 0

    def state_dict(self) -> Any:
        """Returns the live dict; at first, that of the beginning."""
        return self.state if self.has_begun else {"next": 0}

    def load_state_dict(self, state: Any) -> None:
        """Keeps the given dict."""
        self.state = state


def hugging_face() -> Any:
    return datasets.Dataset.from_dict({"number": range(COUNT)}).to_iterable_dataset(num_shards=3)


STREAMS: dict[str, Callable[[], IterDataset[Any]]] = {
    "live": lambda: Users(Live),
    "forgetful": lambda: Users(Forgetful),
    "changing": lambda: Users(Changing),
    "stateful": lambda: IterDataset.source(Stateful()),
    "hugging face": lambda: IterDataset.source(hugging_face()),
}
OTHER = MapDataset.range(100, 150).to_iter_dataset()
LAYERS: dict[str, Callable[[IterDataset[Any]], Any]] = {
    "prefetch": lambda stream: stream.prefetch(ReadOptions(1, 4)),
    "map": lambda stream: stream.map(number_of),
    "batch": lambda stream: stream.map(number_of).batch(4),
    "mix": lambda stream: IterDataset.mix([stream, OTHER], [1, 2]),
    "zip": lambda stream: ZipIterDataset([stream, OTHER], strict=False),
    "interleave": lambda stream: InterleaveIterDataset([stream, OTHER, stream], cycle_length=2),
    "limit": lambda stream: LimitIterDataset(stream, 20),
    "repeat": lambda stream: RepeatIterDataset(stream, 2),
    "cache": lambda stream: RepeatIterDataset(CacheIterDataset(stream), 2),
    "window": lambda stream: stream.map(number_of).apply(WindowShuffle(7, seed=0)),
    "repeated mixture": lambda stream: RepeatIterDataset(IterDataset.mix({"a": stream, "b": OTHER}), 2).batch(
        3, batch_fn=list
    ),
}


def number_of(element: Any) -> int:
    return int(element["number"] if isinstance(element, dict) else element)


def shown(elements: Any) -> list[str]:
    return list(map(repr, elements))


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("stream", STREAMS)
def test_states_of_users_iterators_stay_what_they_were(stream: str, layer: str) -> None:
    """A state leads to its element if its iterator goes on, if it is saved again, at the start and after the end."""
    dataset = LAYERS[layer](STREAMS[stream]())
    expected = shown(dataset)
    for count in (0, 7, len(expected)):
        first, second, third = iter(dataset), iter(dataset), iter(dataset)
        assert shown(itertools.islice(first, count)) == expected[:count]
        for is_at_end in [False] if count < len(expected) else [False, True]:
            assert not is_at_end or next(first, None) is None
            state = first.get_state()
            text = json.dumps(state)
            next(first, None)
            second.set_state(state)
            again = second.get_state()
            assert shown(second) == expected[count:]
            assert json.dumps(state) == text
            third.set_state(json.loads(json.dumps(again)))
            assert shown(third) == expected[count:]


@pytest.mark.parametrize("stream", STREAMS)
def test_batches_on_a_device_resume(stream: str) -> None:
    """The positions of batches that were put on a device in advance are copies, too."""
    dataset = STREAMS[stream]() if isinstance(STREAMS[stream](), Users) else STREAMS[stream]().map(number_of)
    with millstream.device_put(iter(dataset), jax.devices()[0]) as batches:
        assert [int(next(batches)) for _ in range(7)] == list(range(7))
        state = json.loads(json.dumps(batches.get_state()))
        assert [int(batch) for batch in batches] == list(range(7, COUNT))
    with millstream.device_put(iter(dataset), jax.devices()[0]) as batches:
        batches.set_state(state)
        assert json.loads(json.dumps(batches.get_state())) == state or stream == "changing"
        assert [int(batch) for batch in batches] == list(range(7, COUNT))


def test_a_state_that_was_loaded_is_replaced_by_the_next() -> None:
    """A state of the beginning, after that of a later element from which nothing was drawn, is the beginning again."""
    stream = datasets.Dataset.from_dict({"x": list(range(6))}).to_iterable_dataset()
    iterator = iter(IterDataset.source(stream))
    first = iterator.get_state()
    elements = list(itertools.islice(iterator, 3))
    later = iterator.get_state()
    iterator.set_state(later)
    iterator.set_state(first)
    assert list(itertools.islice(iterator, 3)) == elements
