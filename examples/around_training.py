"""What the examples have around their training: arguments, digits as records, runs that are compared, and plots."""

import argparse
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from array_record.python.array_record_module import ArrayRecordWriter
from tqdm import tqdm

OUTPUT = Path(__file__).parent / "output"
REPORT = "step:"  # What a report begins with: JAX prints lines too.
ENDS_WITH_PARENT = "MILLSTREAM_EXAMPLE_ENDS_WITH_PARENT"  # Set for the processes that `watch` starts.

HELP = {
    "output": "the folder for what is written",
    "steps": "how many batches to train on, including those before a resume",
    "checkpoint_every": "steps between two checkpoints",
    "report_every": "steps between two lines about the loss",
    "kill_at": "the step at which run B is killed",
    "checkpoints": "the folder for checkpoints: makes this process one of a run, which the demonstration starts",
    "address": "where the processes of a run meet",
    "process_count": "how many processes a run has",
    "process": "which of them this one is",
}


def arguments(document: str | None, **defaults: Any) -> Any:
    """Returns the arguments of the command line, as attributes: those that have a default here, and no others."""
    parser = argparse.ArgumentParser(description=document, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=type(default), default=default, help=HELP[name])
    logging.set_verbosity(logging.ERROR)  # Orbax logs at length what it does.
    if ENDS_WITH_PARENT in os.environ:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    return parser.parse_args()


def _end_with_parent() -> None:
    os.read(0, 1)  # Nothing is ever written: this returns when the parent is gone, in whatever way.
    os._exit(1)


# ---- Digits as records: 64 pixels from 0 to 16 and the label, a byte each -----------------------------------------


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


# ---- Three runs: A undisturbed, B killed, C resumed from B's newest checkpoint ------------------------------------


class Step(NamedTuple):
    """What a run reports about one step: the loss, and checksums of what it trained on, such as keys and pixels."""

    number: int
    loss: float
    records: int
    pixels: int


Steps = dict[int, Step]
COMPARED = ("records", "pixels")


def report(number: int, loss: Any, keys: Any, images: Any) -> None:
    """Prints a step for `watch`."""
    records, pixels = (zlib.crc32(np.ascontiguousarray(part).tobytes()) for part in (keys, images))
    print(REPORT, json.dumps(Step(number, float(loss), records, pixels)), flush=True)


def watch(
    title: str, processes: Sequence[list[str]], num_steps: int, kill_at: int | None = None, flags: str = ""
) -> tuple[Steps, list[str]]:
    """Runs this very script in one or several processes, and shows their progress.

    Args:
        title: what to call the run.
        processes: the arguments of each process, besides those of this one. The first one reports.
        num_steps: how many steps the run has.
        kill_at: the step at which all processes are killed, None to let them end.
        flags: for XLA.

    Returns:
        What the first process reported, and what else it printed.
    """
    steps: Steps = {}
    words = []
    with tempfile.TemporaryFile("w+") as log, tqdm(total=num_steps, desc=title, unit=" steps", disable=None) as bar:
        group = [
            subprocess.Popen(  # noqa: S603  (runs this very script)
                [sys.executable, *sys.argv, *own],
                stdin=subprocess.PIPE,  # See `_end_with_parent`.
                stdout=log if number else subprocess.PIPE,
                stderr=log,
                pipesize=4096,  # With a small pipe a run cannot get far ahead of what has been read here.
                text=True,
                # Not on a GPU: there XLA chooses its kernels by timing them, and two processes may differ in a bit.
                env={**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, ENDS_WITH_PARENT: "1"},
            )
            for number, own in enumerate(processes)
        ]
        try:
            for line in group[0].stdout or ():
                said, is_report, reported = line.partition(REPORT)
                if not is_report:
                    words.append(said)
                    continue
                step = Step(*json.loads(reported))
                steps[step.number] = step
                bar.update(step.number + 1 - bar.n)
                if step.number == kill_at:
                    _kill(group)
            if group[0].wait():
                _kill(group)  # The others would wait for it.
        except BaseException:
            _kill(group)
            raise
        statuses = [process.wait() for process in group]
        if set(statuses) != {0 if kill_at is None else -signal.SIGKILL}:
            log.seek(0)
            sys.exit(f"{title}: exit statuses {statuses} after {len(steps)} steps.\n{log.read()[-4000:]}")
    return steps, words


def watch_hosts(
    title: str, process_count: int, device_count: int, *, checkpoints: str, num_steps: int, kill_at: int | None = None
) -> Steps:
    """Runs this very script in processes that make up one JAX job, and returns what the first one reported.

    Args:
        title: what to call the run.
        process_count: how many processes, which stand for hosts.
        device_count: how many simulated devices they have in all.
        checkpoints: the folder for checkpoints.
        num_steps: how many steps the run has.
        kill_at: the step at which all processes are killed, None to let them end.
    """
    with socket.socket() as held:
        # JAX's server may share the port; nobody else is given it before the run is over.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        held.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{held.getsockname()[1]}"
        common = [f"--checkpoints={checkpoints}", f"--address={address}", f"--process_count={process_count}"]
        group = [[*common, f"--process={process}"] for process in range(process_count)]
        flags = f"--xla_force_host_platform_device_count={device_count // process_count}"
        return watch(title, group, num_steps, kill_at, flags)[0]


