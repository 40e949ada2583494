"""Grain's own tests, run on millstream: `python -m millstream.as_grain tests/clients/grain_tests.py FOLDER`.

FOLDER is filled by `pip install --no-deps --target FOLDER grain==0.2.18`: Grain has its tests in its package. Many of
them construct private classes, such as `ShuffleMapDataset`, for which Grain's documents name a public method. Here, the
method is called instead. Tests of Grain's internals are left out: those of `INTERNAL`, and those that `grain_tests.txt`
lists as internal. It also lists each function that fails, with the reason. The exit status is 1 if any other function
fails, or one that is listed passes.

Further arguments select files, by parts of their names.
"""

import ast
import importlib
import shutil
import sys
import tempfile
import types
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import pytest
from absl import flags
from grain import experimental

LIST = Path(__file__).with_name("grain_tests.txt")
INTERNAL_REASON = "internal"

INTERNAL = (
    *(
        "core/jax_import",
        "core/monitoring",
        "core/multiprocessing",
        "core/parallel",
        "core/profiler",
        "core/prometheus",
    ),
    *("core/py_version", "core/tf_import", "core/traceback_util", "core/tree_lib", "dataset/stats", "python/ipc/"),
    *("autotune_test", "grain_logging", "checkpoint/elastic_checkpoint", "core/transforms"),
)
"""Parts of the names of files whose tests are all of Grain's internals."""

SKIPPED = ("interleave_test", "device_put_test")
"""Parts of the names of files that Grain itself skips, or that have no tests."""

PATHS = "grain/_src/python/dataset/transformations/"
TRANSFORMATIONS = "grain._src.python.dataset.transformations."


def _built(build: Callable[..., Any]) -> type:
    """Returns a class whose instances are what a public function returns."""

    class Kind(type):
        def __instancecheck__(cls, instance: object) -> bool:
            return isinstance(instance, grain.MapDataset | grain.IterDataset)

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            return build(*args, **kwargs)

    return Kind("Built", (), {})


def _mixed(parents: Any, proportions: Any = None, selection_map: Any = None) -> Any:
    if selection_map is not None:
        return grain.MapDataset.select_from_datasets(parents, selection_map)
    return grain.MapDataset.mix(parents, proportions)


def _in_batches(parent: Any, batch_size: int, drop_remainder: bool = False, batch_fn: Any = None) -> Any:
    return parent.batch(batch_size, drop_remainder=drop_remainder, batch_fn=batch_fn)


def _in_workers(
    parent: Any, num_workers: int = 1, buffer_size: int = 1, worker_init_fn: Any = None, sequential_slice: bool = False
) -> Any:
    options = grain.MultiprocessingOptions(num_workers, per_worker_buffer_size=buffer_size)
    return parent.mp_prefetch(options, worker_init_fn=worker_init_fn, sequential_slice=sequential_slice)


def _in_one_worker(parent: Any, buffer_size: int = 1, worker_init_fn: Any = None) -> Any:
    call = None if worker_init_fn is None else lambda *_: worker_init_fn()
    return _in_workers(parent, 1, buffer_size, call)


def _method(name: str) -> type:
    return _built(lambda parent, *args, **kwargs: getattr(parent, name)(*args, **kwargs))


REPLACEMENTS: Mapping[str, Mapping[str, Any]] = {
    TRANSFORMATIONS + "slice": {"SliceMapDataset": _method("slice"), "ReindexMapDataset": _method("slice")},
    TRANSFORMATIONS + "source": {"RangeMapDataset": _built(grain.MapDataset.range)},
    TRANSFORMATIONS + "repeat": {"RepeatMapDataset": _method("repeat")},
    TRANSFORMATIONS + "mix": {
        "MixedMapDataset": _built(_mixed),
        "MixedIterDataset": _built(lambda parents, proportions=None: grain.IterDataset.mix(parents, proportions)),
        "ConcatenateMapDataset": _built(grain.MapDataset.concatenate),
    },
    TRANSFORMATIONS + "map": {
        f"{operation}{kind}Dataset": _method(name)
        for kind in ("Map", "Iter")
        for operation, name in (("Map", "map"), ("RandomMap", "random_map"), ("MapWithIndex", "map_with_index"))
    },
    TRANSFORMATIONS + "filter": {"FilterMapDataset": _method("filter"), "FilterIterDataset": _method("filter")},
    TRANSFORMATIONS + "shuffle": {"ShuffleMapDataset": _method("shuffle")},
    TRANSFORMATIONS + "batch": {
        "BatchMapDataset": _built(_in_batches),
        "BatchIterDataset": _built(_in_batches),
        "BatchFn": object,
    },
    TRANSFORMATIONS + "prefetch": {
        "PrefetchIterDataset": _method("to_iter_dataset"),
        "multithread_prefetch": lambda dataset, num_threads, buffer_size, **_: dataset.prefetch(
            grain.ReadOptions(num_threads, num_threads * buffer_size)
        ),
    },
    TRANSFORMATIONS + "process_prefetch": {
        "ProcessPrefetchIterDataset": _built(_in_one_worker),
        "multiprocess_prefetch": _in_workers,
    },
    TRANSFORMATIONS + "packing": {"PackIterDataset": experimental.FirstFitPackIterDataset},
    TRANSFORMATIONS + "packing_packed_batch": {
        "get_non_sequence_meta_features": lambda lengths, features: [
            feature for feature in features if not isinstance(lengths, dict) or feature not in lengths
        ]
    },
    "grain._src.python.dataset.dataset": {
        "get_next_index": lambda iterator: iterator.step,
        "set_next_index": lambda iterator, index: iterator.seek(index),
        "apply_transformations": lambda dataset, transformations: dataset.apply(transformations),
    },
    # Only to import the modules that name them.
    "grain._src.python.dataset.base": {"ShapeDtypeStruct": jax.ShapeDtypeStruct, "MultiprocessingContext": object},
    "grain._src.core.transforms": {"TfRandomMap": object},
}
"""The public counterparts of private names, by module."""

