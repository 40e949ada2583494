"""Train a Flax NNX model with Optax and Orbax: copy this file.

    pip install 'millstream[examples]'
    python train_flax_nnx.py                # 40 epochs, a checkpoint every 100 steps
    python train_flax_nnx.py --epochs=80    # resumes from the last checkpoint

Kill it at any time and start it again. Model, optimizer, dropout keys and the position
in the stream are one checkpoint, so it resumes with exactly the batches and losses that
would have come next.
"""

import argparse
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from absl import logging
from flax import nnx
from sklearn.datasets import load_digits

import millstream
from millstream.checkpoint import CheckpointRestore, CheckpointSave

BATCH_SIZE = 64

# ---- Data: 1,797 handwritten digits of 8 x 8 pixels, one in six held out -------------


class ShiftAndNoise(millstream.RandomMap):
    """Moves an image by up to one pixel in each direction, and adds noise."""

    def random_map(self, element: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Returns a new element. Random numbers come from `rng` only."""
        row, column = rng.integers(0, 3, size=2)
        padded = np.pad(element["image"], ((1, 1), (1, 1), (0, 0)))
        moved = padded[row : row + 8, column : column + 8]
        noise = rng.normal(0, 0.05, moved.shape).astype(np.float32)
        return {**element, "image": moved + noise}


def loaders() -> tuple[millstream.DataLoader, millstream.DataLoader]:
    """Returns the loader for training, and one that yields each held-out digit once."""
    images, labels = load_digits(return_X_y=True)
    digits = {
        "image": (images / 16).astype(np.float32).reshape(-1, 8, 8, 1),
        "label": labels.astype(np.int32),
    }
    is_held_out = np.arange(len(labels)) % 6 == 0
    training, held_out = (
        millstream.InMemoryDataSource({name: leaf[chosen] for name, leaf in digits.items()})
        for chosen in (~is_held_out, is_held_out)
    )
    return (
        millstream.load(
            training,
            shuffle=True,
            seed=0,
            transformations=[ShiftAndNoise()],
            batch_size=BATCH_SIZE,
            drop_remainder=True,
            worker_count="auto",
        ),
        # The last batch is padded, with a mask of the real rows: jit compiles once.
        millstream.load(
            held_out,
            num_epochs=1,
            transformations=[millstream.Batch(BATCH_SIZE, pad_remainder=True)],
        ),
    )


# ---- Model ---------------------------------------------------------------------------


class Network(nnx.Module):
    """Two convolutions, and a dense layer after dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(1, 16, kernel_size=(3, 3), rngs=rngs)
        self.second = nnx.Conv(16, 32, kernel_size=(3, 3), strides=2, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.output = nnx.Linear(4 * 4 * 32, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns logits of shape (batch, 10) for images of shape (batch, 8, 8, 1)."""
        features = nnx.relu(self.second(nnx.relu(self.first(images))))
        logits: jax.Array = self.output(self.dropout(features.reshape(len(images), -1)))
        return logits


@nnx.jit
def train_step(
    model: Network, optimizer: nnx.Optimizer[Network], batch: dict[str, jax.Array]
) -> jax.Array:
    """Updates the model, and returns the mean loss of the batch before the update."""

    def mean_loss(model: Network) -> jax.Array:
        logits = model(batch["image"])
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]))

    loss: jax.Array
    loss, gradients = nnx.value_and_grad(mean_loss)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def num_right(model: Network, batch: dict[str, jax.Array], mask: jax.Array) -> jax.Array:
    """Returns the number of rows that the mask keeps and the model classifies correctly."""
    return jnp.sum((model(batch["image"]).argmax(axis=1) == batch["label"]) & mask)


def evaluate(model: Network, loader: millstream.DataLoader) -> str:
    """Returns a description of the model's accuracy on the held-out digits."""
    without_dropout = nnx.view(model, deterministic=True)
    right, total = 0, 0
    for batch, mask in loader:
        right += int(num_right(without_dropout, batch, mask))
        total += int(mask.sum())
    return f"{right} of {total} held-out digits right"


# ---- Training loop -------------------------------------------------------------------


def train(output: Path, epochs: int, checkpoint_every: int) -> None:
    """Trains from the newest checkpoint, or from the beginning."""
    train_loader, held_out_loader = loaders()
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(2e-3), wrt=nnx.Param)
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with ocp.CheckpointManager(output / "checkpoints", options=options) as manager:
        newest, start = manager.latest_step(), 0
        if newest is not None:
            epoch_only = ocp.args.Composite(epoch=ocp.args.JsonRestore())
            start = manager.restore(newest, args=epoch_only).epoch
        for epoch, host_batches in train_loader.epochs(epochs, start=start):
            before = epoch * len(host_batches)  # the steps of the epochs before
            # Batches are copied to the device in advance.
            with millstream.device_put(host_batches) as batches:
                if newest is not None:
                    wanted = ocp.args.Composite(
                        model=ocp.args.StandardRestore(nnx.state((model, optimizer))),
                        loader=CheckpointRestore(batches),
                    )
                    nnx.update((model, optimizer), manager.restore(newest, args=wanted).model)
                    print(f"Resumes from the checkpoint of step {newest}.", flush=True)
                    newest = None
                for batch in batches:
                    loss = train_step(model, optimizer, batch)
                    step = before + batches.step
                    if step % 10 == 0:
                        print(f"step {step}: loss {float(loss):.9g}", flush=True)
                    if step % checkpoint_every == 0:
                        # Written in the background while training continues.
                        now = ocp.args.Composite(
                            model=ocp.args.StandardSave(nnx.state((model, optimizer))),
                            epoch=ocp.args.JsonSave(epoch),
                            loader=CheckpointSave(batches),
                        )
                        manager.save(step, args=now)
            print(f"epoch {epoch}: {evaluate(model, held_out_loader)}", flush=True)


def main() -> None:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("output/flax_nnx"))
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--checkpoint_every", type=int, default=100)
    options = parser.parse_args()
    logging.set_verbosity(logging.ERROR)  # Orbax logs every step of a checkpoint.
    train(options.output.resolve(), options.epochs, options.checkpoint_every)


if __name__ == "__main__":
    main()
