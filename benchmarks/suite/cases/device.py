"""On the device before it is asked for: how much of its time a training step waits for batches."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from suite import data
from suite.case import Case, Contender, Goal, Measurement, Pick, Run
from suite.peers import PEERS
from suite.scale import Scale
from suite.work import Map, Records, Work

AHEAD = "device_put"
"""The mode in which batches are put on the device ahead of the training step; the other one waits for each."""


FETCH_SECONDS = 0.002


def fetch(number: int) -> NDArray[np.float32]:
    """Returns an image of 256 KB after 2 ms of waiting: loading takes as long however busy the machine is."""
    time.sleep(FETCH_SECONDS)
    return np.full(1 << 16, number, np.float32)


def _images(scale: Scale) -> Work:
    count = scale.pick(tiny=64, quick=4096, full=4096)
    return Work(Records(data.integers(count)), (Map(fetch),), scale.pick(tiny=4, quick=16, full=16))


def measure_idle(run: Run) -> Measurement:
    """Returns the percentage of the time that a training step, which takes as long as loading, waits in `next`.

    The step sleeps, as the host does while a device computes. How long loading takes, transfer included, is measured
    first, in the same process.
    """
    import jax  # noqa: PLC0415  (for this case only)

    import millstream  # noqa: PLC0415  (as above)

    batches: Any = PEERS[run.contender.peer].adapter().open(run.work(), run.contender).batches
    num_batches = run.scale.pick(tiny=3, quick=40, full=200)

    def take() -> None:
        jax.block_until_ready(jax.device_put(next(batches)))

    take()
    seconds = _seconds_for(num_batches, take) / num_batches
    if run.contender.mode == AHEAD:
        batches = millstream.device_put(batches)
    take()
    run.gate()
    start = time.perf_counter()
    idle = 0.0
    for _ in range(num_batches):
        time.sleep(seconds)
        idle += _seconds_for(1, take)
    whole = time.perf_counter() - start
    batches.close()
    return Measurement(100 * idle / whole, {"milliseconds_per_step": 1e3 * seconds})


def _seconds_for(times: int, action: Callable[[], None]) -> float:
    """Returns how long it takes to do something this often."""
    start = time.perf_counter()
    for _ in range(times):
        action()
    return time.perf_counter() - start


CASES = (
    Case(
        name="device",
        title="a training step that takes as long as loading; its time in `next`, transfer to the device included",
        make_work=_images,
        contenders=(
            Contender("millstream"),
            Contender("millstream", mode=AHEAD),
            Contender("millstream", workers=1),
            Contender("millstream", workers=1, mode=AHEAD),
        ),
        goals=(
            Goal("less than 5 % with device_put, without workers", 1, 5.0, Pick("millstream", 0, AHEAD)),
            Goal("less than 5 % with device_put and a worker", 1, 5.0, Pick("millstream", 1, AHEAD)),
        ),
        measure=measure_idle,
        unit="% of the time",
        higher_is_better=False,
    ),
)
