"""Prints the lowest versions that pyproject.toml declares, of what the library and its sources need, for pip.

Its other requirements, such as the tools of the tests, are printed as they are declared.
"""

import re
import tomllib
from pathlib import Path

EXTRAS = (
    "all",
    "bagz",
    "cache",
    "hdf5",
    "huggingface",
    "json",
    "lance",
    "parquet",
    "remote",
    "tfrecord",
    "top",
    "zarr",
)
"""The extras of sources. Those for Ray, Keras and the examples would bring newer versions of the others."""

NOT_LOWEST = ("ray", "simplejpeg")


def main() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lowest = {
        re.sub(r">=", "==", requirement)
        for requirement in (*project["dependencies"], *(each for extra in EXTRAS for each in extras[extra]))
    }
    names = {name_of(requirement) for requirement in lowest}
    tools = [each for each in extras["test"] if name_of(each) not in {*names, "ray", "millstream"}]
    print(*sorted(lowest), *tools, sep="\n")  # noqa: T201  (what it is for)


def name_of(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement)[0]


main()
