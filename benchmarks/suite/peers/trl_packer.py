"""TRL: makes all rows of a Hugging Face dataset before training, by best fit."""

from collections.abc import Sequence
from typing import Any, final

import datasets
import numpy as np
from numpy.typing import NDArray
from trl import pack_dataset

from suite.case import Contender, UnsupportedError
from suite.peers.base import Stream, no_sampler
from suite.work import Work


@final
class TrlPacker:
    """Makes rows."""

    sample_keys = staticmethod(no_sampler)

    def open(self, _work: Work, _contender: Contender) -> Stream:
        """Raises: it takes part where all rows are made at once."""
        raise UnsupportedError("it makes rows before training only")

    def table(self, documents: Sequence[NDArray[Any]]) -> Any:
        """Returns the documents as it takes them."""
        return datasets.Dataset.from_dict({"input_ids": [document.astype(np.int32) for document in documents]})

    def rows(self, table: Any, row_length: int) -> int:
        """Makes all rows; returns how many there are."""
        return len(pack_dataset(table, row_length, strategy="bfd", map_kwargs={"load_from_cache_file": False}))


ADAPTER = TrlPacker()
