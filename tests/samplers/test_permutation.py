"""The permutation is a bijection for every n, and as good a shuffle as numpy's own.

Every statistical law is put to shuffles of three kinds: those of consecutive epochs, those of consecutive seeds, and
those of numpy, which show that the test itself is sound. All seeds are fixed.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest
import scipy
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from millstream.samplers.permutation import permute, permute_one

Ints = NDArray[np.int64]
Kind = Literal["epochs", "seeds", "numpy"]

SIGNIFICANCE = 1e-4
KINDS: tuple[Kind, ...] = ("epochs", "seeds", "numpy")
COUNTS = {"epochs": 8_000, "seeds": 600, "numpy": 8_000}
WORD = st.integers(0, 2**64 - 1)
LARGE = (
    *(2**power + step for power in (16, 17, 20, 31, 32, 33, 40, 41, 53, 62) for step in (-1, 0, 1)),
    2**63 - 1,
    2**63,
    10**9,
    10**9 + 7,
    10**12,
    10**18,
    65_537**2,
    3_037_000_499**2,
)


def offsets(start: int, stop: int) -> Ints:
    return np.arange(stop - start) + start


@functools.cache
def shuffles(kind: Kind, n: int) -> Ints:
    """Returns many permutations of n, shape (count, n)."""
    count = COUNTS[kind]
    if kind == "numpy":
        return np.random.default_rng(n).permuted(np.tile(np.arange(n), (count, 1)), axis=1)
    numbers = np.repeat(np.arange(count, dtype=np.uint64), n)
    seeds, epochs = (7, numbers) if kind == "epochs" else (numbers, 3)
    return permute(np.tile(offsets(0, n), count), n, seeds, epochs).reshape(count, n)


def bins_p(values: Ints, bins: int) -> float:
    return float(scipy.stats.chisquare(np.bincount(values, minlength=bins)).pvalue)


def poisson_p(values: Ints) -> float:
    """Returns the p-value of values being Poisson counts of mean 1."""
    observed = np.bincount(np.minimum(values, 5), minlength=6)
    expected = scipy.stats.poisson.pmf(np.arange(6), 1)
    expected[5] = scipy.stats.poisson.sf(4, 1)
    return float(scipy.stats.chisquare(observed, expected * len(values)).pvalue)


def odd(permutations: Ints) -> Ints:
    """Returns 1 for each odd permutation, 0 for each even one, by the number of its inversions."""
    n = permutations.shape[1]
    inversions = sum((permutations[:, i : i + 1] > permutations[:, i + 1 :]).sum(axis=1) for i in range(n))
    return np.asarray(inversions) % 2


def positions_p(permutations: Ints) -> float:
    """Returns the p-value of every element landing everywhere equally often.

    The counts' rows and columns have fixed sums, so that they have (n - 1)**2 degrees of freedom.
    """
    count, n = permutations.shape
    cells = np.bincount((permutations + np.arange(n) * n).ravel(), minlength=n * n)
    statistic = ((cells - count / n) ** 2).sum() * (n - 1) / count
    return float(scipy.stats.chi2.sf(statistic, (n - 1) ** 2))


def which_p(permutations: Ints) -> float:
    """Returns the p-value of all n! permutations coming equally often."""
    n = permutations.shape[1]
    place_values = n ** np.arange(n)
    every = np.sort(np.array(list(itertools.permutations(range(n)))) @ place_values)
    return bins_p(np.searchsorted(every, permutations @ place_values), len(every))


def differences_p(permutations: Ints) -> float:
    """Returns the p-value of two neighbours landing at any distance, modulo n, equally often."""
    n = permutations.shape[1]
    return bins_p((permutations[:, n // 2] - permutations[:, n // 2 - 1]) % n - 1, n - 1)


def pair_p(permutations: Ints) -> float:
    """Returns the p-value of the first two elements landing on any pair of positions equally often."""
    n = permutations.shape[1]
    first, second = permutations[:, 0], permutations[:, 1]
    return bins_p(first * (n - 1) + second - (second > first), n * (n - 1))


def order_p(permutations: Ints) -> float:
    """Returns the p-value of five scattered elements coming in any order equally often."""
    scattered = np.linspace(0, permutations.shape[1] - 1, 5).astype(int)
    return which_p(np.argsort(permutations[:, scattered], axis=1))


def odd_p(permutations: Ints) -> float:
    return bins_p(odd(permutations), 2)


def fixed_p(permutations: Ints) -> float:
    """Returns the p-value of the number of elements that stay in place being Poisson of mean 1."""
    return poisson_p((permutations == np.arange(permutations.shape[1])).sum(axis=1))


def neighbours_p(permutations: Ints) -> float:
    """Returns the p-value of neighbouring epochs or seeds agreeing in a Poisson number of positions of mean 1."""
    return poisson_p((permutations[::2] == permutations[1::2]).sum(axis=1))


LAWS: dict[Callable[[Ints], float], tuple[int, ...]] = {
    positions_p: (2, 3, 4, 5, 7, 10, 16, 17, 25, 31, 32, 33, 64, 100),
    which_p: (2, 3, 4, 5),
    differences_p: (3, 4, 5, 7, 10, 16, 17, 25, 31, 32, 33, 64, 100),
    pair_p: (3, 4, 5, 7, 10),
    order_p: (5, 10, 16, 25, 33, 64, 100),
    odd_p: (2, 4, 5, 10, 16, 17, 25, 32, 64),
    fixed_p: (16, 25, 33, 64, 100),
    neighbours_p: (16, 25, 33, 64, 100),
}


@settings(max_examples=500)
@given(n=st.integers(1, 300) | st.sampled_from(LARGE) | st.integers(1, 2**63), seed=WORD, epoch=WORD, data=st.data())
def test_the_way_back_from_a_key_leads_to_its_offset(n: int, seed: int, epoch: int, data: st.DataObject) -> None:
    """So no two offsets of any n have one key; in Python's integers as in arrays, in one epoch or in one for each."""
    asked = data.draw(st.lists(st.integers(0, n - 1), min_size=1, max_size=20))
    some = np.array(asked, dtype=np.int64)
    for epochs in (epoch, np.array([data.draw(WORD) for _ in asked], dtype=np.uint64)):
        landed = permute(some, n, seed, epochs)
        each = [epoch] * len(asked) if isinstance(epochs, int) else epochs.tolist()
        assert landed.tolist() == [permute_one(offset, n, seed, own) for offset, own in zip(asked, each, strict=True)]
        assert 0 <= landed.min() <= landed.max() < n
        assert permute(landed, n, seed, epochs, inverse=True).tolist() == asked == some.tolist()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
