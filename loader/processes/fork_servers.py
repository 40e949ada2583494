"""The fork servers of this process, which its pools share, and how they are started.

Guarantees:
    * Pools share a fork server if a new one would be the same process: its flags, import path, arguments and folder,
      environment, limits, rights and outputs would be the same, and its resource tracker.
    * Import path and folder are those at the construction of the loader. A relative entry of `sys.path` keeps the
      meaning that it had then, even if the trainer changes its folder later.
    * A fork server without a pool is idle. It is killed and reaped after IDLE_SECONDS, when another one is started, and
      at the end of the interpreter. It notices itself if the trainer is killed.
    * A pool that ends leaves no process. If the fork server does not say so in time, it is killed with all that it has
      started, and other pools start new ones.
    * No method waits for a lock that another one holds, so that finalizers and signal handlers may end pools.
    * A forked process does not use the fork servers of its parent.
"""

import atexit
import contextlib
import functools
import marshal
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Self, final

from millstream.core.signals import SignalSafeLock
from millstream.loader.processes.process_control import kill_session, wait_slices
from millstream.loader.threads.thread_settings import in_fresh_thread
from millstream.loader.transport.arena import create_arena_file
from millstream.loader.transport.importable_modules import LaunchContext, current_folder
from millstream.loader.workers.retirement import Retirement

if TYPE_CHECKING:
    from millstream.loader.processes.channel import Channel
    from millstream.loader.workers.pools import AnyWorker

CLOSE_SECONDS = 2.0
"""Upper bound for stopping a pool. Workers get a quarter of it to exit, then the fork server kills them."""

_SINGLE_THREADED = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "OMP_NUM_THREADS")
"""Variables that keep libraries from starting a thread per core in each worker, unless the program has set them.

Sums of these libraries depend on the number of threads.
"""

_SINGLE_THREADED_ANYWAY = ("OPENCV_FOR_THREADS_NUM",)
"""The same for libraries whose results do not depend on it."""

_LIMITS = tuple(getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_"))

_RIGHTS = re.compile(
    r"^(?:Uid|Gid|Groups|Umask|SigIgn|Cap\w+|NoNewPrivs|Seccomp|Cpus_allowed|Mems_allowed):.*", re.MULTILINE
)
"""The lines of a process's status about properties that its children inherit."""

_START = """
import gc, marshal, sys
gc.disable()
with open(int(sys.argv[1]), "rb", buffering=0) as file:
    sys.path[:], arguments, modules = marshal.load(file)
numbers, sys.argv = [int(number) for number in sys.argv[2:]], arguments
from millstream.loader.processes.fork_server import main
main(modules, *numbers)
"""
"""The program of a fork server. Until the path is set, it imports only built-in modules, and no file of any folder.

Garbage collection is off while modules are imported, because nothing is garbage then.
"""


def _write_launch_context(context: LaunchContext, modules: Sequence[str]) -> int:
    """Returns the descriptor of an anonymous file for `_START`. A long import path may not fit on a command line."""
    content = marshal.dumps((list(context.path), list(context.arguments), list(modules)))
    descriptor = create_arena_file(len(content))
    os.pwrite(descriptor, content, 0)
    return descriptor


def _command() -> tuple[str, ...]:
    """Returns the command line that starts a fork server with the flags of this interpreter.

    It lacks the descriptor from `_write_launch_context`, and the arguments of `fork_server.main`. Where Python is
    embedded in another program, the interpreter may be unknown, which is a RuntimeError.
    """
    if not sys.executable:
        raise RuntimeError(
            f"Worker processes are started with sys.executable, which is {sys.executable!r}. "
            "Set it to the path of a Python interpreter, or use no worker processes."
        )
    # multiprocessing uses the same function. -P: the script's folder is on the import path only if the trainer has it.
    flags: list[str] = subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]  # noqa: SLF001
    return sys.executable, *flags, "-P", "-c", _START


def _tracker_descriptor() -> int | None:
    """Returns the descriptor of `multiprocessing`'s resource tracker, or None if none is needed.

    Workers share it, like children of `multiprocessing`. With a tracker of its own, the end of a worker would unlink
    the user's shared memory that it had attached.
    """
    tracker = sys.modules.get("multiprocessing.resource_tracker")
    if tracker is None:
        return None
    # If user code may use shared memory, this starts the tracker.
    is_needed = "multiprocessing.shared_memory" in sys.modules
    descriptor = tracker.getfd() if is_needed else tracker._resource_tracker._fd  # noqa: SLF001
    return None if descriptor is None else int(descriptor)


