"""Every row about PyTorch in docs/coming-from-pytorch.md is true: what stands beside a name does the same work."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import millstream as grain
from support.documents.document_tables import RowTests

DOCUMENT = Path(__file__).parents[1] / "docs" / "coming-from-pytorch.md"

LAWS = {
    # What maps to what.
    "`Dataset` with `__getitem__`, `__getitems__`": "the_batched_read_is_used_for_every_batch",
    "`TensorDataset(images, labels)`": "columns_give_rows",
    "`ConcatDataset` of files": "parts_of_files_laid_end_to_end",
    "`Subset(dataset, indices)`, `random_split`": "keys_are_what_the_rows_stand_for",
    "transforms inside `__getitem__`": "an_error_comes_at_its_turn_and_says_where",
    "`random`, `np.random`, `torch.rand` in a transform": "no_two_draws_of_a_pipeline_are_equal",
    "`shuffle=True`, `generator=`": "each_epoch_is_a_shuffle_of_its_own",
    "`for epoch in range(n): for batch in loader:`": "each_epoch_has_an_order_and_draws_of_its_own",
    "`sampler.set_epoch(epoch)`": "each_epoch_is_a_shuffle_of_its_own",
    "`WeightedRandomSampler`": "each_epoch_has_the_shares_of_the_weights",
    "samplers of your own": "adapted_samplers_answer_in_every_way",
    "`batch_sampler`": "every_small_combination_is_as_documented",
    "`batch_size`, `drop_last`": "every_small_combination_is_as_documented",
    "`collate_fn`": "load_is_the_long_form",
    "`num_workers`": "worker_processes",
    "`prefetch_factor`": "worker_processes",
    "`timeout`": "default_values_are_those_of_the_documents",
    "`persistent_workers`, `multiprocessing_context`": "a_loop_that_is_left_leaves_its_workers_warm",
    "`worker_init_fn`": "each_worker_calls_it_once_with_its_index",
    "`get_worker_info()`": "worker_processes",
    "`pin_memory`, `batch.to(device, non_blocking=True)`": "a_training_loop_may_do_anything",
    "`DistributedSampler(dataset, num_replicas, rank)`": "global_batches_are_those_of_any_number_of_shards",
    "torchdata's `StatefulDataLoader`: `state_dict()`, `load_state_dict()`": "positions_agree_however_they_are_saved",
    # What `Batch` gives.
    "`int`, `float`": "stack_equals_the_oracle",
    "`str`": "text_and_bytes_are_exact",
    "`bytes`": "text_and_bytes_are_exact",
    "tuple": "stack_equals_the_oracle",
    "dataclass": "dataclasses_are_not_called",
    "`None`": "stack_equals_the_oracle",
    "elements that differ in shape or dtype": "elements_that_do_not_stack_are_named",
}
ROWS = RowTests(DOCUMENT, LAWS, ("PyTorch",))


@ROWS.of("`IterableDataset`")
def _() -> None:
    class Letters(grain.IterDataset[str]):
        def __iter__(self) -> Any:
            return iter("abc")

    assert list(Letters().map(str.upper)) == ["A", "B", "C"]
    assert list(grain.IterDataset.source(Letters()).map(str.upper)) == ["A", "B", "C"]
    with pytest.raises(TypeError, match="has no random access"):
        grain.load(iter("abc"))  # type: ignore[arg-type]  # the mistake


@ROWS.of("array, or tensor on the CPU")
def _() -> None:
    class Tensor:
        """The interface that NumPy and a tensor on the CPU share."""

        def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray[Any, Any]:
            return np.zeros(3, np.float32)

    for elements in (list(np.zeros((10, 3), np.float32)), [Tensor()] * 10):
        (batch,) = grain.load(elements, num_epochs=1, batch_size=10)
        assert (batch.shape, batch.dtype) == ((10, 3), np.float32)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_true(row: str) -> None:
    """Each row of each table has a test, here or elsewhere, and what it says holds."""
    ROWS[row]()


def test_each_row_has_a_test() -> None:
    """Each row has a test, and each test belongs to a row that exists."""
    ROWS.assert_complete()
