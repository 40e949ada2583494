"""Pretrain a small transformer on code and prose, packed, on several processes: copy this.

    pip install 'millstream[examples]'
    python pretrain_text.py                  # two processes; kill it when you like
    python pretrain_text.py --processes=1    # resumes with the batches that would have come

The text is on every machine: Python's library is the code; its manual and the licences
of installed packages are the prose. From front to back of this file:

    documents -> tokens (byte-pair encoding) -> rows of 512, each packed from one corpus
    -> a mixture of rows whose weights change mid-run -> global batches over four devices
    -> attention that stays within each document

Every batch is the same for any number of processes, and so is every loss, except for the
order in which JAX adds the devices' sums.
"""

import argparse
import ast
import importlib.metadata
import os
import socket
import subprocess
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from absl import logging
from array_record.python.array_record_module import ArrayRecordWriter
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from tokenizers import ByteLevelBPETokenizer

import millstream
from millstream.checkpoint import CheckpointRestore, CheckpointSave

VOCABULARY, END_OF_TEXT = 1024, 0
ROW_LENGTH = 512
GLOBAL_BATCH_SIZE = 4  # rows, over all processes
NUM_DEVICES = 4  # over all processes
WIDTH, HEADS, LAYERS = 64, 4, 2
FIRST_WEIGHTS, LATER_WEIGHTS = ({"code": 0.75, "prose": 0.25}, {"code": 0.25, "prose": 0.75})

# ---- Documents, and their tokens -----------------------------------------------------


def code() -> Iterator[str]:
    """Yields the functions and classes of Python's library."""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = path.read_text("utf-8")
        lines = text.splitlines()
        for node in ast.parse(text).body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield "\n".join(lines[node.lineno - 1 : node.end_lineno])


def prose() -> Iterator[str]:
    """Yields the pages of Python's manual, and the licences of the installed packages."""
    yield from topics.values()
    for package in importlib.metadata.distributions():
        for file in package.files or []:
            path = Path(str(file.locate()))
            if path.name.startswith(("LICENSE", "LICENCE", "COPYING")) and path.is_file():
                yield path.read_text("utf-8", errors="replace")


def write_tokens(folder: Path) -> None:
    """Trains the encoding, and writes both corpora as records of tokens, unless done before."""
    if (folder / "complete").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    corpora = {"code": sorted(set(code())), "prose": sorted(set(prose()))}
    tokenizer = ByteLevelBPETokenizer()
    texts = (text[:2000] for corpus in corpora.values() for text in corpus)
    special = ["<end of text>"]
    tokenizer.train_from_iterator(
        texts, VOCABULARY, special_tokens=special, show_progress=False
    )
    for name, corpus in corpora.items():
        writer = ArrayRecordWriter(str(folder / f"{name}.array_record"), "group_size:1")
        for document in tokenizer.encode_batch(corpus):
            writer.write(np.array([*document.ids, END_OF_TEXT], np.uint16).tobytes())
        writer.close()
    (folder / "complete").touch()


# ---- Stream: each corpus packed into rows, rows mixed --------------------------------


def tokens_of(record: bytes) -> np.ndarray:
    """Returns the tokens of a document, int32."""
    return np.frombuffer(record, np.uint16).astype(np.int32)


def corpora(folder: Path) -> dict[str, millstream.ArrayRecordDataSource]:
    """Returns the two sources of documents."""
    return {
        name: millstream.ArrayRecordDataSource(f"{folder}/{name}.array_record")
        for name in FIRST_WEIGHTS
    }


def mixed_rows(folder: Path, steps: int) -> millstream.MixtureSampler:
    """Returns the endless order of rows, whose weights change half-way through the run."""
    rows = {
        name: millstream.PackingSampler(
            millstream.lengths_of(source, [tokens_of]),
            ROW_LENGTH,
            overflow="split",
            seed=seed,
            num_epochs=None,
            shuffle=True,
        )
        for seed, (name, source) in enumerate(corpora(folder).items())
    }
    mixture = millstream.MixtureSampler(rows, FIRST_WEIGHTS)
    return mixture.reweighted(steps // 2 * GLOBAL_BATCH_SIZE, LATER_WEIGHTS)


def over_devices(*axes: str | None) -> NamedSharding:
    """Returns a sharding over the devices of all processes, along the axis "device"."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("device",))
    return NamedSharding(mesh, PartitionSpec(*axes))


def training_loader(folder: Path, steps: int) -> millstream.DataLoader:
    """Returns the loader of this process's rows: tokens, segment ids, positions, corpus."""
    shard = millstream.ShardBySharding(
        over_devices("device"), GLOBAL_BATCH_SIZE, drop_remainder=True
    )
    local_batch_size = shard.local_batch_size(GLOBAL_BATCH_SIZE)
    return millstream.DataLoader(
        data_source=millstream.ConcatenatedDataSource(corpora(folder)),
        sampler=mixed_rows(folder, steps),
        operations=[
            tokens_of,
            millstream.Pack({"tokens": ROW_LENGTH}),
            millstream.transforms.WithComponent("corpus"),
            millstream.Batch(local_batch_size, drop_remainder=True),
        ],
        shard_options=shard,
    )


# ---- Model: a decoder whose attention stays within each document ---------------------


class Layer(nnx.Module):
    """Attention, then two dense layers; each adds to what comes in."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.before_attention, self.before_dense = (
            nnx.LayerNorm(WIDTH, rngs=rngs),
            nnx.LayerNorm(WIDTH, rngs=rngs),
        )
        self.attended = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.attention_output = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.wide = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.dense_output = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, values: jax.Array, may_see: jax.Array) -> jax.Array:
        """Returns the values, shape (rows, ROW_LENGTH, WIDTH), after this layer."""
        heads = self.attended(self.before_attention(values)).reshape(
            *values.shape[:2], 3, HEADS, WIDTH // HEADS
        )
        seen = jax.nn.dot_product_attention(
            heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], mask=may_see
        )
        values = values + self.attention_output(seen.reshape(values.shape))
        added: jax.Array = self.dense_output(nnx.gelu(self.wide(self.before_dense(values))))
        return values + added


class Transformer(nnx.Module):
    """Predicts each token from those before it in the same document."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens, self.positions = (
            nnx.Embed(size, WIDTH, rngs=rngs) for size in (VOCABULARY, ROW_LENGTH)
        )
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.before_output = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, batch: dict[str, jax.Array]) -> jax.Array:
        """Returns the logits of the next token, shape (rows, ROW_LENGTH, VOCABULARY)."""
        # A token sees those of its own document, and of these the ones up to itself.
        segments = batch["tokens_segment_ids"]
        is_own = segments[:, None, :, None] == segments[:, None, None, :]
        may_see = is_own & jnp.tril(jnp.ones((ROW_LENGTH, ROW_LENGTH), bool))
        # Positions count from the beginning of each document.
        values = self.tokens(batch["tokens"]) + self.positions(batch["tokens_positions"])
        for layer in self.layers:
            values = layer(values, may_see)
        logits: jax.Array = self.tokens.attend(self.before_output(values))
        return logits


