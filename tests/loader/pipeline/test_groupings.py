"""The laws of every operation that groups elements as they come, against filling groups one element after the other."""

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from millstream import transforms
from millstream.loader.operations.elements import Elements, Origins
from millstream.loader.pipeline.outputs import Cursor, Outputs
from millstream.loader.pipeline.regrouping import Regrouping
from millstream.randomness import OF_GROUPS, generator
from millstream.transforms import (
    Batch,
    BestFitPack,
    BucketBatch,
    ConcatThenSplit,
    Filter,
    FirstFitPack,
    Map,
    Rebatch,
    TokenBudgetBatch,
    WindowShuffle,
)
from millstream.transforms.grouping import GroupId, Grouping, GroupingOperation

Sizes = NDArray[np.int64]


class Case(NamedTuple):
    """A grouping with some options, and elements of which it may be asked to make groups.

    Attributes:
        grouping: the rule.
        sizes: of some elements, shape (sizes, elements).
    """

    grouping: Grouping
    sizes: Sizes


def columns(*rows: st.SearchStrategy[int]) -> st.SearchStrategy[Sizes]:
    """Draws the sizes of up to 60 elements."""
    column = st.tuples(*rows)
    return st.lists(column, max_size=60).map(
        lambda drawn: np.array(drawn, dtype=np.int64).reshape(len(drawn), len(rows)).T
    )


@st.composite
def bins(draw: st.DrawFn, kind: type[GroupingOperation]) -> Case:
    """Draws a packer into rows, with documents of one or two features, which are often equally long."""
    lengths = {"a": draw(st.integers(1, 12)), "b": draw(st.integers(1, 12))}
    if draw(st.booleans()):
        lengths["b"] = lengths["a"]
    if draw(st.booleans()):
        del lengths["b"]
    options = {
        "num_packing_bins": draw(st.integers(1, 5)),
        "max_sequences_per_bin": draw(st.none() | st.integers(1, 3)),
    }
    sizes = draw(columns(*(st.integers(0, length) for length in lengths.values())))
    alike = sizes[:1].repeat(len(lengths), axis=0)
    unlike_from = draw(st.integers(0, sizes.shape[1]))
    if len(set(lengths.values())) == 1:
        sizes = np.concatenate([alike[:, :unlike_from], sizes[:, unlike_from:]], axis=1)
    return Case(kind(lengths, **options), sizes)  # type: ignore[call-arg]  # of the packers


CASES: dict[str, st.SearchStrategy[Case]] = {
    "Batch": st.builds(Case, st.builds(Batch, st.integers(1, 9), st.booleans()), columns(*[])),
    "FirstFitPack": bins(FirstFitPack),
    "BestFitPack": bins(BestFitPack),
    "ConcatThenSplit": st.builds(
        lambda length, sizes: Case(ConcatThenSplit({"a": length}), sizes),
        st.integers(1, 12),
        columns(st.integers(1, 40)),
    ),
    "ConcatThenSplit with whole rows": st.builds(
        lambda length, sizes: Case(ConcatThenSplit({"a": length}, split_full_length_features=False), sizes[:, :20]),
        st.integers(1, 5),
        columns(st.integers(1, 12)),
    ),
    "WindowShuffle": st.builds(Case, st.builds(WindowShuffle, st.integers(1, 9)), columns(*[])),
    "TokenBudgetBatch": st.builds(
        lambda budget, most, sizes: Case(TokenBudgetBatch(budget, "a", max_batch_size=most), sizes),
        st.integers(10, 40),
        st.none() | st.integers(1, 4),
        columns(st.integers(0, 10)),
    ),
    "BucketBatch": st.builds(
        lambda window, sizes: Case(BucketBatch([4, 9], [3, 2], "a", window_size=window), sizes),
        st.integers(1, 30),
        columns(st.integers(0, 9)),
    ),
    "Rebatch": st.builds(Case, st.builds(Rebatch, st.integers(1, 9), st.booleans()), columns(st.integers(1, 20))),
}
"""Every operation that groups elements as they come, with any options."""

pytestmark = pytest.mark.usefixtures("small_groups")
EVERY_GROUPING = pytest.mark.parametrize("name", CASES)


def test_every_public_grouping_is_in_the_list() -> None:
    """A grouping of `millstream.transforms` that CASES lacks is found. PackAndBatchOperation is two of them."""
    public = [getattr(transforms, name) for name in transforms.__all__]
    groupings = {each.__name__ for each in public if isinstance(each, type) and issubclass(each, Grouping)}

    assert groupings - {name.split()[0] for name in CASES} == {"PackAndBatchOperation"}


class Numbers(Outputs):
    """The elements from `start` on, as outputs of a stage; the position after element k is block k + 1."""

    def __init__(self, sizes: Sizes, start: int, count: int, first: int = 0) -> None:
        origins = Origins(np.zeros((5, count), dtype=np.int64)).with_sizes(sizes[:, start : start + count])
        super().__init__(Elements(range(start, start + count), origins), first, count)
        self.start = start

    def after(self, row: int) -> Cursor:
        return Cursor(self.start + row + 1, (0,))


class Taken(NamedTuple):
    """A group: its elements, what was decided about each, and the positions before and after it."""

    elements: list[int]
    decided: list[list[int]]
    start: tuple[int, int]
    end: tuple[int, int]


