"""Train on four hosts, lose them, resume on two: and get exactly the batches that would have come next.

    python examples/multihost.py

Hosts are processes here, each with its own CPU devices. On a cluster, each host would run `train` below and call
`jax.distributed.initialize()`; nothing else would differ. There are three runs:

    A   four processes train to the end, undisturbed.
    B   four processes, killed with SIGKILL at a random step. A cluster's scheduler does that when one of them is lost:
        JAX would leave the others waiting.
    C   two processes resume from B's newest checkpoint, which holds the model and the loader's position.

At every step the first process reports the loss, which records were in the global batch, and a checksum of their
augmented pixels. If B and C together differ from A in any record or pixel, this script says so and fails. The loss is
also that of A, up to the order in which floating-point numbers are added, which depends on the number of processes.
"""

import random
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from around_training import (
    OUTPUT,
    Steps,
    arguments,
    conclude,
    killed_where,
    plot_runs,
    report,
    show,
    watch_hosts,
    write_digits,
)
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

import millstream
from millstream.checkpoint import CheckpointRestore, CheckpointSave

GLOBAL_BATCH_SIZE = 64  # Over all processes: this is what the stream of batches depends on.
DEVICE_COUNT = 4  # Over all processes too.
SIDE = 8  # Images have 8 x 8 pixels, each from 0 to 16.
LOSS_TOLERANCE = 1e-3

# ---- The pipeline ------------------------------------------------------------------------------------------------


def decode(record: bytes) -> dict[str, Any]:
    """Returns the image, float32 of shape (8, 8) from 0 to 1, and its label."""
    values = np.frombuffer(record, np.uint8)
    return {"image": values[:-1].reshape(SIDE, SIDE).astype(np.float32) / 16, "label": values[-1].astype(np.int32)}


class Shift(millstream.RandomMapTransform):
    """Moves the image by up to one pixel in each direction."""

    def random_map(self, element: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Returns a new element: whatever is random comes from `rng`, so it comes again on any number of hosts."""
        row, column = rng.integers(0, 3, size=2)
        return {**element, "image": np.pad(element["image"], 1)[row : row + SIDE, column : column + SIDE]}


def training_loader(digits: Path) -> millstream.DataLoader:
    """Returns the loader of this process's part of each global batch."""
    source = millstream.ArrayRecordDataSource(f"{digits}/train-*.array_record")
    # The rows that the devices of this process need: with a model axis in the mesh, replicas would share them.
    shard = millstream.ShardBySharding(over_devices("device"), GLOBAL_BATCH_SIZE, drop_remainder=True)
    return millstream.DataLoader(
        data_source=source,
        sampler=millstream.IndexSampler(len(source), shuffle=True, seed=0),
        operations=[decode, Shift(), millstream.Batch(shard.local_batch_size(GLOBAL_BATCH_SIZE), drop_remainder=True)],
        shard_options=shard,
        worker_count=1,
    )


# ---- The model: two dense layers, the hidden one split over all devices --------------------------------------------


def over_devices(*axes: str | None) -> NamedSharding:
    """Returns how an array lies on the devices of all processes: split along the axis that is called "device"."""
    return NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("device",)), PartitionSpec(*axes))


def new_model() -> dict[str, jax.Array]:
    """Returns the parameters of an untrained network: each device has a part of the hidden layer."""
    rng = np.random.default_rng(0)
    hidden = rng.normal(0, 1 / SIDE, (SIDE * SIDE, 256)).astype(np.float32)
    output = rng.normal(0, 1 / 16, (256, 10)).astype(np.float32)
    return {
        "hidden": jax.device_put(hidden, over_devices(None, "device")),
        "output": jax.device_put(output, over_devices("device")),
    }


