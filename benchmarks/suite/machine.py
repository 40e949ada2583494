"""The machine, the versions and the commit, as far as they decide speed."""

import os
import platform
import subprocess
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from suite.data import FOLDER
from suite.peers import PEERS

_COPY_BYTES = 1 << 26
LIBRARY = tuple(
    f":/{folder}" for folder in ("millstream", "loader", "dataset", "samplers", "sources", "transforms", "tools")
)


def describe_machine() -> dict[str, Any]:
    """Returns what a reader needs to compare these numbers with others, the speeds of a copy and of `pread` too."""
    return {
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "processor": _first_value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "versions": {peer.title: peer.version() for peer in PEERS.values() if peer.version()},
        "copy_bytes_per_s": _copy_speed(),
        "pread_bytes_per_s": _pread_speed(),
    }


def _commit() -> str:
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
        return done.stdout.strip()

    # Of the library: the commit of the results comes after it.
    return git("log", "-1", "--format=%h", "--", *LIBRARY) + ("+" if git("status", "--porcelain", *LIBRARY) else "")


def _copy_speed() -> float:
    """Returns the bytes that one thread copies per second, from one large array into another."""
    here, there = np.ones(_COPY_BYTES, np.uint8), np.ones(_COPY_BYTES, np.uint8)
    return _speed(lambda: np.copyto(there, here))


def _pread_speed() -> float:
    """Returns the bytes per second of 64 KB reads from a file that lies in the page cache."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / "speed.bin"
    path.write_bytes(bytes(_COPY_BYTES))
    descriptor = os.open(path, os.O_RDONLY)

    def read() -> None:
        for start in range(0, _COPY_BYTES, 1 << 16):
            os.pread(descriptor, 1 << 16, start)

    try:
        return _speed(read)
    finally:
        os.close(descriptor)
        path.unlink()


def _speed(action: Any) -> float:
    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return round(_COPY_BYTES / median(seconds[1:]))


def _first_value(path: str, name: str) -> str | None:
    file = Path(path)
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
