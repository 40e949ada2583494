"""States of chains below others: small, and of the same chains only."""

import itertools
import json
from typing import Any

import pytest

from millstream import IterDataset, MapDataset
from millstream.dataset import ZipIterDataset

NUM_STREAMS = 64


def is_kept(number: int) -> bool:
    return number % 3 > 0


def chains(*, filtered: bool = True, seed: int = 0, length: int = 40) -> list[IterDataset[Any]]:
    """Returns chains over numbers that say which one they are of."""
    numbers = [
        MapDataset.range(1000 * stream, 1000 * stream + length).seed(seed).shuffle().to_iter_dataset()
        for stream in range(NUM_STREAMS)
    ]
    return [stream.filter(is_kept) for stream in numbers] if filtered else numbers


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("is_followed", [False, True])
def test_the_state_of_a_mixture_of_64_has_less_than_4_kb(filtered: bool, is_followed: bool) -> None:
    """A chain in a mixture takes some 40 bytes, so that a state can be saved with every checkpoint of a model."""
    mixture = IterDataset.mix(chains(filtered=filtered))
    dataset = mixture.map(float) if is_followed else mixture
    with iter(dataset) as iterator:
        for _ in range(500):
            next(iterator)
        state = iterator.get_state()
        following = list(itertools.islice(iterator, 200))
    assert len(json.dumps(state)) < 4096
    with iter(dataset) as iterator:
        iterator.set_state(json.loads(json.dumps(state)))
        assert iterator.get_state() == state
        assert list(itertools.islice(iterator, 200)) == following


def test_changed_code_of_a_chain_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """A function of the same name with another body may make the same elements: the log says so."""
    versions: list[Any] = []
    for body in ("number * 2", "number + number"):
        names: dict[str, Any] = {"__name__": "trainer"}
        exec(f"def twice(number):\n    return {body}\n", names)
        versions.append(names["twice"])
    then, now = (
        ZipIterDataset([MapDataset.range(9).to_iter_dataset().map(version).filter(bool)] * 2) for version in versions
    )
    with iter(then) as iterator:
        next(iterator)
        state = iterator.get_state()
    with iter(now) as iterator:
        iterator.set_state(state)
        assert next(iterator) == (4, 4)
    assert "a dataset below others resumes, although its code" in caplog.text
