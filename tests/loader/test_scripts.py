"""Definitions of a script, a notebook or a module made at run time work with workers as it does inline."""

import json
from pathlib import Path
from typing import Any

import pytest

from support.processes.worker_pools import python

NOTEBOOK = """
import sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(startup_timeout=120)
client.execute_interactive(sys.stdin.read(), timeout=120)
client.stop_channels()
manager.shutdown_kernel(now=True)
"""
SCRIPT = Path(__file__).parents[1] / "support" / "processes" / "script_of_all_kinds.py"

WAYS: dict[str, list[str]] = {
    "a script": [str(SCRIPT)],
    "standard input": ["-"],
    "a notebook": ["-c", NOTEBOOK],
    "an interactive session": ["-i", "-q", "-c", "import __main__, sys; exec(sys.stdin.read(), vars(__main__))"],
    "exec": ["-c", "import sys; exec(sys.stdin.read(), {'__name__': 'cell'})"],
    "exec without a name": ["-c", "import sys; exec(sys.stdin.read(), {})"],
    "runpy": ["-c", f"import runpy; runpy.run_path({str(SCRIPT)!r})"],
    "a module made at run time": [
        "-c",
        f"""
import importlib.util, sys
spec = importlib.util.spec_from_file_location('made', {str(SCRIPT)!r})
sys.modules['made'] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
""",
    ],
    "a child of multiprocessing": [
        "-c",
        f"import runpy; runpy.run_path({str(SCRIPT)!r}, run_name='__mp_main__')",
    ],
}
"""Ways to run the same code: arguments of Python, which has the code as standard input as well."""


def differences(inline: dict[str, Any], with_a_worker: dict[str, Any]) -> dict[str, Any]:
    """Returns what differs, both sides of it."""
    return {
        name: (value, with_a_worker.get(name)) for name, value in inline.items() if with_a_worker.get(name) != value
    }


@pytest.mark.parametrize("way", WAYS)
def test_what_a_script_defines_works_with_workers_as_it_does_inline(way: str, tmp_path: Path) -> None:
    """Functions, caches, classes and their instances of every kind, used by operations and as elements, both ways.

    A script needs no main guard, and files of the current folder do not interfere with its workers.
    """
    if way == "a script":
        for name in ("cloudpickle", "json", "numpy", "socket"):
            (tmp_path / f"{name}.py").write_text("raise ImportError('a file of the current folder')")
    done = python(*WAYS[way], input=SCRIPT.read_text(), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert way == "a notebook" or done.stderr.strip(" >\n") == ""
    outcome = json.loads(done.stdout)

    for inline, with_a_worker in zip(*(outcome[mode]["operations"] for mode in outcome), strict=True):
        assert differences(inline, with_a_worker) == {}
        assert not [result for result in inline.values() if "Error:" in result]
    assert differences(*(outcome[mode]["elements"] for mode in outcome)) == {}
    assert all(came_back and was_known for _, came_back, was_known in outcome["inline"]["elements"].values())


def test_the_traceback_of_a_worker_shows_the_lines_of_the_script(tmp_path: Path) -> None:
    """The cause of an error out of a worker names the script's file, and quotes the line that raised it."""
    script = tmp_path / "train.py"
    script.write_text("""
import millstream

def fragile(record):
    raise ValueError("I do not like it.")  # this line

next(iter(millstream.load(range(3), transformations=[fragile], worker_count=1)))
""")
    done = python(str(script))

    assert f'File "{script}", line 5, in fragile\n    raise ValueError("I do not like it.")  # this line' in done.stderr
