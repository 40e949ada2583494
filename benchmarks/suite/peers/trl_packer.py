"""TRL: makes all rows of a Hugging Face dataset before training, by best fit."""

from collections.abc import Sequence
from typing import Any, final

import datasets
import numpy as np
from numpy.typing import NDArray
from trl import pack_dataset


@final
class TrlPacker:
    """Makes rows."""

    def table(self, documents: Sequence[NDArray[Any]]) -> Any:
        return datasets.Dataset.from_dict({"input_ids": [document.astype(np.int32) for document in documents]})

    def rows(self, table: Any, row_length: int) -> int:
        """Makes all rows; returns how many there are."""
        return len(pack_dataset(table, row_length, strategy="bfd", map_kwargs={"load_from_cache_file": False}))


ADAPTER = TrlPacker()
