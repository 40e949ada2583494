"""Hours of random pipelines, random faults and random resumes, each compared with the oracle: `make soak`.

    PYTHONPATH=tests python -P -m soak --minutes=60      an hour; a line a minute
    PYTHONPATH=tests python -P -m soak --kills=1000      until a thousand workers were killed
    PYTHONPATH=tests python -P -m soak --seed=123        the trial of a seed until it fails, ten times at most

A trial is a stream (`courses`) that one trainer after the other reads (`life`), each in a process of its own,
all but the last killed on their way, with a fault at a time (`faults`). It fails if a batch is not the oracle's,
if anything is left of a life or of a part of it, if memory grows, or if a life takes longer than its limit. Its data
lie on a small disk in memory where this user may mount one. Every fourth trial reads random trees of streams instead
(`trees`). The exit status is 1 if a trial failed.
"""

import argparse
import collections
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq

from soak.courses import Course
from soak.faults import CLOCK, KilledWorkers
from support.files.record_files import write_array_record, write_bagz, write_tfrecord
from support.processes.worker_pools import environment, still_there
from support.stores.object_server import Request, serving

_LIFE, _TREES = (Path(__file__).with_name(name) for name in ("life.py", "trees.py"))
_TREES_PER_TRIAL = 12
_DISK_BYTES = 256 << 10
_REPEATS = 10
_PRIVATE = "SOAK_HAS_OWN_MOUNTS"


class TrialError(Exception):
    """A trial failed; the text says how."""


class Soak:
    """Trials, and what was seen in them.

    Args:
        limit: how many seconds a life may take.
        broken: what is broken on purpose, to see that it is found: `stream`, `leak`, `memory` or `hang`.
        fault: the name of the only fault, for lives with workers; by default all kinds occur.
    """

    def __init__(self, limit: float, broken: str, fault: str = "") -> None:
        self._limit = limit
        self._fault = fault
        self._broken = broken
        self.seen: collections.Counter[str] = collections.Counter()
        self.most: collections.Counter[str] = collections.Counter()

    def trial(self, seed: int) -> None:
        """Runs the trial of a seed.

        Raises:
            TrialError: it failed.
        """
        if self.is_of_trees(seed):
            with small_disk() as (folder, disk):
                trees = {"seed": seed, "count": _TREES_PER_TRIAL, "life": 0, "is_last": True}
                self._live(trees, environment(folder) | self._surroundings(disk), _TREES)
            self.seen["trials"] += 1
            return
        chance = random.Random(f"trial {seed}")
        course = Course.of(seed)
        has_bad_clock, num_lives = chance.random() < 0.3, chance.choice([1, 2, 3, 4])
        with small_disk() as (folder, disk), serving() as server:
            server.objects["bucket/numbers.bag"] = write_bagz(folder / "numbers.bag", course.records).read_bytes()
            server.latency = chance.choice([0.0, 0.0, 0.002])
            failing = chance.choice([0.0, 0.02])

            def failure(request: Request) -> str | int | None:
                fate = random.Random(f"request {seed} {request.number}")
                failures: list[str | int] = [503, 429, "reset", "short"]
                return fate.choice(failures) if fate.random() < failing else None

            server.failure = failure
            write_file(course, disk)
            self.seen[f"trials: {course.form}"] += 1
            self.seen[f"trials from: {course.place}"] += 1
            if has_bad_clock:
                (folder / "sitecustomize.py").write_text(CLOCK)
                self.seen["trials with a jumping clock"] += 1
            if failing and course.place == "store":
                self.seen["trials with a failing store"] += 1
            for life in range(num_lives):
                is_last = life == num_lives - 1
                orders = {"seed": seed, "life": life, "folder": str(disk), "url": server.url, "is_last": is_last}
                self._live(
                    {**orders, "broken": self._broken, "fault": self._fault},
                    environment(folder) | self._surroundings(disk),
                )
        self.seen["trials"] += 1

    def is_of_trees(self, seed: int) -> bool:
        """Returns True if a trial reads trees of streams, and False if it reads a course."""
        return seed % 4 == 3 and not self._broken and not self._fault

    def _surroundings(self, disk: Path) -> dict[str, str]:
        return {
            "MILLSTREAM_CACHE": str(disk / "cache"),
            "SOAK_LIMIT_SECONDS": str(self._limit),
            # All that the life starts inherits this.
            "SOAK_LIFE": os.urandom(8).hex(),
        }

    def _live(self, orders: Mapping[str, object], surroundings: dict[str, str], program: Path = _LIFE) -> None:
        with subprocess.Popen(
            [sys.executable, program, json.dumps(orders)],
            env=surroundings,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                answer, errors = process.communicate(timeout=self._limit)
            except subprocess.TimeoutExpired:
                process.kill()
                errors = process.communicate()[1]
                raise TrialError(f"life {orders['life']} took more than {self._limit:.0f} s:\n{errors}") from None
            finally:
                process.kill()
                left = still_there(marked(surroundings["SOAK_LIFE"]), 3.0)
                for pid in left:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
        self.seen["lives"] += 1
        was_killed = process.returncode in (-signal.SIGKILL, -signal.SIGTERM) and not orders["is_last"]
        if (process.returncode and not was_killed) or "Traceback" in errors:
            raise TrialError(f"life {orders['life']} ended with status {process.returncode}:\n{errors}")
        if left:
            raise TrialError(f"life {orders['life']} left {len(left)} processes behind")
        if was_killed:
            self.seen["killed trainer"] += 1
        else:
            told = json.loads(answer)
            self.seen += collections.Counter(told["seen"])
            self.most |= collections.Counter(told["most"])

    def line(self) -> str:
        seen = ", ".join(f"{name} {count:,}" for name, count in sorted(self.seen.items()))
        most = ", ".join(f"{count:,} {name}" for name, count in self.most.items())
        return f"{seen}; a trainer had at most {most or 'nothing'}"


def write_file(course: Course, folder: Path) -> None:
    """Writes the file of a course, if its records are in one."""
    path = folder / f"numbers.{course.place}"
    match course.place:
        case "bag":
            write_bagz(path, course.records)
        case "tfrecord":
            write_tfrecord(path, course.records)
        case "array_record":
            write_array_record(path, course.records, "group_size:4")
        case "jsonl":
            path.write_text("".join(f'{{"number": {number}}}\n' for number in range(course.size)))
        case "parquet":
            pq.write_table(pa.table({"number": [*range(course.size)]}), path, row_group_size=64)


def marked(mark: str) -> list[int]:
    """Returns the processes that have a word in their environment."""
    found = psutil.process_iter(["environ"])
    return [process.pid for process in found if (process.info["environ"] or {}).get("SOAK_LIFE") == mark]


@contextlib.contextmanager
def small_disk() -> Iterator[tuple[Path, Path]]:
    """Yields a folder, and one in it that is a small disk of its own where that is permitted."""
    folder = Path(tempfile.mkdtemp(prefix="millstream-soak-"))
    disk = folder / "disk"
    disk.mkdir()
    if os.environ.get(_PRIVATE):
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "tmpfs", disk], check=True)
    try:
        yield folder, disk
    finally:
        if disk.is_mount():
            subprocess.run(["umount", "--lazy", disk], check=True)
        shutil.rmtree(folder)


