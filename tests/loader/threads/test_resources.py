"""Memory and cores are what this process may use now: what machine, container and limits leave of them."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from millstream.loader.threads import options
from millstream.loader.threads.options import available_cores, memory_available, memory_budget

GIB = 1 << 30
OWN_CORES = available_cores()


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, dict[str, object]], None]:
    """Returns a function that writes a system's root with control groups and their files, and puts it in place."""
    monkeypatch.setattr(options, "ROOT", str(tmp_path))

    def write(groups: str, files: dict[str, object]) -> None:
        of_groups = {f"sys/fs/cgroup/{name}": content for name, content in files.items()}
        memory = {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable: {64 << 20} kB"}
        for name, content in {**memory, "proc/self/cgroup": groups, **of_groups}.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{content}\n")

    return write


def limit(most: float, used: float, folder: str = "", names: tuple[str, str] = ("max", "current")) -> dict[str, object]:
    """Returns the files of a limit of memory, in GiB."""
    maximum, current = names
    return {f"{folder}memory.{maximum}": int(most * GIB), f"{folder}memory.{current}": int(used * GIB)}


V1 = ("limit_in_bytes", "usage_in_bytes")
OWN, OF_DOCKER = "4:memory:/docker/abc", "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/"
FILES = f"anon {GIB}\ninactive_file {9 * GIB}\nactive_file {GIB}\nshmem {GIB}"
FILES_V1 = f"inactive_file 7\ntotal_inactive_file {GIB}\ntotal_active_file 0"
MEMORY: dict[str, tuple[str, dict[str, object], int]] = {
    "none": ("0::/", {}, 64),
    "unlimited": ("0::/", limit(16, 5) | {"memory.max": "max"}, 64),
    "used": ("0::/", limit(16, 12), 4),
    "exceeded": ("0::/", limit(16, 17), 0),
    "high": ("0::/", limit(16, 5) | {"memory.high": 8 * GIB}, 3),
    "files": ("0::/", limit(16, 16) | {"memory.stat": FILES}, 10),
    "parent": ("0::/pod/job", limit(9, 1, "pod/job/") | limit(8, 6, "pod/"), 2),
    "v1": (OF_DOCKER, limit(4, 1, "memory/docker/abc/", V1), 3),
    "seen from within": (OWN, limit(4, 3, "memory/", V1) | {"memory/memory.stat": FILES_V1}, 2),
    "machine": ("0::/", limit(99, 0), 64),
}
"""The groups of this process, their files, and the available memory in GiB."""


@pytest.mark.parametrize("name", MEMORY)
def test_memory_is_what_the_groups_leave(name: str, system: Any) -> None:
    """Memory is the limit minus what is used and cannot be reclaimed, as pages of files can; enclosing groups count."""
    groups, files, available = MEMORY[name]
    system(groups, files)
    assert memory_available() == available * GIB


def test_the_budget_is_less_than_there_is() -> None:
    """Shared memory is half of what is available at most, so the trainer has the other half."""
    assert 0 < memory_budget() < memory_available()


def quota_v1(folder: str, microseconds: int) -> dict[str, object]:
    return {f"{folder}/cpu.cfs_quota_us": microseconds, f"{folder}/cpu.cfs_period_us": 100000}


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
        ("3:cpu,cpuacct:/docker/abc", quota_v1("cpu,cpuacct", 100000), 1),
        ("3:cpu:/a", quota_v1("cpu/a", -1), OWN_CORES),
        ("3:cpu:/a", quota_v1("cpu/a", 50000), 1),
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
