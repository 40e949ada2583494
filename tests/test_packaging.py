"""The folders at the root are one package: the map in setup.cfg is whole."""

import configparser
import tomllib
from pathlib import Path

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


def test_the_version_is_written_once_in_each_place() -> None:
    """pyproject.toml and the package agree on the version."""
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == millstream.__version__


def test_types_are_shipped() -> None:
    """The marker that tells type checkers to read millstream's annotations is in the package and is installed."""
    assert (ROOT / "millstream" / "py.typed").exists()
    assert "millstream = py.typed" in (ROOT / "setup.cfg").read_text()
