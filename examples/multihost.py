"""Train on four hosts, lose one, resume on two: and get exactly the batches that would have come next.

    python examples/multihost.py

Hosts are processes here, each with CPU devices of its own. On a cluster, each host would run `train` below and call
`jax.distributed.initialize()`; nothing else would differ. There are three runs:

    A   four processes train to the end, undisturbed.
    B   four processes; one of them kills itself with SIGKILL at a random step, and the launcher kills the others.
    C   two processes resume from B's newest checkpoint, which holds the model and the loader's position.

At every step the first process reports the loss, which records were in the global batch, and a checksum of their
augmented pixels. If B and C together differ from A in any record or pixel, this script says so and fails. The loss is
also that of A, up to the order in which floating-point numbers are added, which depends on the number of processes.
"""

import contextlib
import itertools
import json
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from absl import app, flags, logging
from array_record.python.array_record_module import ArrayRecordWriter
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

import millstream
from millstream.checkpoint import CheckpointRestore, CheckpointSave

MODE = flags.DEFINE_enum("mode", "demo", ["demo", "train"], "demo: all three runs. train: one process of a run.")
OUTPUT = flags.DEFINE_string("output", str(Path(__file__).parent / "output"), "The folder for records and plot.")
STEPS = flags.DEFINE_integer("steps", 300, "How many global batches to train on.", lower_bound=2)
CHECKPOINT_EVERY = flags.DEFINE_integer("checkpoint_every", 25, "Steps between two checkpoints.", lower_bound=1)
KILL_AT = flags.DEFINE_integer("kill_at", None, "The step at which a process of B kills itself; random by default.")
SEED = flags.DEFINE_integer("seed", 0, "Of the shuffle, the augmentation and the model.", lower_bound=0)
ADDRESS = flags.DEFINE_string("address", None, "Where the processes of --mode=train meet.")
PROCESS_COUNT = flags.DEFINE_integer("process_count", 1, "How many processes of --mode=train there are.")
PROCESS = flags.DEFINE_integer("process", 0, "Which of them this one is.")
KILLED = flags.DEFINE_integer("killed", None, "Which of them kills itself at --kill_at.")
CHECKPOINTS = flags.DEFINE_string("checkpoints", None, "The folder for the checkpoints of --mode=train.")

GLOBAL_BATCH_SIZE = 64  # Over all processes: this is what the stream of batches depends on.
DEVICE_COUNT = 4  # Over all processes, too.
SIDE = 8  # Images have 8 x 8 pixels, each from 0 to 16.
LOSS_TOLERANCE = 1e-3
REPORT = "step:"  # What a report begins with: JAX prints lines of its own.

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


def training_loader() -> millstream.DataLoader:
    """Returns the loader of this process's part of each global batch."""
    source = millstream.ArrayRecordDataSource(f"{OUTPUT.value}/digits.array_record")
    shard = millstream.ShardByJaxProcess(drop_remainder=True)
    return millstream.DataLoader(
        data_source=source,
        sampler=millstream.IndexSampler(len(source), shuffle=True, seed=SEED.value),
        operations=[decode, Shift(), millstream.Batch(shard.local_batch_size(GLOBAL_BATCH_SIZE), drop_remainder=True)],
        shard_options=shard,
        worker_count=1,
    )


# ---- The model: two dense layers, the hidden one split over all devices --------------------------------------------


class Shardings(NamedTuple):
    """Where arrays lie on the devices of all processes: split by rows, split by columns, or whole on each."""

    rows: NamedSharding
    columns: NamedSharding
    everywhere: NamedSharding


