"""A measuring process: it opens the stream of one contender, and measures it as often as it is asked.

The records that contenders deliver are compared as multisets: orders differ by design.
"""

import dataclasses
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Self

import numpy as np
import psutil

from suite.cases import CASES, Case, Scale
from suite.peers import PEERS, Stream
from suite.work import Columns, Contender, Files, Mixture, Records, UnsupportedError, Work, apply_to_many, stacked

PREFIX = "@benchmark "
"""Begins the lines that a measuring process means for its starter; peers print what they like."""

_MODULUS = 1 << 64
_MEGABYTE = 1_000_000
_STATE_STEP = 50
"""The step at which the state is taken that a resume begins with."""


@dataclasses.dataclass(frozen=True)
class Order:
    """One contender of one case, at a scale."""

    case: str
    contender: Contender
    scale: Scale

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        words = json.loads(text)
        return cls(words["case"], Contender(**words["contender"]), Scale(**words["scale"]))


class Session:
    """Opens and measures; every answer is a dict: {"reason": why not}, or values by name."""

    def __init__(self, order: Order) -> None:
        self._case = CASES[order.case]
        self._contender = order.contender
        self._scale = order.scale
        self._stream: Stream | None = None
        self._measure = _MEASURES[self._case.kind]

    def open(self) -> dict[str, Any]:
        """Compares a small epoch with what it should be; for rates, opens the stream and lets it run for a moment."""
        try:
            adapter = PEERS[self._contender.peer].adapter()
        except ImportError as error:
            return {"reason": f"not installed here ({error})", "absent": True}
        try:
            if self._case.kind == "rate":
                found = self._small_epoch(adapter) if self._scale.compares else None
                self._stream = adapter.open_stream(self._case.work(self._scale), self._contender)
                _take(self._stream, self._case, self._scale.warm_seconds)
                # Last: ArrayRecord's reader starts threads, and PyTorch's workers have been forked by now.
                if found is not None:
                    _compare(found, expected_content(_small_work(self._case), self._case.view))
        except UnsupportedError as error:
            return {"reason": str(error)}
        except Exception as error:  # noqa: BLE001  (whatever a peer raises belongs into the report)
            return {"reason": f"{type(error).__name__}: {error}"[:500]}
        return {}

    def measure(self) -> dict[str, Any]:
        try:
            return self._measure(self._case, self._contender, self._scale, self._stream)
        except UnsupportedError as error:
            return {"reason": str(error)}
        except Exception as error:  # noqa: BLE001
            return {"reason": f"{type(error).__name__}: {error}"[:500]}

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()

    def _small_epoch(self, adapter: Any) -> "Content":
        stream = adapter.open_stream(_small_work(self._case), self._contender)
        found = content_of(stream.batches, self._case.view)
        stream.close()
        return found


def _small_work(case: Case) -> Work:
    return dataclasses.replace(case.work(Scale.tiny()), one_epoch=True)


def _compare(found: "Content", expected: "Content") -> None:
    if found.count != expected.count:
        raise ValueError(f"{found.count} records came instead of {expected.count}")
    if found != expected:
        raise ValueError("other records came than expected")


def _take(stream: Stream, case: Case, seconds: float) -> dict[str, Any]:
    """Takes batches for this long, two at least; returns the rate, and the waits for a batch."""
    waits: list[float] = []
    records = 0
    start = last = time.perf_counter()
    while len(waits) < 2 or last - start < seconds:
        batch = next(stream.batches)
        now = time.perf_counter()
        waits.append(now - last)
        records += case.count(batch)
        last = now
    p50, p99 = np.quantile(waits, [0.5, 0.99])
    return {"value": records / (last - start), "p50_ms": 1e3 * p50, "p99_ms": 1e3 * p99}


def _rate(case: Case, _: Contender, scale: Scale, stream: Stream | None) -> dict[str, Any]:
    """Records per second of an endless stream that is already running."""
    assert stream is not None
    # What was made while others were measured is not counted.
    _take(stream, case, scale.warm_seconds)
    return _take(stream, case, scale.seconds)


def _first_batch(case: Case, contender: Contender, scale: Scale, _: Stream | None) -> dict[str, Any]:
    """Seconds from nothing to the first batch; the peer is imported already."""
    work = case.work(scale)
    adapter = PEERS[contender.peer].adapter()
    start = time.perf_counter()
    stream = adapter.open_stream(work, contender)
    next(stream.batches)
    seconds = time.perf_counter() - start
    stream.close()
    return {"value": seconds}


