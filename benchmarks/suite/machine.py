"""The machine and the versions, as far as they decide speed."""

import os
import platform
from pathlib import Path
from typing import Any

import numpy as np

from suite.peers import PEERS


def describe_machine() -> dict[str, Any]:
    """Returns what a reader needs to compare these numbers with others."""
    return {
        "processor": _first_value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
        "versions": {peer.title: peer.version() for peer in PEERS.values() if peer.version()},
    }


def _first_value(path: str, name: str) -> str | None:
    file = Path(path)
    lines = file.read_text().splitlines() if file.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), None)
