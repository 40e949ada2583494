"""Elements of a dataset as JAX's arrays: the same ones, the same states, errors at their turn."""

import itertools
import json
from typing import Any

import jax
import numpy as np
import pytest

from millstream import MapDataset
from millstream.experimental import device_put

pytestmark = pytest.mark.third_party


@pytest.mark.parametrize("buffer_size", [0, 1, 3])
def test_placed_elements_are_the_same(buffer_size: int) -> None:
    """They are on the device, in order; what is staged does not count in states, which fit the dataset beneath."""
    batches = MapDataset.range(20).to_iter_dataset().batch(3)
    expected = [batch.tolist() for batch in batches]
    placed = device_put(batches, jax.devices()[0], cpu_buffer_size=2, device_buffer_size=buffer_size)
    with iter(placed) as iterator:
        first = list(itertools.islice(iterator, 2))
        state = json.loads(json.dumps(iterator.get_state()))
        assert all(isinstance(batch, jax.Array) for batch in first)
        assert [batch.tolist() for batch in [*first, *iterator]] == expected
        assert next(iterator, None) is None
        iterator.set_state(state)
        assert iterator.get_state() == state
        assert [batch.tolist() for batch in iterator] == expected[2:]
    with iter(batches) as plain:
        plain.set_state(state)
        assert [batch.tolist() for batch in plain] == expected[2:]


def fail_once(failures: list[int], number: int) -> Any:
    """Returns an array; fails the first time at 2."""
    if number == 2 and not failures:
        failures.append(number)
        raise ConnectionError(number)
    return np.full(2, number)


def test_an_error_comes_at_its_turn() -> None:
    """Elements before it are given first; after it, the next attempt gives the element that was due."""
    failures: list[int] = []
    dataset = MapDataset.range(4).to_iter_dataset().map(lambda number: fail_once(failures, number))
    with iter(device_put(dataset, None)) as iterator:
        assert [next(iterator).tolist(), next(iterator).tolist()] == [[0, 0], [1, 1]]
        before = iterator.get_state()
        with pytest.raises(ConnectionError):
            next(iterator)
        assert iterator.get_state() == before
        assert [element.tolist() for element in iterator] == [[2, 2], [3, 3]]
