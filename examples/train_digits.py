"""Train on real images, get killed, resume: and get the batches that would have come.

    pip install 'millstream[demo]'
    python train_digits.py    # or `make demo`, in a clone

Three processes train the same small JAX model on the same handwritten digits:

    A   runs to the end, undisturbed.
    B   is killed with SIGKILL in the middle of an epoch.
    C   is a fresh process that resumes from B's newest checkpoint, of the model and of
        the loader's position.

At every step, each process reports the loss, and checksums of the keys of its records and
of their augmented pixels. If B and C together differ from A in a single bit, this program
says so and fails.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from array_record.python.array_record_module import ArrayRecordWriter
from tqdm import tqdm

import millstream
from millstream.checkpoint import CheckpointRestore, CheckpointSave

BATCH_SIZE = 64
REPORT = "step:"  # the beginning of a report: JAX prints lines too

# ---- Data: 1,797 handwritten digits of 8 x 8 pixels, one in six held out -------------


def write_digits(folder: Path) -> None:
    """Writes the digits as records of 64 pixels and a label, a byte each."""
    from sklearn.datasets import load_digits  # noqa: PLC0415  (slow, and the runs do without)

    images, labels = load_digits(return_X_y=True)
    pairs = zip(images.astype(np.uint8), labels, strict=True)
    records = [bytes([*image, label]) for image, label in pairs]
    training = [record for number, record in enumerate(records) if number % 6]
    parts = {f"train-{part}-of-4": training[part::4] for part in range(4)}
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in {**parts, "held_out": records[::6]}.items():
        # "group_size:1": each record can be read alone, as a shuffle needs.
        writer = ArrayRecordWriter(str(folder / f"{name}.array_record"), "group_size:1")
        for record in part:
            writer.write(record)
        writer.close()


def decode(record: bytes) -> dict[str, Any]:
    """Returns the image, float32 of shape (8, 8) from 0 to 1, and its label."""
    values = np.frombuffer(record, np.uint8)
    image = values[:-1].reshape(8, 8).astype(np.float32) / 16
    return {"image": image, "label": values[-1].astype(np.int32)}


class ShiftAndNoise(millstream.RandomMap):
    """Moves an image by up to one pixel in each direction, and adds noise."""

    def random_map(self, element: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
        """Returns a new element. Random numbers come from `rng` only."""
        row, column = rng.integers(0, 3, size=2)
        moved = np.pad(element["image"], 1)[row : row + 8, column : column + 8]
        noise = rng.normal(0, 0.05, moved.shape).astype(np.float32)
        return {**element, "image": moved + noise}


def training_loader(digits: Path) -> millstream.DataLoader:
    """Returns the loader of endless, shuffled, augmented batches."""
    return millstream.load(
        millstream.ArrayRecordDataSource(f"{digits}/train-*.array_record"),
        shuffle=True,
        seed=0,
        transformations=[decode, ShiftAndNoise()],
        batch_size=BATCH_SIZE,
        drop_remainder=True,
        worker_count="auto",
    )


# ---- Model: two dense layers, trained by gradient descent with momentum --------------


def new_model() -> dict[str, Any]:
    """Returns the parameters of an untrained network, and their momentum."""
    first, second = jax.random.split(jax.random.key(0))
    hidden = jax.random.normal(first, (64, 512)) / 8
    output = jax.random.normal(second, (512, 10)) / 32
    parameters = {
        "hidden": {"weights": hidden, "biases": jnp.zeros(512)},
        "output": {"weights": output, "biases": jnp.zeros(10)},
    }
    return {"parameters": parameters, "momentum": jax.tree.map(jnp.zeros_like, parameters)}


@jax.jit
def predict(parameters: dict[str, Any], images: jax.Array) -> jax.Array:
    """Returns the logarithms of the ten digits' probabilities, shape (batch, 10)."""
    hidden, output = parameters["hidden"], parameters["output"]
    values = images.reshape(len(images), -1) @ hidden["weights"] + hidden["biases"]
    return jax.nn.log_softmax(jax.nn.relu(values) @ output["weights"] + output["biases"])


def cross_entropy(parameters: dict[str, Any], batch: dict[str, jax.Array]) -> jax.Array:
    """Returns the mean loss of a batch."""
    predictions = predict(parameters, batch["image"])
    return -jnp.take_along_axis(predictions, batch["label"][:, None], axis=1).mean()


