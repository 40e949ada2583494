"""wids, WebDataset's archives with random access: a map-style dataset in PyTorch's `DataLoader`."""

from typing import Any, final

import numpy as np
import torch.utils.data
import wids

from suite.case import Contender, UnsupportedError
from suite.peers.base import Stream
from suite.peers.pytorch_adapter import Chunks, collate, processes_of, stream_of
from suite.work import SEED, Files, Work, apply_to_many


@final
class WidsAdapter:
    """Opens a `DataLoader` over a `ShardListDataset`."""

    def open(self, work: Work, contender: Contender) -> Stream:
        if not isinstance(work.source, Files) or work.source.format != "webdataset":
            raise UnsupportedError("it reads tar archives only")
        dataset = Samples(work, work.source)
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=Chunks(len(dataset), work.batch_size or 1, work.shard, as_arrays=False),
            collate_fn=collate,
            **processes_of(contender),
        )
        return stream_of(loader, work)


ADAPTER = WidsAdapter()


@final
class Samples:
    """The samples after the steps; the archives are opened in the process that reads."""

    def __init__(self, work: Work, files: Files) -> None:
        self._steps = work.steps
        self._files = files
        self._dataset: Any = None

    def __len__(self) -> int:
        return self._files.records_per_file * len(self._files.paths)

    def __getitem__(self, key: int) -> Any:
        if self._dataset is None:
            self._dataset = wids.ShardListDataset(
                [{"url": path, "nsamples": self._files.records_per_file} for path in self._files.paths],
                localname=str,
                keep=True,
                transformations=[],
            )
        sample = {
            name.removeprefix("."): value.read() if hasattr(value, "read") else value
            for name, value in self._dataset[key].items()
        }
        (result,) = apply_to_many(self._steps, [sample], np.random.default_rng(SEED))
        return result
