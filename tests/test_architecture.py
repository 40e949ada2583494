"""The layering holds: who imports whom, read from the source of every module, imports inside functions too.

Relative and bare imports are found by ruff, whose rules are in pyproject.toml.
"""

import ast
import functools
import graphlib
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
CORE = "millstream"
PARTS = {"dataset", "loader", "samplers", "sources", "tools", "transforms"}
ROOMS: dict[str, dict[str, set[str]]] = {
    "loader": {
        "checkpoints": {"pipeline"},
        "pipeline": set(),
        "scheduling": {"pipeline"},
        "measuring": {"pipeline"},
        "threads": {"pipeline"},
        "transport": {"pipeline"},
        "workers": {"pipeline", "measuring", "threads", "transport"},
        "processes": {"pipeline", "measuring", "threads", "transport", "workers"},
        "cluster": {"pipeline", "measuring", "threads", "transport", "workers"},
        "engine": {
            *("pipeline", "scheduling", "measuring", "threads", "transport", "workers", "processes", "cluster"),
        },
        "monitoring": {"measuring", "processes", "reporting", "threads"},
        "replicas": {
            "checkpoints",
            "measuring",
            "engine",
            "pipeline",
            "processes",
            "scheduling",
            "threads",
            "transport",
        },
        "reporting": {"engine", "measuring", "pipeline", "threads"},
    },
    "dataset": {"nodes": {"step"}},
    "sources": {
        "remote": {"reads"},
        "files": {"remote", "base", "digests", "keyed_pool", "pieces"},
        "arrow": {"base", "pieces", "reads", "source_checks"},
        "formats": {
            *("arrow", "files", "remote", "base", "digests", "file_formats", "keyed_pool", "memory", "pieces", "reads"),
            *("shared_units", "source_checks"),
        },
    },
    "samplers": {
        "mixtures": {"base", "index", "order", "permutation"},
        "rows": {"base", "hierarchical", "order", "permutation"},
    },
    "transforms": {"packing": {"base", "grouping"}, "batching": {"base", "grouping", "packing"}},
}
"""The rooms of the parts, and what else of its part each may import. What lies beside the rooms imports all."""
OUTSIDE_THE_PIPELINE = {
    *("_thread", "asyncio", "concurrent", "queue", "selectors", "threading"),
    *("multiprocessing", "os", "select", "signal", "socket", "subprocess"),
    *("datetime", "sched", "time"),
}
"""Modules that the pipeline does not import: threads, processes and time."""
FACADE = {
    *("millstream.__init__", "millstream.__main__", "millstream.checkpoint"),
    *("millstream.experimental", "millstream.keras", "millstream.multiprocessing", "millstream.python"),
    "millstream.testing",
}

IMPORTERS = {
    "array_record": {"millstream.sources.formats.array_record", "millstream.tools.record_writers"},
    # What is quicker or nicer where it is installed.
    "tensorstore": {"millstream.sources.formats.zarr_arrays"},
    "lance": {"millstream.sources.formats.lance_rows"},
    "datasets": {"millstream.sources.formats.hugging_face"},
    "h5py": {"millstream.sources.formats.hdf5"},
    "google_crc32c": {"millstream.sources.formats.tfrecord"},
    "orjson": {"millstream.sources.formats.lines"},
    "pyarrow": {"millstream.sources.arrow.tables", "millstream.sources.formats.parquet"},
    "lmdb": {"millstream.tools.cached_source"},
    # An engine that is there, or is not.
    "ray": {"millstream.loader.cluster.actor_pool", "millstream.loader.cluster.options"},
    "rich": {"millstream.tools.top_command"},
    "botocore": {"millstream.sources.remote.object_clients"},
    "obstore": {"millstream.sources.remote.object_clients"},
    "huggingface_hub": {"millstream.sources.remote.object_clients"},
    "tqdm": {"millstream.sources.files.progress"},
    "zstandard": {"millstream.sources.files.compression"},
    # Which process this is; and where its batches go.
    "keras": {"millstream.keras"},
    # What draws examples where it is installed.
    "hypothesis": {"millstream.testing"},
    "jax": {"millstream.sharding", "millstream.loader.device_placement"},
    "orbax": {"millstream.loader.checkpoints.orbax_handler"},
}
"""The modules that may import each third party; numpy is everywhere."""
IMPORTING_PARTS = {"cloudpickle": "loader"}
"""The one part that may: what crosses to worker processes is pickled in several of its modules."""
LATE_IMPORTS = {
    *(
        "array_record",
        "botocore",
        "datasets",
        "google_crc32c",
        "huggingface_hub",
        "hypothesis",
        "jax",
        "obstore",
        "orjson",
    ),
    *("pyarrow", "ray", "rich", "tqdm", "zstandard"),
}
"""Packages that are imported inside functions only. The modules that import the others are themselves imported late."""
FOR_TYPE_CHECKERS = {"typing_extensions"}
"""Packages that type checkers bring themselves: imported for them only, they are no dependency."""

