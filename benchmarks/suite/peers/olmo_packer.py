"""OLMo-core: plans rows from the places of documents in files, by best fit. It lays nothing out."""

from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from olmo_core.data.utils import InstancePacker


@final
class OlmoPacker:
    """Plans rows."""

    def plan(self, lengths: NDArray[np.integer[Any]], row_length: int) -> int:
        """Plans rows of documents of these lengths; returns how many rows there are."""
        ends = np.cumsum(lengths)
        places = np.stack([ends - lengths, ends], axis=1)
        instances, *_ = InstancePacker(row_length).pack_documents(places)
        return len(instances)


ADAPTER = OlmoPacker()
