"""The folders at the root are one package: setup.cfg maps all of them, and the tests import what it installs."""

import configparser
import json
import re
import tomllib
from pathlib import Path

import pytest

import millstream
from support.processes.worker_pools import python

ROOT = Path(__file__).parents[1]


def test_every_folder_with_code_is_mapped_to_its_package() -> None:
    """Each root folder that is a package is installed under its import name, and nothing else is."""
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    names = {folder: "millstream" if folder == "millstream" else f"millstream.{folder}" for folder in folders}
    rooms = {f"{names[folder]}.{path.parts[-2]}" for folder in folders for path in ROOT.glob(f"{folder}/*/__init__.py")}
    configuration = configparser.ConfigParser()
    configuration.read(ROOT / "setup.cfg")
    options = configuration["options"]
    mapped = dict(line.split(" = ") for line in options["package_dir"].split("\n") if line)

    assert {folder: name for name, folder in mapped.items()} == names
    assert options["packages"].split() == sorted({*names.values(), *rooms})


@pytest.mark.parametrize("program", ["-c", "-"])
def test_processes_of_tests_import_the_installed_package(program: str) -> None:
    """A test and the processes that it starts import the same millstream, and not the one in the checkout."""
    code = "import millstream; print(millstream.__file__)"
    arguments, text = (["-c", code], "") if program == "-c" else (["-"], code)
    done = python(*arguments, input=text, check=True)

    assert done.stdout.strip() == millstream.__file__
    assert Path(millstream.__file__).parent != ROOT / "millstream"


def test_the_version_is_written_once_in_each_place() -> None:
    """pyproject.toml, CITATION.cff, the changelog and the package agree on the version."""
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == millstream.__version__
    assert f"\nversion: {millstream.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{millstream.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


def test_the_workflow_runs_the_gate_on_every_supported_python() -> None:
    """The versions of the classifiers are those of the workflow, which runs files and targets that exist."""
    workflow = (ROOT / ".github/workflows/checks.yml").read_text()
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    versions = [entry.rpartition(" ")[2] for entry in classifiers if re.search(r"Python :: 3\.", entry)]
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

    assert f"python: {json.dumps(versions)}" in workflow
    assert "run: .ci/run\n" in workflow
    assert {target for line in re.findall(r"run: make (.*)", workflow) for target in line.split()} <= targets
    assert [path for path in re.findall(r"tests/[\w/.]+", workflow) if not (ROOT / path).exists()] == []


def test_types_are_shipped() -> None:
    """The marker that tells type checkers to read millstream's annotations is in the package and is installed."""
    assert (ROOT / "millstream" / "py.typed").exists()
    assert "millstream = py.typed" in (ROOT / "setup.cfg").read_text()
