"""Positions are dealt to shards as a naive list would deal them."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.loader.deal import Deal, Tail
from millstream.sharding import ShardOptions


@st.composite
def deals(draw: st.DrawFn) -> Deal:
    """Draws one shard's deal of a short order."""
    count = draw(st.integers(1, 9))
    shard = ShardOptions(draw(st.integers(0, count - 1)), count)
    return Deal(draw(st.integers(1, 12)), shard, draw(st.integers(0, 250)), draw(st.sampled_from(Tail)))


def naive_units(deal: Deal) -> list[list[int]]:
    """Returns the positions of each unit, by cutting lists."""
    count, index, units = deal.shard.shard_count, deal.shard.shard_index, []
    positions = list(range(deal.length or 0))
    for start in range(0, len(positions), deal.unit * count):
        rest = positions[start : start + deal.unit * count]
        if deal.tail_rule is Tail.PADDED:
            units.append(rest[index * deal.unit : (index + 1) * deal.unit] or [rest[-1]])
            continue
        if deal.tail_rule is Tail.TRIMMED and len(rest) < deal.unit * count:
            rest = rest[: len(rest) // count * count]
        units.append(np.array_split(rest, count)[index].tolist())
    return [unit for unit in units if unit]


def shards(deal: Deal) -> list[Deal]:
    """Returns the deals of all shards of one order."""
    count = deal.shard.shard_count
    return [Deal(deal.unit, ShardOptions(i, count), deal.length, deal.tail_rule) for i in range(count)]


@given(deals())
@settings(deadline=None, max_examples=300)
def test_units_are_those_of_a_naive_list(deal: Deal) -> None:
    """Number, positions and sizes of a shard's units are what cutting the list of all positions gives."""
    units = naive_units(deal)

    assert deal.num_units == len(units)
    assert [deal.positions(k, k + 1).tolist() for k in range(len(units))] == units
    assert [list(deal.tail)] == (units[deal.whole_units :] or [[]])
    assert deal.positions(0, len(units)).dtype == np.int64


@given(deals(), st.data())
@settings(deadline=None, max_examples=200)
def test_several_units_are_single_ones_laid_end_to_end(deal: Deal, data: st.DataObject) -> None:
    """Asking for a run of units is asking for each of them, and every position knows its unit."""
    units = naive_units(deal)
    start = data.draw(st.integers(0, len(units)))
    stop = data.draw(st.integers(start, len(units)))
    positions = deal.positions(start, stop)

    assert positions.tolist() == [position for unit in units[start:stop] for position in unit]
    assert deal.units_of(positions).tolist() == [k for k in range(start, stop) for _ in units[k]]


@given(deals())
@settings(deadline=None, max_examples=200)
def test_the_shards_share_every_position_once(deal: Deal) -> None:
    """The k-th units of all shards laid end to end are the next positions; an even tail leaves out fewer than shards.

    Shares of the tail differ by one position at most, the larger ones first; padded ones are full before the next.
    Templates are nobody's share.
    """
    everyone = shards(deal)
    most = max(shard.num_units or 0 for shard in everyone)
    rows = [[own_positions(shard, k) if k < (shard.num_units or 0) else [] for shard in everyone] for k in range(most)]
    dealt = [position for row in rows for part in row for position in part]
    left_out = (deal.length or 0) - len(dealt)

    assert dealt == list(range(len(dealt)))
    assert 0 <= left_out < (deal.shard.shard_count if deal.tail_rule is Tail.TRIMMED else 1)
    for row in rows:
        largest = {Tail.SPREAD: 1, Tail.TRIMMED: 0, Tail.PADDED: deal.unit}[deal.tail_rule]
        assert 0 <= len(row[0]) - len(row[-1]) <= largest


@given(deals())
@settings(deadline=None, max_examples=200)
def test_padded_and_trimmed_shards_have_equally_many_units(deal: Deal) -> None:
    """With a trimmed or padded tail no shard has a unit more than another, and with a padded one all are equally many.

    A padded shard's own positions, its `tail_share` of the tail, are those whose place in the global unit is its own.
    """
    everyone = shards(deal)

    assert deal.tail_rule is Tail.SPREAD or len({shard.num_units for shard in everyone}) == 1
    assert [shard.tail_share for shard in everyone] == [
        len(own_positions(shard, shard.whole_units or 0)) for shard in everyone
    ]
    if deal.tail_rule is Tail.PADDED:
        for shard in everyone:
            for unit in range(shard.num_units or 0):
                start = (unit * deal.shard.shard_count + shard.shard.shard_index) * deal.unit
                assert all(start <= position < start + deal.unit for position in own_positions(shard, unit))


def own_positions(deal: Deal, unit: int) -> list[int]:
    """Returns the positions of a unit, without a template's."""
    return [position for position in deal.positions(unit, unit + 1).tolist() if not deal.is_template(position)]


@given(st.integers(1, 300), st.integers(1, 8), st.integers(0, 1 << 40))
@settings(deadline=None, max_examples=100)
def test_an_endless_order_has_whole_units_only(unit: int, count: int, number: int) -> None:
    """Without an end there is no tail, and unit k of shard s starts at (k * shards + s) * unit, however large k is."""
    for index in range(count):
        deal = Deal(unit, ShardOptions(index, count), None, Tail.SPREAD)
        start = (number * count + index) * unit

        assert (deal.num_units, deal.whole_units, list(deal.tail)) == (None, None, [])
        assert deal.positions(number, number + 1).tolist() == list(range(start, start + unit))


def test_a_unit_larger_than_memory_is_its_tail() -> None:
    """A batch size beyond all records means one batch of everything, and costs what everything costs."""
    deal = Deal(1 << 62, ShardOptions(1, 2), 7, Tail.SPREAD)

    assert deal.num_units == 1
    assert deal.positions(0, 1).tolist() == [4, 5, 6]