@jax.jit
def train_step(
    model: dict[str, Any], batch: dict[str, jax.Array]
) -> tuple[dict[str, Any], jax.Array]:
    """Returns the model after one step of gradient descent, and the loss before it."""
    loss, gradients = jax.value_and_grad(cross_entropy)(model["parameters"], batch)
    momentum = jax.tree.map(lambda old, new: 0.9 * old + new, model["momentum"], gradients)
    parameters = jax.tree.map(
        lambda old, change: old - 0.05 * change, model["parameters"], momentum
    )
    return {"parameters": parameters, "momentum": momentum}, loss


# ---- One run, in its own process -----------------------------------------------------


def train(digits: Path, checkpoints: str, steps: int, checkpoint_every: int) -> None:
    """Trains from the newest checkpoint, or from the beginning; reports each step."""
    loader, model = training_loader(digits), new_model()
    with ocp.CheckpointManager(checkpoints) as manager, iter(loader) as batches:
        if (newest := manager.latest_step()) is not None:
            wanted = ocp.args.Composite(
                model=ocp.args.StandardRestore(model), loader=CheckpointRestore(batches)
            )
            model = manager.restore(newest, args=wanted).model
        while batches.step < steps:
            step = batches.step
            batch = next(batches)
            model, loss = train_step(model, batch)
            keys, pixels = loader.record_keys(step), batch["image"]
            report = Step(float(loss), zlib.crc32(keys.tobytes()), zlib.crc32(pixels.tobytes()))
            print(REPORT, json.dumps([step, report]), flush=True)
            if batches.step % checkpoint_every == 0:
                # One checkpoint for both, written in the background.
                now = ocp.args.Composite(
                    model=ocp.args.StandardSave(model), loader=CheckpointSave(batches)
                )
                manager.save(batches.step, args=now)
    print(f"Accuracy on the held-out digits: {accuracy(model['parameters'], digits):.1%}")


def accuracy(parameters: dict[str, Any], digits: Path) -> float:
    """Returns the fraction of the held-out images that the model classifies correctly."""
    source = millstream.ArrayRecordDataSource(f"{digits}/held_out.array_record")
    loader = millstream.load(source, num_epochs=1, transformations=[decode], batch_size=64)
    right = [
        predict(parameters, batch["image"]).argmax(axis=1) == batch["label"] for batch in loader
    ]
    return float(np.concatenate(right).mean())


# ---- The demonstration: three runs, compared -----------------------------------------


class Step(NamedTuple):
    """A step of a run: its loss, and checksums of the record keys and of the pixels."""

    loss: float
    records: int
    pixels: int


Run = dict[int, Step]


def run(
    title: str, checkpoints: str, steps: int, kill_at: int | None = None
) -> tuple[Run, str]:
    """Runs this program in a process of its own.

    Args:
        title: the label of the progress bar.
        checkpoints: the folder for checkpoints.
        steps: the number of steps of the run.
        kill_at: the step at which the process is killed, None to let it end.

    Returns:
        The steps that it reported, and its last other line.
    """
    reported, line = {}, ""
    with (
        tqdm(total=steps, desc=title, unit=" steps", disable=None) as bar,
        subprocess.Popen(  # noqa: S603  (this program)
            [sys.executable, *sys.argv, f"--checkpoints={checkpoints}"],
            stdout=subprocess.PIPE,
            pipesize=4096,  # so that it cannot get far ahead of what is read here
            text=True,
            # On a GPU, XLA chooses kernels by timing: two processes may differ in a bit.
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        ) as process,
    ):
        for line in process.stdout or ():
            if line.startswith(REPORT):
                step, values = json.loads(line.removeprefix(REPORT))
                reported[step] = Step(*values)
                bar.update(step + 1 - bar.n)
                if step == kill_at:
                    process.kill()
    if process.returncode != (0 if kill_at is None else -signal.SIGKILL):
        sys.exit(f"{title}: exit status {process.returncode} after {len(reported)} steps.")
    return reported, line.strip()


