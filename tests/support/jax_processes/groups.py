"""Starting a group of real JAX processes, as a scheduler does: one result from each, and no process left."""

import contextlib
import os
import pickle
import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from support.faults.user_faults import WAIT_SECONDS
from support.jax_processes import programs
from support.processes.worker_pools import environment, still_there


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """Yields a port that the system gives to nobody else meanwhile; a server may share it that sets SO_REUSEPORT.

    gRPC's do. A port that is only looked up may be another's by the time that the server starts.
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


def run_group(program: str, count: int, log: Path, *, devices: int = 1, **task: Any) -> list[Any]:
    """Returns what each process of a group reports.

    Args:
        program: which function of `programs` all of them run.
        count: how many processes.
        log: where they write what they print.
        devices: how many devices each of them has.
        task: arguments of the program.
    """
    with contextlib.ExitStack() as stack:
        mark = f"{log}:{os.urandom(8).hex()}"
        stack.callback(_assert_gone, mark)
        address = f"127.0.0.1:{stack.enter_context(held_port())}"
        settings = {
            **environment(),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "GROUP": mark,
        }
        output = stack.enter_context(log.open("w"))
        members = [
            stack.enter_context(_member([program, address, str(index), str(count)], task, settings, output))
            for index in range(count)
        ]
        results = _results([pipe for _, pipe in members])
        is_whole = None not in results
        statuses = [process.wait(WAIT_SECONDS) for process, _ in members] if is_whole else []
    assert is_whole, f"Not all of the processes said what they have:\n{log.read_text()[-4000:]}"
    assert not any(statuses), f"The processes ended with {statuses}:\n{log.read_text()[-4000:]}"
    return results


@contextlib.contextmanager
def _member(
    words: list[str], task: dict[str, Any], settings: dict[str, str], output: Any
) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """Yields a process of the group, killed at the end, and the descriptor on which its result comes."""
    reader, writer = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, programs.__file__, *words, str(writer)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=settings,
            pass_fds=[writer],
        )
    finally:
        os.close(writer)
    try:
        with process:
            try:
                assert process.stdin is not None
                process.stdin.write(pickle.dumps(task))
                process.stdin.close()
                yield process, reader
            finally:
                process.kill()
    finally:
        os.close(reader)


def _results(pipes: list[int]) -> list[Any]:
    """Returns what some processes report, as soon as all have, one has ended without a report, or it takes too long."""
    deadline, said = time.monotonic() + 4 * WAIT_SECONDS, {pipe: bytearray() for pipe in pipes}
    speaking = list(pipes)
    while speaking:
        ready, _, _ = select.select(speaking, [], [], max(0.0, deadline - time.monotonic()))
        for pipe in ready:
            if part := os.read(pipe, 1 << 16):
                said[pipe] += part
            else:
                speaking.remove(pipe)
        if not ready or not all(said[pipe] for pipe in pipes if pipe not in speaking):
            return [None] * len(pipes)
    return [pickle.loads(text) for text in said.values()]


def _assert_gone(mark: str) -> None:
    """Fails if anything that the group has started is left: all of it inherits the mark."""
    left = [
        process.pid
        for process in psutil.process_iter(["environ"])
        if (process.info["environ"] or {}).get("GROUP") == mark
    ]
    assert still_there(left) == []
