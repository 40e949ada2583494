"""Randomness is a pure function of seed, epoch, index and operation, and of nothing else."""

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.core import philox_state
from millstream.core.philox_state import at_streams
from millstream.core.randomness import generator, generators, generators_from
from millstream.samplers import IndexSampler
from millstream.transforms import Batch, Filter, Map, RandomMap, Transformation
from support.laws import inline_loader

WORD = 1 << 64
words = st.one_of(st.integers(0, 3), st.integers(WORD - 3, WORD - 1), st.integers(0, WORD - 1))
streams = st.tuples(words, words, words, words)


def philox(key: tuple[int, int], counter: Sequence[int]) -> list[int]:
    """Returns one block of Philox4x64-10, written from its paper: four 64-bit words."""
    (a, b), (first, second, third, fourth) = key, counter
    for _ in range(10):
        high, low = divmod(0xD2E7470EE14C6C93 * first, WORD)
        other_high, other_low = divmod(0xCA5A826395121157 * third, WORD)
        first, second, third, fourth = other_high ^ second ^ a, other_low, high ^ fourth ^ b, low
        a, b = (a + 0x9E3779B97F4A7C15) % WORD, (b + 0xBB67AE8584CAA73B) % WORD
    return [first, second, third, fourth]


def draw_words(rng: np.random.Generator, count: int = 8) -> list[int]:
    return [int(word) for word in rng.bit_generator.random_raw(count)]


@given(streams)
@settings(deadline=None, max_examples=40)
def test_the_definition_is_philox_of_seed_index_epoch_operation(stream: tuple[int, int, int, int]) -> None:
    """A stream is the blocks of Philox4x64-10 at key (seed, index) and counters (1, 0, epoch, operation), (2, …), ….

    So a state saved today draws the same numbers with any later numpy; a generator that is reused draws them as well.
    """
    seed, epoch, index, operation = stream
    expected = [word for block in (1, 2) for word in philox((seed, index), (block, 0, epoch, operation))]

    (reused,) = generators(seed, np.array([epoch], np.uint64), np.array([index], np.uint64), operation)

    assert draw_words(generator(seed, epoch, index, operation)) == draw_words(reused) == expected


def test_streams_of_one_call_do_not_disturb_another() -> None:
    """Two runs of generators at once, as two threads have them, are independent objects."""
    one, other = (generators(0, np.array([0, 0]), np.array([0, 1])) for _ in range(2))
    drawn = [draw_words(next(rngs)) for rngs in (one, other, one, other)]

    assert drawn[:2] == [drawn[0]] * 2
    assert drawn[2:] == [draw_words(generator(0, 0, 1))] * 2


def test_numbers_of_pairs_must_agree() -> None:
    """An epoch without an index is an error, not a stream left out."""
    with pytest.raises(ValueError, match="broadcast"):
        list(generators(0, np.array([0, 0, 0]), np.array([0, 1])))


@given(words, st.lists(words, max_size=5), words)
@settings(deadline=None, max_examples=40)
def test_generators_from_parents_are_keyed_by_them(seed: int, indices: list[int], operation: int) -> None:
    """A custom sampler's generator gives the key: two words of it; index and operation stand in the counter."""
    parents = [np.random.default_rng([seed, index]) for index in indices]
    derived = [draw_words(rng) for rng in generators_from(parents, indices, operation)]
    keys = [np.random.default_rng([seed, index]).integers(0, WORD, size=2, dtype=np.uint64) for index in indices]

    assert derived == [
        [word for block in (1, 2) for word in philox((int(key[0]), int(key[1])), (block, 0, index, operation))]
        for key, index in zip(keys, indices, strict=True)
    ]


def add_draw(element: list[int], rng: np.random.Generator) -> list[int]:
    return [*element, int(rng.integers(WORD, dtype=np.uint64))]


def draws_of(operations: Sequence[Transformation], seed: int = 3) -> list[list[int]]:
    """Returns the elements of three shuffled epochs of five empty lists."""
    return list(inline_loader([[]] * 5, IndexSampler(5, shuffle=True, num_epochs=3, seed=seed), *operations))


@given(
    st.lists(st.sampled_from(["random", "map", "filter"]), max_size=3),
    st.lists(st.sampled_from(["random", "map", "filter"]), max_size=3),
)
@settings(deadline=None, max_examples=40)
def test_adding_operations_leaves_the_draws_of_those_before(kinds: list[str], added: list[str]) -> None:
    """More operations after a RandomMap, random ones too, do not change what it draws."""
    make: dict[str, Callable[[], Transformation]] = {
        "random": lambda: RandomMap(add_draw),
        "map": lambda: Map(list),
        "filter": lambda: Filter(lambda element: len(element) >= 0),
    }
    before, after = ([make[kind]() for kind in some] for some in (kinds, added))
    longer = draws_of([*before, *after])

    assert draws_of(before) == [element[: kinds.count("random")] for element in longer]
    assert draws_of([Map(list), *before]) == draws_of(before)


def test_no_two_draws_of_a_pipeline_are_equal() -> None:
    """Two random operations over three epochs draw 30 different numbers, and another seed 30 others."""
    elements = [element for seed in (0, 1) for element in draws_of([RandomMap(add_draw)] * 2, seed)]

    assert len({number for element in elements for number in element}) == 60


