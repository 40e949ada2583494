"""The cost of a batch in the consumer's thread does not grow unseen: calls of Python functions, and processor time.

Both are compared with `costs.json`, which `python tests/benchmarks/test_cost_of_a_batch.py` writes anew after a change
that is meant. Wall time says nothing on a machine that does other things; processor time is divided by that of a fixed
piece of Python and NumPy, measured in turn, so that it means the same on another machine.
"""

import json
import math
import operator
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream

COSTS = Path(__file__).with_name("costs.json")
LIMIT = 1.3
"""The factor over the written cost from which on it is a failure."""

BATCHES = 10
ROUNDS = 30
"""Short rounds, and many: the lowest counts, as one that was disturbed says nothing."""
PATIENCE_SECONDS = 60.0
"""The time for which more rounds follow on a machine that does much else, and disturbs each of them."""


def draw(value: int, rng: np.random.Generator) -> float:
    return value + rng.random()


def is_even(value: int) -> bool:
    return value % 2 == 0


def same(value: Any) -> Any:
    return value


def document(value: int) -> dict[str, Any]:
    return {"tokens": np.zeros(value % 300 + 1, np.int32)}


def numbers() -> Any:
    return loader_of(range(1 << 20), millstream.RandomMap(draw))


def filtered() -> Any:
    return loader_of(list(range(1 << 16)), millstream.Filter(is_even))


def rows() -> Any:
    return loader_of(millstream.InMemoryDataSource({"x": np.zeros((1 << 14, 64), np.float32)}))


def copied() -> Any:
    """Dicts in memory, each of which is copied with its array and its list for every reader."""
    records = [{"id": number, "x": np.zeros(4), "tags": [number]} for number in range(1 << 12)]
    return loader_of(records, operator.itemgetter("id"))


def images() -> Any:
    """Arrays in memory that are copied to where their batch will be, and not again."""
    return loader_of([np.full((96, 64, 3), number, np.uint8) for number in range(256)], same)


def listed() -> Any:
    """Texts in memory, and batches that are lists of them."""
    texts = [f"The text number {number}." for number in range(1 << 14)]
    return loader_of(texts, millstream.Batch(64, batch_fn=list), size=None)


def stacked() -> Any:
    """Dicts in memory that are only stacked, and therefore not copied."""
    return loader_of([{"id": number, "x": float(number)} for number in range(1 << 14)])


def packed() -> Any:
    return loader_of(range(1 << 20), document, millstream.FirstFitPack({"tokens": 512}, num_packing_bins=16), size=8)


def mixed() -> Any:
    parts = [list(range(1000)) for _ in range(64)]
    samplers = [millstream.IndexSampler(1000, shuffle=True, seed=seed) for seed in range(64)]
    return millstream.DataLoader(
        data_source=millstream.ConcatenatedDataSource(parts),
        sampler=millstream.MixtureSampler(samplers, [1] * 64),
        operations=[millstream.Batch(64)],
    )


def chain() -> Any:
    return millstream.MapDataset.source(range(1 << 20)).shuffle(seed=0).map(abs).repeat().to_iter_dataset().batch(64)


def loader_of(source: Any, *operations: Any, size: int | None = 64) -> Any:
    return millstream.load(
        source,
        shuffle=True,
        seed=0,
        transformations=operations,
        batch_size=size,
        read_options=millstream.ReadOptions(num_threads=0),
    )


CASES: dict[str, Callable[[], Any]] = {
    make.__name__: make for make in (numbers, filtered, rows, copied, images, listed, stacked, packed, mixed, chain)
}


def calls_of(batches: Iterator[Any]) -> float:
    """Returns the number of Python functions that are called for a batch, on average."""
    count = 0

    def note(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        take(batches)
    finally:
        sys.setprofile(before)
    return count / BATCHES


def take(batches: Iterator[Any]) -> None:
    for _ in range(BATCHES):
        next(batches)


def fixed_work(repeats: int) -> None:
    """Does what a loader does, always the same: small functions, dicts, and arrays that are laid end to end."""
    found: dict[int, Any] = {}
    for number in range(1000 * repeats):
        found[number % 64] = abs(number) + len(found)
        if number % 16 == 0:
            np.concatenate([np.arange(64), np.zeros(64, np.int64)])


def seconds_of(action: Callable[[], Any]) -> float:
    start = time.process_time()
    action()
    return time.process_time() - start


def measured(name: str, expected: float = 1.0, limit: float = math.inf) -> dict[str, float]:
    """Returns the calls per batch of a case, and its lowest processor time in those of the fixed work.

    The fixed work is done as often as takes the expected time, because longer work is disturbed more often. If the time
    is above the limit, more rounds show whether it is so for another reason.
    """
    repeats = max(1, round(expected))
    ours = fixed = math.inf
    num_rounds, deadline = 0, time.monotonic() + PATIENCE_SECONDS
    with iter(CASES[name]()) as batches:
        take(batches)
        calls = sum(calls_of(batches) for _ in range(20)) / 20
        while num_rounds < ROUNDS or (ours / fixed > limit and time.monotonic() < deadline):
            ours = min(ours, seconds_of(lambda: take(batches)))
            fixed = min(fixed, seconds_of(lambda: fixed_work(repeats)) / repeats)
            num_rounds += 1
    return {"calls": round(calls, 1), "time": round(ours / fixed, 3)}


@pytest.mark.parametrize("name", CASES)
def test_a_batch_costs_no_more_than_it_did(name: str) -> None:
    """Neither the calls nor the processor time of a batch are more than 1.3 times those written down."""
    written = json.loads(COSTS.read_text())[name]
    found = measured(name, written["time"], LIMIT * written["time"])
    assert found["calls"] <= LIMIT * written["calls"], f"{name}: {found['calls']} calls a batch, {written} before"
    assert found["time"] <= LIMIT * written["time"], f"{name}: {found['time']} times the fixed work, {written} before"


if __name__ == "__main__":
    COSTS.write_text(json.dumps({name: measured(name) for name in CASES}, indent=1) + "\n")
