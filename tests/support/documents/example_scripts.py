"""The examples as modules, to be looked at by tests, and as programs, to be killed by them."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parents[3] / "examples"


@contextlib.contextmanager
def loaded(name: str) -> Iterator[ModuleType]:
    """Gives an example as a module, its functions not yet called. It finds the others, as when it is run."""
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.path.insert(0, str(EXAMPLES))
    try:
        specification.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(EXAMPLES))


def lines_of(command: list[str], is_last: Callable[[str], object] | None = None) -> list[str]:
    """Returns the lines that a program prints until it ends, or until it and all that it started are killed at one."""
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            for line in process.stdout or ():
                lines.append(line)
                if is_last is not None and is_last(line):
                    break
        finally:
            if is_last is not None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == (0 if is_last is None else -signal.SIGKILL)
    return lines
