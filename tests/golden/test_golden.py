"""Streams, states and public parameters of release 0.2.0, stored as files: every later release has the same.

Which batches come for given arguments is a promise, and all other tests compare the product with an oracle that uses
the product's random numbers. These files do not change. A new case prints its value when its entry is missing.
"""

import enum
import functools
import importlib
import inspect
import itertools
import json
import operator
import re
import runpy
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream
from millstream import transforms
from millstream.experimental import WindowShuffleIterDataset, WindowShuffleMapDataset
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
from millstream.transforms import (
    Batch,
    BestFitPack,
    BucketBatch,
    ConcatThenSplit,
    Filter,
    FirstFitPack,
    FlatMap,
    Map,
    MapWithIndex,
    OnlyFor,
    Pack,
    PackAndBatchOperation,
    PadTo,
    RandomMap,
    Rebatch,
    TokenBudgetBatch,
    Transformation,
    WindowShuffle,
    WithComponent,
)
from support.draw.orders import public_samplers

STREAMS = json.loads(Path(__file__).with_name("streams.json").read_text())
STATES = json.loads(Path(__file__).with_name("states.json").read_text())
NUM_VALUES = 100
"""The number of values of a stream that are stored."""
LENGTHS = [1 + (7 * key) % 11 for key in range(40)]
"""The lengths of the documents: all from 1 to 11, in a fixed order."""
ROWS = {"tokens": 16}


class Documents:
    """Documents whose tokens are their record key."""

    def __len__(self) -> int:
        return len(LENGTHS)

    def __getitem__(self, key: int) -> dict[str, Any]:
        return {"tokens": np.full(LENGTHS[key], key, np.int32)}


def add_draw(element: int, rng: np.random.Generator) -> int:
    """Returns the element and a random number below 1,000 beside it."""
    return 1000 * element + int(rng.integers(1000))


def add_index(index: int, element: int) -> int:
    return 1000 * element + index


def is_odd(element: int) -> bool:
    return element % 2 == 1


def split(element: int) -> list[int]:
    return [element] * (element % 3)


def numbers_in(element: Any) -> list[int]:
    """Returns all numbers in an element, in order."""
    if isinstance(element, dict | tuple):
        leaves = element.values() if isinstance(element, dict) else element
        return [number for leaf in leaves for number in numbers_in(leaf)]
    return [int(number) for number in np.ravel(element)]


def values_of(elements: Iterable[Any]) -> list[int]:
    """Returns the first numbers in the elements of a stream."""
    return list(itertools.islice(itertools.chain.from_iterable(map(numbers_in, elements)), NUM_VALUES))


def keys_of(sampler: Any, start: int = 0, count: int = NUM_VALUES) -> list[int]:
    return [int(key) for key in sampler.record_keys(start, start + count)]


def numbers(*operations: Transformation, num_records: int = 50, **options: Any) -> millstream.DataLoader:
    sampler = IndexSampler(
        num_records, shuffle=True, seed=11, num_epochs=2, shard_options=options.pop("shard", NO_SHARD)
    )
    return millstream.DataLoader(data_source=range(num_records), sampler=sampler, operations=operations, **options)


def documents(*operations: Transformation) -> millstream.DataLoader:
    sampler = IndexSampler(len(LENGTHS), shuffle=True, seed=12, num_epochs=2)
    return millstream.DataLoader(data_source=Documents(), sampler=sampler, operations=operations)


def mixture(stop: str) -> MixtureSampler:
    components = {
        "a": IndexSampler(30, shuffle=True, seed=1, num_epochs=1),
        "b": IndexSampler(70, shuffle=True, seed=2, num_epochs=1),
    }
    return MixtureSampler(components, {"a": 0.6, "b": 0.4}, stop=stop)


