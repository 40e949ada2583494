"""The claims of docs/coming-from-grain.md are true: names, and differences in behaviour.

The rows of names and spellings have their tests in test_names_of_grain.py.
"""

import importlib
import os
import re
from pathlib import Path

import pytest

import millstream as grain
from support.documents.document_tables import RowTests, first_cells

pytestmark = pytest.mark.third_party

DOCUMENT = Path(__file__).parents[1] / "docs" / "coming-from-grain.md"
CLAIMS = ("What differs, and why",)
"""The section whose rows have a test each."""

# The names of `grain.python` 0.2.18 that the façade has not; the document says what to write, or why there is nothing.
LEFT_OUT = {
    *("BatchOperation", "FilterOperation", "MapOperation", "Operation", "RandomMapOperation"),
    *("PyGrainCheckpointHandler", "PyGrainCheckpointRestore", "PyGrainCheckpointSave", "PyGrainDatasetIterator"),
    *(
        "META_FEATURES",
        "Record",
        "Sampler",
        "SharedMemoryArray",
        "Transformation",
        "Transformations",
    ),
}


GRAIN_NAMES = [
    (line.split()[0], line.split()[1])
    for line in (Path(__file__).parent / "support" / "documents" / "grain_names.txt").read_text().splitlines()
    if not line.startswith("#")
]
"""The public names of Grain 0.2.18, each with its module."""

ABSENT = {
    *("grain.Record", "grain.__version_info__", "grain.monitoring"),
    "grain.experimental.ThreadPrefetchDatasetIterator",
    *("grain.multiprocessing.SharedMemoryArray", "grain.multiprocessing.SharedMemoryArrayMetadata"),
    *("grain.python.Operation", "grain.python.SharedMemoryArray"),
    "grain.transforms.TfRandomMap",
}
"""Those that are not where Grain has them; the document says what to write instead."""


LAWS = {
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
    "`mp_prefetch(n)` after filters, packing, draws or `batch`": "workers_change_nothing",
    "weights of a mixture": "each_component_comes_in_its_share",
    "weights of datasets with names": "a_mix_is_in_the_order_of_a_mixture_sampler",
    "last window of a `WindowShuffleMapDataset`": "every_position_has_the_element_of_the_oracle",
    "`iter(elastic)` of an `ElasticIterator`": "a_closed_iterator_says_so",
    "`batch` after a `map` that returned `None`": "batches_of_absent_elements_are_refused",
    "`dataset[-1]`": "mistakes_are_errors_that_say_what_to_do",
}
ROWS = RowTests(LAWS)


@pytest.mark.parametrize("row", first_cells(DOCUMENT, CLAIMS))
def test_a_row_is_true(row: str) -> None:
    """Each row of each table has a test, here or elsewhere, and what it says holds."""
    ROWS[row]()


def test_no_row_has_gone() -> None:
    """Each test here belongs to a row that exists."""
    assert ROWS.keys() == set(first_cells(DOCUMENT, CLAIMS))


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
