"""`millstream top` as a person meets it: real trainers, and a real terminal."""

import contextlib
import os
import pty
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from millstream.loader import monitoring
from millstream.loader.monitoring import served_processes
from millstream.tools.top_command import lines_of, plain, stack_lines
from support.faults.user_faults import WAIT_SECONDS
from support.processes.commands import COMMAND, run_here

QUICK = "--interval=0.2"

TRAINER = """
import itertools, sys, time
import millstream
from millstream.loader import monitoring

monitoring.SOCKETS = sys.argv[2]

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


@pytest.fixture(autouse=True)
def _own_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives sockets names of this test alone."""
    monkeypatch.setattr(monitoring, "SOCKETS", f"millstream-test-{os.getpid()}")
    # However busy the machine is.
    monkeypatch.setattr(monitoring, "CONNECT_SECONDS", 2 * WAIT_SECONDS)


@contextlib.contextmanager
def top_trainer(folder: Path, workers: int, **variables: str) -> Iterator["subprocess.Popen[str]"]:
    """Yields a trainer that has its first batch, and trains until it is killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", TRAINER, str(workers), monitoring.SOCKETS],
        stdout=subprocess.PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, **variables},
        start_new_session=True,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def top(folder: Path, *arguments: Any, status: int = 0) -> tuple[str, str]:
    return run_here("top", *arguments, folder=folder, status=status)


def test_a_look_at_a_trainer_with_workers(tmp_path: Path) -> None:
    """The trainer whose environment says so is listed, and a look shows rates, stages, workers, and where all are."""
    with top_trainer(tmp_path, 2, MILLSTREAM_TOP="1") as trainer:
        listed, _ = top(tmp_path, "--list")
        # A trainer that something keeps from its work all the while between two looks makes no batch.
        pictures = (top(tmp_path, trainer.pid, "--once", "--interval=1")[0] for _ in range(30))
        shown = next(text for text in pictures if all(rate > 0 for rate in rates_in(text)))
        # Python may crash where a thread changes its stack meanwhile (cpython#131580): the worker is replaced then.
        looks = (top(tmp_path, "--stacks", QUICK)[0] for _ in range(30))
        stacks = next(text for text in looks if len(re.findall(r"Stacks of worker process \d+", text)) == 2)

    assert re.findall(r"^ *(\d+)  ", listed, re.MULTILINE) == [str(trainer.pid)]
    assert shown.startswith(f"Process {trainer.pid}  ")
    assert "operations[0], Map(slowly_doubled)" in shown
    assert "prefetched" in shown
    assert len(re.findall(r"worker \d +pid \d+  [a-z].*, .* of a core, \d calls?", shown)) == 2
    assert f"Stacks of process {trainer.pid}" in stacks
    assert "MainThread" in stacks


def rates_in(text: str) -> list[float]:
    """Returns how many batches and records a second a picture shows."""
    (rates,) = re.findall(r"([\d,.]+) batches/s, ([\d,.]+) records/s", text)
    return [float(rate.replace(",", "")) for rate in rates]


def test_a_picture_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal the picture is drawn until q is pressed; an arrow, which begins as Escape does, only scrolls.

    Keys that arrive together all count.
    """
    monkeypatch.undo()  # The name that the other process knows.
    with top_trainer(tmp_path, 0, MILLSTREAM_TOP="1") as trainer:
        ours, theirs = pty.openpty()
        command = [*COMMAND, "top", str(trainer.pid), QUICK]
        variables = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
        with (
            subprocess.Popen(
                command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env=variables
            ) as looker,
            os.fdopen(ours, "r+b", buffering=0) as terminal,
        ):
            os.close(theirs)
            try:
                text = read_until(terminal.fileno(), "q quit")
                assert "Stacks of process" not in text
                terminal.write(b"\x1b[B")
                read_until(terminal.fileno(), "q quit")
                terminal.write(b"k\x1b[Bs")
                read_until(terminal.fileno(), f"Stacks of process {trainer.pid}")
                terminal.write(b"jq")
                assert looker.wait(WAIT_SECONDS) == 0
            finally:
                looker.kill()

    assert "batches/s" in text
    assert "\x1b[?1049h" in text, "the picture has a screen of its own"


def read_until(descriptor: int, wanted: str) -> str:
    """Returns what a terminal shows until some text is there, for which it has a minute."""
    shown = b""
    while wanted.encode() not in shown:
        ready, _, _ = select.select([descriptor], [], [], WAIT_SECONDS)
        assert ready, shown.decode(errors="replace")[-2000:]
        shown += os.read(descriptor, 1 << 16)
    return shown.decode(errors="replace")


def test_what_cannot_be_looked_at(tmp_path: Path) -> None:
    """A process that serves nothing, and one that is not there, are sentences that say what to do; 1 is the status."""
    how = "MILLSTREAM_TOP=1 in its environment, or call loader.serve_top()"
    with top_trainer(tmp_path, 0) as trainer:
        _, silent = top(tmp_path, trainer.pid, "--once", status=1)
    _, gone = top(tmp_path, trainer.pid, "--once", status=1)
    _, none = top(tmp_path, "--once", status=1)
    listed, _ = top(tmp_path, "--list")

    assert silent.startswith(f"millstream: Process {trainer.pid} cannot be monitored. Start it with {how}")
    assert gone.startswith(
        f"millstream: There is no process {trainer.pid}. No running trainer of yours can be monitored. "
    )
    assert "MILLSTREAM_TOP=1" in gone
    assert how in none
    assert how in listed


