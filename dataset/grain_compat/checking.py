"""Functions for user-defined datasets: a check of states, settings found by measuring, positions of a shuffle."""

import dataclasses
import functools
import json
import sys
from typing import Any, SupportsIndex

from millstream.core.checks import as_integer, as_integer_or_none, as_positive
from millstream.core.randomness import as_seed
from millstream.dataset.opening import opened
from millstream.dataset.stream_steps import as_stream, step_of
from millstream.loader.data_loader import DataLoader
from millstream.loader.debugging import difference
from millstream.loader.pipeline.calls import num_bytes
from millstream.loader.threads.options import MultiprocessingOptions, ReadOptions, available_cores
from millstream.samplers.permutation import permute_one

MAX_BUFFERED = 1000
"""The default for the maximum number of elements that are read ahead, as in Grain."""


def assert_equal_output_after_checkpoint(ds: Any) -> None:
    """Checks that a dataset or a loader resumes exactly after each of its elements, for tests of your own classes.

    The dataset is read to its end. Each state is converted to JSON and back, and restored on a new iterator, which must
    then have the same state, and yield the same remaining elements. All states must have the same keys, types and
    lengths.

    Args:
        ds: the dataset or loader, which must have an end.

    Raises:
        AssertionError: a state fails one of these checks. The message has the number of elements before it.
        ValueError: the dataset yields nothing.

    Examples:
        >>> dataset = millstream.MapDataset.range(10).shuffle(seed=0).to_iter_dataset().batch(4)
        >>> millstream.experimental.assert_equal_output_after_checkpoint(dataset)
    """
    is_loader = isinstance(ds, DataLoader)
    begin = functools.partial(iter, ds) if is_loader else functools.partial(opened, step_of(as_stream(ds, "ds")))
    with begin() as iterator:
        states = [_text(iterator)]
        elements = []
        for element in iterator:
            elements.append(element)
            states.append(_text(iterator))
    if not elements:
        raise ValueError("The dataset yields nothing, so there is nothing to check.")
    for step, text in enumerate(states):
        if _shape(json.loads(text)) != _shape(json.loads(states[0])):
            raise AssertionError(
                f"States must have the same keys and types throughout: after {step} elements {text}, at the beginning "
                f"{states[0]}."
            )
        with begin() as fresh:
            fresh.set_state(text.encode() if is_loader else json.loads(text))
            if (there := _text(fresh)) != text:
                raise AssertionError(f"After {step} elements the state is {text}, and once restored it is {there}.")
            rest = list(fresh)
        if len(rest) != len(elements) - step:
            raise AssertionError(f"After {step} elements {len(elements) - step} come, and once restored {len(rest)}.")
        for number, (element, other) in enumerate(zip(elements[step:], rest, strict=True), step):
            if (changed := difference(element, other)) is not None:
                raise AssertionError(f"Element {number}, restored after {step} elements, has {changed}.")


@dataclasses.dataclass(frozen=True)
class PerformanceConfig:
    """Settings for a dataset.

    Attributes:
        multiprocessing_options: for `mp_prefetch`; None for no advice.
        read_options: for `to_iter_dataset`; None for no advice.

    Examples:
        >>> settings = millstream.experimental.PerformanceConfig(millstream.MultiprocessingOptions(4))
        >>> settings.multiprocessing_options.num_workers
        4
    """

    multiprocessing_options: MultiprocessingOptions | None = None
    read_options: ReadOptions | None = None


def pick_performance_config(
    ds: Any,
    *,
    ram_budget_mb: float,
    max_workers: SupportsIndex | None = None,
    max_buffer_size: SupportsIndex | None = None,
    samples_to_check: SupportsIndex = 5,
) -> PerformanceConfig:
    """Returns the largest numbers of workers and of prefetched elements that fit into a memory budget.

    It measures the memory of a few elements, but not their speed. `summary()` on an iterator of the running dataset
    reports the number of workers that the trainer needs. No element depends on these settings.

    Args:
        ds: the dataset.
        ram_budget_mb: the memory limit for elements that are ready or in work, in megabytes (2**20 bytes).
        max_workers: the maximum number of workers, at least 1; None for one per core that this process may use.
        max_buffer_size: the maximum number of elements that are read ahead, at least 1; None for 1,000.
        samples_to_check: the number of elements to measure, at least 1.

    Raises:
        TypeError: ds is not a dataset, or an argument is not a number.
        ValueError: an argument is out of range, or the dataset yields nothing.

    Examples:
        >>> dataset = millstream.MapDataset.range(100).map(lambda x: np.zeros(1 << 18)).to_iter_dataset()
        >>> settings = millstream.experimental.pick_performance_config(dataset, ram_budget_mb=64, max_workers=1)
        >>> settings.multiprocessing_options.num_workers, settings.read_options.prefetch_buffer_size
        (1, 32)
    """
    budget_mb = as_positive(ram_budget_mb, "ram_budget_mb")
    samples = as_integer(samples_to_check, "samples_to_check", minimum=1)
    worker_limit = as_integer_or_none(max_workers, "max_workers")
    buffer_limit = as_integer_or_none(max_buffer_size, "max_buffer_size") or MAX_BUFFERED
    with opened(step_of(as_stream(ds, "ds"))) as iterator:
        sizes = [num_bytes([element]) for element, _ in zip(iterator, range(samples), strict=False)]
    if not sizes:
        raise ValueError("The dataset yields nothing, so nothing can be measured.")
    fitting = int(min(budget_mb * (1 << 20), sys.maxsize) // max(1, *sizes))
    # Each worker has an element in work and one that is ready.
    workers = max(1, min(fitting // 2, available_cores(), worker_limit or available_cores()))
    buffered = max(1, min(fitting, buffer_limit))
    return PerformanceConfig(MultiprocessingOptions(workers), ReadOptions(min(16, buffered), buffered))


def _shape(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: _shape(value) for key, value in state.items()}
    if isinstance(state, list):
        return [_shape(value) for value in state]
    return type(state)


def _text(iterator: Any) -> str:
    state = iterator.get_state()
    return state.decode() if isinstance(state, bytes) else json.dumps(state, sort_keys=True)


def index_shuffle(index: SupportsIndex, max_index: SupportsIndex, seed: SupportsIndex, rounds: SupportsIndex) -> int:
    """Returns the position of an index in the permutation of [0, max_index] that `shuffle` and `IndexSampler` use.

    Args:
        index: 0 … max_index.
        max_index: the largest index, below 2**63.
        seed: selects the permutation, 0 … 2**64 - 1.
        rounds: an even number, 4 … 1024, as required by Grain; without effect here.

    Raises:
        ValueError: an argument is out of range.

    Examples:
        >>> [millstream.experimental.index_shuffle(index, max_index=4, seed=0, rounds=4) for index in range(5)]
        [2, 4, 1, 3, 0]
    """
    most = as_integer(max_index, "max_index", minimum=0)
    offset = as_integer(index, "index", minimum=0)
    number = as_integer(rounds, "rounds")
    if offset > most or most >= 1 << 63:
        raise ValueError(f"index must be at most max_index, and max_index below 2**63, got {offset} and {most}.")
    if number % 2 or not 4 <= number <= 1024:
        raise ValueError(f"rounds must be an even number from 4 to 1024, got {number}.")
    return permute_one(offset, most + 1, as_seed(seed), 0)
