"""The table of formats: those of installed packages, and the readers of paths that use it."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream

ENTRY_POINTS = """
[millstream.formats]
fours = fours_reader:FORMAT
broken = fours_reader:MISSING
text = fours_reader:FORMAT
other-name = fours_reader:FORMAT
"""

MODULE = '''
"""Numbers of four bytes, after eight bytes that tell the format."""
import numpy as np
import millstream

class Fours(millstream.SpanFormat):
    index_kind = "fours"

    def offsets(self, scan):
        yield np.arange(8, scan.size + 1, 4)

    def decode(self, spans, request):
        return [int.from_bytes(span, "little") for span in spans]

FORMAT = millstream.FileFormat(
    "fours", (".fours.bin", ".fours"), "fours_reader:Fours", lambda path, start: start[:8] == b"FOURFOUR"
)
'''

PROGRAM = """
import logging, json, sys
import millstream

if __name__ == "__main__":
    logging.basicConfig(filename="log.txt")
    found = {
        path: [int(batch.sum()) for batch in millstream.load(path, num_epochs=1, batch_size=4, worker_count=workers)]
        for path, workers in (("a.fours", 1), ("*.fours", 0), ("a.fours.bin", 0), ("unnamed", 0), ("a.fours[2:4]", 0))
    }
    mixed = millstream.load({"a": "a.fours", "b": [0]}, weights=[0.5, 0.5], batch_size=2)
    found["mixed"] = sorted(next(iter(mixed)).tolist())
    (path,) = millstream.convert("a.fours", "a.bag", encode="json", worker_count=0)
    found["converted"] = millstream.BagzDataSource(path)[1].decode()
    print(json.dumps(found))
"""


def test_a_format_of_an_installed_package_is_read_by_its_path(tmp_path: Path) -> None:
    """`load`, `convert` and the commands find it by name and content, also in workers; wrong entry points are logged.

    The longest extension wins, so a package may claim `.fours.bin`. The names of the formats here stay theirs.
    """
    target, info = tmp_path / "target", "fours_reader-1.0.dist-info"
    files = {
        "fours_reader.py": MODULE,
        f"{info}/entry_points.txt": ENTRY_POINTS,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: fours-reader\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(wheel := tmp_path / "fours_reader-1.0-py3-none-any.whl", "w") as package:
        for name, text in files.items():
            package.writestr(name, text)
        package.writestr(f"{info}/RECORD", "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD")))
    options = ["--quiet", "--no-index", "--no-deps", "--target", str(target)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(wheel)], check=True)
    content = b"FOURFOUR" + np.arange(1, 6, dtype="<u4").tobytes()
    for name in ("a.fours", "a.fours.bin", "unnamed"):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "program.py").write_text(PROGRAM)

    def run(*arguments: str) -> str:
        environment = os.environ | {"PYTHONPATH": str(target)}
        done = subprocess.run(
            [sys.executable, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
        )
        return done.stdout

    sums = [10, 5]
    assert json.loads(run("program.py")) == {
        **dict.fromkeys(["a.fours", "*.fours", "a.fours.bin", "unnamed"], sums),
        "a.fours[2:4]": [7],
        "mixed": [0, 1],
        "converted": "2",
    }
    log = (tmp_path / "log.txt").read_text()
    assert "'broken' of 'fours_reader:MISSING' cannot be imported" in log
    assert "'other-name' must be a FileFormat of that name" in log
    assert "fours, read by fours_reader.Fours" in run("-m", "millstream", "inspect", "unnamed")
    assert "fours: 5 records in 1 file, indexed" in run("-m", "millstream", "index", "a.fours")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "Fours"}, r"^name must be lower-case letters, digits, _, - and \., got 'Fours'\.$"),
        ({"extensions": ".fours"}, r"^extensions must be a tuple of lower-case ends such as '\.x', got '\.fours'\.$"),
        ({"extensions": ("fours",)}, "extensions must be"),
        ({"extensions": (".Fours",)}, "extensions must be"),
        ({"extensions": 5}, r"^extensions must be a tuple of lower-case ends such as '\.x', got 5\.$"),
        ({"source": "fours_reader"}, r"^source must be a class, or its place, 'module:name', got 'fours_reader'\.$"),
        ({"begins": b"FOUR"}, r"^begins must be a function, or its place, 'module:name', got b'FOUR'\.$"),
    ],
)
def test_arguments_of_a_format_are_checked(arguments: dict[str, Any], message: str) -> None:
    """A value that cannot be the name, an extension, the class or the function is refused at construction."""
    valid: dict[str, Any] = {"name": "fours", "extensions": (".fours",), "source": "fours_reader:Fours"}
    with pytest.raises((TypeError, ValueError), match=message):
        millstream.FileFormat(**valid | arguments)
