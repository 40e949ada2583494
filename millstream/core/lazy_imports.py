"""Names of a package whose modules are imported on first access (PEP 562).

Most programs read one format in one order. Without the modules of the others, `import millstream` takes half as long,
also in every worker process.
"""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType


def hooks(
    package: str, modules: Mapping[str, str], remedies: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Returns the `__getattr__` and the `__dir__` of a package, given the module of each late name.

    `remedies` has what to write instead of names that it does not have. Completion in a notebook offers the names in
    the package's `__all__`.
    """

    def get_late_name(name: str) -> object:
        if name not in modules:
            remedy = f". {remedies[name]}" if name in remedies else ""
            missing = f"module {package!r} has no attribute {name!r}{remedy}"
            # Given both, Python's traceback suggests a public name that is spelled alike.
            raise AttributeError(missing, name=name, obj=sys.modules[package])
        value = getattr(import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    def public_names() -> list[str]:
        return list(sys.modules[package].__all__)

    return get_late_name, public_names
