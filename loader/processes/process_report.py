"""What can be said of a process that is not ours to look into: how it ended, or what it is waiting for."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import NamedTuple

from millstream.loader.processes.messages import Exited
from millstream.loader.threads.memory_budget import memory_available

_STATES = {
    "R": "running",
    "S": "waiting",
    "D": "waiting for a device or file system, which cannot be interrupted",
    "T": "stopped by a signal (SIGSTOP)",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}


def describe_exit(exited: Exited | None, stacks: str) -> str:
    """Returns how a process ended, with the likely cause, as the end of a sentence about it."""
    if exited is None:
        text = "died; how is not known."
    elif exited.status == -signal.SIGKILL:
        text = (
            f"was killed by SIGKILL: by the system, if memory ran out, or by another process. It had used up to "
            f"{exited.peak_bytes >> 20} MiB; {memory_available() >> 20} MiB are available."
        )
    elif exited.status < 0:
        text = f"was killed by {_signal_name(-exited.status)}."
    else:
        text = (
            f"exited with status {exited.status}: an operation or the source called exit(), or something it loaded did."
        )
    return f"{text}\n{stacks}" if stacks else text


def describe_process(pid: int | None) -> str:
    """Returns what a process is doing, as far as the system tells; None is one that is still being forked."""
    if pid is None:
        return "not there yet"
    try:
        status = _read(f"/proc/{pid}/status")
    except OSError:
        return "in an unknown state"
    fields = _fields(status)
    state = fields.get("State", "?")
    if state[:1] == "S" and any(_fields(task).get("State", "?")[:1] == "R" for task in _statuses_of_threads(pid)):
        state = "R"
    memory = fields.get("VmRSS", "? kB").strip()
    return f"{_STATES.get(state[:1], state)}, with {memory} of memory"


class ProcessReport(NamedTuple):
    """A process.

    Attributes:
        state: what it is doing, in a word or a few.
        memory_bytes: how much of its memory is in use, what it shares with others included.
        processor_seconds: for how long it has kept a core busy.
        seconds: how long it has been there.
    """

    state: str
    memory_bytes: int
    processor_seconds: float
    seconds: float


def process_report(pid: int) -> ProcessReport | None:
    """Returns what the system tells of a process; None where it does not, or the process is gone."""
    try:
        # After the name, which may be anything, in brackets: https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        uptime = float(_read("/proc/uptime").split()[0])
    except (OSError, IndexError):
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    state = fields[0]
    if state == "S" and any(_fields(task).get("State", "?")[:1] == "R" for task in _statuses_of_threads(pid)):
        state = "R"
    return ProcessReport(
        state=_STATES.get(state, state),
        memory_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
        processor_seconds=(int(fields[11]) + int(fields[12])) / ticks,
        seconds=max(0.0, uptime - int(fields[19]) / ticks),
    )


def _statuses_of_threads(pid: int) -> Iterator[str]:
    """Yields what the system tells of each thread of a process; that of the process is its main thread's."""
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            yield _read(f"/proc/{pid}/task/{task}/status")


def _read(path: str) -> str:
    # Not pathlib: it takes long to import, and the first batch waits for that.
    with open(path, errors="replace") as file:  # noqa: PTH123
        return file.read()


def _fields(status: str) -> dict[str, str]:
    return dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
