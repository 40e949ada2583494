"""Every place yields the oracle's stream of every kind of pipeline, and resumes it from any state."""

import sys
from typing import Any

import cloudpickle
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import millstream
from millstream.loader.engine import policy
from support.draw import random_groupings, random_pipelines
from support.draw.random_groupings import GROUPINGS, grouping_pipelines
from support.draw.random_pipelines import (
    UNEVEN_ENDS,
    Pipeline,
    dealt_pipelines,
    one_to_one_operations,
    pipelines,
)
from support.laws import assert_is_the_oracle_and_resumes, expected_of, loader_of
from support.processes.moves import move_at_random

# Workers need not import hypothesis to have the operations of these modules.
for module in (random_pipelines, random_groupings, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)

PIPELINES: dict[str, st.SearchStrategy[Pipeline]] = {
    "1:1": pipelines(one_to_one_operations),
    "any": pipelines(),
    "logical shards": dealt_pipelines(),
    **{name: grouping_pipelines(name) for name in GROUPINGS},
}
"""All kinds of pipelines: a new operation belongs into one of their strategies."""

EVERY_PIPELINE = pytest.mark.parametrize("kind", PIPELINES)
pytestmark = [UNEVEN_ENDS, pytest.mark.usefixtures("small_groups")]


@EVERY_PIPELINE
@given(data=st.data())
@settings(deadline=None, max_examples=25)
def test_the_consumers_thread(kind: str, data: st.DataObject) -> None:
    """Blocks of records give the stream of one record after another, with num_threads=0."""
    assert_is_the_oracle_and_resumes(data.draw(PIPELINES[kind]), data)


@EVERY_PIPELINE
@given(data=st.data())
@settings(deadline=None, max_examples=12)
def test_reader_threads(kind: str, data: st.DataObject) -> None:
    """Threads give the same stream, whether they compute every block or leave the short ones to the consumer."""
    threads = millstream.ReadOptions(data.draw(st.sampled_from([1, 2, 5])), data.draw(st.sampled_from([1, 7, 500])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "HAND_OVER_SECONDS", data.draw(st.sampled_from([0.0, 0.001])))
        assert_is_the_oracle_and_resumes(data.draw(PIPELINES[kind]), data, read_options=threads)


@EVERY_PIPELINE
@given(data=st.data())
@settings(deadline=None, max_examples=4)
def test_worker_processes(kind: str, data: st.DataObject) -> None:
    """Any number of workers, with any buffers and threads, gives the same stream."""
    options: dict[str, Any] = {
        "worker_count": data.draw(st.sampled_from([1, 2, 2, 3])),
        "worker_buffer_size": data.draw(st.sampled_from([1, 2, 7])),
        "read_options": millstream.ReadOptions(*data.draw(st.sampled_from([(0, 500), (2, 8), (16, 500)]))),
    }
    assert_is_the_oracle_and_resumes(data.draw(PIPELINES[kind]), data, **options)


@EVERY_PIPELINE
@given(data=st.data())
@settings(deadline=None, max_examples=4)
def test_states_do_not_grow(kind: str, data: st.DataObject) -> None:
    """The state of the last step has at most 20 bytes per logical shard more than that of the first."""
    pipeline = data.draw(PIPELINES[kind])
    with iter(loader_of(pipeline)) as iterator:
        first = iterator.get_state()
        iterator.seek(len(expected_of(pipeline)[0]))
        assert len(iterator.get_state()) <= len(first) + 20 * (pipeline.shard.logical_shards or 1)


@EVERY_PIPELINE
@given(data=st.data())
@settings(deadline=None, max_examples=4)
def test_moving_between_this_process_and_workers(kind: str, data: st.DataObject) -> None:
    """Whenever worker_count="auto" moves the work, or starts and ends workers, the stream is the same."""
    chance = data.draw(st.randoms(use_true_random=False))
    options: dict[str, Any] = {
        "worker_count": "auto",
        "worker_buffer_size": data.draw(st.sampled_from([1, 2])),
        "read_options": millstream.ReadOptions(*data.draw(st.sampled_from([(0, 500), (2, 8), (16, 500)]))),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "HAND_OVER_SECONDS", data.draw(st.sampled_from([0.0, 0.001])))
        move_at_random(patch, chance)
        assert_is_the_oracle_and_resumes(data.draw(PIPELINES[kind]), data, **options)
