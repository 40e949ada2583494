"""WebDataset: archives read from end to end, samples shuffled through a buffer, batches in PyTorch's workers."""

from typing import Any, final

import numpy as np
import torch
import webdataset

from suite.case import Contender, UnsupportedError
from suite.peers.bare_loop import stacked
from suite.peers.base import Stream
from suite.work import SEED, Files, Work, apply_to_many

SHUFFLE_BUFFER = 10_000
"""Samples are shuffled within this many of them, as tf.data's records are."""


@final
class WebdatasetAdapter:
    """Opens a `WebDataset`."""

    def open(self, work: Work, contender: Contender) -> Stream:
        if not isinstance(work.source, Files) or work.source.format != "webdataset":
            raise UnsupportedError("it reads tar archives only")
        torch.manual_seed(SEED)
        dataset = webdataset.WebDataset(
            list(work.source.paths), shardshuffle=len(work.source.paths), seed=SEED, empty_check=False
        )
        dataset = dataset.shuffle(SHUFFLE_BUFFER).map(Steps(work)).batched(work.batch_size, collation_fn=stacked)
        if not work.one_epoch:
            dataset = dataset.repeat()
        if not contender.workers:
            return Stream(iter(dataset), loader=dataset)
        loader = webdataset.WebLoader(
            dataset, batch_size=None, num_workers=contender.workers, multiprocessing_context=contender.mode
        )
        return Stream(iter(loader), loader=loader)


ADAPTER = WebdatasetAdapter()


@final
class Steps:
    """Does all steps to one sample."""

    def __init__(self, work: Work) -> None:
        self._steps = work.steps
        self._rng = np.random.default_rng(SEED)

    def __call__(self, sample: dict[str, Any]) -> Any:
        (result,) = apply_to_many(self._steps, [sample], self._rng)
        return result
