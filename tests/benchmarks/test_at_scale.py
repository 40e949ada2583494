"""What docs/scale.md says was measured, all of it, and can be measured again."""

import json
import subprocess
import sys
from pathlib import Path

from suite.at_scale_page import page

ROOT = Path(__file__).parents[2]


def test_the_page_is_what_was_measured() -> None:
    """Nobody has changed a number by hand: the page is made of the results that lie beside the benchmarks."""
    measured = json.loads((ROOT / "benchmarks" / "results" / "scale.json").read_text())
    assert (ROOT / "docs" / "scale.md").read_text() == page(measured)


def test_it_measures_and_hosts_have_their_parts_of_the_order(tmp_path: Path) -> None:
    """With a few hosts: each host's keys are those of the order, before and after a resume, or the script fails."""
    found = tmp_path / "scale.json"
    subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "at_scale.py", f"--output={found}"],
        cwd=tmp_path,
        check=True,
        timeout=500,
    )
    measured = json.loads(found.read_text())
    assert measured["checkpoints"][-1]["hosts"] == 4
    assert measured["packing"][-1]["documents"] == 10_000
    assert "4 hosts and 1,000,000,000 records" in page(measured)
