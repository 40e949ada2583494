"""What is said of a process that makes no progress."""

import subprocess
import sys

from millstream.loader.processes.process_report import describe_process

BUSY_BESIDE_ITS_MAIN_THREAD = """
import sys, threading

def work():
    print("working", flush=True)
    while True:
        pass

threading.Thread(target=work, daemon=True).start()
sys.stdin.read()
"""


def test_a_process_runs_while_any_of_its_threads_does() -> None:
    """Reader threads may do the work while the main thread waits for them: the process is not waiting then."""
    command = [sys.executable, "-c", BUSY_BESIDE_ITS_MAIN_THREAD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"working\n"
        # For a moment, each of its threads may be seen waiting for the interpreter's lock, which the other one has.
        while not describe_process(process.pid).startswith("running, with "):
            assert process.poll() is None
        process.kill()


def test_a_process_waits_when_all_its_threads_do() -> None:
    """One that sleeps, and nothing else."""
    command = [sys.executable, "-c", "import sys; print('there', flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"there\n"
        while not describe_process(process.pid).startswith("waiting, with "):
            assert process.poll() is None
        process.kill()


def test_a_process_that_is_gone_or_not_there_yet_is_said_to_be() -> None:
    """A process that has ended, or does not exist yet, is reported as such."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert describe_process(process.pid) == "in an unknown state"
    assert describe_process(None) == "still starting"
