"""The examples as modules, to be looked at by tests."""

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
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