def _kill(group: list["subprocess.Popen[str]"]) -> None:
    for process in group:
        process.kill()


def differences(expected: Steps, *runs: Steps, tolerance: float = 0) -> list[str]:
    """Returns, in words, where the runs together differ from the expected one; nothing if they do not.

    Args:
        expected: the steps of the undisturbed run.
        runs: those of the others.
        tolerance: by which part a loss may differ.
    """
    reported = [step for run in runs for step in run.values()]
    wrong = [step for step in reported if not _same(step, expected.get(step.number), tolerance)]
    missing = expected.keys() - {step.number for step in reported}
    return [f"expected {expected.get(step.number)}, got {step}" for step in wrong] + [
        f"expected {expected[number]}, got nothing" for number in sorted(missing)
    ]


def _same(step: Step, expected: Step | None, tolerance: float) -> bool:
    if expected is None or step._replace(loss=0) != expected._replace(loss=0):
        return False
    return math.isclose(step.loss, expected.loss, rel_tol=tolerance)


def conclude(
    whole: Steps, killed: Steps, resumed: Steps, tolerance: float = 0, compared: tuple[str, str] = COMPARED
) -> None:
    """Prints that the interrupted training equals the undisturbed one, or exits with an error that says where not."""
    if found := differences(whole, killed, resumed, tolerance=tolerance):
        sys.exit("\n".join(["\nFAILED: B and C together are not the same as A.", *found]))
    apart = max(abs(step.loss - whole[step.number].loss) for run in (killed, resumed) for step in run.values())
    losses = f"losses within {apart:.1g}" if apart else "losses to the last bit"
    print(f"\nAll {len(whole)} steps of B and C are those of A: the same {', '.join(compared)}, and {losses}.")


def show(
    whole: Steps, killed: Steps, resumed: Steps, killed_where: str = "", compared: tuple[str, str] = COMPARED
) -> None:
    """Prints the steps around the checkpoint, around the kill and at the end, side by side."""
    first, last = min(resumed, default=len(whole)), max(killed)
    print(f"\n  step   loss of A      loss of B      loss of C      {'  '.join(compared)}")
    shown = [number for number in whole if min(abs(number - first), abs(number - last)) <= 2 or number == max(whole)]
    for previous, number in itertools.pairwise([shown[0] - 1, *shown]):
        if number > previous + 1:
            print("   ...")
        steps = [run.get(number) for run in (whole, killed, resumed)]
        losses = "  ".join(f"{step.loss:<13.9g}" if step else " " * 13 for step in steps)
        same = ["same" if len({step[i] for step in steps if step}) == 1 else "DIFFER" for i in (2, 3)]
        event = "<- C resumes from the checkpoint  " if number == first else ""
        event += f"<- B is killed{killed_where}" if number == last else ""
        print(f"  {number:4}   {losses}  {same[0]:{len(compared[0])}}  {same[1]:{len(compared[1])}}  {event}".rstrip())


def killed_where(killed: Steps, batch_size: int, num_records: int) -> str:
    """Returns in words how far the killed run has come."""
    epoch, offset = divmod((max(killed) + 1) * batch_size, num_records)
    return f", {offset} images into epoch {epoch}"


def plot_runs(path: Path, title: str, whole: Steps, killed: Steps, resumed: Steps) -> None:
    """Plots the losses of the three runs: B and C, as far as they go, lie on A."""
    runs = {"A, undisturbed": whole, "B, killed": killed, "C, resumed": resumed}
    plot(path, title, {name: {n: step.loss for n, step in run.items()} for name, run in runs.items()}, yscale="log")


def plot(path: Path, title: str, curves: dict[str, dict[int, float]], **axes: Any) -> None:
    """Writes a picture of up to three curves, each thinner than those it may lie on, and says where."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (takes long to import: only for those who plot)

    figure = Figure(figsize=(8, 4), layout="constrained")
    panel = figure.subplots()
    styles = [("lightgray", 4.0), ("tab:red", 1.0), ("tab:blue", 0.5)][-len(curves) :]
    for (name, losses), (color, width) in zip(curves.items(), styles, strict=True):
        panel.plot(list(losses), list(losses.values()), label=name, color=color, linewidth=width)
    panel.set(**{"xlabel": "step", "ylabel": "loss", "title": title, **axes})
    panel.legend()
    figure.savefig(path)
    print(f"The losses are plotted in {os.path.relpath(path)}.")
