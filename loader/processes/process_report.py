"""Reports on worker processes for users: their state, the way one ended, and the limits that stop one.

A crash log has the call that a worker began last, and its stacks. It survives any death of the worker, because it is an
anonymous file that the parent creates and both processes hold. Its first eight bytes are the number of the call. The
output of `faulthandler` follows, written after a fatal signal or on request. Only the worker writes, except that the
parent clears stacks that it has read. Neither waits for the other.

Workers inherit the limits (`ulimit`) of the process that starts them, so their errors are explained here as well.
"""

import contextlib
import errno
import mmap
import os
import resource
import signal
import struct
import time
from collections.abc import Iterator
from typing import NamedTuple

from millstream.loader.processes.channel import Exited
from millstream.loader.processes.process_control import wait_slices
from millstream.loader.threads.options import memory_available
from millstream.loader.transport.arena import create_anonymous_file

FAILED = 70
"""The exit status of a worker that an error outside of its calls has ended. It is EX_SOFTWARE of the C library."""

STACKS_SECONDS = 0.5
"""The time to wait for a worker's stacks."""

STEADY_SLICES = 3
"""The number of consecutive slices without new stacks, because a worker may be preempted while it writes."""

NO_RESPONSE = "(no response: the process is stopped or blocked in an uninterruptible system call)"

_FATAL = (signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT, signal.SIGBUS, signal.SIGILL)
"""The signals after which `faulthandler` writes stacks. Others in a crash log were requested earlier."""

_CALL = struct.Struct("<q")
_NO_CALL = -1

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
    """Returns a description of a process's end, with the likely cause. It completes a sentence."""
    if exited is None:
        text = "died; its exit status is unknown."
    elif exited.status == -signal.SIGKILL:
        text = (
            "was killed by SIGKILL: by the system, if memory ran out, or by another process. It had used up to "
            f"{exited.peak_bytes >> 20} MiB; {memory_available() >> 20} MiB are available."
        )
    elif exited.status == FAILED:
        text = "failed between two calls, with the error printed above. It may lack open files or memory."
    elif exited.status < 0:
        text = f"was killed by {_signal_name(-exited.status)}."
    else:
        text = (
            f"exited with status {exited.status}: an operation or the source called exit(), or a library of theirs did."
        )
    has_crashed = exited is None or -exited.status in _FATAL
    return f"{text}\n{stacks}" if stacks and has_crashed else text


def describe_process(pid: int | None) -> str:
    """Returns a description of a process's state. The ID is None while the process is being forked."""
    if pid is None:
        return "still starting"
    report = process_report(pid)
    if report is None:
        return "in an unknown state"
    return f"{report.state}, with {report.memory_bytes >> 10} kB of memory"


class ProcessReport(NamedTuple):
    """A snapshot of a process."""

    state: str
    memory_bytes: int  # Resident memory, shared memory included.
    processor_seconds: float


def process_report(pid: int) -> ProcessReport | None:
    """Returns a snapshot of a process, or None if it has ended or the system has no information."""
    try:
        # The fields follow the name in brackets: https://man7.org/linux/man-pages/man5/proc_pid_stat.5.html
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    except OSError:
        return None
    state = fields[0]
    if state == "S" and "R" in _states_of_threads(pid):
        state = "R"
    return ProcessReport(
        state=_STATES.get(state, state),
        memory_bytes=int(fields[21]) * os.sysconf("SC_PAGE_SIZE"),
        processor_seconds=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
    )


def _states_of_threads(pid: int) -> Iterator[str]:
    """Yields the state of each thread, such as R. That of the process is the state of its main thread."""
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):  # noqa: PTH208
            yield _read(f"/proc/{pid}/task/{task}/status").partition("\nState:\t")[2][:1]


def _read(path: str) -> str:
    # Not pathlib, which is slow to import, and the first batch waits for that.
    with open(path, errors="replace") as file:  # noqa: PTH123
        return file.read()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def create_crash_log() -> int:
    file = create_anonymous_file("millstream-crash-log")
    # This moves the shared file offset to the position where faulthandler is to write.
    os.write(file, _CALL.pack(_NO_CALL))
    return file


def record_call(file: int, call: int) -> None:
    os.pwrite(file, _CALL.pack(call), 0)


def read_call(file: int) -> int | None:
    """Returns the call that the worker began last, or None if it has begun none."""
    (call,) = _CALL.unpack(os.pread(file, _CALL.size, 0))
    return None if call == _NO_CALL else int(call)


