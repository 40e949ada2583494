"""The cases, and who takes part in which modes: two a peer, one that its documents recommend, and one that is tuned."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np

from suite import data, steps
from suite.work import Columns, Contender, Filter, Map, RandomMap, Records, Work

FAR_SECONDS = 0.02
"""The time that a read takes in the case "far"."""


@dataclasses.dataclass(frozen=True)
class Scale:
    """The amount that is measured.

    Attributes:
        size: part of the full data.
        seconds: how long a rate is measured.
        warm_seconds: how long a stream runs before that, each time.
        repeats: how often the chosen mode of each peer is measured.
        compares: whether the records that contenders deliver are compared with what they should be.
    """

    size: float = 1.0
    seconds: float = 0.7
    warm_seconds: float = 0.2
    repeats: int = 5
    compares: bool = True

    @classmethod
    def tiny(cls) -> Self:
        """Everything runs, nothing is measured well: for tests, and for comparing records."""
        return cls(size=0.0, seconds=0.02, warm_seconds=0.0, repeats=1)

    def count(self, full: int, tiny: int) -> int:
        return max(tiny, int(full * self.size))


def _rows(batch: Any) -> int:
    while isinstance(batch, dict):
        batch = next(iter(batch.values()))
    return len(batch)


def _documents_in(batch: Any) -> int:
    return int(batch["tokens_segment_ids"].max(axis=1).sum())


@dataclasses.dataclass(frozen=True)
class Case:
    """Something to measure.

    Attributes:
        name: what the command line and the tables call it.
        title: what is measured, in one line.
        work: the pipeline at a scale.
        contenders: two modes of each peer.
        kind: "rate" of records of a running stream, or what a new process measures: "first_batch", "resume", "memory".
        record_bytes: bytes of an element in a batch, for the rate in bytes.
        view: what of a batch is the same for all contenders, where randomness or packing differ.
        count: the number of records in a batch.
        limit: the limit of the machine, by name: "copy" or "pread" of the bytes, or "requests" in flight.
    """

    name: str
    title: str
    work: Callable[[Scale], Work]
    contenders: tuple[Contender, ...]
    kind: str = "rate"
    record_bytes: int = 0
    view: Callable[[Any], Any] = steps.identity
    count: Callable[[Any], int] = _rows
    limit: str = ""

    @property
    def unit(self) -> str:
        return {"rate": "records/s", "memory": "MB per worker"}.get(self.kind, "s")

    def ratio(self, ours: float, theirs: float) -> float:
        """Returns how many times as good ours is as theirs: above 1 is better, whatever the unit."""
        return ours / theirs if self.kind == "rate" else theirs / ours


def _peers(modes: Mapping[str, tuple[tuple[str, int], tuple[str, int]]]) -> tuple[Contender, ...]:
    return tuple(Contender(peer, mode, workers) for peer, pair in modes.items() for mode, workers in pair)


_MEMORY_MODES = {
    "millstream": (("load", 0), ("threads off", 0)),
    "grain": (("Dataset", 0), ("Dataset, threads off", 0)),
    "pytorch": (("record by record", 2), ("batched", 0)),
    "tensorflow": (("record by record", 0), ("batches first", 0)),
}
_FILE_MODES = {
    "millstream": (("load", 0), ("load", 2)),
    "grain": (("Dataset", 0), ("Dataset", 2)),
    "pytorch": (("record by record", 2), ("batched", 2)),
}
_TENSORFLOW = {"tensorflow": (("record by record", 0), ("batches first", 0))}
_LITDATA = {"litdata": (("default", 0), ("default", 2))}
_MOSAICML = {"mosaicml": (("default", 0), ("default", 2))}
_SPDL = {"spdl": (("2 threads", 0), ("4 threads", 0))}
_IMAGE_BYTES = 3 * steps.CROP**2


def _tokens(scale: Scale) -> Work:
    step = Map(steps.tokens_of, None, steps.tokens_in_graph, steps.tokens_in_graph)
    return Work(data.token_files(scale.count(200_000, 2048)), (step,), 256)


def _images(scale: Scale) -> Work:
    decode = Map(steps.decode, None, steps.decode_in_graph)
    crop = RandomMap(steps.crop_and_flip, steps.crop_and_flip_in_graph)
    return Work(data.image_files(scale.count(2000, 64)), (decode, crop), 64 if scale.size else 16)


def _text(scale: Scale) -> Work:
    tokenize = steps.Tokenize(data.tokenizer_file())
    return Work(data.text_files(scale.count(60_000, 512)), (Map(tokenize, tokenize.of_list),), 128)


def _json_lines(scale: Scale) -> Work:
    return Work(data.json_files(scale.count(100_000, 1024)), (Map(steps.fields_of_json),), 256)


def _numbers(scale: Scale) -> Work:
    draw = RandomMap(steps.add_fraction, steps.add_fraction_in_graph, steps.add_fraction_in_graph)
    return Work(Records(list(range(scale.count(1 << 20, 2048)))), (draw,), 256)


def _filter(scale: Scale) -> Work:
    return Work(Records(list(range(scale.count(1 << 16, 1024)))), (Filter(steps.is_chosen),), 64)


def _mixture(scale: Scale) -> Work:
    step = Map(steps.tokens_of, None, steps.tokens_in_graph, steps.tokens_in_graph)
    return Work(data.token_components(scale.count(128_000, 1024), 64 if scale.size else 8), (step,), 256)


def _packing(scale: Scale) -> Work:
    return Work(Records(data.documents(scale.count(60_000, 512))), (), 8, row_length=data.ROW_LENGTH)


def _far(scale: Scale) -> Work:
    seconds = FAR_SECONDS if scale.size else 0.0001
    return Work(Records(data.SlowSource(scale.count(1 << 16, 256), seconds)), (Map(steps.identity),), 32)


def _arrays(scale: Scale) -> Work:
    step = Map(steps.identity, None, steps.identity, steps.identity)
    return Work(Records(data.big_arrays(scale.count(1024, 128))), (step,), 128 if scale.size else 32)


def _columns(scale: Scale) -> Work:
    return Work(Columns(data.feature_columns(scale.count(1 << 20, 8192))), (), 256)


def _documents_of(value: Any) -> Any:
    """Returns the documents of a batch of packed rows; a document as it is."""
    if not isinstance(value, dict):
        return value
    return {
        "": [
            row[segments == number]
            for row, segments in zip(value["tokens"], value["tokens_segment_ids"], strict=True)
            for number in range(1, segments.max() + 1)
        ]
    }


def _labels(batch: Any) -> Any:
    """Returns the labels, and that all images have the shape of a crop: crops are drawn differently by design."""
    assert np.shape(batch["image"])[1:] == (steps.CROP, steps.CROP, 3)
    return np.asarray(batch["label"])


def _whole_parts(batch: Any) -> Any:
    return np.floor(np.asarray(batch))


_ALL = (
    Case(
        "tokens",
        "1 KB token records, ArrayRecord, batch 256",
        _tokens,
        _peers({**_FILE_MODES, **_TENSORFLOW, **_SPDL, **_LITDATA, **_MOSAICML}),
        record_bytes=steps.TOKEN_BYTES,
        limit="pread",
    ),
    Case(
        "images",
        "JPEG of 500 by 375 decoded by simplejpeg, random crop 224, flip, batch 64",
        _images,
        _peers({**_FILE_MODES, "tensorflow": (("record by record", 0),) * 2, **_SPDL, **_LITDATA}),
        record_bytes=_IMAGE_BYTES,
        view=_labels,
    ),
    Case(
        "text",
        "texts of Parquet through a tokenizer, batch 128",
        _text,
        _peers({**_FILE_MODES, "huggingface": (("table", 0), ("streamed", 0))}),
        record_bytes=2 * steps.TEXT_TOKENS,
    ),
    Case(
        "json_lines",
        "lines of JSON, 600 characters, batch 256",
        _json_lines,
        _peers({**_FILE_MODES, "huggingface": (("table", 0), ("streamed", 0))}),
        record_bytes=208,
    ),
    Case(
        "numbers",
        "ints in memory, a random draw for each, batch 256",
        _numbers,
        _peers(_MEMORY_MODES),
        record_bytes=8,
        view=_whole_parts,
    ),
    Case(
        "filter",
        "a filter of 30 µs of Python before the batch; records that are kept",
        _filter,
        _peers({**_FILE_MODES}),
        record_bytes=8,
    ),
    Case(
        "mixture",
        "64 components of 1 KB token records in equal shares, batch 256",
        _mixture,
        _peers(
            {
                "millstream": (("load", 0), ("load", 2)),
                "grain": (("Dataset", 0), ("Dataset", 2)),
                **_TENSORFLOW,
                **_MOSAICML,
            }
        ),
        record_bytes=steps.TOKEN_BYTES,
        limit="pread",
    ),
    Case(
        "packing",
        "documents packed as they come into rows of 2,048, first fit, 8 rows; documents",
        _packing,
        _peers({"millstream": (("load", 0), ("load", 2)), "grain": (("Dataset", 0), ("Dataset", 2))}),
        record_bytes=1200,
        view=_documents_of,
        count=_documents_in,
    ),
    Case(
        "far",
        "reads that take 20 ms each, batch 32",
        _far,
        _peers(
            {
                "millstream": (("load", 0), ("load", 2)),
                "grain": (("Dataset", 0), ("Dataset", 2)),
                "pytorch": (("record by record", 2), ("record by record", 16)),
            }
        ),
        record_bytes=8,
        limit="requests",
    ),
    Case(
        "arrays",
        "150 KB arrays in memory, batch 128 (19 MB)",
        _arrays,
        _peers(_MEMORY_MODES),
        record_bytes=150_528,
        limit="copy",
    ),
    Case(
        "first_batch",
        "seconds to the first batch of the tokens, 2 workers",
        _tokens,
        _peers(
            {
                "millstream": (("load", 2), ("chain", 2)),
                "grain": (("DataLoader", 2), ("Dataset", 2)),
                "pytorch": (("batched", 2), ("batched, fork server", 2)),
            }
        ),
        kind="first_batch",
    ),
    Case(
        "resume",
        "seconds from a saved state to the batch there, in a new loader, 2 workers",
        _tokens,
        _peers(
            {
                "millstream": (("load", 2), ("chain", 2)),
                "grain": (("DataLoader", 2), ("Dataset", 2)),
                "torchdata": (("batched", 2), ("batched, fork server", 2)),
            }
        ),
        kind="resume",
    ),
    Case(
        "memory",
        "MB that 4 workers take, of which a record is a row of 268 MB in memory",
        _columns,
        _peers(
            {
                "millstream": (("load", 4), ("chain", 4)),
                "grain": (("DataLoader", 4), ("Dataset", 4)),
                "pytorch": (("batched", 4), ("batched, fork server", 4)),
            }
        ),
        kind="memory",
    ),
)
CASES = {case.name: case for case in _ALL}
"""By name."""
