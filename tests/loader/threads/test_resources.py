"""Memory and cores are what this process may use now: what machine, container and limits leave of them."""

import os
from pathlib import Path

import pytest

from millstream.loader.threads.options import available_cores
from millstream.loader.threads.resources import memory_available, memory_budget

GIB = 1 << 30
OWN_CORES = available_cores()


def system(folder: Path, groups: str, files: dict[str, object], available_kib: int = 64 << 20) -> Path:
    """Returns a folder laid out like a system's root, with control groups and what their files say."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {available_kib} kB\n")
    (folder / "proc/self/cgroup").write_text(groups)
    for name, content in files.items():
        file = folder / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{content}\n")
    return folder


@pytest.mark.parametrize(
    ("groups", "files", "available"),
    [
        ("0::/\n", {}, 64 * GIB),
        ("0::/\n", {"memory.max": "max", "memory.current": 5 * GIB}, 64 * GIB),
        ("0::/\n", {"memory.max": 16 * GIB, "memory.current": 12 * GIB}, 4 * GIB),
        ("0::/\n", {"memory.max": 16 * GIB, "memory.current": 17 * GIB}, 0),
        ("0::/\n", {"memory.max": 16 * GIB, "memory.high": 8 * GIB, "memory.current": 5 * GIB}, 3 * GIB),
        (
            "0::/\n",
            {
                "memory.max": 16 * GIB,
                "memory.current": 16 * GIB,
                "memory.stat": f"anon {GIB}\ninactive_file {9 * GIB}\nactive_file {GIB}\nshmem {GIB}",
            },
            10 * GIB,
        ),
        (
            "0::/pod/job\n",
            {
                "pod/job/memory.max": 9 * GIB,
                "pod/job/memory.current": GIB,
                "pod/memory.max": 8 * GIB,
                "pod/memory.current": 6 * GIB,
            },
            2 * GIB,
        ),
        (
            "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n",
            {"memory/docker/abc/memory.limit_in_bytes": 4 * GIB, "memory/docker/abc/memory.usage_in_bytes": GIB},
            3 * GIB,
        ),
        (
            "4:memory:/docker/abc\n",
            {
                "memory/memory.limit_in_bytes": 4 * GIB,
                "memory/memory.usage_in_bytes": 3 * GIB,
                "memory/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file 0",
            },
            2 * GIB,
        ),
    ],
    ids=["none", "unlimited", "used", "exceeded", "high", "files", "parent", "first version", "seen from within"],
)
def test_memory_is_what_the_groups_leave(groups: str, files: dict[str, object], available: int, tmp_path: Path) -> None:
    """Memory is the limit minus what is used and cannot be reclaimed, as pages of files can; enclosing groups count."""
    assert memory_available(system(tmp_path, groups, files)) == available


def test_memory_is_no_more_than_the_machine_has(tmp_path: Path) -> None:
    """A group may be allowed more than there is."""
    files: dict[str, object] = {"memory.max": 16 * GIB, "memory.current": 0}

    assert memory_available(system(tmp_path, "0::/\n", files, available_kib=1 << 20)) == GIB


def test_the_budget_is_less_than_there_is() -> None:
    """Shared memory is half of what is available at most, so the trainer has the other half."""
    assert 0 < memory_budget() < memory_available()


@pytest.mark.parametrize(
    ("groups", "files", "cores"),
    [
        ("0::/\n", {}, OWN_CORES),
        ("0::/\n", {"cpu.max": "max 100000"}, OWN_CORES),
        ("0::/\n", {"cpu.max": "100000 100000"}, 1),
        ("0::/\n", {"cpu.max": "10000 100000"}, 1),
        ("0::/\n", {"cpu.max": "120000 100000"}, min(2, OWN_CORES)),
        ("0::/\n", {"cpu.max": "99900000 100000"}, OWN_CORES),
        ("0::/pod/job\n", {"pod/job/cpu.max": "max 100000", "pod/cpu.max": "50000 100000"}, 1),
        (
            "3:cpu,cpuacct:/docker/abc\n",
            {"cpu,cpuacct/cpu.cfs_quota_us": 100000, "cpu,cpuacct/cpu.cfs_period_us": 100000},
            1,
        ),
        ("3:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": -1, "cpu/a/cpu.cfs_period_us": 100000}, OWN_CORES),
        ("3:cpu:/a\n", {"cpu/a/cpu.cfs_quota_us": 50000, "cpu/a/cpu.cfs_period_us": 100000}, 1),
        ("0::/\n", {"unified/cpu.max": "50000 100000"}, 1),
    ],
)
def test_cores_are_what_the_quotas_allow(groups: str, files: dict[str, object], cores: int, tmp_path: Path) -> None:
    """Quotas are rounded up, to at least one core and at most the affinity; every enclosing group counts."""
    assert available_cores(system(tmp_path, groups, files)) == cores


def test_affinity_counts() -> None:
    """A process that may run on one core has one."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    try:
        assert available_cores() == 1
    finally:
        os.sched_setaffinity(0, cores)
