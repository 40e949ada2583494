"""The training loops that people copy learn, and resume after being killed as if nothing had happened."""

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support.documents.example_scripts import EXAMPLES, loaded

pytestmark = pytest.mark.third_party

LINE = re.compile(r"step (\d+): (?:loss )?([\d.e+-]+)( bits per byte)?\n")


def run(command: list[str], kill_at: int | None = None) -> tuple[dict[int, str], str]:
    """Runs a program until it ends or has reported a step; returns its losses as text, and its other lines."""
    losses, others = {}, ""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout or ():
            if step := LINE.fullmatch(line):
                losses[int(step[1])] = step[2]
            else:
                others += line
            if kill_at in losses:
                process.kill()
                break
    assert process.returncode == (0 if kill_at is None else -signal.SIGKILL)
    return losses, others


@pytest.mark.parametrize(
    ("script", "options", "learned"),
    [
        ("train_flax_nnx.py", ["--epochs=4"], r"epoch 3: 2\d\d of 300 held-out digits right\n"),
        ("byte_language_model.py", ["--steps=90", "--report_every=10"], r"The model writes:\n\n[\s\S]{200}"),
    ],
)
def test_a_killed_run_continues_with_the_losses_that_would_have_come(
    script: str, options: list[str], learned: str, tmp_path: Path
) -> None:
    """The same command after a SIGKILL yields the same losses since the checkpoint, to the last digit, and learns."""
    command = [sys.executable, str(EXAMPLES / script), *options, "--checkpoint_every=20", f"--output={tmp_path}"]
    # By then the checkpoint of step 20 is complete, because that of step 40 has waited for it.
    killed, _ = run(command, kill_at=50)
    resumed, rest = run(command)

    assert re.match(r"Resumes from the checkpoint of step (20|40)\.\n", rest)
    assert killed.keys() & resumed.keys() >= {50}
    assert all(killed[step] == resumed[step] for step in killed.keys() & resumed.keys())
    assert re.search(learned, rest)
    assert float(resumed[90]) < 0.8 * float(killed[10])


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
