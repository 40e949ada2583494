"""Trainers that can be looked at, in processes of their own."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

TRAINER = """
import itertools, sys, time
import millstream

def slowly_doubled(value):
    time.sleep(0.001)
    return 2 * value

loader = millstream.load(
    range(64), shuffle=True, seed=0, transformations=[slowly_doubled], batch_size=8, worker_count=int(sys.argv[1])
)
batches = iter(loader)
next(batches)
print("ready", flush=True)
for batch in batches:
    time.sleep(0.001)
"""


@contextlib.contextmanager
def top_trainer(runtime: Path, *arguments: object, **variables: str) -> Iterator[subprocess.Popen[str]]:
    """Yields a trainer that has its first batch, and trains until it is killed.

    Args:
        runtime: the folder for this user's sockets.
        arguments: how many workers it has.
        variables: further variables of its environment.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=runtime,
        env={**os.environ, "XDG_RUNTIME_DIR": str(runtime), **variables},
        start_new_session=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()
