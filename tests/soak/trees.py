"""A life in the soak that reads random trees of streams, in all places: nothing may differ, be left, or take long.

    python trees.py '{"seed": 7, "count": 20}'

Each tree is read in the consumer's thread, in others and in workers, which are killed, and resumed from everywhere. A
signal interrupts some of its readers. It prints what it saw, as JSON.
"""

import collections
import contextlib
import faulthandler
import gc
import itertools
import json
import logging
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, note, seed, settings
from hypothesis import strategies as st

from support.draw.shares import Elastic, elastic
from support.draw.streams import ERRORS, Place, Stream, UndecidedError, streams
from support.everywhere import (
    THREADS,
    assert_same_everywhere,
    assert_shares_are_the_whole,
    assert_survives_interrupts,
    check_rest,
    in_workers,
    position_of,
    read,
)
from support.processes.moves import move_at_random
from support.processes.process_tree import open_descriptors, our_threads, processes_below

LEFT_SECONDS = 10.0
"""The seconds within which what a tree has started must be gone, on a busy machine."""


def law(stream: Stream, chance: random.Random, seen: collections.Counter[str]) -> None:
    """Checks one tree."""
    if stream.outcome()[1] == UndecidedError.__name__:
        return
    errors, kills = chance.choice(ERRORS), chance.random() < 0.5
    places = [chance.choice(THREADS), in_workers(chance), in_workers(chance, ["auto"])]
    note(f"{stream!r}\n{places}, {errors}, kills {kills}")
    with pytest.MonkeyPatch.context() as patch:
        if chance.random() < 0.5:
            move_at_random(patch, random.Random(chance.random()))
        seen["readings of trees"] += assert_same_everywhere(stream, chance, places, errors, kills=kills)
        for place in places:
            seen["interrupts of trees"] += assert_survives_interrupts(stream, chance, place)
            seen["signals to trees"] += survives_signals(stream, chance, place)
    seen["trees"] += 1


def survives_signals(stream: Stream, chance: random.Random, place: Place) -> int:
    """Reads a stream while signals interrupt it, and returns how many did."""
    with iter(stream.dataset()) as iterator:
        whole = read(iterator)._replace(has_two_ends=stream.has_two_ends)
    num_signals = position = 0
    with iter(stream.dataset(place)) as iterator:
        for _ in range(4):
            got: list[Any] = []
            try:
                with signal_after(2 ** chance.uniform(-12, -4)):
                    got.extend(itertools.islice(iterator, 4))
            except KeyboardInterrupt:
                num_signals += 1
            except Exception:  # noqa: BLE001  (those of the stream are compared below)
                pass
            before, position = position, position_of(iterator, stream.dataset(), whole)
            assert position - before in {len(got), len(got) + 1}
            assert got == whole.values[before : before + len(got)]
        check_rest(read(iterator), whole, position, None)
    return num_signals


@contextlib.contextmanager
def signal_after(seconds: float) -> Iterator[None]:
    """Raises KeyboardInterrupt in the block, if it takes longer than some seconds."""
    is_inside = True

    def interrupt(*_: Any) -> None:
        if is_inside:
            raise KeyboardInterrupt

    handler = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        yield
    finally:
        is_inside = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def check_nothing_is_left(descriptors: set[str]) -> None:
    deadline = time.monotonic() + LEFT_SECONDS
    while True:
        gc.collect()
        left: list[object] = [*our_threads(), *processes_below()]
        more = open_descriptors() - descriptors
        if not left and not more:
            return
        assert time.monotonic() < deadline, f"a tree has left {left} and {more} behind"


def report_unraisable(unraisable: Any) -> None:
    """Reports an error that Python cannot raise. An interrupt in a destructor or a callback of Python's is lost."""
    if not isinstance(unraisable.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(unraisable)


def main() -> None:
    """Reads the trees of a seed."""
    orders = json.loads(sys.argv[1])
    seen: collections.Counter[str] = collections.Counter()
    descriptors = open_descriptors()

    @seed(orders["seed"])
    @settings(
        max_examples=orders["count"],
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(streams(7, fails=True), elastic(fails=True), st.integers(0, 2**32))
    def check(stream: Stream, shares: Elastic, number: int) -> None:
        chance = random.Random(number)
        law(stream, chance, seen)
        assert_shares_are_the_whole(shares, chance, [chance.choice(THREADS), in_workers(chance)])
        seen["shares of chains"] += 1
        del stream, shares
        check_nothing_is_left(descriptors)

    check()
    print(json.dumps({"seen": seen, "most": {}}))  # noqa: T201  (this is its answer)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.unraisablehook = report_unraisable
    logging.getLogger("millstream").setLevel(logging.CRITICAL)
    faulthandler.dump_traceback_later(float(os.environ["SOAK_LIMIT_SECONDS"]) * 0.9)
    main()
