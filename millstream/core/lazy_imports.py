"""Names of a package whose modules are imported on first access (PEP 562).

Most programs read one format in one order. Without the modules of the others, `import millstream` takes half as long,
also in every worker process.
"""

import ast
import functools
import opcode
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from types import FrameType, MappingProxyType, ModuleType
from typing import Any, NoReturn


def hooks(
    package: str, remedies: Mapping[str, str] = MappingProxyType({})
) -> tuple[Callable[[str], object], Callable[[], list[str]]]:
    """Returns the `__getattr__` and the `__dir__` of a package: its late names are those it imports for type checkers.

    `remedies` has what to write instead of names that it does not have. Completion in a notebook offers the names in
    the package's `__all__`.
    """

    def get_late_name(name: str) -> object:
        home = late_names(package).get(name)
        if home is None:
            raise_missing(sys.modules[package], name, remedies, sys._getframe(1))  # noqa: SLF001  (as `warnings` does)
        module, own_name = home
        value = import_module(f"{module}.{own_name}") if module == package else getattr(import_module(module), own_name)
        setattr(sys.modules[package], name, value)
        return value

    def public_names() -> list[str]:
        return list(sys.modules[package].__all__)

    return get_late_name, public_names


def raise_missing(
    module: ModuleType, name: str, remedies: Mapping[str, str], caller: FrameType, note: str = ""
) -> NoReturn:
    """Raises the AttributeError for a name that a module does not have, with what to write instead, if it is known.

    In `from module import name`, Python would replace its text. If there is a remedy, it is an ImportError there. The
    name is looked up by the frame `caller`; the text has `note` after the module.
    """
    is_import = caller.f_code.co_code[caller.f_lasti] == opcode.opmap["IMPORT_FROM"]
    if name in remedies and is_import:
        raise ImportError(f"cannot import name {name!r} from {module.__name__!r}. {remedies[name]}", name=name)
    remedy = f". {remedies[name]}" if name in remedies else ""
    # Given both, Python's traceback suggests a public name that is spelled alike.
    raise AttributeError(f"module {module.__name__!r}{note} has no attribute {name!r}{remedy}", name=name, obj=module)


@functools.cache
def late_names(package: str) -> dict[str, tuple[str, str]]:
    """Returns the module of each name that a package imports under `if TYPE_CHECKING`, and the name there.

    They are read from its source, on first access to one of them, so that they are written once.

    Raises:
        ImportError: there is no source.
    """
    loader: Any = getattr(find_spec(package), "loader", None)
    if (source := loader.get_source(package)) is None:
        raise ImportError(f"Cannot find the names in {package!r} without its source. Ship its .py files, too.")
    blocks = [node for node in ast.parse(source).body if isinstance(node, ast.If)]
    return {
        alias.asname or alias.name: (statement.module or "", alias.name)
        for block in blocks
        if isinstance(block.test, ast.Name) and block.test.id == "TYPE_CHECKING"
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    }
