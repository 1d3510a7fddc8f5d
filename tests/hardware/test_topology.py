"""Shapes against the lists other tools hold: MaxText's accelerator map and the API's types."""

import contextlib
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.errors import SliceError
from tpukit.hardware import Slice, get_chip, list_chips, list_slices
from tpukit.hardware.topology import format_shape, parse_shape

NAMED = [chip for chip in list_chips() if chip.rules]


@pytest.mark.parametrize(
    ("name", "shape"),
    # AI-Hypercomputer/maxtext, accelerator_to_spec_map.py
    [
        ("v4-16", "2x2x2"),
        ("v4-64", "2x4x4"),
        ("v4-384", "4x4x12"),
        ("v4-512", "4x8x8"),
        ("v4-1536", "8x8x12"),
        ("v4-2048", "8x8x16"),
        ("v4-4096", "8x16x16"),
        ("v5p-640", "4x4x20"),
        ("v5p-3072", "8x12x16"),
        ("v5p-12288", "16x16x24"),
        ("v6e-32", "4x8"),
        ("v6e-128", "8x16"),
    ],
)
def test_default_shapes_are_those_of_maxtext(name, shape):
    assert format_shape(Slice.parse(name).topology) == shape


@pytest.mark.parametrize(
    ("chips", "shape"),
    [
        (576, "4x12x12"),
        (3456, "12x12x24"),
        (5760, "12x20x24"),
        (6912, "12x24x24"),
        (8192, "16x16x32"),
        (8960, "16x20x28"),
        (9216, "16x24x24"),
    ],
)
def test_large_default_shapes_are_those_of_maxtext(chips, shape):
    assert format_shape(Slice.of("7x", chips=chips).topology) == shape


def test_sizes_of_v5p_are_the_types_the_api_lists():
    """All whole cubes up to 96, but for six primes whose only shape is too long; and four small."""
    cubes = set(range(1, 97)) - {67, 71, 73, 79, 83, 89}
    expected = {4, 8, 16, 32} | {64 * number for number in cubes}
    assert {one.chips for one in list_slices("v5p")} == expected


@pytest.mark.parametrize("name", ["v4", "v5p", "7x"])
def test_the_longest_axis_has_256_chips(name):
    rules = get_chip(name).rules
    assert rules.is_legal((4, 4, 256))
    assert max(max(shape) for shape in rules.shapes) == 256


@pytest.mark.parametrize(
    ("name", "wraps"),
    [
        ("v5e:8x16", (False, True)),
        ("v5e:16x16", (True, True)),
        ("v6e:8x8", (False, False)),
        ("v5p:2x4x4", (False, False, False)),
        ("v5p:4x4x8", (True, True, True)),
        ("tpu7x:4x4x4", (True, True, True)),
        ("v3-2048", (True, True)),
        ("v3-512", (False, False)),
    ],
)
def test_wraps(name, wraps):
    assert Slice.parse(name).wraps == wraps


@pytest.mark.parametrize(
    ("name", "links"),
    [("v6e-1", None), ("v6e-4", 2), ("v6e-8", 2), ("v6e:8x16", 16), ("v5p:2x2x4", 4)],
)
def test_bisection_cuts_the_fewest_links(name, links):
    one = Slice.parse(name)
    expected = None if links is None else links * one.chip.ici_link_gbps.value
    assert one.bisection_gbps.value == expected


@st.composite
def legal(draw):
    chip = draw(st.sampled_from(NAMED))
    return chip.rules, draw(st.sampled_from(chip.rules.shapes))


@given(legal().filter(lambda drawn: math.prod(drawn[1]) > 1))
def test_bisection_is_the_smallest_cut_found_by_counting(rule_and_shape):
    """Count the links between the halves of every straight cut, chip by chip."""
    rules, shape = rule_and_shape
    places = np.indices(shape)
    cuts = []
    for axis, length in enumerate(shape):
        if length == 1:
            continue
        in_first_half = places[axis] < length // 2
        crossing = 0
        for along, wrapped in enumerate(rules.wraps(shape)):
            beyond = np.roll(in_first_half, -1, along)  # the half that each chip's next is in
            differs = in_first_half != beyond
            if not wrapped:  # the last chip of a line has no next
                differs = np.delete(differs, -1, along)
            crossing += int(differs.sum())
        cuts.append(crossing)
    assert rules.bisection_links(shape) == min(cuts)


@given(legal())
def test_hosts_tile_every_legal_shape(rule_and_shape):
    rules, shape = rule_and_shape
    bounds = rules.bounds_of_host(shape)
    padded = (*shape, 1)[:3]
    assert all(length % bound == 0 for length, bound in zip(padded, bounds, strict=True))
    assert rules.hosts(shape) * math.prod(bounds) == math.prod(shape)
    assert rules.is_legal(shape)
    assert list(shape) == sorted(shape) or shape == (2, 2, 1)


@given(st.lists(st.integers(1, 9999), min_size=2, max_size=3))
def test_shapes_round_trip(lengths):
    assert parse_shape(format_shape(tuple(lengths))) == tuple(lengths)
    assert parse_shape(" X ".join(map(str, lengths))) == tuple(lengths)


@given(st.text(max_size=20))
def test_any_text_is_a_shape_or_a_slice_error(text):
    with contextlib.suppress(SliceError):
        assert all(length > 0 for length in parse_shape(text))


def test_nearest_counts_are_legal_and_ordered():
    rules = get_chip("v5p").rules
    assert rules.nearest_counts(50) == [8, 16, 32, 64]
    assert rules.nearest_counts(10**6)[-1] == 6144
