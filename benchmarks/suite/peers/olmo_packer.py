"""OLMo-core: plans rows from the places of documents in files, by best fit. It lays nothing out."""

from typing import Any, final

import numpy as np
from numpy.typing import NDArray
from olmo_core.data.utils import InstancePacker

from suite.case import Contender, UnsupportedError
from suite.peers.base import Stream, no_sampler
from suite.work import Work


@final
class OlmoPacker:
    """Plans rows."""

    sample_keys = staticmethod(no_sampler)

    def open(self, _work: Work, _contender: Contender) -> Stream:
        """Raises: it takes part where a plan is made."""
        raise UnsupportedError("only its plan is measured")

    def plan(self, lengths: NDArray[np.integer[Any]], row_length: int) -> int:
        """Plans rows of documents of these lengths; returns how many rows there are."""
        ends = np.cumsum(lengths)
        places = np.stack([ends - lengths, ends], axis=1)
        instances, *_ = InstancePacker(row_length).pack_documents(places)
        return len(instances)


ADAPTER = OlmoPacker()
