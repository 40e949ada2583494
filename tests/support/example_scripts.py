"""The examples as modules, to be looked at by tests."""

import contextlib
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from absl.testing import flagsaver

EXAMPLES = Path(__file__).parents[2] / "examples"


@contextlib.contextmanager
def loaded(name: str) -> Iterator[ModuleType]:
    """Gives an example as a module, its functions not yet called; the flags that it defines are gone in the end."""
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    with flagsaver.flagsaver():
        specification.loader.exec_module(module)
        yield module
