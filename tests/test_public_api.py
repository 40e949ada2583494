"""The public interface: the façade's names, their documentation, and the cost of the import."""

import importlib.util
import inspect
import operator
import py_compile
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import millstream
import millstream.loader
from millstream import dataset, experimental, samplers, sources, tools, transforms
from millstream.core import lazy_imports
from millstream.loader.data_loader import DATA_LOADER_SPELLINGS, LOAD_SPELLINGS

PARTS = [millstream, dataset, experimental, millstream.loader, samplers, sources, tools, transforms]
MODULES = {"samplers", "sharding", "sources", "transforms", "checkpoint", "dataset", "testing"}
"""The modules of the façade, and those that it imports on first access."""
KINDS = ["Filter", "FlatMap", "Map", "MapWithIndex", "RandomMap"]


def own_public_names(module: types.ModuleType) -> set[str]:
    """Returns the public classes and functions of millstream that a module has, late names among them."""
    named = {name: getattr(module, name) for name in getattr(module, "__all__", ()) if name != "checkpoint"}
    return {
        name
        for name, value in (vars(module) | named).items()
        if not name.startswith("_")
        and (inspect.isclass(value) or inspect.isfunction(value))
        and value.__module__.startswith("millstream")
        and value.__name__ == name  # Another name is a spelling of Grain's.
    }


def run_python(code: str, folder: Path) -> str:
    """Returns what a fresh interpreter prints; started elsewhere, so that the installed package is what it finds."""
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout


@pytest.mark.parametrize("module", PARTS, ids=lambda module: module.__name__)
def test_all_is_sorted_complete_and_real(module: types.ModuleType) -> None:
    """`__all__` is sorted, names nothing twice, names only what is there, and leaves out no public name."""
    assert list(module.__all__) == sorted(set(module.__all__))
    others = set() if module is experimental else {*experimental.__all__}
    assert own_public_names(module) <= {*module.__all__, *others}
    assert [name for name in module.__all__ if name != "checkpoint" and not hasattr(module, name)] == []


def test_the_facade_has_no_more_modules() -> None:
    """`millstream.samplers` and its like are public; the rest of the package's modules are not."""
    assert {name for name in millstream.__all__ if isinstance(vars(millstream).get(name), types.ModuleType)} <= MODULES


@pytest.mark.third_party
def test_the_older_names_are_the_same_objects() -> None:
    """`millstream.python` has all that it names: what the façade has, and names of its own for the rest."""
    old = millstream.python

    assert [name for name in old.__all__ if not hasattr(old, name)] == []
    assert [
        name for name in old.__all__ if getattr(millstream, name, getattr(old, name)) is not getattr(old, name)
    ] == []
    assert old.PyGrainCheckpointHandler is millstream.checkpoint.CheckpointHandler
    assert old.experimental is millstream.experimental
    assert millstream.multiprocessing.MultiprocessingOptions is old.MultiprocessingOptions
    assert {getattr(millstream.constants, name) for name in old.__all__ if name.isupper()} - {
        old.META_FEATURES
    } == old.META_FEATURES
    with pytest.raises(AttributeError, match="has no attribute 'DataLoder'"):
        _ = old.DataLoder  # type: ignore[attr-defined]


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name of the façade is the usual error, and not an import."""
    with pytest.raises(AttributeError, match="module 'millstream' has no attribute 'DataLoder'") as caught:
        _ = millstream.DataLoder  # type: ignore[attr-defined]  # Type checkers know, too.
    assert (caught.value.name, caught.value.obj) == ("DataLoder", millstream)  # for the suggestion in tracebacks


@pytest.mark.parametrize("module", PARTS, ids=lambda module: module.__name__)
def test_late_names_are_the_classes_that_type_checkers_see(module: types.ModuleType) -> None:
    """The names that a part imports for type checkers are those that it imports on first access."""
    late = lazy_imports.late_names(module.__name__)

    assert late
    assert {*late} >= {*module.__all__} - {*vars(module)}
    assert [name for name in late if name not in ("checkpoint", "keras") and not hasattr(module, name)] == []


def test_late_names_need_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package of which only the compiled file is there has an error that says what to ship."""
    (tmp_path / "late.py").write_text("")
    py_compile.compile(str(tmp_path / "late.py"), str(tmp_path / "bare.pyc"))
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ImportError, match=r"Ship its \.py files"):
        lazy_imports.late_names("bare")


@pytest.mark.parametrize("name", KINDS)
def test_one_class_has_one_name_and_grains_spelling(name: str) -> None:
    """The root has each kind of operation as every repr says; Grain's spelling is the same class, outside `__all__`."""
    kind = getattr(millstream, name)
    assert getattr(transforms, name) is kind
    assert getattr(millstream, f"{name}Transform") is getattr(transforms, f"{name}Transform") is kind
    assert name in millstream.__all__
    assert f"{name}Transform" not in {*millstream.__all__, *transforms.__all__}
    assert kind.__name__ == name


