"""Pages of the site that are made from files outside of docs/: a hook for mkdocs, named in `mkdocs.yml`.

Every document is written once, where readers of the repository look for it. Here it gets its page, and links between
documents become links between pages. The reference is built from the docstrings of all public names, a page per group.
"""

import functools
import importlib
import inspect
import os
import pkgutil
import posixpath
import re
import sys
import sysconfig
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(Path(__file__).parent))  # A hook is not in a package.
os.environ.setdefault("KERAS_BACKEND", "jax")  # The reference imports millstream.keras.
import drawn_graphs  # noqa: E402
from library_members import FOR_THE_LIBRARY  # noqa: E402

DOCUMENTS = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "CODE_OF_CONDUCT.md": "code-of-conduct.md",
    "SECURITY.md": "security-policy.md",
    "loader/README.md": "how-the-loader-works.md",
    "loader/pipeline/README.md": "stages-and-groups.md",
    "loader/processes/README.md": "worker-processes.md",
    "loader/transport/README.md": "transport.md",
    "benchmarks/README.md": "how-it-is-measured.md",
    "benchmarks/results/latest.md": "benchmarks.md",
}
"""The page of each document outside of docs/."""

FILES = ["LICENSE"]
"""Files that documents link to and that are not pages."""

PARTS = {
    "loader": "Loaders, iterators and diagnostics.",
    "dataset": "Pipelines as method chains. `millstream.experimental` has the names that Grain has there.",
    "samplers": "The order of the records.",
    "sources": "Records with random access, one class per format.",
    "transforms": "Operations on elements.",
    "sharding": "The rows of every global batch that a process reads.",
    "checkpoint": "Positions in Orbax checkpoints.",
    "tools": "Functions for the work around training.",
    "errors": "Exceptions.",
    "keras": "Training data of Keras. It needs `import millstream.keras` and an installed Keras.",
    "grain_imports": "Grain's import names, for programs that import it.",
}
"""The groups of the reference, each with its subject."""

GIVEN = "Examples assume `import millstream`, `import numpy as np`, and a few small files."
"""The note at the top of each page of the reference."""

OF_BASES = {"profile", "summary", "metrics", "trace", "preview", "report", "serve_top", "start_prefetch", "close"}
OF_BASES |= {"state_dict", "load_state_dict"}
OF_BASES |= {"length", "record_keys", "record_keys_at", "files", "locate", "unit_sizes"}
OF_BASES |= {"steps_of", "composition", "pipe", "skip", "reweight"}
"""Members for users that public classes inherit from private bases."""

RETURNED = {
    "loader": [
        "lineage.Composition",
        "lineage.ComponentCount",
        "lineage.RecordLocation",
        "reporting.summary.Summary",
        "reporting.advice.Advice",
        "reporting.preview.Trace",
        "reporting.preview.Preview",
    ]
}
"""Classes without a public name whose instances public functions return: the last entries of a group's page."""

MADE_BY_THE_LIBRARY = {"DataLoaderIterator", "DeviceIterator", "StackError"}
"""Classes that users do not construct: the reference leaves out their constructors."""

UNMADE = "      merge_init_into_class: false\n"
"""The mkdocstrings option that leaves out a constructor."""

LINK = re.compile(r"(\]\()(?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?(\))")
BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FENCE_WITH_NOTE = re.compile(r"^(```\w+) [^\n]*")
"""A note for the tests, as in `text numbers vary`, which the site would not accept."""


@event_priority(100)  # Before mkdocstrings looks.
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Makes mkdocstrings read the installed package: in the repository, its folders are apart (see setup.cfg)."""
    handlers: dict[str, dict[str, Any]] = config.plugins["mkdocstrings"].config.handlers
    handlers["python"]["paths"] = [sysconfig.get_path("purelib")]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for document, page in DOCUMENTS.items():
        files.append(File.generated(config, page, content=(ROOT / document).read_text()))
    for example in sorted(ROOT.glob("examples/*.py")):
        page = page_of(f"examples/{example.name}")
        files.append(File.generated(config, page, content=example_page(example)))
    for path in FILES:
        files.append(File.generated(config, posixpath.basename(path), abs_src_path=str(ROOT / path)))
    for part, about in PARTS.items():
        files.append(File.generated(config, f"reference/{part}.md", content=reference_page(part, about)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Turns links between documents into links between pages, and removes notes for the tests from code blocks."""
    source = document_of(page.file.src_uri)
    if source is None:
        return markdown

    def linked(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), link[2]))
        there = page_of(target)
        if files.get_file_from_path(there) is None:
            raise PluginError(f"{source} links to {link[2]}, which has no page: name it in {Path(__file__).name}.")
        return link[1] + posixpath.relpath(there, posixpath.dirname(page.file.src_uri)) + (link[3] or "") + link[4]

    markdown = drawn_graphs.BLOCK.sub(drawn_graphs.drawn, markdown)
    pieces, end = [], 0
    for block in BLOCK.finditer(markdown):
        pieces += [LINK.sub(linked, markdown[end : block.start()]), FENCE_WITH_NOTE.sub(r"\1", block[0], count=1)]
        end = block.end()
    return "".join([*pieces, LINK.sub(linked, markdown[end:])])


