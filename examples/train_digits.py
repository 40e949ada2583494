"""Train on real images, get killed, resume: and get exactly the batches that would have come next.

    python examples/train_digits.py

Three processes train the same small JAX model on the same handwritten digits:

    A   runs to the end, undisturbed.
    B   is killed with SIGKILL somewhere in the middle of an epoch.
    C   is a fresh process that resumes from B's newest checkpoint, which holds the model and the loader's position.

At every step, each process reports the loss, which records it trained on, and a checksum of their augmented pixels.
If B and C together differ from A in a single bit of them, this script says so and fails.
"""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import app, flags, logging
from array_record.python.array_record_module import ArrayRecordWriter
from tqdm import tqdm

import millstream
from millstream.checkpoint import CheckpointRestore, CheckpointSave

MODE = flags.DEFINE_enum("mode", "demo", ["demo", "train"], "demo: all three runs. train: one of them.")
OUTPUT = flags.DEFINE_string("output", str(Path(__file__).parent / "output"), "The folder for records and plot.")
CHECKPOINTS = flags.DEFINE_string("checkpoints", None, "The folder for the checkpoints of --mode=train.")
STEPS = flags.DEFINE_integer("steps", 1200, "How many batches to train on.", lower_bound=1)
CHECKPOINT_EVERY = flags.DEFINE_integer("checkpoint_every", 100, "Steps between two checkpoints.", lower_bound=1)
KILL_AT = flags.DEFINE_integer("kill_at", 690, "The step at which the demo kills B.", lower_bound=1)
WORKER_COUNT = flags.DEFINE_integer("worker_count", 2, "Processes that load the batches.", lower_bound=0)
SEED = flags.DEFINE_integer("seed", 0, "Of the shuffle, the augmentation and the model.", lower_bound=0)

BATCH_SIZE = 64
SIDE = 8  # Images have 8 x 8 pixels, each from 0 to 16.

# ---- The records: one per image, 64 pixels and the label, a byte each --------------------------------------------


def write_digits(folder: Path) -> None:
    """Writes scikit-learn's 1,797 handwritten digits as ArrayRecord files, unless that has been done."""
    held_out = folder / "held_out-0-of-1.array_record"
    if held_out.exists():  # It is written last.
        return
    from sklearn.datasets import load_digits  # noqa: PLC0415  (takes a second to import: only for the first run)

    folder.mkdir(parents=True, exist_ok=True)
    images, labels = load_digits(return_X_y=True)
    records = [bytes([*image, label]) for image, label in zip(images.astype(np.uint8), labels, strict=True)]
    train = [record for number, record in enumerate(records) if number % 6]
    for part in range(4):
        write_records(folder / f"train-{part}-of-4.array_record", train[part::4])
    write_records(held_out, records[::6])


def write_records(path: Path, records: Iterable[bytes]) -> None:
    """Writes a file that is either complete or not there: a killed run never leaves half of one."""
    partial = path.with_suffix(".partial")
    writer = ArrayRecordWriter(str(partial), "group_size:1")  # Each record can be read alone: a shuffle needs that.
    for record in records:
        writer.write(record)
    writer.close()
    partial.replace(path)


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


def training_loader() -> millstream.DataLoader:
    """Returns the loader of endless, shuffled, augmented batches."""
    source = millstream.ArrayRecordDataSource(f"{OUTPUT.value}/digits/train-*.array_record")
    return millstream.DataLoader(
        data_source=source,
        sampler=millstream.IndexSampler(len(source), shuffle=True, seed=SEED.value),
        operations=[decode, ShiftAndNoise(), millstream.Batch(BATCH_SIZE, drop_remainder=True)],
        worker_count=WORKER_COUNT.value,
    )


# ---- The model: two dense layers, trained by gradient descent with momentum ---------------------------------------


def new_model() -> dict[str, Any]:
    """Returns the parameters of an untrained network, and their momentum."""
    first, second = jax.random.split(jax.random.key(SEED.value))
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


