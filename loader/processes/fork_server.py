"""The fork server: a small process without JAX that forks the workers and reports their exits.

Guarantees:
    * It runs no user code. It therefore notices the end of the parent immediately, whatever the workers do, and kills
      them and all processes that they have started.
    * It has one thread, so its forks are safe.
    * A worker's process group is killed before the worker is reaped. Until then, no other process can get its ID. The
      processes that it has started in other groups and sessions are killed next, if the system lets it adopt orphans.
    * SIGTERM and SIGINT to all processes of a job reach the trainer alone: it and its workers ignore them.
    * Workers do not outlive it. On Linux, the kernel kills a worker whose fork server has died. On other systems, the
      parent does.
"""

import contextlib
import gc
import os
import select
import signal
import socket
import sys
from typing import Any, NoReturn, final

from millstream.loader.processes.channel import Channel, close_all
from millstream.loader.processes.interpreter import keep_tracker, share_tracker
from millstream.loader.processes.messages import Exited, Fork, Forked, Kill, NotForked
from millstream.loader.processes.process_control import (
    adopt_orphans,
    children,
    die_with_parent,
    ignore_termination,
    kill_group,
    let_children_terminate,
    name_process,
    open_handle,
    wait_slices,
    worker_name,
)
from millstream.loader.processes.process_report import FAILED
from millstream.loader.processes.worker import work

GRACE_SECONDS = 0.5
"""The time that workers get to exit when the parent has closed the connection or died."""

REAP_SECONDS = 0.25
"""The time to wait for killed workers to exit. A worker blocked in a device driver may not exit."""

PARENT_SECONDS = 0.25
"""The interval of checks for the parent if it has no handle: a forked process may keep its end of the channel open."""


def main(parent_pid: int, control: int, tracker: int | None = None) -> NoReturn:
    """Runs the fork server, given the descriptors of the channel to the parent and of its resource tracker, if any."""
    os.set_inheritable(control, False)
    if tracker is not None:
        keep_tracker(tracker)
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ignore_termination()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    name_process("millstream")
    # Imported modules stay. Excluding them from garbage collection keeps workers from copying their pages.
    gc.freeze()
    gc.enable()
    fork_server = ForkServer(Channel(socket.socket(fileno=control), blocking=True), parent_pid, tracker)
    fork_server.run()
    # Exit directly, while the fork server object exists: the signal of a killed worker is still written to its socket.
    os._exit(0)


@final
class ForkServer:
    """Forks, kills and reports until the parent has ended."""

    def __init__(self, control: Channel, parent_pid: int, tracker: int | None = None) -> None:
        self._control = control
        self._tracker = tracker
        self._workers: set[int] = set()
        self._poll = select.poll()
        self._poll.register(control.fileno(), select.POLLIN)
        self._parent_pid = parent_pid
        self._parent = open_handle(parent_pid)
        if self._parent is not None:
            self._poll.register(self._parent, select.POLLIN)
        # A signal makes this socket readable, so the loop can wait for children and for the parent.
        self._wakeup, wakeup_end = socket.socketpair()
        self._wakeup.setblocking(False)
        wakeup_end.setblocking(False)
        self._wakeup_end = wakeup_end
        self._poll.register(self._wakeup.fileno(), select.POLLIN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_end.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        milliseconds = None if self._parent is not None else PARENT_SECONDS * 1000
        while self._control.is_open and os.getppid() == self._parent_pid:
            ready = {descriptor for descriptor, _ in self._poll.poll(milliseconds)}
            if self._wakeup.fileno() in ready:
                self._reap()
            if self._parent in ready:
                break
            if self._control.fileno() in ready:
                for request in self._control.receive():
                    self._serve(request)
        self._end_workers()

    def _serve(self, request: Fork | Kill) -> None:
        if isinstance(request, Kill):
            if request.pid in self._workers:
                kill_group(request.pid)
            return
        descriptors = self._control.take_descriptors()
        try:
            pid = os.fork()
        except OSError as error:
            close_all(descriptors)
            self._control.send(NotForked(error.errno or 0))
            return
        if pid == 0:
            self._become_worker(request, descriptors)
        self._workers.add(pid)
        close_all(descriptors)
        handle = open_handle(pid)
        self._control.send(Forked(request.number, pid), [] if handle is None else [handle])
        if handle is not None:
            os.close(handle)

    def _become_worker(self, request: Fork, descriptors: list[int]) -> NoReturn:
        status = FAILED
        try:
            fork_server_pid = os.getppid()
            os.setpgid(0, 0)
            name_process(worker_name(request.number))
            # The worker adopts the orphans of its children while it lives.
            adopt_orphans()
            die_with_parent(fork_server_pid)
            let_children_terminate()
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            self._wakeup.close()
            self._wakeup_end.close()
            if self._parent is not None:
                os.close(self._parent)
            if self._tracker is not None:
                share_tracker(self._tracker)
            channel, arena, crash_log, pipeline = descriptors
            work(channel, arena, crash_log, pipeline, request)
            status = 0
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        except BaseException:  # noqa: BLE001  (nothing may return into the fork server's loop)
            sys.excepthook(*sys.exc_info())
        finally:
            with contextlib.suppress(Exception):
                sys.stdout.flush()
                sys.stderr.flush()
            # Only the low byte of a status is kept. A larger number would raise here.
            os._exit(status & 0xFF)

    def _reap(self) -> None:
        """Reports the workers that have exited, after killing the processes that they have started."""
        with contextlib.suppress(BlockingIOError):
            self._wakeup.recv(4096)
        while (ended := self._next_ended()) is not None:
            pid, status, usage = ended
            if pid in self._workers:
                self._workers.discard(pid)
                peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
                self._control.send(Exited(pid, os.waitstatus_to_exitcode(status), peak_bytes))
            # The orphans of the worker have become children of this process.
            self._kill_orphans()

    def _next_ended(self) -> tuple[int, int, Any] | None:
        """Reaps a child that has exited. Returns its ID, status and resource usage, or None if there is none."""
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is not None:
                    kill_group(found.si_pid)
                    return os.wait4(found.si_pid, 0)
            return None
        # Python has no waitid on macOS before 3.13. The ID of a group is not reused while it has members.
        for pid in self._workers:
            ended = os.wait4(pid, os.WNOHANG)
            if ended[0]:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                return ended
        return None

    def _kill_orphans(self) -> None:
        """Kills all children that are not workers, whatever their session."""
        for pid in children():
            if pid not in self._workers:
                kill_group(pid)

    def _end_workers(self) -> None:
        """Lets idle workers exit, then kills all others.

        Killed processes are reaped as well. Otherwise process 1 would have to, which in a container is the trainer.
        """
        self._reap_for(GRACE_SECONDS)
        for pid in self._workers:
            kill_group(pid)
        self._kill_orphans()
        self._reap_for(REAP_SECONDS)

    def _reap_for(self, seconds: float) -> None:
        waiter = select.poll()
        waiter.register(self._wakeup.fileno(), select.POLLIN)
        for current in wait_slices(seconds):
            if not self._workers and not children():
                break
            waiter.poll(current * 1000)
            self._reap()
