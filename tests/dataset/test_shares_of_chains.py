"""The shares of random chains, laid end to end, are the whole: in every place, for any number of shards."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from support.draw.random_pipelines import UNEVEN_ENDS, Pipeline
from support.draw.shares import Elastic, elastic, loaders_of_chains
from support.draw.streams import Place
from support.everywhere import THREADS, assert_shares_are_the_whole, in_workers
from support.laws import assert_is_the_oracle_and_resumes


@settings(max_examples=20)
@given(elastic(fails=True), st.randoms(use_true_random=False))
def test_elastic_shards_are_the_whole(drawn: Elastic, chance: random.Random) -> None:
    """Each shard has its part of each global batch, up to its own error, and resumes from the state of any other."""
    assert_shares_are_the_whole(drawn, chance, THREADS)


@settings(max_examples=1)
@given(elastic(fails=True), st.randoms(use_true_random=False))
def test_elastic_shards_in_workers_are_the_whole(drawn: Elastic, chance: random.Random) -> None:
    """So it is in worker processes."""
    assert_shares_are_the_whole(drawn, chance, [in_workers(chance)])


@UNEVEN_ENDS
@settings(max_examples=20)
@given(loaders_of_chains(), st.sampled_from(THREADS), st.data())
def test_a_loader_of_a_chain_has_the_oracles_share(pipeline: Pipeline, place: Place, data: st.DataObject) -> None:
    """A shard, or one of several logical shards, of any operations over any epochs of a chain is the oracle's."""
    assert_is_the_oracle_and_resumes(pipeline, data, read_options=place.reading)