# ---- One run, in a process of its own (--mode=train) --------------------------------------------------------------


class Step(NamedTuple):
    """What a run reports about one step: the loss, and checksums of the record keys and of the augmented pixels."""

    number: int
    loss: float
    records: int
    pixels: int


def train() -> None:
    """Trains from the newest checkpoint, or from the beginning; prints each step, and the accuracy at the end."""
    loader, model = training_loader(), new_model()
    with ocp.CheckpointManager(CHECKPOINTS.value) as manager, iter(loader) as batches:
        if (newest := manager.latest_step()) is not None:
            wanted = ocp.args.Composite(model=ocp.args.StandardRestore(model), loader=CheckpointRestore(batches))
            model = manager.restore(newest, args=wanted).model
        while batches.step < STEPS.value:
            number, keys = batches.step, loader.record_keys(batches.step)
            batch = next(batches)
            model, loss = train_step(model, batch)
            report = Step(number, float(loss), zlib.crc32(keys.tobytes()), zlib.crc32(batch["image"].tobytes()))
            print(json.dumps(report), flush=True)
            if batches.step % CHECKPOINT_EVERY.value == 0:
                # One checkpoint for both, written in the background while training continues.
                now = ocp.args.Composite(model=ocp.args.StandardSave(model), loader=CheckpointSave(batches))
                manager.save(batches.step, args=now)
    print(json.dumps(accuracy(model["parameters"])), flush=True)


def accuracy(parameters: dict[str, Any]) -> float:
    """Returns the share of the held-out images that the model gets right."""
    source = millstream.ArrayRecordDataSource(f"{OUTPUT.value}/digits/held_out-*.array_record")
    # Each image once and in order: the last batch is a short one.
    loader = millstream.load(source, num_epochs=1, transformations=[decode], batch_size=BATCH_SIZE)
    right = [predict(parameters, batch["image"]).argmax(axis=1) == batch["label"] for batch in loader]
    return float(np.concatenate(right).mean())


# ---- The demonstration: three runs, compared ----------------------------------------------------------------------


def watch(title: str, checkpoints: str, kill_at: int | None = None) -> tuple[dict[int, Step], float]:
    """Starts a run, shows its progress, kills it at a step if asked to, and returns its steps and its accuracy."""
    command = [sys.executable, *sys.argv, "--mode=train", f"--checkpoints={checkpoints}"]
    # Not on a GPU: there XLA chooses its kernels by timing them, and two processes may differ in the last bit.
    environment = {"JAX_PLATFORMS": "cpu", **os.environ}
    expected_status = 0 if kill_at is None else -signal.SIGKILL
    steps, result = {}, math.nan
    with (
        # With a small pipe the run cannot get far ahead of what has been read here.
        subprocess.Popen(  # noqa: S603  (runs this very script)
            command, stdout=subprocess.PIPE, pipesize=4096, text=True, env=environment
        ) as process,
        tqdm(total=STEPS.value, desc=title, unit=" steps", disable=None) as bar,
    ):
        for line in process.stdout or ():
            report = json.loads(line)
            if isinstance(report, float):
                result = report
                continue
            step = Step(*report)
            steps[step.number] = step
            bar.update(step.number + 1 - bar.n)
            if step.number == kill_at:
                process.send_signal(signal.SIGKILL)
    if process.returncode != expected_status:
        sys.exit(f"{title}: exit status {process.returncode}, not {expected_status}, after {len(steps)} steps.")
    return steps, result


def differences(expected: dict[int, Step], *runs: dict[int, Step]) -> list[str]:
    """Returns, in words, where the runs together differ from the expected one; nothing if they do not."""
    reported = [step for run in runs for step in run.values()]
    wrong = [step for step in reported if step != expected.get(step.number)]
    missing = expected.keys() - {step.number for step in reported}
    return [f"expected {expected.get(step.number)}, got {step}" for step in wrong] + [
        f"expected {expected[number]}, got nothing" for number in sorted(missing)
    ]


