"""Opening of streams: the compilation of a straight chain to the pipeline that a loader runs, and iterators of joins.

All streams below one join share one set of threads, which prefetches each as far as it is drawn from.
"""

import dataclasses
import functools
import itertools
from typing import Any

from millstream import grain_kinds
from millstream.dataset.chain import Chain, fixed_chain, joint_reading, share_workers, warm_workers_of
from millstream.dataset.chain_rendering import check_no_stream, first_element
from millstream.dataset.iterators.chain_iterator import ReadIterator
from millstream.dataset.iterators.dataset_iterator import DatasetIterator
from millstream.dataset.iterators.fed_iterator import FedIterator
from millstream.dataset.iterators.inputs import Input, JoinedInput, input_of
from millstream.dataset.iterators.join_iterator import JoinIterator, iterator_of
from millstream.dataset.iterators.running import ALONE, FixedChain, Running, Shared
from millstream.dataset.nodes.source_node import HANDED, copied_with
from millstream.dataset.options import DatasetOptions
from millstream.dataset.stream_steps import (
    NO_THREADS,
    NO_WORKERS,
    Join,
    OwnStream,
    Read,
    StreamStep,
    WithOptions,
    options_of,
    with_held,
    without_threads,
)

_BEGIN = "_begin"
"""The attribute of a step with the function that begins its iterators, made for the first one. It is not pickled."""


def opened(step: StreamStep) -> DatasetIterator[Any]:
    """Returns a new iterator of the chain that ends with a step."""
    return iterator_of(_opened(step, ALONE))


def _input(step: StreamStep, shared: Shared) -> Input:
    """Returns a new input of the chain that ends with a step, below the join of `shared`."""
    return input_of(_opened(step, shared))


def _opened(step: StreamStep, shared: Shared) -> DatasetIterator[Any] | Input:
    is_alone = shared is ALONE
    warm = warm_workers_of(step)
    if is_alone and warm.fixed is not None and (begin := vars(step).get(_BEGIN)) is not None:
        warm.fixed.check_unchanged()
        iterator: DatasetIterator[Any] = begin()
        return iterator
    shared = dataclasses.replace(shared, options=options_of(step, shared.options))
    chain = Chain.of(step)
    fixed = fixed_chain(step, chain)
    running = Running(
        chain.workers if shared.crew is None else NO_WORKERS,
        chain.reading or NO_THREADS,
        warm,
        shared.options.filter_limits,
        shared,
        None if shared.is_alone else step,
        tolerance=shared.options.tolerance,
        num_local=chain.num_local,
        local_reading=chain.local_reading,
    )
    leaf = chain.leaf
    if isinstance(leaf, Read):
        reading = chain.reading or leaf.reading
        if shared.reading is not None and not reading.reads_ahead:
            reading = shared.reading
        running = dataclasses.replace(running, reading=reading)
        begin = functools.partial(ReadIterator, fixed, running, allows_none=leaf.allow_nones)
        if is_alone:
            vars(step)[_BEGIN] = begin
        return begin()
    if isinstance(leaf, Join):
        return _after_join(leaf, chain, fixed, running)
    if isinstance(leaf, OwnStream):
        leaf = dataclasses.replace(leaf, dataset=_handed_down(leaf.dataset, shared.options))
    return _followed(leaf.opened(functools.partial(_input, shared=shared.combined())), chain, fixed, running)


def _after_join(join: Join, chain: Chain, fixed: FixedChain, running: Running) -> DatasetIterator[Any] | Input:
    following = join.followed_by(fixed, running, chain.reading, functools.partial(drawn, join))
    if following is not None:
        return following
    shared = running.shared.combined()
    if not fixed.operations and chain.reading is not None:
        shared = dataclasses.replace(shared, reading=chain.reading)
    if not running.workers.are_wanted:
        return _followed(drawn(join, shared), chain, fixed, running)
    stream, running = _drawn_by_workers(join, chain, running, shared)
    return _followed(stream, chain, fixed, running)


def _followed(
    stream: DatasetIterator[Any] | Input, chain: Chain, fixed: FixedChain, running: Running
) -> DatasetIterator[Any] | Input:
    """Returns an iterator of the operations of a chain after its leaf."""
    if not fixed.operations:
        # Nothing is left to prefetch, so that a state is that of the stream.
        return stream
    if len(fixed.operations) == chain.num_local:
        running = dataclasses.replace(running, workers=NO_WORKERS)
    return FedIterator(input_of(stream), fixed, running)


def _drawn_by_workers(
    join: Join, chain: Chain, running: Running, shared: Shared
) -> tuple[JoinedInput | JoinIterator, Running]:
    """Opens a join, the chains below which run in one set of worker processes.

    Returns:
        The join, or an iterator of it that has the workers, and the execution of the operations after it, some of which
        may run in the same workers.
    """
    reading = joint_reading(join.above, chain.reading)
    makes_batches = join.makes_batches or any(operation.makes_batches for operation in chain.operations)
    crew = running.crew_below(reading, makes_batches=makes_batches)
    stream = drawn(join, dataclasses.replace(shared, crew=crew))
    if not running.workers.chooses_workers:
        # Workers do all the work.
        running = dataclasses.replace(running, reading=reading)
    if len(chain.operations) > chain.num_local:
        return stream, dataclasses.replace(running, shared=dataclasses.replace(running.shared, crew=crew))
    iterator = JoinIterator(stream)
    iterator.run_by(crew, running.workers, reading)
    running.staff(crew, iterator.profiler)
    return iterator, running


def drawn(join: Join, shared: Shared) -> JoinedInput:
    """Returns a join that draws in the consumer's thread."""
    joined = join.opened(functools.partial(_input, shared=shared))
    joined.name = join.text
    joined.draw_again = functools.partial(_drawn_again, join)
    return joined


def _drawn_again(join: Join, count: int) -> tuple[list[Any], bool]:
    return first_elements(join, count), join.makes_batches


def first_elements(step: StreamStep, count: int) -> list[Any]:
    """Returns the first elements of a stream, up to `count`, which this thread computes.

    Raises:
        TypeError: a source may be a stream, whose records would be lost.
    """
    check_no_stream(step)
    with opened(without_threads(step)) as iterator:
        return list(itertools.islice(iterator, count))


def first_element_of(step: Any) -> Any:
    """Returns the first element of a stream or a node, for a diagram."""
    return next(iter(first_elements(step, 1))) if isinstance(step, StreamStep) else first_element(step)


def _handed_down(dataset: Any, options: DatasetOptions) -> Any:
    """Returns a user's dataset that opens those below it with options, whenever it does so.

    It is a copy that has copies of the datasets in its attributes; the dataset itself if no option was given.
    """
    return with_held(dataset, functools.partial(_handed_to, options=options)) if options.given else dataset


def _handed_to(dataset: Any, options: DatasetOptions) -> Any:
    if isinstance(dataset, grain_kinds.MapDataset):
        return copied_with(dataset, {HANDED: options.merge(vars(dataset).get(HANDED)), "_blocks": None})
    if dataset.iterates_itself:
        return _handed_down(dataset, options)
    step = dataset._step  # noqa: SLF001  (as every stream of the library has)
    handed = WithOptions((step,), options)
    share_workers(handed, step)
    return copied_with(dataset, {"_step": handed})