def read_stacks(file: int) -> str:
    return os.pread(file, os.fstat(file).st_size, _CALL.size).decode(errors="replace")


def clear_stacks(file: int) -> None:
    """Removes stacks, so that later ones are not confused with them."""
    os.ftruncate(file, _CALL.size)
    # This also moves the offset of the worker.
    os.lseek(file, _CALL.size, os.SEEK_SET)


def waits_for_stacks() -> Iterator[float]:
    """Yields the slices of the wait for stacks. Requests that were sent together share it."""
    return wait_slices(STACKS_SECONDS)


def wait_for_stacks(file: int, waits: Iterator[float]) -> str:
    """Returns the stacks that a worker was requested to write, or NO_RESPONSE if there are none after the waits."""
    steady, stacks = 0, read_stacks(file)
    # They arrive line by line, without an end marker.
    for seconds in waits:
        if stacks and steady >= STEADY_SLICES:
            break
        time.sleep(seconds)
        before, stacks = stacks, read_stacks(file)
        steady = steady + 1 if stacks == before else 0
    return stacks or NO_RESPONSE


DESCRIPTORS_PER_WORKER = 3
"""The parent's descriptors per worker: channel, process handle and crash log."""

MIN_ARENA_BYTES = 1 << 20
"""With less memory, hardly any batch could be transferred."""


@contextlib.contextmanager
def explained_limits(num_workers: int) -> Iterator[None]:
    """Explains errors in its block that come from a limit: the limit, the need of this many workers, and a remedy."""
    try:
        yield
    except (OSError, MemoryError) as error:
        explain_limit(error, num_workers)
        raise


def explain_limit(error: BaseException, num_workers: int) -> None:
    """Adds the note of `explained_limits` to an error, if it comes from a limit."""
    code = errno.ENOMEM if isinstance(error, MemoryError) else getattr(error, "errno", None)
    needs = "a worker process needs" if num_workers == 1 else f"{num_workers} worker processes need"
    text = None
    if code in (errno.EMFILE, errno.ENFILE):
        text = (
            f"{needs} {DESCRIPTORS_PER_WORKER * num_workers} open files of the "
            f"{_limit(resource.RLIMIT_NOFILE)} that this process may have. "
            "Raise the limit (`ulimit -n`) or use fewer workers."
        )
    elif code == errno.EFBIG:
        text = (
            f"{needs} files in memory, for the pipeline and for batches, larger than the "
            f"{_limit(resource.RLIMIT_FSIZE)} bytes that this process may write to a file. "
            "Raise the limit (`ulimit -f`) or use no worker processes."
        )
    elif code == errno.EAGAIN:
        text = (
            f"{needs} {num_workers + 1} more processes. All processes and threads of this user are limited to "
            f"{_limit(resource.RLIMIT_NPROC)}; a container may have its own limit (pids.max). "
            "Raise the limit (`ulimit -u`) or use fewer workers."
        )
    elif code == errno.ENOMEM and resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        text = (
            f"{needs} address space, and a process is limited to {_limit(resource.RLIMIT_AS)} bytes. "
            "Raise the limit (`ulimit -v`), or use fewer workers and fewer threads (ReadOptions.num_threads)."
        )
    if text is not None:
        error.add_note(f"millstream: {text}")


def arena_size(budget: int, num_workers: int) -> int:
    """Returns the size of each worker's arena, in whole pages, from the total number of bytes.

    A limit of file sizes below MIN_ARENA_BYTES is an OSError.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    wanted = budget // num_workers
    if limit != resource.RLIM_INFINITY:
        if limit < MIN_ARENA_BYTES:
            error = OSError(errno.EFBIG, os.strerror(errno.EFBIG))
            explain_limit(error, num_workers)
            raise error
        wanted = min(wanted, limit)
    return max(1, wanted // mmap.PAGESIZE) * mmap.PAGESIZE


def describe_limits() -> str:
    """Returns a sentence about limits that may keep processes from starting, or "" if none is set."""
    names = {"-v": resource.RLIMIT_AS, "-d": resource.RLIMIT_DATA, "-f": resource.RLIMIT_FSIZE}
    found = [f"`ulimit {name}` is {_limit(kind)} bytes" for name, kind in names.items() if _limit(kind) != "unlimited"]
    return f" It may be a limit of this process: {', '.join(found)}." if found else ""


def _limit(kind: int) -> str:
    limit, _ = resource.getrlimit(kind)
    return "unlimited" if limit == resource.RLIM_INFINITY else str(limit)