def cross_entropy(model: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean loss over a global batch."""
    images = batch["image"].reshape(GLOBAL_BATCH_SIZE, SIDE * SIDE)
    predictions = jax.nn.log_softmax(jax.nn.relu(images @ model["hidden"]) @ model["output"])
    return -jnp.take_along_axis(predictions, batch["label"][:, None], axis=1).mean()


@jax.jit
def train_step(model: dict[str, jax.Array], batch: dict[str, jax.Array]) -> tuple[dict[str, jax.Array], jax.Array]:
    """Returns the model after one step of gradient descent, and the loss before it."""
    loss, gradients = jax.value_and_grad(cross_entropy)(model, batch)
    return jax.tree.map(lambda old, gradient: old - 0.5 * gradient, model, gradients), loss


# ---- One process of a run (with --checkpoints) --------------------------------------------------------------------


def train(digits: Path, checkpoints: str, steps: int, checkpoint_every: int) -> None:
    """Trains from the newest checkpoint, or from the beginning; the first process reports each step."""
    loader, model = training_loader(digits), new_model()
    with ocp.CheckpointManager(checkpoints) as manager, iter(loader) as batches:
        if (newest := manager.latest_step()) is not None:
            # A checkpoint of four processes is valid for two, for the model and for the loader.
            wanted = ocp.args.Composite(model=ocp.args.StandardRestore(model), loader=CheckpointRestore(batches))
            model = manager.restore(newest, args=wanted).model
        while batches.step < steps:
            number = batches.step
            # The parts of all processes, laid end to end, are one array over all devices.
            batch = jax.make_array_from_process_local_data(over_devices("device"), next(batches))
            model, loss = train_step(model, batch)
            keys = multihost_utils.process_allgather(loader.record_keys(number))
            images = multihost_utils.process_allgather(batch["image"], tiled=True)
            if jax.process_index() == 0:
                report(number, loss, keys, images)
            if batches.step % checkpoint_every == 0:
                # One checkpoint for both, of all processes, written in the background while training continues.
                now = ocp.args.Composite(model=ocp.args.StandardSave(model), loader=CheckpointSave(batches))
                manager.save(batches.step, args=now)


# ---- The demonstration: three runs, compared ----------------------------------------------------------------------


def demo(output: Path, digits: Path, steps: int) -> None:
    """Runs A, B and C, shows them side by side, and says whether B and C together are A."""
    write_digits(digits)
    num_images = len(millstream.ArrayRecordDataSource(f"{digits}/train-*.array_record"))
    kill_at = random.randrange(steps // 2, steps * 3 // 4)  # noqa: S311  (when hosts fail is no secret)
    print(f"Training three times on {num_images} images, in {steps} global batches of {GLOBAL_BATCH_SIZE}:")
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=output) as folder:

        def run(title: str, process_count: int, checkpoints: str, kill_at: int | None = None) -> Steps:
            place = f"{folder}/{checkpoints}"
            return watch_hosts(title, process_count, DEVICE_COUNT, checkpoints=place, num_steps=steps, kill_at=kill_at)

        whole = run("A  4 processes, undisturbed ", 4, "undisturbed")
        killed = run("B  4 processes, to be killed", 4, "killed", kill_at)
        resumed = run("C  2 processes, resumed     ", 2, "killed")
    show(whole, killed, resumed, killed_where(killed, GLOBAL_BATCH_SIZE, num_images))
    conclude(whole, killed, resumed, LOSS_TOLERANCE)
    plot_runs(output / "multihost.png", "Four processes, killed, then two", whole, killed, resumed)


def main() -> None:
    """Is one process of a run if it is told where its checkpoints are, else the demonstration."""
    of_a_run = {"checkpoints": "", "address": "", "process_count": 1, "process": 0}
    given = arguments(__doc__, output=OUTPUT, steps=300, checkpoint_every=25, **of_a_run)
    output = given.output.resolve()
    if given.checkpoints:
        jax.distributed.initialize(given.address, given.process_count, given.process)
        train(output / "digits", given.checkpoints, given.steps, given.checkpoint_every)
    else:
        demo(output, output / "digits", given.steps)


if __name__ == "__main__":
    main()
