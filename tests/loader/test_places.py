"""The stream has no hidden inputs: random pipelines that mix in all that their process has set are the oracle's.

Actors have the same law in `cluster/test_ray.py`.
"""

import random

import cloudpickle
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import millstream
from support.draw import random_groupings, random_pipelines
from support.draw.random_pipelines import UNEVEN_ENDS, Pipeline
from support.processes.moves import move_at_random
from support.processes.program_settings import (
    A_PIPELINE,
    SETTINGS,
    assert_is_the_oracle_with_settings,
    pipelines_that_see_settings,
)

# Workers need not import hypothesis to have the operations of these modules.
for module in (random_pipelines, random_groupings):
    cloudpickle.register_pickle_by_value(module)

pytestmark = [UNEVEN_ENDS, pytest.mark.third_party, pytest.mark.usefixtures("small_groups")]


@given(
    pipeline=pipelines_that_see_settings(),
    names=st.sets(st.sampled_from(sorted(SETTINGS))),
    chance=st.randoms(use_true_random=False),
)
@settings(max_examples=3)
@example(pipeline=A_PIPELINE, names=set(SETTINGS), chance=random.Random(1))
def test_every_place_is_the_oracle_of_a_program_that_has_changed_its_process(
    pipeline: Pipeline, names: set[str], chance: random.Random
) -> None:
    """The consumer's thread, others, a worker, and all of these in turns give the same bytes.

    So they do whatever the program has set in its process.
    """
    with pytest.MonkeyPatch.context() as patch:
        move_at_random(patch, chance, max_workers=1)
        assert_is_the_oracle_with_settings(
            pipeline,
            names,
            {"read_options": millstream.ReadOptions(0)},
            {"read_options": millstream.ReadOptions(4)},
            {"worker_count": 1},
            {"worker_count": "auto"},
        )
