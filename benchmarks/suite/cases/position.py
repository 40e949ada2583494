"""Positions in the stream: how long it takes to save one, to restore one, and to order very many records."""

import functools
import time
from collections.abc import Callable
from statistics import median
from typing import Any

from suite import data
from suite.case import Case, Contender, Goal, Measurement, Pick, Run, UnsupportedError
from suite.contenders import modes
from suite.peers import PEERS
from suite.peers.base import Position, Stream
from suite.scale import Scale
from suite.steps import identity
from suite.work import Map, Records, Work

FAR_STEP = 10**9
NUM_RECORDS = 10**12
NUM_BLOCKS = 16
BLOCK = 1024


def _endless(scale: Scale) -> Work:
    return Work(Records(data.integers(scale.pick(tiny=2048, quick=1 << 16, full=1 << 16))), (Map(identity),), 256)


def _opened(run: Run) -> tuple[Stream, Position]:
    stream = PEERS[run.contender.peer].adapter().open(run.work(), run.contender)
    if stream.position is None:
        raise UnsupportedError("it has no state: a resumed run reads everything again")
    for _ in range(8):
        next(stream.batches)
    return stream, stream.position


def _milliseconds(times: int, action: Callable[[], Any]) -> float:
    found = []
    for _ in range(times):
        start = time.perf_counter()
        action()
        found.append(time.perf_counter() - start)
    return 1e3 * median(found)


def _measure_between(run: Run, times: int, action_of: Callable[[Position], Callable[[], Any]]) -> Measurement:
    """Returns the median of the microseconds that an action takes between two batches."""
    stream, position = _opened(run)
    action = action_of(position)
    run.gate()
    found = []
    for _ in range(times):
        next(stream.batches)
        found.append(1e3 * _milliseconds(1, action))
    stream.close()
    return Measurement(median(found))


def measure_get_state(run: Run) -> Measurement:
    """Returns the microseconds that it takes to take a state."""
    return _measure_between(run, run.scale.pick(tiny=3, quick=50, full=200), lambda position: position.get_state)


def measure_set_state(run: Run) -> Measurement:
    """Returns the microseconds that it takes to set a state, nothing read there yet."""

    def set_state(position: Position) -> Callable[[], Any]:
        return functools.partial(position.set_state, position.get_state())

    return _measure_between(run, run.scale.pick(tiny=2, quick=10, full=30), set_state)


def measure_resume(run: Run, *, step: int) -> Measurement:
    """Returns the milliseconds from a state at a step to the batch there."""
    stream, position = _opened(run)
    state = position.state_at(step)
    run.gate()

    def resume() -> None:
        position.set_state(state)
        next(stream.batches)

    value = _milliseconds(run.scale.pick(tiny=2, quick=5, full=100), resume)
    stream.close()
    return Measurement(value)


_measure_near = functools.partial(measure_resume, step=16)
_measure_far = functools.partial(measure_resume, step=FAR_STEP)


def measure_sampler(run: Run) -> Measurement:
    """Returns the milliseconds for a new sampler of 10^12 records and 16 runs of 1,024 keys all over the epoch."""
    adapter: Any = PEERS[run.contender.peer].adapter()
    starts = [block * (NUM_RECORDS // NUM_BLOCKS) for block in range(NUM_BLOCKS)]
    run.gate()
    keys = adapter.sample_keys(NUM_RECORDS, starts, BLOCK)
    if len({int(key) for block in keys for key in block}) != NUM_BLOCKS * BLOCK:
        raise ValueError("The sampler gave a record twice.")
    times = run.scale.pick(tiny=1, quick=3, full=5)
    return Measurement(_milliseconds(times, lambda: adapter.sample_keys(NUM_RECORDS, starts, BLOCK)))


def _case(
    name: str, title: str, unit: str, measure: Callable[[Run], Measurement], goals: tuple[Goal, ...] = ()
) -> Case:
    return Case(
        name=name,
        title=title,
        make_work=_endless,
        contenders=(*modes("millstream"), *modes("grain", "DataLoader", "Dataset"), Contender("pytorch")),
        goals=goals,
        measure=measure,
        unit=unit,
        higher_is_better=False,
    )


CASES = (
    _case("get_state", "to take a state", "µs", measure_get_state, (Goal("within 50 µs", 1, 50.0),)),
    _case("set_state", "to set a state, nothing read there yet", "µs", measure_set_state),
    _case("resume_near", "from a state at step 16 to the batch there", "ms", _measure_near),
    _case(
        "resume_far",
        "from a state at step 10^9 to the batch there",
        "ms",
        _measure_far,
        (
            Goal(
                "as long as near the beginning, 1.5 times at most",
                1 / 1.5,
                Pick("millstream", case="resume_near"),
            ),
        ),
    ),
    Case(
        name="sampler",
        title="a new shuffling sampler of 10^12 records, and 16 runs of 1,024 keys from it",
        make_work=_endless,
        contenders=(Contender("millstream"), Contender("grain", mode="DataLoader"), Contender("pytorch")),
        measure=measure_sampler,
        unit="ms",
        higher_is_better=False,
    ),
)
