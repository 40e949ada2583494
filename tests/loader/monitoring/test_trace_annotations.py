"""The names that a loader writes on the timelines of JAX's profiler."""

import gzip
import json
from pathlib import Path
from typing import Any

import jax
import pytest

import millstream
from millstream.core.trace_annotations import annotation
from support.processes.worker_pools import python

pytestmark = pytest.mark.third_party


def double(number: int) -> int:
    return 2 * number


def names_in(folder: Path) -> list[str]:
    """Returns the names of events of the library in a trace, which XProf and Perfetto read."""
    (path,) = folder.rglob("*.trace.json.gz")
    events: list[Any] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event.get("name", "").startswith("millstream")]


@pytest.mark.parametrize("enable_profiling", [False, True])
def test_waits_transfers_and_requested_stages_are_on_the_timeline(enable_profiling: bool, tmp_path: Path) -> None:
    """Each wait and each transfer is an event of a trace; each stage is one if the loader records a timeline."""
    loader = millstream.load(
        range(12), num_epochs=1, transformations=[double], batch_size=4, enable_profiling=enable_profiling
    )
    with jax.profiler.trace(str(tmp_path)), millstream.device_put(iter(loader)) as batches:
        assert len(list(batches)) == 3
    names = names_in(tmp_path)

    assert names.count("millstream: wait for a batch") >= 3
    assert names.count("millstream: transfer to the device") == 3
    for stage in ("keys", "read", "operations[0], Map(double)", "operations[1], Batch(batch_size=4)"):
        assert (f"millstream: {stage}" in names) is enable_profiling


def test_without_jax_there_is_no_annotation(tmp_path: Path) -> None:
    """In a process that has not imported JAX, an annotation does nothing, and imports nothing."""
    code = """
import sys
from millstream.core.trace_annotations import annotation
with annotation("wait") as nothing:
    print(nothing, "jax" in sys.modules)
"""
    assert python("-c", code, cwd=tmp_path, check=True).stdout == "None False\n"
    assert type(annotation("wait")).__name__ == "TraceAnnotation"