def packed_rows(**options: Any) -> list[int]:
    """Returns the values of rows that are packed in advance."""
    sampler = PackingSampler(LENGTHS, 16, **{"shuffle": True, "seed": 3, "num_epochs": 1, **options})
    return values_of(millstream.DataLoader(data_source=Documents(), sampler=sampler, operations=[Pack(ROWS)]))


NO_SHARD = ShardOptions(0, 1)
SHARD = ShardOptions(1, 3)
CASES: dict[str, Callable[[], list[int]]] = {
    "IndexSampler of 48": lambda: keys_of(IndexSampler(48, shuffle=True, seed=7)),
    "IndexSampler of 2": lambda: keys_of(IndexSampler(2, shuffle=True, seed=7)),
    "IndexSampler of 10**12": lambda: keys_of(IndexSampler(10**12, shuffle=True, seed=7), 10**9),
    "IndexSampler, a large seed": lambda: keys_of(IndexSampler(1000, shuffle=True, seed=2**63 + 5)),
    "IndexSampler of keys": lambda: keys_of(IndexSampler(9, keys=range(20, 29), shuffle=True, seed=7)),
    "SequentialSampler": lambda: keys_of(SequentialSampler(1000)),
    "HierarchicalSampler": lambda: keys_of(HierarchicalSampler([5, 9, 2, 7, 7, 8, 1], window_units=3, seed=7)),
    "HierarchicalSampler of keys": lambda: keys_of(
        HierarchicalSampler([5, 9, 2, 7], window_units=2, seed=7, keys=[22, 3, 8, 17, 5, 0, 21, 13, 8])
    ),
    "MixtureSampler, first_exhausted": lambda: keys_of(mixture("first_exhausted"), count=50),
    "MixtureSampler, second epochs": lambda: keys_of(
        MixtureSampler([IndexSampler(4, shuffle=True, seed=1), IndexSampler(9, shuffle=True, seed=2)], [1, 2])
    ),
    "BucketSampler": lambda: keys_of(
        BucketSampler(LENGTHS, [4, 8, 12], global_batch_size=4, seed=7, shuffle=True, drop_remainder=False)
    ),
    "MixtureSampler, batches_of": lambda: keys_of(
        MixtureSampler(
            [IndexSampler(9, shuffle=True, seed=1), IndexSampler(7, shuffle=True, seed=2)], [2, 1], batches_of=4
        )
    ),
    "WeightedSampler": lambda: keys_of(
        WeightedSampler([5, 0, 1, 0.25, 3], seed=7, num_records=20).reweighted(30, [1, 1, 1, 1, 0])
    ),
    "BalancedSampler": lambda: keys_of(
        BalancedSampler(IndexSampler(48, shuffle=True, seed=7), costs=np.arange(48) ** 2, global_batch_size=16, parts=4)
    ),
    "PackingSampler, Pack": packed_rows,
    "PackingSampler in order": lambda: packed_rows(shuffle=False),
    "Batch": lambda: values_of(numbers(Batch(5))),
    "shard": lambda: values_of(numbers(Batch(5), shard=SHARD)),
    "Map, MapWithIndex": lambda: values_of(numbers(Map(operator.neg), MapWithIndex(add_index))),
    "OnlyFor": lambda: values_of(
        millstream.load(
            {"a": range(30), "b": range(50)},
            weights=[1, 1],
            shuffle=True,
            seed=6,
            transformations=[OnlyFor("b", operator.neg)],
        )
    ),
    "WithComponent": lambda: values_of(
        millstream.load(
            {"a": [{"key": key} for key in range(30)], "b": [{"key": key} for key in range(50)]},
            weights=[2, 1],
            shuffle=True,
            seed=6,
            transformations=[WithComponent("corpus")],
        )
    ),
    "PadTo": lambda: values_of(documents(PadTo({"tokens": 11}))),
    "PadTo of boundaries": lambda: values_of(documents(PadTo([4, 8, 12], feature="tokens", mask=True))),
    "PackAndBatchOperation": lambda: values_of(documents(PackAndBatchOperation(ROWS, batch_size=2))),
    "Rebatch": lambda: values_of(numbers(Batch(5), Rebatch(7))),
    "RandomMap": lambda: values_of(numbers(RandomMap(add_draw), RandomMap(add_draw))),
    "Filter, RandomMap": lambda: values_of(numbers(Filter(is_odd), RandomMap(add_draw), Batch(4))),
    "FlatMap, RandomMap": lambda: values_of(numbers(FlatMap(split, max_fan_out=2), RandomMap(add_draw))),
    "WindowShuffle": lambda: values_of(numbers(WindowShuffle(8))),
    "WindowShuffle, seed": lambda: values_of(numbers(WindowShuffle(8, seed=5))),
    "FirstFitPack": lambda: values_of(documents(FirstFitPack(ROWS, num_packing_bins=3, seed=4))),
    "FirstFitPack, seed of the pipeline": lambda: values_of(documents(FirstFitPack(ROWS, num_packing_bins=3))),
    "BestFitPack": lambda: values_of(documents(BestFitPack(ROWS, num_packing_bins=3, seed=4))),
    "ConcatThenSplit": lambda: values_of(documents(ConcatThenSplit(ROWS))),
    "BucketBatch": lambda: values_of(documents(BucketBatch([4, 8, 12], [4, 3, 2], "tokens", window_size=16))),
    "TokenBudgetBatch": lambda: values_of(documents(TokenBudgetBatch(24, "tokens"))),
    "load": lambda: values_of(
        millstream.load({"a": range(30), "b": range(70)}, weights={"a": 3, "b": 1}, shuffle=True, seed=0)
    ),
    "MapDataset.shuffle": lambda: values_of(millstream.MapDataset.range(50).seed(9).shuffle()),
    "MapDataset.shuffle, seed": lambda: values_of(millstream.MapDataset.range(50).shuffle(seed=9).repeat(2)),
    "MapDataset.random_map": lambda: values_of(millstream.MapDataset.range(50).seed(9).random_map(add_draw)),
    "MapDataset.mix": lambda: values_of(
        millstream.MapDataset.mix([millstream.MapDataset.range(30), millstream.MapDataset.range(100, 160)], [1, 3])
    ),
    "WindowShuffleMapDataset": lambda: values_of(
        WindowShuffleMapDataset(millstream.MapDataset.range(60), window_size=7, seed=9)
    ),
    "WindowShuffleIterDataset": lambda: values_of(
        WindowShuffleIterDataset(millstream.MapDataset.range(60).to_iter_dataset(), window_size=7, seed=9)
    ),
    "IterDataset.random_map": lambda: values_of(
        millstream.MapDataset.range(90).seed(9).to_iter_dataset().filter(is_odd).random_map(add_draw)
    ),
    "IterDataset.mix": lambda: values_of(
        millstream.IterDataset.mix(
            [
                millstream.MapDataset.range(30).shuffle(seed=1).to_iter_dataset(),
                millstream.MapDataset.range(100, 160).to_iter_dataset(),
            ],
            [1, 3],
        )
    ),
}


