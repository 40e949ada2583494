"""Hugging Face `datasets`: files made into an Arrow table once, of which it takes shuffled batches; or streamed.

It shuffles the whole table by a list of indices, and what it streams through a buffer. It has no worker processes.
"""

from collections.abc import Iterator
from typing import Any, final

import datasets
import numpy as np

from suite import data
from suite.case import Contender, UnsupportedError
from suite.peers.bare_loop import stacked
from suite.peers.base import Stream, no_sampler
from suite.work import SEED, Files, Work, apply_to_many

BUILDERS = {"text": "text", "json_lines": "json", "csv": "csv"}

SHUFFLE_BUFFER = 10_000
"""Records that are streamed are shuffled within this many of them, as tf.data's are."""


@final
class HuggingfaceAdapter:
    """Opens a `Dataset` or, in the mode "streamed", an `IterableDataset`."""

    sample_keys = staticmethod(no_sampler)

    def open(self, work: Work, contender: Contender) -> Stream:
        """Returns a new stream."""
        if not isinstance(work.source, Files) or work.source.format not in BUILDERS:
            raise UnsupportedError("it is compared on text, JSON and CSV files only")
        datasets.disable_progress_bars()
        dataset = datasets.load_dataset(
            BUILDERS[work.source.format],
            data_files=list(work.source.paths),
            split="train",
            cache_dir=str(data.FOLDER / "huggingface"),
            streaming=contender.mode == "streamed",
        )
        return Stream(_batches(work, dataset, streamed=contender.mode == "streamed"))


ADAPTER = HuggingfaceAdapter()


def _batches(work: Work, dataset: Any, *, streamed: bool) -> Iterator[Any]:
    buffer = {"buffer_size": SHUFFLE_BUFFER} if streamed else {}
    rng = np.random.default_rng(SEED)
    epoch = 0
    while epoch == 0 or not work.one_epoch:
        for columns in dataset.shuffle(seed=SEED + epoch, **buffer).iter(work.batch_size):
            yield stacked(apply_to_many(work.steps, _records(columns), rng))
        epoch += 1


def _records(columns: dict[str, list[Any]]) -> list[Any]:
    if list(columns) == ["text"]:
        return columns["text"]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
