"""Memory and cores are what this process may use now: what machine, container and limits leave of them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.loader.threads import resources
from millstream.loader.threads.options import available_cores
from millstream.loader.threads.resources import memory_available, memory_budget

GIB = 1 << 30
OWN_CORES = available_cores()


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, object]], None]:
    """Returns a function that writes a system's root with control groups and their files, and puts it in place."""
    monkeypatch.setattr(resources, "ROOT", str(tmp_path))

    def write(groups: str, files: dict[str, object]) -> None:
        of_groups = {f"sys/fs/cgroup/{name}": content for name, content in files.items()}
        memory = {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {64 << 20} kB"}
        for name, content in {**memory, "proc/self/cgroup": groups, **of_groups}.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{content}\n")

    return write


@pytest.mark.parametrize(
    ("groups", "files", "available"),
    [
        ("0::/", {}, 64 * GIB),
        ("0::/", {"memory.max": "max", "memory.current": 5 * GIB}, 64 * GIB),
        ("0::/", {"memory.max": 16 * GIB, "memory.current": 12 * GIB}, 4 * GIB),
        ("0::/", {"memory.max": 16 * GIB, "memory.current": 17 * GIB}, 0),
        ("0::/", {"memory.max": 16 * GIB, "memory.high": 8 * GIB, "memory.current": 5 * GIB}, 3 * GIB),
        (
            "0::/",
            {
                "memory.max": 16 * GIB,
                "memory.current": 16 * GIB,
                "memory.stat": f"anon {GIB}\ninactive_file {9 * GIB}\nactive_file {GIB}\nshmem {GIB}",
            },
            10 * GIB,
        ),
        (
            "0::/pod/job",
            {
                "pod/job/memory.max": 9 * GIB,
                "pod/job/memory.current": GIB,
                "pod/memory.max": 8 * GIB,
                "pod/memory.current": 6 * GIB,
            },
            2 * GIB,
        ),
        (
            "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/",
            {"memory/docker/abc/memory.limit_in_bytes": 4 * GIB, "memory/docker/abc/memory.usage_in_bytes": GIB},
            3 * GIB,
        ),
        (
            "4:memory:/docker/abc",
            {
                "memory/memory.limit_in_bytes": 4 * GIB,
                "memory/memory.usage_in_bytes": 3 * GIB,
                "memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file 0",
            },
            2 * GIB,
        ),
        ("0::/", {"memory.max": 99 * GIB, "memory.current": 0}, 64 * GIB),
    ],
    ids=["none", "unlimited", "used", "exceeded", "high", "files", "parent", "v1", "seen from within", "machine"],
)
def test_memory_is_what_the_groups_leave(groups: str, files: dict[str, object], available: int, system: Any) -> None:
    """Memory is the limit minus what is used and cannot be reclaimed, as pages of files can; enclosing groups count."""
    system(groups, files)
    assert memory_available() == available


def test_the_budget_is_less_than_there_is() -> None:
    """Shared memory is half of what is available at most, so the trainer has the other half."""
    assert 0 < memory_budget() < memory_available()


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/", {}, OWN_CORES),
        ("0::/", {"cpu.max": "max 100000"}, OWN_CORES),
        ("0::/", {"cpu.max": "100000 100000"}, 1),
        ("0::/", {"cpu.max": "10000 100000"}, 1),
        ("0::/", {"cpu.max": "120000 100000"}, min(2, OWN_CORES)),
        ("0::/", {"cpu.max": "99900000 100000"}, OWN_CORES),
        ("0::/pod/job", {"pod/job/cpu.max": "max 100000", "pod/cpu.max": "50000 100000"}, 1),
        (
            "3:cpu,cpuacct:/docker/abc",
            {"cpu,cpuacct/cpu.cfs_quota_us": 100000, "cpu,cpuacct/cpu.cfs_period_us": 100000},
            1,
        ),
        ("3:cpu:/a", {"cpu/a/cpu.cfs_quota_us": -1, "cpu/a/cpu.cfs_period_us": 100000}, OWN_CORES),
        ("3:cpu:/a", {"cpu/a/cpu.cfs_quota_us": 50000, "cpu/a/cpu.cfs_period_us": 100000}, 1),
        ("0::/", {"unified/cpu.max": "50000 100000"}, 1),
    ],
)
def test_cores_are_what_the_quotas_allow(groups: str, files: dict[str, object], cores: int, system: Any) -> None:
    """Quotas are rounded up, to at least one core and at most the affinity; every enclosing group counts."""
    system(groups, files)
    assert available_cores() == cores


def test_affinity_counts() -> None:
    """A process that may run on one core has one."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, cores)
