"""Chains in the soak: the operations of a course said with MapDataset and IterDataset, alone or in a mixture."""

import dataclasses
import random
from typing import Any, Self

import millstream
from millstream.transforms import Transformation

KINDS = ["one", "one", "mixed at random", "mixed streams"]


@dataclasses.dataclass(frozen=True)
class ChainForm:
    """The operations of a course as a chain.

    Attributes:
        kind: one chain; several datasets mixed before they are read in order; or several streams mixed.
        ends: where the parts of the source end, if there are several.
        weights: how much of each is mixed.
        seed: that of the shuffles and of what is random.
        num_epochs: how often each part comes.
        is_late: whether operations that may drop elements come after the mixing of streams.
    """

    kind: str
    ends: tuple[int, ...]
    weights: tuple[int, ...]
    seed: int
    num_epochs: int
    is_late: bool

    @classmethod
    def of(cls, chance: random.Random, size: int, num_epochs: int) -> Self:
        """Returns any form, for a source of at least one record."""
        kind = chance.choice(KINDS) if size > 2 else "one"
        ends = [size] if kind == "one" else sorted({*chance.sample(range(1, size), k=chance.randrange(1, 3)), size})
        weights = tuple(chance.randrange(1, 5) for _ in ends)
        return cls(kind, tuple(ends), weights, chance.getrandbits(64), num_epochs, chance.random() < 0.5)

    def dataset(
        self,
        source: Any,
        first: Transformation,
        following: tuple[Transformation, ...],
        last: tuple[Transformation, ...],
        reading: millstream.ReadOptions,
    ) -> millstream.IterDataset[Any]:
        """Returns the chain.

        Args:
            source: the records.
            first: what is done with each where it is read at random.
            following: what is done with the elements that come of it, which may be dropped.
            last: what is done after all mixing.
            reading: the threads.
        """
        starts = (0, *self.ends[:-1])
        whole = millstream.MapDataset.source(source).seed(self.seed)
        parts = [
            whole[start:end].shuffle().repeat(self.num_epochs).apply(first)
            for start, end in zip(starts, self.ends, strict=True)
        ]
        before, after = ((), (*following, *last)) if self.is_late else (following, last)
        if self.kind == "mixed streams":
            streams = [applied(part.to_iter_dataset(reading), before) for part in parts]
            return applied(millstream.IterDataset.mix(streams, self.weights).seed(self.seed), after)
        mixed = parts[0] if self.kind == "one" else millstream.MapDataset.mix(parts, self.weights)
        return applied(mixed.to_iter_dataset(reading), (*following, *last))


def applied(
    dataset: millstream.IterDataset[Any], operations: tuple[Transformation, ...]
) -> millstream.IterDataset[Any]:
    for operation in operations:
        dataset = dataset.apply(operation)
    return dataset
