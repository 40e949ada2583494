"""The claims of docs/coming-from-grain.md are true: names, and differences in behaviour.

Names are looked up where unmodified programs look: in `grain`, served by millstream. Names and parameters are compared
with those of Grain 0.2.18.
"""

import importlib
import inspect
import itertools
import json
import operator
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import millstream as grain
from millstream.grain_imports import REMEDIES
from support.documents.document_tables import RowTests, rows
from support.processes.worker_pools import python

pytestmark = pytest.mark.third_party

DOCUMENT = Path(__file__).parents[1] / "docs" / "coming-from-grain.md"
GRAINS_TESTS = Path(__file__).parent / "clients" / "grain_tests.txt"
SECTIONS = ("Names", "From MapDataset to a DataLoader", "What differs, and why")
"""The sections whose rows have a test each."""

LAWS = {
    # Names.
    "`samplers.`: `IndexSampler`, `SequentialSampler`, `Sampler`": "the_sequential_sampler_is_one_epoch_in_order",
    "`sharding.`: `ShardOptions`, `NoSharding`, `ShardByJaxProcess`": "two_jax_processes_are_warned_or_sharded",
    "`transforms.`: `Map`, `MapWithIndex`, `RandomMap`, `Filter`, `Batch`, `Transformation`": (
        "instances_of_every_kind_pass_as_they_are"
    ),
    "`sources.`: `ArrayRecordDataSource`, `RangeDataSource`": "batched_read_is_the_records_one_by_one",
    "`checkpoint.`: `CheckpointSave`, `CheckpointRestore`, `CheckpointHandler`": "a_restored_iterator_goes_on_exactly",
    "`MapOperation`, `RandomMapOperation`, `FilterOperation`, `BatchOperation`": "legacy_names_and_keywords",
    "`IterDataset.mp_prefetch(worker_init_fn=f)`": "each_worker_calls_it_once_with_its_index",
    "`DataLoader(enable_profiling=...)`": "nothing_is_recorded_unless_asked",
    "`config.py_dataset_visualization_output_dir`, `config.py_debug_mode`": "settings_are_attributes_and_have_defaults",
    "`Record`": "legacy_names_and_keywords",
    "`Operation`": "what_is_no_operation_is_refused",
    "`multiprocessing.`: `SharedMemoryArray`, `SharedMemoryArrayMetadata`": "batches_of_all_kinds",
    "`__version_info__`": "the_version_is_written_once_in_each_place",
    "`MapDataset`, `IterDataset`, `DatasetIterator`": "a_stream_is_the_oracles_in_the_consumers_thread_and_in_others",
    (
        "`experimental.`: `FirstFitPackIterDataset`, `BestFitPackIterDataset`, `ConcatThenSplitIterDataset`, "
        "`WindowShuffleIterDataset`, `RebatchIterDataset`, `batch_and_pad`"
    ): "each_dataset_resumes_after_each_element",
    "`experimental.`: `TFRecordIterDataset`, `ParquetIterDataset`, `InterleaveIterDataset`": (
        "parquet_files_are_read_in_turn"
    ),
    "`experimental.ElasticIterator`": "any_number_of_shards_resumes",
    (
        "`experimental.`: `pick_performance_config`, `DatasetOptions`, `WithOptionsIterDataset`, "
        "`ThreadPrefetchIterDataset`"
    ): "options_that_were_given_count",
    "`experimental.`: the other names": "every_name_of_grain_is_here_or_in_the_document",
    "`python.`, `constants.`, `multiprocessing.MultiprocessingOptions`": (
        "every_name_of_grain_is_here_or_in_the_document"
    ),
    "`experimental.ThreadPrefetchDatasetIterator`": "a_state_does_not_depend_on_prefetching",
    "`transforms.`: `DatasetSelectionMap`, `Transformations`": "a_selection_map_of_ones_own_is_asked_at_each_position",
    "`experimental.PackAndBatchOperation`": "batches_are_the_rows_of_first_fit",
    "`experimental.`: `get_next_index`, `set_next_index`": "iterators_can_seek",
    "`experimental.multithread_prefetch`": "a_stream_is_the_oracles_in_workers",
    "`experimental.apply_transformations`": "a_stream_is_the_oracles_in_the_consumers_thread_and_in_others",
    "`experimental.RngPool`": "order_and_draws_are_those_of_a_data_loader",
    "`experimental.`: `get_element_spec`, `ShapeDtypeStruct`, `ShapeDtypeStructProtocol`": (
        "names_that_are_not_there_say_what_to_write"
    ),
    "`experimental.ExecutionTrackingMode`": "names_that_are_not_there_say_what_to_write",
    "`transforms.TfRandomMap`": "the_consumers_thread",
    # From MapDataset to a DataLoader.
    "`MapDataset.source(source)`": "every_position_has_the_element_of_the_oracle",
    "`.seed(s)`, `.shuffle(seed=s)`": "order_and_draws_are_those_of_a_data_loader",
    "`.repeat(n)`, `.repeat()`": "order_and_draws_are_those_of_a_data_loader",
    "`ds[shard_index::shard_count]`": "slices_of_an_endless_dataset_share_it_out",
    "`.map(f)`, `.map_with_index(f)`, `.random_map(f)`, `.filter(f)`, `.batch(n)`": (
        "a_stream_is_the_oracles_in_the_consumers_thread_and_in_others"
    ),
    "`.to_iter_dataset(read_options)`": "a_stream_is_the_oracles_in_the_consumers_thread_and_in_others",
    "`.mp_prefetch(options)`": "a_stream_is_the_oracles_in_workers",
    "`ThreadPrefetchIterDataset(ds, m)`": "a_state_does_not_depend_on_prefetching",
    "`experimental.device_put(ds, device, device_buffer_size=m)`": "batches_of_chains_on_the_device",
    "`ds[i]`": "every_position_has_the_element_of_the_oracle",
    "`ds.slice(slice(a, b))`, for a split": "every_position_has_the_element_of_the_oracle",
    # What differs, and why.
    "shuffle over several hosts": "global_batches_are_those_of_any_number_of_shards",
    "seeds": "neighbouring_seeds_and_epochs_share_nothing",
    "random numbers of a record": "no_two_draws_of_a_pipeline_are_equal",
    "several `RandomMap`s": "adding_operations_leaves_the_draws_of_those_before",
    "end of the data on *S* hosts": "every_small_combination_is_as_documented",
    "a bare function in `operations`": "a_bare_function_means_map",
    "`MapWithIndex` in a `DataLoader`": "the_consumers_thread",
    "`bytes` in a batch": "text_and_bytes_are_exact",
    "`DataLoader` without `shard_options`, and a sampler that carries none": "a_shard_is_found_where_it_is_given",
    "`len(loader)`": "length_is_known_or_says_why_not",
    "`len(sampler)` of an endless one": "lengths",
    "a sampler of more records than the source has": "each_wrong_argument_has_its_own_error",
    "a custom sampler without `len`": "a_custom_sampler_without_length_is_endless",
    "reading": "the_batched_read_is_used_for_every_batch",
    "workers": "what_a_script_defines_works_with_workers_as_it_does_inline",
    "batches from workers": "batches_of_all_kinds",
    "iterators": "a_closed_iterator_says_so",
    # What differs in chains.
    "default seed of a `shuffle` or `random_map`": "an_inserted_map_changes_neither_order_nor_draws",
    "`mp_prefetch(n)` after filters, packing, draws or `batch`": "a_stream_is_the_oracles_in_workers",
    "weights of a mixture": "each_component_comes_in_its_share",
    "weights of datasets with names": "a_mix_is_in_the_order_of_a_mixture_sampler",
    "last window of a `WindowShuffleMapDataset`": "every_position_has_the_element_of_the_oracle",
    "`iter(elastic)` of an `ElasticIterator`": "a_closed_iterator_says_so",
    "`batch` after a `map` that returned `None`": "batches_of_absent_elements_are_refused",
    "`dataset[-1]`": "mistakes_are_errors_that_say_what_to_do",
}
ROWS = RowTests(DOCUMENT, LAWS, SECTIONS)

