"""The documents tell the truth: their code runs, prints what they show, and what they name exists."""

import ast
import builtins
import contextlib
import dataclasses
import functools
import importlib
import inspect
import io
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import figures
import pytest
import yaml  # type: ignore[import-untyped]  # it comes with mkdocs, without types

import millstream
from millstream.loader.threads import waiting
from millstream.loader.workers import retirement
from millstream.sources.files import multi_file
from millstream.sources.remote import object_clients
from millstream.tools import convert_command
from millstream.tools.command_line import parser
from support.documents.document_tables import rows
from support.processes.worker_pools import python

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("loader/**/README.md")])
FOLDERS = ("millstream", "loader", "dataset", "samplers", "sources", "transforms", "tools")
WITH_CODE = [document for document in DOCUMENTS if "```python\n" in document.read_text()]

BLOCK = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?://)([^)#]*)(?:#([^)]*))?\)")


def default_of(parameter: str, called: Any = millstream.DataLoader) -> Any:
    return inspect.signature(called).parameters[parameter].default


def short_name(document: Path) -> str:
    return str(document.relative_to(ROOT))


@dataclasses.dataclass(frozen=True)
class Example:
    """A block of Python in a document.

    Attributes:
        line: the line of the document that the code begins in, from 1.
        code: the block.
        shown: the block of text directly beneath it, which is what it prints; empty if there is none.
        numbers_vary: whether that block begins with "```text numbers vary", since what it shows was measured.
    """

    line: int
    code: str
    shown: str
    numbers_vary: bool = False

    def comparable(self, printed: str) -> str:
        """Returns what counts in `printed`: all of it, or where numbers vary, the words."""
        return " ".join(re.sub(r"[\d.,]+", "0", printed).split()) if self.numbers_vary else printed


def examples_in(document: str) -> list[Example]:
    """Returns the blocks of Python in a document, in order."""
    blocks = list(BLOCK.finditer(document))
    found = []
    for number, block in enumerate(blocks):
        if block[1] != "python":
            continue
        following = blocks[number + 1] if number + 1 < len(blocks) else None
        is_beneath = following is not None and not document[block.end() : following.start()].strip()
        line = document.count("\n", 0, block.start(2)) + 1
        if following is not None and is_beneath and following[1] in ("text", "text numbers vary"):
            found.append(Example(line, block[2], following[2], following[1] != "text"))
        else:
            found.append(Example(line, block[2], ""))
    return found


def run(example: Example, name: str, namespace: dict[str, object]) -> str:
    """Returns what an example prints; a traceback gives the line of the document."""
    code = compile("\n" * (example.line - 1) + example.code, name, "exec")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, namespace)
    return printed.getvalue()


