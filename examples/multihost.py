"""Train on four hosts, lose them, resume on two: copy this file.

    pip install 'millstream[examples]'
    python multihost.py                  # four processes; kill it when you like
    python multihost.py --processes=2    # resumes with the batches that would have come

Hosts are processes on this machine, each with simulated CPU devices. On a cluster, every
host runs `train` after `jax.distributed.initialize()`, and `launch` is not needed.

At every tenth step, the first process prints the loss and a checksum of the global batch:
it is the same for any number of processes. So is the loss, except for the order in which
floating-point numbers are added. If one host is lost, stop the others too, because JAX
leaves them waiting, and start the group again.
"""

import argparse
import os
import socket
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from sklearn.datasets import load_digits

import millstream
from millstream.checkpoint import CheckpointRestore, CheckpointSave

GLOBAL_BATCH_SIZE = 64  # over all processes: the stream of batches depends on it
NUM_DEVICES = 4  # over all processes

# ---- Pipeline ------------------------------------------------------------------------


class Shift(millstream.RandomMap):
    """Moves an image by up to one pixel in each direction."""

    def random_map(self, element: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Returns a new element, the same one on any number of hosts."""
        row, column = rng.integers(0, 3, size=2)
        padded = np.pad(element["image"], 1)
        return {**element, "image": padded[row : row + 8, column : column + 8]}


def over_devices(*axes: str | None) -> NamedSharding:
    """Returns a sharding over the devices of all processes, along the axis "device"."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("device",))
    return NamedSharding(mesh, PartitionSpec(*axes))


def training_loader() -> millstream.DataLoader:
    """Returns the loader of this process's rows of each global batch."""
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8)
    # The rows that the devices of this process need. With a model axis in the mesh,
    # processes that are replicas of the same rows would read the same ones.
    shard = millstream.ShardBySharding(
        over_devices("device"), GLOBAL_BATCH_SIZE, drop_remainder=True
    )
    return millstream.load(
        millstream.InMemoryDataSource({"image": images, "label": labels.astype(np.int32)}),
        shuffle=True,
        seed=0,
        transformations=[Shift()],
        batch_size=shard.local_batch_size(GLOBAL_BATCH_SIZE),
        drop_remainder=True,
        shard_options=shard,
    )


# ---- Model: two dense layers, the hidden one split over all devices ------------------


def new_model() -> dict[str, jax.Array]:
    """Returns the parameters of an untrained network."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(0, 1 / 8, (64, 256)).astype(np.float32)
    output = rng.normal(0, 1 / 16, (256, 10)).astype(np.float32)
    return {
        "hidden": jax.device_put(hidden, over_devices(None, "device")),
        "output": jax.device_put(output, over_devices("device")),
    }


def cross_entropy(model: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean loss of a global batch."""
    images = batch["image"].reshape(GLOBAL_BATCH_SIZE, 64)
    scores = jax.nn.log_softmax(jax.nn.relu(images @ model["hidden"]) @ model["output"])
    return -jnp.take_along_axis(scores, batch["label"][:, None], axis=1).mean()


@jax.jit
def train_step(
    model: dict[str, jax.Array], batch: dict[str, jax.Array]
) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns the model after one step of gradient descent, and the loss before it."""
    loss, gradients = jax.value_and_grad(cross_entropy)(model, batch)
    model = jax.tree.map(lambda old, change: old - 0.5 * change, model, gradients)
    return model, loss


# ---- One process ---------------------------------------------------------------------


def train(checkpoints: Path, steps: int, checkpoint_every: int) -> None:
    """Trains from the newest checkpoint, or from the beginning."""
    model = new_model()
    with (
        ocp.CheckpointManager(checkpoints) as manager,
        millstream.device_put(iter(training_loader()), over_devices("device")) as batches,
    ):
        if (newest := manager.latest_step()) is not None:
            # A checkpoint of four processes is valid for two.
            wanted = ocp.args.Composite(
                model=ocp.args.StandardRestore(model), loader=CheckpointRestore(batches)
            )
            model = manager.restore(newest, args=wanted).model
            report(f"Resumes from the checkpoint of step {newest}.")
        while batches.step < steps:
            batch = next(batches)  # one array over the devices of all processes
            model, loss = train_step(model, batch)
            if batches.step % 10 == 0:
                images = multihost_utils.process_allgather(batch["image"], tiled=True)
                checksum = zlib.crc32(images.tobytes())
                report(f"step {batches.step}: loss {float(loss):.6f}, batch {checksum:08x}")
            if batches.step % checkpoint_every == 0:
                now = ocp.args.Composite(
                    model=ocp.args.StandardSave(model), loader=CheckpointSave(batches)
                )
                manager.save(batches.step, args=now)


def report(line: str) -> None:
    """Prints a line in the first process."""
    if jax.process_index() == 0:
        print(line, flush=True)


# ---- Several processes on this machine -----------------------------------------------


def launch(count: int) -> None:
    """Runs this program in several processes, until all have ended or one has failed."""
    with socket.socket() as held:
        # JAX's server shares the port, and no other program gets it.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        command = [sys.executable, *sys.argv, f"--address=127.0.0.1:{held.getsockname()[1]}"]
        devices = f"--xla_force_host_platform_device_count={NUM_DEVICES // count}"
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices}
        group = [
            subprocess.Popen(  # noqa: S603  (this program)
                [*command, f"--processes={count}", f"--process={number}"], env=environment
            )
            for number in range(count)
        ]
        try:
            if any(process.wait() for process in group):
                sys.exit("A process has failed.")
        finally:
            for process in group:
                process.kill()


def main() -> None:
    """Is one process if it is told which one, otherwise starts them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("output/multihost"))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--checkpoint_every", type=int, default=25)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.process is None:
        launch(options.processes)
    else:
        logging.set_verbosity(logging.ERROR)  # Orbax logs every step of a checkpoint.
        jax.distributed.initialize(options.address, options.processes, options.process)
        checkpoints = options.output.resolve() / "checkpoints"
        train(checkpoints, options.steps, options.checkpoint_every)


if __name__ == "__main__":
    main()
