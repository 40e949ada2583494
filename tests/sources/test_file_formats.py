"""The table of formats: those of installed packages, and the readers of paths that use it."""

import json
import os
import shutil
import subprocess
import sys
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
    }
    for name, text in files.items():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_text(text)
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


EXAMPLE = Path(__file__).parents[2] / "examples/format_package"
READS = """
import millstream
from millstream.testing import check_source

if __name__ == "__main__":
    import framed_records
    framed_records.write("a.framed", [str(number).encode() for number in range(50)])
    check_source(framed_records.FORMAT.open("a.framed"))
    for workers in (0, 1):
        loader = millstream.load("*.framed", num_epochs=1, batch_size=25, worker_count=workers)
        print([int(batch[0]) for batch in loader])
"""


def test_the_package_of_the_page_is_built_installed_and_read(tmp_path: Path) -> None:
    """The files of the page *A format of your own* are those of the example, and are all that a package needs."""
    pytest.importorskip("setuptools", minversion="77", reason="pip install 'setuptools>=77'")
    page = (EXAMPLE.parents[1] / "docs/your-own-source-and-sampler.md").read_text()
    for name in ("framed_records.py", "pyproject.toml"):
        assert (EXAMPLE / name).read_text() in page
    shutil.copytree(EXAMPLE, tmp_path / "package")
    options = ["--quiet", "--no-index", "--no-deps", "--no-build-isolation", "--target", str(tmp_path / "target")]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, str(tmp_path / "package")], check=True)
    (tmp_path / "program.py").write_text(READS)
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "target")}

    def run(*arguments: str) -> str:
        command = [sys.executable, *arguments]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout

    assert run("program.py").splitlines() == ["[0, 25]"] * 2
    assert "framed, read by" in run("-m", "millstream", "inspect", "a.framed")


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