ONE_OBJECT = {
    "`experimental.FlatMapTransform`": [("experimental.FlatMapTransform", "transforms.FlatMap")],
    "`sources.RandomAccessDataSource`": [("sources.RandomAccessDataSource", "sources.DataSource")],
    "`PyGrainDatasetIterator`": [("python.PyGrainDatasetIterator", "DataLoaderIterator")],
    "`PyGrainCheckpointSave`, `PyGrainCheckpointRestore`, `PyGrainCheckpointHandler`": [
        ("python.PyGrainCheckpointSave", "checkpoint.CheckpointSave"),
        ("python.PyGrainCheckpointRestore", "checkpoint.CheckpointRestore"),
        ("python.PyGrainCheckpointHandler", "checkpoint.CheckpointHandler"),
    ],
}
"""The rows of names for what has another name as well."""

FILES = Path(__file__).parent / "support" / "documents"


def lines_of(file: str) -> list[list[str]]:
    """Returns the words of each line of a list that was made from Grain 0.2.18."""
    return [line.split() for line in (FILES / file).read_text().splitlines() if not line.startswith("#")]


SIGNATURES = {name: parameters for name, *parameters in lines_of("grain_signatures.txt")}
"""The parameters of Grain's functions, classes and methods; those after `*` are passed by name alone."""