HELPERS = ("grain/_src/core/tree_lib.py", "grain/_src/core/pytest.py", PATHS + "testing_util.py")
"""Modules of Grain that only help its tests."""


def _install(checkout: Path) -> None:
    flags.FLAGS.mark_as_parsed()
    grain.__file__ = str(checkout / "grain" / "__init__.py")
    for name, values in REPLACEMENTS.items():
        module = importlib.import_module(name)
        for key, value in values.items():
            setattr(module, key, value)
    grain.MapDataset._getitems = grain.MapDataset.__getitems__
    for path in HELPERS:
        name = path.removesuffix(".py").replace("/", ".")
        module = types.ModuleType(name)
        sys.modules[name] = module
        exec(compile((checkout / path).read_text(), path, "exec"), vars(module))
        parent, _, last = name.rpartition(".")
        setattr(importlib.import_module(parent), last, module)
    sys.modules["grain._src.core.pytest"].RUN_IN_PYTEST = True  # type: ignore[attr-defined]
    importlib.import_module(TRANSFORMATIONS + "batch").tree_lib = sys.modules["grain._src.core.tree_lib"]  # type: ignore[attr-defined]
    loading = types.ModuleType("grain._src.python.load")
    loading.load = grain.load  # type: ignore[attr-defined]
    importlib.import_module("grain._src.python").load = loading  # type: ignore[attr-defined]
    for name in ("grain.proto.execution_summary_pb2", "grain.proto"):
        sys.modules[name] = types.ModuleType(name)
    sys.modules["grain.proto"].execution_summary_pb2 = sys.modules["grain.proto.execution_summary_pb2"]  # type: ignore[attr-defined]


def _functions_of(path: Path) -> list[str]:
    """Returns the names of a file's test functions, the longest first."""
    names = {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
    return sorted((name for name in names if name.startswith("test")), key=len, reverse=True)


class _Results:
    """The outcomes of test functions, each of which has any number of cases."""

    def __init__(self, functions: Mapping[str, list[str]]) -> None:
        self._functions = functions
        self.outcomes: dict[str, dict[str, set[str]]] = {file: defaultdict(set) for file in functions}
        self.messages: dict[str, str] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Adds the outcome of a case."""
        file, _, rest = report.nodeid.partition("::")
        name = rest.rpartition("::")[2]
        function = next((known for known in self._functions[file] if name.startswith(known)), name)
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[file][function].add(report.outcome)
        if report.failed:
            lines = [line[4:].strip() for line in report.longreprtext.splitlines() if line.startswith("E  ")]
            self.messages.setdefault(f"{file} {function}", next(filter(None, lines), ""))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Prints why a file cannot be imported."""
        if report.failed:
            print(report.longreprtext)


def _listed() -> dict[str, str]:
    """Returns the reason for each function that fails, by file and function."""
    lines = [line.split() for line in LIST.read_text().splitlines() if not line.startswith("#")]
    return {f"{words[1]} {words[2]}": words[0] for words in lines if len(words) == 3}


def main(checkout: Path, parts: Sequence[str]) -> int:
    """Runs the tests, prints what differs from the list, and returns the exit status."""
    _install(checkout)
    with tempfile.TemporaryDirectory() as temporary:
        folder, functions = Path(temporary), {}
        for path in sorted((checkout / "grain").rglob("*_test.py")):
            name = str(path.relative_to(checkout / "grain" / "_src"))
            flat = name.replace("/", "_")
            if any(part in name for part in (*INTERNAL, *SKIPPED)) or (
                parts and not any(part in name for part in parts)
            ):
                continue
            shutil.copy(path, folder / flat)
            functions[flat] = _functions_of(path)
            if flat.endswith("_packing_test.py"):
                functions[flat] += _functions_of(checkout / PATHS / "testing_util.py")
        results = _Results(functions)
        options = ["-q", "--tb=short", "--no-summary", "-p", "no:cacheprovider", "--timeout=600"]
        pytest.main([*options, f"--rootdir={folder}", *map(str, map(folder.joinpath, sorted(functions)))], [results])
    expected = {key: reason for key, reason in _listed().items() if key.split()[0] in functions}
    failed = {
        f"{file} {function}"
        for file, outcomes in results.outcomes.items()
        for function, found in outcomes.items()
        if "failed" in found
    }
    count = sum(len(outcomes) for outcomes in results.outcomes.values())
    reasons = Counter(expected.values())
    print(f"{count - reasons[INTERNAL_REASON]} functions, {count - len(failed)} pass; listed: {dict(reasons)}")
    for key in sorted(failed - expected.keys()):
        print("fails:", key, results.messages.get(key, ""))
    for key in sorted(expected.keys() - failed):
        print("passes:", key)
    return int(failed != expected.keys())


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
