"""The crash log of a worker: the call that it began last, and its stacks. It survives any death of the worker.

It is an anonymous file that the parent creates and both processes hold. Its first eight bytes are the number of the
call. The output of `faulthandler` follows, written after a fatal signal or on request. Only the worker writes, except
that the parent clears stacks that it has read. Neither waits for the other.
"""

import os
import struct
import time

from millstream.loader.processes.process_control import wait_slices
from millstream.loader.transport.arena import create_anonymous_file

STACKS_SECONDS = 0.5
"""The time to wait for a worker's stacks."""

STEADY_SLICES = 3
"""The number of consecutive slices without new stacks, because a worker may be preempted while it writes."""

NO_RESPONSE = "(no response: the process is stopped or blocked in an uninterruptible system call)"

_CALL = struct.Struct("<q")
_NO_CALL = -1


def create_crash_log() -> int:
    file = create_anonymous_file("millstream-words")
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


def wait_for_stacks(file: int) -> str:
    """Returns the stacks that a worker was requested to write, or NO_RESPONSE after STACKS_SECONDS without any."""
    steady, stacks = 0, read_stacks(file)
    # They arrive line by line, without an end marker.
    for seconds in wait_slices(STACKS_SECONDS):
        if stacks and steady >= STEADY_SLICES:
            break
        time.sleep(seconds)
        before, stacks = stacks, read_stacks(file)
        steady = steady + 1 if stacks == before else 0
    return stacks or NO_RESPONSE
