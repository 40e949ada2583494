"""What a worker leaves behind, however it dies: which call it had begun, and its stacks.

An anonymous file that the parent makes and both hold. Its first eight bytes are the number of the call, written when
the call begins; after them comes what `faulthandler` writes, in a fatal signal or when asked. The worker only ever
writes, the parent only ever reads, and neither waits for the other.
"""

import os
import struct
import time

from millstream.loader.processes.process_control import looks
from millstream.loader.transport.arena import create_anonymous_file

STACKS_SECONDS = 0.5
"""How long to wait for a worker's stacks."""

STEADY_LOOKS = 3
"""How many looks must find no more of them: a worker may lose its core while it writes."""

_CALL = struct.Struct("<q")
_NO_CALL = -1


def create_crash_log() -> int:
    """Returns the descriptor of a new crash log, for one worker."""
    file = create_anonymous_file("millstream-words")
    # This moves the offset, which all who share the descriptor have in common, to where faulthandler is to write.
    os.write(file, _CALL.pack(_NO_CALL))
    return file


def note_call(file: int, call: int) -> None:
    """Notes that the worker begins a call."""
    os.pwrite(file, _CALL.pack(call), 0)


def read_call(file: int) -> int | None:
    """Returns the number of the call that the worker began last, None if it has begun none."""
    (call,) = _CALL.unpack(os.pread(file, _CALL.size, 0))
    return None if call == _NO_CALL else int(call)


def read_stacks(file: int) -> str:
    """Returns the stacks that the worker has written, empty if there are none."""
    return os.pread(file, os.fstat(file).st_size, _CALL.size).decode(errors="replace")


def clear_stacks(file: int) -> None:
    """Removes the stacks that were read: what comes later is not taken for more of them."""
    os.ftruncate(file, _CALL.size)
    # This moves the offset of the worker, too.
    os.lseek(file, _CALL.size, os.SEEK_SET)


def wait_for_stacks(file: int) -> str:
    """Returns the stacks that a worker has just been asked to write, empty if it does not within STACKS_SECONDS."""
    steady, stacks = 0, read_stacks(file)
    # They come line by line, without an end.
    for seconds in looks(STACKS_SECONDS):
        if stacks and steady >= STEADY_LOOKS:
            break
        time.sleep(seconds)
        before, stacks = stacks, read_stacks(file)
        steady = steady + 1 if stacks == before else 0
    return stacks
