"""The folders at the root are one package: setup.cfg maps all of them, and the tests import what it installs."""

import configparser
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import millstream

ROOT = Path(__file__).parents[1]


def setup_options() -> configparser.SectionProxy:
    """Returns the section of setup.cfg that maps folders to packages."""
    configuration = configparser.ConfigParser()
    configuration.read_string((ROOT / "setup.cfg").read_text())
    return configuration["options"]


def test_every_folder_with_code_is_mapped_to_its_package() -> None:
    """Each root folder that is a package is installed under its import name, and nothing else is."""
    folders = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    names = {folder: "millstream" if folder == "millstream" else f"millstream.{folder}" for folder in folders}
    rooms = {f"{names[folder]}.{path.parts[-2]}" for folder in folders for path in ROOT.glob(f"{folder}/*/__init__.py")}
    options = setup_options()
    mapped = dict(line.split(" = ") for line in options["package_dir"].split("\n") if line)

    assert {folder: name for name, folder in mapped.items()} == names
    assert options["packages"].split() == sorted({*names.values(), *rooms})


@pytest.mark.parametrize("program", ["-c", "-"])
def test_processes_of_tests_import_the_installed_package(program: str) -> None:
    """A test and the processes that it starts import the same millstream, and not the one in the checkout."""
    code = "import millstream; print(millstream.__file__)"
    arguments, text = (["-c", code], "") if program == "-c" else (["-"], code)
    done = subprocess.run([sys.executable, *arguments], input=text, capture_output=True, text=True, check=True)

    assert done.stdout.strip() == millstream.__file__
    assert Path(millstream.__file__).parent != ROOT / "millstream"


def test_pyproject_and_the_package_have_the_same_version() -> None:
    """The version in pyproject.toml is `millstream.__version__`."""
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == millstream.__version__


def test_types_are_shipped() -> None:
    """The marker that tells type checkers to read millstream's annotations is in the package and is installed."""
    assert (ROOT / "millstream" / "py.typed").exists()
    assert "millstream = py.typed" in (ROOT / "setup.cfg").read_text()