NOT_ACCEPTED = {
    "grain.DataLoaderIterator": {"validate_state"},
    "grain.experimental.DatasetOptions": {"execution_tracking_mode", "min_shm_size"},
    "grain.experimental.PackAndBatchOperation": {"_cur_batch"},
}
"""Parameters that the document reports missing, or that are private."""

GRAIN_NAMES = lines_of("grain_names.txt")
"""The public names of Grain, each with its module."""

LEFT_OUT = {
    *("BatchOperation", "FilterOperation", "MapOperation", "Operation", "RandomMapOperation"),
    *("PyGrainCheckpointHandler", "PyGrainCheckpointRestore", "PyGrainCheckpointSave", "PyGrainDatasetIterator"),
    *("META_FEATURES", "Record", "Sampler", "SharedMemoryArray", "Transformation", "Transformations"),
}
"""The names of `grain.python` that the façade has not; the document says what to write, or why there is nothing."""

ABSENT = {
    *("grain.Record", "grain.__version_info__", "grain.monitoring"),
    *("grain.experimental.ExecutionTrackingMode", "grain.experimental.RngPool"),
    *("grain.experimental.ShapeDtypeStruct", "grain.experimental.ShapeDtypeStructProtocol"),
    "grain.experimental.ThreadPrefetchDatasetIterator",
    *("grain.experimental.apply_transformations", "grain.experimental.get_element_spec"),
    *("grain.experimental.get_next_index", "grain.experimental.set_next_index"),
    "grain.experimental.multithread_prefetch",
    *("grain.multiprocessing.SharedMemoryArray", "grain.multiprocessing.SharedMemoryArrayMetadata"),
    *("grain.python.Operation", "grain.python.SharedMemoryArray"),
    "grain.transforms.TfRandomMap",
}
"""Those that are not where Grain has them; the document says what to write instead."""

LOOK_UP = """
import json, operator, sys
import millstream
millstream.install_as_grain()
import grain, grain.python

def has(home, name):
    try:
        operator.attrgetter(name)(home)
    except AttributeError:
        return False
    return True

print(json.dumps([has(grain, name) or has(grain.python, name) for name in json.load(sys.stdin)]))
"""


def names_in(cell: str) -> list[str]:
    """Returns the names of Grain in a cell, each with its module if the cell has it."""
    names = []
    module = ""
    for text in re.findall(r"`([^`]+)`", cell):
        if text.endswith("."):
            module = text
        elif not text.startswith("--"):
            name = text.partition("(")[0].removeprefix("grain.")
            names.append(name if "." in name else module + name)
    return names


def parameters_of(name: str) -> list[inspect.Parameter] | None:
    """Returns the parameters of millstream's counterpart of a function, class or method; None if there is none."""
    *module, last = name.replace("grain", "millstream", 1).split(".")
    methods = []
    while True:
        try:
            home = importlib.import_module(".".join(module))
            break
        except ModuleNotFoundError:
            methods.append(module.pop())
    try:
        found = operator.attrgetter(".".join([*reversed(methods), last]))(home)
    except AttributeError:
        return None
    return list(inspect.signature(found).parameters.values())


def values(elements: Any) -> list[Any]:
    unpacked: list[Any] = jax.tree.map(lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf, list(elements))
    return unpacked


def test_every_name_of_grain_is_here_or_in_the_document() -> None:
    """Each public name of each module of Grain is in the module of that name, or the document says what to write."""
    text = DOCUMENT.read_text()
    missing = {
        f"{module}.{name}"
        for module, name in GRAIN_NAMES
        if not hasattr(importlib.import_module(module.replace("grain", "millstream", 1)), name)
    }

    assert {name for _, name in GRAIN_NAMES} >= LEFT_OUT
    assert {name for name in LEFT_OUT if hasattr(grain, name)} == set()
    assert {name for name in LEFT_OUT if f"`{name}`" not in text and f".{name}`" not in text} == set()
    assert missing == ABSENT
    assert {name for name in missing if re.search(rf"[`.]{name.rpartition('.')[2]}`", text) is None} == set()


