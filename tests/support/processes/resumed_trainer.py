"""A program that trains with worker processes, saves its position every few steps, and resumes from there.

    python resumed_trainer.py KIND WORKER_COUNT STATE_FILE

It prints where it begins and what each batch is: the latter stands for training.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np

import millstream
from millstream.transforms import Batch, Filter, FlatMap, RandomMap, Transformation

SIZE = 100
STEPS_PER_STATE = 4
SAMPLER = millstream.IndexSampler(SIZE, shuffle=True, num_epochs=2, seed=21)


class Noise(RandomMap):
    """Adds a random number."""

    def random_map(self, element: int, rng: np.random.Generator) -> int:
        """Returns the element plus a large draw."""
        return element + int(rng.integers(1 << 30)) * SIZE


class NotThird(Filter):
    """Drops multiples of three."""

    def filter(self, element: int) -> bool:
        """Says whether the record's number is not a multiple of three."""
        return element % SIZE % 3 != 0


class Repeat(FlatMap):
    """Repeats elements up to three times."""

    max_fan_out = 3

    def flat_map(self, element: int) -> list[int]:
        """Returns the element as often as it says."""
        return [element] * (element % 4)


PIPELINES: dict[str, list[Transformation]] = {
    "batches": [Noise(), Batch(3)],
    "regrouped": [Noise(), NotThird(), Repeat(), Batch(4, drop_remainder=True), Batch(2)],
    "elements": [Repeat(), Noise()],
}


def text_of(batch: Any) -> str:
    """Returns a batch as one line."""
    return repr(np.asarray(batch).tolist()).replace(" ", "")


def say(*words: object) -> None:
    """Writes a line on standard output, at once."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def train(kind: str, worker_count: int, state_file: Path) -> None:
    """Trains until the stream ends."""
    loader = millstream.DataLoader(
        data_source=range(SIZE), sampler=SAMPLER, operations=PIPELINES[kind], worker_count=worker_count
    )
    with iter(loader) as iterator:
        if state_file.exists():
            iterator.set_state(state_file.read_bytes())
        say("begin", iterator.step)
        for batch in iterator:
            say("batch", text_of(batch))
            if iterator.step % STEPS_PER_STATE == 0:
                unfinished = state_file.with_suffix(".new")
                unfinished.write_bytes(iterator.get_state())
                unfinished.replace(state_file)
    say("end")


if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
