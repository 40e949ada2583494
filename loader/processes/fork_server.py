"""The fork server: a small process without JAX that forks the workers of all pools and reports their exits.

Guarantees:
    * It runs no user code, and imports parts of Python, NumPy and millstream, and pyarrow. It therefore notices the end
      of the parent immediately, whatever the workers do, and kills them and all processes that they have started, and
      removes their folders of shared units.
    * It starts no thread, so its forks are safe: it ends if an import has started one. It never waits for one pool,
      whose workers may not exit, or whose consumer may not receive.
    * A worker's process group is killed before the worker is reaped. Until then, no other process can get its ID. The
      processes that it has started in other groups and sessions are killed next, if the system lets it adopt orphans.
    * SIGTERM and SIGINT to all processes of a job reach the trainer alone: it and its workers ignore them.
    * Workers do not outlive it. On Linux, the kernel kills a worker whose fork server has died. On other systems, the
      parent does.
"""

import contextlib
import errno
import gc
import importlib
import importlib.machinery
import os
import select
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import Any, NoReturn, final

from millstream.loader.processes.channel import Channel, End, Ended, Exited, Fork, Forked, NotForked, close_all
from millstream.loader.processes.process_control import (
    SLICE_SECONDS,
    adopt_orphans,
    children,
    die_with_parent,
    ignore_termination,
    keep_tracker,
    kill_group,
    let_children_terminate,
    name_process,
    open_handle,
    share_tracker,
    wait_slices,
    worker_name,
)
from millstream.loader.processes.process_report import FAILED
from millstream.loader.processes.worker import work
from millstream.loader.workers.worker_imports import is_of_user
from millstream.sources.shared_units import remove_tree

_LIBRARIES = {
    "millstream.sources.formats.parquet": ("pyarrow.parquet", "JE_ARROW_MALLOC_CONF", "background_thread:false")
}
"""Libraries that take long to import, by the module that needs them, each with the variable of the environment, and its
value, that keep it from starting threads.
"""

HAS_THREADS = 3
"""The exit status of a fork server in which an import has started a thread."""

NUM_DESCRIPTORS = 4
"""The number of descriptors that come with a `Fork`."""

GRACE_SECONDS = 0.5
"""The time that workers get to exit when their pool ends, or the parent."""

REAP_SECONDS = 0.25
"""The time to wait for killed workers to exit. A worker blocked in a device driver may not exit."""

PARENT_SECONDS = 0.25
"""The interval of checks for the parent if it has no handle: a forked process may keep its end of the channel open."""


def main(modules: Sequence[str], parent_pid: int, control: int, tracker: int | None = None) -> NoReturn:
    """Runs the fork server, given the descriptors of the connection to the parent and of its resource tracker, if any.

    It imports the modules first, and the libraries that they need. The parent sends the end of a socket pair for each
    pool.
    """
    os.set_inheritable(control, False)
    if tracker is not None:
        keep_tracker(tracker)
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ignore_termination()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    name_process("millstream")
    import_for_workers(modules)
    # Imported modules stay. Excluding them from garbage collection keeps workers from copying their pages.
    gc.freeze()
    gc.enable()
    fork_server = ForkServer(socket.socket(fileno=control), parent_pid, tracker)
    fork_server.run()
    # Exit directly, while the fork server object exists: the signal of a killed worker is still written to its socket.
    os._exit(0)


@final
class _Pool:
    """A pool of the parent: the connection to it, and the remaining steps of its end if that has begun."""

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.ending: Iterator[float] | None = None


