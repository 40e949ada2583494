"""A MapDataset gives at each position what its plain oracle gives, however it is read."""

import pickle
from typing import Any

import cloudpickle
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream import DataLoader, IndexSampler, ReadOptions
from millstream.dataset import MapDataset
from millstream.dataset.node_source import node_of
from millstream.transforms import RandomMap
from support.draw.chains import Chain, CountedSource, Every, chains


@given(chains())
def test_every_position_has_the_element_of_the_oracle(chain: Chain) -> None:
    """`len(ds)`, and `ds[i]` in this epoch and the next ones, are those of the oracle; dense chains have no None."""
    count = 2 * chain.oracle.length + 3
    elements = [chain.dataset[position] for position in range(count)]

    assert len(chain.dataset) == chain.oracle.length
    assert elements == chain.oracle.first(count)
    if chain.is_dense:
        assert not node_of(chain.dataset).is_sparse
        assert None not in elements


@given(chains(), st.data())
def test_blocks_hold_what_single_reads_give(chain: Chain, data: st.DataObject) -> None:
    """`__getitems__` of any positions, or of blocks in a row, as a list or an array, gives what single reads give."""
    expected = chain.oracle.first(3 * chain.oracle.length)
    some = data.draw(st.lists(st.integers(0, len(expected) - 1), max_size=30))
    size = data.draw(st.sampled_from([1, 16, 17, 20]))

    assert list(chain.dataset.__getitems__(some)) == [expected[position] for position in some]
    blocks = [
        chain.dataset.__getitems__(np.arange(start, min(start + size, len(expected))))
        for start in range(0, len(expected), size)
    ]
    assert [element for block in blocks for element in block] == expected


@settings(max_examples=30)
@given(chains())
def test_a_pickled_dataset_is_the_same(chain: Chain) -> None:
    """A dataset that was read, pickled and unpickled has the same elements, fingerprint and text."""
    list(chain.dataset.__getitems__(np.arange(16)))
    copy: MapDataset[Any] = pickle.loads(cloudpickle.dumps(chain.dataset))

    assert list(copy.__getitems__(range(20))) == chain.oracle.first(20)
    assert repr(copy) == repr(chain.dataset)
    assert copy.fingerprint() == chain.dataset.fingerprint()


def test_a_dataset_of_a_users_class_is_pickled_after_it_was_read() -> None:
    """It refers to itself then, and comes back whole, alone and below others."""
    own = Every(MapDataset.range(40), 2)
    for dataset in (own, own.shuffle(seed=0)):
        expected = list(dataset.__getitems__(np.arange(16)))
        list(own.__getitems__(np.arange(16)))
        copy: MapDataset[Any] = pickle.loads(cloudpickle.dumps(dataset))
        assert list(copy.__getitems__(np.arange(16))) == expected


def draw_twice(element: Any, rng: np.random.Generator) -> Any:
    return element, rng.integers(1000), rng.random()


@settings(max_examples=50)
@given(st.integers(1, 40), st.integers(0, 2**64 - 1), st.integers(1, 3), st.booleans())
def test_order_and_draws_are_those_of_a_data_loader(count: int, seed: int, epochs: int, repeats_first: bool) -> None:
    """Shuffles and random maps, in a stream or before, have the order of IndexSampler and the draws of RandomMap."""
    sampler = IndexSampler(count, shuffle=True, seed=seed, num_epochs=epochs)
    loader = DataLoader(
        data_source=range(count), sampler=sampler, operations=[RandomMap(draw_twice), RandomMap(draw_twice)]
    )
    shuffled = MapDataset.range(count).shuffle(seed=seed)
    if repeats_first:
        shuffled = shuffled.repeat(epochs)
    drawn = shuffled.random_map(draw_twice, seed=seed).map(lambda element: element).seed(seed).random_map(draw_twice)

    dataset = drawn if repeats_first else drawn.repeat(epochs)
    stream = shuffled.random_map(draw_twice, seed=seed).repeat(1 if repeats_first else epochs).to_iter_dataset()

    assert [dataset[position] for position in range(len(dataset))] == list(loader)
    assert list(stream.map(lambda element: element).random_map(draw_twice, seed=seed)) == list(loader)


def test_a_block_is_read_from_each_source_in_one_call() -> None:
    """A block costs one batched read of each source it touches, batches and children too."""
    sources = [CountedSource(0, 1000), CountedSource(5000, 1000), CountedSource(9000, 1000)]
    first, second, third = (MapDataset.source(source).shuffle(seed=1) for source in sources)
    dataset = MapDataset.mix([first.map(abs), MapDataset.concatenate([second, third])]).batch(8)

    dataset.__getitems__(np.arange(16))
    dataset.__getitems__(np.arange(16, 32))

    assert [source.calls for source in sources] == [[64, 64], [64, 64], []]


def test_records_of_several_datasets_are_read_together() -> None:
    """If joined datasets change only the order, a source that they share is read once per block."""
    sources = [CountedSource(0, 1000), CountedSource(5000, 1000)]
    first, second = (MapDataset.source(source).shuffle(seed=1) for source in sources)
    joined = MapDataset.mix([first[:500], MapDataset.concatenate([second[1:], first[500:]])]).shuffle(seed=2)

    joined.__getitems__(np.arange(64))

    assert [len(source.calls) for source in sources] == [1, 1]
    assert sum(count for source in sources for count in source.calls) == 64


def test_a_stream_reads_its_source_in_calls() -> None:
    """A source with batched reads is asked for runs of records, also below a filter, where each element counts."""
    calls: list[int] = []

    class Source:
        def __len__(self) -> int:
            return 2000

        def __getitem__(self, key: int) -> int:
            raise AssertionError("a record was read alone")

        def __getitems__(self, keys: Any) -> list[int]:
            calls.append(len(keys))
            return list(keys)

    stream = MapDataset.source(Source()).map(abs).to_iter_dataset(ReadOptions(num_threads=0))
    assert len(list(stream.filter(bool).batch(4))) == 500
    assert sum(calls) == 2000
    assert len(calls) < 40


@pytest.mark.parametrize("num_threads", [0, 2])
def test_a_stream_computes_each_batch_once(num_threads: int) -> None:
    """No batch of a dataset in memory is computed again to be compared with what the trainer gets."""
    computed = []

    def counted(batch: Any) -> dict[str, Any]:
        computed.append(int(batch[0]))
        return {"numbers": batch}

    stream = MapDataset.range(12).batch(4).map(counted).to_iter_dataset(ReadOptions(num_threads))
    assert [batch["numbers"].tolist()[0] for batch in stream] == [0, 4, 8]
    assert sorted(computed) == [0, 4, 8]
