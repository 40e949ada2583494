"""Elements of a chain that fail are dropped, wherever they are made, and whatever the chain draws from."""

from typing import Any

import pytest

import millstream
from millstream import experimental


def odd(number: int) -> int:
    """Returns a number, and refuses multiples of 7."""
    if number % 7 == 0:
        raise ValueError(f"{number} is a multiple of 7")
    return number


def skipping(dataset: Any, **options: Any) -> Any:
    return experimental.WithOptionsIterDataset(dataset, experimental.DatasetOptions(on_error="skip", **options))


NUMBERS = millstream.MapDataset.range(40)
ODD = [number for number in range(40) if number % 7]

CHAINS: dict[str, Any] = {
    "a map of the MapDataset": lambda: NUMBERS.map(odd).to_iter_dataset(),
    "a map after it": lambda: NUMBERS.to_iter_dataset().map(odd),
    "absent elements stay": lambda: NUMBERS.to_iter_dataset(allow_nones=True).map(odd),
    "after a filter": lambda: NUMBERS.filter(lambda _: True).to_iter_dataset().map(odd),
    "a stream": lambda: NUMBERS.to_iter_dataset().mp_prefetch(millstream.MultiprocessingOptions(0)).map(odd),
    "a limit": lambda: experimental.LimitIterDataset(NUMBERS.to_iter_dataset(), 40).map(odd),
    "a mixture of one": lambda: millstream.IterDataset.mix([NUMBERS.to_iter_dataset().map(odd)], [1.0]),
    "workers": lambda: NUMBERS.to_iter_dataset().map(odd).mp_prefetch(millstream.MultiprocessingOptions(1)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_elements_that_fail_are_dropped(name: str) -> None:
    """Elements that fail are dropped in every kind of chain, from every state, and in the batches that follow."""
    iterator = iter(skipping(CHAINS[name]()))
    states = []
    for number in ODD:
        states.append(iterator.get_state())
        assert next(iterator) == number
    assert list(iterator) == []
    for step in range(0, len(ODD), 5):
        iterator.set_state(states[step])
        assert next(iterator) == ODD[step]
    iterator.close()


def test_batches_are_full() -> None:
    """Elements after one that fails move up, so that batches are full."""
    batches = list(skipping(NUMBERS.map(odd).to_iter_dataset().batch(10)))
    assert [batch.tolist() for batch in batches] == [ODD[start : start + 10] for start in range(0, len(ODD), 10)]


def test_the_limit_is_that_of_the_options() -> None:
    """The error of one element too many is raised, and bad options are refused."""
    numbers = iter(skipping(NUMBERS.to_iter_dataset().map(odd), max_errors=2))
    assert [next(numbers) for _ in range(12)] == ODD[:12]
    with pytest.raises(ValueError, match="14 is a multiple of 7"):
        next(numbers)
    with pytest.raises(ValueError, match="on_error must be 'raise' or 'skip'"):
        experimental.DatasetOptions(on_error="ignore")
