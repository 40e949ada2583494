"""The limits that control groups set to this process: a container's, or a batch system's job's."""

import contextlib
import math
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
                limit = int((group / limit_name).read_text())
                left = min(left, max(0, limit - int((group / usage_name).read_text()) + _reclaimable(group)))
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
            quota, period = (group / "cpu.max").read_text().split()
            fewest = min(fewest, _rounded_up(quota, period))
        with contextlib.suppress(OSError, ValueError):
            quota, period = (group / "cpu.cfs_quota_us").read_text(), (group / "cpu.cfs_period_us").read_text()
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


def _reclaimable(group: "Path") -> int:
    """Returns the bytes of a group's usage that are pages of files."""
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        # The first version counts the groups within under names of their own.
        prefix = "total_" if "total_inactive_file" in fields else ""
        return int(fields[f"{prefix}inactive_file"]) + int(fields[f"{prefix}active_file"])
    return 0


def _groups(controller: str, root: "str | Path") -> Iterator["Path"]:
    """Yields the folders of this process's groups that may limit something, and of the groups that they are in.

    A container may see the names that its groups have outside. Then only the outermost folder is there: its own.
    """
    from pathlib import Path  # noqa: PLC0415  (takes long to import, and workers import this module)

    mount = Path(root) / "sys/fs/cgroup"
    try:
        lines = (Path(root) / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            # The second version, beside the first one or alone.
            mounts = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            mounts = [mount / controller, mount / controllers]
        else:
            continue
        for top in mounts:
            group = top / path.lstrip("/")
            yield group
            while group != top and top in group.parents:
                group = group.parent
                yield group
