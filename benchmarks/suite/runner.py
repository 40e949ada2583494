"""Runs the contenders of a case side by side: each in its own process, of which all but one are stopped at any time.

First each mode of each peer is measured once, and the better one is chosen. Then the chosen ones are measured again,
in turn, A B C A B C …: what chose a mode does not count for it, and a machine that is slower for a minute is slower for
all of them.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import IO, Any

import psutil

from suite.cases import Case, Scale
from suite.orders import PREFIX, Order
from suite.work import Contender

ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "JAX_PLATFORMS": "cpu",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
"""For all contenders alike: no accelerators, little talk, and no threads of the tokenizer beside the loader's."""


def environment() -> dict[str, str]:
    """Returns the environment of a process that measures. It may keep compiled modules, as installed packages have."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, **ENVIRONMENT}


MEASURE = Path(__file__).parents[1] / "measure.py"
LIMIT_SECONDS = 120.0
"""After this long without an answer a contender is stopped, and reported as stopped."""


@dataclasses.dataclass
class Result:
    """All that is known of one contender in one case.

    Attributes:
        contender: who.
        trial: the measurement by which the peer's mode was chosen.
        values: those that count: empty if another mode was chosen.
        waits: p50 and p99 of `next` in ms, of the last measurement of a rate.
        reason: why there are no values, or no more of them.
    """

    contender: Contender
    trial: float | None = None
    values: list[float] = dataclasses.field(default_factory=list)
    waits: list[float] = dataclasses.field(default_factory=list)
    reason: str | None = None

    @property
    def median(self) -> float | None:
        return median(self.values) if self.values else None


def run(case: Case, scale: Scale, peers: Sequence[str], progress: Callable[[str], None]) -> list[Result]:
    """Returns the results of all contenders of the peers."""
    distinct = dict.fromkeys(contender for contender in case.contenders if contender.peer in peers)
    results = [Result(contender) for contender in distinct]
    with contextlib.ExitStack() as stack:
        processes: dict[Contender, _Process] = {}

        def start(result: Result) -> None:
            process = stack.enter_context(_process(Order(case.name, result.contender, scale)))
            processes[result.contender] = process
            result.reason = process.answer().get("reason")
            process.signal_all(signal.SIGSTOP)

        def measure(result: Result) -> float | None:
            progress(f"{case.name}: {result.contender.peer}, {result.contender.label}")
            if result.reason is not None:
                return None
            if case.kind != "rate":
                # A new process each time: what the one before has started or imported does not help.
                processes[result.contender].close()
                start(result)
            process = processes[result.contender]
            process.signal_all(signal.SIGCONT)
            answer = process.ask()
            # Some peers go on to work ahead for seconds.
            process.signal_all(signal.SIGSTOP)
            result.reason = answer.get("reason")
            result.waits = [answer[name] for name in ("p50_ms", "p99_ms") if name in answer]
            return answer.get("value")

        for result in results:
            start(result)
            result.trial = measure(result)
        chosen = _chosen(case, results)
        for result in results:
            if result not in chosen:
                processes[result.contender].close()
        for _ in range(scale.repeats):
            for result in chosen:
                value = measure(result)
                result.values += [] if value is None else [value]
    return results


def _chosen(case: Case, results: Sequence[Result]) -> list[Result]:
    """Returns the better mode of each peer."""
    best: dict[str, Result] = {}
    for result in results:
        rival = best.get(result.contender.peer)
        if result.trial is not None and (
            rival is None or rival.trial is None or case.ratio(result.trial, rival.trial) > 1
        ):
            best[result.contender.peer] = result
    return list(best.values())


@dataclasses.dataclass(frozen=True)
class _Process:
    process: "subprocess.Popen[str]"
    errors: IO[str]

    def ask(self) -> dict[str, Any]:
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.write("measure\n")
                self.process.stdin.flush()
        return self.answer()

    def answer(self) -> dict[str, Any]:
        """Returns the next line that is meant for us, or the reason why none comes."""
        timer = threading.Timer(LIMIT_SECONDS, _kill_session, [self.process.pid])
        timer.start()
        try:
            for line in self.process.stdout or ():
                if line.startswith(PREFIX):
                    answer: dict[str, Any] = json.loads(line.removeprefix(PREFIX))
                    return answer
        finally:
            timer.cancel()
        status = self.process.wait()
        if status == -signal.SIGKILL:
            return {"reason": "stopped: it took too long, or too much memory"}
        self.errors.seek(0)
        last = self.errors.read().strip().splitlines()[-1:]
        return {"reason": f"exit status {status}: {' '.join(last)}"[:500]}

    def signal_all(self, number: int) -> None:
        """Sends a signal to the process and to all below it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            leader = psutil.Process(self.process.pid)
            for process in (leader, *leader.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(number)

    def close(self) -> None:
        """Ends the process and all that it started."""
        # Those below it first: one that is stopped would not notice that its parent ends.
        self.signal_all(signal.SIGKILL)
        _kill_session(self.process.pid)
        self.process.wait()


@contextlib.contextmanager
def _process(order: Order) -> Iterator[_Process]:
    command = [sys.executable, str(MEASURE), order.as_json()]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            env=environment(),
        ) as process,
    ):
        started = _Process(process, errors)
        try:
            yield started
        finally:
            started.close()


def _kill_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