def regrouped(case: Case, pieces: list[int], start: tuple[int, int] = (0, 0)) -> list[Taken]:
    """Returns the groups of elements that come in pieces, from a position on."""
    (at, used), found = start, []
    regrouping = Regrouping(case.grouping, Cursor(at, (0,)), used)
    for size in pieces:
        found += list(regrouping.add(Numbers(case.sizes, at, size)))
        at += size
    found += list(regrouping.finish())
    return [
        Taken(
            list(group.elements.values),
            group.elements.origins.sizes[len(case.sizes) :].tolist(),
            (group.start.block, group.start.skip[-1]),
            (group.end.block, group.end.skip[-1]),
        )
        for group in found
    ]


def in_pieces(draw: Callable[[st.SearchStrategy[int]], int], count: int) -> Iterator[int]:
    """Yields the sizes of random pieces of some elements; some are empty."""
    while count:
        size = draw(st.integers(0, count))
        yield size
        count -= size


@EVERY_GROUPING
@given(data=st.data())
@settings(deadline=None, max_examples=20)
def test_groups_do_not_depend_on_how_elements_come(name: str, data: st.DataObject) -> None:
    """Whatever the pieces, the groups are those of elements that come one by one, in order; none is empty."""
    case = data.draw(CASES[name])
    count = case.sizes.shape[1]
    groups = regrouped(case, list(in_pieces(data.draw, count)))

    assert groups == regrouped(case, [1] * count)
    assert all(group.elements for group in groups)
    assert all(
        before.end == after.start and after.elements[0] in {before.elements[-1], before.elements[-1] + 1}
        for before, after in itertools.pairwise(groups)
    )


@EVERY_GROUPING
@given(data=st.data())
@settings(deadline=None, max_examples=20)
def test_each_element_is_in_a_group(name: str, data: st.DataObject) -> None:
    """In order, from the first one on; unless the remainder is dropped, to the last one. No whole one is in two."""
    case = data.draw(CASES[name])
    groups = regrouped(case, [case.sizes.shape[1]])
    flat = [element for group in groups for element in group.elements]

    assert list(dict.fromkeys(flat)) == list(range(len(set(flat))))
    if case.grouping.keeps_remainder:
        assert len(set(flat)) == case.sizes.shape[1]
    if case.grouping.output_size is None:
        assert len(flat) == len(set(flat))


@EVERY_GROUPING
@given(data=st.data())
@settings(deadline=None, max_examples=20)
def test_a_stream_can_be_restarted_at_each_group(name: str, data: st.DataObject) -> None:
    """Begun at the start of any group, the stream has that group and those after it, and no others."""
    case = data.draw(CASES[name])
    groups, count = regrouped(case, [case.sizes.shape[1]]), case.sizes.shape[1]
    number = data.draw(st.integers(0, len(groups)))
    start = groups[number].start if number < len(groups) else groups[-1].end if groups else (0, 0)

    assert regrouped(case, [count - start[0]], start) == groups[number:]


@EVERY_GROUPING
@given(data=st.data())
@settings(deadline=None, max_examples=20)
def test_a_full_group_takes_nothing_more(name: str, data: st.DataObject) -> None:
    """A new group takes at least one element, and a full one none, however many there are."""
    case = data.draw(CASES[name].filter(lambda case: case.sizes.shape[1] > 0))
    group, count = case.grouping.begin(), case.sizes.shape[1]
    at = group.take(case.sizes)
    assert 1 <= at <= count
    while at < count and (taken := group.take(case.sizes[:, at:])):
        at += taken

    assert group.is_full or at == count
    assert not group.is_full or group.take(case.sizes) == 0
    assert not case.grouping.begin().is_full


def test_outputs_that_were_used_before_are_in_no_group() -> None:
    """A schedule that begins inside a call's outputs groups the rest of them."""
    sizes = np.empty((0, 6), dtype=np.int64)
    regrouping = Regrouping(Batch(2), Cursor(3, (0,)))
    groups = [*regrouping.add(Numbers(sizes, 0, 6, first=3)), *regrouping.finish()]

    assert [list(group.elements.values) for group in groups] == [[3, 4], [5]]
    assert [(group.start.block, group.end.block) for group in groups] == [(3, 5), (5, 6)]


def test_only_operations_that_need_to_regroup_elements() -> None:
    """A Batch groups where positions do not; what works element by element never does."""
    assert isinstance(Batch(3), Grouping)
    assert not Batch(3).regroups
    assert not isinstance(Filter(bool), Grouping)
    assert not isinstance(Map(abs), Grouping)


@given(
    seed=st.integers(0, 2**64 - 1), position=st.integers(0, 99), index=st.integers(0, 99), operation=st.integers(0, 9)
)
def test_groups_draw_what_no_random_operation_draws(seed: int, position: int, index: int, operation: int) -> None:
    """Under one seed, the stream of a group is none of those of records, whatever their epoch and index."""
    ours = GroupId(position, index).generator(seed)

    assert ours.integers(2**63) != generator(seed, position, index, operation).integers(2**63)
    assert ours.bit_generator.state["state"]["counter"][3] == OF_GROUPS
