"""MosaicML Streaming: shards of its own format, shuffled within large blocks, batches in PyTorch's `DataLoader`.

Its shards are written once, beside the files, from the same records. It needs other versions of packages than the other
peers: measure it in an environment of its own.
"""

import os
from pathlib import Path
from typing import Any, final

import numpy as np
import streaming
import torch.utils.data
from array_record.python.array_record_module import ArrayRecordReader

from suite.peers import Stream
from suite.work import SEED, Contender, Files, Mixture, UnsupportedError, Work, apply_to_many


def open_stream(work: Work, contender: Contender) -> Stream:
    """Returns the batches of a `DataLoader` over a `StreamingDataset`, one epoch or endless."""
    parts = work.source.parts if isinstance(work.source, Mixture) else (work.source,)
    folders = [_shards_of(part) for part in parts if isinstance(part, Files)]
    if len(folders) < len(parts):
        raise UnsupportedError("it reads shards of its own from disk, and nothing in memory")
    loader: Any = torch.utils.data.DataLoader(
        _Samples(folders, work),
        batch_size=work.batch_size,
        num_workers=contender.workers,
        persistent_workers=contender.workers > 0,
    )
    return Stream(iter(loader) if work.one_epoch else _epochs(loader))


def _epochs(loader: Any) -> Any:
    while True:
        yield from loader


def _shards_of(files: Files) -> str:
    """Returns the folder with the records of some files, which is either complete or not there."""
    folder = Path(f"{files.paths[0]}.mds")
    if not folder.exists():
        partial = folder.with_suffix(f".partial-{os.getpid()}")
        with streaming.MDSWriter(out=str(partial), columns={"record": "bytes"}) as writer:
            for path in files.paths:
                for record in ArrayRecordReader(path).read_all():
                    writer.write({"record": record})
        partial.rename(folder)
    return str(folder)


@final
class _Samples(streaming.StreamingDataset):
    """The samples of some folders, in equal shares, after the steps."""

    def __init__(self, folders: list[str], work: Work) -> None:
        share = {"proportion": 1 / len(folders)} if len(folders) > 1 else {}
        streams = [streaming.Stream(local=folder, **share) for folder in folders]
        super().__init__(streams=streams, shuffle=True, shuffle_seed=SEED, batch_size=work.batch_size)
        self._work_steps = work.steps

    def __getitem__(self, key: int) -> Any:
        record = super().__getitem__(key)["record"]
        (result,) = apply_to_many(self._work_steps, [record], np.random.default_rng(SEED))
        return result
