"""The laws of every grouping, against the plainest way to fill groups: one element after the other."""

import itertools
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.loader.pipeline.elements import Elements, Origins
from millstream.loader.pipeline.groupings import EqualGroups, Grouping, grouping_of
from millstream.loader.pipeline.outputs import Cursor, Outputs
from millstream.loader.pipeline.schedule import Regrouping
from millstream.transforms import Batch, Filter, Map

GROUPINGS = st.builds(EqualGroups, st.integers(1, 9), keeps_remainder=st.booleans())
"""Every kind of grouping there is, with any options."""


def one_by_one(grouping: Grouping, count: int) -> Iterator[int]:
    """Yields the size of each group of a stream of this many elements, which come one at a time."""
    group, size = grouping.begin(), 0
    while count:
        taken = group.take(1)
        count, size = count - taken, size + taken
        if group.is_full:
            yield size
            group, size = grouping.begin(), 0
    if size and grouping.keeps_remainder:
        yield size


class Numbers(Outputs):
    """The numbers from `start` on, as outputs of a stage; the position after number k is block k + 1."""

    def __init__(self, start: int, count: int, first: int = 0) -> None:
        super().__init__(Elements(range(start, start + count), Origins.none()), first, count)
        self.start = start

    def after(self, row: int) -> Cursor:
        """Returns the position after a number."""
        return Cursor(self.start + row + 1, (0,))


def regrouped(grouping: Grouping, start: int, pieces: list[int]) -> list[tuple[list[int], int, int]]:
    """Returns the groups of numbers that come in pieces, with the number each begins at and the one after its last."""
    regrouping = Regrouping(grouping, Cursor(start, (0,)))
    groups = []
    for size in pieces:
        groups += list(regrouping.add(Numbers(start, size)))
        start += size
    groups += list(regrouping.finish())
    return [(list(elements.values), before.block, after.block) for elements, before, after in groups]


@given(grouping=GROUPINGS, pieces=st.lists(st.integers(0, 12), max_size=12))
@settings(deadline=None)
def test_groups_do_not_depend_on_how_elements_come(grouping: Grouping, pieces: list[int]) -> None:
    """Whatever the pieces, the groups are those of elements that come one by one, in order, each in one group."""
    groups = regrouped(grouping, 0, pieces)
    flat = list(itertools.chain.from_iterable(values for values, _, _ in groups))

    assert [len(values) for values, _, _ in groups] == list(one_by_one(grouping, sum(pieces)))
    assert flat == list(range(len(flat)))
    assert all((before, after) == (values[0], values[-1] + 1) for values, before, after in groups)


@given(grouping=GROUPINGS, pieces=st.lists(st.integers(0, 12), max_size=12), data=st.data())
@settings(deadline=None)
def test_a_stream_can_be_restarted_at_each_group(grouping: Grouping, pieces: list[int], data: st.DataObject) -> None:
    """Restarted at the start of any group, the stream has that group and those after it, and no others."""
    groups, count = regrouped(grouping, 0, pieces), sum(pieces)
    number = data.draw(st.integers(0, len(groups)))
    start = groups[number][1] if number < len(groups) else groups[-1][2] if groups else 0

    assert regrouped(grouping, start, [count - start]) == groups[number:]


@given(grouping=GROUPINGS, count=st.integers(1, 40))
def test_a_full_group_takes_nothing_more(grouping: Grouping, count: int) -> None:
    """A new group takes at least one element, and a full one none, however many there are."""
    group = grouping.begin()
    assert grouping.begin().is_full is False
    assert 1 <= group.take(count) <= count
    while not group.is_full:
        assert group.take(count) >= 1
    assert group.take(count) == 0


def test_outputs_that_were_used_before_are_in_no_group() -> None:
    """A schedule that begins inside a call's outputs groups the rest of them."""
    regrouping = Regrouping(EqualGroups(2, keeps_remainder=True), Cursor(3, (0,)))
    groups = [*regrouping.add(Numbers(0, 6, first=3)), *regrouping.finish()]

    assert [list(elements.values) for elements, _, _ in groups] == [[3, 4], [5]]
    assert [(before.block, after.block) for _, before, after in groups] == [(3, 5), (5, 6)]
    assert [after.is_final for _, _, after in groups] == [False, True]


def test_only_a_batch_regroups() -> None:
    """A Batch has a grouping of its size, which keeps the rest unless it drops it; a Map or Filter has none."""
    sizes = [list(one_by_one(grouping, 7)) for drop in (False, True) if (grouping := grouping_of(Batch(3, drop)))]

    assert sizes == [[3, 3, 1], [3, 3]]
    assert grouping_of(Map(str)) is None
    assert grouping_of(Filter(bool)) is None
