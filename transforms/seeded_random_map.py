"""A random operation with its own seed, independent of the sampler's."""

from typing import Any, final

from millstream.transforms.base import RandomMap


@final
class SeededRandomMap(RandomMap[Any, Any]):
    """Draws from the random streams of its own seed and operation number.

    Attributes:
        operation: the operation that draws.
        seed: the seed of its streams, 0 … 2**64 - 1.
        number: the number of random operations before it with the same seed.
    """

    def __init__(self, operation: RandomMap[Any, Any], seed: int, number: int) -> None:
        self.operation = operation
        self.seed = seed
        self.number = number

    def random_map(self, element: Any, rng: Any) -> Any:
        """Returns the operation's result for an element."""
        return self.operation.random_map(element, rng)

    def __repr__(self) -> str:
        return f"{self.operation!r}, seed={self.seed}"
