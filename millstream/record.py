"""The metadata of one position in a sampler's order."""

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class RecordMetadata:
    """One position of a sampler's order.

    Attributes:
        index: the position, counted from 0 over all epochs.
        record_key: the record's key in the source, 0 … len(source) - 1; None if there is none, which a loader refuses.
        rng: the random generator of this position, or None if the sampler has no seed.

    Examples:
        >>> millstream.IndexSampler(5)[7]
        RecordMetadata(index=7, record_key=2, rng=None)
        >>> millstream.IndexSampler(5, seed=0)[7].rng.random()
        0.6082488753633517
    """

    index: int
    record_key: int = None  # type: ignore[assignment]  # only code for Grain leaves it out
    rng: "np.random.Generator | None" = None
