"""LitData: its `StreamingDataset` over chunks that are written for it, in its `StreamingDataLoader`.

It stores what a sample is made of, so tokens are stored as arrays, and images as the bytes of their JPEG.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import litdata
import numpy as np
from array_record.python.array_record_module import ArrayRecordReader
from litdata.streaming.cache import Cache

from suite import data
from suite.peers import Stream
from suite.work import SEED, Contender, Files, UnsupportedError, Work, apply_to_many


def open_stream(work: Work, contender: Contender) -> Stream:
    """Returns the batches of a loader, shuffled, one epoch or endless."""
    if not isinstance(work.source, Files) or work.source.format != "array_record":
        raise UnsupportedError("it is compared on the records of ArrayRecord files only")
    loader = litdata.StreamingDataLoader(
        _Stepped(_written(work.source), work),
        batch_size=work.batch_size,
        num_workers=contender.workers,
        persistent_workers=contender.workers > 0,
    )
    return Stream(iter(loader) if work.one_epoch else _epochs(loader))


def _epochs(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


class _Stepped(litdata.StreamingDataset):
    def __init__(self, folder: Path, work: Work) -> None:
        super().__init__(str(folder), shuffle=True, drop_last=False, seed=SEED)
        self._steps = work.steps
        self._rng = np.random.default_rng(SEED)

    def __getitem__(self, index: Any) -> Any:
        (element,) = apply_to_many(self._steps, [super().__getitem__(index)], self._rng)
        if isinstance(element, dict):
            # Of flipped arrays PyTorch makes no tensors.
            arrays = {name: value for name, value in element.items() if isinstance(value, np.ndarray)}
            return {**element, **{name: np.ascontiguousarray(array) for name, array in arrays.items()}}
        return element


def _written(files: Files) -> Path:
    """Returns a folder of LitData's chunks of the same records, written when first asked for."""
    folder = data.FOLDER / f"litdata-{Path(files.paths[0]).stem}"
    if not folder.exists():
        partial = folder.with_suffix(".partial")
        cache = Cache(str(partial), chunk_bytes=1 << 26)
        records = (record for path in files.paths for record in ArrayRecordReader(path).read_all())
        for number, record in enumerate(records):
            cache[number] = record
        cache.done()
        cache.merge()
        partial.rename(folder)
    for path in folder.iterdir():
        data.bring_into_memory(path)
    return folder