def with_own_mounts() -> None:
    """Starts this program anew where its mounts are seen by no other and end with it, if this user may do that."""
    unshare = ["unshare", "--mount", "--propagation", "private"]
    if _PRIVATE in os.environ or not shutil.which("unshare"):
        return
    may = subprocess.run([*unshare, "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, check=False)
    if may.returncode == 0:
        os.environ[_PRIVATE] = "1"
        os.execvp(unshare[0], [*unshare, sys.executable, "-P", "-m", "soak", *sys.argv[1:]])


def failed(soak: Soak, seed: int) -> bool:
    """Runs a trial, and says whether it failed; if so, prints how, and what repeats it."""
    try:
        soak.trial(seed)
    except TrialError as error:
        what = "trees of streams" if soak.is_of_trees(seed) else Course.of(seed)
        say(f"FAILED: make soak SEED={seed}\n{what}\n{error}")
        return True
    return False


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201  (this is a program)


def main() -> int:
    """Does what the arguments say, and returns the exit status."""
    parser = argparse.ArgumentParser(prog="soak")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, help="run this trial alone, until it fails")
    parser.add_argument("--first-seed", type=int, help="where to begin; by default anywhere")
    parser.add_argument("--kills", type=int, help="kill this many workers, instead of running for some minutes")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds that a life may take")
    parser.add_argument(
        "--broken", choices=["stream", "leak", "memory", "hang"], default="", help="to see that it is found"
    )
    given = parser.parse_args()
    with_own_mounts()
    soak = Soak(given.limit, given.broken, KilledWorkers.name if given.kills else "")
    if given.seed is not None:
        has_failed = any(failed(soak, given.seed) for _ in range(_REPEATS))
        say(soak.line())
        return int(has_failed)
    start = time.monotonic()
    seed, failures, minute = given.first_seed if given.first_seed is not None else random.randrange(10**9), 0, 1
    say(f"from seed {seed} on")
    minutes = -1.0
    while soak.seen[KilledWorkers.name] < given.kills if given.kills else minutes < given.minutes:
        failures += failed(soak, seed)
        seed += 1
        minutes = (time.monotonic() - start) / 60
        if minutes >= minute:
            minute = int(minutes) + 1
            say(f"minute {int(minutes)}: failed {failures}, {soak.line()}")
    say(f"failed {failures}, {soak.line()}")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
