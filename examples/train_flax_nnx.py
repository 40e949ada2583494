"""Train a Flax NNX model with Optax and Orbax: copy this one.

    python examples/train_flax_nnx.py                  # 1,000 steps, a checkpoint every 100
    python examples/train_flax_nnx.py --steps=2000     # resumes where the first run ended

Kill it whenever you like and start it again: model, optimizer, dropout keys and the position in the stream of batches
are one checkpoint, so it resumes with exactly the batches and losses that would have come next.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from around_training import OUTPUT, arguments, plot
from flax import nnx
from sklearn.datasets import load_digits
from tqdm import tqdm

import millstream
from millstream.checkpoint import CheckpointRestore, CheckpointSave

BATCH_SIZE = 64

# ---- The data: 1,797 handwritten digits of 8 x 8 pixels, one in six held out ---------------------------------------


class ShiftAndNoise(millstream.RandomMapTransform):
    """Moves the image by up to one pixel in each direction and adds a little noise."""

    def random_map(self, element: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Returns a new element: whatever is random comes from `rng`, so it comes again after a resume."""
        row, column = rng.integers(0, 3, size=2)
        moved = np.pad(element["image"], ((1, 1), (1, 1), (0, 0)))[row : row + 8, column : column + 8]
        return {**element, "image": moved + rng.normal(0, 0.05, moved.shape).astype(np.float32)}


def loaders() -> tuple[millstream.DataLoader, millstream.DataLoader]:
    """Returns the loader for training, endless and shuffled, and the one that yields each held-out digit once."""
    images, labels = load_digits(return_X_y=True)
    digits = {"image": (images / 16).astype(np.float32).reshape(-1, 8, 8, 1), "label": labels.astype(np.int32)}
    is_held_out = np.arange(len(labels)) % 6 == 0
    train = millstream.InMemoryDataSource({name: leaf[~is_held_out] for name, leaf in digits.items()})
    held_out = millstream.InMemoryDataSource({name: leaf[is_held_out] for name, leaf in digits.items()})
    return (
        millstream.DataLoader(
            data_source=train,
            sampler=millstream.IndexSampler(len(train), shuffle=True, seed=0),
            operations=[ShiftAndNoise(), millstream.Batch(BATCH_SIZE, drop_remainder=True)],
            worker_count=2,
        ),
        # The last batch is filled up to the size of the others, with a mask of the rows that count: jit compiles once.
        millstream.DataLoader(
            data_source=held_out,
            sampler=millstream.IndexSampler(len(held_out), num_epochs=1),
            operations=[millstream.Batch(BATCH_SIZE, pad_remainder=True)],
        ),
    )


# ---- The model -----------------------------------------------------------------------------------------------------


class Network(nnx.Module):
    """Two convolutions, and a dense layer after dropout."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Conv(1, 16, kernel_size=(3, 3), rngs=rngs)
        self.second = nnx.Conv(16, 32, kernel_size=(3, 3), strides=2, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.output = nnx.Linear(4 * 4 * 32, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Returns the logits of the ten digits, shape (batch, 10), for images of shape (batch, 8, 8, 1)."""
        features = nnx.relu(self.second(nnx.relu(self.first(images))))
        logits: jax.Array = self.output(self.dropout(features.reshape(len(images), -1)))
        return logits


@nnx.jit
def train_step(model: Network, optimizer: nnx.Optimizer[Network], batch: dict[str, jax.Array]) -> jax.Array:
    """Updates the model, and returns the mean loss over the batch before the update."""

    def mean_loss(model: Network) -> jax.Array:
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(batch["image"]), batch["label"]))

    loss: jax.Array
    loss, gradients = nnx.value_and_grad(mean_loss)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def num_right(model: Network, batch: dict[str, jax.Array], mask: jax.Array) -> jax.Array:
    """Returns how many of the rows that the mask counts the model gets right."""
    is_right = model(batch["image"]).argmax(axis=1) == batch["label"]
    return jnp.sum(is_right & mask)


def evaluate(model: Network, loader: millstream.DataLoader) -> str:
    """Returns in words how many of the held-out digits the model gets right."""
    without_dropout = nnx.view(model, deterministic=True)
    right, total = 0, 0
    for batch, mask in loader:
        right += int(num_right(without_dropout, batch, mask))
        total += int(mask.sum())
    return f"{right} of {total} held-out digits right"


# ---- The training loop ---------------------------------------------------------------------------------------------


def train(output: Path, steps: int, checkpoint_every: int, report_every: int) -> None:
    """Trains from the newest checkpoint, or from the beginning, and plots the loss."""
    train_loader, held_out_loader = loaders()
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(2e-3), wrt=nnx.Param)
    losses: list[float] = []
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with (
        ocp.CheckpointManager(output / "checkpoints", options=options) as manager,
        millstream.device_put(iter(train_loader)) as batches,  # They are on the device before they are asked for.
    ):
        if (newest := manager.latest_step()) is not None:
            wanted = ocp.args.Composite(
                model=ocp.args.StandardRestore(nnx.state((model, optimizer))),
                losses=ocp.args.JsonRestore(),
                loader=CheckpointRestore(batches),
            )
            restored = manager.restore(newest, args=wanted)
            nnx.update((model, optimizer), restored.model)
            losses = restored.losses
            print(f"Resumes from the checkpoint of step {batches.step}.")
        with tqdm(total=steps, initial=batches.step, unit=" steps", disable=None) as bar:
            while batches.step < steps:
                losses.append(float(train_step(model, optimizer, next(batches))))
                bar.update()
                if batches.step % report_every == 0:
                    bar.write(f"step {batches.step}: loss {losses[-1]:.9g}, {evaluate(model, held_out_loader)}")
                if batches.step % checkpoint_every == 0 or batches.step == steps:
                    # Written in the background while training continues, hence a copy of the list that grows.
                    now = ocp.args.Composite(
                        model=ocp.args.StandardSave(nnx.state((model, optimizer))),
                        losses=ocp.args.JsonSave(list(losses)),
                        loader=CheckpointSave(batches),
                    )
                    manager.save(batches.step, args=now)
    plot(output / "loss.png", "A Flax NNX model learns digits", {"loss": dict(enumerate(losses))}, yscale="log")


def main() -> None:
    """Trains as the command line says."""
    given = arguments(__doc__, output=OUTPUT / "flax_nnx", steps=1000, checkpoint_every=100, report_every=50)
    train(given.output.resolve(), given.steps, given.checkpoint_every, given.report_every)


if __name__ == "__main__":
    main()