def test_a_random_operation_on_batches_draws_once_a_batch() -> None:
    """After a Batch, the stream is that of the batch's first position."""

    def shift(batch: Any, rng: np.random.Generator) -> Any:
        return batch * 0 + draw_words(rng, 1)[0]

    sampler = IndexSampler(6, num_epochs=2, seed=5)
    loader = inline_loader(np.zeros(6, dtype=np.uint64), sampler, Batch(4), RandomMap(shift))

    assert [batch.tolist() for batch in loader] == [
        [draw_words(generator(5, position // 6, position), 1)[0]] * 4 for position in (0, 4, 8)
    ]


@pytest.mark.parametrize(
    "use",
    [
        lambda rng: rng.spawn(2),
        lambda rng: rng.bit_generator.spawn(1),
        lambda rng: rng.bit_generator.seed_seq.spawn(1),
        lambda rng: np.random.default_rng(rng.bit_generator.seed_seq),
        lambda rng: copy.deepcopy(rng).spawn(1),
    ],
    ids=["spawn", "bit generator", "seed", "made of the seed", "copy"],
)
def test_children_of_a_generator_are_refused(use: Callable[[np.random.Generator], object]) -> None:
    """A stream has no seed: what would be made of it would differ from run to run. The error says what to do."""
    for rng in (
        generator(1, 2, 3),
        next(generators(1, np.array([2]), np.array([3]))),
        next(generators_from([np.random.default_rng(0)], [3])),
    ):
        with pytest.raises(TypeError, match="Draw a seed from it"):
            use(rng)
    assert np.random.default_rng(rng.integers(2**63)).random() == pytest.approx(0.5, abs=0.5)


@pytest.mark.parametrize(
    "keep",
    [
        lambda rng: rng,
        lambda rng: rng.random,
        lambda rng: rng.bit_generator,
        lambda rng: rng.bit_generator.random_raw,
    ],
    ids=["generator", "method", "bit generator", "its method"],
)
def test_generators_that_are_kept_are_not_used_again(keep: Callable[[np.random.Generator], object]) -> None:
    """A generator that a function has kept stays as it was when later ones are used."""
    iterator = generators(7, np.array([2]), np.array([3]))
    kept = next(iterator)
    used, kept_part = id(kept.bit_generator), keep(kept)
    del kept, iterator
    for row in range(3):
        for rng in generators(8, np.array([row]), np.array([row])):
            assert id(rng.bit_generator) != used
    assert kept_part is not None


def test_iterators_of_generators_share_nothing() -> None:
    """Generators that are in use at the same time, in one thread or in several, have their own streams."""
    rows = np.arange(50)

    def drawn(seed: int) -> list[float]:
        return [rng.random() for rng in generators(seed, rows, rows)]

    expected = [[generator(seed, row, row).random() for row in rows.tolist()] for seed in range(4)]
    together = zip(*(generators(seed, rows, rows) for seed in range(4)), strict=True)
    assert [[rng.random() for rng in of_row] for of_row in together] == [
        list(row) for row in zip(*expected, strict=True)
    ]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(drawn, [*range(4)] * 50)) == expected * 50


def test_a_generator_that_nobody_keeps_is_used_again() -> None:
    """The next batch has the same object."""
    first = {id(rng) for rng in generators(7, np.array([2]), np.array([3]))}
    assert {id(rng) for rng in generators(7, np.array([3]), np.array([4]))} == first


@pytest.mark.parametrize("in_memory", [True, False])
@given(
    rows=st.lists(st.lists(words, min_size=6, max_size=6), max_size=4),
    drawn=st.lists(st.sampled_from([np.uint8, np.uint32, np.uint64]), max_size=5),
)
@settings(deadline=None, max_examples=100)
def test_a_start_leaves_nothing_of_what_was(in_memory: bool, rows: list[list[int]], drawn: list[type]) -> None:
    """Key and counter are those that were asked for, and no buffered word is left of earlier draws."""
    used = np.random.Generator(np.random.Philox(7))
    starts = np.array(rows, np.uint64).reshape(-1, 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(philox_state, "_layout_is_known", lambda: in_memory)
        for row, rng in zip(starts, at_streams(used, starts), strict=True):
            new = np.random.Philox(key=row[:2], counter=row[2:])
            assert rng is used
            assert repr(used.bit_generator.state) == repr(new.state)
            for dtype in drawn:
                assert rng.integers(0, 100, dtype=dtype) == np.random.Generator(new).integers(0, 100, dtype=dtype)
            assert used.bit_generator.random_raw(9).tolist() == new.random_raw(9).tolist()


def test_the_layout_of_this_numpy_is_known() -> None:
    """If this fails, NumPy's memory layout has changed: results stay correct, and random operations take longer."""
    assert philox_state._layout_is_known()
    assert philox_state._memory_of(np.random.Philox(0)) is not None


def test_unknown_memory_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the pointers point elsewhere, NumPy itself sets the state."""
    monkeypatch.setattr(philox_state, "_address_offset", lambda: 0)
    # Not asked here: the answer, which is kept, would be that of this test.
    monkeypatch.setattr(philox_state, "_layout_is_known", lambda: True)
    used, new = np.random.Philox(7), np.random.Philox(key=np.array([1, 2]), counter=np.array([3, 4, 5, 6]))
    assert philox_state._memory_of(used) is None
    list(at_streams(np.random.Generator(used), np.array([[1, 2, 3, 4, 5, 6]], np.uint64)))
    assert repr(used.state) == repr(new.state)
