"""A random operation with a seed of its own, whatever the sampler's is."""

from typing import Any, final

from millstream.transforms.base import RandomMap


@final
class SeededRandomMap(RandomMap[Any, Any]):
    """Draws from the streams of one seed, under one number.

    Attributes:
        operation: what draws.
        seed: of its streams, 0 … 2**64 - 1.
        number: how many random operations come before it under this seed.
    """

    def __init__(self, operation: RandomMap[Any, Any], seed: int, number: int) -> None:
        self.operation = operation
        self.seed = seed
        self.number = number

    def random_map(self, element: Any, rng: Any) -> Any:
        """Returns what the operation makes of an element."""
        return self.operation.random_map(element, rng)

    def __repr__(self) -> str:
        return f"{self.operation!r}, seed={self.seed}"