def _resume(case: Case, contender: Contender, scale: Scale, _: Stream | None) -> dict[str, Any]:
    """Seconds from a saved state to the batch there, in a new loader; in torchdata's way the state is set before."""
    work = case.work(scale)
    adapter = PEERS[contender.peer].adapter()
    stream = adapter.open_stream(work, contender)
    if stream.get_state is None:
        raise UnsupportedError("it has no state: a resumed run reads everything again")
    for _step in range(_STATE_STEP):
        next(stream.batches)
    state = stream.get_state()
    stream.close()
    start = time.perf_counter()
    stream = adapter.open_stream(work, contender)
    assert stream.set_state is not None
    stream.set_state(state)
    next(stream.batches)
    seconds = time.perf_counter() - start
    stream.close()
    return {"value": seconds}


def _memory(case: Case, contender: Contender, scale: Scale, _: Stream | None) -> dict[str, Any]:
    """MB that the loader adds to this process and its children, per worker; pages shared are counted once."""
    work = case.work(scale)
    adapter = PEERS[contender.peer].adapter()
    before = _memory_of_all()
    stream = adapter.open_stream(work, contender)
    for _step in range(8 * contender.workers):
        next(stream.batches)
    added = _memory_of_all() - before
    stream.close()
    return {"value": added / contender.workers / _MEGABYTE}


def _memory_of_all() -> int:
    here = psutil.Process(os.getpid())
    return sum(process.memory_full_info().pss for process in (here, *here.children(recursive=True)))


_MEASURES: dict[str, Callable[..., dict[str, Any]]] = {
    "rate": _rate,
    "first_batch": _first_batch,
    "resume": _resume,
    "memory": _memory,
}


@dataclasses.dataclass(frozen=True)
class Content:
    """The content that a stream delivered."""

    count: int
    digest: int


def expected_content(work: Work, view: Callable[[Any], Any]) -> Content:
    """Returns the content of the work by the shortest Python: one batch of all records."""
    rng = np.random.default_rng(0)
    records = apply_to_many(work.steps, _records(work.source), rng)
    if work.row_length is not None:
        # Packing keeps the documents, whatever the rows.
        return _content_of_rows([{"/": view(record)} for record in records])
    return content_of([stacked(records)], view)


def content_of(batches: Iterable[Any], view: Callable[[Any], Any]) -> Content:
    """Returns the content of batches, whose rows are what `view` makes of them: arrays, or lists of arrays."""
    rows: list[dict[str, Any]] = []
    for batch in batches:
        leaves = [(path, [np.asarray(row) for row in leaf]) for path, leaf in _leaves(view(batch), "")]
        rows += [{path: leaf[row] for path, leaf in leaves} for row in range(len(leaves[0][1]))]
    return _content_of_rows(rows)


def _content_of_rows(rows: list[dict[str, Any]]) -> Content:
    return Content(len(rows), sum(map(_hash, rows)) % _MODULUS)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name in sorted(value):
            yield from _leaves(value[name], f"{path}/{name}")
    else:
        yield path, value


def _hash(row: dict[str, Any]) -> int:
    whole = hashlib.blake2b(digest_size=8)
    for path, value in row.items():
        array = np.asarray(value)
        content = array.tobytes()
        whole.update(repr((path, array.dtype.str, array.shape, len(content))).encode() + content)
    return int.from_bytes(whole.digest(), "little")


def _records(source: Any) -> list[Any]:
    """Returns all records, by the libraries of their formats."""
    match source:
        case Records(values):
            return list(values)
        case Columns(arrays):
            names = list(arrays)
            return [dict(zip(names, row, strict=True)) for row in zip(*arrays.values(), strict=True)]
        case Mixture(parts):
            return [record for part in parts for record in _records(part)]
        case Files(paths=paths, format="json_lines"):
            return [json.loads(line) for path in paths for line in Path(path).read_text().splitlines()]
        case Files(paths=paths, format="parquet"):
            import pyarrow.parquet as pq  # noqa: PLC0415

            return [row for path in paths for row in pq.read_table(path).to_pylist()]
        case Files(paths=paths):
            from array_record.python.array_record_module import ArrayRecordReader  # noqa: PLC0415

            return [record for path in paths for record in ArrayRecordReader(path).read_all()]
    raise TypeError(f"{source!r} is no source")