def show(whole: Run, killed: Run, resumed: Run, killed_where: str) -> None:
    """Prints the steps around the checkpoint, around the kill and at the end."""
    first, last = min(resumed), max(killed)
    print("\n  step   loss of A      loss of B      loss of C      records  pixels")
    shown = [n for n in whole if min(abs(n - first), abs(n - last)) <= 2 or n == max(whole)]
    for previous, number in itertools.pairwise([shown[0] - 1, *shown]):
        if number > previous + 1:
            print("   ...")
        steps = [run.get(number) for run in (whole, killed, resumed)]
        losses = "  ".join(f"{step.loss:<13.9g}" if step else " " * 13 for step in steps)
        records, pixels = (
            "same" if len({step[field] for step in steps if step}) == 1 else "DIFFER"
            for field in (1, 2)
        )
        event = "<- C resumes from the checkpoint" if number == first else ""
        event += f"<- B is killed{killed_where}" if number == last else ""
        print(f"  {number:4}   {losses}  {records:7}  {pixels:6}  {event}".rstrip())


def conclude(whole: Run, killed: Run, resumed: Run) -> None:
    """Prints that B and C together are A, or exits with an error that says where not."""
    differences = [
        f"step {number}: expected {whole.get(number)}, got {step}"
        for run in (killed, resumed)
        for number, step in run.items()
        if step != whole.get(number)
    ]
    missing = sorted(whole.keys() - killed.keys() - resumed.keys())
    differences += [
        f"step {number}: expected {whole[number]}, got nothing" for number in missing
    ]
    if differences:
        sys.exit("\n".join(["\nFAILED: B and C are not the same as A.", *differences]))
    same = "the same records, pixels, and losses to the last bit"
    print(f"\nAll {len(whole)} steps of B and C are those of A: {same}.")


def plot(path: Path, runs: dict[str, Run]) -> None:
    """Plots the losses, each run thinner than the one that it may cover."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (the runs do not plot)

    figure = Figure(figsize=(8, 4), layout="constrained")
    panel = figure.subplots()
    styles = [("lightgray", 4.0), ("tab:red", 1.0), ("tab:blue", 0.5)]
    for (name, run), (color, width) in zip(runs.items(), styles, strict=True):
        losses = [step.loss for step in run.values()]
        panel.plot(list(run), losses, label=name, color=color, linewidth=width)
    panel.set(
        xlabel="step", ylabel="loss", yscale="log", title="The same losses, killed or not"
    )
    panel.legend()
    figure.savefig(path)
    print(f"The losses are plotted in {os.path.relpath(path)}.")


def demo(output: Path, steps: int, kill_at: int) -> None:
    """Runs A, B and C, shows them side by side, and compares B and C with A."""
    write_digits(output / "digits")
    files = str(output / "digits/train-*.array_record")
    num_images = len(millstream.ArrayRecordDataSource(files))
    batches = f"{steps} batches of {BATCH_SIZE}"
    print(f"Training three times on {num_images} images of digits, in {batches}:")
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=output) as folder:
        whole, _ = run("A  undisturbed ", f"{folder}/undisturbed", steps)
        killed, _ = run("B  to be killed", f"{folder}/killed", steps, kill_at)
        resumed, accuracy_line = run("C  resumed     ", f"{folder}/killed", steps)
    epoch, offset = divmod((max(killed) + 1) * BATCH_SIZE, num_images)
    show(whole, killed, resumed, f", {offset} images into epoch {epoch}")
    conclude(whole, killed, resumed)
    print(accuracy_line)
    runs = {"A, undisturbed": whole, "B, killed": killed, "C, resumed": resumed}
    plot(output / "train_digits.png", runs)


def main() -> None:
    """Is one run if it is given a folder of checkpoints, otherwise the demonstration."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "output")
    parser.add_argument("--steps", type=int, default=1200)
    parser.add_argument("--checkpoint_every", type=int, default=100)
    parser.add_argument("--kill_at", type=int, default=690)
    parser.add_argument("--checkpoints", help=argparse.SUPPRESS)
    options = parser.parse_args()
    output = options.output.resolve()
    logging.set_verbosity(logging.ERROR)  # Orbax logs every step of a checkpoint.
    if options.checkpoints:
        digits = output / "digits"
        train(digits, options.checkpoints, options.steps, options.checkpoint_every)
    else:
        demo(output, options.steps, options.kill_at)


if __name__ == "__main__":
    main()
