"""Defaults of samplers: unshuffled, endless and without a seed, except where an order cannot be otherwise."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.samplers import (
    BalancedSampler,
    HierarchicalSampler,
    IndexSampler,
    MixtureSampler,
    PackingSampler,
    SequentialSampler,
)
from support.public_samplers import public_samplers

SAMPLERS: dict[str, Callable[..., Any]] = {
    "BalancedSampler": lambda: BalancedSampler(IndexSampler(4), costs=[1] * 4, global_batch_size=2, parts=2),
    "HierarchicalSampler": lambda **options: HierarchicalSampler([2, 2], **{"window_units": 1, "seed": 0, **options}),
    "IndexSampler": lambda **options: IndexSampler(4, **options),
    "MixtureSampler": lambda: MixtureSampler([IndexSampler(4)], [1]),
    "PackingSampler": lambda **options: PackingSampler([1] * 4, row_length=1, **options),
    "SequentialSampler": lambda **options: SequentialSampler(4, **options),
}
"""A sampler of four positions, with all defaults unless options are given. Only an order that cannot be otherwise has
a seed here."""

DEFAULTS = {"shuffle": False, "seed": None, "num_epochs": None}


def test_every_public_sampler_is_in_the_table() -> None:
    """A new sampler must say here how it is constructed."""
    assert SAMPLERS.keys() == public_samplers().keys()


@pytest.mark.parametrize("name", SAMPLERS)
def test_nothing_is_shuffled_ended_or_seeded_by_default(name: str) -> None:
    """Defaults of parameters are the same for all samplers; a parameter without a default is required."""
    parameters = inspect.signature(public_samplers()[name]).parameters
    defaults = {each: parameters[each].default for each in DEFAULTS if each in parameters}

    assert {each: value for each, value in defaults.items() if value is not inspect.Parameter.empty} == {
        each: value
        for each, value in DEFAULTS.items()
        if each in defaults and (name, each) != ("HierarchicalSampler", "seed")
    }


@pytest.mark.parametrize("name", SAMPLERS)
def test_an_order_without_options(name: str) -> None:
    """The defaults are what happens: another epoch follows, in the source's order; one class is one epoch."""
    sampler = SAMPLERS[name]()

    assert sampler.length == (4 if name == "SequentialSampler" else None)
    if name != "HierarchicalSampler":
        assert sampler.seed is None
        assert sampler.record_keys(0, 4).tolist() == [0, 1, 2, 3]
    if sampler.length is None:
        assert np.array_equal(np.sort(sampler.record_keys(4, 8)), [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("HierarchicalSampler", {"seed": None}),
        ("IndexSampler", {"shuffle": True}),
        ("PackingSampler", {"shuffle": True}),
    ],
)
def test_a_shuffle_without_a_seed_is_an_error(name: str, options: dict[str, Any]) -> None:
    """The error comes at construction, and says that a seed is missing, also where an order is always shuffled."""
    with pytest.raises(ValueError, match=r"A shuffle needs a seed, got seed=None: pass any integer"):
        SAMPLERS[name](**options)
    with pytest.raises(TypeError, match=r"HierarchicalSampler: missing a required .*argument: 'seed'"):
        HierarchicalSampler([2, 2], window_units=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["BalancedSampler", "IndexSampler", "MixtureSampler", "PackingSampler"])
def test_random_operations_need_a_seed(name: str) -> None:
    """Without a seed, an operation that draws is refused with the same words for every order."""
    packing = [millstream.Pack({"x": 1})] if name == "PackingSampler" else []
    draw: Any = millstream.RandomMapTransform(lambda element, rng: (element, rng.random()))
    with pytest.raises(ValueError, match="seed"):
        millstream.DataLoader(data_source=[np.ones(1)] * 4, sampler=SAMPLERS[name](), operations=[*packing, draw])
