"""Train a small language model on the text that comes with Python: copy this file.

    pip install 'millstream[examples]'
    python byte_language_model.py

Text is read as bytes. A record is a page of a document, so the shuffle is a true one over
all pages. `FlatMap` cuts a page into windows of fixed length, and `Batch` fills up across
pages. The model predicts each byte from those before it, and learns to write text that
looks a little like Python's manual.

Kill it at any time and start it again: it resumes from its newest checkpoint with exactly
the windows that would have come next, also from the middle of a page.
"""

import argparse
import ast
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from absl import logging

import millstream
from millstream.checkpoint import CheckpointRestore, CheckpointSave

BATCH_SIZE = 32
WINDOW_BYTES = 64
PAGE_BYTES = 8 * WINDOW_BYTES
HIDDEN = 192

# ---- Text ----------------------------------------------------------------------------


def documents() -> Iterator[str]:
    """Yields the texts to learn from, about 1.4 million characters."""
    library = Path(sysconfig.get_path("stdlib"))
    yield from (path.read_text("utf-8") for path in library.glob("LICENSE.txt"))
    yield from (topics[name] for name in sorted(topics))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for path in sorted(library.glob("*.py")):
        nodes = ast.walk(ast.parse(path.read_bytes()))
        yield "\n\n".join(
            ast.get_docstring(node) or "" for node in nodes if isinstance(node, documented)
        )


def pages() -> list[bytes]:
    """Returns all documents in pages of at most PAGE_BYTES: the records."""
    texts = [document.encode() for document in documents()]
    return [
        text[start : start + PAGE_BYTES]
        for text in texts
        for start in range(0, len(text), PAGE_BYTES)
    ]


def windows(page: bytes) -> list[np.ndarray]:
    """Returns the windows of a page, uint8 of shape (WINDOW_BYTES,), without the rest."""
    count = len(page) // WINDOW_BYTES
    return list(
        np.frombuffer(page, np.uint8, count * WINDOW_BYTES).reshape(count, WINDOW_BYTES)
    )


def training_loader() -> millstream.DataLoader:
    """Returns the loader of endless batches, uint8 of shape (BATCH_SIZE, WINDOW_BYTES)."""
    cut = millstream.transforms.FlatMap(windows, max_fan_out=PAGE_BYTES // WINDOW_BYTES)
    return millstream.load(
        pages(),
        shuffle=True,
        seed=0,
        transformations=[cut],
        batch_size=BATCH_SIZE,
        drop_remainder=True,
    )


# ---- Model: one layer of gated recurrent units (GRU) ---------------------------------


def new_parameters() -> dict[str, jax.Array]:
    """Returns the parameters of an untrained model."""
    keys = jax.random.split(jax.random.key(0), 4)
    return {
        "input": jax.random.normal(keys[0], (256, 3 * HIDDEN)) / 4,
        "gates": jax.random.normal(keys[1], (HIDDEN, 2 * HIDDEN)) / HIDDEN**0.5,
        "candidate": jax.random.normal(keys[2], (HIDDEN, HIDDEN)) / HIDDEN**0.5,
        "output": jax.random.normal(keys[3], (HIDDEN, 256)) / HIDDEN**0.5,
    }


def read_byte(parameters: dict[str, jax.Array], state: jax.Array, seen: jax.Array) -> jax.Array:
    """Returns the state, shape (..., HIDDEN), after one more byte, as its input parameters."""
    to_gates, to_candidate = jnp.split(seen, [2 * HIDDEN], axis=-1)
    reset, keep = jnp.split(jax.nn.sigmoid(to_gates + state @ parameters["gates"]), 2, axis=-1)
    candidate = jnp.tanh(to_candidate + (reset * state) @ parameters["candidate"])
    return keep * state + (1 - keep) * candidate


def bits_per_byte(parameters: dict[str, jax.Array], text: jax.Array) -> jax.Array:
    """Returns the mean number of bits that the model needs per byte: 8 if it knows nothing."""

    def read(state: jax.Array, seen: jax.Array) -> tuple[jax.Array, jax.Array]:
        state = read_byte(parameters, state, seen)
        return state, state

    _, states = jax.lax.scan(
        read, jnp.zeros((len(text), HIDDEN)), parameters["input"][text[:, :-1].T]
    )
    losses = optax.softmax_cross_entropy_with_integer_labels(
        states @ parameters["output"], text[:, 1:].T
    )
    return jnp.mean(losses) / jnp.log(2)


OPTIMIZER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(6e-3))


@jax.jit
def train_step(model: dict[str, Any], text: jax.Array) -> tuple[dict[str, Any], jax.Array]:
    """Returns parameters and optimizer after one step, and the loss before it."""
    loss, gradients = jax.value_and_grad(bits_per_byte)(model["parameters"], text)
    updates, optimizer = OPTIMIZER.update(gradients, model["optimizer"])
    return {
        "parameters": optax.apply_updates(model["parameters"], updates),
        "optimizer": optimizer,
    }, loss


@jax.jit
def write(parameters: dict[str, jax.Array], key: jax.Array) -> jax.Array:
    """Returns 400 bytes as the model would write them after the end of a line."""

    def next_byte(
        last: tuple[jax.Array, jax.Array], key: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        state = read_byte(parameters, last[0], parameters["input"][last[1]])
        byte = jax.random.categorical(key, state @ parameters["output"] / 0.7)
        return (state, byte), byte

    return jax.lax.scan(
        next_byte, (jnp.zeros(HIDDEN), jnp.array(ord("\n"))), jax.random.split(key, 400)
    )[1]


# ---- Training loop -------------------------------------------------------------------


def train(output: Path, steps: int, checkpoint_every: int, report_every: int) -> None:
    """Trains from the newest checkpoint, or from the beginning; then lets the model write."""
    parameters = new_parameters()
    model = {"parameters": parameters, "optimizer": OPTIMIZER.init(parameters)}
    options = ocp.CheckpointManagerOptions(max_to_keep=2)
    with (
        ocp.CheckpointManager(output / "checkpoints", options=options) as manager,
        iter(training_loader()) as batches,
    ):
        if (newest := manager.latest_step()) is not None:
            wanted = ocp.args.Composite(
                model=ocp.args.StandardRestore(model), loader=CheckpointRestore(batches)
            )
            model = manager.restore(newest, args=wanted).model
            print(f"Resumes from the checkpoint of step {batches.step}.", flush=True)
        while batches.step < steps:
            model, loss = train_step(model, next(batches))
            if batches.step % report_every == 0:
                print(f"step {batches.step}: {float(loss):.9g} bits per byte", flush=True)
            if batches.step % checkpoint_every == 0 or batches.step == steps:
                # Written in the background while training continues.
                now = ocp.args.Composite(
                    model=ocp.args.StandardSave(model), loader=CheckpointSave(batches)
                )
                manager.save(batches.step, args=now)
    sample = np.asarray(write(model["parameters"], jax.random.key(0)), np.uint8).tobytes()
    print(f"The model writes:\n\n{sample.decode(errors='replace')}\n")


def main() -> None:
    """Trains as the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path("output/bytes"))
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--checkpoint_every", type=int, default=100)
    parser.add_argument("--report_every", type=int, default=100)
    options = parser.parse_args()
    logging.set_verbosity(logging.ERROR)  # Orbax logs every step of a checkpoint.
    output = options.output.resolve()
    train(output, options.steps, options.checkpoint_every, options.report_every)


if __name__ == "__main__":
    main()