class Launch(NamedTuple):
    """All that a new fork server would get from this process. Equal values start equal fork servers."""

    command: tuple[str, ...]
    context: LaunchContext
    environment: dict[str, str]
    tracker: int | None
    inherited: tuple[Any, ...]

    @classmethod
    def now(cls, context: LaunchContext, environment: Mapping[str, str]) -> Self:
        tracker = _tracker_descriptor()
        variables = (*_SINGLE_THREADED_ANYWAY, *(_SINGLE_THREADED if context.limits_threads else ()))
        return cls(
            _command(),
            context,
            {**dict.fromkeys(variables, "1"), **environment, "JAX_PLATFORMS": "cpu"},
            tracker,
            (_inherited(), [_identity(number) for number in (1, 2, *(() if tracker is None else (tracker,)))]),
        )


def _inherited() -> tuple[Any, ...]:
    """Returns the limits, rights and priority that a child of this thread inherits."""
    rights: list[str] = []
    # Other systems than Linux do not list them.
    with contextlib.suppress(OSError), open("/proc/thread-self/status", encoding="ascii", errors="replace") as file:  # noqa: PTH123
        rights = _RIGHTS.findall(file.read())
    return os.getpriority(os.PRIO_PROCESS, 0), rights, [resource.getrlimit(limit) for limit in _LIMITS]


def _identity(descriptor: int) -> tuple[int, int] | None:
    """Returns the identity of an open file, or None if the descriptor is closed."""
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


@final
class ForkServerProcess:
    """The trainer's side of a fork server.

    Attributes:
        connections: the connections of the pools that use it.
        retirement: its scheduled end if it is idle, otherwise the latest one, which was cancelled.
    """

    def __init__(self, launch: Launch, control: socket.socket, process: "subprocess.Popen[bytes]") -> None:
        self.launch = launch
        self.process = process
        self.owner = os.getpid()
        self.connections: list[Connection] = []
        self.retirement: Retirement[ForkServerProcess] | None = None
        self._control = control

    def connect(self) -> "Channel | None":
        """Returns the channel of a new pool, or None if the fork server has ended or does not answer.

        Thread-safe: a single system call sends the other end of the channel to the fork server.
        """
        from millstream.loader.processes.channel import Channel, send_now  # noqa: PLC0415  (lazy: slow to import)

        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(ours.close)
            try:
                send_now(self._control, b"+", [theirs.fileno()])
            except OSError:
                return None
            on_failure.pop_all()
        return Channel(ours, blocking=False)

    def kill(self) -> None:
        """Kills the fork server and all processes that it has started, and reaps it. Idempotent."""
        if self.process.returncode is None:
            workers = [worker.pid for connection in list(self.connections) for worker in list(connection.workers)]
            self.process.kill()
            # On Linux, the kernel kills the workers with it, but not the processes that they have started.
            kill_session(self.process.pid, [pid for pid in workers if pid is not None])
            self._reap()

    def cancel_retirement(self) -> None:
        if self.retirement is not None:
            self.retirement.cancel()

    def end(self) -> None:
        """Ends a fork server that has no pool, and therefore no workers. Idempotent."""
        self.cancel_retirement()
        self.kill()
        self._control.close()

    def _reap(self) -> None:
        for seconds in wait_slices(CLOSE_SECONDS / 2):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(seconds)
                return


@final
class Connection:
    """The use of a fork server by one pool.

    Attributes:
        workers: the list of the pool's workers.
        is_closed: True once the workers have ended.
    """

    def __init__(self, server: ForkServerProcess, workers: "Sequence[AnyWorker]") -> None:
        self.server = server
        self.workers = workers
        self.channel: Channel | None = None
        self.is_closed = False
        self._lock = SignalSafeLock(threading.RLock())

    def close(self, interrupted: Sequence[bool]) -> None:
        """Lets the fork server end the workers. Kills it if it does not answer in time, or dies.

        Called in fresh threads. Stops waiting once `interrupted` has an item.
        """
        with self._lock:
            if not self.is_closed:
                if self.channel is not None:
                    if not self._have_ended(self.channel, interrupted):
                        FORK_SERVERS.give_up(self.server)
                    self.channel.shut_down()
                self.is_closed = True
        FORK_SERVERS.release(self)

    def _have_ended(self, channel: "Channel", interrupted: Sequence[bool]) -> bool:
        from millstream.loader.processes.channel import End, Ended  # noqa: PLC0415  (lazy, as above)

        channel.send(End())
        for seconds in wait_slices(CLOSE_SECONDS / 2):
            if interrupted or not channel.is_open:
                break
            poll = select.poll()
            channel.watch(poll)
            poll.poll(seconds * 1000)
            channel.flush()
            # The handles of workers may be lost, because they are not needed.
            with contextlib.suppress(OSError):
                if any(isinstance(message, Ended) for message in channel.receive()):
                    return True
        return False