@nnx.jit
def new_model() -> tuple[Transformer, nnx.Optimizer[Transformer]]:
    """Returns an untrained model and its optimizer, replicated on all devices."""
    model = Transformer(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    nnx.update(
        (model, optimizer),
        jax.lax.with_sharding_constraint(nnx.state((model, optimizer)), over_devices()),
    )
    return model, optimizer


@nnx.jit
def train_step(
    model: Transformer, optimizer: nnx.Optimizer[Transformer], batch: dict[str, jax.Array]
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Updates the model.

    Returns the mean loss before, that of each corpus, and the tokens of all processes.
    """

    def mean_loss(model: Transformer) -> tuple[jax.Array, jax.Array]:
        segments = batch["tokens_segment_ids"]
        # Nothing predicts the first token of a document, and padding is not predicted.
        counts = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        logits, targets = model(batch)[:, :-1], batch["tokens"][:, 1:]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
        # Each row has documents of one corpus.
        is_of = batch["corpus"][:, None] == jnp.arange(len(FIRST_WEIGHTS))
        sums, numbers = (
            jnp.sum(values, axis=1) @ is_of for values in (losses * counts, counts)
        )
        return jnp.sum(sums) / jnp.sum(numbers), sums / numbers

    loss: jax.Array
    (loss, losses), gradients = nnx.value_and_grad(mean_loss, has_aux=True)(model)
    optimizer.update(model, gradients)
    # Training does not need the global batch on each process: it is for the checksum.
    return loss, losses, jax.lax.with_sharding_constraint(batch["tokens"], over_devices())


# ---- One process ---------------------------------------------------------------------


def train(output: Path, steps: int, checkpoint_every: int) -> None:
    """Trains from the newest checkpoint, or from the beginning."""
    loader, (model, optimizer) = training_loader(output / "tokens", steps), new_model()
    with (
        ocp.CheckpointManager(output / "checkpoints") as manager,
        millstream.device_put(iter(loader), over_devices("device")) as batches,
    ):
        if (newest := manager.latest_step()) is not None:
            wanted = ocp.args.Composite(
                model=ocp.args.StandardRestore(nnx.state((model, optimizer))),
                loader=CheckpointRestore(batches),
            )
            nnx.update((model, optimizer), manager.restore(newest, args=wanted).model)
            report(f"Resumes from the checkpoint of step {newest}.")
        while batches.step < steps:
            loss, losses, tokens = train_step(model, optimizer, next(batches))
            checksum = zlib.crc32(np.asarray(tokens).tobytes())
            by_corpus = zip(FIRST_WEIGHTS, losses.tolist(), strict=True)
            report(
                f"step {batches.step}: loss {float(loss):.6f}, batch {checksum:08x}, "
                + ", ".join(f"{name} {each:.3f}" for name, each in by_corpus)
            )
            if batches.step % checkpoint_every == 0:
                now = ocp.args.Composite(
                    model=ocp.args.StandardSave(nnx.state((model, optimizer))),
                    loader=CheckpointSave(batches),
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
    parser.add_argument("--output", type=Path, default=Path("output/pretrain_text"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoint_every", type=int, default=25)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    options = parser.parse_args()
    output = options.output.resolve()
    if options.process is None:
        write_tokens(output / "tokens")
        launch(options.processes)
    else:
        logging.set_verbosity(logging.ERROR)  # Orbax logs every step of a checkpoint.
        jax.distributed.initialize(options.address, options.processes, options.process)
        train(output, options.steps, options.checkpoint_every)


if __name__ == "__main__":
    main()
