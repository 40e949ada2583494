"""Worker processes as a place, and the reactions to their deaths and stalls."""

import contextlib
import functools
from collections.abc import Hashable
from typing import Any, final

from millstream.core.warn import log_warning
from millstream.errors import WorkerDiedError
from millstream.loader.engine.places import Here
from millstream.loader.engine.workers import Workers
from millstream.loader.measuring import HAND_OVER
from millstream.loader.pipeline.calls import Blocks, Call
from millstream.loader.pipeline.plan import Plan
from millstream.loader.processes.channel import Exited, PipelineFailed, Result, Task
from millstream.loader.processes.pool import Pool, Worker
from millstream.loader.processes.process_report import (
    clear_stacks,
    describe_exit,
    describe_limits,
    describe_process,
    explain_limit,
    read_call,
    read_stacks,
    wait_for_stacks,
    waits_for_stacks,
)
from millstream.loader.transport.payload import release, unpack, unpack_failure
from millstream.loader.workers.call_runner import CallResult

MAX_DEATHS_OF_FORK_SERVER = 2
"""Limit for deaths of the fork server without a result in between. A pool that reaches it is given up."""


@final
class Processes(Workers[Worker]):
    """Runs calls in worker processes."""

    _pool: Pool
    _are_local = True
    _noun = "worker process"

    def __init__(self, owner: Any, requests: list[None], here: Here, **options: Any) -> None:
        super().__init__(owner, requests, here, **options)
        self._unpack = self._profiler.timed(HAND_OVER, unpack)
        self._deaths_of_fork_server = 0

    def stacks(self) -> dict[int, str]:
        """Returns the stacks of the workers by process ID, without those still starting. Thread-safe.

        A signal makes a worker write its stacks, even in C code. The interrupted call continues unnoticed.
        """
        stacks = {}
        # All are requested before the first is waited for, so those that do not respond take no longer than one.
        workers, waits = self._pool.request_stacks(), waits_for_stacks()
        for pid, worker in workers.items():
            # The worker may have exited, or the consumer may have closed the pool.
            with contextlib.suppress(ValueError, OSError), self._pool.open_crash_log(worker) as crash_log:
                stacks[pid] = wait_for_stacks(crash_log, waits)
                clear_stacks(crash_log)
        return stacks

    @property
    def are_ready(self) -> bool:
        return self._pool.are_ready

    def resize(self, num_workers: int) -> None:
        self._pool.resize(num_workers)

    def _load(self, name: Hashable, plan: Plan) -> int:
        if plan.pipeline.variant is not None:
            return self._pool.vary(plan.pipeline.variant)
        return self._pool.load(name, plan.pipeline, lambda: self.substreams.pipelines)

    def _current_call(self, worker: Worker) -> int | None:
        if self.reads.number > 1:
            # Only reads of the later calls are in flight.
            return next(iter(worker.calls.copy()), None)
        with contextlib.suppress(OSError, ValueError), self._pool.open_crash_log(worker) as crash_log:
            return read_call(crash_log)
        return None

    def _send(self, worker: Worker, number: int, call: Call) -> None:
        if (message := self._message_of(number, call)) is not None:
            substream = self.substreams.find(call)
            if substream is None:
                raise AssertionError("a call that is sent is wanted")
            # A suspect runs alone, so that another death can be attributed to it.
            num_reads = 1 if self._assignments.is_suspect(number) else self.reads.number
            worker.record_call(number)
            worker.channel.send(Task(number, worker.arena.take_released(), message, substream.pipeline, num_reads))

    def _receive(self, seconds: float) -> None:
        for worker, event in self._pool.wait(seconds):
            if isinstance(event, Result):
                self._take_result(worker, event)
            elif isinstance(event, PipelineFailed):
                error = unpack_failure(event.failure, self._pool.classes)
                explain_limit(error, self._options.num_workers)
                raise error
            else:
                self._take_death(worker, event.exited)
        if not self._pool.has_fork_server:
            self._restart()

    def _restart(self) -> None:
        """Starts another fork server and workers. No call is to blame. All are sent again."""
        self._deaths_of_fork_server += 1
        if self._deaths_of_fork_server >= MAX_DEATHS_OF_FORK_SERVER:
            raise WorkerDiedError(
                f"The fork server died {self._deaths_of_fork_server} times before any worker produced a result. "
                f"Its output is printed above.{describe_limits()}"
            )
        log_warning("the fork server died. Restarting it and all workers.")
        lost = [number for worker in self._pool.workers for number in worker.calls]
        # First, because a restart may fail, and another one may succeed later.
        self._assignments.lose(lost)
        self._pool.restart()
        self.submit_lost()

    def _take_result(self, worker: Worker, result: Result) -> None:
        self._deaths_of_fork_server = 0
        self._deaths_at_start.record_life(worker.number)
        call, made = self._assignments.call(result.call), CallResult(*result.outputs)
        substream = None if call is None else self.substreams.find(call)
        if call is None or substream is None:
            release(made.packed, worker.arena)
            return
        blocks = request if isinstance(request := call.first_request, Blocks) else None
        if made.stages and substream.profiler is not None:
            substream.profiler.called(worker.pid, made.begun, made.seconds, blocks, made.stages)
        self.reads.record(call.num_blocks, made.seconds, made.idle_seconds)
        self._complete(
            result.call, call, made, functools.partial(self._unpack, made.packed, worker.arena, self._pool.classes)
        )

    def _take_death(self, worker: Worker, exited: Exited | None) -> None:
        """Sends the calls of a dead worker again, except for the one that killed it if this is not the first time.

        If several reads were in flight, any of them may have killed it. Each of these calls runs alone.
        """
        lost, begun = list(worker.calls), read_call(worker.crash_log)
        suspects = lost[: lost.index(begun) + 1] if begun in lost else []
        cause = describe_exit(exited, read_stacks(worker.crash_log))
        self._profiler.died(f"Worker process {worker.pid} {cause}")
        if begun is None and (lost or not worker.is_ready):
            self._deaths_at_start.record_death(
                worker.number, f"Worker processes die while they start. The last one {cause}{describe_limits()}"
            )
        self._assignments.lose(lost[len(suspects) :])
        for suspect in reversed(suspects):
            self._assignments.blame(
                suspect,
                lambda deaths, records: WorkerDiedError(
                    f"{deaths} worker processes died while computing the same outputs, from {records}. "
                    f"The last one {cause}"
                ),
                guilt=float(len(suspects) == 1),
            )
        log_warning(f"worker process {worker.pid} {cause} Starting a replacement.")
        self._pool.replace(worker)
        self.submit_lost()

    def _state_of(self, worker: Worker) -> str:
        return f"; it is {describe_process(worker.pid)}"

    def _explain_stall(self, worker: Worker) -> str:
        state, stacks = describe_process(worker.pid), "(none: the process is still starting)"
        if worker.is_ready:
            worker.request_stacks()
            stacks = wait_for_stacks(worker.crash_log, waits_for_stacks())
        return f"It is {state}. Stacks:\n{stacks}"
