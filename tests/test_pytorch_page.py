"""The page for programs that train with PyTorch: its blocks run as one program, where the libraries are installed."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "pytorch.md"


@pytest.mark.third_party
def test_the_page_runs(tmp_path: Path) -> None:
    """Its asserts hold: states of every library resume exactly, also with another number of workers."""
    for library in ("torch", "torchdata", "lightning", "accelerate"):
        pytest.importorskip(library, reason=f"{library} is not a dependency: pip install {library}")
    program = "\n".join(re.findall(r"^```py\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )

    assert program.count("assert ") == 3
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == "10"