@final
class ForkServers:
    """The fork servers of this process.

    Attributes:
        import_libraries: False once a fork server has died, possibly because of a library that it had imported.
    """

    def __init__(self) -> None:
        self.import_libraries = True
        # Those that other pools may use.
        self._shared: list[ForkServerProcess] = []
        self._is_over = False
        self._at_exit = functools.cache(lambda: atexit.register(self._end_all))

    @property
    def idle(self) -> list[ForkServerProcess]:
        return [server for server in self._own() if not server.connections]

    def prepare(self, context: LaunchContext, modules: Sequence[str] = ()) -> None:
        """Starts a fork server in advance, unless there is one. Errors are those of the pool that needs it.

        A new one imports modules of millstream that workers will need, and the libraries that these need.
        """

        def start() -> None:
            # Not around the wait for this thread, where a signal handler may raise a TimeoutError.
            with contextlib.suppress(OSError, RuntimeError, MemoryError):
                launch = Launch.now(context, os.environ)
                if all(server.launch != launch for server in self._own()):
                    server = self._started(launch, modules if self.import_libraries else ())
                    self._shared.append(server)
                    self._begin_idleness(server)

        in_fresh_thread(start)

    def connect(self, launch: Launch, workers: "Sequence[AnyWorker]", *, shared: bool = True) -> Connection:
        """Returns a connection to a fork server: a running one, or a new one, which no other pool uses if not `shared`.

        Called in fresh threads.
        """
        for server in self._own() if shared else ():
            if server.launch == launch and (connection := self._joined(server, workers)) is not None:
                return connection
        server = self._started(launch)
        connection = self._joined(server, workers, is_new=True)
        if connection is None:
            raise ChildProcessError("Cannot start workers: the fork server has ended. Its output is printed above.")
        if shared:
            # Now, because other threads may end one without a connection.
            self._shared.append(server)
        return connection

    def release(self, connection: Connection) -> None:
        """Ends the use of a fork server. It is kept for the next pool if it may be shared. Idempotent."""
        server = connection.server
        if removed(server.connections, connection) and not server.connections:
            if self._is_over or server not in self._shared:
                removed(self._shared, server)
                server.end()
            else:
                self._begin_idleness(server)

    def give_up(self, server: ForkServerProcess) -> None:
        """Kills a fork server that is dead or does not answer. Its other pools notice the end of their channels."""
        self.import_libraries = False
        removed(self._shared, server)
        server.kill()

    def end_idle(self) -> None:
        """Ends all idle fork servers."""
        for server in self.idle:
            in_fresh_thread(functools.partial(self._end_idle, server))

    def _own(self) -> list[ForkServerProcess]:
        return [server for server in self._shared if server.owner == os.getpid()]

    def _joined(
        self, server: ForkServerProcess, workers: "Sequence[AnyWorker]", *, is_new: bool = False
    ) -> Connection | None:
        """Returns a connection to a fork server, or None if it has ended."""
        connection = Connection(server, workers)
        # First, because another thread may end the server: it removes it, and then checks for connections.
        server.connections.append(connection)
        if is_new or server in self._shared:
            try:
                connection.channel = server.connect()
            except BaseException:
                self.release(connection)
                raise
            if connection.channel is not None:
                server.cancel_retirement()
                return connection
            self.give_up(server)
        self.release(connection)
        return None

    def _started(self, launch: Launch, modules: Sequence[str] = ()) -> ForkServerProcess:
        for other in self.idle:
            self._end_idle(other)
        self._at_exit()
        context = launch.context
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as on_failure:
            on_failure.callback(ours.close)
            ours.setblocking(False)
            with os.fdopen(_write_launch_context(context, modules)) as written:
                tracker = [] if launch.tracker is None else [launch.tracker]
                # The new process inherits the blocked signal, and unblocks it once it ignores it.
                mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
                try:
                    process = subprocess.Popen(  # noqa: S603  (our own code in our own interpreter)
                        [
                            *launch.command,
                            *map(str, (written.fileno(), os.getpid(), theirs.fileno(), *tracker)),
                        ],
                        stdin=subprocess.DEVNULL,
                        pass_fds=[written.fileno(), theirs.fileno(), *tracker],
                        env=launch.environment,
                        cwd=None if context.folder == current_folder() else context.folder,
                        start_new_session=True,
                    )
                finally:
                    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            on_failure.pop_all()
        return ForkServerProcess(launch, ours, process)

    def _begin_idleness(self, server: ForkServerProcess) -> None:
        server.cancel_retirement()
        server.retirement = Retirement(self._end_idle, server, "millstream-server")
        server.retirement.begin()

    def _end_idle(self, server: ForkServerProcess) -> None:
        """Ends a fork server, if it is still idle."""
        if removed(self._shared, server):
            if server.connections:
                # Another thread has just begun to use it.
                self._shared.append(server)
            else:
                server.end()

    def _end_all(self) -> None:
        """Ends the idle fork servers at the end of the interpreter. The others end with their pools."""
        self._is_over = True
        self.end_idle()


def removed(objects: list[Any], one: Any) -> bool:
    """Removes an object from a list. Returns False if another thread has removed it."""
    try:
        objects.remove(one)
    except ValueError:
        return False
    return True


FORK_SERVERS = ForkServers()
