"""The folders at the root are one package: setup.cfg maps all of them, and the tests import what it installs."""

import configparser
import http.server
import json
import re
import runpy
import threading
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]  # it comes with mkdocs, without types

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


WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_the_workflow_runs_the_gate_on_every_supported_python() -> None:
    """The versions of the classifiers are those of the workflow, which runs the gate, and tries other systems."""
    workflow = (ROOT / ".github/workflows/checks.yml").read_text()
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    versions = [entry.rpartition(" ")[2] for entry in classifiers if re.search(r"Python :: 3\.", entry)]

    assert f"python: {json.dumps(versions)}" in workflow
    assert "run: .ci/run\n" in workflow
    assert {*re.findall(r"runs-on: (\S+)", workflow)} == {"ubuntu-latest", "ubuntu-24.04-arm", "macos-latest"}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_run_what_exists_by_pinned_actions_with_few_rights(workflow: Path) -> None:
    """Files and targets exist; each action is pinned by a commit; a job has a limit of time, and rights of its own."""
    text = workflow.read_text()
    parsed = yaml.safe_load(text)
    steps = [step for job in parsed["jobs"].values() for step in job["steps"]]
    commands = [word for step in steps for word in re.findall(r"^make (.*)", step.get("run", ""))]

    assert {word for line in commands for word in line.split() if "=" not in word} <= TARGETS
    assert [path for path in re.findall(r"tests/[\w/.]+", text) if not (ROOT / path).exists()] == []
    assert [
        step["uses"] for step in steps if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", step.get("uses", f"a@{0:040}"))
    ] == []
    assert parsed["permissions"] == {"contents": "read"}
    needed = [need for job in parsed["jobs"].values() for need in job.get("needs", [])]
    assert {*needed} <= parsed["jobs"].keys()
    assert [name for name, job in parsed["jobs"].items() if "timeout-minutes" not in job] == ["publish"] * (
        workflow.stem == "checks"
    )


def test_the_table_of_what_is_supported_has_the_versions_of_the_metadata() -> None:
    """The page of guarantees names the Python versions of the classifiers."""
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    versions = [entry.rpartition(" ")[2] for entry in classifiers if re.search(r"Python :: 3\.", entry)]
    assert f"| Python | {', '.join(versions)} |" in (ROOT / "docs/guarantees.md").read_text()


def test_a_link_is_missing_only_if_its_server_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`make links` fails for a page that is not there, and lists what refuses programs or does not answer."""
    check_links = runpy.run_path(str(ROOT / "docs/programs/check_links.py"))

    class Pages(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response({"/here": 200, "/refused": 403}.get(self.path, 404))
            self.end_headers()

        def log_message(self, *_arguments: Any) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        base = f"http://127.0.0.1:{server.server_address[1]}"
        document = tmp_path / "page.md"
        document.write_text(f"[a]({base}/here#part) [b]({base}/gone) [c]({base}/refused) [d]({base}/here) [e](here.md)")
        missing = check_links["main"]([document])
        server.shutdown()
        thread.join()
    lines = capsys.readouterr().out.splitlines()

    assert missing == 1
    assert [line.partition(": ")[2].partition(":")[0] for line in lines[:-1]] == ["missing", "not checked"]
    assert lines[-1] == "3 addresses, 1 missing"


def test_types_are_shipped() -> None:
    """The marker that tells type checkers to read millstream's annotations is in the package and is installed."""
    assert (ROOT / "millstream" / "py.typed").exists()
    assert "millstream = py.typed" in (ROOT / "setup.cfg").read_text()


def test_a_release_names_the_repository_that_builds_it(tmp_path: Path) -> None:
    """The metadata get the addresses of a repository, and each link of the README leads to a file of it."""
    program = runpy.run_path(str(ROOT / "docs/programs/name_repository.py"))
    for name in ("pyproject.toml", "README.md"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    program["main"](tmp_path, "https://github.com/Owner/name/", "v1.2.3")
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    links = re.findall(r"\]\(([^)#][^)]*)\)", (tmp_path / "README.md").read_text())

    assert "urls" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["urls"] == {
        "Source": "https://github.com/Owner/name",
        "Documentation": "https://owner.github.io/name/",
        "Changelog": "https://github.com/Owner/name/blob/main/CHANGELOG.md",
        "Issues": "https://github.com/Owner/name/issues",
    }
    kinds = [re.match(r"https://github\.com/Owner/name/(?:blob|raw)/v1\.2\.3/([^#]+)", link) for link in links]
    assert len(links) > 30
    assert [
        link for link, kind in zip(links, kinds, strict=True) if kind is None or not (ROOT / kind[1]).exists()
    ] == []
    assert "/raw/v1.2.3/docs/pictures/speed.svg" in " ".join(links)
