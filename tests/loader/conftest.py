"""Fixtures of the tests of loaders."""

import time
from collections.abc import Iterator

import pytest

import millstream
from millstream.loader.engine import policy
from millstream.transforms.packing import concat_then_split
from support.clocks.owned_clock import CLOCK
from support.draw.random_groupings import ROW


@pytest.fixture(params=["inline", "threads"])
def reading(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> millstream.ReadOptions:
    """Options under which the consumer makes every block, and ones under which threads make them all."""
    monkeypatch.setattr(policy, "HAND_OVER_SECONDS", 0.0)
    return millstream.ReadOptions(num_threads=0 if request.param == "inline" else 3)


@pytest.fixture(scope="module")
def small_groups() -> Iterator[None]:
    """Makes ConcatThenSplit form groups of few rows, so that short streams have several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(concat_then_split, "TOKENS_TOGETHER", 3 * ROW)
        yield


@pytest.fixture
def owned_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives this process a clock of the test's own; workers get theirs with what spends."""
    monkeypatch.setattr(time, "perf_counter", CLOCK.perf_counter)
