"""Requests that a store never answers do not keep a process from ending."""

import atexit
import signal
import subprocess
import sys
from typing import Any

import pytest

from millstream.sources.remote.object_clients import SILENCE_SECONDS
from millstream.sources.remote.object_stores import RequestThreads
from support.faults.user_faults import WAIT_SECONDS
from support.files.record_files import tfrecord_bytes
from support.processes.worker_pools import environment, python, sooner_than
from support.stores.object_server import ObjectServer

TRAINER = """
import sys
import millstream
from millstream.loader.threads import reader_threads

reader_threads.EXIT_SECONDS = 60.0
source = millstream.TFRecordDataSource(sys.argv[1])
print("opened", flush=True)
sys.stdin.readline()
options = millstream.ReadOptions(num_threads=int(sys.argv[2]))
batches = iter(millstream.load(source, batch_size=4, read_options=options))
if sys.argv[3] == "ends":
    batches.start_prefetch()
    sys.stdin.readline()
else:
    next(batches)
"""


@pytest.mark.parametrize(("threads", "how"), [(4, "ends"), (4, "is interrupted"), (0, "is interrupted")])
def test_a_process_ends_while_the_store_does_not_answer(store: ObjectServer, threads: int, how: str) -> None:
    """It ends after the last line of its program, and on Ctrl-C, whoever waits for the response: nothing times out."""
    store.objects["bucket/a"] = tfrecord_bytes([b"record"] * 100)
    command = [sys.executable, "-c", TRAINER, f"{store.url}/bucket/a", str(threads), how]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    trainer: Any
    with subprocess.Popen(command, env=environment(), text=True, **pipes) as trainer:
        assert trainer.stdout.readline() == "opened\n"
        store.failure = lambda _: "hang"
        store.forget()
        trainer.stdin.write("\n")
        trainer.stdin.flush()
        assert store.num_requests(1) >= 1
        with sooner_than(SILENCE_SECONDS):
            if how == "ends":
                trainer.stdin.close()
            else:
                trainer.send_signal(signal.SIGINT)
            printed = trainer.stderr.read()
            trainer.wait()
    assert ("KeyboardInterrupt" in printed) == (how == "is interrupted")
    assert "Error" not in printed


def test_many_requests_register_few_handlers_of_the_exit() -> None:
    """The first requests, and one per second after them, leave an entry each."""
    threads, before = RequestThreads(4), atexit._ncallbacks()
    for number in range(1000):
        assert threads.submit(abs, -number).result(WAIT_SECONDS) == number
    assert atexit._ncallbacks() - before < 200


NO_THREADS = """
import resource, threading
from millstream.sources.remote.object_stores import RequestThreads

threads, may_end = RequestThreads(4), threading.Event()
waiting = threads.submit(may_end.wait, 60)
with open("/proc/self/statm") as status:
    used = int(status.read().split()[0]) * resource.getpagesize()
threading.stack_size(1 << 30)
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20),) * 2)
following = threads.submit(abs, -3)
may_end.set()
print(waiting.result(60), following.result(60))
"""


def test_a_process_that_may_have_no_more_threads_makes_do_with_those_it_has() -> None:
    """A request waits for a thread then."""
    assert python("-c", NO_THREADS, check=True).stdout == "True 3\n"
