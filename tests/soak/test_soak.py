"""The soak finds what is broken: it would be worth nothing if it could not fail."""

import re
import subprocess
import sys

import pytest

from support.faults.user_faults import WAIT_SECONDS
from support.processes.worker_pools import environment


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


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ("stream", "another batch at step"),
        ("leak", "has left behind: 1 descriptors"),
        ("memory", "memory grows"),
        ("hang", "took more than 5 s"),
    ],
)
def test_what_is_broken_is_found_and_its_seed_repeats_it(broken: str, words: str) -> None:
    """A wrong batch, leaks and a hang each fail a trial, and the command that is printed fails in the same way."""
    how = [f"--broken={broken}", "--limit=5" if broken == "hang" else "--limit=60"]
    # A trial of one life, which nothing kills before it has seen what is broken.
    status, told = soaked("--minutes=0.0001", "--first-seed=321", *how)
    assert (status, words in told) == (1, True), told
    seed = re.search(r"make soak SEED=(\d+)", told)
    assert seed is not None
    status, told = soaked(f"--seed={seed[1]}", *how)
    assert (status, words in told) == (1, True), told


def test_workers_and_trainers_are_killed_again_and_again() -> None:
    """Each trainer resumes where the one before saved, ten workers are killed, and every batch is the oracle's."""
    status, printed = soaked("--kills=10", "--first-seed=56", "--limit=60")
    assert (status, "failed 0" in printed) == (0, True), printed
    assert int(re.findall(r"killed worker (\d+)", printed)[-1]) >= 10
    assert int(re.findall(r"killed trainer (\d+)", printed)[-1]) >= 1
