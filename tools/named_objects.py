"""Objects of user modules that an argument of a command names."""

import contextlib
import importlib
import os
import sys
from collections.abc import Callable
from typing import Any


def load_callable(name: str, argument: str) -> Callable[..., Any]:
    """Imports a function or loader, `module:name`, also from the current folder.

    Args:
        name: the module, a colon, and the name in the module.
        argument: the argument and its form, for errors.

    Raises:
        ValueError: it does not exist, or is neither a function nor a loader.
    """
    module, colon, attribute = name.partition(":")
    if not (module and colon and attribute):
        raise ValueError(f"{argument}, got {name!r}.")
    if "" not in sys.path and os.getcwd() not in sys.path:  # noqa: PTH109
        sys.path.insert(0, os.getcwd())  # noqa: PTH109
    found: Callable[..., Any] | None = None
    with contextlib.suppress(ModuleNotFoundError):
        found = getattr(importlib.import_module(module), attribute, None)
    if found is None or not callable(found):
        raise ValueError(f"{argument}, but {name!r} cannot be imported or is not a function.")
    return found
