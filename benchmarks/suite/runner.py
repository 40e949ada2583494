"""Runs each measurement in its own process, the contenders of a case in turn.

That is, A B C A B C …: so no contender suffers from what another one has imported, started or left running, and a
machine that is slower for a minute is slower for all of them.
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
from typing import IO, Self

from suite.case import Case, Contender
from suite.scale import Scale

PREFIX = "@benchmark "
"""Begins the lines that a measuring process means for its starter; peers print what they like."""

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "3"}
"""For all contenders alike: no accelerators, little talk."""

MEASURE = Path(__file__).parents[1] / "measure.py"


@dataclasses.dataclass(frozen=True)
class Order:
    """One thing for a measuring process to do.

    Attributes:
        case: the case's name.
        contender: who.
        scale: the scale's name.
        task: "measure"; "check", whether the records are the right ones; or "explain", where the time goes.
        copy: which of the contender's copies the process is.
    """

    case: str
    contender: Contender
    scale: str
    task: str
    copy: int = 0

    def as_json(self) -> str:
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        words = json.loads(text)
        return cls(**{**words, "contender": Contender(**words["contender"])})


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of one order: either `value` or `reason` is set.

    Attributes:
        value: the number measured.
        details: further numbers.
        reason: why there is no value.
        is_absent: whether the reason is that the peer is not installed, and so holds for its other orders.
    """

    value: float | None = None
    details: dict[str, float] = dataclasses.field(default_factory=dict)
    reason: str | None = None
    is_absent: bool = False


@dataclasses.dataclass
class Result:
    """All that is known of one contender in one case.

    Attributes:
        contender: who.
        values: one per repeat that gave any.
        details: further numbers, of the last repeat.
        reason: why there are no values, or no more of them.
        same_content: whether it delivered the right records; None if that was not looked at.
    """

    contender: Contender
    values: list[float] = dataclasses.field(default_factory=list)
    details: dict[str, float] = dataclasses.field(default_factory=dict)
    reason: str | None = None
    same_content: bool | None = None

    @property
    def median(self) -> float | None:
        return median(self.values) if self.values else None


class Runner:
    """Measures cases."""

    def __init__(
        self, scale: Scale, repeats: int, peers: Sequence[str], *, compare: bool, progress: Callable[[str], None]
    ) -> None:
        self._scale = scale
        self._repeats = repeats
        self._peers = {*peers, "bare"}
        self._compare = compare
        self._progress = progress
        self._absent: dict[str, Outcome] = {}

    def contenders(self, case: Case) -> list[Contender]:
        return [contender for contender in case.contenders if contender.peer in self._peers]

    def num_processes(self, case: Case) -> int:
        """Returns how many steps of progress a case will make."""
        contenders = self.contenders(case)
        return len(contenders) * self._repeats + sum(self._is_checked(case, contender) for contender in contenders)

    def run(self, case: Case) -> list[Result]:
        results = [Result(contender) for contender in self.contenders(case)]
        for result in results:
            if self._is_checked(case, result.contender):
                self._check(case, result)
        for _ in range(self._repeats):
            for result in results:
                self._measure(case, result)
        return results

    def explain(self, case: Case) -> dict[str, dict[str, float]]:
        """Returns where millstream's time goes without workers and with two, in µs per record, for a case of rates."""
        modes = [Contender("millstream", workers=workers) for workers in (0, 2)] if case.measure is None else []
        contenders = self.contenders(case)
        found = {mode.label: self._order(case, mode, "explain")[0].details for mode in modes if mode in contenders}
        return {label: stages for label, stages in found.items() if stages}

    def _is_checked(self, case: Case, contender: Contender) -> bool:
        """True to compare contents: of loaders, where records are counted, once for all copies."""
        return self._compare and case.measure is None and contender.peer != "bare" and contender.copies == 1

    def _check(self, case: Case, result: Result) -> None:
        (outcome,) = self._order(case, result.contender, "check")
        result.reason = outcome.reason
        result.same_content = outcome.value is not None
        self._progress(f"{case.name}: {result.contender.peer}, contents")

    def _measure(self, case: Case, result: Result) -> None:
        if result.reason is None:
            outcomes = self._order(case, result.contender, "measure")
            result.reason = next((outcome.reason for outcome in outcomes if outcome.reason), None)
            if result.reason is None:
                result.values.append(sum(outcome.value or 0.0 for outcome in outcomes))
                result.details = outcomes[0].details
        self._progress(f"{case.name}: {result.contender.peer}, {result.contender.label}")

    def _order(self, case: Case, contender: Contender, task: str) -> list[Outcome]:
        if contender.peer in self._absent:
            return [self._absent[contender.peer]]
        copies = contender.copies if task == "measure" else 1
        orders = [Order(case.name, contender, self._scale.name, task, copy) for copy in range(copies)]
        with contextlib.ExitStack() as stack:
            processes = [stack.enter_context(_process(order, self._scale.limit_seconds)) for order in orders]
            outcomes = _outcomes(processes)
        for outcome in outcomes:
            if outcome.is_absent:
                self._absent[contender.peer] = outcome
        return outcomes


@dataclasses.dataclass(frozen=True)
class _Process:
    process: "subprocess.Popen[str]"
    errors: IO[str]

    def line(self) -> str | None:
        """Returns the next line that is meant for us; None when the process has ended."""
        for line in self.process.stdout or ():
            if line.startswith(PREFIX):
                return line.removeprefix(PREFIX).strip()
        return None

    def go(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.write("go\n")
            self.process.stdin.flush()

    def failure(self) -> Outcome:
        status = self.process.wait()
        if status == -signal.SIGKILL:
            return Outcome(reason="stopped: it took too long, or too much memory")
        self.errors.seek(0)
        last = self.errors.read().strip().splitlines()[-1:]
        return Outcome(reason=f"exit status {status}: {' '.join(last)}"[:500])


def _outcomes(processes: Sequence[_Process]) -> list[Outcome]:
    lines = [process.line() for process in processes]
    if all(line == "ready" for line in lines):
        for process in processes:
            process.go()
        lines = [process.line() for process in processes]
    return [
        process.failure() if line is None or line == "ready" else Outcome(**json.loads(line))
        for process, line in zip(processes, lines, strict=True)
    ]


@contextlib.contextmanager
def _process(order: Order, limit_seconds: float) -> Iterator[_Process]:
    """Runs a measuring process; in the end it and all that it started are gone."""
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
            env={**os.environ, **ENVIRONMENT},
        ) as process,
    ):
        # The session is the process's own: its workers, and theirs, are in it.
        timer = threading.Timer(limit_seconds, _kill_session, [process.pid])
        timer.start()
        try:
            yield _Process(process, errors)
        finally:
            timer.cancel()
            _kill_session(process.pid)


def _kill_session(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
