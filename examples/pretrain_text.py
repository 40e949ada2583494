"""Pretrain a small transformer on code and prose, packed; lose the processes in mid-run; resume on fewer.

    python examples/pretrain_text.py

The text is there on every machine: Python's own library is the code, its manual and the licences of what is installed
are the prose. A byte-pair encoding is trained on both. Then, from front to back of this file:

    documents  ->  tokens  ->  rows of 512, each packed from one corpus  ->  a mixture of rows, whose weights change in
    mid-run  ->  global batches over four devices  ->  attention that stays within each document

There are three runs. A: two processes with two devices each train to the end. B: the same, killed with SIGKILL. C: one
process with all four devices resumes from B's newest checkpoint, of the model, the optimizer and the position in the
stream. Every batch of B and C is that of A, to the byte. So is every loss, up to the order in which the devices' parts
of a sum are added: that is JAX's choice, and may differ between one process and two.
"""

import ast
import importlib.metadata
import random
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from around_training import OUTPUT, Steps, arguments, conclude, report, show, watch_hosts, write_records
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

import millstream
from millstream.checkpoint import CheckpointRestore, CheckpointSave

VOCABULARY, END_OF_TEXT = 1024, 0
ROW_LENGTH = 512
GLOBAL_BATCH_SIZE = 4  # Rows, over all processes.
DEVICE_COUNT = 4  # Over all processes too.
WIDTH, HEADS, LAYERS = 64, 4, 2
FIRST_WEIGHTS, LATER_WEIGHTS = {"code": 0.75, "prose": 0.25}, {"code": 0.25, "prose": 0.75}
LOSS_TOLERANCE = 1e-3
COMPARED = ("segments", "tokens")

# ---- Documents, and their tokens -----------------------------------------------------------------------------------


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
    """Trains the encoding and writes both corpora as records of tokens, uint16, unless that has been done."""
    if all((folder / f"{name}.array_record").exists() for name in FIRST_WEIGHTS):
        return
    from tokenizers import ByteLevelBPETokenizer  # noqa: PLC0415  (only the first run needs it)

    folder.mkdir(parents=True, exist_ok=True)
    corpora = {"code": sorted(set(code())), "prose": sorted(set(prose()))}  # Each text once, in an order of its own.
    tokenizer = ByteLevelBPETokenizer()
    texts = (text[:2000] for corpus in corpora.values() for text in corpus)
    tokenizer.train_from_iterator(texts, VOCABULARY, special_tokens=["<end of text>"], show_progress=False)
    for name, corpus in corpora.items():
        encoded = tokenizer.encode_batch(corpus)
        records = (np.array([*document.ids, END_OF_TEXT], np.uint16).tobytes() for document in encoded)
        write_records(folder / f"{name}.array_record", records)


# ---- The stream: each corpus packed into rows, rows mixed ----------------------------------------------------------


def tokens_of(record: bytes) -> np.ndarray:
    """Returns the tokens of a document, int32."""
    return np.frombuffer(record, np.uint16).astype(np.int32)


def corpora(folder: Path) -> dict[str, millstream.ArrayRecordDataSource]:
    """Returns the two sources of documents."""
    return {name: millstream.ArrayRecordDataSource(f"{folder}/{name}.array_record") for name in FIRST_WEIGHTS}


def mixed_rows(folder: Path, steps: int) -> millstream.MixtureSampler:
    """Returns which row stands where: an endless order, whose weights change half-way through the run."""
    rows = {
        name: millstream.PackingSampler(
            millstream.lengths_of(source, [tokens_of]), ROW_LENGTH, overflow="split", seed=seed, num_epochs=None
        )
        for seed, (name, source) in enumerate(corpora(folder).items())
    }
    mixture = millstream.MixtureSampler(rows, FIRST_WEIGHTS)
    return mixture.reweighted(change_at(steps) * GLOBAL_BATCH_SIZE, LATER_WEIGHTS)


def change_at(steps: int) -> int:
    """Returns the step from which on there are other weights."""
    return steps // 2