def all_devices() -> Shardings:
    """Returns the shardings over one row of all devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("device",))
    specs = PartitionSpec("device"), PartitionSpec(None, "device"), PartitionSpec()
    return Shardings(*(NamedSharding(mesh, spec) for spec in specs))


def new_model(to: Shardings) -> dict[str, jax.Array]:
    """Returns the parameters of an untrained network: each device has a part of the hidden layer."""
    rng = np.random.default_rng(SEED.value)
    hidden = rng.normal(0, 1 / SIDE, (SIDE * SIDE, 256)).astype(np.float32)
    output = rng.normal(0, 1 / 16, (256, 10)).astype(np.float32)
    return {"hidden": jax.device_put(hidden, to.columns), "output": jax.device_put(output, to.rows)}


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


# ---- One process of a run (--mode=train) --------------------------------------------------------------------------


class Step(NamedTuple):
    """What a run reports about one step: the loss, and checksums of the record keys and of the augmented pixels."""

    number: int
    loss: float
    records: int
    pixels: int


def train() -> None:
    """Trains from the newest checkpoint, or from the beginning; the first process prints each step."""
    jax.distributed.initialize(ADDRESS.value, PROCESS_COUNT.value, PROCESS.value)
    to, loader = all_devices(), training_loader()
    model = new_model(to)
    with ocp.CheckpointManager(CHECKPOINTS.value) as manager, iter(loader) as batches:
        if (newest := manager.latest_step()) is not None:
            # A checkpoint of four processes is valid for two, for the model and for the loader.
            wanted = ocp.args.Composite(model=ocp.args.StandardRestore(model), loader=CheckpointRestore(batches))
            model = manager.restore(newest, args=wanted).model
        while batches.step < STEPS.value:
            number, keys = batches.step, loader.record_keys(batches.step)
            part = next(batches)
            if number == KILL_AT.value and PROCESS.value == KILLED.value:
                os.kill(os.getpid(), signal.SIGKILL)
            # The parts of all processes, laid end to end, are one array over all devices.
            batch = jax.make_array_from_process_local_data(to.rows, part)
            model, loss = train_step(model, batch)
            tell(number, loss, multihost_utils.process_allgather(keys), batch["image"])
            if batches.step % CHECKPOINT_EVERY.value == 0:
                # One checkpoint for both, of all processes, written in the background while training continues.
                now = ocp.args.Composite(model=ocp.args.StandardSave(model), loader=CheckpointSave(batches))
                manager.save(batches.step, args=now)


def tell(number: int, loss: jax.Array, keys: Any, images: jax.Array) -> None:
    """Has the first process print what all of them have trained on."""
    pixels = multihost_utils.process_allgather(images, tiled=True)
    if PROCESS.value == 0:
        step = Step(number, float(loss), zlib.crc32(np.ravel(keys).tobytes()), zlib.crc32(pixels.tobytes()))
        print(REPORT, json.dumps(step), flush=True)


# ---- The launcher, instead of a cluster's scheduler ---------------------------------------------------------------


def launch(title: str, process_count: int, checkpoints: str, kill: tuple[int, int] | None = None) -> dict[int, Step]:
    """Runs a group of processes to its end, and returns its steps.

    Args:
        title: what to call the run.
        process_count: how many processes; they share DEVICE_COUNT devices.
        checkpoints: the folder for the checkpoints.
        kill: the process that is to kill itself, and at which step.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    command = [sys.executable, *sys.argv, "--mode=train", f"--checkpoints={checkpoints}"]
    command += [f"--address={address}", f"--process_count={process_count}"]
    if kill is not None:
        command += [f"--killed={kill[0]}", f"--kill_at={kill[1]}"]
    devices = f"--xla_force_host_platform_device_count={DEVICE_COUNT // process_count}"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": devices}
    with tempfile.TemporaryFile("w+") as log:
        # The first process reports here; everything else they print is shown only after a failure.
        group = [
            subprocess.Popen(  # noqa: S603  (runs this very script)
                [*command, f"--process={process}"],
                stdout=log if process else subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment,
            )
            for process in range(process_count)
        ]
        watchers = [threading.Thread(target=end_together, args=(member, group)) for member in group]
        for watcher in watchers:
            watcher.start()
        try:
            steps = {step.number: step for step in reports(group[0], title)}
        except BaseException:
            group[0].kill()
            raise
        finally:
            for watcher in watchers:
                watcher.join()
        log.seek(0)
        died = [process for process, member in enumerate(group) if member.returncode]
        if bool(died) != (kill is not None):
            sys.exit(f"{title}: processes {died} failed after {len(steps)} steps.\n{log.read()[-4000:]}")
    return steps


def end_together(member: "subprocess.Popen[str]", group: list["subprocess.Popen[str]"]) -> None:
    """Waits for a process and, if it has failed, kills the others: JAX would leave them waiting."""
    if member.wait():
        for other in group:
            other.kill()


def reports(process: "subprocess.Popen[str]", title: str) -> Iterator[Step]:
    """Yields the steps that a process prints, and shows its progress."""
    with (
        process.stdout or contextlib.nullcontext(()) as lines,
        tqdm(total=STEPS.value, desc=title, unit=" steps", disable=None) as bar,
    ):
        for line in lines:
            _, is_report, report = line.partition(REPORT)  # JAX may write in front of it.
            if is_report:
                step = Step(*json.loads(report))
                bar.update(step.number + 1 - bar.n)
                yield step


# ---- The demonstration: three runs, compared ----------------------------------------------------------------------


def write_digits(path: Path) -> None:
    """Writes scikit-learn's 1,797 handwritten digits as an ArrayRecord file, 64 pixels and the label in each record."""
    if path.exists():
        return
    from sklearn.datasets import load_digits  # noqa: PLC0415  (takes a second to import: only for the first run)

    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    writer = ArrayRecordWriter(str(partial), "group_size:1")  # Each record can be read alone: a shuffle needs that.
    for image, label in zip(*load_digits(return_X_y=True), strict=True):
        writer.write(bytes([*image.astype(np.uint8), label]))
    writer.close()
    partial.replace(path)


def differences(expected: dict[int, Step], *runs: dict[int, Step]) -> list[str]:
    """Returns, in words, where the runs together differ from the expected one; nothing if they do not."""
    reported = [step for run in runs for step in run.values()]
    wrong = [step for step in reported if not same(step, expected.get(step.number))]
    missing = expected.keys() - {step.number for step in reported}
    return [f"expected {expected.get(step.number)}, got {step}" for step in wrong] + [
        f"expected {expected[number]}, got nothing" for number in sorted(missing)
    ]