MODULE_LINES = 700
"""The length that hardly any idea needs: a longer module has two."""
VAGUE_NAMES = {"common", "helper", "helpers", "manager", "misc", "util", "utils"}


class Import(NamedTuple):
    """One name that a module imports, `a.b.c` for `from a.b import c`."""

    target: str
    line: int
    is_late: bool = False  # inside a function, or for type checkers
    is_for_checkers: bool = False


@functools.cache
def imports_of(source: str) -> list[Import]:
    """Returns everything that a module imports, whether by statement or by `import_module("…")`."""
    return list(_imports_within(ast.parse(source)))


def _imports_within(node: ast.AST, *, is_late: bool = False, is_for_checkers: bool = False) -> Iterator[Import]:
    when = {"is_late": is_late or is_for_checkers, "is_for_checkers": is_for_checkers}
    match node:
        case ast.Import(names=names):
            yield from (Import(name.name, node.lineno, **when) for name in names)
        case ast.ImportFrom(module=module, names=names):
            yield from (Import(f"{module}.{name.name}", node.lineno, **when) for name in names)
        case ast.Call(
            func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            yield Import(name, node.lineno, **when)
    is_late = is_late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
    is_for_checkers = is_for_checkers or (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    for child in ast.iter_child_nodes(node):
        yield from _imports_within(child, is_late=is_late, is_for_checkers=is_for_checkers)


def part_of(name: str) -> str:
    """Returns which part a module of the package belongs to; "core" for what lies in millstream/ itself."""
    second = name.split(".")[1] if "." in name else ""
    return second if second in PARTS else "core"


def room_of(name: str) -> str | None:
    """Returns which room of its part a module belongs to; None outside of them."""
    words = name.split(".")
    return words[2] if len(words) > 2 and words[2] in ROOMS.get(words[1], {}) else None


def drawn_as(name: str) -> str:
    """Returns what the drawing in CONTRIBUTING.md calls the place of a module: a room of the loader, or a part."""
    part = part_of(name)
    return (room_of(name) or part) if part == "loader" else part


def import_violations(module: str, source: str) -> list[str]:
    """Returns what is wrong with the imports of one module of the package, in words."""
    found: list[str] = []
    for item in imports_of(source):
        top = item.target.split(".")[0]
        if top == CORE:
            found += _layer_violations(module, item)
        elif top in OUTSIDE_THE_PIPELINE and room_of(module) in {"pipeline", "scheduling"}:
            found.append(f"line {item.line}: the pipeline imports {top}")
        elif top not in sys.stdlib_module_names | {"numpy"} and not (top in FOR_TYPE_CHECKERS and item.is_late):
            found += _third_party_violations(module, item, top)
    return found


HEIGHTS = {"tools": 3, "dataset": 2, "loader": 1}
"""Tools and chains stand on the loader, the loader on the other three parts; all stand on the core."""


def _layer_violations(module: str, item: Import) -> Iterator[str]:
    """Yields a violation unless the importing part may use the imported one."""
    importer, imported = part_of(module), part_of(item.target)
    is_below = imported in ("core", importer) or HEIGHTS.get(importer, 0) > HEIGHTS.get(imported, 0)
    if module not in FACADE and (item.target == CORE or item.target.startswith("millstream.checkpoint")):
        yield f"line {item.line}: {module} imports the façade"
    elif module not in FACADE and not is_below:
        yield f"line {item.line}: {importer} imports {imported}"
    room, other = room_of(module), room_of(item.target)
    if room is not None and imported == importer:
        allowed = ROOMS[importer][room] | {room}
        if not {other, *item.target.split(".")[2:3]} & allowed:
            yield f"line {item.line}: {room} imports {other or item.target}"


def _third_party_violations(module: str, item: Import, top: str) -> Iterator[str]:
    """Yields a violation unless this is the module that may import the third party, and at the right time."""
    if module not in IMPORTERS.get(top, ()) and IMPORTING_PARTS.get(top) != part_of(module):
        yield f"line {item.line}: {module} imports {top}"
    if top in LATE_IMPORTS and not item.is_late:
        yield f"line {item.line}: {top} is imported when the module is, not when it is needed"


def shape_violations(module: str, source: str) -> list[str]:
    """Returns what is wrong with the name, the length and the docstring of one module."""
    found = []
    lines = len(source.splitlines())
    if lines > MODULE_LINES:
        found.append(f"{lines} lines")
    if VAGUE_NAMES & {word for name in module.split(".") for word in name.split("_")}:
        found.append("a vague name")
    if not ast.get_docstring(ast.parse(source)):
        found.append("no docstring")
    return found


def modules() -> dict[str, Path]:
    """Returns the modules of the package by import name."""
    folders = [("millstream", ROOT / "millstream"), *((f"millstream.{part}", ROOT / part) for part in sorted(PARTS))]
    return {
        ".".join((name, *path.relative_to(folder).with_suffix("").parts)): path
        for name, folder in folders
        for path in sorted(folder.rglob("*.py"))
    }


def module_of(target: str) -> str | None:
    """Returns which module of the package a dotted name is, or is in; None for what is outside."""
    while target:
        found = next((name for name in (target, f"{target}.__init__") if name in MODULES), None)
        if found is not None:
            return found
        target = target.rpartition(".")[0]
    return None


MODULES = modules()


@pytest.mark.parametrize("violations", [import_violations, shape_violations])
def test_modules_follow_the_rules(violations: Callable[[str, str], list[str]]) -> None:
    """Core imports core, each part core and itself, loader the other three, chains and tools all that.

    A module has at most 700 lines, a name that says what it holds, and a docstring.
    """
    found = {module: violations(module, path.read_text()) for module, path in MODULES.items()}
    assert {module: wrong for module, wrong in found.items() if wrong} == {}


def test_every_part_is_read() -> None:
    """The rules above look at every part, and no exception to them is out of date."""
    found = {
        (item.target.split(".")[0], module) for module, path in MODULES.items() for item in imports_of(path.read_text())
    }

    assert {part_of(module) for module in MODULES} == PARTS | {"core"}
    assert {room_of(module) for module in MODULES} == {*(room for rooms in ROOMS.values() for room in rooms), None}
    assert set(MODULES) >= FACADE
    assert {(top, module) for top, importers in IMPORTERS.items() for module in importers} <= found


def test_the_graph_of_imports_is_as_drawn() -> None:
    """Each arrow of the drawing in CONTRIBUTING.md is an import, and each import is an arrow or a path of arrows."""
    drawn = set(re.findall(r"^ +(\w+)[^\n]*? --> (\w+)", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE))
    imports = {
        (drawn_as(module), drawn_as(item.target))
        for module, path in MODULES.items()
        if module not in FACADE
        for item in imports_of(path.read_text())
        if item.target.split(".")[0] == CORE
    }
    imports = {(importer, imported) for importer, imported in imports if imported not in {importer, "core"}}
    paths = drawn
    while (longer := paths | {(a, d) for a, b in paths for c, d in paths if b == c}) != paths:
        paths = longer

    assert drawn <= imports <= paths
    assert not any(importer == imported for importer, imported in paths)


def test_no_import_leads_back_to_its_module() -> None:
    """Modules stand one above the other: what one imports, in functions and for type checkers too, never imports it."""
    graph = {
        module: {imported for item in imports_of(path.read_text()) if (imported := module_of(item.target)) is not None}
        for module, path in MODULES.items()
    }

    # It raises a CycleError that names the modules of a circle.
    assert {*graphlib.TopologicalSorter(graph).static_order()} == graph.keys()


def test_nothing_imports_a_format() -> None:
    """A format is one module, which the table of formats and the lazy names find by its name.

    Grain's names for streams of files derive from two of them.
    """
    rooms = "millstream.sources.formats."
    importers = {
        module
        for module, path in MODULES.items()
        for item in imports_of(path.read_text())
        if item.target.startswith(rooms) and not (item.is_for_checkers and module == "millstream.sources.__init__")
    }

    assert importers == {"millstream.dataset.grain_compat.file_streams"}


def test_third_parties_are_declared() -> None:
    """Each package that a module imports is a dependency of the project, or one of its extras for users."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {"bench", "dev", "dist", "docs", "pyright", "test"}
    extras = [name for kind, names in project["optional-dependencies"].items() if kind not in ours for name in names]
    declared = " ".join([*project["dependencies"], *extras]).replace("-", "_")
    targets = {item.target.split(".")[0] for path in MODULES.values() for item in imports_of(path.read_text())}

    assert [top for top in targets - sys.stdlib_module_names - FOR_TYPE_CHECKERS - {CORE} if top not in declared] == []


@pytest.mark.parametrize(
    ("module", "source", "word"),
    [
        ("millstream.errors", "from millstream import sources", "core imports sources"),
        ("millstream.samplers.index", "def f():\n    from millstream.transforms import Map", "samplers imports transf"),
        ("millstream.loader.pipeline.plan", "def f():\n    from threading import Lock", "pipeline imports threading"),
        ("millstream.loader.pipeline.plan", "import millstream.loader.threads.options", "pipeline imports threads"),
        ("millstream.sources.files.paths", "import millstream.sources.memory", "files imports"),
        ("millstream.loader.pipeline.plan", "from millstream.checkpoint import CheckpointSave", "façade"),
        ("millstream.loader.pipeline.plan", "if True:\n    import orbax.checkpoint as ocp", "imports orbax"),
        ("millstream.samplers.base", "import cloudpickle", "imports cloudpickle"),
        ("millstream.sharding", "import jax", "not when it is needed"),
    ],
)
def test_forbidden_imports_are_found(module: str, source: str, word: str) -> None:
    """Each kind of forbidden import is found, wherever it is written."""
    (violation,) = import_violations(module, source)

    assert word in violation
