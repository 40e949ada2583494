"""Train on real images, get killed, resume: and get exactly the batches that would have come next.

    python examples/train_digits.py

Three processes train the same small JAX model on the same handwritten digits:

    A   runs to the end, undisturbed.
    B   is killed with SIGKILL somewhere in the middle of an epoch.
    C   is a fresh process that resumes from B's newest checkpoint, which holds the model and the loader's position.

At every step, each process reports the loss, which records it trained on, and a checksum of their augmented pixels.
If B and C together differ from A in a single bit of them, this script says so and fails.
"""

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from around_training import OUTPUT, arguments, conclude, killed_where, plot_runs, report, show, watch, write_digits

import millstream
from millstream.checkpoint import CheckpointRestore, CheckpointSave

BATCH_SIZE = 64
SIDE = 8  # Images have 8 x 8 pixels, each from 0 to 16.

# ---- The pipeline ------------------------------------------------------------------------------------------------


def decode(record: bytes) -> dict[str, Any]:
    """Returns the image, float32 of shape (8, 8) from 0 to 1, and its label."""
    values = np.frombuffer(record, np.uint8)
    return {"image": values[:-1].reshape(SIDE, SIDE).astype(np.float32) / 16, "label": values[-1].astype(np.int32)}


class ShiftAndNoise(millstream.RandomMapTransform):
    """Moves the image by up to one pixel in each direction and adds a little noise."""

    def random_map(self, element: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Returns a new element: whatever is random comes from `rng`, so it comes again after a resume."""
        row, column = rng.integers(0, 3, size=2)
        moved = np.pad(element["image"], 1)[row : row + SIDE, column : column + SIDE]
        return {**element, "image": moved + rng.normal(0, 0.05, moved.shape).astype(np.float32)}


def training_loader(digits: Path) -> millstream.DataLoader:
    """Returns the loader of endless, shuffled, augmented batches."""
    source = millstream.ArrayRecordDataSource(f"{digits}/train-*.array_record")
    return millstream.DataLoader(
        data_source=source,
        sampler=millstream.IndexSampler(len(source), shuffle=True, seed=0),
        operations=[decode, ShiftAndNoise(), millstream.Batch(BATCH_SIZE, drop_remainder=True)],
        worker_count=2,
    )


# ---- The model: two dense layers, trained by gradient descent with momentum ---------------------------------------


def new_model() -> dict[str, Any]:
    """Returns the parameters of an untrained network, and their momentum."""
    first, second = jax.random.split(jax.random.key(0))
    parameters = {
        "hidden": {"weights": jax.random.normal(first, (SIDE * SIDE, 512)) / SIDE, "biases": jnp.zeros(512)},
        "output": {"weights": jax.random.normal(second, (512, 10)) / 32, "biases": jnp.zeros(10)},
    }
    return {"parameters": parameters, "momentum": jax.tree.map(jnp.zeros_like, parameters)}


@jax.jit
def predict(parameters: dict[str, Any], images: jax.Array) -> jax.Array:
    """Returns the logarithms of the probabilities of the ten digits, shape (batch, 10)."""
    hidden, output = parameters["hidden"], parameters["output"]
    activations = jax.nn.relu(images.reshape(len(images), -1) @ hidden["weights"] + hidden["biases"])
    return jax.nn.log_softmax(activations @ output["weights"] + output["biases"])


def cross_entropy(parameters: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean loss over a batch."""
    predictions = predict(parameters, batch["image"])
    return -jnp.take_along_axis(predictions, batch["label"][:, None], axis=1).mean()


@jax.jit
def train_step(model: dict[str, Any], batch: dict[str, jax.Array]) -> tuple[dict[str, Any], jax.Array]:
    """Returns the model after one step of gradient descent, and the loss before it."""
    loss, gradients = jax.value_and_grad(cross_entropy)(model["parameters"], batch)
    momentum = jax.tree.map(lambda old, gradient: 0.9 * old + gradient, model["momentum"], gradients)
    parameters = jax.tree.map(lambda old, change: old - 0.05 * change, model["parameters"], momentum)
    return {"parameters": parameters, "momentum": momentum}, loss


# ---- One run, in its own process (with --checkpoints) -------------------------------------------------------------


def train(digits: Path, checkpoints: str, steps: int, checkpoint_every: int) -> None:
    """Trains from the newest checkpoint, or from the beginning; reports each step, and prints the accuracy."""
    loader, model = training_loader(digits), new_model()
    with ocp.CheckpointManager(checkpoints) as manager, iter(loader) as batches:
        if (newest := manager.latest_step()) is not None:
            wanted = ocp.args.Composite(model=ocp.args.StandardRestore(model), loader=CheckpointRestore(batches))
            model = manager.restore(newest, args=wanted).model
        while batches.step < steps:
            number = batches.step
            batch = next(batches)
            model, loss = train_step(model, batch)
            report(number, loss, loader.record_keys(number), batch["image"])
            if batches.step % checkpoint_every == 0:
                # One checkpoint for both, written in the background while training continues.
                now = ocp.args.Composite(model=ocp.args.StandardSave(model), loader=CheckpointSave(batches))
                manager.save(batches.step, args=now)
    print(f"Accuracy on the held-out digits: {accuracy(model['parameters'], digits):.1%}", flush=True)


def accuracy(parameters: dict[str, Any], digits: Path) -> float:
    """Returns the share of the held-out images that the model gets right."""
    source = millstream.ArrayRecordDataSource(f"{digits}/held_out-*.array_record")
    # Each image once and in order: the last batch is a short one.
    loader = millstream.load(source, num_epochs=1, transformations=[decode], batch_size=BATCH_SIZE)
    right = [predict(parameters, batch["image"]).argmax(axis=1) == batch["label"] for batch in loader]
    return float(np.concatenate(right).mean())


# ---- The demonstration: three runs, compared ----------------------------------------------------------------------


def demo(output: Path, digits: Path, steps: int, kill_at: int) -> None:
    """Runs A, B and C, shows them side by side, and says whether B and C together are A."""
    write_digits(digits)
    num_images = len(millstream.ArrayRecordDataSource(f"{digits}/train-*.array_record"))
    print(f"Training three times on {num_images} images of digits, in {steps} batches of {BATCH_SIZE}:")
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=output) as folder:
        undisturbed, to_resume = [f"--checkpoints={folder}/undisturbed"], [f"--checkpoints={folder}/killed"]
        whole, _ = watch("A  undisturbed ", [undisturbed], steps)
        killed, _ = watch("B  to be killed", [to_resume], steps, kill_at)
        resumed, words = watch("C  resumed     ", [to_resume], steps)
    show(whole, killed, resumed, killed_where(killed, BATCH_SIZE, num_images))
    conclude(whole, killed, resumed)
    print(words[-1].strip())
    plot_runs(output / "train_digits.png", "The same losses, killed or not", whole, killed, resumed)


def main() -> None:
    """Is one run if it is told where its checkpoints are, else the demonstration."""
    given = arguments(__doc__, output=OUTPUT, steps=1200, checkpoint_every=100, kill_at=690, checkpoints="")
    output = given.output.resolve()
    if given.checkpoints:
        train(output / "digits", given.checkpoints, given.steps, given.checkpoint_every)
    else:
        demo(output, output / "digits", given.steps, given.kill_at)


if __name__ == "__main__":
    main()
