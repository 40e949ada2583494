"""Where the time of millstream goes: its plan's stages, each timed once per block.

The stages are millstream's own compiled steps with a clock around them, so that nothing is measured that does not run
otherwise. What is left of the whole time is the schedule, the iterator and the clocks themselves.
"""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from suite.case import Run
from suite.peers import PEERS
from suite.throughput import _take_for, _taker


def break_down(run: Run) -> dict[str, float]:
    """Returns µs per delivered record for each stage, in the consumer's process, without workers and threads."""
    work = run.work()
    stream = PEERS["millstream"].adapter().open(work, run.contender)
    plan = stream.loader._plan  # noqa: SLF001  (the stages have no public face)
    clocks: dict[str, float] = {}
    plan.locate = _timed(plan.locate, clocks, "keys")
    plan._read = _timed(plan._read, clocks, "read")  # noqa: SLF001
    plan.phases = tuple(_timed_phase(plan, phase, clocks) for phase in plan.phases)
    run.gate()
    take = _taker(stream.batches, work.batch_size, run.case.consume)
    _take_for(take, run.scale.warm_seconds, at_least=2)
    clocks.clear()
    records, seconds = _take_for(take, run.scale.seconds, at_least=2)
    stream.close()
    stages = {name: 1e6 * spent / records for name, spent in clocks.items()}
    return {**stages, "the rest": 1e6 * seconds / records - sum(stages.values())}


def _timed_phase(plan: Any, phase: Any, clocks: dict[str, float]) -> Any:
    operations = plan._recipe[2]  # noqa: SLF001
    before = sum(len(other.steps) for other in plan.phases[: plan.phases.index(phase)])
    steps = tuple(
        _timed(step, clocks, f"{before + number}: {type(operations[before + number]).__name__}")
        for number, step in enumerate(phase.steps)
    )
    return dataclasses.replace(phase, steps=steps)


def _timed(function: Callable[..., Any], clocks: dict[str, float], name: str) -> Callable[..., Any]:
    def timed(*arguments: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments)
        finally:
            clocks[name] = clocks.get(name, 0.0) + time.perf_counter() - start

    return timed
