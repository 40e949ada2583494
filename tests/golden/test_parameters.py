"""The parameters of all public names in release 0.2.0, stored as a file: every later release has them.

`python tests/golden/test_parameters.py` writes the file. After the release, only additions may change it.
"""

import enum
import importlib
import inspect
import json
from pathlib import Path

STORED = Path(__file__).with_name("parameters.json")


def public_parameters() -> dict[str, str]:
    """Returns the names of the parameters of every public class and function, and of the members of enums."""
    parts = ["", ".dataset", ".loader", ".samplers", ".sources", ".tools", ".transforms"]
    found = {}
    for module in (importlib.import_module(f"millstream{part}") for part in parts):
        for name in module.__all__:
            value = getattr(module, name)
            key = f"{module.__name__}.{name}"
            if inspect.isclass(value) and issubclass(value, enum.Enum):
                # The parameters of its constructor are those of the version of Python.
                found[key] = ", ".join(value.__members__)
            elif inspect.isfunction(value) or (inspect.isclass(value) and not issubclass(value, Exception)):
                found[key] = ", ".join(inspect.signature(value).parameters)
    return found


def test_public_names_keep_their_parameters() -> None:
    """Each stored name exists and has its stored parameters. Names and parameters may have been added."""
    today = public_parameters()

    for name, parameters in json.loads(STORED.read_text()).items():
        assert name in today
        assert {*parameters.split(", ")} <= {*today[name].split(", "), ""}, name


if __name__ == "__main__":
    STORED.write_text(json.dumps(public_parameters(), indent=2) + "\n")
