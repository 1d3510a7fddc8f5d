"""The shuffle is a permutation, differs by seed and epoch, and spreads evenly."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tpukit.training.data.indexed import permute


@given(size=st.integers(1, 3000), seed=st.integers(0, 2**40), epoch=st.integers(0, 50))
def test_every_index_goes_to_one_place(size, seed, epoch):
    found = permute(np.arange(size), size=size, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(found), np.arange(size))


@given(size=st.integers(1, 2**62), seed=st.integers(0, 2**32), data=st.data())
def test_sizes_past_32_bits_stay_inside_and_apart(size, seed, data):
    some = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=20, unique=True))
    found = permute(np.array(some), size=size, seed=seed)
    assert found.min() >= 0
    assert found.max() < size
    assert len(set(found.tolist())) == len(some)


def test_a_part_is_the_same_part_of_the_whole():
    whole = permute(np.arange(1000), size=1000, seed=3)
    assert np.array_equal(permute(np.array([999, 5]), size=1000, seed=3), whole[[999, 5]])


def test_the_order_stays_what_it_was():
    """A checkpoint of today is taken up by tomorrow's tpukit; if this must change, raise ORDER."""
    found = permute(np.arange(6), size=1_000_000, seed=7, epoch=2)
    assert found.tolist() == [593788, 261314, 970357, 981663, 557806, 97378]


def test_seed_and_epoch_change_the_order():
    orders = {
        tuple(permute(np.arange(100), size=100, seed=seed, epoch=epoch))
        for seed in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 9


def test_it_spreads_as_a_random_order_does():
    size = 200_000
    found = permute(np.arange(size), size=size, seed=1)
    # Where from against where to, and neighbours against each other: 100 fields of 2000 each.
    for first, second in ((np.arange(size), found), (found[:-1], found[1:])):
        fields, _, _ = np.histogram2d(first, second, bins=10)
        assert np.abs(fields - 2000).max() < 5 * np.sqrt(2000)