def training_loader(folder: Path, steps: int) -> millstream.DataLoader:
    """Returns the loader of this process's part of each global batch: tokens, segment ids and positions of rows."""
    shard = millstream.ShardByJaxProcess(drop_remainder=True)
    return millstream.DataLoader(
        data_source=millstream.ConcatenatedDataSource(corpora(folder)),
        sampler=mixed_rows(folder, steps),
        operations=[
            tokens_of,
            millstream.Pack({"tokens": ROW_LENGTH}),
            millstream.Batch(shard.local_batch_size(GLOBAL_BATCH_SIZE), drop_remainder=True),
        ],
        shard_options=shard,
    )


# ---- The model: a decoder whose attention stays within each document -----------------------------------------------


class Layer(nnx.Module):
    """Attention, then two dense layers; each adds to what comes in."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.before_attention, self.before_dense = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attended = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.attention_output = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.wide = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.dense_output = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, values: jax.Array, may_see: jax.Array) -> jax.Array:
        """Returns the values, shape (rows, ROW_LENGTH, WIDTH), after this layer."""
        heads = self.attended(self.before_attention(values)).reshape(*values.shape[:2], 3, HEADS, WIDTH // HEADS)
        seen = jax.nn.dot_product_attention(heads[:, :, 0], heads[:, :, 1], heads[:, :, 2], mask=may_see)
        values = values + self.attention_output(seen.reshape(values.shape))
        added: jax.Array = self.dense_output(nnx.gelu(self.wide(self.before_dense(values))))
        return values + added


class Transformer(nnx.Module):
    """Predicts each token from those before it in the same document."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.tokens, self.positions = (nnx.Embed(size, WIDTH, rngs=rngs) for size in (VOCABULARY, ROW_LENGTH))
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


def over_devices(*axes: str | None) -> NamedSharding:
    """Returns how an array lies on the devices of all processes: split along the axis that is called "device"."""
    return NamedSharding(jax.sharding.Mesh(np.array(jax.devices()), ("device",)), PartitionSpec(*axes))


