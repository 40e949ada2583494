"""Parts of sources that are read in units keep the windowed order: a split decodes each unit about once per epoch."""

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import millstream
from millstream import HierarchicalSampler, IndexSampler, MapDataset, ReadOptions, load
from millstream.experimental import ZipMapDataset

NUM_UNITS, WINDOW = 40, 4


class Units:
    """Records in units of unlike sizes, of which it keeps twice a window decoded, and counts the decoded ones."""

    window_units = WINDOW

    def __init__(self) -> None:
        self.unit_sizes = np.random.default_rng(0).integers(0, 40, NUM_UNITS)
        self.unit_of = np.repeat(np.arange(NUM_UNITS), self.unit_sizes)
        self.decoded = 0
        self._kept: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.unit_of)

    def __getitem__(self, key: int) -> int:
        unit = int(self.unit_of[key])
        if unit not in self._kept:
            self.decoded += 1
        self._kept[unit] = None
        self._kept.move_to_end(unit)
        if len(self._kept) > 2 * WINDOW:
            self._kept.popitem(last=False)
        return int(key)


SIZE = len(Units())
ORDER = np.random.default_rng(1).permutation(SIZE)
SPLITS: dict[str, Callable[[MapDataset[Any]], MapDataset[Any]]] = {
    "all": lambda units: units,
    "map": lambda units: units.map(abs).map_with_index(lambda _, key: key).seed(3).random_map(lambda key, _: key),
    "a:b": lambda units: units[SIZE // 3 : SIZE - 5],
    "every third": lambda units: units[1::3],
    "backwards": lambda units: units[SIZE - 7 : 11 : -2],
    "keys in order": lambda units: units.slice(np.setdiff1d(np.arange(SIZE), np.arange(0, SIZE, 10))),
    "keys in any order": lambda units: units.slice(ORDER[: SIZE * 9 // 10]),
    "a part of a part": lambda units: units.slice(ORDER[: SIZE // 2]).map(abs)[3::2],
    "folds": lambda units: MapDataset.concatenate([units[: SIZE // 5], units[2 * SIZE // 5 :]]),
    "beside records in memory": lambda units: MapDataset.concatenate([units[:300], MapDataset.range(SIZE, SIZE + 300)]),
    "pairs": lambda units: MapDataset.select_from_datasets(
        [units[:300], units[300:]], [(int(k) % 2, int(k) % 300) for k in ORDER[:400]]
    ),
    "zip": lambda units: ZipMapDataset([MapDataset.range(SIZE), units]).map(lambda pair: pair[1]),
}


@pytest.mark.parametrize("name", SPLITS)
def test_a_shuffled_part_decodes_each_unit_about_once(name: str) -> None:
    """`load(part, shuffle=True)` yields the part's records once per epoch, with few units in use at any time."""
    source = Units()
    part = SPLITS[name](MapDataset.source(source))
    expected = sorted(part)
    source.decoded = 0
    loader = load(part, shuffle=True, seed=0, num_epochs=2, read_options=ReadOptions(0))
    found = list(loader)
    touched = len({int(source.unit_of[key]) for key in expected if key < SIZE})
    assert source.decoded <= 2 * touched + 2 * WINDOW
    for epoch in (found[: len(expected)], found[len(expected) :]):
        assert sorted(epoch) == expected
        assert epoch != expected
    assert part.unit_sizes is not None
    assert part.unit_numbers is not None
    assert (part.unit_sizes.sum(), len(part.unit_numbers)) == (len(part), len(part.unit_sizes))
    positions = loader.sampler.positions_of(np.arange(len(part)), stop=len(part))  # type: ignore[attr-defined]
    assert sorted(positions[:, 0].tolist()) == list(range(len(part)))


@pytest.mark.parametrize("keys", [np.sort(ORDER[:500]), ORDER[:500], list(range(7, 400, 3))])
def test_a_sampler_of_keys_decodes_each_unit_about_once(keys: Any) -> None:
    """`HierarchicalSampler(keys=...)` reads these records in windows, and resumes on any number of hosts."""
    source = Units()
    sampler = HierarchicalSampler(source.unit_sizes, window_units=WINDOW, seed=0, num_epochs=1, keys=keys)

    def loader(seed: int = 0, shard: int = 0, shards: int = 1) -> millstream.DataLoader:
        return millstream.DataLoader(
            data_source=source,
            sampler=HierarchicalSampler(source.unit_sizes, window_units=WINDOW, seed=seed, num_epochs=1, keys=keys),
            operations=[millstream.Batch(12 // shards)],
            shard_options=millstream.ShardOptions(shard, shards),
            read_options=ReadOptions(0),
        )

    batches = list(loader())
    assert sorted(np.concatenate(batches).tolist()) == sorted(np.asarray(keys).tolist())
    assert source.decoded <= len(set(source.unit_of[np.asarray(keys)].tolist()))
    iterator = iter(loader())
    for _ in range(5):
        next(iterator)
    halves = [iter(loader(shard=shard, shards=2)) for shard in (0, 1)]
    for half in halves:
        half.set_state(iterator.get_state())
    resumed = [np.concatenate(parts).tolist() for parts in zip(*halves, strict=True)]
    assert resumed == [batch.tolist() for batch in batches[5:]]
    with pytest.raises(millstream.errors.CheckpointError, match="seed"):
        iter(loader(seed=1)).set_state(iterator.get_state())
    assert sampler.largest_key == max(keys)


def test_orders_that_need_no_windows_stay_global() -> None:
    """Without units, without a shuffle, and above a shuffle of one's own, the order is that of an IndexSampler."""
    units = MapDataset.source(Units())
    for part in (MapDataset.range(50)[3:], units.shuffle(seed=0), units.repeat(2), units.batch(2), units[3:3]):
        assert (part.window_units if len(part) else None) is None
        assert part.unit_sizes is None or not len(part)
    assert isinstance(load(units[:50], num_epochs=1).sampler, IndexSampler)
    assert isinstance(load(units.shuffle(seed=0), shuffle=True, seed=0).sampler, IndexSampler)


def test_a_split_of_parquet_decodes_as_many_row_groups_as_the_whole(tmp_path: Path) -> None:
    """The recipe for a held-out set reads Parquet in windows, for records chosen at random too."""
    pq.write_table(pa.table({"id": range(3000)}), tmp_path / "a.parquet", row_group_size=50)
    with millstream.ParquetDataSource(tmp_path / "a.parquet", cache_bytes=4000) as source:
        assert source.window_units is not None
        chosen = np.random.default_rng(0).permutation(3000)[:2500]
        part = MapDataset.source(source).slice(chosen).map(lambda record: int(record["id"]))
        loader = load(part, shuffle=True, seed=0, num_epochs=1)
        assert isinstance(loader.sampler, HierarchicalSampler)
        assert loader.sampler.window_units == source.window_units
        assert sorted(loader) == sorted(chosen.tolist())


def test_empty_parts_have_no_units() -> None:
    """A join with an empty part, with or without units, has the units of the others."""
    units, records = MapDataset.source(Units()), MapDataset.range(5)
    for parts in ([units[:0], records], [records, units[:0], records[:0]], [units[:9], records[:0]]):
        joined = MapDataset.concatenate(parts)
        assert joined.unit_sizes is not None
        assert joined.unit_sizes.sum() == len(joined)
        assert sorted(load(joined, shuffle=True, seed=0, num_epochs=1)) == sorted(joined)