class SevensIterator(millstream.DatasetIterator[int]):
    """A user's iterator, whose state is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __next__(self) -> int:
        self.number += 1
        return 7 * self.number

    def get_state(self) -> dict[str, Any]:
        """Returns the number of elements, in a list."""
        return {"numbers": [self.number]}

    def set_state(self, state: dict[str, Any]) -> None:
        """Takes the number of elements."""
        (self.number,) = state["numbers"]


class Sevens(millstream.IterDataset[int]):
    """Multiples of seven, from a user's iterator."""

    def __iter__(self) -> Any:
        return SevensIterator()


def shuffled(start: int = 0) -> millstream.MapDataset[int]:
    return millstream.MapDataset.range(start, start + 50).seed(9).shuffle()


def stream(start: int = 0) -> millstream.IterDataset[int]:
    return shuffled(start).to_iter_dataset()


LOADERS: dict[str, Callable[[], millstream.DataLoader]] = {
    "1:1": lambda: numbers(Batch(5)),
    "shard": lambda: numbers(Batch(5), shard=SHARD),
    "Filter": lambda: numbers(Filter(is_odd), Batch(5)),
    "FlatMap": lambda: numbers(FlatMap(split, max_fan_out=2), Batch(5)),
    "WindowShuffle": lambda: numbers(WindowShuffle(8), Batch(5)),
    "FirstFitPack": lambda: documents(FirstFitPack(ROWS, num_packing_bins=3), Batch(2)),
    "BucketBatch": lambda: documents(BucketBatch([4, 8, 12], [4, 3, 2], "tokens", window_size=16)),
    "mixture": lambda: millstream.DataLoader(
        data_source=range(100), sampler=mixture("all_exhausted"), operations=[Batch(4)]
    ),
    "RandomMap, MapWithIndex": lambda: numbers(RandomMap(add_draw), MapWithIndex(add_index), Batch(4)),
    "logical shards": lambda: millstream.DataLoader(
        data_source=range(50),
        sampler=IndexSampler(50, shuffle=True, seed=11, shard_options=ShardOptions(1, 2, logical_shards=4)),
        operations=[Filter(is_odd), Batch(2)],
    ),
}
CHAINS: dict[str, Callable[[], Any]] = {
    "read": lambda: shuffled().map(operator.neg).to_iter_dataset().batch(4),
    "filter, random_map, batch": lambda: stream().seed(3).filter(is_odd).random_map(add_draw).batch(4),
    "flat_map, window_shuffle": lambda: stream().flat_map(split, max_fan_out=2).window_shuffle(8, seed=5),
    "mix": lambda: millstream.IterDataset.mix([stream(), stream(100)], [1, 3]).map(operator.neg).batch(4),
    "mix of names and a filter": lambda: millstream.IterDataset.mix(
        {"a": stream().filter(is_odd), "b": stream(100)}, {"a": 1, "b": 2}
    ),
    "zip of a stream of the user": lambda: stream().zip(Sevens(), strict=False),
    "interleave": lambda: millstream.IterDataset.interleave([stream(), stream(100), stream(200)], cycle_length=2),
    "repeat of cache of skip": lambda: stream().filter(is_odd).skip(20).cache().repeat(4).batch(3),
    "take of a counted stream": lambda: millstream.IterDataset.source(range(60)).map(operator.neg).take(40),
    "repeat of a mix of a zip": lambda: millstream.IterDataset.mix([stream().zip(stream(100)), stream(200)]).repeat(),
}
NUM_BEFORE = 3
"""The number of batches or elements before a golden state, and of those after it that are stored."""