@nnx.jit
def new_model() -> tuple[Transformer, nnx.Optimizer[Transformer]]:
    """Returns an untrained model and its optimizer, made on every device of every process by one program."""
    model = Transformer(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
    nnx.update((model, optimizer), jax.lax.with_sharding_constraint(nnx.state((model, optimizer)), over_devices()))
    return model, optimizer


@nnx.jit
def train_step(
    model: Transformer, optimizer: nnx.Optimizer[Transformer], batch: dict[str, jax.Array]
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Updates the model, and returns the mean loss before the update and the whole batch, on every device."""

    def mean_loss(model: Transformer) -> jax.Array:
        segments = batch["tokens_segment_ids"]
        # Nothing predicts the first token of a document, and padding is not predicted.
        counts = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
        losses = optax.softmax_cross_entropy_with_integer_labels(model(batch)[:, :-1], batch["tokens"][:, 1:])
        return jnp.sum(losses * counts) / jnp.sum(counts)

    loss: jax.Array
    loss, gradients = nnx.value_and_grad(mean_loss)(model)
    optimizer.update(model, gradients)
    # Training needs no process to have the whole batch: it is for the comparison of the runs.
    return loss, jax.lax.with_sharding_constraint(batch, over_devices())


# ---- One process of a run (with --checkpoints) ---------------------------------------------------------------------


def train(folder: Path, checkpoints: str, steps: int, checkpoint_every: int) -> None:
    """Trains from the newest checkpoint, or from the beginning; the first process reports each step."""
    loader, (model, optimizer) = training_loader(folder, steps), new_model()
    with ocp.CheckpointManager(checkpoints) as manager, iter(loader) as batches:
        if (newest := manager.latest_step()) is not None:
            # What two processes have saved is valid for one.
            wanted = ocp.args.Composite(
                model=ocp.args.StandardRestore(nnx.state((model, optimizer))), loader=CheckpointRestore(batches)
            )
            nnx.update((model, optimizer), manager.restore(newest, args=wanted).model)
        while batches.step < steps:
            number = batches.step
            # The rows of all processes, laid end to end, are one batch over all devices.
            batch = jax.make_array_from_process_local_data(over_devices("device"), next(batches))
            loss, whole = train_step(model, optimizer, batch)
            if jax.process_index() == 0:
                segments = [whole[name] for name in ("tokens_segment_ids", "tokens_positions")]
                report(number, loss, np.stack(segments), np.asarray(whole["tokens"]))
            if batches.step % checkpoint_every == 0:
                now = ocp.args.Composite(
                    model=ocp.args.StandardSave(nnx.state((model, optimizer))), loader=CheckpointSave(batches)
                )
                manager.save(batches.step, args=now)


# ---- The demonstration: three runs, compared and drawn --------------------------------------------------------------


def fill_and_share(sampler: millstream.MixtureSampler, step: int) -> tuple[float, float]:
    """Returns which part of a global batch is not padding, and which part of its rows is code: the order alone says."""
    positions = np.arange(step * GLOBAL_BATCH_SIZE, (step + 1) * GLOBAL_BATCH_SIZE)
    pieces = sampler.pieces_at(positions)
    tokens = int((pieces.ends - pieces.begins).sum())
    return tokens / (len(positions) * ROW_LENGTH), float(np.mean(sampler.locate(positions)[0] == 0))


def draw(path: Path, sampler: millstream.MixtureSampler, whole: Steps, killed: Steps, resumed: Steps) -> None:
    """Draws the losses, how full the rows are, and what they are made of."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (takes long to import)

    fill, share = zip(*(fill_and_share(sampler, step) for step in whole), strict=True)
    figure = Figure(figsize=(8, 7), layout="constrained")
    losses, fills, shares = figure.subplots(3, sharex=True, height_ratios=[3, 1, 1.5])
    for run, name, color, width in (
        (whole, "A, two processes", "lightgray", 5.0),
        (killed, "B, two processes, killed", "tab:red", 2.0),
        (resumed, "C, one process, resumed from B", "tab:blue", 1.0),
    ):
        losses.plot(list(run), [step.loss for step in run.values()], label=name, color=color, linewidth=width)
    losses.set(ylabel="loss", title="A transformer learns code and prose")
    losses.legend()
    fills.plot(fill, color="tab:green")
    fills.set(ylabel="row fill", ylim=(0.9, 1.005))
    shares.stackplot(range(len(share)), share, 1 - np.array(share), labels=["code", "prose"], alpha=0.7, step="post")
    shares.set(ylabel="share of rows", xlabel="step", ylim=(0, 1), xlim=(0, len(whole) - 1))
    shares.legend(loc="lower left")
    for panel in (losses, fills, shares):
        panel.axvline(change_at(len(whole)), color="black", linewidth=0.8, linestyle=":")
    figure.savefig(path)


def demo(output: Path, steps: int) -> None:
    """Runs A, B and C, shows them side by side, and says whether B and C together are A."""
    write_tokens(output / "tokens")
    sampler = mixed_rows(output / "tokens", steps)
    kill_at = random.randrange(steps * 5 // 8, steps * 7 // 8)  # noqa: S311  (when hosts fail is no secret)
    for name, rows in sampler.parts.items():
        print(f"{name}: {len(rows.lengths):,} documents, {rows.lengths.sum():,} tokens, {rows.num_records:,} rows")
    print(f"Training three times on {steps} global batches of {GLOBAL_BATCH_SIZE} rows of {ROW_LENGTH} tokens:")
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=output) as folder:

        def run(title: str, process_count: int, checkpoints: str, kill_at: int | None = None) -> Steps:
            place = f"{folder}/{checkpoints}"
            return watch_hosts(title, process_count, DEVICE_COUNT, checkpoints=place, num_steps=steps, kill_at=kill_at)

        whole = run("A  2 processes, undisturbed ", 2, "undisturbed")
        killed = run("B  2 processes, to be killed", 2, "killed", kill_at)
        resumed = run("C  1 process, resumed       ", 1, "killed")
    show(whole, killed, resumed, compared=COMPARED)
    conclude(whole, killed, resumed, LOSS_TOLERANCE, COMPARED)
    draw(output / "pretrain_text.png", sampler, whole, killed, resumed)
    print(f"Losses, fill and shares are plotted in {output / 'pretrain_text.png'}.")


def main() -> None:
    """Is one process of a run if it is told where its checkpoints are, else the demonstration."""
    of_a_run = {"checkpoints": "", "address": "", "process_count": 1, "process": 0}
    given = arguments(__doc__, output=OUTPUT / "pretrain_text", steps=60, checkpoint_every=5, **of_a_run)
    output = given.output.resolve()
    if given.checkpoints:
        jax.distributed.initialize(given.address, given.process_count, given.process)
        train(output / "tokens", given.checkpoints, given.steps, given.checkpoint_every)
    else:
        demo(output, given.steps)


if __name__ == "__main__":
    main()