@final
class ForkServer:
    """Forks, kills and reports for the pools of the parent until it has ended."""

    def __init__(self, control: socket.socket, parent_pid: int, tracker: int | None = None) -> None:
        self._control = control
        self._tracker = tracker
        self._pools: list[_Pool] = []
        self._workers: dict[int, _Pool] = {}
        # The folders of the pools' shared units, which the parent removes unless it is killed.
        self._folders: set[str] = set()
        self._parent_pid = parent_pid
        self._parent = open_handle(parent_pid)
        # A signal makes this socket readable, so the loop can wait for children and for the parent.
        self._wakeup, wakeup_end = socket.socketpair()
        self._wakeup.setblocking(False)
        wakeup_end.setblocking(False)
        self._wakeup_end = wakeup_end
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup_end.fileno(), warn_on_full_buffer=False)

    def run(self) -> None:
        has_parent = True
        while has_parent or self._pools:
            ready = self._wait(has_parent=has_parent)
            if self._wakeup.fileno() in ready:
                self._reap()
            if self._parent in ready or os.getppid() != self._parent_pid:
                has_parent = False
            elif self._control.fileno() in ready:
                has_parent = self._add_pool()
            for pool in list(self._pools):
                if pool.channel.fileno() in ready:
                    self._serve(pool)
                if pool.ending is None and not (has_parent and pool.channel.is_open):
                    pool.ending = self._end(pool)
                if pool.ending is not None and next(pool.ending, None) is None:
                    self._pools.remove(pool)
                    pool.channel.shut_down()
        for folder in self._folders:
            remove_tree(folder)

    def _wait(self, *, has_parent: bool) -> set[int]:
        """Waits for an event. Returns the descriptors that are ready."""
        poll = select.poll()
        poll.register(self._wakeup.fileno(), select.POLLIN)
        if has_parent:
            poll.register(self._control.fileno(), select.POLLIN)
            if self._parent is not None:
                poll.register(self._parent, select.POLLIN)
        for pool in self._pools:
            if pool.channel.is_open:
                pool.channel.watch(poll)
        seconds = None if self._parent is not None else PARENT_SECONDS
        if any(pool.ending is not None for pool in self._pools):
            seconds = SLICE_SECONDS
        return {descriptor for descriptor, _ in poll.poll(None if seconds is None else seconds * 1000)}

    def _add_pool(self) -> bool:
        """Receives the connection of a new pool. Returns False if the parent has closed its end."""
        data, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
            # A parent that does not receive must not block the others.
            self._pools.append(_Pool(Channel(socket.socket(fileno=descriptor), blocking=False)))
        return bool(data)

    def _serve(self, pool: _Pool) -> None:
        # Without its descriptors, a request is answered by an error.
        with contextlib.suppress(OSError):
            for request in pool.channel.receive():
                if isinstance(request, End):
                    pool.ending = self._end(pool)
                elif isinstance(request, Fork):
                    self._fork(pool, request)
                elif self._workers.get(request.pid) is pool:
                    kill_group(request.pid)
        pool.channel.flush()

    def _fork(self, pool: _Pool, request: Fork) -> None:
        descriptors = pool.channel.take_descriptors()
        if request.imports_libraries:
            import_for_workers(request.pipeline.modules)
        else:
            import_modules(request.pipeline.modules)
        try:
            check_complete(descriptors)
            pid = os.fork()
        except OSError as error:
            close_all(descriptors)
            pool.channel.send(NotForked(error.errno or 0))
            return
        if pid == 0:
            self._become_worker(request, descriptors)
        self._workers[pid] = pool
        self._folders |= {request.trainer.units} - {""}
        close_all(descriptors)
        handle = open_handle(pid)
        pool.channel.send(Forked(request.number, pid), [] if handle is None else [handle])
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
            for pool in self._pools:
                pool.channel.close()
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
            if (pool := self._workers.pop(pid, None)) is not None:
                peak_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)
                pool.channel.send(Exited(pid, os.waitstatus_to_exitcode(status), peak_bytes))
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

    def _end(self, pool: _Pool) -> Iterator[float]:
        """Lets the idle workers of a pool exit, then kills all others. Yields when it waits, so that others are served.

        Killed processes are reaped as well. Otherwise process 1 would have to, which in a container is the trainer.
        """
        yield from takewhile(lambda _: self._has_processes(pool), wait_slices(GRACE_SECONDS))
        for pid in self._workers_of(pool):
            kill_group(pid)
        self._kill_orphans()
        yield from takewhile(lambda _: self._has_processes(pool), wait_slices(REAP_SECONDS))
        pool.channel.send(Ended())
        yield from takewhile(lambda _: pool.channel.has_unsent, wait_slices(REAP_SECONDS))

    def _has_processes(self, pool: _Pool) -> bool:
        return bool(self._workers_of(pool)) or not self._workers.keys() >= set(children())

    def _workers_of(self, pool: _Pool) -> list[int]:
        return [pid for pid, other in self._workers.items() if other is pool]


def import_modules(names: Sequence[str]) -> None:
    """Imports modules that all workers of a pool need, once for all of them."""
    if missing := [name for name in names if name not in sys.modules]:
        gc.disable()
        for name in missing:
            # A worker raises the error again.
            with contextlib.suppress(Exception):
                importlib.import_module(name)
        gc.freeze()
        gc.enable()


def import_for_workers(names: Sequence[str]) -> None:
    """Imports modules of millstream that workers need, and the libraries that these need. Ends if a thread starts.

    Then the kernel kills the workers, and the next fork servers import no libraries.
    """
    import_modules(names)
    for library, variable, value in [_LIBRARIES[name] for name in names if name in _LIBRARIES]:
        top = library.partition(".")[0]
        before = num_threads()
        if library in sys.modules or before is None or is_of_user(top, importlib.machinery.PathFinder.find_spec(top)):
            continue
        is_set = variable in os.environ
        os.environ.setdefault(variable, value)
        import_modules([library])
        if not is_set:
            del os.environ[variable]
        if num_threads() != before:
            os._exit(HAS_THREADS)


def num_threads() -> int | None:
    """Returns the number of threads of this process, or None if the system does not tell."""
    try:
        return len(os.listdir("/proc/self/task"))  # noqa: PTH208  (pathlib is slow to import)
    except OSError:
        return None


def check_complete(descriptors: list[int]) -> None:
    """Raises an OSError if descriptors of a `Fork` are missing, because this process may not open more."""
    if len(descriptors) != NUM_DESCRIPTORS:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