def page_of(path: str) -> str:
    """Returns the page, or the file, of the site that shows a file of the repository."""
    if path in DOCUMENTS:
        return DOCUMENTS[path]
    if path.startswith("examples/") and path.endswith(".py"):
        return path.removesuffix(".py") + ".md"
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return posixpath.basename(path) if path in FILES else path


def document_of(page: str) -> str | None:
    """Returns the file of the repository that a page shows; None if the page was made here."""
    found = {shown: document for document, shown in DOCUMENTS.items()}.get(page)
    if found is None and (ROOT / "docs" / page).exists():
        found = f"docs/{page}"
    return found


def example_page(example: Path) -> str:
    return f"# {example.name}\n\n```python\n{example.read_text()}```\n"


def reference_page(part: str, about: str) -> str:
    """Returns the page of a group: a table of its public names, then an entry for each."""
    rows, blocks = [], []
    for name, value in sorted(public_names(part).items(), key=lambda item: item[0].lower()):
        # An alias of a foreign object, such as a type, is documented under its own name.
        is_ours = value.__module__.split(".")[0] == "millstream"
        path = f"{value.__module__}.{value.__qualname__}" if is_ours else name
        label = name.rsplit(".", 1)[-1]
        blocks.append(f"::: {path}\n    options:\n      heading: {name}\n      toc_label: {label}\n{members_of(value)}")
        rows.append(f"| [`{label}`][{path}] | {summary_of(value)} |")
    for path in RETURNED.get(part, ()):
        value = pkgutil.resolve_name(f"millstream.{part}.{path}")
        blocks.append(f"::: millstream.{part}.{path}\n    options:\n{members_of(value, is_returned=True)}")
    table = "\n".join(["| name | |", "|---|---|", *rows])
    return "\n".join([f"# millstream.{part}\n\n{about} {GIVEN}\n\n{table}\n", *blocks])


def summary_of(value: Any) -> str:
    """Returns the first sentence of a docstring, as the cell of a table."""
    first = inspect.cleandoc(value.__doc__ or "").partition("\n\n")[0]
    return " ".join(first.split()).replace("|", "\\|")


def members_of(value: Any, *, is_returned: bool = False) -> str:
    """Returns the mkdocstrings options that choose the members of a class, without a constructor if it is returned."""
    if not inspect.isclass(value):
        return ""
    names = {name.removeprefix(f"{value.__name__}.") for name in FOR_THE_LIBRARY}
    hidden = "".join(f", '!^{name}$'" for name in sorted(names) if "." not in name)
    bases = [base for base in value.__mro__[1:] if base.__module__.split(".")[0] == "millstream"]
    inherited = {name for base in bases if not is_public(base) for name in vars(base)} & OF_BASES - {*vars(value)}
    if any(getattr(vars(base).get("__init__"), "__doc__", None) for base in bases if not is_public(base)):
        # Classes that share a constructor share its docstring.
        inherited |= {"__init__"} - {*vars(value)}
    listed = f"      inherited_members: [{', '.join(sorted(inherited))}]\n" if inherited else ""
    unmade = UNMADE if is_returned or value.__name__ in MADE_BY_THE_LIBRARY else ""
    return f"      filters: ['!^_'{hidden}]\n{listed}{unmade}"


def is_public(value: Any) -> bool:
    """Returns True if a class has an entry of its own in the reference."""
    return any(value is public for part in PARTS for public in public_names(part).values())


@functools.cache
def public_names(part: str) -> dict[str, Any]:
    """Returns the public classes and functions of a group, by the shortest name that users can write.

    A name that only `millstream.experimental` has belongs to the group that defines it.
    """
    facade, own = importlib.import_module("millstream"), _listed(part)
    home = {f"millstream.{name}": getattr(facade, name) for name in facade.__all__}
    home = {name: value for name, value in home.items() if part_of(value) == part}
    further = importlib.import_module("millstream.experimental")
    there = {f"{further.__name__}.{name}": getattr(further, name) for name in further.__all__}
    listed = {id(value) for group in PARTS for value in _listed(group).values()}
    there = {name: value for name, value in there.items() if part_of(value) == part and id(value) not in listed}
    names: dict[str, Any] = {}
    shown: set[int] = set()
    for name, value in [*home.items(), *own.items(), *there.items()]:
        if callable(value) and not inspect.ismodule(value) and id(value) not in shown:
            shown.add(id(value))
            names[name] = value
    return names


def _listed(part: str) -> dict[str, Any]:
    """Returns the values in the `__all__` of a group, by name."""
    module = importlib.import_module(f"millstream.{part}")
    return {f"millstream.{part}.{name}": getattr(module, name) for name in getattr(module, "__all__", ())}


def part_of(value: Any) -> str:
    """Returns the group of the reference that a public object belongs to."""
    words = getattr(value, "__module__", "").split(".")
    return {"record": "samplers"}.get(words[1], words[1]) if len(words) > 1 else ""
