"""The stream equals the oracle's, whoever makes it."""

import contextlib
from collections.abc import Iterator
from typing import Any


import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import oracle
from strategies import Pipeline, one_to_one_operations, pipelines
from streams import comparable, drain

import millstream
from millstream.loader import executors


def loader_of(pipeline: Pipeline, num_threads: int = 0, prefetch_buffer_size: int = 500) -> millstream.DataLoader:
    """Returns a loader of a random pipeline."""
    return millstream.DataLoader(
        data_source=pipeline.source,
        sampler=pipeline.sampler,
        operations=pipeline.operations,
        shard_options=pipeline.shard,
        read_options=millstream.ReadOptions(num_threads, prefetch_buffer_size),
    )


def expected_of(pipeline: Pipeline) -> tuple[list[object], type[BaseException] | None]:
    """Returns the oracle's stream of a random pipeline."""
    return drain(oracle(pipeline.source, pipeline.sampler, pipeline.operations, pipeline.shard))


@given(pipeline=pipelines())
@settings(deadline=None, max_examples=500)
def test_inline_equals_oracle(pipeline: Pipeline) -> None:
    """Blocks of records give what one record after another gives, up to and including the first error."""
    assert expected_of(pipeline) == drain(iter(loader_of(pipeline)))


@given(
    pipeline=pipelines(),
    num_threads=st.sampled_from([1, 2, 5]),
    prefetch_buffer_size=st.sampled_from([1, 7, 500]),
    hand_over=st.sampled_from([0.0, 0.001]),
)
@settings(deadline=None, max_examples=200)
def test_threads_equal_oracle(
    pipeline: Pipeline, num_threads: int, prefetch_buffer_size: int, hand_over: float
) -> None:
    """Threads give the same stream, whether they make every block or leave the short ones to the consumer."""
    with pytest.MonkeyPatch.context() as patch, loader_iterator(pipeline, num_threads, prefetch_buffer_size) as stream:
        patch.setattr(executors, "HAND_OVER_SECONDS", hand_over)
        assert expected_of(pipeline) == drain(stream)


def loader_iterator(
    pipeline: Pipeline, num_threads: int, prefetch_buffer_size: int
) -> contextlib.AbstractContextManager[Iterator[Any]]:
    """Returns a fresh iterator that closes itself."""
    return iter(loader_of(pipeline, num_threads, prefetch_buffer_size))


@given(pipeline=pipelines(one_to_one_operations))
@settings(deadline=None, max_examples=200)
def test_length_is_the_number_of_batches(pipeline: Pipeline) -> None:
    """`len(loader)` of a 1:1 pipeline is how many batches it yields, unless one of them is an error."""
    loader = loader_of(pipeline)
    elements, error = drain(iter(loader))

    assert error is not None or len(loader) == len(elements)


@given(data=st.data(), pipeline=pipelines())
@settings(deadline=None, max_examples=200)
def test_state_at_every_step_resumes_with_the_suffix(data: st.DataObject, pipeline: Pipeline) -> None:
    """The state taken after step k, set in a fresh iterator, gives the oracle's stream from step k on."""
    expected, error = expected_of(pipeline)
    iterator = iter(loader_of(pipeline))
    states = [iterator.get_state()]
    for _ in expected:
        next(iterator)
        states.append(iterator.get_state())
    step = data.draw(st.integers(0, len(expected)))
    fresh = iter(loader_of(pipeline))
    fresh.set_state(states[step])

    assert (expected[step:], error) == drain(fresh)
    assert len(states) - 1 == len(expected)


@given(data=st.data(), pipeline=pipelines())
@settings(deadline=None, max_examples=200)
def test_seek_equals_the_suffix(data: st.DataObject, pipeline: Pipeline) -> None:
    """`seek(k)` gives the oracle's stream from step k on, from wherever the iterator is."""
    expected, error = expected_of(pipeline)
    iterator = iter(loader_of(pipeline))
    for _ in range(3):
        step = data.draw(st.integers(0, len(expected)))
        iterator.seek(step)
        taken = data.draw(st.integers(0, len(expected) - step))
        assert expected[step : step + taken] == [comparable(next(iterator)) for _ in range(taken)]
        assert iterator.step == step + taken
    iterator.seek(step)

    assert (expected[step:], error) == drain(iterator)
