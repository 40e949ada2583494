"""Runs a program that imports Grain on millstream: `python -m millstream.as_grain train.py --steps=100`."""

import os
import runpy
import sys
from collections.abc import Sequence

from millstream.grain_imports import install_as_grain


def run(arguments: Sequence[str]) -> None:
    """Runs a script, or `-m MODULE`, as Python does, with `grain` served by millstream.

    Raises:
        SystemExit: there is no script to run, or the script exits.
    """
    if not arguments or arguments[0] in {"-h", "--help"} or list(arguments) == ["-m"]:
        print("usage: python -m millstream.as_grain SCRIPT [ARGS…] | -m MODULE [ARGS…]", file=sys.stderr)  # noqa: T201
        raise SystemExit(0 if arguments and arguments[0] != "-m" else 2)
    install_as_grain()
    if arguments[0] == "-m":
        sys.argv = list(arguments[1:])
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = list(arguments)
        sys.path.insert(0, os.path.dirname(os.path.abspath(arguments[0])))  # noqa: PTH100, PTH120
        runpy.run_path(arguments[0], run_name="__main__")


if __name__ == "__main__":
    run(sys.argv[1:])