@pytest.mark.parametrize("name", CASES)
def test_orders_draws_and_packers_are_those_of_the_release(name: str) -> None:
    """The first values of each stream are the stored ones."""
    assert CASES[name]() == STREAMS.get(name)


def test_every_public_sampler_and_operation_has_a_golden_stream() -> None:
    """Each class that users name in `millstream.samplers` and `millstream.transforms` occurs in the name of a case."""
    named = {name for case in CASES for name in re.findall(r"\w+", case)} | {"Transformation"}
    public = [getattr(transforms, name) for name in transforms.__all__]
    operations = {each.__name__ for each in public if isinstance(each, type) and issubclass(each, Transformation)}

    assert (operations | public_samplers().keys()) - named == set()


PIPELINES: dict[str, Callable[[], Any]] = {
    **{f"loader: {name}": build for name, build in LOADERS.items()},
    **{f"chain: {name}": build for name, build in CHAINS.items()},
}


def saved(name: str) -> dict[str, Any]:
    """Returns the state of a pipeline after some batches as text, and the numbers in the batches after it."""
    with iter(PIPELINES[name]()) as iterator:
        for _ in range(NUM_BEFORE):
            next(iterator)
        state = iterator.get_state()
        text = state.decode() if isinstance(state, bytes) else json.dumps(state)
        return {"state": text, "following": [values_of([next(iterator)]) for _ in range(NUM_BEFORE)]}