def test_small_shuffles_are_as_random_as_those_of_numpy(law: Callable[[Ints], float], kind: Kind) -> None:
    """Shuffles of consecutive epochs and of consecutive seeds pass the tests that numpy's shuffles pass."""
    p_values = {n: law(shuffles(kind, n)) for n in LAWS[law]}
    assert {n: p for n, p in p_values.items() if p < SIGNIFICANCE} == {}


@pytest.mark.parametrize("n", [6, 7])
def test_all_permutations_of_six_and_seven_come_equally_often(n: int) -> None:
    """Over 100,000 consecutive epochs, each of the n! permutations comes equally often."""
    count = 100_000
    epochs = np.repeat(np.arange(count, dtype=np.uint64), n)
    assert which_p(permute(np.tile(offsets(0, n), count), n, 5, epochs).reshape(count, n)) > SIGNIFICANCE


@pytest.mark.parametrize("n", [1 << 17, 10**6, 10**9, 2**40 + 1, 2**63 - 25])
def test_a_window_of_a_large_shuffle_is_random(n: int) -> None:
    """Images of 2**16 neighbouring offsets, and differences between epochs and seeds, are uniform."""
    bins, width = 64, -(-n // 64)
    window = offsets(n // 3, n // 3 + (1 << 16))
    here, next_epoch, next_seed = (permute(window, n, seed, epoch) for seed, epoch in ((1, 1), (1, 2), (2, 1)))
    between_neighbours = here[::2] - here[1::2]
    expected = np.array([min(width, n - width * i) / n for i in range(bins)])
    for values in (here, between_neighbours, here - next_epoch, here - next_seed):
        counts = np.bincount((values % n) // width, minlength=bins)
        assert scipy.stats.chisquare(counts, expected * len(values)).pvalue > SIGNIFICANCE
    assert abs(scipy.stats.pearsonr(np.arange(window.size), here.astype(float)).statistic) < 4 / 256


def test_is_a_bijection() -> None:
    """The offsets land on 0 … n - 1, each once, for every n to 2048, and for primes, squares and powers of two."""
    sizes = [*range(1, 2049), 2**16 + 1, 2**17 - 1, 2**18, 317**2, 99_991, 300_000]
    wrong = [n for n in sizes if not np.array_equal(np.sort(permute(offsets(0, n), n, n, 1)), np.arange(n))]
    assert wrong == []


@settings(deadline=None, max_examples=100)
@given(
    sets=st.lists(st.tuples(st.integers(1, 300) | st.sampled_from(LARGE), WORD, WORD), min_size=1, max_size=30),
    data=st.data(),
)
def test_sets_enciphered_together_are_permuted_as_each_alone(
    sets: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """Arrays of sizes, seeds and epochs give each offset its own set's image, and the inverse leads back.

    Neighbours may be of one set, or of one epoch of two sets.
    """
    sets = [each for each in sets for _ in range(data.draw(st.integers(1, 3)))]
    asked = [data.draw(st.integers(0, size - 1)) for size, _, _ in sets]
    sizes, seeds, epochs = np.array(sets, dtype=np.uint64).T
    landed = permute(np.array(asked), sizes.view(np.int64), seeds, epochs)
    assert landed.tolist() == [permute_one(offset, *each) for offset, each in zip(asked, sets, strict=True)]
    assert permute(landed, sizes.view(np.int64), seeds, epochs, inverse=True).tolist() == asked


@settings(deadline=None, max_examples=150)
@given(
    n=st.integers(1, 1 << 12) | st.integers(1 << 12, 1 << 25) | st.sampled_from(LARGE),
    length=st.integers(1, 5000),
    start=st.integers(0, 2**63 - 1),
    seed=WORD,
    epoch=WORD,
)
def test_how_many_are_asked_for_does_not_matter(n: int, length: int, start: int, seed: int, epoch: int) -> None:
    """A long window has the images that each offset has alone, and that short windows have."""
    window = ((np.arange(length, dtype=np.uint64) + np.uint64(start % n)) % np.uint64(n)).view(np.int64)
    whole = permute(window, n, seed, epoch)
    assert whole.tolist() == np.concatenate([permute(part, n, seed, epoch) for part in np.split(window, [7])]).tolist()
    some = [*range(0, length, 97), length - 1]
    assert whole[some].tolist() == [int(permute(window[place : place + 1], n, seed, epoch)[0]) for place in some]


def test_neighbouring_seeds_and_epochs_share_nothing() -> None:
    """All permutations of 8 x 8 seeds and epochs differ, and two agree in about one position: none is a shift."""
    grid = [permute(offsets(0, 1000), 1000, seed, epoch) for seed in range(8) for epoch in range(8)]
    agreements = [int((a == b).sum()) for a, b in itertools.combinations(grid, 2)]
    assert max(agreements) < 10
    assert abs(sum(agreements) - len(agreements)) < 5 * len(agreements) ** 0.5


def test_the_shuffle_stays_the_same_across_releases() -> None:
    """The keys of a few offsets are those on record: a saved position must find the same records forever."""
    assert permute(offsets(0, 8), 8, 0, 0).tolist() == [2, 4, 5, 6, 0, 7, 3, 1]
    assert permute(offsets(0, 4), 10**9, 2**64 - 1, 5).tolist() == [669448169, 288440471, 280828600, 398942516]
    assert permute(offsets(0, 3), 2**63, 1, 2**64 - 1).tolist() == [
        1485560122907767540,
        8114412039528426091,
        8396547697181777889,
    ]
