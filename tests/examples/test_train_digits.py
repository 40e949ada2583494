"""The main example does what it promises."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from support.documents.example_scripts import EXAMPLES

pytestmark = pytest.mark.third_party

EXAMPLE = EXAMPLES / "train_digits.py"


def test_the_demonstration_succeeds_and_leaves_only_its_records_and_a_plot(tmp_path: Path) -> None:
    """B, killed in mid-epoch, and C, resumed from B's checkpoint, are A; checkpoints are cleared away."""
    command = [sys.executable, str(EXAMPLE), f"--output={tmp_path}"]
    flags = ["--steps=400", "--checkpoint_every=10", "--kill_at=75"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 400 steps of B and C are those of A" in done.stdout
    assert "<- C resumes from the checkpoint" in done.stdout
    assert "<- B is killed" in done.stdout
    assert "DIFFER" not in done.stdout
    accuracy = re.search(r"held-out digits: ([0-9.]+)%", done.stdout)
    assert accuracy is not None
    assert float(accuracy[1]) > 80
    assert done.stderr == ""
    assert {path.name for path in tmp_path.iterdir()} == {"digits", "train_digits.png"}
    with Image.open(tmp_path / "train_digits.png") as plot:
        plot.load()
        assert plot.format == "PNG"
