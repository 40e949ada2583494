"""The training loops that people copy learn, and resume after being killed as if nothing had happened."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from support.documents.example_scripts import EXAMPLES, loaded

pytestmark = pytest.mark.third_party


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs an example to its end."""
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | variables
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


CUSTOMS = """
import os, signal, sys

class Deadly:
    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name):
        return getattr(self._stream, name)

    def write(self, text):
        self._stream.write(text)
        if text.startswith({beginning!r}):
            self._stream.write("\\n")
            self._stream.flush()
            os.kill(os.getpid(), signal.SIGKILL)

sys.stdout = Deadly(sys.stdout)
"""
"""Python runs this first, in every interpreter that is started with its folder on the path."""


def run_until(command: list[str], beginning: str, folder: Path) -> list[str]:
    """Runs an example that is killed when it has printed a line with this beginning, and returns all lines.

    Who kills it on reading the line may come too late.
    """
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(CUSTOMS.format(beginning=beginning))
    done = run(command, PYTHONPATH=str(folder))
    assert done.returncode == -signal.SIGKILL, done.stdout + done.stderr
    return done.stdout.splitlines(keepends=True)


@pytest.mark.parametrize(
    ("script", "report_flag", "learned"),
    [
        ("train_flax_nnx.py", "--report_every=10", r"step 80: .* 2\d\d of 300 held-out digits right\n"),
        ("byte_language_model.py", "--report_every=10", r"The model writes:\n\n[\s\S]{200}"),
    ],
)
def test_a_killed_run_goes_on_with_the_losses_that_would_have_come(
    script: str, report_flag: str, learned: str, tmp_path: Path
) -> None:
    """The same command after a SIGKILL repeats the steps since the checkpoint bit for bit, and continues to the end."""
    command = [sys.executable, str(EXAMPLES / script), f"--output={tmp_path}"]
    command += ["--steps=80", "--checkpoint_every=20", report_flag]
    # By then the checkpoint of step 20 is whole, since that of step 40 has waited for it.
    killed = run_until(command, "step 50:", tmp_path / "customs")

    done = run(command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    first, *lines = done.stdout.splitlines(keepends=True)
    assert re.fullmatch(r"Resumes from the checkpoint of step (20|40)\.\n", first)
    (step_50,) = (line for line in lines if line.startswith("step 50:"))
    assert step_50 in killed
    assert re.search(learned, done.stdout)

    losses = json.loads((tmp_path / "checkpoints" / "80" / "losses" / "metadata").read_text())
    assert len(losses) == 80
    assert np.mean(losses[-10:]) < 0.7 * np.mean(losses[:10])
    with Image.open(tmp_path / "loss.png") as plot:
        plot.load()
        assert plot.format == "PNG"


@pytest.fixture(scope="module")
def byte_language_model() -> Iterator[ModuleType]:
    """Returns the script as a module."""
    with loaded("byte_language_model") as module:
        yield module


def test_pages_hold_python_s_texts_and_windows_their_bytes(byte_language_model: ModuleType) -> None:
    """Licence, manual and docstrings are there; windows are equally long, and leave out less than one of each page."""
    length, pages = byte_language_model.WINDOW_BYTES, byte_language_model.pages()
    text = b"".join(pages)
    assert len(text) > 1_000_000
    for expected in (b'The "assert" statement', b"Return a shallow copy", b"PYTHON SOFTWARE FOUNDATION LICENSE"):
        assert expected in text
    for page in pages[:100]:
        windows = byte_language_model.windows(page)
        assert {window.shape for window in windows} <= {(length,)}
        assert b"".join(window.tobytes() for window in windows) == page[: len(windows) * length]
        assert len(page) - len(windows) * length < length
