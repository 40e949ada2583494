"""A trainer that is killed again and again, and resumed each time, has seen the stream of one that never was."""

import json
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
from worker_pools import environment

import millstream

TRAINER = """
import json, os, sys
from pathlib import Path
import test_crash_resume_pipeline as pipeline

folder = Path(sys.argv[1])
state, partial = folder / "state", folder / "state.partial"
with iter(pipeline.make_loader(int(sys.argv[2]))) as iterator:
    if state.exists():
        iterator.set_state(state.read_bytes())
    for batch in iterator:
        # Long lines: the pipe holds few of them, so that the trainer does not run far ahead of who kills it.
        print(json.dumps([iterator.step, batch.tolist(), " " * 1000]), flush=True)
        if iterator.step % 3 == 0:
            partial.write_bytes(iterator.get_state())
            os.replace(partial, state)
"""

PIPELINE = """
import numpy as np
import millstream

def jitter(element, rng):
    return element * 1000 + rng.integers(1000)

def keep(element):
    return element % 3 != 0

def make_loader(worker_count):
    return millstream.DataLoader(
        data_source=range(90),
        sampler=millstream.IndexSampler(90, shuffle=True, num_epochs=2, seed=9),
        operations=[*OPERATIONS, millstream.Batch(4)],
        worker_count=worker_count,
    )
"""


@pytest.mark.parametrize(
    "operations",
    [
        "[millstream.RandomMapTransform(jitter)]",
        "[millstream.FilterTransform(keep), millstream.RandomMapTransform(jitter)]",
    ],
)
def test_the_stream_over_all_lives_of_a_trainer(operations: str, tmp_path: Path) -> None:
    """What each life delivered, cut where the next one resumed, is the stream without any crash, to the last batch."""
    pipeline = PIPELINE.replace("def make_loader", f"OPERATIONS = {operations}\n\ndef make_loader")
    (tmp_path / "test_crash_resume_pipeline.py").write_text(pipeline)
    namespace: dict[str, object] = {"np": np, "millstream": millstream}
    exec(pipeline, namespace)
    expected = [batch.tolist() for batch in namespace["make_loader"](0)]  # type: ignore[operator]
    chance = random.Random(len(operations))
    seen: dict[int, list[int]] = {}
    lives, last_step = 0, 0
    while last_step < len(expected):
        lives += 1
        state = tmp_path / "state"
        resumed_at = json.loads(state.read_bytes())["step"] if state.exists() else 0
        seen = {step: batch for step, batch in seen.items() if step <= resumed_at}
        command = [sys.executable, "-c", TRAINER, str(tmp_path), str(lives % 3)]
        # Long enough to pass a step at which the state is written.
        length = chance.randint(3, 7)
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, pipesize=4096, text=True, env=environment(tmp_path)
        ) as trainer:
            assert trainer.stdout is not None
            descendants: list[psutil.Process] = []
            for line in trainer.stdout:
                if not line.endswith("\n"):
                    break  # Cut off by the kill: it counts as never delivered, and nor does a state tell of it.
                last_step, batch, _ = json.loads(line)
                seen[last_step] = batch
                length -= 1
                if length == 0:
                    # What it has done in the meantime is in the pipe, and read as well.
                    descendants = psutil.Process(trainer.pid).children(recursive=True)
                    trainer.kill()
        assert psutil.wait_procs(descendants, timeout=10)[1] == []

    assert lives > 3
    assert [seen[step] for step in sorted(seen)] == expected
