"""Hugging Face `datasets`: files made into an Arrow table once, of which it takes shuffled batches; or streamed."""

from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np

from suite import data
from suite.peers import Stream
from suite.work import SEED, Contender, Files, UnsupportedError, Work, apply_to_many, stacked

_BUILDERS = {"json_lines": "json", "parquet": "parquet"}

_SHUFFLE_BUFFER = 10_000
"""Records that are streamed are shuffled within this many of them, as tf.data's are."""


def open_stream(work: Work, contender: Contender) -> Stream:
    """Returns batches of a `Dataset` or, in the mode "streamed", of an `IterableDataset`."""
    if not isinstance(work.source, Files) or work.source.format not in _BUILDERS:
        raise UnsupportedError("it is compared on files of JSON and Parquet only")
    streamed = contender.mode == "streamed"
    dataset = table_of(work.source, streamed=streamed)
    return Stream(_batches(work, dataset, streamed=streamed))


def table_of(files: Files, *, streamed: bool = False) -> Any:
    """Returns the files as HF datasets has them: an Arrow table that is mapped into memory, or a stream."""
    datasets.disable_progress_bars()
    return datasets.load_dataset(
        _BUILDERS[files.format],
        data_files=list(files.paths),
        split="train",
        cache_dir=str(data.FOLDER / "huggingface"),
        streaming=streamed,
    )


def _batches(work: Work, dataset: Any, *, streamed: bool) -> Iterator[Any]:
    buffer = {"buffer_size": _SHUFFLE_BUFFER} if streamed else {}
    rng = np.random.default_rng(SEED)
    epoch = 0
    while epoch == 0 or not work.one_epoch:
        for columns in dataset.shuffle(seed=SEED + epoch, **buffer).iter(work.batch_size):
            records = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
            yield stacked(apply_to_many(work.steps, records, rng))
        epoch += 1
