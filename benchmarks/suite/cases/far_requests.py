"""Storage far away: requests that take 20 or 50 ms, whatever they ask for, and records that become many."""

import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from suite.case import Case, Contender, Goal, Measurement, Pick, Run, UnsupportedError
from suite.cases.packing import number_of_cells, sums_of_documents
from suite.cases.workers import MEGABYTE, memory_of_all
from suite.contenders import modes
from suite.data import SlowSource
from suite.scale import Scale
from suite.work import SEED, Records, Work

DOCUMENT_TOKENS = 100
ROW_TOKENS = 1000
ROWS_IN_BATCH = 8

FRAME_BYTES = 100_000
FRAMES = 64
FRAMES_IN_BATCH = 32


class FarSource(SlowSource):
    """Documents, one in a request, which takes between half of the seconds and 1.5 times as long, by its key."""

    def __getitem__(self, key: Any) -> Any:
        if key >= self._count:
            raise IndexError(key)
        self.request(int(key))
        return document(int(key))

    def request(self, key: int) -> None:
        """Waits as long as the request for a document, or for several of which this is the first."""
        time.sleep(self._seconds * (0.5 + key * 2_654_435_761 % 2**32 / 2**32))


class FarBatches(FarSource):
    """The same, as many in a request as are asked for together."""

    def __getitems__(self, keys: Sequence[int]) -> list[NDArray[np.int32]]:
        self.request(int(keys[0]))
        return [document(int(key)) for key in keys]


def document(key: int) -> NDArray[np.int32]:
    return np.full(DOCUMENT_TOKENS, key % 30_000, np.int32)


_OURS = modes("millstream", threads=None)


def _reads(name: str, kind: type[FarSource], milliseconds: int, goals: tuple[Goal, ...]) -> Case:
    def work(scale: Scale) -> Work:
        seconds = milliseconds / scale.pick(tiny=100_000, quick=1000, full=1000)
        return Work(Records(kind(scale.pick(tiny=512, quick=1 << 20, full=1 << 20), seconds)), (), 64)

    asks = "any number of documents" if kind is FarBatches else "one document"
    return Case(
        name=name,
        title=f"a store with {milliseconds} ms a request of {asks}, jitter of half of it, batch 64",
        make_work=work,
        contenders=(
            *_OURS,
            *modes("grain", "DataLoader", "Dataset", threads=None),
            *modes("pytorch", "fork", workers=(2, 16)),
        ),
        goals=goals,
    )


def _packed(scale: Scale) -> Work:
    source = FarBatches(
        scale.pick(tiny=512, quick=1 << 20, full=1 << 20), scale.pick(tiny=0.0002, quick=0.02, full=0.02)
    )
    return Work(Records(source), (), ROWS_IN_BATCH, row_length=ROW_TOKENS, packing="first fit")


class Videos(Sequence[int]):
    """Numbers that stand for videos."""

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, key: Any) -> Any:
        return int(key)


def frames(video: int) -> list[NDArray[np.uint8]]:
    return [np.full(FRAME_BYTES, video % 200, np.uint8) for _ in range(FRAMES)]


def measure_frames(run: Run) -> Measurement:
    """Returns the largest number of MB that frames on their way into batches add to this process and its children."""
    batches = _frames_of(run.contender)
    run.gate()
    before, peak = memory_of_all().proportional, 0
    for _ in range(run.scale.pick(tiny=4, quick=40, full=200)):
        next(batches)
        peak = max(peak, memory_of_all().proportional)
    return Measurement((peak - before) / MEGABYTE)


def _frames_of(contender: Contender) -> Iterator[Any]:
    # Each library is imported only where it is measured.
    if contender.peer == "millstream":
        import millstream  # noqa: PLC0415

        splitting = millstream.FlatMap(frames, max_fan_out=FRAMES)
        loader = millstream.load(
            Videos(), transformations=[splitting], batch_size=FRAMES_IN_BATCH, worker_count=contender.workers, seed=SEED
        )
        return iter(loader)
    if contender.peer != "grain":
        raise UnsupportedError("it has no operation that makes several elements of one")
    import grain  # noqa: PLC0415
    from absl import flags  # noqa: PLC0415

    class Frames(grain.experimental.FlatMapTransform):  # type: ignore[misc]  # Grain has no types
        max_fan_out = FRAMES

        def flat_map(self, video: int) -> list[NDArray[np.uint8]]:
            return frames(video)

    flags.FLAGS.mark_as_parsed()
    dataset = grain.MapDataset.source(Videos()).repeat().to_iter_dataset()
    dataset = grain.experimental.FlatMapIterDataset(dataset, Frames()).batch(FRAMES_IN_BATCH)
    if contender.workers:
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=contender.workers))
    return iter(dataset)


_GRAIN = Pick("grain")

CASES = (
    _reads("far_single_20", FarSource, 20, (Goal("at least Grain", 1, _GRAIN),)),
    _reads("far_single_50", FarSource, 50, (Goal("at least Grain", 1, _GRAIN),)),
    _reads("far_batched_20", FarBatches, 20, (Goal("5 times Grain", 5, _GRAIN),)),
    _reads("far_batched_50", FarBatches, 50, (Goal("5 times Grain", 5, _GRAIN),)),
    Case(
        name="far_pack",
        title=f"first-fit packing into rows of {ROW_TOKENS} tokens, 20 ms a request of any number of documents",
        make_work=_packed,
        contenders=(*_OURS, *modes("grain", "Dataset", threads=None)),
        goals=(Goal("5 times Grain", 5, _GRAIN),),
        unit="cells/s",
        view=sums_of_documents,
        count=number_of_cells,
    ),
    Case(
        name="flat_map_memory",
        title=f"MB that frames add: {FRAMES} of 100 KB from each record, batches of {FRAMES_IN_BATCH}",
        make_work=_packed,
        contenders=(*_OURS, *modes("grain", "Dataset", threads=None)),
        goals=(Goal("100 MB at most, with 2 workers", 1, 100.0, Pick("millstream", 2)),),
        measure=measure_frames,
        unit="MB",
        higher_is_better=False,
    ),
)
