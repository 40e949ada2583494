"""Trees of chains keep storage busy, and hold no more than allowed, whatever their shape and wherever they run."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from millstream import IterDataset, MapDataset, ReadOptions
from millstream.transforms import FirstFitPack
from support.stores.waiting_storage import Storage

RECORD_BYTES = 10_000
NUM_PARTS = 4


class Recorded:
    """Records of which each begins with the number of reads that were in flight so far, in the process that reads it.

    A file grows by one byte for each that is read, in whichever process.
    """

    def __init__(self, storage: Storage, file: Path) -> None:
        self._storage = storage
        self._file = file

    def __len__(self) -> int:
        return len(self._storage)

    def __getitem__(self, key: int) -> dict[str, Any]:
        record = np.full(RECORD_BYTES // 4, key % 2, np.int32)
        record[0] = self._storage[key]["tokens"][0]
        with self._file.open("ab", buffering=0) as file:
            file.write(b"\0")
        return {"tokens": record}


def keep_half(record: dict[str, Any]) -> bool:
    return bool(record["tokens"][1])


Shape = Callable[[list[IterDataset[Any]]], IterDataset[Any]]

SHAPES: dict[str, tuple[Shape, int]] = {
    "chain": (lambda parts: parts[0], 1),
    "batch": (lambda parts: parts[0].batch(NUM_PARTS), 1),
    "filtered": (lambda parts: parts[0].filter(keep_half).batch(2), 1),
    "packed": (lambda parts: parts[0].apply(FirstFitPack({"tokens": RECORD_BYTES // 2}, num_packing_bins=2)), 1),
    "mix": (IterDataset.mix, NUM_PARTS),
    "batch of mix": (lambda parts: IterDataset.mix(parts).batch(NUM_PARTS), NUM_PARTS),
    "mix of filtered": (lambda parts: IterDataset.mix([part.filter(keep_half) for part in parts]), NUM_PARTS),
    "interleave": (lambda parts: IterDataset.interleave(parts, cycle_length=NUM_PARTS), NUM_PARTS),
    "zip": (lambda parts: parts[0].zip(*parts[1:]), NUM_PARTS),
    "mix of zips": (lambda parts: IterDataset.mix([parts[0].zip(parts[1]), parts[2].zip(parts[3])]), NUM_PARTS),
}
"""Functions that make one stream of a number of chains, with the number of them that are read."""


def records_of(element: Any) -> list[Any]:
    """Returns the arrays of tokens in an element."""
    if isinstance(element, tuple):
        return [array for member in element for array in records_of(member)]
    return [element["tokens"]]


@pytest.mark.parametrize(
    ("shape", "num_threads", "num_workers"),
    [
        *((shape, 2, 0) for shape in SHAPES),
        *((shape, num_threads, 0) for shape in ("filtered", "mix", "zip") for num_threads in (1, 16)),
        *((shape, 2, 1) for shape in ("filtered", "mix", "interleave", "mix of zips")),
    ],
)
def test_as_many_reads_are_in_flight_and_no_more_bytes_held_than_allowed(
    shape: str, num_threads: int, num_workers: int, tmp_path: Path
) -> None:
    """Exactly `num_threads` reads of each chain are in flight, and all chains together hold `max_buffer_bytes`.

    Half of these may be added, in a call of each chain that holds none, and an output. Dropped records are not held.
    """
    build, num_read = SHAPES[shape]
    file, limit = tmp_path / "read", num_threads * num_read
    max_bytes = max(20, 4 * limit) * RECORD_BYTES
    reading = ReadOptions(num_threads, 10_000, max_bytes)
    stream = build([MapDataset.source(Recorded(Storage(limit), file)).to_iter_dataset(reading)] * NUM_PARTS)
    peak, delivered, held, weight = 0, 0, 0, 2 if "filter" in shape else 1
    with iter(stream.mp_prefetch(num_workers) if num_workers else stream) as iterator:
        for number in range(3000):
            records = records_of(next(iterator))
            peak = max([peak, *(int(record.reshape(-1)[0]) for record in records)])
            delivered += weight * sum(record.nbytes for record in records)
            held = max(held, file.stat().st_size * RECORD_BYTES - delivered)
            if peak == limit and number > 40:
                break
    assert peak == limit
    assert held <= 1.5 * weight * max_bytes + 2 * NUM_PARTS * RECORD_BYTES
