"""A trainer that is killed again and again, at any moment, sees in the end the stream of one that never was killed."""

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Self

import psutil
import pytest

from support.oracle.stream import oracle
from support.processes import resumed_trainer
from support.processes.resumed_trainer import PIPELINES, SAMPLER, SIZE, text_of
from support.processes.worker_pools import still_there

KILLS = 5


class Life:
    """One life of the trainer, from its start to its end."""

    def __init__(self, kind: str, worker_count: int, state_file: Path) -> None:
        self.batches: list[str] = []
        # All that it starts inherits this.
        self._mark = f"{state_file}:{os.urandom(8).hex()}"
        self.process = subprocess.Popen(
            [sys.executable, resumed_trainer.__file__, kind, str(worker_count), str(state_file)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "LIFE": self._mark},
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Kills the trainer, whatever it is doing: all that it has started ends as well."""
        self.process.kill()
        # What it has printed since it was last read.
        rest = self.process.communicate()[0]
        for line in rest.splitlines():
            if line != "end":
                self.note(line.split())
        left = [process.pid for process in psutil.process_iter(["environ"]) if self._mark in marks_of(process)]
        assert still_there(left, 1.0) == []

    def first_step(self) -> int:
        """Returns the step at which the trainer begins."""
        word, step = self.next_line()
        assert word == "begin"
        return int(step)

    def next_line(self) -> list[str]:
        """Returns the words of the trainer's next line."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().split()

    def train(self, count: int) -> None:
        """Waits until it has trained on this many batches, or has ended."""
        while len(self.batches) < count and (words := self.next_line()) != ["end"]:
            self.note(words)

    def note(self, words: list[str]) -> None:
        """Records a batch."""
        word, batch = words
        assert word == "batch"
        self.batches.append(batch)


def marks_of(process: psutil.Process) -> list[str]:
    """Returns the values in a process's environment, as far as they can be seen."""
    return list((process.info["environ"] or {}).values())


@pytest.mark.parametrize("kind", sorted(PIPELINES))
def test_a_trainer_killed_again_and_again_sees_the_oracles_stream(kind: str, tmp_path: Path) -> None:
    """Each life resumes at the last state saved, with as many workers as it likes; no process outlives one.

    What was trained on after that state is trained on again: it is cut off where the next life begins.
    """
    expected = [text_of(batch) for batch in oracle(range(SIZE), SAMPLER, PIPELINES[kind])]
    chance, state_file = random.Random(7), tmp_path / "state"
    trained: list[str] = []
    for _ in range(KILLS):
        with Life(kind, chance.choice([1, 2, 2, 3]), state_file) as life:
            step = life.first_step()
            life.train(chance.randrange(len(expected) // KILLS * 2))
        assert step <= len(trained)
        trained = trained[:step] + life.batches
    with Life(kind, 2, state_file) as life:
        step = life.first_step()
        life.train(len(expected))
        assert life.process.wait() == 0

    assert trained[:step] + life.batches == expected
