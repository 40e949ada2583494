"""The soak finds what is broken: it would be worth nothing if it could not fail."""

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from millstream.samplers import SequentialSampler
from soak.courses import Course
from support.faults.user_faults import WAIT_SECONDS
from support.processes.worker_pools import environment
from support.public_samplers import public_samplers


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
        timeout=4 * WAIT_SECONDS,
    )
    return done.returncode, done.stdout


def test_every_public_sampler_is_soaked() -> None:
    """Among the first courses, each class of samplers occurs; one that only fixes options of another need not."""
    occurring = {kind for seed in range(300) for kind in kinds_in(Course.of(seed).sampler)}

    assert set(public_samplers().values()) - {SequentialSampler} - occurring == set()


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_course_can_begin() -> None:
    """Each of the first courses, as each host that it allows, makes an iterator that is at its beginning."""
    for seed in range(300):
        course = Course.of(seed)
        for count in course.shard_counts:
            with iter(course.loader(range(course.size), 0, count)) as iterator:
                assert iterator.step == 0


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("stream", "another batch at step"),
        ("leak", "has left behind: 1 descriptors"),
        ("memory", "memory grows"),
        ("hang", "took more than 2 s"),
    ],
)
def test_what_is_broken_is_found(broken: str, words: str) -> None:
    """A wrong batch, leaks and a hang each fail a trial; for a wrong batch, so does the command that is printed."""
    how = [f"--broken={broken}", "--limit=2" if broken == "hang" else "--limit=60"]
    # A trial of one life, which nothing kills before it has seen what is broken.
    status, told = soaked("--minutes=0.0001", "--first-seed=321", *how)
    assert (status, words in told) == (1, True), told
    seed = re.search(r"make soak SEED=(\d+)", told)
    assert seed is not None
    if broken == "stream":
        status, told = soaked(f"--seed={seed[1]}", *how)
        assert (status, words in told) == (1, True), told


def test_workers_and_trainers_are_killed_again_and_again() -> None:
    """Each trainer resumes where the one before saved, five workers are killed, and every batch is the oracle's."""
    status, printed = soaked("--kills=5", "--first-seed=56", "--limit=60")
    assert (status, "failed 0" in printed) == (0, True), printed
    assert int(re.findall(r"killed worker (\d+)", printed)[-1]) >= 5
    assert int(re.findall(r"killed trainer (\d+)", printed)[-1]) >= 1
