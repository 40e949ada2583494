"""A cluster that Ray's autoscaler grows and shrinks: actors wait for its nodes, and use them."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import psutil
import pytest
import ray

import millstream
from support.faults.user_faults import WAIT_SECONDS
from support.processes.held_ports import unassigned_port
from support.processes.worker_pools import EXPECTED, batches, loader_of

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = [
    pytest.mark.ray_cluster,
    pytest.mark.third_party,
    pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning"),
]

MOST_NODES = 2
STORE_BYTES = 80 << 20


class Autoscaled:
    """A cluster."""

    def num_nodes(self) -> int:
        """Returns how many nodes it has besides the one with the trainer."""
        return sum(bool(node["Alive"]) for node in ray.nodes()) - 1

    def wait_for(self, num_nodes: int) -> None:
        deadline = time.monotonic() + 2 * WAIT_SECONDS
        while self.num_nodes() != num_nodes:
            assert time.monotonic() < deadline, f"there are {self.num_nodes()} nodes"


@pytest.fixture
def cluster() -> Iterator[Autoscaled]:
    """Ray's own autoscaler, whose machines are processes here. The head has no room for actors."""
    folder = Path(tempfile.mkdtemp(prefix="ray-"))  # Paths of sockets must be short.
    host = ray.util.get_node_ip_address()
    address = f"{host}:{unassigned_port(host)}"
    (folder / "autoscaling.yaml").write_text(json.dumps(autoscaling(address)))
    command = [
        *[sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=0"],
        *[f"--port={address.rpartition(':')[2]}", "--include-dashboard=false", f"--temp-dir={folder}"],
        *[f"--object-store-memory={STORE_BYTES}", f"--autoscaling-config={folder / 'autoscaling.yaml'}"],
    ]
    surroundings = {
        **os.environ,
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_AUTH_MODE": "disabled",
        # All that it starts inherits this.
        "CLUSTER": str(folder),
    }
    with (folder / "out").open("wb") as out:
        process = subprocess.Popen(command, env=surroundings, stdout=out, stderr=out)
    try:
        deadline = time.monotonic() + 2 * WAIT_SECONDS
        while b"Ray runtime started" not in (folder / "out").read_bytes():
            assert process.poll() is None, (folder / "out").read_text()
            assert time.monotonic() < deadline
        ray.init(address, logging_level="ERROR", log_to_driver=False)
        yield Autoscaled()
    finally:
        ray.shutdown()
        process.kill()
        process.wait()
        # Until then, it may have started more.
        while left := processes_of(folder):
            for one in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.kill()
            psutil.wait_procs(left, timeout=1)
        shutil.rmtree(folder)


def processes_of(folder: Path) -> list[psutil.Process]:
    found = psutil.process_iter(["environ"])
    return [process for process in found if (process.info["environ"] or {}).get("CLUSTER") == str(folder)]


def autoscaling(address: str) -> dict[str, Any]:
    """Returns what the autoscaler is told: machines with room for an actor each go when idle for 6 s."""
    machine = {"CPU": 1, "object_store_memory": STORE_BYTES}
    return {
        "cluster_name": "machines",
        "max_workers": MOST_NODES,
        "provider": {
            "type": "fake_multinode",
            "gcs_address": address,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "machine": {"resources": machine, "node_config": {}, "min_workers": 0, "max_workers": MOST_NODES},
        },
        "head_node_type": "ray.head.default",
        "idle_timeout_minutes": 0.1,
        "upscaling_speed": 1.0,
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        "cluster_synced_files": [],
        "rsync_exclude": [],
        "rsync_filter": [],
        "initialization_commands": [],
        "setup_commands": [],
        "head_setup_commands": [],
        "worker_setup_commands": [],
        "head_start_ray_commands": [],
        "worker_start_ray_commands": [],
    }


def test_an_autoscaler_grows_and_shrinks_the_cluster(cluster: Autoscaled) -> None:
    """It starts machines for the actors that wait, and takes them away when these have ended; the stream is the same.

    There is room for fewer actors than were asked for: those that wait keep nobody waiting.
    """
    assert cluster.num_nodes() == 0
    patience = 5 * WAIT_SECONDS
    loader = loader_of(worker_count=0, workers=millstream.RayWorkers(MOST_NODES + 1), stall_timeout=patience)
    assert batches(loader) == EXPECTED
    cluster.wait_for(MOST_NODES)
    loader.close()
    cluster.wait_for(0)
    again = loader_of(worker_count=0, workers=millstream.RayWorkers(1), stall_timeout=patience)
    assert batches(again) == EXPECTED
    assert cluster.num_nodes() > 0
