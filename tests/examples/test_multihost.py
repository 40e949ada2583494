"""The example of several hosts does what it promises."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from support.documents.example_scripts import EXAMPLES

pytestmark = pytest.mark.third_party

EXAMPLE = EXAMPLES / "multihost.py"


def test_four_processes_killed_and_resumed_as_two_are_four_undisturbed(tmp_path: Path) -> None:
    """One command shows it, draws the losses, clears the checkpoints away and leaves nothing else."""
    command = [sys.executable, str(EXAMPLE), f"--output={tmp_path}", "--steps=40", "--checkpoint_every=5"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 40 steps of B and C are those of A: the same records, pixels" in done.stdout
    assert "<- C resumes from the checkpoint" in done.stdout
    assert "<- B is killed" in done.stdout
    assert "DIFFER" not in done.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits", "multihost.png"]
    with Image.open(tmp_path / "multihost.png") as plot:
        assert len(np.unique(np.asarray(plot.convert("L")))) > 2
