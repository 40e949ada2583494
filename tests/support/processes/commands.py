"""Runs the command line, in this process or in one of its own."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path
from typing import Any

from millstream.tools.command_line import main

COMMAND = [sys.executable, "-m", "millstream"]


def run_here(*arguments: Any, folder: Path, status: int = 0) -> tuple[str, str]:
    """Returns what a command prints and what it reports, run in this process with another working folder.

    It need not wait for an interpreter to start. What it imports from the folder is forgotten at the end. Warnings, and
    workers that import from the folder, need `run`.
    """
    printed, reported = io.StringIO(), io.StringIO()
    paths, modules = sys.path[:], set(sys.modules)
    with contextlib.chdir(folder), contextlib.redirect_stdout(printed), contextlib.redirect_stderr(reported):
        try:
            ended: Any = main([*map(str, arguments)])
        except SystemExit as error:
            ended = error.code or 0
        finally:
            sys.path[:] = paths
            for name in sys.modules.keys() - modules:
                if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
                    del sys.modules[name]
    assert ended == status, reported.getvalue()
    return printed.getvalue(), reported.getvalue()


def run(*arguments: Any, folder: Path, status: int = 0, **options: Any) -> tuple[str, str]:
    """Returns the same of a process of its own."""
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