@pytest.mark.parametrize("name", PIPELINES)
def test_states_of_the_release_resume(name: str) -> None:
    """A state that release 0.2.0 saved after three batches is accepted, and the stored batches follow."""
    assert name in STATES, json.dumps({name: saved(name)}, indent=2)
    text = STATES[name]["state"]
    with iter(PIPELINES[name]()) as resumed:
        resumed.set_state(text.encode() if name.startswith("loader") else json.loads(text))
        assert [values_of([next(resumed)]) for _ in range(NUM_BEFORE)] == STATES[name]["following"]


STORED = Path(__file__).with_name("parameters.json")
MEMBERS = Path(__file__).parents[2] / "docs/programs/library_members.py"
OWNERS = {"DataLoader", "DataLoaderIterator", "DatasetIterator", "DeviceIterator", "IterDataset", "MapDataset"}
"""The classes whose methods and properties are stored, too."""
FOR_THE_LIBRARY = runpy.run_path(str(MEMBERS))["FOR_THE_LIBRARY"]


def public_parameters() -> dict[str, str]:
    """Returns the parameters of every public class, function and method, and the members of enums."""
    parts = ["", ".dataset", ".experimental", ".loader", ".samplers", ".sources", ".testing", ".tools", ".transforms"]
    found: dict[str, str] = {}
    for module in (importlib.import_module(f"millstream{part}") for part in parts):
        for name in module.__all__:
            if name == "checkpoint":  # Orbax, which tests of its own import
                continue
            value = getattr(module, name)
            key = f"{module.__name__}.{name}"
            if inspect.isclass(value) and issubclass(value, enum.Enum):
                # The parameters of its constructor are those of the version of Python.
                found[key] = ", ".join(value.__members__)
            elif inspect.isfunction(value) or (inspect.isclass(value) and not issubclass(value, Exception)):
                found[key] = ", ".join(inspect.signature(value).parameters)
                if isinstance(value, type) and name in OWNERS and module is millstream:
                    found |= {f"{key}.{member}": parameters for member, parameters in members_of(value).items()}
    return found


def members_of(owner: type) -> dict[str, str]:
    """Returns the parameters of the documented methods of a class, without `self`; a property has none."""
    found = {}
    for name in dir(owner):
        member = inspect.getattr_static(owner, name)
        member = getattr(member, "__func__", member)  # of a class method or static method
        if (
            name.startswith("_")
            or not {name, f"{owner.__name__}.{name}"}.isdisjoint(FOR_THE_LIBRARY)
            or not inspect.getdoc(member)
        ):
            continue
        if inspect.isfunction(member):
            found[name] = ", ".join(
                each for each in inspect.signature(member).parameters if each not in ("self", "cls")
            )
        elif isinstance(member, property | functools.cached_property):
            found[name] = ""
    return found


def test_public_names_keep_their_parameters() -> None:
    """Each stored name exists and has its stored parameters. Names and parameters may have been added."""
    today = public_parameters()

    for name, parameters in json.loads(STORED.read_text()).items():
        assert name in today
        assert {*parameters.split(", ")} <= {*today[name].split(", "), ""}, name


def draw(file: str, values: dict[str, Any]) -> None:
    """Writes the values of this version, for a release that may change them."""
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in values.items()]
    Path(__file__).with_name(file).write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["streams"]:
            draw("streams.json", {name: case() for name, case in CASES.items()})
        case ["states"]:
            draw("states.json", {name: saved(name) for name in PIPELINES})
        case _:
            STORED.write_text(json.dumps(public_parameters(), indent=2) + "\n")
