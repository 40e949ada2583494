"""The examples that people copy run, learn, and resume as if nothing had happened: killed, or on fewer processes."""

import concurrent.futures
import contextlib
import functools
import importlib.util
import itertools
import json
import math
import os
import re
import subprocess
import sys
import types
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from pydoc_data.topics import topics
from types import ModuleType
from typing import Any

import jax.numpy as jnp
import numpy as np
import psutil
import pytest
from absl import logging
from PIL import Image

from support.processes.worker_pools import still_there

pytestmark = [pytest.mark.third_party, pytest.mark.slow]

EXAMPLES = Path(__file__).parents[2] / "examples"
STEP = re.compile(r"step (\d+): (?:loss )?([\d.e+-]+)(?:, batch (\w+)| bits per byte)?(?:, [a-z]+ [\d.]+)*\n")


@contextlib.contextmanager
def loaded(name: str, folder: Path = EXAMPLES) -> Iterator[ModuleType]:
    """Gives an example as a module, its functions not yet called. It finds the others, as when it is run."""
    specification = importlib.util.spec_from_file_location(name, folder / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        specification.loader.exec_module(module)
        yield module


def launched(example: ModuleType, *options: str, lose: Callable[[str], object] = bool) -> tuple[list[str], object]:
    """Returns the lines that the processes of an example print, and how it ends that has started them.

    The example itself runs in a thread of this process, which has imported its libraries.

    Args:
        example: starts processes of itself in `main`.
        *options: those of its command line.
        lose: is called with each line.
    """
    reader, writer = os.pipe()
    with (
        open(reader) as printed,  # noqa: PTH123  (a descriptor)
        pytest.MonkeyPatch.context() as patch,
        concurrent.futures.ThreadPoolExecutor(1) as thread,
    ):
        starting = functools.partial(subprocess.Popen, stdout=writer)
        patch.setattr(example, "subprocess", types.SimpleNamespace(Popen=starting))
        patch.setattr(sys, "argv", [str(example.__file__), *options])
        ended = thread.submit(example.main)
        ended.add_done_callback(lambda _: os.close(writer))
        lines = []
        for line in printed:
            lines.append(line)
            lose(line)
        return lines, ended.exception()


def steps_in(lines: list[str]) -> tuple[dict[int, tuple[str, str]], int]:
    """Returns the loss and the batch of each step that a training reported, and the step that it resumed at or 0."""
    steps = {int(step[1]): (step[2], step[3]) for line in lines if (step := STEP.fullmatch(line))}
    resumed = re.search(r"^Resumes from the checkpoint of step (\d+)\.$", "".join(lines), re.MULTILINE)
    return steps, int(resumed[1]) if resumed else 0


def run(example: str, *options: str) -> "subprocess.CompletedProcess[str]":
    """Returns the outcome of an example."""
    return subprocess.run(
        [sys.executable, str(EXAMPLES / example), *options], capture_output=True, text=True, timeout=500, check=False
    )


class TrainingStopped(Exception):  # noqa: N818  (no error)
    """Ends a training at a line that it prints."""


def train(example: ModuleType, *options: str, until: str = "") -> list[str]:
    """Returns the lines that an example prints in this process, which has imported its libraries.

    With `until`, an exception ends it when it prints a line that begins so.
    """
    lines = []

    def report(line: str, **_: Any) -> None:
        lines.append(f"{line}\n")
        if until and line.startswith(until):
            raise TrainingStopped

    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(TrainingStopped):
        patch.setattr(example, "print", report, raising=False)
        patch.setattr(logging, "set_verbosity", lambda _: None)  # It would stay for the tests that follow.
        patch.setattr(sys, "argv", [str(example.__file__), *options])
        example.main()
    return lines


@pytest.mark.parametrize(
    ("name", "options", "every", "learned"),
    [
        ("train_flax_nnx", ["--epochs=2"], 10, r"epoch 1: 2\d\d of 300 held-out digits right\n"),
        ("byte_language_model", ["--steps=12", "--report_every=3"], 3, r"The model writes:\n\n[\s\S]{200}"),
    ],
)
def test_an_interrupted_run_continues_with_the_losses_that_would_have_come(
    name: str, options: list[str], every: int, learned: str, tmp_path: Path
) -> None:
    """The same command after an error yields the same losses since the checkpoint, to the last digit, and learns."""
    options = [*options, f"--checkpoint_every={every}", f"--output={tmp_path}"]
    with loaded(name) as example:
        if name == "byte_language_model":
            example.documents = topics.values  # type: ignore[attr-defined]  # Python's library takes a second to read.
        interrupted, _ = steps_in(train(example, *options, until=f"step {3 * every}:"))
        lines = train(example, *options)
    resumed, resumed_at = steps_in(lines)

    # The checkpoint of a step comes after its report.
    assert resumed_at == 2 * every
    again = interrupted.keys() & resumed.keys()
    assert again == {3 * every}
    assert all(interrupted[step] == resumed[step] for step in again)
    assert re.search(learned, "".join(lines))
    assert float(resumed[4 * every][0]) < 0.9 * float(interrupted[every][0])


def test_pages_hold_python_s_texts_and_windows_their_bytes() -> None:
    """Licence, manual and docstrings are there; windows are equally long, and leave out less than one of each page."""
    with loaded("byte_language_model") as example:
        length, pages = example.WINDOW_BYTES, example.pages()
    text = b"".join(pages)
    assert len(text) > 1_000_000
    for expected in (b'The "assert" statement', b"Return a shallow copy", b"PYTHON SOFTWARE FOUNDATION LICENSE"):
        assert expected in text
    for page in pages[:100]:
        windows = example.windows(page)
        assert {window.shape for window in windows} <= {(length,)}
        assert b"".join(window.tobytes() for window in windows) == page[: len(windows) * length]
        assert len(page) - len(windows) * length < length


def test_no_example_needs_another_file() -> None:
    """Each imports installed packages only, and its first lines name what to install and how to run it."""
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    for path in EXAMPLES.glob("*.py"):
        text = path.read_text()
        imported = set(re.findall(r"^\s*(?:from|import) (\w+)", text, re.MULTILINE))
        assert imported & names == set(), path.name
        assert re.search(r"^    pip install '?millstream", text[:1000], re.MULTILINE), path.name
        assert f"    python {path.name}" in text[:1000]


def test_the_demonstration_succeeds_and_leaves_its_records_and_a_position(tmp_path: Path) -> None:
    """A state that was saved with workers resumes without them; the chain, its operations and its time are shown."""
    done = run("text_chain.py", f"--output={tmp_path}", "--steps=8")

    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "all 16 batches are those of an undisturbed run" in done.stdout
    assert "  .map(Tokenizer(4096 words))\n  .shuffle(seed=42)\n" in done.stdout
    assert "Batch(batch_size=32, drop_remainder=True)\n    ['tokens']: int32 (32, 128)" in done.stdout
    assert "Two worker processes: first batch after" in done.stdout
    assert {path.name for path in tmp_path.iterdir()} == {
        "paragraphs.array_record",
        "position.json",
        "undisturbed.json",
    }


def test_packed_rows_hold_every_paragraph_and_nothing_else(tmp_path: Path) -> None:
    """Decoded, the segments of all hosts' rows are the paragraphs, each trimmed to a row."""
    with loaded("text_chain") as example:
        known = list(itertools.islice(example.paragraphs(), 200))
        path = tmp_path / "paragraphs.array_record"
        example.write_records(path, (json.dumps(paragraph).encode() for paragraph in known))
        tokenizer = example.Tokenizer(paragraph["text"] for paragraph in known)
        parts = [tokenizer.parts(paragraph["text"])[: example.ROW_LENGTH] for paragraph in known]
        found: set[str] = set()
        for host in range(2):
            with iter(example.training_dataset(path, tokenizer, host, 2)) as batches:
                count = 0
                while count < 300:  # Three times its share of an epoch.
                    batch = next(batches)
                    for tokens, segments in zip(batch["tokens"], batch["tokens_segment_ids"], strict=True):
                        found |= {tokenizer.decode(tokens[segments == n]) for n in range(1, segments.max() + 1)}
                        count += int(segments.max())

    assert found == {"".join(part) for part in parts}


def test_the_demonstration_succeeds_and_leaves_only_its_records_and_a_plot(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B, killed in mid-epoch, and C, resumed from B's checkpoint, are A; checkpoints are cleared away."""
    monkeypatch.setattr(logging, "set_verbosity", lambda _: None)  # It would stay for the tests that follow.
    options = [f"--output={tmp_path}", "--steps=80", "--checkpoint_every=20", "--kill_at=50"]
    with loaded("train_digits") as example:
        monkeypatch.setattr(sys, "argv", [str(example.__file__), *options])
        example.main()
    printed, reported = capfd.readouterr()
    assert "All 80 steps of B and C are those of A" in printed
    assert "<- C resumes from the checkpoint" in printed
    assert "<- B is killed" in printed
    assert "DIFFER" not in printed
    accuracy = re.search(r"held-out digits: ([0-9.]+)%", printed)
    assert accuracy is not None
    assert float(accuracy[1]) > 80
    assert reported == ""
    assert {path.name for path in tmp_path.iterdir()} == {"digits", "train_digits.png"}
    with Image.open(tmp_path / "train_digits.png") as plot:
        plot.load()
        assert plot.format == "PNG"


def assert_resumes(
    example: ModuleType, batches: dict[int, str], options: list[str], output: Path, lost_at: int
) -> None:
    """Loses one of two processes and stops the other, resumes with one: the batches and losses are those expected.

    The losses are those of the lost run from the checkpoint on, because the batches are.
    """

    def lose_one(line: str) -> None:
        if line.startswith(f"step {lost_at}:"):
            for index in (1, 0):
                (lost,) = processes_with(f"--process={index}", f"--output={output}")
                lost.kill()
                assert still_there([lost.pid]) == []

    options = [*options, f"--output={output}"]
    lines, error = launched(example, *options, "--processes=2", lose=lose_one)
    assert str(error) == "A process has failed."
    killed, _ = steps_in(lines)
    lines, error = launched(example, *options, "--processes=1")
    assert error is None
    resumed, resumed_at = steps_in(lines)
    again = killed.keys() & resumed.keys()

    assert 0 < resumed_at < lost_at
    assert {number: batch for number, (_, batch) in [*killed.items(), *resumed.items()]} == batches
    assert lost_at in again
    for number in again:
        assert killed[number][1] == resumed[number][1]
        assert math.isclose(float(killed[number][0]), float(resumed[number][0]), rel_tol=1e-3)


def processes_with(*words: str) -> list[psutil.Process]:
    """Returns the processes of this machine whose command has all of some words."""
    found = psutil.process_iter(["cmdline"])
    return [process for process in found if {*words} <= {*(process.info["cmdline"] or ())}]


def checksums(loader: Iterable[Any], name: str, steps: range) -> dict[int, str]:
    """Returns the checksums of one leaf of the batches before some steps, as the examples report them."""
    batches = enumerate(itertools.islice(loader, steps.stop - 1), 1)
    return {step: f"{zlib.crc32(batch[name].tobytes()):08x}" for step, batch in batches if step in steps}


def test_images_resume_on_fewer_processes(tmp_path: Path) -> None:
    """One process resumes with the batches of two, one of which was lost: they are those of a single device."""
    with loaded("multihost") as example:
        batches = checksums(example.training_loader(), "image", range(10, 21, 10))
        assert_resumes(example, batches, ["--steps=20", "--checkpoint_every=3"], tmp_path, 10)


def test_rows_of_text_resume_on_fewer_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One process resumes with the batches of two, of a mixture whose weights change meanwhile.

    The text is short, and the model small: three processes compile it.
    """
    tokens, text = tmp_path / "tokens", (EXAMPLES / "pretrain_text.py").read_text()
    for size, small in (("ROW_LENGTH = 512", "ROW_LENGTH = 64"), ("LAYERS = 64, 4, 2", "LAYERS = 16, 2, 1")):
        assert size in text
        text = text.replace(size, small)
    (tmp_path / "pretrain_text.py").write_text(text)
    with loaded("pretrain_text", tmp_path) as example:
        for corpus in (example.code, example.prose):
            monkeypatch.setattr(example, corpus.__name__, functools.partial(itertools.islice, corpus(), 100))
        example.write_tokens(tokens)
        batches = checksums(example.training_loader(tokens, 6), "tokens", range(1, 7))
        assert_resumes(example, batches, ["--steps=6", "--checkpoint_every=2"], tmp_path, 5)


def test_a_token_is_predicted_from_those_before_it_in_its_own_document() -> None:
    """Other tokens of its document that come later, and other documents in the row, change nothing."""
    with loaded("pretrain_text") as example:
        length = example.ROW_LENGTH
        nnx, model = example.nnx, example.Transformer(example.nnx.Rngs(0))
    ends = [200, 350, length]
    packed = {
        "tokens_segment_ids": np.repeat([1, 2, 0], np.diff([0, *ends])),
        "tokens_positions": np.concatenate([np.arange(count) for count in np.diff([0, *ends])]),
    }
    tokens = np.random.default_rng(0).integers(0, example.VOCABULARY, length)

    compiled = nnx.jit(lambda model, batch: model(batch))

    def logits(tokens: np.ndarray) -> np.ndarray:
        batch = {name: jnp.asarray(leaf[None]) for name, leaf in {**packed, "tokens": tokens}.items()}
        return np.asarray(compiled(model, batch)[0])

    changed = tokens.copy()
    changed[[5, 300]] ^= 1
    is_other = (logits(changed) != logits(tokens)).any(axis=1)
    assert is_other[5:200].any()
    assert is_other[300:350].any()
    assert not is_other[:5].any()
    assert not is_other[200:300].any()
    assert not is_other[350:].any()
