"""Type checkers know the public names: the program beside this file is checked by mypy, and by pyright where it is."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from support.draw.orders import public_samplers

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("typed_program.py")

pytestmark = pytest.mark.slow


def check(*command: str) -> str:
    """Returns what a checker says, run where the installed package is what it finds."""
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=sys.prefix, capture_output=True, text=True, check=False, timeout=500
    )
    return f"{done.stdout.strip().splitlines()[-1]}\n{done.stdout if done.returncode else ''}".strip()


def test_every_public_sampler_is_in_the_program() -> None:
    """The types of each class of samplers are checked."""
    assert [name for name in public_samplers() if f"millstream.{name}(" not in PROGRAM.read_text()] == []


def test_mypy_agrees() -> None:
    """Mypy --strict finds each type that the program asserts, and each error that it marks."""
    pytest.importorskip("mypy", reason="`make` installs it; the tests alone do not need it")
    said = check("mypy", "--config-file", str(ROOT / "pyproject.toml"), str(PROGRAM))

    assert said == "Success: no issues found in 1 source file"


@pytest.mark.skipif(importlib.util.find_spec("basedpyright") is None, reason="pip install 'millstream[pyright]'")
def test_pyright_agrees() -> None:
    """So does pyright, which is what editors show."""
    said = check("basedpyright", "--project", str(ROOT / "pyproject.toml"), "--pythonpath", sys.executable)

    assert said == "0 errors, 0 warnings, 0 notes"
