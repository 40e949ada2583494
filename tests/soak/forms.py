"""The forms of courses of the soak besides records in one order: other samplers, documents, rows and groupings."""

import dataclasses
import random
import sys
from typing import Any

import cloudpickle
import numpy as np

import millstream
from millstream.transforms import (
    BestFitPack,
    BucketBatch,
    ConcatThenSplit,
    Filter,
    FirstFitPack,
    FlatMap,
    Map,
    Pack,
    Rebatch,
    TokenBudgetBatch,
    Transformation,
    WindowShuffle,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROW_LENGTH, LONGEST = 16, 7


@dataclasses.dataclass(frozen=True)
class Document(Map):
    """Makes a document of a number, as long as that says."""

    feature: str = "tokens"

    def map(self, element: Any) -> Any:
        return {self.feature: np.full(length_of(int(element)), element, np.int64)}


class KeepSome(Filter):
    """Drops rows and batches, as many as their first number says."""

    def filter(self, element: Any) -> bool:
        return bool(next(iter(element.values())).ravel()[0] % 3)


class CopySome(FlatMap):
    """Makes up to two rows or batches of one."""

    max_fan_out = 2

    def flat_map(self, element: Any) -> list[Any]:
        return [element] * int(next(iter(element.values())).ravel()[0] % 3)


def length_of(number: int) -> int:
    return 1 + number % LONGEST


def hierarchical(chance: random.Random, size: int, num_epochs: int) -> millstream.HierarchicalSampler:
    ends = sorted(chance.choices(range(size + 1), k=chance.randrange(6)))
    return millstream.HierarchicalSampler(
        np.diff([0, *ends, size]),
        keys=chance.choice([None, chance.choices(range(size), k=size)]),
        window_units=chance.randrange(1, 4),
        seed=chance.getrandbits(64),
        num_epochs=num_epochs,
    )


def weighted(chance: random.Random, size: int, num_epochs: int) -> millstream.WeightedSampler:
    def weights() -> list[float]:
        return [chance.choice([0, 1, chance.random()]) for _ in range(size - 1)] + [1]

    sampler = millstream.WeightedSampler(weights(), seed=chance.getrandbits(64), num_epochs=num_epochs)
    return sampler.reweighted(chance.randrange(sampler.length or 1), weights())


def buckets(chance: random.Random, size: int, batch: int | list[int], num_epochs: int) -> millstream.BucketSampler:
    """Returns an order of global batches of one class each."""
    lengths = [length_of(number) for number in range(size)]
    bounds, seed = [LONGEST // 2, LONGEST], chance.getrandbits(64)
    return millstream.BucketSampler(
        lengths, bounds, global_batch_size=batch, seed=seed, shuffle=True, num_epochs=num_epochs, drop_remainder=False
    )


def balanced(chance: random.Random, order: Any, size: int, batch: int) -> millstream.BalancedSampler:
    """Returns an order whose global batches are dealt to parts of equal cost."""
    parts = chance.choice([count for count in (1, 2, 3, 4) if batch % count == 0])
    costs = [length_of(number) ** 2 for number in range(size)]
    return millstream.BalancedSampler(order, costs=costs, global_batch_size=batch, parts=parts)


def mixture(chance: random.Random, size: int, num_epochs: int) -> millstream.MixtureSampler:
    """Returns a mixture of the parts of a source, at least two records, with other weights from some positions on."""
    ends = sorted(chance.sample(range(1, size), k=min(size - 1, chance.randrange(1, 4))))
    lengths = np.diff([0, *ends, size]).tolist()

    def component(length: int) -> Any:
        if chance.random() < 0.5:
            return chance.choice([hierarchical, weighted])(chance, length, num_epochs)
        return millstream.IndexSampler(length, shuffle=True, num_epochs=num_epochs, seed=chance.getrandbits(64))

    def weights() -> list[int]:
        return [chance.randrange(1, 5) for _ in lengths]

    stop = chance.choice(["first_exhausted", "all_exhausted", "drop_exhausted"])
    samplers = {f"part {number}": component(length) for number, length in enumerate(lengths)}
    by_name = dict(zip(samplers, lengths, strict=True))
    # The last component may join later.
    count = len(lengths) - chance.randrange(2) if len(lengths) > 1 else 1
    first = dict(list(samplers.items())[:count])
    sampler = millstream.MixtureSampler(
        first, weights()[:count], source_lengths={name: by_name[name] for name in first}, stop=stop
    )
    if count < len(lengths):
        position = chance.randrange(len(sampler))
        sampler = sampler.reweighted(position, weights(), samplers=samplers, source_lengths=by_name)
    for position in sorted(chance.randrange(len(sampler)) for _ in range(chance.randrange(3))):
        if position < len(sampler):
            sampler = sampler.reweighted(position, weights())
    return sampler


def packing(chance: random.Random, size: int, num_epochs: int) -> millstream.PackingSampler:
    lengths = [length_of(number) for number in range(size)]
    strategy = chance.choice(["best_fit", "concat_then_split"])
    return millstream.PackingSampler(
        lengths, ROW_LENGTH, seed=chance.getrandbits(64), num_epochs=num_epochs, strategy=strategy, shuffle=True
    )


def rows() -> tuple[Transformation, ...]:
    """Returns the operations that make the rows of `packing` from numbers."""
    return Document(), Pack({"tokens": ROW_LENGTH})


def grouping(chance: random.Random) -> tuple[tuple[Transformation, ...], bool]:
    """Returns operations that group numbers as they come, and whether what they make can be batched."""
    length = {"tokens": ROW_LENGTH}
    most = chance.choice([None, 3])
    operations: list[tuple[Transformation, bool]] = [
        (FirstFitPack(length, num_packing_bins=chance.choice([1, 4]), max_sequences_per_bin=most), True),
        (BestFitPack(length, num_packing_bins=chance.choice([1, 4]), max_sequences_per_bin=most), True),
        (ConcatThenSplit(length), True),
        (TokenBudgetBatch(chance.choice([LONGEST, 40]), "tokens"), False),
        (BucketBatch([3, LONGEST], [chance.choice([6, 8]), 4], "tokens", window_size=chance.choice([8, 50])), False),
        (Rebatch(chance.choice([1, 4, 9])), False),
    ]
    operation, has_one_shape = chance.choice(operations)
    shuffle = [WindowShuffle(chance.choice([2, 10]), chance.getrandbits(32))] * (chance.random() < 0.3)
    document = Document("x" if isinstance(operation, Rebatch) else "tokens")
    after: tuple[Transformation, ...] = chance.choice([(), (KeepSome(),), (CopySome(),), (CopySome(), KeepSome())])
    return (*shuffle, document, operation, *after), has_one_shape
