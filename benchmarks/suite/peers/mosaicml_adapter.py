"""MosaicML Streaming: shards of its own format, shuffled within large blocks, batches in PyTorch's `DataLoader`.

Its shards are written once, beside the files, from the same records.
"""

import os
import shutil
from pathlib import Path
from typing import Any, final

import numpy as np
import streaming
import torch.utils.data

from suite.case import Contender, UnsupportedError
from suite.peers.base import Stream, our_source
from suite.peers.pytorch_adapter import collate, processes_of, stream_of
from suite.work import SEED, Files, Mixture, Step, Work, apply_to_many

WHOLE = "record"
"""The only column, where records are bytes."""


@final
class MosaicmlAdapter:
    """Opens a `DataLoader` over a `StreamingDataset`."""

    def open(self, work: Work, contender: Contender) -> Stream:
        parts = work.source.parts if isinstance(work.source, Mixture) else (work.source,)
        folders = [_shards_of(part) for part in parts if isinstance(part, Files)]
        if len(folders) < len(parts):
            raise UnsupportedError("it reads shards of its own from disk, and nothing in memory")
        dataset = Samples(folders, work.steps, work.batch_size)
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_size=work.batch_size,
            collate_fn=collate,
            **processes_of(contender),
        )
        return stream_of(loader, work)


ADAPTER = MosaicmlAdapter()


def _shards_of(files: Files) -> str:
    """Returns the folder with the records of some files, which is either complete or not there."""
    if files.format == "mds":
        return files.paths[0]
    folder = Path(f"{files.paths[0]}.mds")
    if not folder.exists():
        records = our_source(files)
        first = records[0]
        columns = {name: "str" if isinstance(value, str) else "bytes" for name, value in _columns(first).items()}
        partial = folder.with_suffix(f".partial-{os.getpid()}")
        with streaming.MDSWriter(out=str(partial), columns=columns) as writer:
            for key in range(len(records)):
                writer.write(_columns(records[key]))
        try:
            partial.rename(folder)
        except OSError:
            # Another contender was faster.
            shutil.rmtree(partial)
    return str(folder)


def _columns(record: Any) -> dict[str, Any]:
    return record if isinstance(record, dict) else {WHOLE: record}


@final
class Samples(streaming.StreamingDataset):
    """The samples of some folders, in equal shares, after the steps."""

    def __init__(self, folders: list[str], steps: tuple[Step, ...], batch_size: int | None) -> None:
        share = {"proportion": 1 / len(folders)} if len(folders) > 1 else {}
        streams = [streaming.Stream(local=folder, **share) for folder in folders]
        super().__init__(streams=streams, shuffle=True, shuffle_seed=SEED, batch_size=batch_size)
        self._work_steps = steps

    def __getitem__(self, key: int) -> Any:
        sample = super().__getitem__(key)
        record = sample.get(WHOLE, sample)
        (result,) = apply_to_many(self._work_steps, [record], np.random.default_rng(SEED))
        return result