def same(step: Step, expected: Step | None) -> bool:
    """Says whether a step had the very batch that was expected, and the loss, as far as rounding allows."""
    if expected is None or step._replace(loss=0) != expected._replace(loss=0):
        return False
    return math.isclose(step.loss, expected.loss, rel_tol=LOSS_TOLERANCE)


def show(whole: dict[int, Step], killed: dict[int, Step], resumed: dict[int, Step], num_images: int) -> None:
    """Prints the steps around the checkpoint, around the kill and at the end, side by side."""
    first, last = min(resumed, default=len(whole)), max(killed, default=0)
    epoch, offset = divmod((last + 1) * GLOBAL_BATCH_SIZE, num_images)
    events = {last: f"<- B is killed, {offset} images into epoch {epoch}"}
    events[first] = f"<- C resumes, 2 processes {events.get(first, '')}"
    print("\n  step   loss of A      loss of B      loss of C      records  pixels")
    shown = [number for number in whole if min(abs(number - first), abs(number - last)) <= 2 or number == max(whole)]
    for previous, number in itertools.pairwise([shown[0] - 1, *shown]):
        if number > previous + 1:
            print("   ...")
        steps = [run.get(number) for run in (whole, killed, resumed)]
        losses = "  ".join(f"{step.loss:<13.9g}" if step else " " * 13 for step in steps)
        equal = ["same" if len({step[i] for step in steps if step}) == 1 else "DIFFER" for i in (2, 3)]
        print(f"  {number:4}   {losses}  {equal[0]:7}  {equal[1]:6}  {events.get(number, '')}".rstrip())


def plot(path: Path, whole: dict[int, Step], killed: dict[int, Step], resumed: dict[int, Step]) -> None:
    """Draws the losses of the three runs over each other, as a PNG."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (only the launcher draws)

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss", yscale="log", title="Four processes, killed, then two")
    styles = {
        "A, undisturbed": (whole, 4.0, "0.8"),
        "B, killed": (killed, 2.4, "C3"),
        "C, resumed": (resumed, 1.2, "C0"),
    }
    for name, (run, width, colour) in styles.items():
        axes.plot(list(run), [step.loss for step in run.values()], label=name, linewidth=width, color=colour)
    last, first = max(killed, default=0), min(resumed, default=len(whole))
    axes.axvline(last, color="C3", linestyle="--", linewidth=1, label=f"one of four processes is killed, step {last}")
    axes.axvline(first, color="C0", linestyle=":", linewidth=1.5, label=f"two resume from the checkpoint, step {first}")
    axes.legend()
    figure.savefig(path)


def conclude(whole: dict[int, Step], killed: dict[int, Step], resumed: dict[int, Step]) -> None:
    """Prints that the interrupted training equals the undisturbed one, or exits with an error that says where not."""
    if found := differences(whole, killed, resumed):
        sys.exit("\n".join(["\nFAILED: B and C together are not the same as A.", *found]))
    apart = max(abs(step.loss - whole[step.number].loss) for run in (killed, resumed) for step in run.values())
    print(f"\nAll {len(whole)} global batches of B and C are those of A: the same records and pixels, to the last bit.")
    print(f"No loss differs by more than {apart:.1g}." if apart else "The losses are the same to the last bit, too.")


def demo() -> None:
    """Runs A, B and C, shows them side by side, and says whether B and C together are A."""
    output, chance = Path(OUTPUT.value).resolve(), random.Random()  # noqa: S311  (which host fails is no secret)
    kill_at = chance.randrange(STEPS.value // 2, STEPS.value * 3 // 4) if KILL_AT.value is None else KILL_AT.value
    if not 0 < kill_at < STEPS.value:
        raise app.UsageError(f"--kill_at={kill_at} must be more than 0 and less than --steps={STEPS.value}.")
    write_digits(output / "digits.array_record")
    num_images = len(millstream.ArrayRecordDataSource(str(output / "digits.array_record")))
    print(f"Training three times on {num_images} images, in {STEPS.value} global batches of {GLOBAL_BATCH_SIZE}:")
    with tempfile.TemporaryDirectory(prefix="checkpoints-", dir=output) as folder:
        whole = launch("A  4 processes, undisturbed ", 4, f"{folder}/undisturbed")
        killed = launch("B  4 processes, to be killed", 4, f"{folder}/killed", kill=(chance.randrange(4), kill_at))
        resumed = launch("C  2 processes, resumed     ", 2, f"{folder}/killed")
    show(whole, killed, resumed, num_images)
    plot(output / "multihost.png", whole, killed, resumed)
    conclude(whole, killed, resumed)
    print(f"The losses are drawn in {output / 'multihost.png'}")


def main(_: list[str]) -> None:
    """Runs what --mode says."""
    logging.set_verbosity(logging.ERROR)  # Orbax logs at length what it does.
    demo() if MODE.value == "demo" else train()


if __name__ == "__main__":
    app.run(main)
