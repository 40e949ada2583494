"""Tiny records: what a loader itself costs per record."""

import numpy as np

from suite import data
from suite.case import Case, Goal, Pick
from suite.contenders import chain_goals, grain_goals, rates
from suite.scale import Scale
from suite.steps import add_fraction, add_fraction_in_graph, identity, is_even
from suite.work import Filter, Map, RandomMap, Records, Work

BATCH_SIZE = 256


def _integers(scale: Scale) -> Records:
    return Records(data.integers(scale.pick(tiny=2048, quick=1 << 20, full=1 << 20)))


def plain_work(scale: Scale) -> Work:
    return Work(_integers(scale), (Map(identity, identity, identity),), BATCH_SIZE)


def _random(scale: Scale) -> Work:
    return Work(_integers(scale), (RandomMap(add_fraction, add_fraction_in_graph, add_fraction_in_graph),), BATCH_SIZE)


def _filtered(scale: Scale) -> Work:
    return Work(_integers(scale), (Filter(is_even, is_even, is_even),), BATCH_SIZE)


def _elements(scale: Scale) -> Work:
    vectors = data.vectors(scale.pick(tiny=512, quick=65_536, full=65_536))
    return Work(Records(vectors), (Map(identity, identity, identity),), None)


CASES = (
    Case(
        name="tiny",
        title="ints in memory, identity map, batch 256",
        make_work=plain_work,
        contenders=rates("loop", "keys", as_chain=True),
        goals=(
            *chain_goals(20),
            Goal("at least PyTorch, both without workers", 1, Pick("pytorch", 0), Pick("millstream", 0)),
            *grain_goals(100),
        ),
    ),
    Case(
        name="tiny_random",
        title="the same, one random draw per record",
        make_work=_random,
        contenders=rates("loop", "loop, streams"),
        goals=grain_goals(25),
        view=np.floor,
    ),
    Case(
        name="tiny_filter",
        title="the same, a filter that keeps half; records that are kept",
        make_work=_filtered,
        contenders=rates("loop"),
        goals=grain_goals(50),
    ),
    Case(
        name="elements",
        title="float32 vectors of 64, not batched at all",
        make_work=_elements,
        contenders=rates("loop"),
        goals=grain_goals(10, workers=2),
    ),
)