def test_a_killed_trainer_leaves_nothing(tmp_path: Path) -> None:
    """The socket of a trainer ends with it, also if it is killed."""
    with top_trainer(tmp_path, 0, MILLSTREAM_TOP="1") as trainer:
        assert served_processes() == [trainer.pid]

    listed, _ = top(tmp_path, "--list")

    assert "No running trainer of yours" in listed
    assert f"@{monitoring.SOCKETS}-" not in Path("/proc/net/unix").read_text()


def test_a_stopped_trainer_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer that does not answer in time is a sentence, not a wait without end."""
    monkeypatch.setattr(monitoring, "CONNECT_SECONDS", 0.2)
    with top_trainer(tmp_path, 0, MILLSTREAM_TOP="1") as trainer:
        trainer.send_signal(signal.SIGSTOP)
        # It goes on for a moment after the signal was sent.
        assert os.WIFSTOPPED(os.waitpid(trainer.pid, os.WUNTRACED)[1])
        with pytest.raises(TimeoutError, match=f"Process {trainer.pid} does not answer: it is stopped"):
            monitoring.query(trainer.pid, "snapshot")


def snapshot(batches: int, waited: float, at: float, **status: Any) -> dict[str, Any]:
    """Returns what a trainer with one pipeline says."""
    return {
        "pid": 7,
        "command": ["python", "train.py"],
        "process": {"state": "running", "memory_bytes": 5_000_000, "processor_seconds": at / 2},
        "at": at,
        "pipelines": [
            {
                "number": 0,
                "source": "Tokens",
                "order": "MixtureSampler",
                "mixture": ["mixture web 75 %, books 25 %", "so far web 3 rows of 90 tokens, books 1 row of 30 tokens"],
                "shard": "0 of 1",
                "who": "nobody",
                "measured": {
                    "batches": batches,
                    "batch_bytes": 1000,
                    "wait_seconds": waited,
                    "trainer_seconds": at - waited,
                    "first_seconds": 0.0,
                    "deaths": 1,
                    "stalls": 0,
                    "records": 8 * batches,
                    "step": batches,
                    "epoch": 0,
                },
                "stages": [{"label": "read", "where": "threads", "seconds": at}],
                "advice": ["Buy " + "more " * 40 + "disks."],
                "lifecycle": "running",
                "waits_for": None,
                "num_ready": 0,
                "loads": [],
                **status,
            }
        ],
    }


def test_rates_are_those_between_two_looks() -> None:
    """Rates count the time between two snapshots, an unfinished wait included."""
    before = snapshot(100, 1.0, 10.0)
    text = "\n".join(map(plain, lines_of(before, snapshot(140, 1.0, 14.0, waits_for=2.0))))

    assert "10.0 batches/s, 80 records/s, 10 kB/s   140 batches so far" in text
    assert "████████████░░░░░░░░░░░░  50 %   7 % since the start" in text
    assert "in next() for 2 s" in text
    assert "  so far web 3 rows of 90 tokens, books 1 row of 30 tokens" in text
    assert "running, 5 MB, 50 % of a core" in text
    assert "workers: 1 died, 0 stalled" in text
    assert max(map(len, text.splitlines())) < 120


def test_lines_fit_the_terminal() -> None:
    """Advice is wrapped, and long labels are cut so that the bar and the share beside them are seen."""
    before, now = snapshot(100, 1.0, 10.0), snapshot(140, 1.0, 14.0)
    for one in (before, now):
        one["pipelines"][0]["stages"][0]["label"] = "operations[0], CropAndFlipAndMuchElse(size=224)"
        one["pipelines"][0]["measured"]["first_seconds"] = 0.299
    lines = [plain(line) for line in lines_of(before, now, 80)]

    assert max(map(len, lines)) <= 80
    (stage,) = [line for line in lines if "operations[0]" in line]
    assert stage.startswith("    operations[0], CropAndFlipAndMuchE…  threads  ███")
    assert stage.endswith("100 %")
    wide = [plain(line) for line in lines_of(before, now)]
    assert any("MuchElse(size=224)  threads" in line for line in wide)
    assert any("299 ms for first batches" in line for line in wide)


def test_equal_stacks_are_counted() -> None:
    """Threads at the same line are one entry with their number; the library's own outer frames are left out."""
    idle = 'Thread 0x1 (most recent call first):\n  File "/m/millstream/loader/threads/a.py", line 1 in take\n'
    own = (
        'Current thread 0x3 (most recent call first):\n  File "/home/train.py", line 3 in augment\n'
        '  File "/m/millstream/loader/b.py", line 4 in call\n  File "/m/millstream/loader/c.py", line 5 in work\n'
        '  File "/python/threading.py", line 6 in run\n'
    )

    text = "\n".join(map(plain, stack_lines([{"who": "worker process 7", "text": f"{idle}\n{idle}\n{own}"}])))

    assert text.splitlines() == [
        "",
        "Stacks of worker process 7, the most recent call first",
        "  2 threads",
        '    File "/m/millstream/loader/threads/a.py", line 1 in take',
        "  0x3",
        '    File "/home/train.py", line 3 in augment',
        '    File "/m/millstream/loader/b.py", line 4 in call',
    ]