def anchors_in(document: str) -> set[str]:
    """Returns the anchors of a document's headings, as links have them."""
    headings = re.findall(r"^#+ (.*)$", BLOCK.sub("", document), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.third_party
@pytest.mark.parametrize("document", WITH_CODE, ids=short_name)
def test_every_example_runs_and_prints_what_is_shown(
    document: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blocks of a document, run in order as one program in an empty folder, print what stands beneath them."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for example in examples_in(document.read_text()):
        printed = run(example, str(document), namespace)
        expected = example.comparable(example.shown)
        assert f"line {example.line}:\n{expected}" == f"line {example.line}:\n{example.comparable(printed)}"
    # As at the end of a program. Threads at work hold on to the functions of the document, and these to all of it.
    namespace.clear()


def test_where_numbers_vary_the_words_are_compared() -> None:
    """A block that shows something measured fits other values, and no other words."""
    (example,) = examples_in("```python\nmeasure()\n```\n\n```text numbers vary\n 12.5 s  read\n```\n")

    assert example.comparable("0.03 s read\n") == example.comparable(example.shown)
    assert example.comparable("0.03 s write\n") != example.comparable(example.shown)


@pytest.mark.parametrize("document", DOCUMENTS, ids=short_name)
def test_every_link_leads_somewhere(document: Path) -> None:
    """Each link inside the repository leads to a file that is there, and to a heading that is in it."""
    for path, anchor in LINK.findall(BLOCK.sub("", document.read_text())):
        target = document.parent / path if path else document
        assert target.exists(), path
        assert not anchor or anchor in anchors_in(target.read_text()), anchor


@pytest.mark.parametrize("document", DOCUMENTS, ids=short_name)
def test_every_command_is_a_target_of_the_makefile(document: Path) -> None:
    """Each `make …` that a document tells people to run is there to be run."""
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make (\w+)", document.read_text(), re.MULTILINE))

    assert named - targets == set()


PACKAGES = {"PIL": "pillow"}
"""The package of a module, if its name is another one."""


def test_every_page_says_what_its_blocks_need() -> None:
    """The imports of a block come with Python or millstream, or the page says how to install them."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = {
        extra: {re.split(r"[>=\[; ]", requirement)[0] for requirement in requirements}
        for extra, requirements in project["optional-dependencies"].items()
    }
    extras["lance"] |= {"lance", "pyarrow"}  # The module of pylance, and what it needs.
    with_millstream = {re.split(r"[>=; ]", requirement)[0] for requirement in project["dependencies"]}
    known = {*sys.stdlib_module_names, *with_millstream, "millstream", "array_record", "orbax", "absl"}
    for document in WITH_CODE:
        text = document.read_text()
        nodes = [node for example in examples_in(text) for node in ast.walk(ast.parse(example.code))]
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
        modules = {name.partition(".")[0] for name in names} - known
        installed = set(re.findall(r"[\w-]+", " ".join(re.findall(r"pip\s+install\s+([^`]*)`", text))))
        installed |= {package for extra in installed & extras.keys() for package in extras[extra]}

        assert {PACKAGES.get(module, module) for module in modules} - installed == set(), document


def test_every_extra_that_people_are_told_to_install_exists() -> None:
    """`pip install 'millstream[name]'`, in documents and in errors."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    modules = [module for folder in FOLDERS for module in (ROOT / folder).rglob("*.py")]
    named = {
        extra
        for file in [*DOCUMENTS, *modules]
        for several in re.findall(r"millstream\[([\w,]+)\]", file.read_text())
        for extra in several.split(",")
    }

    assert named >= {"all", "ray"}
    assert named <= extras.keys()


@pytest.mark.parametrize("document", DOCUMENTS, ids=short_name)
def test_every_command_of_millstream_that_is_shown_is_taken(document: Path) -> None:
    """Each command line in a document, and in its sentences, is a command with options that it knows."""
    text = document.read_text()
    blocks = [block[2] for block in BLOCK.finditer(text) if block[1] in ("sh", "bash")]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    lines += re.findall(r"`(millstream [a-z]+ [^`]+)`", BLOCK.sub("", text))
    for line in lines:
        if line.startswith("millstream "):
            command, *arguments = shlex.split(re.sub(r"\bPID\b", "1", line), comments=True)
            assert parser().parse_args(arguments), command


@pytest.mark.parametrize("document", figures.TABLES)
def test_the_figures_of_a_page_are_those_that_were_measured(document: str) -> None:
    """The table of a page is what the results make of it."""
    assert figures.MARKED.search((ROOT / document).read_text())
    assert figures.written(document) == (ROOT / document).read_text()


@pytest.mark.parametrize("document", ["README.md", "docs/index.md"])
def test_the_first_pages_have_no_figure_beside_the_table(document: str) -> None:
    """A ratio is in the table, where it has its interval, and in no sentence."""
    assert not re.findall(r"\d[\d.]* times", (ROOT / document).read_text())


@pytest.mark.parametrize(
    ("document", "sentence", "value", "expected"),
    [
        ("guarantees", "waited for 30 s, the log says so", waiting.STALL_WARNING_SECONDS, 30),
        ("guarantees", "exit after a minute without work", retirement.IDLE_SECONDS, 60),
        ("coming-from-pytorch", "`stall_timeout`, 600 s by default", default_of("stall_timeout"), 600),
        ("tuning", "up to 16 threads read ahead", millstream.ReadOptions().num_threads, 16),
        ("tuning", "at most 500 records", millstream.ReadOptions().prefetch_buffer_size, 500),
        ("tuning", "if it begins within a minute", retirement.IDLE_SECONDS, 60),
        ("debugging", "`stall_timeout` seconds, by default ten minutes", default_of("stall_timeout"), 600),
        ("operations", "After `max_errors` of them, by default 1000", default_of("max_errors"), 1000),
        ("deploying", "At most 512 files of a source stay open", multi_file.MAX_OPEN_FILES, 512),
        ("security", "larger than 1 GiB and than 200 times its own size", convert_command.MAX_RATIO, 200),
        (
            "security",
            "`.bagz` file that becomes larger than 1 GiB",
            default_of("max_record_bytes", millstream.BagzDataSource),
            1 << 30,
        ),
        ("command-line", "more than 1 GiB and more than 200 times", convert_command.MAX_RATIO, 200),
        ("remote-data", "there are up to eight attempts", object_clients.ATTEMPTS, 8),
        ("remote-data", "attempts, within two minutes", object_clients.REQUEST_SECONDS, 120),
        ("remote-data", "sends nothing for 20 seconds is given up", object_clients.SILENCE_SECONDS, 20),
    ],
)
def test_default_values_are_those_of_the_documents(document: str, sentence: str, value: float, expected: float) -> None:
    """A number that a document gives as a default is the default."""
    assert sentence in " ".join((ROOT / "docs" / f"{document}.md").read_text().split())
    assert value == expected


CALL = r"operations\[\d+\], [\w.]+\([^)]*\)|[A-Z]\w+\(.*?\)"
NUMBER = r"\d[\d.,]*(?: ?%| ?(?:[kMG]?B|ms|µs|s|bytes)\b)?"
NAME = r"b?'[^']*'?|\"[^\"]*\"|/\S+|millstream\.\w+|\w+=|\w+Error: | in \w+$|python train\.py|data_source|cannot pickle"
VARIES = re.compile(rf"{CALL}|{NUMBER}|{NAME}|…|[░█#]+|-{{3,}}| {{2,}}|\n|[,;:.] |\b(?:is|with|each)\b", re.MULTILINE)
"""The parts of an output that vary: calls, numbers, names. The fixed words of the library are between."""


def samples_on(page: str) -> list[str]:
    """Returns the outputs on a page that no Python block prints, and the messages in its tables of errors and logs."""
    document = ROOT / f"docs/{page}.md"
    text = document.read_text()
    printed = {example.shown for example in examples_in(text)}
    samples = [block[2] for block in BLOCK.finditer(text) if block[1] in ("", "text") and block[2] not in printed]
    cells = [cells[0] for cells in rows(document, ("Logs", "Errors and remedies"))]
    return samples + re.findall(r"`([^`]*)`", " ".join(cells))


def test_the_files_for_clusters_can_be_parsed() -> None:
    """The script for Slurm is one of Bash, and the job for Kubernetes mounts the volumes that it has."""
    blocks = {block[1]: block[2] for block in BLOCK.finditer((ROOT / "docs/deploying.md").read_text())}
    subprocess.run(["bash", "-n"], input=blocks["sh"], text=True, check=True)
    pod = yaml.safe_load(blocks["yaml"])["spec"]["template"]["spec"]

    assert "#SBATCH" in blocks["sh"]
    mounted = [mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]]
    assert mounted == [volume["name"] for volume in pod["volumes"]]


@functools.cache
def texts_of_the_library() -> str:
    """Returns all strings in the code of the library that are no docstrings."""
    nodes = [
        node
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
    ]
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    strings = [node.value for node in nodes if isinstance(node, ast.Constant) and node not in docstrings]
    return "\n".join(" ".join(string.split()) for string in strings if isinstance(string, str))


@pytest.mark.parametrize("page", ["command-line", "debugging", "deploying", "seeing", "tuning"])
def test_samples_of_output_have_the_words_of_the_library(page: str) -> None:
    """The outputs and messages on a page are, between their numbers and names, text of the library."""
    texts = texts_of_the_library()
    words = [piece.strip(" ,;:.()*<-") for sample in samples_on(page) for piece in VARIES.split(sample)]

    assert words
    assert [piece for piece in words if re.search(r"[a-z]{2}", piece) and piece not in texts] == []


def public_members() -> dict[str, list[Any]]:
    """Returns the public functions, classes and methods of the library, by name."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    parts = ["checkpoint", "dataset", "experimental", "keras", "loader", "python", "samplers", "sources"]
    parts += ["testing", "transforms"]
    modules = [millstream, *(importlib.import_module(f"millstream.{part}") for part in parts)]
    classes = {value for module in modules for name in dir(module) if inspect.isclass(value := getattr(module, name))}
    members: dict[str, list[Any]] = {}
    for owner in (*modules, *classes, millstream.config):
        for name in dir(owner):
            if not name.startswith("__"):
                members.setdefault(name, []).append(getattr(owner, name))
    return members


OURS = ("millstream.", "grain.", "loader.", "iterator.", "batches.", "sampler.", "source.", "dataset.", "chain.")
"""The beginnings of calls of the library. A span such as `.map(f)` is a method of a chain."""


def calls_in(document: Path) -> list[ast.Call]:
    """Returns the calls that a document shows without running them: in its sentences, and in blocks of "```py"."""
    text = document.read_text()
    shown = [block[2] for block in BLOCK.finditer(text) if block[1] == "py"]
    sentences = BLOCK.sub("", text)
    if document.name.startswith("coming-from-"):
        sentences = re.sub(
            r"^\|[^|]*\|", "|", sentences, flags=re.MULTILINE
        )  # The first column is the other library's.
    shown += [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", sentences)]
    calls = []
    for code in shown:
        with contextlib.suppress(SyntaxError):
            tree = ast.parse(re.sub(r"^\.", "chain.", code).replace("…", "..."))
            calls += [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return calls


def takes(called: Any, call: ast.Call) -> bool:
    """Returns True if the signature of `called` has the arguments of a call."""
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    positional = [argument for argument in call.args if ast.unparse(argument) != "..."]
    try:
        inspect.signature(called).bind_partial(*positional, **keywords)
    except (TypeError, ValueError):
        return False
    return True


@pytest.mark.third_party
def test_every_call_in_the_documents_is_one_that_the_library_takes() -> None:
    """Calls of public names, and of methods of a loader, iterator, source or chain, exist with their arguments.

    So do the names beside those of another library, in the tables of the pages for its users.
    """
    members = public_members()
    shown: dict[str, bool] = {}
    for call in [call for document in DOCUMENTS for call in calls_in(document)]:
        name = call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")
        if ast.unparse(call).startswith(OURS) or (isinstance(call.func, ast.Name) and name in members):
            shown[ast.unparse(call)] = any(takes(member, call) for member in members.get(name, []))
    wrong = [call for call, is_right in shown.items() if not is_right]
    known = members.keys() | {name for name in dir(builtins) if name[0].isupper()}
    for document in sorted(ROOT.glob("docs/coming-from-*.md")):
        for row in rows(document):
            words = re.findall(r"`[^`]*`", row[1] if len(row) == 2 else "")
            names = {
                name for word in words for name in re.findall(r"(?<!['\w])(?<!jax\.)([A-Z]\w+|(?<=`\.)\w+)\b", word)
            }
            wrong += sorted(names - known)

    assert len(shown) > 150
    assert wrong == []


def test_every_error_of_the_page_of_errors_exists() -> None:
    """Each error that the page begins a row with is one of the library, or a `TypeError` or `ValueError`."""
    page = (ROOT / "docs/debugging.md").read_text()
    errors = set(re.findall(r"^\| `(\w+Error)", page, re.MULTILINE))
    assert errors - {error for error in dir(millstream) if error.endswith("Error")} == {"TypeError", "ValueError"}


@pytest.mark.third_party
def test_the_page_runs(tmp_path: Path) -> None:
    """Its asserts hold: states of every library resume exactly, also with another number of workers."""
    for library in ("torch", "torchdata", "lightning", "accelerate"):
        pytest.importorskip(library, reason=f"{library} is not a dependency: pip install {library}")
    program = "\n".join(
        re.findall(r"^```py\n(.*?)^```$", (ROOT / "docs/keras-and-pytorch.md").read_text(), re.MULTILINE | re.DOTALL)
    )
    ended = python("-W", "ignore", "-c", program, cwd=tmp_path, env={**os.environ, "JAX_PLATFORMS": "cpu"})

    assert program.count("assert ") == 3
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines()[0] == "10"
