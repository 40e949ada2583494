"""The limits that control groups set to this process: a container's, or a batch system's job's.

Without pathlib, which takes long to import: the first batch of a loader with workers waits for this module.
"""

import contextlib
import math
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

ROOT = "/"


def memory_left(root: "str | Path" = ROOT) -> int:
    """Returns how many more bytes this process's groups may use, `sys.maxsize` where there is no limit.

    What the kernel can take back at once, the pages of files, does not count as used. Each group counts, and each
    that it is in.

    Args:
        root: where `proc` and `sys` are.
    """
    left = sys.maxsize
    for group in _groups("memory", root):
        # Above `high`, a process is slowed down until it hardly moves.
        for limit_name, usage_name in (
            ("memory.max", "memory.current"),
            ("memory.high", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            with contextlib.suppress(OSError, ValueError):
                limit = int(text_of(group, limit_name))
                left = min(left, max(0, limit - int(text_of(group, usage_name)) + _reclaimable(group)))
    return left


def cores(root: "str | Path" = ROOT) -> int:
    """Returns how many cores this process's groups may keep busy, `sys.maxsize` where there is no limit.

    A quota that is not a whole number of cores is rounded up. Each group counts, and each that it is in.

    Args:
        root: where `proc` and `sys` are.
    """
    fewest = sys.maxsize
    for group in _groups("cpu", root):
        with contextlib.suppress(OSError, ValueError):
            quota, period = text_of(group, "cpu.max").split()
            fewest = min(fewest, _rounded_up(quota, period))
        with contextlib.suppress(OSError, ValueError):
            quota, period = text_of(group, "cpu.cfs_quota_us"), text_of(group, "cpu.cfs_period_us")
            fewest = min(fewest, _rounded_up(quota, period))
    return fewest


def _rounded_up(quota: str, period: str) -> int:
    """Returns a number of cores.

    Raises:
        ValueError: there is no limit: the quota is "max", or negative.
    """
    if int(quota) <= 0 or int(period) <= 0:
        raise ValueError(f"no limit: {quota}")
    return max(1, math.ceil(int(quota) / int(period)))


def _reclaimable(group: str) -> int:
    """Returns the bytes of a group's usage that are pages of files."""
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split() for line in text_of(group, "memory.stat").splitlines())
        # The first version counts the groups within under names of their own.
        prefix = "total_" if "total_inactive_file" in fields else ""
        return int(fields[f"{prefix}inactive_file"]) + int(fields[f"{prefix}active_file"])
    return 0


def _groups(controller: str, root: "str | Path") -> Iterator[str]:
    """Yields the folders of this process's groups that may limit something, and of the groups that they are in.

    A container may see the names that its groups have outside. Then only the outermost folder is there: its own.
    """
    mount = os.path.join(root, "sys/fs/cgroup")  # noqa: PTH118
    try:
        lines = text_of(root, "proc/self/cgroup").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            # The second version, beside the first one or alone.
            mounts = [mount, f"{mount}/unified"]
        elif controller in controllers.split(","):
            mounts = [f"{mount}/{controller}", f"{mount}/{controllers}"]
        else:
            continue
        for top in mounts:
            group = f"{top}/{path}".rstrip("/")
            yield group
            while len(group) > len(top):
                group = os.path.dirname(group)  # noqa: PTH120
                yield group


def text_of(root: "str | Path", name: str) -> str:
    """Returns what a file below a folder holds."""
    with open(os.path.join(root, name)) as file:  # noqa: PTH118, PTH123
        return file.read()
