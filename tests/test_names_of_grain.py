"""The rows of docs/coming-from-grain.md about names: each name resolves or is reported missing, and each row holds.

Names are looked up where unmodified programs look: in `grain`, served by millstream. Parameters are compared with those
of Grain 0.2.18.
"""

import importlib
import inspect
import itertools
import json
import operator
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import millstream as grain
from support.documents.document_tables import RowTests, first_cells, rows
from support.processes.worker_pools import python

pytestmark = pytest.mark.third_party

DOCUMENT = Path(__file__).parents[1] / "docs" / "coming-from-grain.md"
SECTIONS = ("Names", "From MapDataset to a DataLoader")
LAWS = {
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
    "`MapDataset`, `IterDataset`, `DatasetIterator`": "a_stream_is_that_of_the_oracle",
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
        "`ThreadPrefetchIterDataset`, `multithread_prefetch`"
    ): "options_that_were_given_count",
    "`experimental.ThreadPrefetchDatasetIterator`": "a_state_does_not_depend_on_prefetching",
    "`transforms.`: `DatasetSelectionMap`, `Transformations`": "a_selection_map_of_ones_own_is_asked_at_each_position",
    "`experimental.PackAndBatchOperation`": "batches_are_the_rows_of_first_fit",
    "`experimental.`: `get_element_spec`, `ShapeDtypeStruct`, `ShapeDtypeStructProtocol`": (
        "elements_are_as_the_spec_says"
    ),
    "`transforms.TfRandomMap`": "the_consumers_thread",
    # From MapDataset to a DataLoader.
    "`MapDataset.source(source)`": "every_position_has_the_element_of_the_oracle",
    "`.seed(s)`, `.shuffle(seed=s)`": "order_and_draws_are_those_of_a_data_loader",
    "`.repeat(n)`, `.repeat()`": "order_and_draws_are_those_of_a_data_loader",
    "`ds[shard_index::shard_count]`": "slices_of_an_endless_dataset_share_it_out",
    "`.map(f)`, `.map_with_index(f)`, `.random_map(f)`, `.filter(f)`, `.batch(n)`": "a_stream_is_that_of_the_oracle",
    "`.to_iter_dataset(read_options)`": "a_stream_is_that_of_the_oracle",
    "`.mp_prefetch(options)`": "workers_change_nothing",
    "`ThreadPrefetchIterDataset(ds, m)`": "a_state_does_not_depend_on_prefetching",
    "`experimental.device_put(ds, device, device_buffer_size=m)`": "batches_of_chains_on_the_device",
    "`ds[i]`": "every_position_has_the_element_of_the_oracle",
    "`ds.slice(slice(a, b))`, for a split": "every_position_has_the_element_of_the_oracle",
}
ROWS = RowTests(LAWS)

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
    "grain.experimental.PackAndBatchOperation": {"_cur_batch"},
}
"""Parameters that the document reports missing, or that are private."""

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


@pytest.mark.parametrize("row", first_cells(DOCUMENT, SECTIONS))
def test_a_row_is_true(row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row has a test, here or elsewhere, and holds."""
    monkeypatch.chdir(tmp_path)
    if row not in ONE_OBJECT:
        ROWS[row]()


def test_no_row_has_gone() -> None:
    """Each test here belongs to a row that exists."""
    assert ROWS.keys() | ONE_OBJECT.keys() == set(first_cells(DOCUMENT, SECTIONS))


def test_names_are_there_or_the_row_reports_them_missing() -> None:
    """A program that imports Grain finds each name of each row, unless the row begins with "not there"."""
    listed = [(name, right) for left, right in rows(DOCUMENT, SECTIONS[:1]) for name in names_in(left)]
    known = {
        f"{module}.{name}".removeprefix("grain.").removeprefix("python.")
        for module, name in lines_of("grain_names.txt")
    }
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


@pytest.mark.parametrize("row", ONE_OBJECT)
def test_two_names_are_of_one_object(row: str) -> None:
    """A name of Grain for what the library calls otherwise is that very object."""
    for one, other in ONE_OBJECT[row]:
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
    ended = subprocess.run([sys.executable, "script.py"], capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines() == ["[1, 'b', None, 1, 'b', None]"] * 2 + ["[1, 'b', None]", "gone"]
    assert ended.stderr == ""


@ROWS.of("`monitoring`, absl flags `--grain_*`")
def _() -> None:
    flags = pytest.importorskip("absl.flags")
    assert not [name for name in flags.FLAGS if name.startswith("grain")]
    assert grain.load(range(4), num_epochs=1).metrics()


@ROWS.of("`experimental.`: the other names")
def _() -> None:
    # What they do: tests/dataset/grain_compat.
    all_names = {name for module, name in lines_of("grain_names.txt") if module == "grain.experimental"}
    assert {name for name in all_names if not hasattr(grain.experimental, name)} == {"ThreadPrefetchDatasetIterator"}


@ROWS.of("`python.`, `constants.`, `multiprocessing.MultiprocessingOptions`")
def _() -> None:
    for module in ("python", "constants"):
        names = {name for home, name in lines_of("grain_names.txt") if home == f"grain.{module}"}
        ours = {name for name in names if hasattr(getattr(grain, module), name)}
        assert names - ours == ({"Operation", "SharedMemoryArray"} if module == "python" else set())
        assert "META_FEATURES" in ours
    assert not hasattr(grain, "META_FEATURES")
    assert importlib.import_module("millstream.multiprocessing").MultiprocessingOptions is grain.MultiprocessingOptions
