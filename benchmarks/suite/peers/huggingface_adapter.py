"""Hugging Face `datasets`: files made into an Arrow table once, of which it takes shuffled batches; or streamed.

It shuffles the whole table by a list of indices, and what it streams through a buffer. It has no worker processes.
Where its own files are the source, a batch is `dataset[list of keys]`: Python objects, NumPy arrays, or an Arrow table
whose columns become arrays.
"""

from collections.abc import Iterator
from typing import Any, final

import datasets
import numpy as np

from suite import data
from suite.case import Contender, UnsupportedError
from suite.peers.bare_loop import stacked
from suite.peers.base import Stream, huggingface_dataset
from suite.tables import arrays_of_table
from suite.work import SEED, Files, Work, apply_to_many

BUILDERS = {"text": "text", "json_lines": "json", "csv": "csv"}

SHUFFLE_BUFFER = 10_000
"""Records that are streamed are shuffled within this many of them, as tf.data's are."""


@final
class HuggingfaceAdapter:
    """Opens a `Dataset` or, in the mode "streamed", an `IterableDataset`."""

    def open(self, work: Work, contender: Contender) -> Stream:
        if isinstance(work.source, Files) and work.source.format == "arrow":
            return Stream(_by_keys(work, huggingface_dataset(work.source), contender.mode))
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


def _by_keys(work: Work, dataset: Any, mode: str) -> Iterator[Any]:
    size = work.batch_size or 1
    dataset = dataset if mode == "Python" else dataset.with_format(mode.lower())
    rng = np.random.default_rng(SEED)
    while True:
        order = rng.permutation(len(dataset))
        for start in range(0, len(order), size):
            columns = dataset[order[start : start + size].tolist()]
            if mode == "Arrow":
                columns = arrays_of_table(columns)
            elif mode == "Python":
                # Tokens fit into 16 bits, and Python's own numbers do not say so.
                kinds = {"tokens": np.uint16}
                columns = {name: np.array(columns[name], kinds.get(name)) for name in columns}
            yield columns
        if work.one_epoch:
            return


def _records(columns: dict[str, list[Any]]) -> list[Any]:
    if list(columns) == ["text"]:
        return columns["text"]
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
