"""Arguments of samplers: defaults that all have, and the error of each wrong one when the sampler is built."""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import millstream
from millstream.samplers import (
    BalancedSampler,
    BucketSampler,
    HierarchicalSampler,
    IndexSampler,
    MixtureSampler,
    PackingSampler,
    SequentialSampler,
    WeightedSampler,
)
from millstream.sharding import ShardOptions
from support.draw.orders import public_samplers

SAMPLERS: dict[str, Callable[..., Any]] = {
    "BalancedSampler": lambda **options: BalancedSampler(
        IndexSampler(4), **{"costs": [1] * 4, "global_batch_size": 2, "parts": 2, **options}
    ),
    "BucketSampler": lambda lengths=(1,) * 4, boundaries=(2,), **options: BucketSampler(
        lengths, boundaries, **{"global_batch_size": 2, **options}
    ),
    "HierarchicalSampler": lambda sizes=(2, 2), **options: HierarchicalSampler(
        sizes, **{"window_units": 1, "seed": 0, **options}
    ),
    "IndexSampler": lambda num_records=4, **options: IndexSampler(num_records, **options),
    "MixtureSampler": lambda **options: MixtureSampler(**{"samplers": [IndexSampler(4)], "weights": [1], **options}),
    "PackingSampler": lambda lengths=(1,) * 4, row_length=1, **options: PackingSampler(lengths, row_length, **options),
    "SequentialSampler": lambda **options: SequentialSampler(4, **options),
    "WeightedSampler": lambda weights=(1,) * 4, **options: WeightedSampler(weights, **{"seed": 0, **options}),
}
"""A sampler of four positions, with all defaults unless options are given. Only an order that cannot be otherwise has
a seed here."""

DEFAULTS = {"shuffle": False, "seed": None, "num_epochs": None}


def test_every_public_sampler_is_in_the_table() -> None:
    """A new sampler must say here how it is constructed."""
    assert SAMPLERS.keys() == public_samplers().keys()


@pytest.mark.parametrize("name", SAMPLERS)
def test_nothing_is_shuffled_ended_or_seeded_by_default(name: str) -> None:
    """Defaults are the same for all samplers; without options, another epoch follows, in the source's order."""
    parameters = inspect.signature(public_samplers()[name]).parameters
    given = {each: parameters[each].default for each in DEFAULTS if each in parameters}
    always_shuffles = name in {"HierarchicalSampler", "WeightedSampler"}
    required = {"seed": inspect.Parameter.empty} if always_shuffles else {}
    sampler = SAMPLERS[name]()

    assert given == {each: DEFAULTS[each] for each in given} | required
    assert sampler.length == (4 if name == "SequentialSampler" else None)
    if not always_shuffles:
        assert sampler.seed is None
        assert sampler.record_keys(0, 4).tolist() == [0, 1, 2, 3]
    if sampler.length is None:
        assert np.array_equal(np.sort(sampler.record_keys(4, 8)), [0, 1, 2, 3])


@pytest.mark.parametrize(
    "name", ["BalancedSampler", "BucketSampler", "IndexSampler", "MixtureSampler", "PackingSampler"]
)
def test_random_operations_need_a_seed(name: str) -> None:
    """Without a seed, an operation that draws is refused with the same words for every order."""
    packing = [millstream.Pack({"x": 1})] if name == "PackingSampler" else []
    draw: Any = millstream.RandomMap(lambda element, rng: (element, rng.random()))
    with pytest.raises(ValueError, match="seed"):
        millstream.DataLoader(data_source=[np.ones(1)] * 4, sampler=SAMPLERS[name](), operations=[*packing, draw])


