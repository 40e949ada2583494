"""A stream yields what its plain oracle gives, wherever its elements are made, and resumes everywhere."""

import itertools
import json
from typing import Any

import pytest
from dataset_streams import Stream, streams
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream import DatasetIterator, IterDataset, MapDataset


def through_json(state: Any) -> Any:
    """Returns a state that was written and read."""
    return json.loads(json.dumps(state))


def shape_of(state: Any) -> Any:
    """Returns the keys and types of a state, at every level; numbers and texts are all alike."""
    if isinstance(state, dict):
        return {key: shape_of(value) for key, value in state.items()}
    return [shape_of(value) for value in state] if isinstance(state, list) else type(state)


@settings(max_examples=100)
@given(streams())
def test_a_stream_is_that_of_the_oracle(stream: Stream) -> None:
    """The elements are those of the oracle, again each time; the end is repeated; nothing is left when it is closed."""
    with iter(stream.dataset) as iterator:
        assert isinstance(iterator, DatasetIterator)
        elements = list(iterator)
        with pytest.raises(StopIteration):
            next(iterator)

    assert elements == stream.values
    assert list(stream.dataset) == stream.values


@settings(max_examples=60)
@given(streams(), st.data())
def test_a_stream_resumes_everywhere(stream: Stream, data: st.DataObject) -> None:
    """From each state, through JSON, on a fresh iterator and in place: the same elements, and the same state again."""
    dataset = stream.dataset.map(lambda element: element)
    with iter(dataset) as iterator:
        states = [through_json(iterator.get_state())]
        states += [through_json(iterator.get_state()) for _ in iterator]
        assert len(states) == len(stream.values) + 1
        assert all(shape_of(state) == shape_of(states[0]) for state in states)
        used = data.draw(st.lists(st.integers(0, len(stream.values)), min_size=1, max_size=4))
        for number in used:
            iterator.set_state(states[number])
            assert iterator.get_state() == states[number]
            assert list(itertools.islice(iterator, 3)) == stream.values[number : number + 3]
        with iter(dataset) as fresh:
            fresh.set_state(states[used[0]])
            assert fresh.get_state() == states[used[0]]
            assert list(fresh) == stream.values[used[0] :]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_change_nothing(workers: int) -> None:
    """With worker processes at the end of a chain, or within it, the elements are the same, and every state resumes."""

    @settings(max_examples=4)
    @given(streams(), st.booleans(), st.data())
    def check(stream: Stream, is_last: bool, data: st.DataObject) -> None:
        spread = stream.dataset.mp_prefetch(workers)
        step = data.draw(st.integers(0, len(stream.values)))
        with iter(spread if is_last else spread.map(lambda element: element)) as iterator:
            assert list(itertools.islice(iterator, step)) == stream.values[:step]
            state = through_json(iterator.get_state())
            assert list(iterator) == stream.values[step:]
            iterator.set_state(state)
            assert list(iterator) == stream.values[step:]

    check()


def test_a_stream_of_a_range() -> None:
    """The shortest chain there is."""
    dataset = MapDataset.range(7).to_iter_dataset().batch(3)

    assert [batch.tolist() for batch in dataset] == [[0, 1, 2], [3, 4, 5], [6]]
    assert isinstance(dataset, IterDataset)
