"""The examples in docstrings: each public name has one, and each gives what is shown beneath it."""

import doctest
import functools
import importlib
import inspect
import shutil
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream
from support.files.docstring_files import write_docstring_files

MODULES = ["", ".checkpoint", ".dataset", ".experimental", ".keras", ".loader", ".samplers", ".sources", ".tools"]
MODULES += [".transforms"]
GIVEN = {"millstream": millstream, "np": np}
"""The names that the examples use without an import."""
SKIPPED = {"FileCache": "reads a bucket"}
"""The names with an example of which a line is compiled and not run, and the reason."""


def public_names() -> Iterator[tuple[str, Any]]:
    """Yields each public class and function once, by the shortest of its names."""
    seen: set[int] = set()
    for part in MODULES:
        module = importlib.import_module(f"millstream{part}")
        for name in module.__all__:
            value = getattr(module, name)
            is_documented = callable(value) and not isinstance(value, types.ModuleType | types.GenericAlias)
            if is_documented and id(value) not in seen:
                seen.add(id(value))
                yield f"millstream{part}.{name}", value


NAMES = dict(public_names())


def examples_of(name: str) -> list[doctest.DocTest]:
    """Returns the examples of a public name: those of its own docstring first, then those of its methods."""
    value = NAMES[name]
    found = doctest.DocTestFinder(exclude_empty=False).find(value, name, module=False, globs=dict(GIVEN))
    return sorted(found, key=lambda some: some.name != name)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that examples read, written once."""
    folder = tmp_path_factory.mktemp("files")
    write_docstring_files(folder)
    return folder


@pytest.mark.third_party
@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_has_an_example_that_is_true(
    name: str, files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The docstring has an example; in a folder with some files, it gives what is shown."""
    shutil.copytree(files, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    found = examples_of(name)
    shown: list[str] = []
    for some in found:
        doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(some, out=shown.append)

    assert found[0].name == name
    assert found[0].examples
    assert shown == []


@pytest.mark.third_party
def test_every_public_method_is_documented() -> None:
    """A public class of millstream documents its public methods and properties, itself or in a base class."""
    undocumented = [
        f"{name}.{member}"
        for name, value in NAMES.items()
        if inspect.isclass(value)
        for base in value.__mro__
        if base.__module__.startswith("millstream")
        for member, found in vars(base).items()
        if not member.startswith("_")
        and (inspect.isroutine(found) or isinstance(found, property | functools.cached_property))
        and not inspect.getdoc(getattr(value, member))
    ]
    assert undocumented == []


def test_what_is_not_run_is_listed() -> None:
    """No example is skipped without a reason, and what is skipped is Python all the same."""
    skipped = [
        (name.rsplit(".", 1)[1], one.source)
        for name in NAMES
        for some in examples_of(name)
        for one in some.examples
        if one.options.get(doctest.SKIP)
    ]
    for name, source in skipped:
        compile(source, name, "single")

    assert {name for name, _ in skipped} == set(SKIPPED)