def test_each_object_is_in_one_contract() -> None:
    """A class of chains is a name of `millstream.dataset` or of `millstream.experimental`; only options are both."""
    assert {*dataset.__all__} & {*experimental.__all__} == {"DatasetOptions"}
    assert {*millstream.__all__} & {*experimental.__all__} == {"BOSHandling", "device_put"}


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("shard_by_jax_process", "ShardByJaxProcess"), ("DatasetSelectionMap", "transforms.DatasetSelectionMap")],
)
def test_a_name_that_moved_says_where(name: str, remedy: str) -> None:
    """The error of a name that the root no longer has says what to write, and that exists."""
    with pytest.raises(AttributeError, match=rf"has no attribute '{name}'\. Write millstream\.{remedy}\."):
        getattr(millstream, name)
    assert operator.attrgetter(remedy)(millstream)


def spellings() -> list[tuple[str, str, Any]]:
    """Returns the undocumented names of arguments, the documented ones, and a value that is not the default."""
    of_loader = [("load", *pair) for pair in LOAD_SPELLINGS.items()]
    of_loader += [("DataLoader", *pair) for pair in DATA_LOADER_SPELLINGS.items()]
    return of_loader


@pytest.mark.parametrize(("called", "other", "name"), spellings())
def test_load_and_data_loader_take_each_others_spellings_and_grains(called: str, other: str, name: str) -> None:
    """Both names of an argument build the same loader; both at once are an error. One of them is documented."""
    values: dict[str, Any] = {
        **{name: [3, 1, 2] for name in ("source", "data_source")},
        **{name: [abs] for name in ("transformations", "operations")},
        "worker_count": 2,
        "worker_buffer_size": 3,
    }
    function: Any = getattr(millstream, called)
    documented = inspect.signature(function).parameters
    given = {parameter: values[parameter] for parameter in documented if parameter in values}
    given |= {"sampler": millstream.IndexSampler(3)} if called == "DataLoader" else {}
    renamed = {(other if parameter == name else parameter): value for parameter, value in given.items()}

    assert name in documented
    assert other not in documented
    assert repr(function(**renamed)) == repr(function(**given))
    with pytest.raises(TypeError, match=f"{name} and {other} are two names of one argument. Pass {name} alone"):
        function(**given, **{other: given[name]})


@pytest.mark.parametrize(
    "module", [millstream.sharding, dataset, samplers, sources, tools, transforms], ids=lambda m: m.__name__
)
def test_the_facade_and_the_parts_share_their_classes(module: types.ModuleType) -> None:
    """A name of both the façade and a part is the same object in both."""
    shared = set(millstream.__all__) & (set(vars(module)) | set(getattr(module, "__all__", ())))

    assert shared
    assert [name for name in shared if getattr(millstream, name) is not getattr(module, name)] == []


def test_dir_is_the_public_names(tmp_path: Path) -> None:
    """Completion offers exactly what is public, late names before they are imported, without importing them."""
    parts = [module.__name__ for module in PARTS if module is not tools]
    code = f"""
import sys, {", ".join(parts)}
for part in {parts}:
    print(dir(sys.modules[part]))
print([name for name in sys.modules if name.endswith((".checkpoint", ".mixture", ".bagz", ".examples"))])
"""
    shown = [*(str(list(sys.modules[part].__all__)) for part in parts), "[]"]
    assert run_python(code, tmp_path).splitlines() == shown


def test_import_brings_little_and_starts_nothing(tmp_path: Path) -> None:
    """`import millstream` loads numpy and small parts of the standard library, starts no thread and opens no file.

    It takes a fraction of the time of `import numpy`: what takes long waits until it is used.
    """
    code = """
import numpy.random, os, sys, threading
before, opened = set(sys.modules), len(os.listdir("/proc/self/fd"))
import millstream
tops = {name.split(".")[0] for name in set(sys.modules) - before}
print(sorted(top for top in tops - sys.stdlib_module_names - {"numpy", "millstream"} if not top.startswith("__edit")))
print(threading.active_count(), len(os.listdir("/proc/self/fd")) - opened)
print(*tops)
"""
    large = {"asyncio", "concurrent", "email", "http", "logging", "multiprocessing", "selectors", "shutil", "socket"}
    large |= {"ssl", "subprocess", "tempfile", "unittest", "urllib", "uuid", "xml", "zipfile"}
    libraries, started, tops = run_python(code, tmp_path).splitlines()
    assert (libraries, started) == ("[]", "1 0")
    assert large.isdisjoint(tops.split())


@pytest.mark.parametrize("worker_count", [0, "auto"])
def test_a_first_batch_imports_what_makes_it_and_no_more(worker_count: int | str, tmp_path: Path) -> None:
    """Workers, a cluster, stores, filters and timelines are imported by those who have them."""
    code = f"""
import sys, millstream
reading = millstream.ReadOptions(num_threads=0)
with iter(millstream.load([1, 2], batch_size=2, read_options=reading, worker_count={worker_count!r})) as batches:
    next(batches)
print(*sys.modules)
"""
    others = {"cluster.options", "scheduling.dropped_records", "scheduling.feed", "scheduling.join"}
    others |= {"engine.workers", "processes.pool", "reporting.preview"}
    others = {f"millstream.loader.{name}" for name in others} | {"millstream.sources.remote.object_stores"}
    assert [name for name in others if importlib.util.find_spec(name) is None] == []
    assert others.isdisjoint(run_python(code, tmp_path).split())
