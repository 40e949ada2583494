"""Names of a package whose modules are imported when they are first asked for (PEP 562).

Most programs read one format and follow one order. `import millstream`, which every worker process pays for too, takes
half as long without the modules of the others.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module


def hooks(package: str, modules: Mapping[str, str]) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Returns the `__getattr__` and the `__dir__` of a package.

    Args:
        package: its name. Its `__all__` is what completion in a notebook offers.
        modules: for each late name, the module that has it.
    """

    def get_late_name(name: str) -> object:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def public_names() -> list[str]:
        return list(sys.modules[package].__all__)

    return get_late_name, public_names