def test_names_are_there_or_the_row_reports_them_missing() -> None:
    """A program that imports Grain finds each name of each row, unless the row begins with "not there"."""
    listed = [(name, right) for left, right in rows(DOCUMENT, SECTIONS[:1]) for name in names_in(left)]
    known = {f"{module}.{name}".removeprefix("grain.").removeprefix("python.") for module, name in GRAIN_NAMES}
    ended = python("-c", LOOK_UP, input=json.dumps([name for name, _ in listed]), check=True)

    assert len(listed) > 70
    assert {name for name, _ in listed if name.removeprefix("python.").partition(".py_")[0] not in known} == {
        "IterDataset.mp_prefetch"
    }
    assert {
        name
        for (name, right), is_there in zip(listed, json.loads(ended.stdout), strict=True)
        if is_there == right.startswith("not there")
    } == set()


def test_each_of_grains_own_tests_that_fails_has_a_reason_of_the_page() -> None:
    """The page has each reason of the list that `make clients` compares with, and its numbers."""
    lines = [line.split() for line in GRAINS_TESTS.read_text().splitlines() if not line.startswith("#")]
    (total,) = (int(words[1]) for words in lines if words[0] == "functions")
    reasons = Counter(words[0] for words in lines if len(words) == 3)
    held, failing = total - reasons.pop("internal"), sum(reasons.values())
    cells = [cells for cells in rows(DOCUMENT, ["Libraries that import Grain themselves"]) if len(cells) == 3]

    assert {cell.strip("`"): int(count) for cell, count, _ in cells} == reasons
    text = " ".join(DOCUMENT.read_text().split())

    def share(functions: int) -> str:
        return f"{(held - failing) / functions:.0%}".replace("%", " %")

    said = f"{held} test functions concern more than Grain's internals, and {held - failing} of them pass in all"
    assert f"In 0.2.18, {said}" in text
    apart = sum(reasons[reason] for reason in ("iterators", "spec", "words", "processes"))
    by_design = sum(reasons[reason] for reason in ("shards", "mixture", "draws", "workers"))
    public = held - apart
    assert f"Of the {held}, {apart} concern names" in text
    assert f"The other {public} are those that public names can be held to, and {share(public)} of them pass." in text
    assert f"Another {by_design} expect the orders" in text
    assert f"Of the remaining {public - by_design}, {share(public - by_design)} pass." in text


def test_what_newer_versions_have_is_here_or_says_what_to_write() -> None:
    """Names of Grain 0.2.19 that a program can write: two work, an argument and a protocol are errors with a remedy."""
    grain.config.update("py_permanently_disable_stats", grain.config.py_permanently_disable_stats)
    assert list(grain.experimental.HFIterDataset([{"a": 1}])) == [{"a": 1}]
    with pytest.raises(TypeError, match=r"wrap_around.* write \.repeat\(\) after the slice"):
        grain.MapDataset.range(5).slice(slice(3), wrap_around=True)  # type: ignore[call-arg]
    remedy = r"For any number of shards, write ElasticIterator\("
    with pytest.raises(AttributeError, match=remedy):
        getattr(grain.experimental, "SupportsSlicedStateManagement")  # noqa: B009  (types refuse the name)
    with pytest.raises(ImportError, match=remedy):
        exec("from millstream.experimental import SupportsSlicedStateManagement", {})


def test_names_that_are_not_there_say_what_to_write() -> None:
    """Each name of Grain's experimental module that is not here has an error with the remedy, in `grain`, too."""
    absent = {name.rpartition(".")[2] for name in ABSENT if name.startswith("grain.experimental.")}
    for name in absent:
        with pytest.raises(AttributeError, match=re.escape(f"attribute {name!r}. {REMEDIES[name]}")):
            getattr(grain.experimental, name)
        with pytest.raises(ImportError, match=re.escape(REMEDIES[name])):
            exec(f"from millstream.experimental import {name}", {})
        assert not hasattr(grain.experimental, name)
    served = """
import millstream
millstream.install_as_grain()
for module in ("experimental", "_src.python.dataset.transformations.prefetch"):
    try:
        exec(f"from grain.{module} import RngPool")
    except ImportError as error:
        print(error)
"""
    ended = python("-c", served, check=True)

    modules = ("experimental", "_src.python.dataset.transformations.prefetch")
    said = [f"cannot import name 'RngPool' from 'grain.{module}'. {REMEDIES['RngPool']}" for module in modules]
    assert ended.stdout.splitlines() == said


