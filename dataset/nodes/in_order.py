"""The order in which a chain reads its MapDataset: by position."""

import dataclasses
from typing import ClassVar, final

import numpy as np
from numpy.typing import NDArray

from millstream.record import RecordMetadata
from millstream.samplers.base import check_range


@final
@dataclasses.dataclass(frozen=True)
class InOrder:
    """A sampler whose record key at each position is the position.

    Attributes:
        length: the number of positions; None if there is no end.
        num_records: the number of positions per epoch; None if there are no epochs.
    """

    seed: ClassVar[None] = None
    length: int | None
    num_records: int | None

    def fingerprint(self) -> str:
        """Returns the constant that identifies this order."""
        return "in order"

    def __repr__(self) -> str:
        return "in order, endless" if self.length is None else f"in order, {self.length:,} positions"

    def __getitem__(self, position: int) -> RecordMetadata:
        check_range(position, position + 1, self.length)
        return RecordMetadata(position, position, None)

    def record_keys(self, start: int, stop: int) -> NDArray[np.int64]:
        """Returns the positions [start, stop)."""
        check_range(start, stop, self.length)
        return np.arange(start, stop, dtype=np.int64)

    def record_keys_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the positions."""
        return positions