NO_SEED = "A shuffle needs a seed, got seed=None: pass any integer"
THREE = IndexSampler(3)
WRONG: dict[str, list[tuple[dict[str, Any], type[Exception], str]]] = {
    "IndexSampler": [
        ({"num_records": -1}, ValueError, "num_records must be between 0 and 2\\*\\*63, got -1"),
        ({"num_records": 2**63 + 1}, ValueError, "num_records"),
        ({"num_records": 2.0}, TypeError, "num_records must be an integer, got 2.0 of type float"),
        ({"num_records": True}, TypeError, "num_records must be an integer, got True"),
        ({"num_records": None}, TypeError, "num_records"),
        ({"num_epochs": 0}, ValueError, "num_epochs must be at least 1, or None, got 0"),
        ({"num_epochs": "2"}, TypeError, "num_epochs"),
        ({"num_epochs": False}, TypeError, "num_epochs"),
        ({"seed": -1}, ValueError, "seed must be between 0 and 2\\*\\*64 - 1, got -1"),
        ({"seed": 2**64}, ValueError, "seed"),
        ({"seed": 1.5}, TypeError, "seed"),
        ({"shuffle": True}, ValueError, NO_SEED),
        ({"shuffle": 1, "seed": 1}, TypeError, "shuffle must be True or False, got 1"),
        ({"shard_options": None}, TypeError, "shard_options must be of type ShardOptions"),
        ({"shard_options": (0, 2)}, TypeError, "shard_options must be of type ShardOptions"),
        ({"keys": [1, 2]}, ValueError, r"num_records=4 records, got 2: .*IndexSampler\(len\(keys"),
        ({"keys": []}, ValueError, "num_records=4 records, got 0"),
        ({"keys": np.ones((4, 1), int)}, ValueError, r"shape \(4, 1\)"),
        ({"keys": 4}, ValueError, r"shape \(\)"),
        ({"keys": np.ones(4)}, TypeError, "keys must be integers, got an array of dtype float64"),
        ({"keys": [True] * 4}, TypeError, "keys must be integers, got an array of dtype bool"),
        ({"keys": [0, 1, 2, -1]}, ValueError, r"keys must be between 0 and 2\*\*63 - 1, got -1 to 2"),
        ({"keys": np.array([0, 1, 2, 2**63], np.uint64)}, ValueError, f"got 0 to {2**63}"),
    ],
    "HierarchicalSampler": [
        ({"sizes": []}, ValueError, "at least one integer"),
        ({"sizes": [0, 0]}, ValueError, "nothing but zeros"),
        ({"sizes": [3, -1]}, ValueError, "between 0 and"),
        ({"sizes": [0.5]}, TypeError, "must be integers"),
        ({"sizes": [2**62] * 2}, ValueError, r"a sum below 2\*\*63"),
        ({"window_units": 0}, ValueError, "window_units must be at least 1"),
        ({"keys": [4]}, ValueError, "keys must be below 4, the sum of unit_sizes, got 4"),
        ({"keys": [-1]}, ValueError, "keys must be between 0 and"),
        ({"keys": []}, ValueError, "at least one key"),
        ({"keys": [0.5]}, TypeError, "keys must be integers"),
        ({"unit_numbers": [1]}, ValueError, "one number for each of 2 unit_sizes, got 1"),
        ({"seed": -1}, ValueError, "seed must be between"),
        ({"seed": None}, ValueError, NO_SEED),
        ({"num_epochs": 0}, ValueError, "num_epochs must be at least 1"),
        ({"shard_options": 1}, TypeError, "must be of type ShardOptions"),
        ({"window_unit": 1}, TypeError, "did you mean 'window_units'"),
    ],
    "PackingSampler": [
        ({"lengths": []}, ValueError, "at least one integer"),
        ({"lengths": [0, 0]}, ValueError, "nothing but zeros"),
        ({"lengths": [-1]}, ValueError, "between 0 and"),
        ({"lengths": [1.5]}, TypeError, "must be integers"),
        ({"row_length": 0}, ValueError, "row_length must be at least 1"),
        ({"row_length": 2**40}, ValueError, "row_length must be at most 16,777,216"),
        ({"overflow": "cut"}, ValueError, "overflow must be one of 'error', 'truncate', 'split', 'drop'"),
        ({"strategy": "worst"}, ValueError, "strategy must be"),
        ({"strategy": "concat_then_split", "overflow": "drop"}, ValueError, "takes no overflow"),
        ({"shuffle": True}, ValueError, NO_SEED),
        ({"lengths": [9], "overflow": "drop"}, ValueError, "No document is left"),
        ({"lengths": [3, 10, 25], "row_length": 10}, ValueError, r"got 25 for record 2 \(longer documents: 1\)"),
        ({"unit_sizes": [1], "window_units": 1}, ValueError, "unit_sizes must have the sum 4, .* got 1"),
        ({"window_units": 1}, ValueError, "unit_sizes must be given with window_units"),
        ({"unit_sizes": [4], "window_units": 0}, ValueError, "window_units must be at least 1"),
        ({"num_epoch": 1}, TypeError, "did you mean 'num_epochs'"),
    ],
    "MixtureSampler": [
        ({"weights": [-1]}, ValueError, "component 0 must be a number, 0 or above, got -1"),
        ({"weights": [float("nan")]}, ValueError, "got nan"),
        ({"weights": [float("inf")]}, ValueError, "got inf"),
        *(({"weights": [wrong]}, TypeError, "must be a number") for wrong in ("much", True, np.True_)),
        ({"weights": [10**400]}, ValueError, r"must be a number, 0 or above, and below 2\*\*1024, got one of"),
        ({"weights": [0]}, ValueError, "nothing but zeros"),
        ({"samplers": [THREE] * 2, "weights": [1, 2**40]}, ValueError, "would never have a turn"),
        ({"weights": [1, 2]}, ValueError, "for each of the 1 components, got 2"),
        ({"weights": 1}, TypeError, "a list of numbers, or a mapping"),
        (
            {"samplers": {"a": THREE}, "weights": {"b": 1}},
            ValueError,
            "no weight for 'a', there is no component 'b'.* pass its sampler",
        ),
        ({"samplers": [], "weights": []}, ValueError, "at least one component"),
        ({"samplers": THREE}, TypeError, "must be a list, or a mapping"),
        ({"samplers": {1: THREE}}, TypeError, "named by strings"),
        ({"samplers": [3]}, TypeError, "got int"),
        ({"samplers": [IndexSampler(2, keys=[0, 7])]}, ValueError, r"Give source_lengths=\[len\(source\), ...\]"),
        ({"samplers": [IndexSampler(3, ShardOptions(0, 2))]}, ValueError, "give shard_options to the MixtureSampler"),
        ({"samplers": [IndexSampler(2**63)] * 2, "weights": [1, 1]}, ValueError, r"2\*\*63 records at most"),
        ({"source_lengths": [3]}, ValueError, "up to 3, but source_lengths says that its source has 3"),
        *(({"source_lengths": wrong}, ValueError, "one number for each of") for wrong in ([9, 9], {"0": 9})),
        ({"batches_of": 0}, ValueError, "batches_of must be at least 1"),
        ({"stop": "never"}, ValueError, "'all_exhausted' or 'drop_exhausted', got 'never'"),
        ({"weight": [1]}, TypeError, "did you mean 'weights'"),
        ({"changes": "no"}, TypeError, "changes must be pairs"),
        ({"changes": [5]}, TypeError, r"pairs of .*, positions ascending, got \(5,\)"),
        ({"changes": [(5, [1]), (5, [2])]}, ValueError, "got position 5 after 5"),
        ({"changes": [(5, [1, 2])]}, ValueError, "one number for each of the 1 components"),
    ],
    "BucketSampler": [
        (
            {"lengths": [1, 5, 2, 7]},
            ValueError,
            r"at most 2, the last boundary, got 5 for record 1 \(longer records: 2",
        ),
        ({"lengths": [1.5]}, TypeError, "must be integers"),
        ({"lengths": []}, ValueError, "at least one integer"),
        ({"boundaries": []}, ValueError, "boundaries must be a non-empty, ascending list"),
        ({"boundaries": [4, 2]}, ValueError, "boundaries must be a non-empty, ascending list"),
        ({"boundaries": 4}, TypeError, "boundaries must be a list of integers"),
        ({"global_batch_size": 0}, ValueError, "global_batch_size must be at least 1"),
        ({"global_batch_size": 5}, ValueError, "got 5 for classes of 4 of at most 2"),
        ({"global_batch_size": "2"}, TypeError, "global_batch_size must be an integer"),
        ({"global_batch_size": [2, 2, 2, 2]}, ValueError, "must have one number for each of the .* boundaries, got 4"),
        ({"shuffle": True}, ValueError, NO_SEED),
        ({"drop_remainder": 1}, TypeError, "drop_remainder must be True or False"),
        ({"boundary": 1}, TypeError, "did you mean 'boundaries'"),
    ],
    "WeightedSampler": [
        ({"weights": []}, ValueError, r"one-dimensional array of numbers, got an array of shape \(0,\)"),
        ({"weights": np.ones((2, 2))}, ValueError, r"got an array of shape \(2, 2\)"),
        ({"weights": ["a"]}, TypeError, "weights must be numbers"),
        ({"weights": [True]}, TypeError, "weights must be numbers"),
        *(
            ({"weights": [1, wrong]}, ValueError, f"finite numbers from 0 on, got {float(wrong)} for record 1")
            for wrong in (-0.5, float("nan"), float("inf"))
        ),
        ({"weights": [0, 0]}, ValueError, "must be above 0, got nothing but zeros"),
        ({"seed": None}, ValueError, NO_SEED),
        ({"num_records": 0}, ValueError, "num_records must be at least 1"),
        ({"num_records": 1.5}, TypeError, "num_records must be an integer"),
        ({"num_epochs": 0}, ValueError, "num_epochs must be at least 1"),
        ({"weight": 1}, TypeError, "did you mean 'weights'"),
    ],
    "BalancedSampler": [
        ({"parts": 3}, ValueError, "global_batch_size must be a multiple of parts=3, got 2"),
        ({"global_batch_size": 1 << 63}, ValueError, "global_batch_size must be at most"),
        ({"costs": np.ones(3)}, ValueError, "for each record key, up to 3, got 3 numbers"),
        ({"costs": [1, -1] * 2}, ValueError, r"costs must be finite numbers from 0 on, got -1 for record 1"),
        ({"costs": ["a"] * 4}, TypeError, "costs must be numbers"),
    ],
}


@pytest.mark.parametrize(
    ("name", "options", "error", "text"), [(name, *case) for name, cases in WRONG.items() for case in cases]
)
def test_wrong_arguments_are_named(name: str, options: dict[str, Any], error: type[Exception], text: str) -> None:
    """Each wrong argument has its own error at construction, which names it, its rule and what was got."""
    with pytest.raises(error, match=text):
        SAMPLERS[name](**options)


def test_an_order_that_is_always_shuffled_requires_its_seed() -> None:
    """Without it, the constructor says which argument is missing."""
    with pytest.raises(TypeError, match=r"HierarchicalSampler: missing a required .*argument: 'seed'"):
        HierarchicalSampler([2, 2], window_units=1)  # type: ignore[call-arg]