def show(whole: dict[int, Step], killed: dict[int, Step], resumed: dict[int, Step], num_images: int) -> None:
    """Prints the steps around the checkpoint, around the kill and at the end, side by side."""
    first, last = min(resumed, default=len(whole)), max(killed)
    epoch, offset = divmod((last + 1) * BATCH_SIZE, num_images)
    events = {first: "<- C resumes from the checkpoint", last: f"<- B is killed, {offset} images into epoch {epoch}"}
    print("\n  step   loss of A      loss of B      loss of C      records  pixels")
    shown = [number for number in whole if min(abs(number - first), abs(number - last)) <= 2 or number == max(whole)]
    for previous, number in itertools.pairwise([shown[0] - 1, *shown]):
        if number > previous + 1:
            print("   ...")
        steps = [run.get(number) for run in (whole, killed, resumed)]
        losses = "  ".join(f"{step.loss:<13.9g}" if step else " " * 13 for step in steps)
        same = ["same" if len({step[i] for step in steps if step}) == 1 else "DIFFER" for i in (2, 3)]
        print(f"  {number:4}   {losses}  {same[0]:7}  {same[1]:6}  {events.get(number, '')}".rstrip())


def plot(whole: dict[int, Step], killed: dict[int, Step], resumed: dict[int, Step], path: Path) -> None:
    """Writes a picture of the losses: B and C, as far as they go, lie on A."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (as above: only for those who plot)

    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.subplots()
    for steps, title, color, width in (
        (whole, "A, undisturbed", "lightgray", 4),
        (killed, "B, killed", "tab:red", 1),
        (resumed, "C, resumed", "tab:blue", 0.5),
    ):
        axes.plot(list(steps), [step.loss for step in steps.values()], label=title, color=color, linewidth=width)
    last = max(killed)
    axes.axvline(last, color="tab:red", linestyle="--", linewidth=1, label=f"B is killed, step {last}")
    axes.set(xlabel="step", ylabel="cross-entropy", yscale="log", title="The same losses, killed or not")
    axes.legend()
    figure.savefig(path)


def conclude(whole: dict[int, Step], killed: dict[int, Step], resumed: dict[int, Step]) -> None:
    """Prints that the interrupted training equals the undisturbed one, or exits with an error that says where not."""
    if found := differences(whole, killed, resumed):
        sys.exit("\n".join(["\nFAILED: B and C together are not the same as A.", *found]))
    print(f"\nAll {len(whole)} steps of B and C are those of A: the same losses to the last bit, records and pixels.")


def demo() -> None:
    """Runs A, B and C, shows them side by side, and says whether B and C together are A."""
    if KILL_AT.value >= STEPS.value:
        raise app.UsageError(f"--kill_at={KILL_AT.value} must be less than --steps={STEPS.value}.")
    write_digits(Path(OUTPUT.value) / "digits")
    num_images = len(millstream.ArrayRecordDataSource(f"{OUTPUT.value}/digits/train-*.array_record"))
    print(f"Training three times on {num_images} images of digits, in {STEPS.value} batches of {BATCH_SIZE}:")
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=Path(OUTPUT.value).resolve()) as folder:
        whole, _ = watch("A  undisturbed ", f"{folder}/undisturbed")
        killed, _ = watch("B  to be killed", f"{folder}/killed", KILL_AT.value)
        resumed, accuracy_of_c = watch("C  resumed     ", f"{folder}/killed")
    show(whole, killed, resumed, num_images)
    conclude(whole, killed, resumed)
    print(f"Accuracy on the held-out digits: {accuracy_of_c:.1%}")
    picture = Path(OUTPUT.value) / "train_digits.png"
    plot(whole, killed, resumed, picture)
    print(f"The losses are plotted in {os.path.relpath(picture)}.")


def main(_: list[str]) -> None:
    """Runs what --mode says."""
    logging.set_verbosity(logging.ERROR)  # Orbax logs at length what it does.
    demo() if MODE.value == "demo" else train()


if __name__ == "__main__":
    app.run(main)
