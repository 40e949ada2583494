"""The fork server: a small process, warm and without JAX, that forks the workers and watches over them.

Guarantees:
    * It runs no user code: nothing but this loop. So it notices at once when the parent is gone, whatever the workers
      are doing, and kills them and all that they have started.
    * It has one thread, so its forks are safe.
    * A worker's process group is killed before the worker is reaped: as long as it is not reaped, its number means
      nobody else. What it had started in other groups and sessions is killed then, too, where orphans can be adopted.
    * Workers do not outlive it: the kernel kills a worker whose fork server has died (on Linux; elsewhere the
      parent does).
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
    kill_group,
    looks,
    name_process,
    open_handle,
)
from millstream.loader.processes.worker import work

GRACE_SECONDS = 0.5
"""How long workers may take to leave when the parent says so, or is gone."""

REAP_SECONDS = 0.25
"""How long the end of workers that were killed may take: one inside a device's driver cannot be waited for."""

PARENT_SECONDS = 0.25
"""How often to look for the parent where it has no handle: its end of the channel may live on in a forked process."""


def main(parent_pid: int, control: int, tracker: int | None = None) -> NoReturn:
    """Runs the fork server.

    Args:
        parent_pid: the parent's number.
        control: the descriptor of its channel.
        tracker: that of the parent's resource tracker, where it has one.
    """
    os.set_inheritable(control, False)
    if tracker is not None:
        keep_tracker(tracker)
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    name_process("millstream")
    # What was imported stays, so no collection need ever look at it, in no worker: to look would copy its pages.
    gc.freeze()
    gc.enable()
    fork_server = ForkServer(Channel(socket.socket(fileno=control), blocking=True), parent_pid, tracker)
    fork_server.run()
    # With the fork server still alive: the end of a worker just killed must find the socket that it is written to.
    os._exit(0)


@final
class ForkServer:
    """The loop: fork, kill, report, until the parent is gone."""

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
        # A signal's arrival makes this socket readable, so that the loop can wait for children and for the parent.
        self._wakeup, wakeup_end = socket.socketpair()
        self._wakeup.setblocking(False)
        wakeup_end.setblocking(False)
        self._wakeup_end = wakeup_end
        self._poll.register(self._wakeup.fileno(), select.POLLIN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_end.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        """Serves the parent until it closes the channel or dies, then ends all workers."""
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
            self._control.send(NotForked(request.number, error.errno or 0))
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
        """Lives as a worker in the forked process, and never returns into the fork server's loop."""
        status = 1
        try:
            fork_server_pid = os.getppid()
            os.setpgid(0, 0)
            name_process(f"millstream-w{request.number}")
            # While the worker lives, what its children leave behind is its own, not an orphan.
            adopt_orphans()
            die_with_parent(fork_server_pid)
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
            # The byte that the system keeps of it: a larger number would raise here.
            os._exit(status & 0xFF)

    def _reap(self) -> None:
        """Takes note of the workers that have died, having killed what they have started."""
        with contextlib.suppress(BlockingIOError):
            self._wakeup.recv(4096)
        while (ended := self._next_ended()) is not None:
            pid, status, usage = ended
            if pid in self._workers:
                self._workers.discard(pid)
                peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
                self._control.send(Exited(pid, os.waitstatus_to_exitcode(status), peak_bytes))
            # What it has started, and what that has, now has this process for a parent.
            self._kill_orphans()

    def _next_ended(self) -> tuple[int, int, Any] | None:
        """Returns number, status and usage of a child that has ended and is reaped now, None if there is none."""
        if hasattr(os, "waitid"):
            with contextlib.suppress(ChildProcessError):
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
                if found is not None:
                    kill_group(found.si_pid)
                    return os.wait4(found.si_pid, 0)
            return None
        # Python has no waitid on macOS before 3.13. The number of a group is not given away while it has members.
        for pid in self._workers:
            ended = os.wait4(pid, os.WNOHANG)
            if ended[0]:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(pid, signal.SIGKILL)
                return ended
        return None

    def _kill_orphans(self) -> None:
        """Kills what workers that are gone have left: all children that are not workers, whatever their sessions."""
        for pid in children():
            if pid not in self._workers:
                kill_group(pid)

    def _end_workers(self) -> None:
        """Lets idle workers leave, then kills what is left.

        Those killed are reaped as well: else they would be left to process 1, which in a container is the trainer.
        """
        self._reap_for(GRACE_SECONDS)
        for pid in self._workers:
            kill_group(pid)
        self._kill_orphans()
        self._reap_for(REAP_SECONDS)

    def _reap_for(self, seconds: float) -> None:
        """Takes note of workers that die, until all have, for at most so long."""
        waiter = select.poll()
        waiter.register(self._wakeup.fileno(), select.POLLIN)
        for look in looks(seconds):
            if not self._workers and not children():
                break
            waiter.poll(look * 1000)
            self._reap()
