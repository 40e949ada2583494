"""The soak finds what is broken: it would be worth nothing if it could not fail."""

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from millstream.samplers import SequentialSampler
from soak.__main__ import Soak, TrialError
from soak.courses import Course
from soak.faults import Fault, KilledForkServer, KilledWorkers, StoppedWorkers
from support.draw.orders import public_samplers
from support.faults.user_faults import WAIT_SECONDS
from support.processes.worker_pools import environment

pytestmark = pytest.mark.slow

LIMIT_SECONDS = 3 * WAIT_SECONDS
"""The time limit of each life, however busy the machine is."""


def kinds_in(sampler: Any) -> Iterator[type]:
    """Yields the class of a sampler and the classes of those inside it, with their base classes."""
    yield from type(sampler).mro()
    for inner in (*getattr(sampler, "samplers", ()), *([sampler.order] if hasattr(sampler, "order") else ())):
        yield from kinds_in(inner)


def soaked(*arguments: str) -> tuple[int, str]:
    """Returns the exit status of a soak, and what it prints."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "soak", *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=9 * WAIT_SECONDS,
    )
    return done.returncode, done.stdout


def test_every_public_sampler_is_soaked() -> None:
    """Among the first courses, each class of samplers occurs; one that only fixes options of another need not."""
    occurring = {kind for seed in range(300) for kind in kinds_in(Course.of(seed).sampler)}

    assert set(public_samplers().values()) - {SequentialSampler} - occurring == set()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_course_can_begin() -> None:
    """Each of the first courses, as each host that it allows, makes an iterator that is at its beginning."""
    for seed in range(100):
        course = Course.of(seed)
        for count in course.shard_counts:
            with iter(course.loader(range(course.size), 0, count)) as iterator:
                assert iterator.step == 0


@pytest.mark.parametrize(
    ("broken", "limit", "words"),
    [
        ("leak", LIMIT_SECONDS, "has left behind: 1 descriptors"),
        ("memory", LIMIT_SECONDS, "memory grows"),
        ("hang", 2.0, "took more than 2 s"),
    ],
)
def test_what_is_broken_is_found(broken: str, limit: float, words: str) -> None:
    """Leaks and a hang each fail a trial: here one of one life, which nothing kills before it has seen them."""
    with pytest.raises(TrialError, match=words):
        Soak(limit, broken).trial(321)


def test_a_trial_that_failed_is_repeated_by_its_command() -> None:
    """A wrong batch fails a trial, and so it does in the command that is printed."""
    how = ["--broken=stream", f"--limit={LIMIT_SECONDS}"]
    status, printed = soaked("--minutes=0.0001", "--first-seed=321", *how)
    assert (status, "another batch at step" in printed) == (1, True), printed
    seed = re.search(r"make soak SEED=(\d+)", printed)
    assert seed is not None
    status, printed = soaked(f"--seed={seed[1]}", *how)
    assert (status, "another batch at step" in printed) == (1, True), printed


@pytest.mark.parametrize(("fault", "times"), [(KilledWorkers, 5), (StoppedWorkers, 3), (KilledForkServer, 3)])
def test_whatever_happens_to_workers_and_trainers_the_stream_is_the_oracles(fault: type[Fault], times: int) -> None:
    """Each trainer resumes where the one before saved, and moves; workers are killed or stopped; no batch differs."""
    soak = Soak(LIMIT_SECONDS, "", fault.name)
    soak.trial(56)
    assert soak.seen[fault.name] >= times
    assert soak.seen["killed trainer"] >= 1
    assert soak.seen["moves"] >= 1
