"""The messages between the reader of a group and its members, and outputs as they cross to another process."""

import functools
import hashlib
import io
import json
import os
import pickle
import sys
import types
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from millstream.loader.checkpoints.state import Stream
from millstream.loader.pipeline.calls import Outputs, Position
from millstream.loader.pipeline.failing_records import FailuresByShard
from millstream.loader.pipeline.plan import Plan
from millstream.loader.transport.payload import pack_failure, to_columns, to_elements, unpack_failure
from millstream.loader.transport.pickling import BufferCallback, LookupUnpickler, ValuePickler, taking_out

if TYPE_CHECKING:
    import socket

INLINE_BYTES = 1 << 11
"""Smaller outputs travel in the message, and smaller arrays in the pickle."""

MESSAGE_BYTES = 1 << 18
"""The maximum size of a message."""

OWN_SOCKETS: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()
"""The sockets of groups. A forked process must not keep them open, because the other ends would wait for it."""


def may_share(plan: Plan) -> bool:
    """Returns True if outputs of a plan can be shared. Otherwise, the reason is logged."""
    reason = ""
    if not sys.platform.startswith("linux"):
        reason = "only Linux has the sockets and the memory that this needs"
    elif plan.source_is_stream:
        reason = "the source may be a stream, which another process could not read on"
    if reason:
        plan.warn_once("share_on_host", f"share_on_host has no effect: {reason}. Each process reads by itself.")
    return not reason


def name_of_group(plan: Plan, stream: Stream) -> bytes:
    """Returns the address of the group that shares a stream: a hash of all that decides its bytes, the user and job."""
    tolerance = plan.pipeline.tolerance
    texts = [
        sys.modules["millstream"].__version__,
        sys.version,
        np.__version__,
        _job(),
        stream.fields,
        stream.fingerprint.changes,
        None if tolerance is None else tolerance.max_errors,
    ]
    digest = hashlib.sha256(json.dumps(texts, sort_keys=True).encode()).hexdigest()[:40]
    return f"\0millstream-{os.geteuid()}-{digest}".encode()


def _job() -> str:
    """Returns the address of JAX's coordinator, which the processes of one job have in common; "" without one."""
    state = getattr(sys.modules.get("jax._src.distributed"), "global_state", None)
    return str(getattr(state, "coordinator_address", None) or os.environ.get("JAX_COORDINATOR_ADDRESS", ""))


@functools.cache
def close_in_forked_processes() -> None:
    os.register_at_fork(after_in_child=_close_all)


def _close_all() -> None:
    for connection in list(OWN_SOCKETS):
        connection.close()


class Welcome(NamedTuple):
    """The answer to a member whose position was found.

    Attributes:
        process: the process of the reader.
        skip: the number of values of the first outputs that it has consumed.
        failures: the failed records that were found and that it may not have got past.
    """

    process: int
    skip: int
    failures: FailuresByShard


class Published(NamedTuple):
    """Outputs: a pickle and the spans of its buffers, in the memory of the descriptor that follows, or in `content`."""

    num_bytes: int
    spans: tuple[tuple[int, int], ...]
    failures: FailuresByShard
    is_limit: bool
    content: bytes | None


class Ended(NamedTuple):
    """The end of the stream."""

    failures: FailuresByShard


class Apart(NamedTuple):
    """A refusal: the member reads by itself.

    Attributes:
        until: a position from which on it may join again; None if that is not known.
        reason: the text for the log; "" if it is nothing unusual.
        is_final: True if joining again would not help.
    """

    until: Position | None = None
    reason: str = ""
    is_final: bool = False


def part_of_plan(number: int) -> Any:
    """Stands for a logical shard of a plan in a pickle."""
    raise pickle.UnpicklingError(f"Logical shard {number} is known to a plan only.")


@final
class _Pickler(ValuePickler):
    """Pickles outputs for a process that runs the same program: classes and functions by name, parts of plans too."""

    def __init__(self, file: io.BytesIO, plan: Plan, buffer_callback: BufferCallback) -> None:
        super().__init__(file, buffer_callback)
        self._shards = {id(shard): number for number, shard in enumerate(plan.shards)}

    def reducer_override(self, value: Any) -> Any:
        if (number := self._shards.get(id(value))) is not None:
            return part_of_plan, (number,)
        if isinstance(value, type | types.FunctionType):
            return NotImplemented
        return super().reducer_override(value)


def dumped(outputs: Outputs, plan: Plan) -> list[Any]:
    """Returns the pickle of outputs, and the memory of its large arrays."""
    chunks: list[Any] = [b""]
    values, error = outputs.values, outputs.error
    # The failures are sent with their places, by themselves.
    columns: Any = to_columns(list(values), np.empty)
    outputs.values, outputs.error, outputs.failures = columns, None, ()
    try:
        file = io.BytesIO()
        failure = None if error is None else pack_failure(error, pickle)
        _Pickler(file, plan, taking_out(chunks, INLINE_BYTES)).dump((outputs, failure))
    finally:
        outputs.values, outputs.error = values, error
    chunks[0] = file.getvalue()
    return chunks


def loaded(data: Any, buffers: Sequence[Any], plan: Plan) -> Outputs:
    found: Outputs
    found, failure = LookupUnpickler(data, part_of_plan, plan.shards.__getitem__, buffers).load()
    found.values = to_elements(found.values)  # type: ignore[arg-type]  # they are columns
    found.error = None if failure is None else unpack_failure(failure, pickle)
    return found
