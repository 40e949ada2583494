"""Runs the command line in processes of its own."""

import subprocess
import sys
from pathlib import Path
from typing import Any

COMMAND = [sys.executable, "-m", "millstream"]


def run(*arguments: Any, folder: Path, status: int = 0, **options: Any) -> tuple[str, str]:
    """Returns what a command prints and what it reports, started in a folder; its exit status must be as given."""
    done = subprocess.run(
        [*COMMAND, *map(str, arguments)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        **options,
    )
    assert (done.returncode, "Traceback" in done.stderr) == (status, False), done.stderr
    return done.stdout, done.stderr