@pytest.mark.parametrize("name", SIGNATURES)
def test_parameters_of_grain_are_accepted(name: str) -> None:
    """Each parameter of Grain has its name here, and its position unless it is passed by name alone.

    The first parameter of a method or function is passed by position.
    """
    ours = parameters_of(name)
    if ours is None or any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in ours):
        return
    names = [parameter.name for parameter in ours]
    by_position = list(itertools.takewhile("*".__ne__, SIGNATURES[name]))
    first = 2 if by_position[:1] == ["self"] else 1
    missing = NOT_ACCEPTED.get(name, set())

    assert {*SIGNATURES[name][first:]} - {"*"} - missing <= {*names}
    by_position = [name for name in by_position if name not in missing]
    assert names[first : len(by_position)] == by_position[first:]


for row, names in ONE_OBJECT.items():

    @ROWS.of(row)
    def _(names: list[tuple[str, str]] = names) -> None:
        for one, other in names:
            assert operator.attrgetter(one)(grain) is operator.attrgetter(other)(grain)


@ROWS.of("`DataLoader`, `DataLoaderIterator`, `load`, `ReadOptions`, `MultiprocessingOptions`, `RecordMetadata`")
def _() -> None:
    loader = grain.load(range(10), num_epochs=1, shuffle=True, seed=1, batch_size=2)
    expected = values(loader)
    iterator = grain.DataLoaderIterator(loader, loader._create_initial_state())
    assert [next(iterator).tolist(), next(iterator).tolist()] == expected[:2]
    assert values(grain.DataLoaderIterator(loader, iterator.get_state())) == expected[2:]
    assert values(grain.DataLoaderIterator(loader, None)) == expected
    with pytest.raises(grain.CheckpointError):
        grain.DataLoaderIterator(loader, b"another")
    loader.close()
    with pytest.raises(ValueError, match="closed"):
        grain.DataLoaderIterator(loader)


SHARED_LIST = """
import multiprocessing, os
import millstream

def read(name):
    return list(millstream.InMemoryDataSource(name=name))

if __name__ == "__main__":
    name = f"records-{os.getpid()}"
    source = millstream.sources.SharedMemoryDataSource(elements=[1, "b", None], name=name)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(read(name) + pool.apply(read, (name,)))
    print(list(millstream.load(source, num_epochs=2, worker_count=1)))
    source.close()
    source.unlink()
    print(list(source))
    try:
        read(name)
    except FileNotFoundError:
        print("gone")
"""


@ROWS.of("`sources.SharedMemoryDataSource` (`grain.python.InMemoryDataSource`)")
def _() -> None:
    assert grain.sources.SharedMemoryDataSource is grain.python.InMemoryDataSource is grain.InMemoryDataSource
    assert values(grain.InMemoryDataSource({"x": np.arange(2)})) == [{"x": 0}, {"x": 1}]
    Path("script.py").write_text(SHARED_LIST)
    ended = python("script.py", check=True)
    assert ended.stdout.splitlines() == ["[1, 'b', None, 1, 'b', None]"] * 2 + ["[1, 'b', None]", "gone"]
    assert ended.stderr == ""


@ROWS.of("`monitoring`, absl flags `--grain_*`")
def _() -> None:
    flags = pytest.importorskip("absl.flags")
    assert not [name for name in flags.FLAGS if name.startswith("grain")]
    assert grain.load(range(4), num_epochs=1).metrics()


@ROWS.of("`worker_count=None`")
def _() -> None:
    loader = grain.load(list("abc"), worker_count=None)
    assert loader.multiprocessing_options.num_workers == len(os.sched_getaffinity(0))


@ROWS.of("order of a mixture that is not shuffled, weights 1 and 2")
def _() -> None:
    parts = [grain.MapDataset.source([part]).repeat() for part in (0, 1)]
    first = [*grain.MapDataset.mix(parts, weights=[1, 2]).__getitems__(range(300))]
    assert first[:6] == [1, 0, 1, 1, 0, 1]
    assert all(abs(sum(first[:count]) - count * 2 / 3) < 0.5 for count in range(300))


@ROWS.of("`sampler[i]` of a sharded one")
def _() -> None:
    for options in (grain.NoSharding(), grain.ShardOptions(2, 3)):
        sampler = grain.IndexSampler(5, options, shuffle=True, seed=0)
        assert [sampler[position].record_key for position in range(5)] == [2, 4, 1, 3, 0]


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_true(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has a test, here or elsewhere, and holds."""
    monkeypatch.chdir(tmp_path)
    ROWS[row]()


def test_each_row_has_a_test() -> None:
    """Each row of the sections has a test, and each test belongs to a row that exists."""
    ROWS.assert_complete()
