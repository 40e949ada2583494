"""What can be said of a process that is not ours to look into: how it ended, or what it is waiting for."""

import signal
from pathlib import Path

_STATES = {
    "R": "running",
    "S": "waiting",
    "D": "waiting for a device or file system, which cannot be interrupted",
    "T": "stopped by a signal (SIGSTOP)",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
}


def describe_exit(status: int | None, stacks: str) -> str:
    """Returns how a process ended, with the likely cause, as the end of a sentence about it."""
    if status is None:
        text = "died; how is not known."
    elif status < 0:
        text = f"was killed by {_signal_name(-status)}"
        text += " (out of memory? or by somebody)." if status == -signal.SIGKILL else "."
    else:
        text = f"exited with status {status}: an operation or the source called exit(), or something it loaded did."
    return f"{text}\n{stacks}" if stacks else text


def describe_process(pid: int | None) -> str:
    """Returns what a process is doing, as far as the system tells."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "in an unknown state"
    fields = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
    state = fields.get("State", "?")
    memory = fields.get("VmRSS", "? kB").strip()
    return f"{_STATES.get(state[:1], state)}, with {memory} of memory"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
