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
from example_scripts import EXAMPLES, loaded
from PIL import Image

pytestmark = pytest.mark.third_party


def start(command: list[str]) -> subprocess.Popen[str]:
    """Starts an example, whose lines can be read as soon as they are printed."""
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def run_until(command: list[str], beginning: str) -> list[str]:
    """Runs an example, kills it when it prints a line with this beginning, and returns all lines that it printed."""
    lines: list[str] = []
    with start(command) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith(beginning):
                process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL, lines
    return lines


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
    killed = run_until(command, "step 50:")

    with start(command) as process:
        output, errors = process.communicate()
    assert process.returncode == 0, output + errors
    assert errors == ""
    first, *lines = output.splitlines(keepends=True)
    assert re.fullmatch(r"Resumes from the checkpoint of step (20|40)\.\n", first)
    (step_50,) = (line for line in lines if line.startswith("step 50:"))
    assert step_50 in killed
    assert re.search(learned, output)

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
