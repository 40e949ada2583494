"""Ray actors: the code that runs in one, of which Ray calls the methods, and the trainer's side with its events.

Guarantees:
    * Calls run one after another, in the order received, in the actor's main thread.
    * Outputs are pickled by the same rules as in a worker process: classes of the pipeline come back as the same
      classes, and arrays as memory, which Ray copies into its object store once.
    * The actors of a node share one read-only copy of the pipeline's arrays. The smallest arrays, up to PRIVATE_BYTES,
      are private copies of each actor, because user code may use them as scratch memory.
"""

import faulthandler
import logging
import os
import pickle
import sys
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np

from millstream.loader.pipeline.elements import Elements
from millstream.loader.pipeline.pipeline import Variant
from millstream.loader.pipeline.recycled_memory import RecycledMemory
from millstream.loader.threads.options import affordable_threads
from millstream.loader.threads.reader_threads import ReaderThreads
from millstream.loader.transport.arena import INLINE_BYTES
from millstream.loader.transport.payload import INLINE_PICKLE_BYTES, Failure, as_columns, pack_failure
from millstream.loader.transport.pickling import ClassTable, taking_out
from millstream.loader.transport.pipeline_file import unpickle_pipelines
from millstream.loader.workers.call_runner import CallResult, runner_of_epochs
from millstream.loader.workers.pools import AnyWorker
from millstream.loader.workers.process_settings import Trainer

PRIVATE_BYTES = 1 << 26
"""The total size of the pipeline's arrays that an actor copies, smallest first."""

Packed: TypeAlias = tuple[Any, list[Any]]
"""Serialized outputs: the pickle, and its out-of-band buffers."""

_STANDARD_ERROR = 2


@final
class PipelineActor:
    """Runs calls.

    Args:
        pipeline: the pickle of the pipeline, and the memory of its large arrays.
        import_path: the import path of the trainer. Entries that exist on this node are used.
        stack_seconds: a call that takes this long writes its stacks to the actor's log.
        index: its index among the actors, for `worker_init_fn`.
        trainer: the program that it serves.
    """

    def __init__(
        self,
        pipeline: Packed,
        import_path: Sequence[str],
        *,
        num_threads: int,
        stack_seconds: float,
        index: int,
        num_workers: int,
        trainer: Trainer,
    ) -> None:
        # Accelerators belong to the trainer, which may run on this node.
        os.environ["JAX_PLATFORMS"] = "cpu"
        sys.path.extend(entry for entry in import_path if entry not in sys.path and os.path.isdir(entry))  # noqa: PTH112
        self._stack_seconds = min(stack_seconds, threading.TIMEOUT_MAX)
        self._failure: Failure | None = None
        self._memory = RecycledMemory()
        try:
            pickled, buffers = pipeline
            # The trainer's process may be that of another machine.
            with trainer.served(f"millstream-a{index}", lambda: None, lambda *_: None):
                (complete,), init, self._classes = unpickle_pipelines(pickled, _with_private_copies(buffers))
            # Ray prints what an actor prints. Without a handler, that would be warnings only.
            logging.basicConfig()
            if init is not None:
                init(index, num_workers)
            readers, allocate = ReaderThreads(affordable_threads(num_threads)), self._memory.allocate
            self._runner_of = runner_of_epochs(
                complete, self._classes, readers=readers, allocate=allocate, pack=self._pack
            )
        except SystemExit:
            raise
        except BaseException as error:  # noqa: BLE001  (unpickling user classes may raise anything)
            self._failure = pack_failure(error, ClassTable())

    def ready(self) -> tuple[int, Failure | None]:
        """Returns the process ID, and the error of unpickling the pipeline, if any."""
        return os.getpid(), self._failure

    def make(self, message: tuple[int, int, int] | bytes, variant: Variant) -> CallResult[Packed]:
        """Computes the outputs of a call of a variant of the pipeline, as `CallRunner.make`."""
        faulthandler.dump_traceback_later(self._stack_seconds, file=_STANDARD_ERROR)
        try:
            return self._runner_of(variant).make(message)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _pack(self, run: Elements) -> Packed:
        buffers: list[Any] = []
        allocate = self._memory.allocate
        body = self._classes.dumps(as_columns(run, allocate), taking_out(buffers, INLINE_BYTES), allocate)
        return (
            pickle.PickleBuffer(body) if len(body) > INLINE_PICKLE_BYTES else body,
            list(map(pickle.PickleBuffer, buffers)),
        )


def _with_private_copies(buffers: Sequence[Any]) -> list[Any]:
    private, budget = list(buffers), PRIVATE_BYTES
    for number, buffer in sorted(enumerate(buffers), key=lambda numbered: memoryview(numbered[1]).nbytes):
        budget -= memoryview(buffer).nbytes
        if budget < 0:
            break
        private[number] = np.array(np.frombuffer(buffer, np.uint8))
    return private


@final
class Actor(AnyWorker):
    """The trainer's side of an actor. It has a process ID, that on its node, once it is ready.

    Attributes:
        index: its index among the actors, which a replacement takes over.
        runs_suspect: True if its only call is one with which another actor has died.
    """

    def __init__(self, number: int, index: int, stall_timeout: float, handle: Any) -> None:
        super().__init__(number, stall_timeout)
        self.index = index
        self.handle = handle
        self.runs_suspect = False

    @property
    def accepts_calls(self) -> bool:
        """True if it is ready, and does not run a suspect call, to which its death must be attributable."""
        return self.pid is not None and not self.runs_suspect


class Answer(NamedTuple):
    """The result of a call."""

    call: int
    result: CallResult[Packed]


class PipelineFailed(NamedTuple):
    """The pipeline could not be unpickled in an actor."""

    failure: Failure


class CallFailed(NamedTuple):
    """Ray did not deliver the outputs of a call: they were lost, for instance with a node, or Ray cannot send them."""

    call: int
    error: Exception
    is_lost: bool


class Died(NamedTuple):
    """An actor has died, with Ray's explanation."""

    cause: str
    is_its_own: bool  # Its own process has ended, and not its node or the connection to it.


Event: TypeAlias = Answer | PipelineFailed | CallFailed | Died
