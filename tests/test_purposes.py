"""Seeds of different purposes share nothing: each derivation has a domain of its own."""

import ast
import itertools
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from millstream import MapDataset
from millstream.core.randomness import Purpose, derive_seed, derive_seeds
from millstream.samplers import (
    BucketSampler,
    HierarchicalSampler,
    IndexSampler,
    PackingSampler,
    WeightedSampler,
)

ROOT = Path(__file__).parents[1]
PARTS = ("millstream", "loader", "dataset", "samplers", "sources", "transforms", "tools")
SHARED = {
    Purpose.EPOCH: {"samplers/order.py", "samplers/mixtures/mixture.py"},
    Purpose.MIXTURE: {"loader/pipeline/elements.py", "samplers/mixtures/mixture.py"},
    Purpose.GROUPING: {"loader/pipeline/stages.py", "dataset/stream_steps.py"},
    Purpose.ROWS: {"loader/pipeline/plan.py", "dataset/grain_compat/elastic.py"},
}
"""The purposes that two modules derive a seed for, because they yield the same: an epoch, a mixture, a group, a row."""


def purposes_by_module() -> dict[str, list[str]]:
    """Returns the second argument of each call of `derive_seed` and `derive_seeds`, as source, by module."""
    found = defaultdict(list)
    for path in itertools.chain.from_iterable((ROOT / part).rglob("*.py") for part in PARTS):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("derive_seed", "derive_seeds"):
                found[path.relative_to(ROOT).as_posix()].append(ast.unparse(node.args[1]))
    return found


def test_each_derivation_names_a_purpose_that_no_other_module_has() -> None:
    """Calls name a member of Purpose, each member is used, and only those that mean the same are used twice."""
    found = purposes_by_module()
    assert found.pop("millstream/core/randomness.py") == ["purpose"]
    modules: dict[Purpose, set[str]] = defaultdict(set)
    for module, arguments in found.items():
        for argument in arguments:
            modules[Purpose[argument.removeprefix("Purpose.")]].add(module)

    assert modules.keys() == set(Purpose)
    assert {purpose: owners for purpose, owners in modules.items() if len(owners) > 1} == SHARED


def test_no_two_purposes_derive_the_same_seed() -> None:
    """From seeds and numbers beside each other, small and large: all differ, also from these."""
    seeds = np.array([*range(50), 2**63, 2**64 - 2, 2**64 - 1], np.uint64)
    numbers = np.array([*range(100), 2**32, 2**63, 2**64 - 1], np.uint64)
    derived = [derive_seeds(seeds[:, np.newaxis], purpose, numbers[np.newaxis]).ravel() for purpose in Purpose]
    every = np.concatenate([seeds, numbers[50:100], *derived])

    assert len(np.unique(every)) == len(every)


def test_the_numbers_of_purposes_never_change() -> None:
    """They are part of every stream: a new purpose has a new number."""
    assert [*Purpose] == list(range(1, len(Purpose) + 1))
    assert derive_seed(7, Purpose.EPOCH, 3) == 0xD510472E240B443E
    assert derive_seed(7, Purpose.PACKED_SEGMENTS) == 0x6BA633F003209693


NUM = 12
ORDERS = {
    "IndexSampler": IndexSampler(NUM, shuffle=True, seed=5),
    "units": HierarchicalSampler([1] * NUM, window_units=1, seed=5),
    "records of units": HierarchicalSampler([NUM], window_units=1, seed=5),
    "packed rows": PackingSampler([4] * NUM, 4, shuffle=True, seed=5),
    "batches": BucketSampler([1] * NUM, [1], global_batch_size=1, shuffle=True, seed=5),
    "batches of one class": BucketSampler([1] * NUM, [1], global_batch_size=NUM, shuffle=True, seed=5),
    "weights": WeightedSampler([1] * NUM, seed=5),
    "an epoch": IndexSampler(NUM, shuffle=True, seed=5).of_epoch(1),
}
CHAIN = MapDataset.range(NUM).seed(5)
CHAINS = {
    "window shuffle": CHAIN.window_shuffle(NUM),
    "later window shuffle": CHAIN.window_shuffle(NUM).window_shuffle(NUM),
    "later shuffle": CHAIN.shuffle().shuffle(),
}


@pytest.mark.parametrize("epoch", [0, 1])
def test_no_two_orders_of_one_seed_are_the_same(epoch: int) -> None:
    """Whatever shuffles the same number of things with the same seed has an order of its own."""
    start, stop = epoch * NUM, epoch * NUM + NUM
    found = {name: tuple(sampler.endless().record_keys(start, stop)) for name, sampler in ORDERS.items()}
    found |= {name: tuple(list(dataset.repeat(2))[epoch * NUM :][:NUM]) for name, dataset in CHAINS.items()}

    assert len(set(found.values())) == len(found)
    assert MapDataset.range(NUM).shuffle(seed=5)[0] == ORDERS["IndexSampler"].record_keys(0, 1)[0]
